"""Kinds of causal language models that are given images, or audio, beside token ids."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from cuboid.distributed.axis_collectives import padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.media import (
    AUDIO,
    FRAME_MASKS,
    FRAMES,
    GRID,
    IMAGE_SIZES,
    IMAGES,
    PIXELS,
    Medium,
)
from cuboid.models.attention.forward_context import forward_context, knowing
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import LONGEST, Case
from cuboid.models.batch.local_batch import IGNORE_INDEX, TENSORS, TOKEN_TYPES, LocalBatch, take_local_batch
from cuboid.models.batch.row_media import RankMedia, media_of_rows
from cuboid.models.kinds.causal import Causal
from cuboid.models.kinds.images import check_drops_no_rows
from cuboid.models.kinds.media import probe_audio, probe_images
from cuboid.models.kinds.media.compute import parameters_of
from cuboid.models.kinds.probe_rows import CannotProbe, RowsOf, special_tokens
from cuboid.tensor3d.layers.whole_block import LateSplit

#: Tensors ``[B, S]`` that say which tokens are placeholders.
_TYPES = (TOKEN_TYPES, "mm_token_type_ids")
#: Beginnings of entries of outputs that are a rank's own: features of its images, and what only generation reads.
_OF_RANK = ("image_", "audio_", "rope_deltas")
#: Images or clips of each row of a small model's micro-batch. With two ranks of `batch`, one has none.
_COUNTS_OF_ROWS = (2, 1, 0)
#: Two of these, with tokens of text before them, fill a row of the probe.
_MOST_FEATURES = 14
_LEAST_ID, _TYPE_OF_PADDING = 4, 2


class WithText(Causal):
    """A causal language model that is given images or audio beside ids.

    Attributes:
        media: what it is given.
    """

    endings: ClassVar[tuple[str, ...]] = ()
    in_pipeline = False
    inputs_on_mesh = (MeshVerdict(inputs="media"), MeshVerdict(inputs="media", splits_late=True))
    loss_reads_mask = True
    media: ClassVar[tuple[Medium, ...]]

    @classmethod
    def includes(cls, model: Any) -> bool:
        """Whether a class generates text from ids and the media; names of such classes have no ending of their own."""
        if not issubclass(model, PreTrainedModel) or model.main_input_name != "input_ids" or not model.can_generate():
            return False
        if not {"input_ids", cls.media[0].main, "labels"} <= inspect.signature(model.forward).parameters.keys():
            return False
        # In some, only the base model has the method.
        base = MODEL_MAPPING.get(getattr(model, "config_class", None), model)
        return all(medium.is_computed_by(model, base) for medium in cls.media)

    def check_generation(self, arguments: Mapping[str, Any]) -> None:
        """See :meth:`ModelKind.check_generation`."""
        named = ((medium, name) for medium in self.media for name in medium.tensors if arguments.get(name) is not None)
        for medium, name in named:
            raise UnsupportedModelError(
                f"generate with {name} has no rule on a mesh: transformers computes features of all rows' "
                f"{medium.nouns} once and passes them on, and ranks have parts of the rows. Save the model, and "
                "generate in plain transformers; prompts of text alone are generated from here"
            )

    def local_batch(
        self,
        arguments: dict[str, Any],
        config: PretrainedConfig,
        mesh: Mesh,
        verdict: MeshVerdict,  # noqa: ARG002
    ) -> LocalBatch:
        """See :meth:`ModelKind.local_batch`. A rank gets whole sequences of its rows, and their images or clips.

        Raises:
            UnsupportedModelError: an argument isn't supported.
            CuboidError: shapes, or the numbers of images or clips and of placeholders, contradict each other.
        """
        known = (*TENSORS, *_TYPES, *(name for medium in self.media for name in medium.tensors), "num_items_in_batch")
        for name, x in arguments.items():
            if name not in known and (isinstance(x, torch.Tensor) or (isinstance(x, dict | list) and x)):
                taken = " and ".join(_TAKEN[medium] for medium in self.media)
                others = " and ".join(["videos", *(medium.nouns for medium in _TAKEN if medium not in self.media)])
                raise UnsupportedModelError(
                    f"{name} has no rule on a sharded model of {self.name}, which takes {taken}; {others} have no rule"
                )
        media: dict[Medium, dict[str, torch.Tensor]] = {}
        for medium in self.media:
            tensors = {name: arguments[name] for name in medium.tensors if arguments.get(name) is not None}
            if tensors:
                _CHECKS[medium](tensors)
                media[medium] = tensors
        text = {name: x for name, x in arguments.items() if not any(name in tensors for tensors in media.values())}
        batch = take_local_batch(text, config, mesh, inputs="only ids", types=_TYPES)
        if TOKEN_TYPES in batch.tensors:
            # Of no kind of token that sees later ones: images do in Gemma 3, text before an answer does in PaliGemma.
            batch.tensors[TOKEN_TYPES][:, batch.length :] = _TYPE_OF_PADDING
        axis, along = mesh.size("batch"), mesh.along("batch")
        count = padded_length(batch.rows, axis) // axis
        rows = [min(row, batch.rows - 1) for row in range(count * along.index, count * (along.index + 1))]
        for medium, tensors in media.items():
            _check_placeholder(medium, config, batch)
            local, of_rank = tensors, RankMedia(medium)
            if axis > 1:
                placeholders = (arguments["input_ids"] == _placeholder(config, medium)).sum(1).tolist()
                local, of_rank = media_of_rows(medium, tensors, placeholders, rows)
            batch = replace(batch, options={**batch.options, **local}, media=(*batch.media, of_rank))
        return batch

    def forward(self, model: Any, base_forward: Any, arguments: dict[str, Any]) -> Any:
        """See :meth:`ModelKind.forward`."""
        for medium in self.media:
            names = [name for name in medium.tensors if name != PIXELS and arguments.get(name) is not None]
            takes = PROBES[medium].arguments(model) if names else ()
            for name in names:
                if name not in takes:
                    raise UnsupportedModelError(
                        f"{name} has no rule on a sharded {type(model).__name__}, which takes {' and '.join(takes)}"
                    )

        def without_own_entries(**local: Any) -> Any:
            media = [_with_own_masks(model, local, one) for one in forward_context().media]
            if torch.is_grad_enabled() and model.cuboid.mesh.topology.data > 1:
                # Other replicas may have some now, and sum gradients of the tower: here, they are zeros, not missing.
                for medium in self.media:
                    if medium.main not in local:
                        spare = PROBES[medium].blank(model)
                        local |= {name: x[:0] for name, x in spare.items()}
                        media.append(RankMedia(medium, spare))
            with knowing(media=tuple(media)):
                output = base_forward(**local)
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
        """See :meth:`ModelKind.probe_config`. Images or clips have so few features that two fit into a short row.

        How many these are is up to the model's own code, which merges patches and frames, so models are made and run.
        """
        check_drops_no_rows(getattr(small, "vision_config", small))
        config = small
        for medium in cls.media:
            config = _with_few_features(medium, config, make)
        return config

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:
        """See :meth:`ModelKind.micro_batch`. Rows have two images or clips, one, and none; of a second medium, in the
        opposite order.
        """
        batch = rows_of(case, 0)
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        _replace_special_ids(ids, model.config)
        inputs: MicroBatch = {}
        free: list[list[int]] = [
            row.nonzero().flatten().tolist() for row in (torch.ones_like(ids) if mask is None else mask)
        ]
        for number, medium in enumerate(self.media):
            sizes = PROBES[medium].feature_counts(model, generator)
            counts = _COUNTS_OF_ROWS if number == 0 else _COUNTS_OF_ROWS[::-1]
            placed = _place(ids, free, _placeholder(model.config, medium), sizes, counts)
            if any(placed):
                inputs |= PROBES[medium].random_inputs(model, placed, generator)
            elif case.length >= LONGEST:
                raise CannotProbe(
                    f"{_one(medium)} has {min(sizes)} features, and the rows of its probe {ids.shape[1]} tokens"
                )
        placeholders = torch.tensor([_placeholder(model.config, medium) for medium in self.media])
        is_placeholder = torch.isin(ids, placeholders)
        if "labels" in batch:
            batch["labels"] = ids.where((batch["labels"] != IGNORE_INDEX) & ~is_placeholder, IGNORE_INDEX)
        takes = inspect.signature(type(model).forward).parameters
        batch.update({name: is_placeholder.long() for name in _TYPES if name in takes})
        if TOKEN_TYPES in takes:
            # In PaliGemma, what isn't an answer's has none, and sees all else that hasn't.
            batch[TOKEN_TYPES][1] = torch.arange(ids.shape[1]) >= ids.shape[1] // 2
        return {**batch, **inputs}


class ImagesWithText(WithText):
    """A vision-language model."""

    name = "images with text"
    words = "causal language modelling of text with images"
    auto_class = AutoModelForImageTextToText
    tensors = (*TENSORS, *_TYPES, *IMAGES.tensors)
    media = (IMAGES,)


class AudioWithText(WithText):
    """A model that understands speech or sounds."""

    name = "audio with text"
    words = "causal language modelling of text with audio"
    auto_class = AutoModelForMultimodalLM
    tensors = (*TENSORS, *_TYPES, *AUDIO.tensors)
    media = (AUDIO,)

    @classmethod
    def auto_class_of(cls, model: Any) -> Any:
        """See :meth:`ModelKind.auto_class_of`: transformers has some of them among models of two sequences."""
        known = AutoModelForMultimodalLM._model_mapping._model_mapping.values()
        return AutoModelForMultimodalLM if model.__name__ in known else AutoModelForSeq2SeqLM


#: By medium, the module that makes small inputs, and what there are rules for, in words.
PROBES: dict[Medium, Any] = {IMAGES: probe_images, AUDIO: probe_audio}
_TAKEN = {
    IMAGES: f"{PIXELS} of images of one size, or with {GRID}",
    AUDIO: f"{FRAMES} of clips, perhaps with {' or '.join(FRAME_MASKS)}",
}


def _check_images(tensors: Mapping[str, Any]) -> None:
    pixels, grid = tensors.get(PIXELS), tensors.get(GRID)
    # Those of each row, or tiles of each image, have a dim more.
    dims, wanted = (4, 5), "[images, channels, height, width]"
    if grid is not None:
        dims, wanted = (2, 4), f"[patches, features] beside {GRID}"
    elif IMAGE_SIZES[1] in tensors:
        dims, wanted = (3, 3), f"[images, patches, features] beside {IMAGE_SIZES[1]}"
    _check_floats(PIXELS, pixels, dims, wanted)
    if grid is not None and (grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point()):
        raise CuboidError(f"{GRID} is {grid.dtype} {list(grid.shape)}; give integers [images, 3]")
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise CuboidError(f"{name} must be a tensor, not {type(x).__name__}")


def _check_audio(tensors: Mapping[str, Any]) -> None:
    frames = tensors.get(FRAMES)
    _check_floats(FRAMES, frames, (3, 3), "[clips, …, …]")
    assert frames is not None
    for name in FRAME_MASKS:
        mask = tensors.get(name)
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2 or len(mask) != len(frames)):
            received = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise CuboidError(f"{name} is {received}, but {FRAMES} is {list(frames.shape)}; give [clips, frames]")


#: Check the kinds and shapes of a micro-batch's images, or clips.
_CHECKS = {IMAGES: _check_images, AUDIO: _check_audio}


def _check_floats(name: str, x: Any, dims: tuple[int, int], wanted: str) -> None:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() not in dims:
        received = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise CuboidError(f"{name} must be floats {wanted}, not {received}")


def _check_placeholder(medium: Medium, config: PretrainedConfig, batch: LocalBatch) -> None:
    """Check that what rows are padded with isn't what stands for images or clips."""
    placeholder = _placeholder(config, medium)
    padding = getattr(config.get_text_config(), "pad_token_id", None) or 0
    if batch.padded > batch.length and placeholder == padding:
        raise UnsupportedModelError(
            f"pad_token_id is {medium.token}, {placeholder}: sequences of {batch.length} tokens, which the mesh "
            "doesn't divide, are padded with it; set another pad_token_id"
        )


