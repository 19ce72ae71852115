"""Encoder-decoders of audio on a mesh: an encoder that is computed whole, and a decoder that is split."""

import pytest
import torch
from transformers import (
    AutoModelForSpeechSeq2Seq,
    MoonshineForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.errors import CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.default_models import default_config
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.mesh_check import check_meshes
from cuboid.models.kinds.registry import check_class
from threaded import Threaded, assert_as_alone, step_of

VERDICT = MeshVerdict(inputs="only ids", splits_late=True, counts_items=False)
MESHES = ("1x3x1", "2x1x1", "1x1x2", "2x1x2", "3x2x1")


def built(**changes):
    torch.manual_seed(0)
    fields = dict(
        **{"vocab_size": 61, "num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 24, "decoder_ffn_dim": 36},
        **{"max_source_positions": 12, "max_target_positions": 32, "dropout": 0.0, "pad_token_id": 0},
        **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    )
    config = WhisperConfig(**{**fields, **changes})
    model = WhisperForConditionalGeneration._from_config(config, dtype=torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 * (parameter.dim() == 1), 0.2)
    return model


def micro_batch(rows=3, length=13, seed=0, mask=False):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, 61, (rows, length), generator=generator)
    labels[0, -4:] = -100
    batch = {"input_features": torch.randn((rows, 6, 24), generator=generator, dtype=torch.float64), "labels": labels}
    if mask:
        batch["decoder_input_ids"] = labels.clamp(min=0)
        batch["decoder_attention_mask"] = (labels != -100).long()
    return batch


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_every_gradient_are_those_of_one_process(mesh, mask):
    assert_as_alone(built(), mesh, step_of(**micro_batch(mask=mask)), VERDICT)


def trained(model):
    """The losses of three steps of SGD."""
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], 1e-2, momentum=0.9)
    losses = []
    for seed in range(3):
        optimizer.zero_grad()
        loss = model(**micro_batch(seed=seed)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_from_slices(path, mesh, out):
    """On a rank: losses of a model that was loaded, and its weights, which are saved."""
    model = cuboid.from_pretrained(path, {"tensor_parallel": mesh_section(mesh)}, dtype=torch.float64).train()
    with KeepFloat64():
        losses = trained(model)
    model.save_pretrained(out)
    return losses, cuboid.full_state_dict(model)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x1", "1x1x2"])
def test_training_from_slices_is_that_of_plain_transformers(pool, tmp_path, mesh):
    plain, out = built(), tmp_path / "out"
    plain.save_pretrained(tmp_path / "start")
    results = pool.run(2, trained_from_slices, str(tmp_path / "start"), mesh, str(out), timeout_s=TIMEOUT_S)
    with KeepFloat64():
        losses = trained(plain)
    assert [result[0] for result in results] == [pytest.approx(losses, rel=1e-9)] * 2
    saved = AutoModelForSpeechSeq2Seq.from_pretrained(out, dtype=torch.float64).state_dict()
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(results[0][1][name], x, rtol=1e-9, atol=1e-9)
        assert torch.equal(saved[name], results[0][1][name])


@pytest.mark.slow
def test_default_configs_pass_the_probe():
    verdict = check_meshes(WhisperForConditionalGeneration, default_config("whisper"))
    assert not verdict.refused


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_mask": torch.ones(3, 24)}, "attention_mask has no rule on a sharded model of transcription"),
        ({"input_features": torch.zeros(3, 6, dtype=torch.float64)}, r"must be floats \[batch, bins, frames\]"),
        (
            {"input_features": torch.zeros(2, 6, 24, dtype=torch.float64)},
            r"labels is \[3, 13\], but input_features is \[2, 6, 24\]",
        ),
    ],
)
def test_what_there_is_no_rule_for_is_said(changes, words):
    threaded = Threaded(built(), "1x1x2", VERDICT)
    with pytest.raises(CuboidError, match=words):
        threaded.run(step_of(**{**micro_batch(), **changes}))


def test_hidden_frames_are_refused_by_the_key():
    threaded = Threaded(built(apply_spec_augment=True), "1x1x2", VERDICT)
    with pytest.raises(UnsupportedModelError, match="apply_spec_augment: each rank would hide other frames"):
        threaded.run(step_of(**micro_batch()))


def test_a_mesh_that_does_not_divide_the_positions_of_clips_is_refused():
    threaded = Threaded(built(max_source_positions=10), "1x3x1", VERDICT)
    with pytest.raises(
        UnsupportedModelError, match=r"max_source_positions is 10, which the mesh's axes .* don't divide"
    ):
        threaded.run(step_of(**micro_batch()))


def test_a_pipeline_and_other_models_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="Leave the pipeline section out: a mesh takes it"):
        check_class(WhisperForConditionalGeneration, stages=True)
    with pytest.raises(UnsupportedModelError, match="MoonshineForConditionalGeneration is for generation from input_v"):
        check_class(MoonshineForConditionalGeneration)
