"""Several adapters of a sharded model: combined into a new one as plain PEFT does, or refused by name."""

import copy

import pytest
import torch
from test_lora import DENSE, Adapted, adapted, batch, built, in_both
from test_lora_ends import ended
from test_lora_stages import Staged

from cuboid.errors import UnsupportedModelError
from cuboid.models.sharded.sharded_model import unwrap

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig

CASES = [
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
@pytest.mark.parametrize(("rule", "mesh", "options"), CASES)
def test_combined_adapters_are_those_of_plain_peft(rule, mesh, options):
    model = built("llama", kv_heads=2)
    # Ranks that no mesh divides; the layers of the other adapter are not all of the first one's.
    plain, threaded = adapted(copy.deepcopy(model)), Adapted(model, mesh)
    both = in_both(plain, threaded)
    first = both(with_other(DENSE[:5], 3 if rule in ("linear", "ties", "magnitude_prune") else 4))
    assert abs(both(mixed(rule, options)) - first) > 1e-4


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("rule", ["cat", "svd"])
def test_those_of_embeddings_heads_and_transposed_layers_too(rule):
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


def test_those_of_stages_too():
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


def test_what_has_no_rule_is_refused_by_name():
    threaded = Adapted(built("llama", kv_heads=2), "1x2x1")
    threaded.run(with_other(DENSE, 3))
    counts = threaded.run(lambda peft_model: len(peft_model.peft_config))
    for rank_model in threaded.models:
        with pytest.raises(UnsupportedModelError, match=r"'dare_linear'.* prunes at random"):
            mixed("dare_linear", {"density": 0.5})(rank_model)
        for names in (["default", "other"] * 2, ["__base__"] * 4):
            with pytest.raises(UnsupportedModelError, match=r"adapter_names: .* the same adapters"):
                rank_model(**batch(), adapter_names=names)
            with pytest.raises(UnsupportedModelError, match=r"adapter_names: .* the same adapters"):
                rank_model.generate(input_ids=batch()["input_ids"], adapter_names=names)
    assert threaded.run(lambda peft_model: len(peft_model.peft_config)) == counts
