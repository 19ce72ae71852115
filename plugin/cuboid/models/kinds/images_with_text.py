"""Vision-language models: causal language models in which features of images take the place of some embeddings.

A *tower*, with a projector behind it, computes the features of a micro-batch's images. The model's own code puts them
where ``input_ids`` have placeholders, so it must see whole sequences and whole embeddings: these are gathered once,
and split where the first layer of the language model begins. Every rank of sequence × hidden computes the same
features, of the images in its rows of `batch`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.attention.forward_context import WHOLE_IMAGES, forward_context, knowing
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import IGNORE_INDEX, TENSORS, TOKEN_TYPES, LocalBatch, take_local_batch
from cuboid.models.batch.row_images import GRID, PIXELS, RankImages, images_of_rows
from cuboid.models.kinds.causal import Causal
from cuboid.models.kinds.images import image_shape
from cuboid.models.kinds.probe_rows import SPECIAL_TOKENS, CannotProbe, RowsOf
from cuboid.tensor3d.layers.whole_block import LateSplit

_IMAGES = (PIXELS, GRID)
#: Tensors ``[B, S]`` that say which tokens are placeholders.
_TYPES = (TOKEN_TYPES, "mm_token_type_ids")
#: Entries of outputs that are a rank's own: features of its images, and what only generation reads.
_OF_RANK = ("image_hidden_states", "rope_deltas")
#: Images of each row of a small model's micro-batch. With two ranks of `batch`, one has none.
_IMAGES_OF_ROWS = (2, 1, 0)
_FEWEST_FEATURES, _LAYERS_OF_TOWER = 4, 2
#: Patches of an image, in time, height and width.
_GRID = (1, 4, 4)
_LEAST_ID = 4


class ImagesWithText(Causal):
    """A vision-language model."""

    name = "images with text"
    words = "causal language modelling of text with images"
    endings: ClassVar[tuple[str, ...]] = ()
    auto_class = AutoModelForImageTextToText
    tensors = (*TENSORS, *_TYPES, *_IMAGES)
    in_pipeline = False
    inputs_on_mesh = (MeshVerdict(inputs="images"), MeshVerdict(inputs="images", splits_late=True))

    @classmethod
    def includes(cls, model: Any) -> bool:
        """Whether a class generates text from ids and images; names of such classes have no ending of their own."""
        if not issubclass(model, PreTrainedModel) or model.main_input_name != "input_ids" or not model.can_generate():
            return False
        arguments = inspect.signature(model.forward).parameters.keys()
        return hasattr(model, "get_image_features") and {"input_ids", PIXELS, "labels"} <= arguments

    def check_generation(self, arguments: Mapping[str, Any]) -> None:
        """See :meth:`ModelKind.check_generation`."""
        name = next((name for name in _IMAGES if arguments.get(name) is not None), None)
        if name is not None:
            raise UnsupportedModelError(
                f"generate with {name} has no rule on a mesh: transformers computes features of all rows' images once "
                "and passes them on, and ranks have parts of the rows. Save the model, and generate in plain "
                "transformers; prompts of text alone are generated from here"
            )

    def local_batch(
        self,
        arguments: dict[str, Any],
        config: PretrainedConfig,
        mesh: Mesh,
        verdict: MeshVerdict,  # noqa: ARG002
    ) -> LocalBatch:
        """See :meth:`ModelKind.local_batch`. A rank gets whole sequences of its rows, and their images.

        Raises:
            UnsupportedModelError: an argument isn't supported.
            CuboidError: shapes, or the numbers of images and placeholders, contradict each other.
        """
        for name, x in arguments.items():
            is_known = name in (*self.tensors, "num_items_in_batch")
            if not is_known and (isinstance(x, torch.Tensor) or (isinstance(x, dict) and x)):
                raise UnsupportedModelError(
                    f"{name} has no rule on a sharded model of images with text, which takes {PIXELS} of images of one "
                    f"size, or with {GRID}; videos and audio have no rule"
                )
        images = {name: arguments[name] for name in _IMAGES if arguments.get(name) is not None}
        _check_images(images)
        others = {name: x for name, x in arguments.items() if name not in _IMAGES}
        batch = take_local_batch(others, config, mesh, inputs="only ids", types=_TYPES)
        if PIXELS not in images:
            return batch
        placeholder = _placeholder(config)
        ids = arguments["input_ids"]
        padding = getattr(config.get_text_config(), "pad_token_id", None) or 0
        if batch.padded > batch.length and placeholder == padding:
            raise UnsupportedModelError(
                f"pad_token_id is image_token_id, {placeholder}: sequences of {batch.length} tokens, which the mesh "
                "doesn't divide, are padded with it; set another pad_token_id"
            )
        axis, along = mesh.size("batch"), mesh.along("batch")
        if axis == 1:
            return replace(batch, options={**batch.options, **images}, images=RankImages())
        count = padded_length(batch.rows, axis) // axis
        rows = [min(row, batch.rows - 1) for row in range(count * along.index, count * (along.index + 1))]
        local, of_rank = images_of_rows(images, (ids == placeholder).sum(1).tolist(), rows)
        return replace(batch, options={**batch.options, **local}, images=of_rank)

    def forward(self, model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
        """See :meth:`ModelKind.forward`."""

        def without_own_entries(**local: Any) -> Any:
            if PIXELS in local or not torch.is_grad_enabled() or model.cuboid.mesh.topology.data == 1:
                output = base_forward(**local)
            else:
                # Other replicas may have images now, and sum gradients of the tower: here, they are zeros, not missing.
                spare = _blank_image(model)
                empty = {name: x[:0] for name, x in spare.items()}
                with knowing(images=RankImages(spare)):
                    output = base_forward(**local, **empty)
            for name in _OF_RANK:
                if getattr(output, name, None) is not None:
                    output[name] = None
            return output

        return super().forward(model, without_own_entries, arguments)

    def check_base_call(self, model: Any) -> None:
        """See :meth:`ModelKind.check_base_call`."""
        raise UnsupportedModelError(
            f"{type(model).__name__} was called by itself, for which there is no rule on a mesh; call the "
            f"{model.cuboid.base.__name__} around it"
        )

    def split_of_activations(self, mesh: Mesh, verdict: MeshVerdict) -> LateSplit:
        """See :meth:`ModelKind.split_of_activations`."""
        return LateSplit(mesh, rejoins=verdict.splits_late)

    # --- probes ---

    @classmethod
    def probe_config(
        cls,
        small: PretrainedConfig,
        make: Callable[[PretrainedConfig], PreTrainedModel],  # noqa: ARG003
    ) -> PretrainedConfig:
        """See :meth:`ModelKind.probe_config`. Images have so few features that two of them fit into a short row."""
        config = copy.deepcopy(small)
        vision = getattr(config, "vision_config", None)
        if vision is not None and hasattr(vision, "spatial_merge_size"):
            # Patches of images of any size, some of whose layers attend in windows of several merged patches.
            edge = vision.patch_size = 2
            changes = {
                "depth": _LAYERS_OF_TOWER,
                "embed_dim": config.get_text_config().hidden_size,
                "out_hidden_size": config.get_text_config().hidden_size,
                "window_size": 2 * vision.spatial_merge_size * edge,
                "fullatt_block_indexes": [_LAYERS_OF_TOWER - 1],
                # Of these layers, features are added to hidden states between layers of the text model.
                "deepstack_visual_indexes": [0],
            }
            for name in changes.keys() & vision.to_dict().keys():
                setattr(vision, name, changes[name])
        elif hasattr(config, "mm_tokens_per_image"):
            config.mm_tokens_per_image = _FEWEST_FEATURES
        elif vision is not None and image_shape(vision) is not None:
            vision.image_size = 2 * vision.patch_size
        return config

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:
        """See :meth:`ModelKind.micro_batch`. Rows have two images, one, and none."""
        batch = rows_of(case, 0)
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        placeholder = _placeholder(model.config)
        one = _random_images(model, 1, generator)
        try:
            with torch.no_grad():
                features = model.get_image_features(**one, return_dict=True).pooler_output
        except Exception as error:
            raise CannotProbe(f"of an image, a small one has no features: {type(error).__name__}: {error}") from error
        features = features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
        size = features.numel() // features.shape[-1]
        _replace_special_ids(ids, model.config)
        count = 0
        for row, wanted in enumerate(_IMAGES_OF_ROWS):
            shown = torch.arange(ids.shape[1]) if mask is None else mask[row].nonzero().flatten()
            # A token of text stands before each image, unless a row is too short for any.
            places = [1 + image * (size + 1) for image in range(wanted)] if len(shown) > size else [0][:wanted]
            for start in (place for place in places if place + size <= len(shown)):
                ids[row, shown[start : start + size]] = placeholder
                count += 1
        if count == 0:
            raise CannotProbe(f"an image has {size} features, and the rows of its probe {ids.shape[1]} tokens")
        is_image = ids == placeholder
        if "labels" in batch:
            batch["labels"] = ids.where((batch["labels"] != IGNORE_INDEX) & ~is_image, IGNORE_INDEX)
        takes = inspect.signature(type(model).forward).parameters
        types = {name: is_image.long() for name in _TYPES if name in takes}
        return {**batch, **types, **_random_images(model, count, generator)}


class ComputesFeatures:
    """Mixed into the class of a sharded base model that takes images, in front of the architecture's."""

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        """The features of the images in this rank's rows, which the model's own forward asks for."""
        compute = super().get_image_features  # type: ignore[misc]
        images = forward_context().images
        if images is None:
            return compute(*args, **kwargs)
        # A tower's attention has masks of its own.
        with knowing(lengths=WHOLE_IMAGES, packing=None):
            if images.spare is None:
                return compute(*args, **kwargs)
            arguments = inspect.signature(compute).bind(*args, **kwargs).arguments
            extra = arguments.pop("kwargs", {})
            output = compute(**{**arguments, **extra, **images.spare})
        # None of them, but with their gradients, which are zeros: backward unshards the tower on all ranks as well.
        features = output.pooler_output
        is_one = isinstance(features, torch.Tensor)
        output.pooler_output = features[:0] if is_one else type(features)(x[:0] for x in features)
        return output


