"""The config's activation checkpointing: with its script's, on meshes, and what attention's kernels run and keep."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

import cuboid
from attending import KernelCalls
from cuboid.config.schema import parse_config
from cuboid.distributed.topology import MeshShape
from cuboid.errors import ConfigError, CuboidError, UnsupportedModelError
from cuboid.integrations.handoff import adopt_model
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.attention.kept_attention import keeping_attention
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.certification.mesh_certificates import certified_plan
from cuboid.planner.comm_formula import recomputed_bytes
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.model_formulas import block_sizes
from threaded import Threaded, assert_as_alone, step_of

SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": None}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
LATENT = {
    **{"kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "first_k_dense_replace": 2},
}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
}
MESH = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}}
SEGMENTS = {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 3, "certification": "verified"}}
IDS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))


def small(architecture="llama", implementation="sdpa", **options):
    # With a key that its class doesn't read, it would be another model than the shipped tables know.
    heads = {"num_attention_heads": 12} if architecture == "gpt_neox" else HEADS
    config = AutoConfig.for_model(architecture, **{**SIZES, **heads, **options})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=implementation).train()


def checkpointing(mode, **more):
    return {"activation_checkpointing": {"mode": mode, **more}}


def counts(model, seed=0):
    """Loss, gradients, and kernels of attention of a step; what the generator draws next."""
    torch.manual_seed(seed)
    with KernelCalls() as calls:
        if hasattr(model, "staging"):
            loss = cuboid.Pipeline(model).train(iter([{"input_ids": IDS, "labels": IDS}]), 1)
        else:
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
    gradients = {name: gradient.clone() for name, gradient in cuboid.full_gradients(model).items()}
    model.zero_grad()
    return float(loss), gradients, calls.fused + calls.products, torch.rand(()).item()


def assert_same_bits(actual, expected):
    assert actual[0] == expected[0]
    assert actual[3] == expected[3]
    for name, gradient in expected[1].items():
        assert torch.equal(actual[1][name], gradient), name


@pytest.mark.parametrize("runs", [MESH, SEGMENTS], ids=["mesh", "segments"])
def test_each_mode_computes_the_same_and_only_layers_runs_attention_again(runs):
    none, layers, attention = (
        counts(cuboid.shard(small(), {**runs, **checkpointing(mode)})) for mode in ("none", "layers", "attention")
    )
    for actual in (layers, attention):
        assert_same_bits(actual, none)
    assert attention[2] == none[2]
    units = 3 if "pipeline" in runs else 1
    # A segment after the first has two calls: for itself, and for those before it.
    assert layers[2] - none[2] == 2 * (2 * units - 1)


@pytest.mark.parametrize("runs", [MESH, SEGMENTS], ids=["mesh", "segments"])
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_dropout_draws_the_same(runs, implementation):
    model = {"attention_dropout": 0.3, "implementation": implementation}
    model |= {"architecture": "gpt_neox", "hidden_dropout": 0.2}
    none, layers, attention = (
        counts(cuboid.shard(small(**model), {**runs, **checkpointing(mode)}))
        for mode in ("none", "layers", "attention")
    )
    assert_same_bits(attention, layers)
    assert_same_bits(attention, none)
    # Of an unfused call the second of two products isn't repeated.
    assert layers[2] - attention[2] == attention[2] - none[2] == 2 * (3 if "pipeline" in runs else 1)


def test_a_script_may_enable_it_too():
    calls = {mode: counts(cuboid.shard(small(), {**MESH, **checkpointing(mode)}))[2] for mode in ("none", "layers")}
    plain = small()
    plain.gradient_checkpointing_enable()
    before = cuboid.shard(plain, {**MESH, **checkpointing("attention")})
    assert counts(before)[2] == calls["none"]
    for mode, expected in (("none", "layers"), ("layers", "layers"), ("attention", "none")):
        model = cuboid.shard(small(), {**MESH, **checkpointing(mode)})
        model.gradient_checkpointing_enable()
        assert counts(model)[2] == calls[expected], mode
    model.gradient_checkpointing_disable()
    assert counts(model)[2] == calls["none"]
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    with pytest.raises(CuboidError, match=r'"use_reentrant": true.*write "layers"'):
        model.gradient_checkpointing_enable({"use_reentrant": True})


def test_a_scripts_own_choice_of_what_is_kept_stays():
    seen = []

    def contexts():
        seen.append(create_selective_checkpoint_contexts([torch.ops.aten.mm.default]))
        return seen[-1]

    model = cuboid.shard(small(), {**MESH, **checkpointing("attention")})
    expected = counts(model)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    actual = counts(model)
    assert_same_bits(actual, expected)
    assert actual[2] == expected[2]
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"mode": "full"}, r"activation_checkpointing.mode: Input should be 'none', 'layers' or 'attention'"),
        ({"mod": "layers"}, r'activation_checkpointing.mod is not a known key; did you mean "mode"'),
        ({"cpu_checkpointing": True}, r'cpu_checkpointing needs "mode": "layers" or "attention"'),
        ({"mode": "none", "cpu_checkpointing": True}, r'cpu_checkpointing is true, but mode "none" keeps nothing'),
        ({"mode": "layers", "partition_activations": True}, r"partition_activations: .*; leave it out"),
        ([], r"activation_checkpointing is \[\]; it is a section"),
    ],
)
def test_wrong_keys_are_named(section, message):
    with pytest.raises(ConfigError, match=message):
        cuboid.shard(small(), {**MESH, "activation_checkpointing": section})


def test_the_key_needs_a_sharded_model():
    with pytest.raises(ConfigError, match=r"activation_checkpointing.mode is for models that Cuboid shards"):
        cuboid.shard(small(), checkpointing("layers"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: small(implementation="flex_attention"), r'no rule for attn_implementation "flex_attention"'),
        (lambda: small("falcon", num_kv_heads=12), r"no layer of FalconForCausalLM computes attention through"),
    ],
    ids=["flex", "falcon"],
)
def test_models_whose_attention_cannot_be_kept_are_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        cuboid.shard(model(), {**MESH, **checkpointing("attention")})


def test_a_model_without_layers_that_can_be_checkpointed_is_refused(monkeypatch):
    model = small()
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(UnsupportedModelError, match=r'LlamaForCausalLM has no layers.*write "none"'):
        cuboid.shard(model, {**MESH, **checkpointing("layers")})


def test_a_model_that_is_sharded_already_takes_the_engines_section_or_has_the_same():
    model = cuboid.shard(small(), MESH)
    adopt_model(model, parse_config({**MESH, **checkpointing("layers")}))
    assert model.is_gradient_checkpointing
    with pytest.raises(ConfigError, match=r'mode "layers", but the config has "attention"'):
        adopt_model(model, parse_config({**MESH, **checkpointing("attention")}))
    adopt_model(model, parse_config(MESH))
    assert model.is_gradient_checkpointing


def sent(model, mesh, *, checkpointed):
    """Bytes that a rank sends in a forward and a backward, by axes, and the gradients of all ranks."""
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    threaded = Threaded(model, mesh)
    threaded.run(step_of(input_ids=IDS, labels=IDS))
    return cuboid.mesh_of(threaded.models[0]).comm_counter.snapshot(), threaded.gradients()


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["1x2x1", "1x2x2", "2x1x2"])
def test_a_recomputation_ends_before_the_layers_last_product(mesh):
    model, shape = small(num_hidden_layers=3), MeshShape.parse(mesh)
    none, gradients = sent(model, mesh, checkpointed=False)
    layers, recomputed = sent(model, mesh, checkpointed=True)
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in gradients.items())
    sizes = block_sizes(describe_modules(model), shape)
    by_formula = recomputed_bytes(sizes, shape, *IDS.shape, element_bytes=8, statistic_bytes=8)
    assert {axes: layers[axes] - none[axes] for axes in by_formula} == {axes: 3 * n for axes, n in by_formula.items()}


@pytest.mark.sample(2, ci=3)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 5}),
        ("gpt_oss", {"implementation": "eager", "head_dim": 4, "sliding_window": 4, "num_local_experts": 4,
                     "num_experts_per_tok": 2, "layer_types": None}),
        ("deepseek_v3", LATENT),
    ],
)  # fmt: skip
def test_kept_attention_on_meshes(architecture, options, mesh):
    model = small(architecture, **options)
    contexts = keeping_attention(lambda: (torch.enable_grad(), KeepFloat64()))
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    mask = torch.ones_like(IDS)
    mask[0, -3:] = 0
    assert_as_alone(model, mesh, step_of(input_ids=IDS, labels=IDS.masked_fill(mask == 0, -100), attention_mask=mask))


@pytest.mark.slow
def test_kept_attention_beside_recurrent_layers():
    model = small("qwen3_next", **LINEAR)
    verdict = certified_plan(model, MeshShape(1, 2, 1)).verdict
    contexts = keeping_attention(lambda: (torch.enable_grad(), KeepFloat64()))
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    assert_as_alone(model, "1x2x1", step_of(input_ids=IDS, labels=IDS), verdict)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("keeps", [False, True])
def test_blocks_that_a_mesh_computes_whole_are_recomputed_too(keeps):
    # They gather their parameters by hooks of their own, which must not hide those of checkpointing.
    model, saved = small(), []

    def note_input(_, arguments):
        saved.append(weakref.ref(arguments[0]))

    def step(sharded):
        for layer in sharded.model.layers:
            for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
                module.register_forward_pre_hook(cuboid.local_hook(note_input))
        loss = sharded(input_ids=IDS, labels=IDS, use_cache=False).loss
        alive.append(sum(x() is not None for x in saved))
        loss.backward()
        return loss.detach()

    alive = []
    verdict = MeshVerdict(whole_blocks=("self_attn", "mlp"))
    Threaded(model, "1x2x2", verdict).run(step)
    assert max(alive) > 0

    def again():
        return torch.enable_grad(), KeepFloat64()

    contexts = keeping_attention(again) if keeps else again
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    alive.clear()
    saved.clear()
    Threaded(model, "1x2x2", verdict).run(step)
    assert alive == [0, 0, 0, 0]
    assert_as_alone(model, "1x2x2", step_of(input_ids=IDS, labels=IDS), verdict)


def live_bytes():
    """Of all storages that Python's objects refer to."""
    gc.collect()
    storages = {}
    for candidate in gc.get_objects():
        # Sparse and fake tensors of other tests have no storage.
        if type(candidate) in (torch.Tensor, torch.nn.Parameter) and candidate.layout is torch.strided:
            storage = candidate.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_what_is_kept_is_the_output_and_the_log_sum_exp():
    held = []
    for keeps in (False, True):
        model = small()
        contexts = {"context_fn": keeping_attention(None)} if keeps else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **contexts})
        threaded = Threaded(model, "1x2x1")
        outputs = threaded.run(lambda model: model.base_model(input_ids=IDS, use_cache=False).last_hidden_state)
        held.append(live_bytes())
        del outputs
        held[-1] -= live_bytes()
    # Two layers of 12 heads of 4 features: for each token the output and a log-sum-exp, both in float64.
    assert held[1] - held[0] == 2 * IDS.numel() * 12 * (4 + 1) * 8
