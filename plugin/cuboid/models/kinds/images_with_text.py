"""Vision-language models: causal language models in which features of images take the place of some embeddings.

A *tower*, with a projector behind it, computes the features of a micro-batch's images. The model's own code puts them
where ``input_ids`` have placeholders, so it must see whole sequences and whole embeddings: these are gathered once,
and split where the first layer of the language model begins. Every rank of sequence × hidden computes the same
features, of the images in its rows of `batch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.attention.forward_context import WHOLE_IMAGES, forward_context, knowing
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import LONGEST, Case
from cuboid.models.batch.local_batch import IGNORE_INDEX, TENSORS, TOKEN_TYPES, LocalBatch, take_local_batch
from cuboid.models.batch.row_images import GRID, IMAGE_SIZES, IMAGES, PIXELS, RankImages, images_of_rows
from cuboid.models.kinds.causal import Causal
from cuboid.models.kinds.images import check_drops_no_rows
from cuboid.models.kinds.probe_images import (
    blank_image,
    feature_counts,
    features_of,
    image_arguments,
    random_images,
    with_images,
)
from cuboid.models.kinds.probe_rows import CannotProbe, RowsOf, special_tokens
from cuboid.models.kinds.sharding import Sharding
from cuboid.tensor3d.layers.whole_block import (
    KeptWhole,
    LateSplit,
    activation_split,
    on_whole_activations,
    unsharded_block,
)

#: Tensors ``[B, S]`` that say which tokens are placeholders.
_TYPES = (TOKEN_TYPES, "mm_token_type_ids")
#: Beginnings of entries of outputs that are a rank's own: features of its images, and what only generation reads.
_OF_RANK = ("image_", "rope_deltas")
#: Images of each row of a small model's micro-batch. With two ranks of `batch`, one has none.
_IMAGES_OF_ROWS = (2, 1, 0)
#: Two of these, with tokens of text before them, fill a row of the probe.
_MOST_FEATURES = 14
#: Patches along an edge of small images, in the order in which they are tried.
_EDGES = (4, 2, 8, 1)
_DIMS_OF_FEATURES = 2
#: Features that are added to hidden states between layers of the text model, beside those among the embeddings.
_BETWEEN_LAYERS = "deepstack_features"
_LEAST_ID, _TYPE_OF_PADDING = 4, 2


class ImagesWithText(Causal):
    """A vision-language model."""

    name = "images with text"
    words = "causal language modelling of text with images"
    endings: ClassVar[tuple[str, ...]] = ()
    auto_class = AutoModelForImageTextToText
    tensors = (*TENSORS, *_TYPES, *IMAGES)
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
        name = next((name for name in IMAGES if arguments.get(name) is not None), None)
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
        images = {name: arguments[name] for name in IMAGES if arguments.get(name) is not None}
        _check_images(images)
        others = {name: x for name, x in arguments.items() if name not in IMAGES}
        batch = take_local_batch(others, config, mesh, inputs="only ids", types=_TYPES)
        if TOKEN_TYPES in batch.tensors:
            # Of no kind of token that sees later ones: images do in Gemma 3, text before an answer does in PaliGemma.
            batch.tensors[TOKEN_TYPES][:, batch.length :] = _TYPE_OF_PADDING
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
        others = [name for name in IMAGES if name not in (PIXELS, GRID) and arguments.get(name) is not None]
        if others:
            _check_taken(model, others)

        def without_own_entries(**local: Any) -> Any:
            if PIXELS in local or not torch.is_grad_enabled() or model.cuboid.mesh.topology.data == 1:
                output = base_forward(**local)
            else:
                # Other replicas may have images now, and sum gradients of the tower: here, they are zeros, not missing.
                spare = blank_image(model)
                empty = {name: x[:0] for name, x in spare.items()}
                with knowing(images=RankImages(spare)):
                    output = base_forward(**local, **empty)
            for name in [name for name in output if name.startswith(_OF_RANK)]:
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
        cls, small: PretrainedConfig, make: Callable[[PretrainedConfig], PreTrainedModel]
    ) -> PretrainedConfig:
        """See :meth:`ModelKind.probe_config`. Images have so few features that two of them fit into a short row.

        How many these are is up to the model's own code, which merges patches, so models are made and run.
        """
        check_drops_no_rows(getattr(small, "vision_config", small))
        obstacle: CannotProbe | None = None
        for edge in _EDGES:
            config = with_images(small, edge)
            try:
                fewest, *_, most = sorted(feature_counts(make(config), torch.Generator().manual_seed(0)))
            except CannotProbe as error:
                obstacle = obstacle or error
                continue
            if 0 < fewest <= most <= _MOST_FEATURES:
                return config
            counts = str(most) if fewest == most else f"{fewest} to {most}"
            obstacle = CannotProbe(
                f"an image of its small model has {counts} features, too many or few for a short row"
            )
        assert obstacle is not None
        raise obstacle

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:
        """See :meth:`ModelKind.micro_batch`. Rows have two images, one, and none."""
        batch = rows_of(case, 0)
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        placeholder = _placeholder(model.config)
        sizes = feature_counts(model, generator)
        _replace_special_ids(ids, model.config)
        counts: list[int] = []
        for row, wanted in enumerate(_IMAGES_OF_ROWS):
            shown = torch.arange(ids.shape[1]) if mask is None else mask[row].nonzero().flatten()
            placed = 0
            # A token of text stands before each image, unless a row is too short for any.
            start = 1 if len(shown) > sizes[sum(counts) % len(sizes)] else 0
            for _ in range(wanted):
                size = sizes[(sum(counts) + placed) % len(sizes)]
                if start + size > len(shown):
                    break
                ids[row, shown[start : start + size]] = placeholder
                placed, start = placed + 1, start + size + 1
            counts.append(placed)
        is_image = ids == placeholder
        if "labels" in batch:
            batch["labels"] = ids.where((batch["labels"] != IGNORE_INDEX) & ~is_image, IGNORE_INDEX)
        takes = inspect.signature(type(model).forward).parameters
        batch.update({name: is_image.long() for name in _TYPES if name in takes})
        if TOKEN_TYPES in takes:
            # In PaliGemma, what isn't an answer's has none, and sees all else that hasn't.
            batch[TOKEN_TYPES][1] = torch.arange(ids.shape[1]) >= ids.shape[1] // 2
        if not any(counts):
            if case.length >= LONGEST:
                raise CannotProbe(
                    f"an image has {min(sizes)} features, and the rows of its probe {ids.shape[1]} tokens"
                )
            return batch
        return {**batch, **random_images(model, counts, generator)}


class ComputesFeatures:
    """Mixed into the class of a sharded base model that takes images, in front of the architecture's."""

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        """The features of the images in this rank's rows, which the model's own forward asks for."""
        compute = super().get_image_features  # type: ignore[misc]
        with ExitStack() as stack:
            if isinstance(self, KeptWhole):
                # A parameter of the base model itself, such as what ends rows of patches.
                stack.enter_context(unsharded_block(self, alone=True))
            images = forward_context().images
            if images is None:
                return compute(*args, **kwargs)
            # A tower's attention has masks of its own.
            stack.enter_context(knowing(lengths=WHOLE_IMAGES, packing=None))
            if images.spare is None:
                output = compute(*args, **kwargs)
                return output if images.spans is None else _cut_features(output, images, images.spans)
            arguments = inspect.signature(compute).bind(*args, **kwargs).arguments
            extra = arguments.pop("kwargs", {})
            # None of them, but with their gradients, which are zeros: backward unshards the tower on all ranks as well.
            return _cut_features(compute(**{**arguments, **extra, **images.spare}), None, ())