def _check_images(images: dict[str, Any]) -> None:
    """Check the kinds and shapes of images.

    Raises:
        CuboidError: they aren't those of one tensor of images, or of patches with a grid.
    """
    pixels, grid = images.get(PIXELS), images.get(GRID)
    if pixels is None and grid is None:
        return
    dims = 4 if grid is None else 2
    if not isinstance(pixels, torch.Tensor) or not pixels.is_floating_point() or pixels.dim() != dims:
        received = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        wanted = "[images, channels, height, width]" if grid is None else f"[patches, features] beside {GRID}"
        raise CuboidError(f"{PIXELS} must be floats {wanted}, not {received}")
    if grid is not None and (grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point()):
        raise CuboidError(f"{GRID} is {grid.dtype} {list(grid.shape)}; give integers [images, 3]")


def _placeholder(config: PretrainedConfig) -> int:
    token = getattr(config, "image_token_id", None)
    if not isinstance(token, int):
        raise UnsupportedModelError(
            f"the config of {config.model_type!r} has no image_token_id, by which a mesh finds the rows of images"
        )
    return token


def _replace_special_ids(ids: torch.Tensor, config: PretrainedConfig) -> None:
    """Replace, in place, ids that stand for images and the like, which random rows mustn't have."""
    for name, token in config.to_dict().items():
        if isinstance(token, int) and name in SPECIAL_TOKENS:
            ids[ids == token] = _LEAST_ID


def _blank_image(model: Any) -> dict[str, torch.Tensor]:
    """Arguments of an image of zeros, for a model whose probe has made some."""
    images = _random_images(model, 1, torch.Generator())
    return {
        name: torch.zeros_like(x, device=model.device) if name == PIXELS else x.to(model.device)
        for name, x in images.items()
    }


def _random_images(model: Any, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    config = getattr(model.config, "vision_config", None)
    if config is not None and GRID in inspect.signature(type(model).forward).parameters:
        features = getattr(config, "in_channels", 3) * config.temporal_patch_size * config.patch_size**2
        patches = torch.randn((count * math.prod(_GRID), features), generator=generator, dtype=torch.float64)
        return {PIXELS: patches.to(model.dtype), GRID: torch.tensor(_GRID).repeat(count, 1)}
    shape = None if config is None else image_shape(config)
    if shape is None:
        raise CannotProbe("its vision_config has no image_size of a height and a width")
    channels = int(getattr(config, "num_channels", 3))
    images = torch.randn((count, channels, *shape), generator=generator, dtype=torch.float64)
    return {PIXELS: images.to(model.dtype)}
