"""Which layouts training accepts of a model, by what training itself checks, and why it rejects others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel

from cuboid.distributed.topology import MeshShape
from cuboid.errors import MeshError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict, Mode
from cuboid.models.certification.certificates import certificate_of, naming_changes
from cuboid.models.kinds.registry import check_class
from cuboid.models.pipeline.head_share import check_spread_head
from cuboid.models.sharded.parallel_plan import MeshRules
from cuboid.models.sharded.quantization import FourBitRules
from cuboid.models.stages.outline import Outline
from cuboid.models.stages.stage_cut import draw_outline

_SHOWN_MESHES = 6


@dataclass(frozen=True)
class Stages:
    """The stages and segments that an architecture's certificate allows.

    Args:
        model: on any device, meta included.
        verified: whether `cuboid verify` passed on the real weights, as ``"certification": "verified"`` says.
    """

    model: PreTrainedModel
    verified: bool = False

    @cached_property
    def whole(self) -> str | None:
        """Why it can't be cut into stages; None if it can."""
        return self._reason("whole")

    @cached_property
    def segments(self) -> str | None:
        """Why its sequences can't be cut into segments; None if they can."""
        return self._reason("segments")

    def can_spread_head(self, stages: int, pieces: int) -> bool:
        """Whether every one of ``stages`` ranks can compute a part of the head, of which a mesh makes ``pieces``."""
        try:
            check_spread_head(self.model, self._outline, stages, pieces)
        except UnsupportedModelError:
            return False
        return True

    @cached_property
    def _outline(self) -> Outline:
        cls = type(self.model)
        with naming_changes(cls, self.model.config):
            return draw_outline(cls, self.model.config)

    def _reason(self, mode: Mode) -> str | None:
        cls = type(self.model)
        try:
            check_class(cls, stages=True)
            # The probe runs only if the answer isn't known yet, and only for layouts with stages.
            certificate_of(cls, self.model.config).check_model(cls.__name__, (mode,), verified=self.verified)
        except UnsupportedModelError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class LayoutLimits:
    """The layouts that training accepts of a model.

    Args:
        meshes: those that divide it; None for all.
        no_mesh: why it can't be on a mesh at all; "" if it can.
        with_stages: how its stages can't run on a mesh, and why.
        stages: how it can be cut into stages; None if that isn't known, as for a description by modules alone.
        four_bits: those that divide its linear layers in 4 bits; None if these aren't in 4 bits.
    """

    meshes: MeshRules | None = None
    no_mesh: str = ""
    with_stages: tuple[tuple[Mode, str], ...] = ()
    stages: Stages | None = None
    four_bits: FourBitRules | None = None

    @classmethod
    def of(
        cls, model: PreTrainedModel, verdict: MeshVerdict, stages: Stages | None = None, *, four_bits: bool = False
    ) -> LayoutLimits:
        """Those of a model on any device, with the verdict of its certification on meshes.

        Raises:
            UnsupportedModelError: its linear layers can't be in ``four_bits``, for which even one rank has a mesh.
        """
        with_stages = tuple(verdict.with_stages.items())
        try:
            verdict.check_model(type(model).__name__)
            rules = MeshRules(model, verdict)
        except UnsupportedModelError as error:
            if four_bits:
                raise
            return cls(None, str(error), with_stages, stages)
        return cls(rules, "", with_stages, stages, FourBitRules(model, rules) if four_bits else None)

    def reason_against(self, mesh: MeshShape, stages: int = 1, segments: int = 1) -> str | None:
        """Why training would reject a layout, in words; None if it wouldn't."""
        mode: Mode = "segments" if segments > 1 else "whole"
        misfit = self._misfit(mesh)
        if mesh.size > 1:
            if self.no_mesh or misfit:
                return self.no_mesh or misfit
            if stages > 1 and mode in dict(self.with_stages):
                return f"on a mesh with stages, {dict(self.with_stages)[mode]}"
        if stages > 1 and self.stages is not None:
            return self.stages.whole or (self.stages.segments if mode == "segments" else None) or misfit
        return misfit

    def _misfit(self, mesh: MeshShape) -> str | None:
        misfit = None if mesh.size == 1 or self.meshes is None else self.meshes.misfit(mesh)
        return misfit or (None if self.four_bits is None else self.four_bits.misfit(mesh))

    def fitting(self, size: int) -> list[MeshShape]:
        """All meshes of ``size`` ranks that training accepts, without stages."""
        return [mesh for mesh in MeshShape.of_size(size) if self.reason_against(mesh) is None]

    def check(self, name: str, mesh: MeshShape, stages: int, segments: int) -> None:
        """Check that training would accept a layout.

        Raises:
            MeshError: the mesh doesn't divide the model; the message names meshes of the same size that do.
            UnsupportedModelError: the architecture isn't right in such a layout.
        """
        reason = self.reason_against(mesh, stages, segments)
        if reason is None:
            return
        if reason != self._misfit(mesh):
            raise UnsupportedModelError(reason)
        near = ", ".join(map(str, self.fitting(mesh.size)[:_SHOWN_MESHES])) or "none"
        raise MeshError(
            f"tensor_parallel.mesh {mesh} can't cut {name}: {reason}; meshes of {mesh.size} ranks that can: {near}"
        )

    def refused(self, most_stages: int) -> list[str]:
        """What no layout of a search may have, in words.

        Args:
            most_stages: the largest number of stages that it would try.
        """
        reasons = [self.no_mesh] if self.no_mesh else []
        if most_stages > 1 and self.stages is not None:
            reasons += [self.stages.whole or self.stages.segments or ""]
        reasons += [f"on a mesh with stages, {reason}" for _, reason in self.with_stages]
        return [reason for reason in reasons if reason]
