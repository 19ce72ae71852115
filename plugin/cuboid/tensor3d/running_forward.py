"""Whether a sharded model's forward runs, in which its modules are given this rank's parts of activations.

Called by itself, a module would take a whole activation for such a part, and where shapes agree nothing would tell.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token

from cuboid.distributed.mesh import Mesh
from cuboid.errors import UnsupportedModelError
from cuboid.tensor3d.sharding.sharded_param import is_recomputing

_runs: ContextVar[bool] = ContextVar("cuboid_forward_runs", default=False)

#: Whether this thread runs a sharded model's forward, or a unit of a stage. Every module asks in each forward, with no
#: frame of Python.
forward_runs: Callable[[], bool] = _runs.get
#: Begin a forward, with True, and end it, with the token that this returns.
begin_forward: Callable[[bool], Token[bool]] = _runs.set
end_forward: Callable[[Token[bool]], None] = _runs.reset


def check_called_inside(module: object, mesh: Mesh) -> None:
    """Where :func:`forward_runs` is false, check that a module of a model on ``mesh`` may be called all the same.

    Raises:
        UnsupportedModelError: it was called by itself.
    """
    # Checkpointing may recompute a forward in a thread of autograd's.
    if mesh.shape.size == 1 or is_recomputing():
        return
    raise UnsupportedModelError(
        f"a {type(module).__name__} of a sharded model was called by itself, but takes and returns a rank's part of a "
        "micro-batch; call the model, its base model (model.base_model) or what model.get_output_embeddings() returns. "
        "For what is inside, ask the model for output_hidden_states, or register a hook that cuboid.local_hook marks"
    )
