"""Encoder-decoders that predict a text from frames of audio."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForSpeechSeq2Seq, PretrainedConfig, PreTrainedModel

from cuboid.distributed.axis_collectives import own_slice, padded_length
from cuboid.distributed.mesh import Mesh
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.architectures.media import FRAMES
from cuboid.models.attention.forward_context import WHOLE_IMAGES, Lengths, knowing
from cuboid.models.batch.broadcast import MicroBatch
from cuboid.models.batch.length_cases import Case
from cuboid.models.batch.local_batch import LocalBatch, granule, take_local_batch, with_rows
from cuboid.models.kinds.probe_rows import CannotProbe, RowsOf
from cuboid.models.kinds.sequence_to_sequence import TARGET_TENSORS, SequenceToSequence
from cuboid.models.kinds.sharding import Sharding
from cuboid.tensor3d.layers.whole_block import LateSplit

#: The key of configs for the number of an encoder's positions, of every clip, which has twice as many frames.
_POSITIONS = "max_source_positions"
_FRAMES_OF_POSITION = 2
_FEW_POSITIONS = 12


class SpeechToText(SequenceToSequence):
    """A model of speech whose clips all have one length. The encoder is computed whole, as a tower."""

    name = "speech to text"
    words = "transcription by an encoder-decoder of audio"
    auto_class = AutoModelForSpeechSeq2Seq
    main_input = FRAMES
    tensors = (FRAMES, "decoder_input_ids", "decoder_attention_mask", "labels")
    inputs_on_mesh = (MeshVerdict(inputs="only ids", splits_late=True),)

    def local_batch(
        self,
        arguments: dict[str, Any],
        config: PretrainedConfig,
        mesh: Mesh,
        verdict: MeshVerdict,  # noqa: ARG002
    ) -> LocalBatch:
        """See :meth:`ModelKind.local_batch`. A rank gets the whole clips of its rows."""
        for name, x in arguments.items():
            is_known = name in (*self.tensors, "num_items_in_batch")
            if not is_known and isinstance(x, torch.Tensor):
                raise UnsupportedModelError(
                    f"{name} has no rule on a sharded model of {self.words}, which takes {', '.join(self.tensors)}"
                )
        if getattr(config, "apply_spec_augment", False):
            raise UnsupportedModelError(
                "apply_spec_augment: each rank would hide other frames at random; set it to false in the model's config"
            )
        frames, positions = arguments.get(FRAMES), getattr(config, _POSITIONS, 0)
        if not isinstance(frames, torch.Tensor) or frames.dim() != 3 or not frames.is_floating_point():
            received = f"{frames.dtype} {list(frames.shape)}" if isinstance(frames, torch.Tensor) else frames
            raise CuboidError(f"{FRAMES} must be floats [batch, bins, frames], not {received}")
        if positions % granule(mesh):
            raise UnsupportedModelError(
                f"{_POSITIONS} is {positions}, which the mesh's axes (sequence {mesh.size('sequence')}, hidden "
                f"{mesh.size('hidden')}) don't divide; take others"
            )
        names = {"input_ids": "decoder_input_ids", "attention_mask": "decoder_attention_mask", "labels": "labels"}
        target = {key: arguments[name] for key, name in names.items() if arguments.get(name) is not None}
        rest = {name: x for name, x in arguments.items() if name not in (*TARGET_TENSORS, FRAMES)}
        batch = take_local_batch({**rest, **target}, config, mesh, inputs="only ids")
        if len(frames) != batch.rows:
            raise CuboidError(f"{FRAMES} has {len(frames)} rows, but decoder_input_ids has {batch.rows}")
        more = padded_length(batch.rows, mesh.size("batch")) - batch.rows
        clips = own_slice(with_rows(FRAMES, frames, more), 0, mesh.along("batch"))
        source = LocalBatch({FRAMES: clips}, batch.rows, positions, batch.options)
        return replace(batch, source=source, options={})

    def encode(self, model: Any, source: LocalBatch) -> Any:
        """See :meth:`SequenceToSequence.encode`."""
        sharding: Sharding = model.cuboid
        with knowing(lengths=WHOLE_IMAGES, packing=None):
            encoded = model.get_encoder()(**source.tensors, return_dict=True)
        positions = encoded.last_hidden_state.shape[1]
        if positions != source.length:
            raise UnsupportedModelError(
                f"the encoder of {type(model).__name__} has {positions} positions for {FRAMES} "
                f"{list(source.tensors[FRAMES].shape)}, where {_POSITIONS} is {source.length}"
            )
        assert isinstance(sharding.late, LateSplit)
        encoded.last_hidden_state = sharding.late.split_source(encoded.last_hidden_state, is_whole=True)
        return encoded

    def lengths_of(self, batch: LocalBatch, *, makes_masks: bool) -> Lengths:
        """See :meth:`ModelKind.lengths_of`."""
        assert batch.source is not None
        source = Lengths(batch.source.length, batch.source.length)
        return Lengths(batch.length, batch.padded, source, makes_masks)

    @classmethod
    def probe_config(
        cls,
        small: PretrainedConfig,
        make: Callable[[PretrainedConfig], PreTrainedModel],  # noqa: ARG003
    ) -> PretrainedConfig:
        """See :meth:`ModelKind.probe_config`. The encoder has few positions, which small meshes divide."""
        if not isinstance(getattr(small, _POSITIONS, None), int) or not hasattr(small, "num_mel_bins"):
            raise CannotProbe(f"its config has no {_POSITIONS} and num_mel_bins, which would tell the form of audio")
        config = copy.deepcopy(small)
        setattr(config, _POSITIONS, _FEW_POSITIONS)
        return config

    def micro_batch(self, case: Case, model: Any, rows_of: RowsOf, generator: torch.Generator) -> MicroBatch:
        """See :meth:`ModelKind.micro_batch`."""
        batch = super().micro_batch(case, model, rows_of, generator)
        config = model.config
        shape = (len(batch["labels"]), config.num_mel_bins, _FRAMES_OF_POSITION * getattr(config, _POSITIONS))
        frames = torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype)
        targets = {name: x for name, x in batch.items() if name in TARGET_TENSORS}
        return {FRAMES: frames, **targets}
