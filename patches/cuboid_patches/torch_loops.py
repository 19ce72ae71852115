"""Patches of torch that make its own training utilities right for sharded models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from cuboid.integrations.gradient_norm import check_reduced, norm_over_ranks
from cuboid.integrations.own_loop import check_initializer, check_step, found_on_any_rank, replicas_of
from cuboid.integrations.script_loss import check_backward
from cuboid.models.autograd_graph import IS_OUTPUT
from cuboid.optim.elementwise import CHECKED
from cuboid.optim.piecewise_step import MAY_REPEAT
from cuboid.tensor3d.sharding.refused_draws import INITIALIZERS
from cuboid_patches.base import Patch


def _total_norm(original: Any) -> Any:
    @functools.wraps(original)
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm = norm_over_ranks(gradients, float(norm_type), lambda x: original(x, norm_type, foreach=foreach))
        if norm is None:
            norm = original(gradients, norm_type, error_if_nonfinite, foreach)
        elif error_if_nonfinite and not norm.isfinite():
            # Torch's own words, of a norm that isn't finite.
            original([norm], norm_type, error_if_nonfinite=True)
        return norm

    return get_total_norm


def _checking_clip(original: Any) -> Any:
    @functools.wraps(original)
    def clip_grad_value_(
        parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
    ) -> None:
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check_reduced([x.grad for x in clipped if x.grad is not None], "clip_grad_value_ of torch")
        original(clipped, clip_value, foreach)

    return clip_grad_value_


def _checking_backward(original: Any) -> Any:
    @functools.wraps(original)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        # The usual case, without a call: the loss is a model's own, or an accumulated gradient is a parameter's.
        node = getattr(tensors, "grad_fn", tensors)
        if inputs is not None or (node is not None and (node is tensors or IS_OUTPUT not in node.metadata)):
            check_backward(tensors, inputs)
        original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    return backward


def _checking_grad(original: Any) -> Any:
    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        check_backward(outputs, inputs)
        return original(outputs, inputs, *args, **kwargs)

    return grad


def _averaging_replicas(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        group = replicas_of(bound.arguments["module"], bound.arguments.get("process_group"))
        if group is not None:
            bound.arguments["process_group"] = group
        original(*bound.args, **bound.kwargs)

    return init


def _unscale(original: Any) -> Any:
    @functools.wraps(original)
    def _unscale_grads_(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found_inf: dict[torch.device, torch.Tensor] = original(self, optimizer, *args, **kwargs)
        found_on_any_rank(optimizer, found_inf)
        return found_inf

    return _unscale_grads_


def _checking_initializer(original: Any) -> Any:
    @functools.wraps(original)
    def initializer(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Models are made on the meta device, with a call for each parameter.
        if not tensor.is_meta:
            check_initializer(original.__name__, tensor)
        return original(tensor, *args, **kwargs)

    return initializer


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # Every step of every optimizer comes here.
    if optimizer not in CHECKED:
        check_step(optimizer)


setattr(_check_step, MAY_REPEAT, True)


class StepCheck:
    """A hook of torch before the steps of all optimizers, which looks at each optimizer once."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None

    def apply(self) -> None:
        """Register the hook, unless it is."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(_check_step)

    def revert(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


PATCHES: list[Patch | StepCheck] = [
    StepCheck(),
    Patch(
        # Tensor.backward looks it up when it is called.
        target="torch.autograd:backward",
        package="torch",
        reason="refuse a loss that is computed from shards as if they were whole parameters",
        parameters=("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs"),
        replace=_checking_backward,
    ),
    Patch(
        target="torch.autograd:grad",
        package="torch",
        reason="refuse the same, and gradients of what later layers of a sharded model haven't gone on from",
        parameters=("outputs", "inputs"),
        replace=_checking_grad,
    ),
    Patch(
        target="torch.nn.parallel.distributed:DistributedDataParallel.__init__",
        package="torch",
        reason="average the gradients of replicas, not those of ranks that have different shards",
        parameters=("module", "process_group"),
        replace=_averaging_replicas,
    ),
    Patch(
        target="torch.amp.grad_scaler:GradScaler._unscale_grads_",
        package="torch",
        reason="skip a step on all ranks if a gradient isn't finite on one, of which others have other shards",
        parameters=("optimizer",),
        replace=_unscale,
    ),
    *(
        Patch(
            target=f"torch.nn.init:{name}",
            package="torch",
            reason="refuse new values of a shard, which would be the same ones on all ranks",
            parameters=("tensor",),
            replace=_checking_initializer,
        )
        for name in INITIALIZERS
    ),
    *(
        Patch(
            # clip_grad_norm_, from wherever a script has it, looks the first one up when it is called.
            target=target,
            package="torch",
            reason="take the norm of whole gradients where a rank has shards of them, or ranks would clip by other "
            "norms",
            parameters=("tensors", "norm_type", "error_if_nonfinite", "foreach"),
            replace=_total_norm,
        )
        for target in ("torch.nn.utils.clip_grad:_get_total_norm", "torch.nn.utils:get_total_norm")
    ),
    *(
        Patch(
            target=target,
            package="torch",
            reason="refuse gradients that an optimizer reduces over replicas later, or keeps elsewhere",
            parameters=("parameters", "clip_value", "foreach"),
            replace=_checking_clip,
        )
        for target in ("torch.nn.utils.clip_grad:clip_grad_value_", "torch.nn.utils:clip_grad_value_")
    ),
]
