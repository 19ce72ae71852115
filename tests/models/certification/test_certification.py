"""Architectures are accepted because they were seen to be right: what depends on lengths and masks, and the probe."""

import copy
import functools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from filelock import FileLock
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import cuboid
from conftest import TIMEOUT_S
from cuboid.errors import CheckpointError, CuboidError, UnsupportedModelError
from cuboid.models.architectures.certificate import LABELLED, Certificate, MeshVerdict, Verdict
from cuboid.models.batch.length_cases import Case
from cuboid.models.certification import certificates, check, mesh_certificates, mesh_check, sides, trials
from cuboid.models.certification.float64 import precision
from cuboid.models.certification.layer_kinds import layer_kinds
from cuboid.models.certification.small_config import LONGEST, small_config
from cuboid.models.kinds.probe_rows import CannotProbe, probe_rows
from cuboid.models.routers.router_loss import RouterSums, exact_router_loss
from cuboid.models.stages.units import SegmentedBatch
from cuboid.tensor3d.layers.vocab_cross_entropy import shifted

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [4.0, 3.0, 2.0, 5.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "original_max_position_embeddings": 12,
}
#: For the sizes of Phi-3's defaults.
LONGER = {**LONG, "long_factor": [4.0] * 48, "short_factor": [1.0] * 48, "original_max_position_embeddings": 4096}
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def model_of(architecture, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**SIZES, **options})
    for name in ("dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def rows(length, padding):
    """Two rows of tokens, labels and perhaps a mask."""
    ids = torch.randint(0, 67, (2, length), generator=torch.Generator().manual_seed(length))
    if padding is None:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :5] = 0
    else:
        mask[1, -5:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def reference(model, batches):
    plain = copy.deepcopy(model)
    items = sum(int((shifted(batch["labels"], -100) != -100).sum()) for batch in batches)
    total = 0.0
    with precision(keep_float64=True):
        for batch in batches:
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            logits = plain(**inputs, use_cache=False).logits
            losses = nn.functional.cross_entropy(
                logits.flatten(0, 1), shifted(batch["labels"], -100).flatten(), ignore_index=-100, reduction="sum"
            )
            (losses / items).backward()
            total += float(losses.detach()) / items
    return total, {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}


def errors_of(loss, gradients, expected):
    """The largest relative error of the loss and all gradients, and of which."""
    wanted_loss, wanted = expected
    assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
    floor = 1e-6 * max(float(x.norm()) for x in wanted.values())  # of what is nothing but for rounding
    errors = {name: float((gradients[name] - x).norm() / x.norm().clamp(min=floor)) for name, x in wanted.items()}
    errors["loss"] = abs(float(loss) - wanted_loss) / abs(wanted_loss)
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def in_a_pipeline(architecture, options, section, batches):
    """On each rank the largest error of a step of a pipeline against plain transformers."""
    model = model_of(architecture, **options)
    expected = reference(model, batches)
    staged = cuboid.shard(model, {"pipeline": {"engine": "seq1f1b", **section}})
    pipeline = cuboid.Pipeline(staged)
    seen = []
    for module in staged.modules():  # a user's hooks only ever see real tensors
        module.register_forward_hook(cuboid.local_hook(lambda _, __, output: seen.extend(tree_leaves(output))))
    with precision(keep_float64=True):
        loss = pipeline.train(iter(copy.deepcopy(batches)), len(batches))
    assert seen
    assert not any(isinstance(output, FakeTensor) for output in seen)
    gradients = cuboid.full_gradients(staged)
    return errors_of(loss, gradients, expected) if gradients else (0.0, "")


def on_a_mesh(architecture, options, axes, batch):
    """The same of a forward and backward on a mesh without a pipeline."""
    model = model_of(architecture, **options)
    expected = reference(model, [batch])
    sharded = cuboid.shard(model, {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}})
    with precision(keep_float64=True):
        loss = sharded(**batch).loss
        loss.backward()
    gradients = cuboid.full_gradients(sharded)
    return errors_of(loss, gradients, expected) if gradients else (0.0, "")


# --- what depends on lengths and masks -----------------------------------------------------------------------------

OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
LLAMA4 = {
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "floor_scale": 7,
    "attention_chunk_size": 8,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("architecture", "options", "segments", "padding"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, 3, None),
        pytest.param("llama", {"rope_parameters": LONG}, 3, "right", marks=pytest.mark.slow),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 12}, 2, None),
        pytest.param("llama4_text", LLAMA4, 3, None, marks=pytest.mark.slow),
        pytest.param("opt", OPT, 1, "left", marks=pytest.mark.slow),
        ("opt", OPT, 3, "left"),
    ],
)
def test_stages_and_segments_of_models_that_look_at_lengths_and_masks(pool, architecture, options, segments, padding):
    # Above and below the lengths at which rotary embeddings change, in an order that leaves state behind.
    batches = [rows(23, padding), rows(9, padding), rows(19, padding)]
    section = {"stages": 2, "segments": segments, "partition": "even"}
    errors = pool.run(2, in_a_pipeline, architecture, options, section, batches, timeout_s=TIMEOUT_S)
    assert all(error < 1e-9 for error, _ in errors), errors


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("length", [23, 11, 15])
def test_a_mesh_that_fills_sequences_up_leaves_rotary_embeddings_as_they_are(pool, rope, length):
    options, axes = {"rope_parameters": rope}, {"sequence": 1, "hidden": 2}
    for error, name in pool.run(2, on_a_mesh, "llama", options, axes, rows(length, None), timeout_s=TIMEOUT_S):
        assert error < 1e-9, name


# --- the probe -------------------------------------------------------------------------------------------------------


def verdict_of(architecture, **options):
    config = AutoConfig.for_model(architecture, **options)
    return check.check(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("architecture", "options", "kind"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, "whole rows"),
        ("phi3", {"rope_parameters": LONGER}, "whole rows"),
        ("opt", {}, "padding on the left"),
    ],
)
def test_the_probe_finds_what_it_was_made_for(monkeypatch, architecture, options, kind):
    assert not verdict_of(architecture, **options).refused["segments"].get(kind)

    def unit_alone(self, segment, store):
        """A segment as it would be if nothing were known of its whole sequence."""
        return dataclass_without_replay(original(self, segment, store))

    original = SegmentedBatch.unit
    monkeypatch.setattr(SegmentedBatch, "unit", unit_alone)
    assert "differs by" in verdict_of(architecture, **options).refused["segments"][kind]


def dataclass_without_replay(unit):
    return type(unit)(unit.store, unit.start, unit.stop, unit.length, unit.attention_mask, unit.packed)


def test_a_small_config_has_layers_of_all_kinds():
    jamba = transformers.JambaConfig()
    small = small_config(jamba)
    assert (small.num_hidden_layers, small.attn_layer_period, small.expert_layer_period) == (4, 4, 2)
    kinds = [
        set(zip(config.layers_block_type, config.layers_num_experts, strict=True))
        for config in (transformers.JambaConfig(num_experts=small.num_experts), small)
    ]
    assert kinds[0] == kinds[1]
    # Layers that use the keys and values of earlier ones are another kind.
    small = small_config(transformers.Gemma3nTextConfig())
    assert 2 <= small.num_kv_shared_layers < small.num_hidden_layers == 8
    small = small_config(transformers.Zamba2Config())
    assert [index for index, kind in enumerate(small.layers_block_type) if kind == "hybrid"] == small.hybrid_layer_ids


SPARSE = {"num_experts": 8, "num_hidden_layers": 24}


@pytest.mark.parametrize(
    ("architecture", "options", "layers"),
    [
        ("llama", {}, 3),
        ("deepseek_v3", {"first_k_dense_replace": 20}, 3),
        ("ernie4_5_moe", {"moe_layer_start_index": 3}, 4),
        ("qwen3_moe", {"mlp_only_layers": [3], **SPARSE}, 4),
        ("qwen3_moe", {"mlp_only_layers": [17], **SPARSE}, 3),
        ("qwen3_moe", {"decoder_sparse_step": 4, **SPARSE}, 4),
        ("llama4_text", {"interleave_moe_layer_step": 6}, 12),
        ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 16}, 4),
    ],
)
def test_a_small_model_has_all_kinds_of_layers_wherever_they_begin(architecture, options, layers):
    config = AutoConfig.for_model(architecture, **options)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    small = sides.small_for_probe(cls, config)
    deep = small_config(config, range(config.num_hidden_layers))
    with torch.device("meta"):
        (kinds,), (real,) = (layer_kinds(cls(config)).values() for config in (small, deep))
    assert set(kinds) == set(real)
    assert small.num_hidden_layers == layers


