"""Every kind of adapter and option of PEFT, and several adapters: as in plain PEFT, or refused by name beforehand."""

import copy
import dataclasses
import json

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from test_lora import DENSE, Adapted, adapted, assert_step, batch, built, in_both
from test_lora_ends import ended
from test_lora_stages import Staged
from transformers import AutoModelForCausalLM

import cuboid
from conftest import TIMEOUT_S
from cuboid.errors import UnsupportedModelError
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.sharded.sharded_model import unwrap
from threaded import Threaded

pytest.importorskip("peft", reason="PEFT isn't installed")
import peft
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.optimizers import create_lorafa_optimizer
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora.intruders import reduce_intruder_dimension
from peft.utils.hotswap import hotswap_adapter

#: Kinds that have rules, each with tests of its own.
CUT = {"LORA", "IA3", "PROMPT_TUNING", "P_TUNING"}
#: What a config can't be made without.
NEEDED = {"target_modules": ["q_proj"], "num_virtual_tokens": 4, "task_type": "CAUSAL_LM", "total_step": 10}


@pytest.fixture(scope="module")
def model():
    return built("llama", kv_heads=2)


def names(rank_model):
    return [name for name, _ in rank_model.named_modules()]


def test_every_other_kind_of_adapter_is_refused_by_name(model):
    rank_model = Threaded(model, "1x2x1").models[0]
    before, kinds = names(rank_model), {str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    assert kinds >= CUT
    for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if kind.value in CUT:
            continue
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            config = cls(**{name: value for name, value in NEEDED.items() if name in known})
        except ImportError:
            # Of a library that isn't installed: PEFT's own error.
            continue
        with pytest.raises(UnsupportedModelError, match=f"{cls.__name__}: .* have no rules"):
            get_peft_model(rank_model, config)
        assert names(rank_model) == before, kind


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(
            ({"init_lora_weights": name}, f"init_lora_weights='{name}'")
            for name in ("pissa", "pissa_niter_4", "olora", "lora_ga", "mica", "another")
        ),
        # Their configs have parts of their own, which are named first.
        ({"init_lora_weights": "eva"}, "eva_config"),
        ({"init_lora_weights": "corda"}, "corda_config"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "loftq"),
        ({"megatron_config": {"hidden_size": 64}}, "megatron_config"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"qalora_group_size": 8}, "qalora_group_size"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"arrow_config": {}}, "arrow_config"),
        ({"use_bdlora": {}}, "use_bdlora"),
        ({"velora_config": {}}, "velora_config"),
        ({"kasa_config": {}}, "kasa_config"),
        ({"monteclora_config": {}}, "monteclora_config"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"use_dora": True, "lora_dropout": 0.1}, "lora_dropout"),
        ({"modules_to_save": ["o_proj"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "target_parameters"),
        ({"trainable_token_indices": {"q_proj": [1]}}, "trainable_token_indices"),
        ({"target_modules": ["input_layernorm"]}, "input_layernorm"),
    ],
    ids=str,
)
def test_an_option_that_has_no_rule_is_refused_by_name(model, options, named):
    try:
        config = LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options})
    except (ImportError, TypeError) as error:
        pytest.skip(f"this version of PEFT doesn't make it: {error}")
    rank_model = Threaded(model, "1x2x1").models[0]
    before = names(rank_model)
    with pytest.raises(UnsupportedModelError, match=named):
        get_peft_model(rank_model, config)
    assert names(rank_model) == before


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "orthogonal", "r": 4},
        {"init_lora_weights": "gaussian", "alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 5}, "exclude_modules": r".*\.1\.mlp\..*"},
        {"layers_to_transform": 1, "layers_pattern": "layers", "use_rslora": True},
        {"target_modules": r".*\.(q_proj|up_proj)", "lora_bias": True},
    ],
    ids=str,
)
def test_an_option_that_has_a_rule_is_as_in_plain_peft(model, options):
    plain, threaded = adapted(copy.deepcopy(model), **options), Adapted(model, "1x2x2", **options)
    assert_step(plain, threaded, batch())


@pytest.mark.parametrize("before", [["q_proj", "down_proj"], "all-linear"], ids=str)
def test_a_second_adapter_of_all_linear_layers_is_on_those_that_have_one_too(model, before):
    """PEFT tells layers with adapters by their classes' names."""

    def targets(peft_model):
        peft_model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
        return {name for name, _ in peft_model.named_parameters() if ".second." in name}

    expected = targets(adapted(copy.deepcopy(model), target_modules=before))
    assert len(expected) == 2 * 2 * len(DENSE)
    assert targets(Adapted(model, "1x2x1", target_modules=before).models[0]) == expected


