"""Models of images: classifiers, those that reconstruct masked patches, and those without a head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    PretrainedConfig,
    PreTrainedModel,
)

from cuboid.distributed.axis_collectives import own_slice, padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.roles import layer_names
from cuboid.models.attention.forward_context import WHOLE_IMAGES, Lengths
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import LocalBatch, with_rows
from cuboid.models.kinds.hidden_states import HiddenStates
from cuboid.models.kinds.label_heads import LabelHead, RowClassifier
from cuboid.models.kinds.model_kind import ModelKind
from cuboid.models.kinds.probe_rows import CannotProbe, RowsOf
from cuboid.tensor3d.layers.whole_block import ImageSplit

#: The images ``[B, C, H, W]``, and which of their P patches are masked, ``[B, P]``.
_IMAGE_TENSORS = ("pixel_values", "bool_masked_pos")
#: Edges of small images, which have 16 or 9 patches of 4 × 4.
_SMALL_EDGES = (16, 12)
_PROBED = Case("images", 0)


class _OfImages(ModelKind):
    """A model that is given images ``[B, C, H, W]`` in place of ids."""

    main_input = "pixel_values"
    tensors = (*_IMAGE_TENSORS, "labels")
    in_pipeline = False
    runs_own_head = False
    inputs_on_mesh = (MeshVerdict(inputs="pixels", splits_late=True),)
    whole_cases = (_PROBED,)

    def local_batch(
        self,
        arguments: dict[str, Any],
        config: PretrainedConfig,
        mesh: Mesh,
        verdict: MeshVerdict,  # noqa: ARG002
    ) -> LocalBatch:
        """See :meth:`ModelKind.local_batch`. A rank gets whole images, because they are sharded after the embeddings.

        Raises:
            UnsupportedModelError: an argument isn't supported, or the images don't have the size in the config.
            CuboidError: ``pixel_values`` are missing or aren't images, or ``bool_masked_pos`` doesn't fit them.
        """
        for name, value in arguments.items():
            is_known = name in (*_IMAGE_TENSORS, "num_items_in_batch")
            if not is_known and (isinstance(value, torch.Tensor) or value not in (None, False)):
                hint = ": all images have the size in the model's config" if name == "interpolate_pos_encoding" else ""
                raise UnsupportedModelError(f"{name} has no rule on a sharded model of images{hint}")
        tensors = {name: arguments[name] for name in _IMAGE_TENSORS if arguments.get(name) is not None}
        images = tensors.get("pixel_values")
        wanted = image_shape(config)
        if images is None or images.dim() != 4 or len(images) == 0 or not images.is_floating_point():
            received = "none" if images is None else f"{images.dtype} {list(images.shape)}"
            raise CuboidError(
                f"a sharded model of images needs pixel_values, floats [batch, channels, height, width], not {received}"
            )
        if wanted is None or tuple(images.shape[2:]) != wanted:
            size = getattr(config, "image_size", None)
            raise UnsupportedModelError(
                f"pixel_values are {list(images.shape)}, but the config's image_size is {size}; "
                "on a mesh there is no rule for other sizes, whose positions are interpolated"
            )
        masked = tensors.get("bool_masked_pos")
        if masked is not None and (masked.dim() != 2 or len(masked) != len(images) or masked.is_floating_point()):
            raise CuboidError(
                f"bool_masked_pos is {masked.dtype} {list(masked.shape)}; give booleans [{len(images)}, patches]"
            )
        rows = len(images)
        more = padded_length(rows, mesh.size("batch")) - rows
        local = {name: own_slice(with_rows(name, x, more), 0, mesh.along("batch")) for name, x in tensors.items()}
        options = {name: x for name, x in arguments.items() if name == "num_items_in_batch" and x is not None}
        return LocalBatch(local, rows, 0, options)

    def local_arguments(self, model: Any, batch: LocalBatch) -> dict[str, Any]:  # noqa: ARG002
        """See :meth:`ModelKind.local_arguments`."""
        return {**batch.options, **batch.tensors}

    def lengths_of(self, batch: LocalBatch, *, makes_masks: bool) -> Lengths:  # noqa: ARG002
        """See :meth:`ModelKind.lengths_of`."""
        return WHOLE_IMAGES

    def split_of_activations(self, mesh: Mesh, verdict: MeshVerdict) -> ImageSplit:  # noqa: ARG002
        """See :meth:`ModelKind.split_of_activations`."""
        return ImageSplit(mesh)

    def _head_choices(self, has_own_loss: bool) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"head": "whole"}]

    @classmethod
    def probe_config(
        cls, small: PretrainedConfig, make: Callable[[PretrainedConfig], PreTrainedModel]
    ) -> PretrainedConfig:
        """See :meth:`ModelKind.probe_config`. One with which layers get an odd length, so that meshes have to pad it.

        The length depends on how many tokens the model adds to the patches, so the model is run.
        """
        check_drops_no_rows(small)
        if image_shape(small) is None:
            raise CannotProbe("its config has no image_size of a height and a width")
        for edge in _SMALL_EDGES:
            config = copy.deepcopy(small)
            config.image_size = [edge, edge] if isinstance(small.image_size, list | tuple) else edge
            if _length_in_layers(cls.of(config), make(config)) % 2:
                return config
        raise CannotProbe("its layers, if it has a list of them, aren't given activations [B, S, H] of an odd length")

    def options_of(self, model: Any) -> dict[str, Any]:  # noqa: ARG002
        """See :meth:`ModelKind.options_of`."""
        return {}

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:
        """See :meth:`ModelKind.micro_batch`. As many images as there would be rows of ids."""
        shape = image_shape(model.config)
        if shape is None:
            raise CannotProbe("its config has no image_size of a height and a width")
        channels = int(getattr(model.config, "num_channels", 3))
        rows = len(rows_of(case, 0)["labels"])
        images = torch.randn((rows, channels, *shape), generator=generator, dtype=torch.float64)
        return {"pixel_values": images.to(model.dtype)}


def _length_in_layers(kind: ModelKind, model: PreTrainedModel) -> int:
    """The length of the activations that a small model's first layer gets; 0 if no layer gets any."""
    lengths: list[int] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lengths.extend(x.shape[1] for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim() == 3)

    for name in layer_names(model):
        model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**kind.probe_batch(_PROBED, model))
    except CannotProbe:
        raise
    except Exception as error:
        raise CannotProbe(f"a small one doesn't run: {type(error).__name__}: {error}") from error
    return lengths[0] if lengths else 0


