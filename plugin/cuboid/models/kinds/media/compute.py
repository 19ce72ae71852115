"""The method of a model's class that computes features of a medium, and what it needs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from cuboid.models.architectures.media import Medium
from cuboid.models.kinds.probe_rows import CannotProbe


def parameters_of(medium: Medium, cls: Any, base: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of the method, of a model's class and that of its base model.

    Not of the method that is mixed into a sharded model's class, which passes on whatever it is given.
    """
    computing = (vars(one)[medium.compute] for one in (*base.__mro__, cls) if medium.compute in vars(one))
    known = (inspect.signature(one).parameters for one in computing)
    return next(parameters for parameters in known if medium.main in parameters)


def needed_of(medium: Medium, parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """Those of its parameters that have no default.

    Raises:
        CannotProbe: it needs what there is no rule for.
    """
    needed = {name for name, x in parameters.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD}
    others = needed - {"self", *medium.tensors}
    if others:
        raise CannotProbe(f"of {medium.nouns}, it needs {', '.join(sorted(others))}, for which there is no rule")
    return needed