class LateShift(transformers.LlamaForCausalLM):
    """From its sixth layer on, an MLP sees the token before."""

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.mlp.shifts = index >= 5


def shifting(forward):
    def inner(self, x):
        shifts = getattr(self, "shifts", False)
        return forward(self, x + nn.functional.pad(x[:, :-1], (0, 0, 1, 0)) if shifts else x)

    return inner


@pytest.mark.ci
def test_what_only_late_layers_do_is_probed(monkeypatch):
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    monkeypatch.setattr(mlp, "forward", shifting(mlp.forward))
    shallow = check.check(LateShift, transformers.LlamaConfig(num_hidden_layers=5))
    assert shallow.reason_against("segments") is None
    assert "differs by" in check.check(LateShift, transformers.LlamaConfig()).reason_against("segments")


def test_a_model_with_more_kinds_of_layers_than_a_probe_can_hold_is_named():
    class Various(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for index, layer in enumerate(self.model.layers):
                layer.what = str(index)

    with pytest.raises(CannotProbe, match=r"model.layers.3 is of a kind that no small model of up to 12 layers has"):
        sides.small_for_probe(Various, transformers.LlamaConfig(num_hidden_layers=20))


def test_rotary_embeddings_that_remember_the_longest_sequence_are_right_in_any_order():
    assert not any(verdict_of("llama", rope_parameters=DYNAMIC).refused.values())


def test_one_wrong_kind_of_two_in_a_micro_batch_is_told_apart():
    labelled = LABELLED["padding on the right"]
    both = (("padding on the right", Case("a", 5)), (labelled, Case("b", 5)))
    asked = []

    def batch_of(cases, _):
        return {"names": "".join(case.name for _, case in cases)}

    def compare(batch, expected):
        asked.append(batch["names"])
        return (1.0 if "b" in batch["names"] else 1e-12), "the loss"

    groups = [(("whole rows", Case("w", 5)),), (), both]
    tested = trials.Trials(groups, batch_of, lambda _: trials.ProbeOutcome(None, {}), 1e-9)
    refused, largest = tested.refusals(compare)
    assert asked == ["w", "ab", "a", "b"]
    assert refused == {labelled: "the loss differs by 1.0e+00 (b, 5 tokens)"}
    assert largest == 1e-12


@pytest.mark.parametrize(("says_length", "words"), [(True, "(w, 5 tokens)"), (False, "(w)")])
def test_reasons_say_where_a_side_fails(says_length, words):
    def fail(batch, expected):
        raise CuboidError("no rule")

    groups = [(("whole rows", Case("w", 5)),), (("padding on the left", Case("l", 5)),)]
    tested = trials.Trials(groups, lambda *_: {}, lambda _: trials.ProbeOutcome(None, {}), 1e-9)
    assert tested.refusals(fail, says_length=says_length) == ({"whole rows": f"no rule {words}"}, 0.0)


def test_a_model_that_fails_is_told_from_one_that_fails_on_some_rows():
    def run(batch):
        if batch["fails"]:
            raise ValueError("not these")
        return trials.ProbeOutcome(None, {})

    whole_rows, padded = (("whole rows", Case("w", 5)),), (("padding on the left", Case("l", 5)),)
    with pytest.raises(CannotProbe, match="a small one doesn't run: ValueError: not these"):
        trials.Trials([whole_rows, padded], lambda _, number: {"fails": number == 0}, run, 1e-9)
    tested = trials.Trials([whole_rows, padded], lambda _, number: {"fails": number == 1}, run, 1e-9)
    refused, _ = tested.refusals(lambda *_: (0.0, "the loss"))
    assert refused == {"padding on the left": "the model itself fails there: ValueError: not these (l, 5 tokens)"}


def test_a_small_classifier_of_deberta_runs():
    config = transformers.DebertaV2Config(num_hidden_layers=1)
    model = transformers.DebertaV2ForSequenceClassification(small_config(config))
    assert model(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()


def test_a_small_config_keeps_what_decides_and_crosses_every_length():
    config = transformers.Gemma3TextConfig(num_hidden_layers=26, sliding_window=4096, vocab_size=262144)
    small = small_config(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers < 8
    assert small.sliding_window < LONGEST
    assert (small.hidden_size, small.vocab_size) == (64, 61)
    assert config.sliding_window == 4096
    # Sizes don't matter to what is known of a model, flags do.
    features = [
        certificates.features_of(transformers.LlamaForCausalLM, transformers.LlamaConfig(**options))
        for options in (
            {},
            {"hidden_size": 8192, "num_attention_heads": 64, "rms_norm_eps": 1e-5},
            {"transformers_weights": "rank-pipe0-b0-s0-h1.safetensors"},
            {"num_hidden_layers": 2},
            {"mlp_bias": True},
        )
    ]
    assert features[0] == features[1] == features[2] == features[3] != features[4]


@pytest.mark.parametrize(
    ("architecture", "shifts"),
    [("llama", True), ("bart", False), ("pegasus", False), ("trocr", False), ("whisper", False)],
)
def test_a_models_own_loss_says_whether_labels_are_shifted(architecture, shifts):
    config = AutoConfig.for_model(architecture)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    assert certificates.certificate_of(cls, config).shifts_labels is shifts, "in the table"
    with sides.quiet_cpu(), precision(keep_float64=True):
        model = sides.random_model(cls, small_config(config), None, trials.ATTEMPTS[0])
        batch = probe_rows(Case("", 12), model.config.vocab_size)
        assert sides.run_plain(model, batch).shifts_labels is shifts


def test_a_model_with_another_loss_is_no_pipelines(monkeypatch):
    class Weighed(transformers.LlamaForCausalLM):
        def loss_function(self, logits, labels, vocab_size, **kwargs):
            return 2 * super().loss_function(logits, labels, vocab_size, **kwargs)

    verdict = certificates.find_out(Weighed, transformers.LlamaConfig()).verdict
    assert "its own loss isn't what a pipeline computes" in verdict.reason_against("whole")


@pytest.mark.slow
def test_the_probe_sees_to_the_routers_loss(monkeypatch):
    assert not any(verdict_of("mixtral", output_router_logits=True).refused.values())

    def own_part_only(self, sums):
        return torch.zeros_like(sums[0])

    monkeypatch.setattr(RouterSums, "gradient", own_part_only)
    assert "gate.weight differs by" in verdict_of("mixtral", output_router_logits=True).reason_against("whole")

    class Squared(transformers.MixtralForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = output.loss + output.aux_loss.square()
            return output

    config = transformers.MixtralConfig(output_router_logits=True)
    verdict = certificates.find_out(Squared, config).verdict
    assert "the load balancing of all routers" in verdict.reason_against("whole")


def test_a_routers_loss_by_another_name_is_left_in_the_models_own():
    config = AutoConfig.for_model("jetmoe", output_router_logits=True)
    with sides.quiet_cpu(), precision(keep_float64=True):
        model = sides.random_model(transformers.JetMoeForCausalLM, small_config(config), None, trials.ATTEMPTS[0])
        batch = probe_rows(Case("", 12), model.config.vocab_size)
        assert exact_router_loss(model, model(**batch), None) is None
        assert sides.run_plain(model, batch).shifts_labels is None


@pytest.mark.slow
def test_all_mixtures_with_a_load_balancing_loss_have_it_in_a_pipeline():
    right = [
        *("olmoe", "granitemoe", "granitemoeshared", "granitemoehybrid", "phimoe", "qwen2_moe", "qwen3_moe", "gpt_oss"),
        *("minimax", "minimax_m2", "ernie4_5_moe", "flex_olmo", "qwen3_next", "qwen3_5_moe_text", "laguna", "flint"),
    ]
    refused = {
        architecture: verdict_of(architecture, output_router_logits=True).reason_against("segments")
        for architecture in right
    }
    assert not any(refused.values()), refused


def test_router_logits_without_a_gradient_are_an_error():
    model = model_of("mixtral", output_router_logits=True, router_aux_loss_coef=0.5, num_local_experts=4)
    staged = cuboid.shard(model, {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 2}})
    staged.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(CuboidError, match=r"router logits have no gradient, .*use_reentrant"):
        cuboid.Pipeline(staged).train(iter([rows(12, None)]), 1)


class WithoutFloat64(transformers.LlamaForCausalLM):
    def __init__(self, config):
        if torch.get_default_dtype() == torch.float64:
            raise TypeError("no float64")
        super().__init__(config)


def test_a_class_that_cannot_be_made_in_float64_is_probed_in_float32():
    certificate = certificates.find_out(WithoutFloat64, transformers.LlamaConfig())
    assert not certificate.obstacle
    assert not any(certificate.verdict.refused.values())


def test_the_shipped_table_is_what_the_probe_finds():
    table = json.loads(certificates.TABLE.read_text(encoding="utf-8"))
    for architecture in ("llama", "gptj"):
        config = AutoConfig.for_model(architecture)
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        key, entry = certificates.entry_of(certificates.features_of(cls, config), certificates.find_out(cls, config))
        known = table["architectures"][architecture][key]
        assert {**known, "error": 0} == {**entry, "error": 0}


@pytest.mark.parametrize("architecture", ["bloom", "gpt_oss"])
def test_the_shipped_table_knows_a_loaded_model_that_has_no_fused_attention(architecture):
    config = AutoConfig.for_model(architecture)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # What a model of such a class sets when it is made.
    config._attn_implementation = "eager"
    assert certificates.Question.of(cls, config).known(certificates.TABLE) is not None


# --- what comes of it ------------------------------------------------------------------------------------------------


def staged(architecture, tmp_path, pipeline, **options):
    """``from_pretrained`` of a folder that has a config and none of the model's weights."""
    AutoConfig.for_model(architecture, **options).save_pretrained(tmp_path)
    unrelated = {f"unrelated.{index}": torch.zeros(1) for index in range(100)}
    save_file(unrelated, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return cuboid.from_pretrained(tmp_path, {"pipeline": {"engine": "seq1f1b", "stages": 1, **pipeline}})


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("architecture", ["mamba", "jamba", "recurrent_gemma"])
def test_models_that_need_whole_sequences_are_rejected_before_weights_are_read(tmp_path, architecture):
    with pytest.raises(UnsupportedModelError, match=r'"segments": 1 is right|with 1 it may'):
        staged(architecture, tmp_path, {"segments": 2})


def test_a_model_without_a_probe_needs_a_verified_checkpoint(tmp_path, monkeypatch):
    def fail(*_):
        raise CannotProbe("it is too odd")

    monkeypatch.setattr(certificates, "check", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(certificates, "entries_of", lambda _: {})
    with pytest.raises(UnsupportedModelError, match=r'too odd.*cuboid verify.*"certification": "verified"'):
        staged("llama", tmp_path / "model", {"segments": 2}, **SIZES)
    with pytest.raises(CheckpointError, match=r"no .*tensor for"):  # which is to say, it went on to the weights
        staged("llama", tmp_path / "model", {"segments": 2, "certification": "verified"}, **SIZES)


@pytest.mark.slow
def test_verify_judges_a_model_without_a_probe_by_its_weights(tmp_path, monkeypatch):
    config = transformers.LlamaConfig(**{**SIZES, "mlp_bias": True, "hidden_act": "gelu"})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = certificates.Question.of(transformers.LlamaForCausalLM, config).file
    certificates.remember(file, Certificate(None, "it is too odd"))
    assert certificates.certificate_of(transformers.LlamaForCausalLM, config).verdict is None
    command = [sys.executable, "-m", "cuboid.cli", "verify", "--model", tmp_path / "model", "--stages", "1"]
    command += ["--segments", "2", "--no-engine", "--steps", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_cache_is_never_trusted(tmp_path, monkeypatch):
    runs = []

    def probe(*_):
        runs.append(1)
        return Verdict({"whole": {}, "segments": {"packed sequences": "no"}, "filled": {}}, 1e-15)

    monkeypatch.setattr(certificates, "check", probe)
    monkeypatch.setattr(certificates, "entries_of", lambda _: {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def known():
        # As another process does.
        certificates._found.cache_clear()
        return certificates.certificate_of(transformers.LlamaForCausalLM, transformers.LlamaConfig())

    first = known()
    assert known() == first
    assert first.verdict.refused["segments"] == {"packed sequences": "no"}
    assert len(runs) == 1
    (file,) = (tmp_path / "cuboid" / "certificates").glob("*.json")
    for damage in (b"", b"[]", b"{}", b"\xff", b'{"refused": {"x": {"y": "z"}}}', b"[" * 100_000, b'{"refused": 3}'):
        file.write_bytes(damage)
        assert known() == first
    assert len(runs) == 8


def test_a_process_probes_once_where_the_cache_cannot_be_written(tmp_path, monkeypatch):
    runs = []

    def probe(*_):
        runs.append(1)
        raise CannotProbe("it is too odd")

    (tmp_path / "cuboid").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module, name in ((certificates, "check"), (mesh_certificates, "check_meshes")):
        monkeypatch.setattr(module, name, probe)
    monkeypatch.setattr(certificates, "entries_of", lambda _: {})
    for _ in range(2):
        config = transformers.LlamaConfig()
        assert certificates.certificate_of(transformers.LlamaForCausalLM, config).obstacle == "it is too odd"
        with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM can't be probed.*: it is too odd"):
            mesh_certificates.mesh_verdict(transformers.LlamaForCausalLM, config)
    assert len(runs) == 2


def test_a_file_of_the_cache_that_cannot_be_written_leaves_nothing(tmp_path):
    file = tmp_path / "x.json"
    file.mkdir()
    certificates.remember(file, Certificate(None, "it is too odd"))
    assert list(tmp_path.iterdir()) == [file]


def test_ranks_that_start_together_find_out_once(tmp_path, monkeypatch):
    runs, file = [], tmp_path / "cache" / "x.json"

    def find():
        runs.append(1)
        time.sleep(0.2)
        return "found"

    def found(_=None):
        return certificates.found_once(file, find, lambda entry: entry["is"], lambda value: {"is": value})

    with ThreadPoolExecutor(4) as ranks:
        assert list(ranks.map(found, range(4))) == ["found"] * 4
    assert len(runs) == 1
    # While another process holds the lock for too long, and where the cache can't be written.
    file.unlink()
    monkeypatch.setattr(certificates, "_LONGEST_WAIT_S", 0.1)
    with FileLock(file.with_suffix(".lock")):
        assert found() == "found"
    assert len(runs) == 2
    file = tmp_path / "cache" / "x.json" / "no folder" / "y.json"
    assert found() == "found"
    assert len(runs) == 3


def test_kinds_of_micro_batches_that_are_wrong_are_rejected_by_name():
    certificate = Certificate(Verdict({"segments": {"padding on the left": "as seen", "packed sequences": "too"}}))
    ids = torch.zeros((2, 6), dtype=torch.long)
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :2], right[1, 4:] = 0, 0
    restarting = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for batch in ({"attention_mask": right}, {"position_ids": torch.arange(6)[None]}, {}):
        certificate.check_batch(batch, ("segments",), "Model")
    with pytest.raises(CuboidError, match="padding on the left, with which Model isn't right"):
        certificate.check_batch({"attention_mask": left}, ("segments",), "Model")
    with pytest.raises(CuboidError, match="packed sequences"):
        certificate.check_batch({"position_ids": restarting}, ("segments",), "Model")
    certificate.check_batch({"attention_mask": left}, ("whole",), "Model")


@pytest.mark.parametrize(
    ("mask", "sides"),
    [
        ([[1, 1, 1], [1, 1, 1]], ()),
        ([[0, 1, 1], [1, 1, 1]], ("left",)),
        ([[1, 1, 0], [1, 1, 1]], ("right",)),
        ([[0, 0, 0], [1, 1, 1]], ("right",)),
        ([[0, 1, 1], [1, 1, 0]], ("left", "right")),
        ([[0, 1, 0], [1, 1, 1]], ("left", "right")),
        ([[1, 0, 1], [1, 1, 1]], ("left", "right")),
    ],
)
def test_padding_on_both_sides_is_of_both_kinds(mask, sides):
    mask = torch.tensor(mask)
    for side in ("left", "right"):
        for kind in (f"padding on the {side}", f"labels in padding on the {side}"):
            batch = {"attention_mask": mask, "labels": torch.zeros_like(mask)}
            mesh, pipeline = MeshVerdict({kind: "as seen"}), Certificate(Verdict({"whole": {kind: "as seen"}}))
            checks = (
                functools.partial(mesh.check_batch, batch, "Model"),
                functools.partial(pipeline.check_batch, batch, ("whole",), "Model"),
            )
            for check_batch in checks:
                if side in sides:
                    with pytest.raises(CuboidError, match=f"the micro-batch has {kind}, with which"):
                        check_batch()
                else:
                    check_batch()


def test_labels_are_looked_for_in_the_padding_of_each_side():
    mask, labels = torch.tensor([[0, 1, 1, 0]]), torch.tensor([[-100, 5, 5, 5]])
    batch = {"attention_mask": mask, "labels": labels}
    MeshVerdict({"labels in padding on the left": "as seen"}).check_batch(batch, "Model")
    with pytest.raises(CuboidError, match="labels in padding on the right"):
        MeshVerdict({"labels in padding on the right": "as seen"}).check_batch(batch, "Model")


def test_labels_in_padding_are_told_from_labels_of_tokens():
    mask, labels = torch.ones((2, 6), dtype=torch.long), torch.zeros((2, 6), dtype=torch.long)
    mask[0, 4:] = 0
    hidden = labels.masked_fill(mask == 0, -100)
    verdict = MeshVerdict({"labels in padding on the right": "as seen"})
    shifts = [shifted(x, -100) for x in (labels, hidden)]
    wrong = [{"labels": labels}, {"shift_labels": shifts[0]}, {"shift_labels": torch.zeros_like(labels)}]
    for batch in wrong:
        with pytest.raises(CuboidError, match="right on a mesh: as seen; give what is padding the label -100"):
            verdict.check_batch({"attention_mask": mask, **batch}, "Model")
        verdict.check_batch(batch, "Model")
    # The label of a row is no token's.
    for batch in ({"labels": hidden}, {"shift_labels": shifts[1]}, {"labels": torch.zeros(2)}, {}):
        verdict.check_batch({"attention_mask": mask, **batch}, "Model")
    # What comes before a row's first token predicts it, in all of Hugging Face's causal models.
    left = mask.flip(1)
    verdict = MeshVerdict({"labels in padding on the left": "as seen"})
    verdict.check_batch({"attention_mask": left, "shift_labels": shifted(hidden.flip(1), -100)}, "Model")
    with pytest.raises(CuboidError, match="labels in padding on the left"):
        verdict.check_batch({"attention_mask": left, "labels": labels}, "Model")
    # An encoder's padding has none, a decoder's has.
    verdict = MeshVerdict({"labels in padding on the right": "as seen"})
    verdict.check_batch({"attention_mask": mask, "decoder_attention_mask": torch.ones(2, 6), "labels": labels}, "Model")
    with pytest.raises(CuboidError, match="labels in padding on the right"):
        verdict.check_batch({"decoder_attention_mask": mask, "labels": labels}, "Model")


def test_what_is_probed_in_a_load_is_tied_as_the_model_is(tmp_path, monkeypatch):
    # transformers' loader turns tying off for the time of a load, in which the probe runs.
    probed = []

    def look(model, *_):
        probed.append(model.lm_head.weight is model.model.embed_tokens.weight)
        raise CannotProbe("that was all")

    monkeypatch.setattr(mesh_check, "_Probe", look)
    monkeypatch.setattr(certificates, "entries_of", lambda _: {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("WORLD_SIZE", "2")
    section = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}}}
    with pytest.raises(UnsupportedModelError, match="that was all"):
        cuboid.from_pretrained(tmp_path / "model", section)
    assert probed
    assert all(probed)