class ImageClassifier(_OfImages, RowClassifier):
    """A classifier of images."""

    name = "images"
    words = "image classification"
    endings = ("ForImageClassification",)
    auto_class = AutoModelForImageClassification

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:
        """See :meth:`ModelKind.micro_batch`."""
        batch = super().micro_batch(case, model, rows_of, generator)
        return {**batch, "labels": self.random_labels(len(batch["pixel_values"]), generator)}


class MaskedImages(_OfImages, LabelHead):
    """A model that reconstructs masked patches of images. ``bool_masked_pos`` ``[B, P]`` says which are masked."""

    name = "masked images"
    words = "masked image modelling"
    endings = ("ForMaskedImageModeling",)
    auto_class = AutoModelForMaskedImageModeling
    targets = ()

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:
        """See :meth:`ModelKind.micro_batch`."""
        batch = super().micro_batch(case, model, rows_of, generator)
        patch = model.config.patch_size
        height, width = (patch, patch) if isinstance(patch, int) else patch
        shape = batch["pixel_values"].shape
        patches = (shape[2] // height) * (shape[3] // width)
        return {**batch, "bool_masked_pos": torch.rand((shape[0], patches), generator=generator) < 0.5}


class ImageStates(_OfImages, HiddenStates):
    """A model that returns hidden states of images' patches."""

    def _head_choices(self, has_own_loss: bool) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{}]


def check_drops_no_rows(config: PretrainedConfig) -> None:
    """Check that layers don't leave out whole images at random.

    Raises:
        CannotProbe: they do.
    """
    for name in ("drop_path_rate", "stochastic_depth_prob"):
        if getattr(config, name, 0):
            raise CannotProbe(
                f"{name} is {getattr(config, name)}: it drops rows in layers at random, for which there is no rule; "
                "set it to 0.0"
            )


def image_shape(config: PretrainedConfig) -> tuple[int, int] | None:
    """The height and width of a model's images; None if its config doesn't have them."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None