def test_a_second_ia3_adapter_is_on_layers_that_have_one_too(model):
    rank_model = get_peft_model(Threaded(model, "1x2x1").models[0], IA3Config(task_type="CAUSAL_LM"))
    assert all("Linear" in type(x).__name__ for x in rank_model.modules() if isinstance(x, IA3Layer))


def read(model, folder):
    return PeftModel.from_pretrained(model, folder)


def read_twice(model, first, other):
    inner = PeftModel.from_pretrained(model, first, is_trainable=True).get_base_model()
    return PeftModel.from_pretrained(inner, other, is_trainable=True)


def both_active(model, first, other):
    peft_model = read(model, first)
    peft_model.load_adapter(other, "other")
    peft_model.base_model.set_adapter(["default", "other"])
    return peft_model


def one_merged(model, first, other):
    peft_model = both_active(model, first, other)
    peft_model.base_model.merge_adapter(["other"])
    return peft_model


def scaled(model, first, _):
    peft_model = read(model, first)
    for module in peft_model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)
    return peft_model


def on_meta_first(model, first, _):
    return PeftModel.from_pretrained(model, first, low_cpu_mem_usage=True, autocast_adapter_dtype=False)


def test_less_common_calls_are_as_in_plain_peft(model, tmp_path):
    for number in (0, 1):
        torch.manual_seed(number)
        config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, target_modules=DENSE)
        get_peft_model(copy.deepcopy(model), config).save_pretrained(tmp_path / str(number))
    for call in (read_twice, both_active, one_merged, scaled, on_meta_first):

        def loss(sharded_or_plain, call=call):
            peft_model = call(sharded_or_plain, str(tmp_path / "0"), str(tmp_path / "1"))
            return peft_model(**batch(), use_cache=False).loss.detach()

        with KeepFloat64():
            expected = loss(copy.deepcopy(model))
        for value in Threaded(model, "1x2x1").run(loss):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9, msg=call.__name__)


OF_WHOLE_TENSORS = [
    (lambda model: hotswap_adapter(model, "folder", "default"), "hotswap_adapter .* load_adapter"),
    (lambda model: peft.convert_to_lora(model, rank=2), "convert_to_lora decomposes"),
    (lambda model: reduce_intruder_dimension(peft_model=model), "reduce_intruder_dimension decomposes"),
    (lambda model: peft.find_kappa_target_modules(model.get_base_model()), "find_kappa_target_modules takes"),
    (lambda model: create_lorafa_optimizer(model, r=3, lora_alpha=6, lr=0.1), "create_lorafa_optimizer steps B"),
    (
        lambda model: peft.optimizers.create_riemannian_optimizer(model, torch.optim.AdamW, lr=0.1),
        r"create_riemannian_optimizer steps each factor .* LoRA\+",
    ),
    (lambda model: get_peft_model(model.unload(), LoraConfig(), mixed=True), "PeftMixedModel .* without mixed"),
    (lambda model: get_peft_model(model, LoraConfig()), "PeftModel is put around a PeftModel .* add_adapter"),
    (lambda model: model.load_adapter("folder", "b", ignore_mismatched_sizes=True), "ignore_mismatched_sizes=True "),
]


@pytest.mark.parametrize(("call", "said"), OF_WHOLE_TENSORS, ids=[said.split()[0] for _, said in OF_WHOLE_TENSORS])
def test_what_computes_with_whole_tensors_is_refused_by_name(model, call, said):
    if "riemannian" in said and Version(peft.__version__) < Version("0.21"):
        pytest.skip("PEFT has it since 0.21")
    with pytest.raises(UnsupportedModelError, match=said):
        call(Adapted(model, "1x2x1").models[0])


def biased(start, shard):
    model = shard(AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64))
    peft_model = adapted(model, bias="lora_only", target_modules=["q_proj"])
    peft_model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    return peft_model


def saved_by_ranks(start, folder):
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}}}
    biased(start, lambda model: cuboid.shard(model, config)).save_pretrained(folder)