class AddsFeatures:
    """Mixed into the class of a text model that adds features of images to hidden states between layers."""

    cuboid: Sharding

    @staticmethod
    def belongs_to(module: nn.Module) -> bool:
        """Whether a module is such a text model."""
        return hasattr(type(module), "_deepstack_process")

    def _deepstack_process(self, *args: Any, **kwargs: Any) -> Any:
        """Add features ``[placeholders, H]`` to whole hidden states, of which this rank gets and returns its part."""
        compute, mesh = super()._deepstack_process, self.cuboid.mesh  # type: ignore[misc]
        return on_whole_activations(type(self).__name__, activation_split(mesh), compute, args, kwargs)


def _cut_features(output: Any, images: RankImages | None, spans: Sequence[tuple[int, int]]) -> Any:
    """Of the features of images, in place, those of some spans, of all images one after the other.

    Raises:
        CuboidError: there aren't as many as ``images`` have placeholders.
    """

    def cut(features: Any) -> Any:
        is_one = isinstance(features, torch.Tensor)
        flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in ((features,) if is_one else features)])
        if images is not None and len(flat) != images.placeholders:
            raise CuboidError(
                f"the images have {len(flat)} features, and input_ids have {images.placeholders} placeholders for "
                "them; give the model what its processor makes of the same images and text"
            )
        taken = torch.cat([flat[start:end] for start, end in (*spans, (0, 0))])
        if not is_one:
            return type(features)((taken,))
        return taken.unsqueeze(1) if features.dim() > _DIMS_OF_FEATURES else taken

    output[features_of(output)] = cut(output[features_of(output)])
    if getattr(output, _BETWEEN_LAYERS, None) is not None:
        output[_BETWEEN_LAYERS] = type(output[_BETWEEN_LAYERS])(map(cut, output[_BETWEEN_LAYERS]))
    return output


