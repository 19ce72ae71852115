"""ColossalAI's ``OptimizerWrapper`` for a sharded model and its replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from colossalai.interface import OptimizerWrapper
from torch import nn

from cuboid.errors import CheckpointError, CuboidError, OptimizerError
from cuboid.failures.rank_agreement import StepGuard, begin_update
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.models.sharded.sharded_model import mesh_of, unwrap
from cuboid.models.stages.stage_model import StageModel
from cuboid.optim.data_parallel_optimizer import replica_optimizer
from cuboid.optim.grad_buffer import gradient_of
from cuboid.optim.grad_norm import scale_to, total_norm
from cuboid.optim.param_groups import AlignedGroups
from cuboid.optim.taken_gradients import TakenByBooster, give_back, take_gradients
from cuboid.optim.trained_parameters import TrainedParameters


class CuboidOptimizer(OptimizerWrapper):
    """An optimizer that steps on the sum of all replicas' gradients.

    They are reduced once per step, by the first call of :meth:`step` or a clipping method, regardless of the number of
    backward passes and of ``no_sync``. So all ranks must make these calls.

    What goes past it raises an error: the inner optimizer's own ``step``, ``loss.backward()`` with several replicas,
    another optimizer that the model was boosted with since, and parameters that were added since.

    Args:
        optim: a torch optimizer of the model's parameters, without state; changed in place.
        model: sharded.
        dtype: to cast the parameters to; None to leave them as they are.
        split: whether each replica holds only its share of the optimizer's state (ZeRO-1).
        max_norm: the gradient norm that :meth:`step` clips to; 0 for no clipping.
        groups: the optimizer's parameter groups, as all stages have them.
        pipeline: of the model, if it has one.
        stepped: called after each step.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        model: nn.Module,
        *,
        dtype: torch.dtype | None,
        split: bool,
        max_norm: float,
        groups: AlignedGroups,
        pipeline: Pipeline | None,
        stepped: Callable[[], None],
    ) -> None:
        super().__init__(optim)
        inner: Any = unwrap(model)
        self._model = inner
        self._mesh = mesh_of(model)
        self._split = split and self._mesh.topology.data > 1
        self._max_norm = max_norm
        self._groups = groups
        self._pipeline = pipeline
        self._stepped = stepped
        self._counted = {id(parameter) for parameter in inner.counted_parameters()}
        self._norm: torch.Tensor | None = None
        self._complete = False
        self._accumulates = False
        self._steps = 0
        self._is_stepping = False
        # Of an optimizer that the model was boosted with before.
        give_back(inner.parameters())
        self.replicated = replica_optimizer(optim, self._mesh, dtype, split=self._split)
        flat = self.replicated.flat_parameters
        # A stage that was frozen as a whole has buffers of nothing.
        alone = None if self.replicated.buffers else optim
        self._trained = TrainedParameters(inner, flat, alone, "booster.boost")
        self._stepped_tensors = [id(parameter) for parameter in self.parameters]
        reference = weakref.ref(self)
        inner.cuboid.state.optimizer = reference
        optim.register_step_pre_hook(functools.partial(_check_stepped_here, reference))
        # By itself, it would leave the gradients of shared buffers, of which its parameters may be masters.
        optim.zero_grad = functools.partial(_clear_here, reference)  # type: ignore[method-assign]

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        """Accumulate the gradients of this replica's loss; the step takes the mean over the replicas.

        Raises:
            CuboidError: in a pipeline, whose ``execute_pipeline`` has run backward; or the loss has several elements.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CuboidError(f"backward takes a loss, a tensor of one number, not a {what}; of many take the mean()")
        self.backward_by_grad(loss, torch.ones_like(loss), inputs, retain_graph, **kwargs)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any
    ) -> None:
        """As :meth:`backward`, from a tensor and its gradient, of the same shape."""
        if self._pipeline is not None:
            raise CuboidError("execute_pipeline has run backward already; go on with optimizer.step()")
        self.accumulate()
        with StepGuard(self._mesh, f"backward of step {self._steps + 1}"):
            torch.autograd.backward(
                tensor, grad / self._mesh.topology.data, inputs=inputs, retain_graph=retain_graph, **kwargs
            )
        self.take_gradients()

    def take_gradients(self) -> None:
        """Refuse ``.grad`` of the parameters where it isn't what is stepped on, after a backward or a reduction."""
        take_gradients(self.replicated.elsewhere(reduced=self._complete), TakenByBooster)

    def leave_gradients(self) -> None:
        """End what :meth:`take_gradients` began."""
        give_back(self.replicated.flat_parameters)

    def accumulate(self) -> None:
        """Prepare for more gradients, also after those so far have been reduced; :meth:`take_gradients` follows."""
        self._check_is_current()
        self.leave_gradients()
        self._accumulates = True
        if not self._complete:
            return
        self._complete = False
        self.replicated.reopen()
        if isinstance(self._model, StageModel):
            # Both stages of a tied parameter now have the sum of their gradients. The next sum over the stages would
            # count it twice, so that this copy starts again from zero.
            for parameter in self._model.staging.repeated_parameters():
                gradient = gradient_of(parameter)
                if gradient is not None:
                    gradient.zero_()

    def step(self, closure: None = None) -> None:
        """Make an optimizer step, with clipping if the config has it.

        Raises:
            CuboidError: a closure is given.
        """
        if closure is not None:
            raise CuboidError("a closure would run forward and backward behind the plugin's back; call step without it")
        with StepGuard(self._mesh, f"check of step {self._steps + 1}"):
            # A stage may have changed alone.
            self._trained.check()
            self._groups.check(self.optim.param_groups)
        self._finish_gradients()
        if self._max_norm > 0:
            self.clip_grad_by_norm(self._max_norm)
        with StepGuard(self._mesh, f"optimizer step {self._steps + 1}"):
            self._is_stepping = True
            try:
                self.replicated.step()
            finally:
                self._is_stepping = False
        self._steps += 1
        self._stepped()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Clear the gradients.

        Args:
            set_to_none: ignored; buffers that are used again are zeroed in any case.
        """
        self.leave_gradients()
        self.replicated.clear()
        self._complete = self._accumulates = False

    def add_param_group(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported.

        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(
            "add_param_group: gradients of parameters that join after booster.boost would be neither reduced over the "
            "replicas nor in the norm; give all groups to the optimizer before it is boosted"
        )

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state on one rank. On several, each has that of its shards, which fits no other rank.

        Raises:
            CheckpointError: there are several ranks.
        """
        self._check_alone("state_dict", "booster.save_optimizer(optimizer, folder) writes")
        return super().state_dict()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state on one rank, as :meth:`state_dict` gives it.

        Raises:
            CheckpointError: there are several ranks.
        """
        self._check_alone("load_state_dict", "booster.load_optimizer(optimizer, folder) loads")
        super().load_state_dict(*args, **kwargs)

    def is_of(self, model: nn.Module) -> bool:
        """Whether this optimizer steps on the parameters of this sharded model."""
        return model is self._model

    def check_gradients(self, call: str) -> None:
        """Check that a script which looks at the parameters' ``.grad`` sees what this optimizer steps on.

        Raises:
            CuboidError: it doesn't, because they aren't reduced yet, or are elsewhere.
        """
        if self.replicated.buffers and (self.replicated.is_flat or not self._complete):
            raise CuboidError(
                f"{call}: the gradients that the optimizer steps on aren't in .grad of the model's parameters, since "
                f"{self.replicated.buffers}; call clip_grad_by_norm or clip_grad_by_value of the optimizer that "
                "booster.boost returned, or set gradient_clipping in the config"
            )

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Clip the gradient of the whole model, over all its ranks.

        Args:
            max_norm: the norm to scale it down to, if its norm is larger.
            norm_type: the p of the p-norm.
            error_if_nonfinite: whether to raise if the norm is infinite or NaN.

        Returns:
            The norm before clipping, a scalar tensor, the same on every rank.
        """
        self._finish_gradients()
        norm = self._total_norm(float(norm_type))
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the gradient's {norm_type}-norm is {norm.item()}, so it can't be clipped")
        scale_to((p.grad for p in self.parameters if p.grad is not None), norm, max_norm)
        self._norm = norm
        return norm

    def clip_grad_by_value(self, clip_value: float, *_: Any, **__: Any) -> None:
        """Clip each element of the gradient."""
        self._finish_gradients()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.clamp_(-clip_value, clip_value)

    def get_grad_norm(self, norm_type: float = 2.0, **_: Any) -> float | None:
        """The norm before the last clipping by norm; None if there was none."""
        if float(norm_type) != 2.0:
            raise CuboidError("only the 2-norm is kept; clip_grad_by_norm gives any other")
        return None if self._norm is None else float(self._norm)

    def _finish_gradients(self) -> None:
        if self._complete:
            return
        begin_update(self._mesh, self._steps + 1)
        with StepGuard(self._mesh, f"reduction of the gradients of step {self._steps + 1}"):
            self._check_is_current()
            self._check_parameters()
            if self._pipeline is not None:
                self._pipeline.add_shared_gradients()
            self.replicated.reduce()
        self._complete = True
        self.take_gradients()

    def _check_alone(self, call: str, instead: str) -> None:
        if self._mesh.topology.world_size > 1:
            raise CheckpointError(
                f"{call}: each of the {self._mesh.topology.world_size} ranks has the state of its shards alone, which "
                f"fits no other one; {instead} all of it, for any layout"
            )

    def _check_is_current(self) -> None:
        owner = self._model.cuboid.state.optimizer()
        if owner is not self:
            raise CuboidError(
                "the model was given to booster.boost again, with another optimizer, which has its gradients now; go "
                "on with that one. For several rules in one step, give one optimizer with parameter groups"
            )

    def _check_parameters(self) -> None:
        """Check that the optimizer steps on the parameters that it was boosted with, and that each got its gradient."""
        if self._stepped_tensors != [id(parameter) for parameter in self.parameters]:
            raise OptimizerError(
                "the parameters in the optimizer's groups aren't those that it was boosted with: give all groups to "
                "the optimizer before booster.boost, and leave them as they are"
            )
        if self._mesh.topology.data > 1 and not self._accumulates and self.replicated.has_gradients():
            raise CuboidError(
                f"there are gradients, but not of booster.backward(loss, optimizer): after loss.backward() they would "
                f"be summed over the {self._mesh.topology.data} replicas, where their mean is meant"
            )

    def _total_norm(self, norm_type: float) -> torch.Tensor:
        mesh = self._mesh
        groups = [mesh.model_parallel_group] if len(mesh.copy_ranks) > 1 else []
        if self._split:
            groups.append(mesh.data_parallel_group)
        like = next(self._model.parameters())
        return total_norm(self.replicated.gradients(self._counted), groups, norm_type, like)


def _check_stepped_here(reference: weakref.ref[CuboidOptimizer], *_: Any) -> None:
    """A hook before the inner optimizer's steps."""
    wrapper = reference()
    if wrapper is None or not wrapper._is_stepping:
        raise OptimizerError(
            "the optimizer was boosted, so that a step of its own would take gradients that aren't reduced over the "
            "replicas, nor clipped: call backward, step and zero_grad of the optimizer that booster.boost returned"
        )


def _clear_here(reference: weakref.ref[CuboidOptimizer], *_: Any, **__: Any) -> None:
    """In the place of the inner optimizer's ``zero_grad``."""
    wrapper = reference()
    if wrapper is not None:
        wrapper.zero_grad()


def is_boosted(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``booster.boost`` has taken an optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks.values()  # type: ignore[attr-defined]
    return any(isinstance(hook, functools.partial) and hook.func is _check_stepped_here for hook in hooks)