def test_a_folder_has_the_biases_that_its_adapter_trains(pool, tmp_path):
    built("qwen2").save_pretrained(tmp_path / "start")
    pool.run(2, saved_by_ranks, tmp_path / "start", tmp_path / "saved", timeout_s=TIMEOUT_S)
    biased(tmp_path / "start", lambda model: model).save_pretrained(tmp_path / "plain")
    for name in ("adapter_model.safetensors", "other/adapter_model.safetensors"):
        saved, expected = load_file(tmp_path / "saved" / name), load_file(tmp_path / "plain" / name)
        if Version(peft.__version__) >= Version("0.21"):  # 0.20 leaves the biases of "lora_only" out
            assert saved.keys() == expected.keys()
        assert any(key.endswith(".bias") for key in saved) == (name == "adapter_model.safetensors")
        configs = (tmp_path / out / name.replace("model.safetensors", "config.json") for out in ("saved", "plain"))
        saved, expected = (json.loads(path.read_text())["auto_mapping"] for path in configs)
        assert saved == expected


COMBINED_CASES = [
    ("linear", "1x2x1", {}),
    ("cat", "2x1x1", {}),
    ("cat", "1x1x2", {}),
    ("svd", "1x2x1", {"svd_rank": 5}),
    ("svd", "1x1x2", {"svd_full_matrices": False, "svd_clamp": 0.9}),
    ("ties", "2x1x1", {"density": 0.5}),
    ("magnitude_prune", "2x2x1", {"density": 0.4}),
    ("ties_svd", "1x1x2", {"density": 0.5, "majority_sign_method": "frequency"}),
]


def with_other(targets, r):
    def add(peft_model):
        peft_model.add_adapter("other", LoraConfig(r=r, init_lora_weights=False, target_modules=targets))

    return add


def mixed(rule, options):
    def mix(peft_model):
        peft_model.add_weighted_adapter(["default", "other"], [0.7, -0.4], "mix", combination_type=rule, **options)
        peft_model.set_adapter("mix")

    return mix


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize(("rule", "mesh", "options"), COMBINED_CASES)
def test_combined_adapters_are_those_of_plain_peft(rule, mesh, options):
    model = built("llama", kv_heads=2)
    # Ranks that no mesh divides; the layers of the other adapter are not all of the first one's.
    plain, threaded = adapted(copy.deepcopy(model)), Adapted(model, mesh)
    both = in_both(plain, threaded)
    first = both(with_other(DENSE[:5], 3 if rule in ("linear", "ties", "magnitude_prune") else 4))
    assert abs(both(mixed(rule, options)) - first) > 1e-4


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("rule", ["cat", "svd"])
def test_combined_ones_of_embeddings_heads_and_transposed_layers_too(rule):
    for model, targets, vocabulary in (
        (ended(), ["embed_tokens", "lm_head"], 101),
        (built("gpt2"), ["c_attn", "c_proj"], 100),
    ):
        plain, threaded = (
            adapted(copy.deepcopy(model), target_modules=targets),
            Adapted(model, "1x2x2", target_modules=targets),
        )
        both = in_both(plain, threaded, batch(vocabulary=vocabulary))
        both(with_other(targets, 4))
        both(mixed(rule, {}))


def test_combined_ones_of_stages_too():
    staged = Staged(built("llama", kv_heads=2), "1x2x1")
    staged.models = [adapted(stage_model) for stage_model in staged.models]

    def updates(mesh):
        for peft_model in staged.models[mesh.rank :: staged.shape.size]:
            with_other(DENSE, 4)(peft_model)
            mixed("cat", {})(peft_model)
            for layer in unwrap(peft_model).modules():
                if hasattr(layer, "lora_A") and "mix" in layer.lora_A:
                    default, other, mix = map(layer.get_delta_weight, ("default", "other", "mix"))
                    torch.testing.assert_close(mix, 0.7 * default - 0.4 * other, rtol=1e-9, atol=1e-12)

    staged.ranks.run(updates)


def test_combinations_without_a_rule_are_refused_by_name():
    threaded = Adapted(built("llama", kv_heads=2), "1x2x1")
    threaded.run(with_other(DENSE, 3))
    counts = threaded.run(lambda peft_model: len(peft_model.peft_config))
    for rank_model in threaded.models:
        with pytest.raises(UnsupportedModelError, match=r"'dare_linear'.* prunes at random"):
            mixed("dare_linear", {"density": 0.5})(rank_model)
    assert threaded.run(lambda peft_model: len(peft_model.peft_config)) == counts
