"""Whether a model computes the ordinary loss of its kind, which can be summed in parts, or one put in its place.

transformers looks a model's ``loss_function`` up at each forward: it may be set on the model or on its class, and
``LOSS_MAPPING`` or a function that the ordinary losses call may be replaced. So this is decided at each forward, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from cuboid.errors import UnsupportedModelError


def own_loss_of(model: PreTrainedModel, ordinary: str | None) -> Callable[..., Any] | None:
    """The function that computes a model's loss, if it isn't the ordinary one of the model's kind; else None.

    Args:
        model: a model of transformers.
        ordinary: the name of that function; None if the kind has none.
    """
    if ordinary is None:
        return None
    parts: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (loss_utils, ordinary, model.loss_function),
        # The ordinary losses call these, which scripts and libraries replace, too.
        (loss_utils, "fixed_cross_entropy", loss_utils.fixed_cross_entropy),
        (nn.functional, "cross_entropy", nn.functional.cross_entropy),
    )
    for module, name, function in parts:
        # Whether its code is what the module's file has under that name: a replaced one may have the name, too.
        code = getattr(function, "__code__", None)
        if code is None or (code.co_filename, code.co_name) != (module.__file__, name):
            return function
    return None


def check_loss_in_pipeline(model: PreTrainedModel, ordinary: str | None) -> None:
    """Check that a model that is cut into stages computes the ordinary loss of its kind; see :func:`own_loss_of`.

    Raises:
        UnsupportedModelError: it doesn't.
    """
    own_loss = own_loss_of(model, ordinary)
    if own_loss is not None:
        raise own_loss_refused(own_loss)


def own_loss_refused(own_loss: Any) -> UnsupportedModelError:
    """The error for a loss function of one's own in a pipeline."""
    name = getattr(own_loss, "__qualname__", type(own_loss).__qualname__)
    return UnsupportedModelError(
        f"loss_function is {getattr(own_loss, '__module__', None)}.{name}, but a pipeline has rules for transformers' "
        "own losses only: it sums a loss over segments and micro-batches, and divides by the number of all labels. "
        "Leave the pipeline section out: on a mesh (tensor_parallel.mesh), a loss function of your own gets whole "
        "logits"
    )