def _with_own_masks(model: Any, local: dict[str, Any], media: RankMedia) -> RankMedia:
    """Cut masks of features among a forward's arguments, in place, to the rank's rows.

    Masks that the tower isn't given are of what it returns for each clip.
    """
    if media.spans is None or media.medium is not AUDIO:
        return media
    takes = parameters_of(AUDIO, type(model), type(model.base_model))
    name = next((name for name in FRAME_MASKS if name in local and name not in takes), None)
    if name is None:
        return media
    mask = local[name]
    clips = {end: number for number, end in enumerate(itertools.accumulate(mask.sum(-1).tolist(), initial=0))}
    ends = [end for span in media.spans for end in span]
    if media.placeholders not in clips or not clips.keys() >= {*ends}:
        raise CuboidError(
            f"{name} has {max(clips)} features of {len(mask)} clips, and input_ids have {media.placeholders} "
            "placeholders for them; each clip's placeholders must be in one row, in the order of the clips"
        )
    spans = tuple((clips[start], clips[end]) for start, end in media.spans)
    local[name] = torch.cat([mask[start:end] for start, end in spans])
    return replace(media, spans=spans, of_clips=True)


def _with_few_features(
    medium: Medium, small: PretrainedConfig, make: Callable[[PretrainedConfig], PreTrainedModel]
) -> PretrainedConfig:
    """A small config of which two images or clips fit into a short row."""
    obstacle: CannotProbe | None = None
    for edge in PROBES[medium].EDGES:
        config = PROBES[medium].with_edge(small, edge)
        try:
            counts = sorted(PROBES[medium].feature_counts(make(config), torch.Generator().manual_seed(0)))
        except CannotProbe as error:
            obstacle = obstacle or error
            continue
        if 0 < counts[0] <= counts[-1] <= _MOST_FEATURES:
            return config
        words = str(counts[-1]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
        obstacle = CannotProbe(
            f"{_one(medium)} of its small model has {words} features, too many or few for a short row"
        )
    assert obstacle is not None
    raise obstacle


def _place(
    ids: torch.Tensor, free: list[list[int]], placeholder: int, sizes: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """Put placeholders of so many images or clips into rows of ids, in place; return how many found room.

    A token of text stands before each one, unless a row is too short for any. ``free`` are places.
    """
    placed: list[int] = []
    for row, wanted in enumerate(counts):
        done = 0
        for _ in range(wanted):
            size, places = sizes[(sum(placed) + done) % len(sizes)], free[row]
            before = int(len(places) > size)
            if before + size > len(places):
                break
            ids[row, places[before : before + size]] = placeholder
            free[row], done = places[before + size :], done + 1
        placed.append(done)
    return placed


def _one(medium: Medium) -> str:
    return f"{'an' if medium is IMAGES else 'a'} {medium.noun}"


def _placeholder(config: PretrainedConfig, medium: Medium) -> int:
    token = getattr(config, medium.token, None)
    if not isinstance(token, int):
        raise UnsupportedModelError(
            f"the config of {config.model_type!r} has no {medium.token}, by which a mesh finds the rows of "
            f"{medium.nouns}"
        )
    return token


def _replace_special_ids(ids: torch.Tensor, config: PretrainedConfig) -> None:
    """Replace, in place, ids that stand for images and the like, which random rows mustn't have."""
    for token in (token for tokens in special_tokens(config).values() for token in tokens):
        ids[ids == token] = _LEAST_ID