def _check_taken(model: Any, names: Sequence[str]) -> None:
    """Check that arguments that describe images are some with which a model's probe ran.

    Raises:
        UnsupportedModelError: names one that isn't.
    """
    takes = image_arguments(model)
    for name in names:
        if name not in takes:
            raise UnsupportedModelError(
                f"{name} has no rule on a sharded {type(model).__name__}, which takes {' and '.join(takes)}"
            )


def _check_images(images: dict[str, Any]) -> None:
    """Check the kinds and shapes of images.

    Raises:
        CuboidError: they aren't those of one tensor of images, or of patches with a grid.
    """
    pixels, grid = images.get(PIXELS), images.get(GRID)
    if not images:
        return
    # Those of each row, or tiles of each image, have a dim more.
    dims, wanted = (4, 5), "[images, channels, height, width]"
    if grid is not None:
        dims, wanted = (2, 2), f"[patches, features] beside {GRID}"
    elif IMAGE_SIZES[1] in images:
        dims, wanted = (3, 3), f"[images, patches, features] beside {IMAGE_SIZES[1]}"
    if not isinstance(pixels, torch.Tensor) or not pixels.is_floating_point() or pixels.dim() not in dims:
        received = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        raise CuboidError(f"{PIXELS} must be floats {wanted}, not {received}")
    if grid is not None and (grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point()):
        raise CuboidError(f"{GRID} is {grid.dtype} {list(grid.shape)}; give integers [images, 3]")
    for name, x in images.items():
        if not isinstance(x, torch.Tensor):
            raise CuboidError(f"{name} must be a tensor, not {type(x).__name__}")


def _placeholder(config: PretrainedConfig) -> int:
    token = getattr(config, "image_token_id", None)
    if not isinstance(token, int):
        raise UnsupportedModelError(
            f"the config of {config.model_type!r} has no image_token_id, by which a mesh finds the rows of images"
        )
    return token


def _replace_special_ids(ids: torch.Tensor, config: PretrainedConfig) -> None:
    """Replace, in place, ids that stand for images and the like, which random rows mustn't have."""
    for token in (token for tokens in special_tokens(config).values() for token in tokens):
        ids[ids == token] = _LEAST_ID
