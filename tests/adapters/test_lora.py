"""LoRA by PEFT on meshes: every gradient of the factors is plain PEFT's, and what scripts do with adapters works."""

import copy
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

import cuboid
from comparing import mesh_section
from conftest import TIMEOUT_S
from cuboid.distributed.topology import RANK_ORDER
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.autograd_graph import graph_of
from cuboid.models.certification.float64 import KeepFloat64, precision
from cuboid.tensor3d.sharding.sharding_spec import put_shard
from cuboid.verify import SmallModel
from cuboid.weights.state_dict_map import sharding_specs
from small_layers import CHECKPOINTING, EXPERTS, LATENT, mixture
from small_layers import with_attention as latent_model
from threaded import Threaded, step_of

pytest.importorskip("peft", reason="PEFT isn't installed")
from peft import LoraConfig, PeftModel, get_peft_model

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def built(architecture, **options):
    torch.manual_seed(0)
    small = SmallModel(architecture, **{"heads": 4, **options})
    model = AutoModelForCausalLM.from_config(small.config(), dtype=torch.float64).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if architecture == "gpt2":
        model.eval()
    return model


def batch(rows=4, length=12, vocabulary=100, seed=1):
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "labels": torch.where(mask.bool(), ids, -100), "attention_mask": mask}


def adapted(model, **options):
    # Without PEFT's initial zeros in B, A would have no gradient.
    torch.manual_seed(7)
    options = {"r": 3, "lora_alpha": 6, "init_lora_weights": False, "target_modules": DENSE, **options}
    return get_peft_model(model, LoraConfig(**options))


class Adapted(Threaded):
    """A model on a mesh, with an adapter."""

    def __init__(self, model, mesh, **options):
        super().__init__(model, mesh)
        self.models = [adapted(rank_model, **options) for rank_model in self.models]

    def whole(self, value_of):
        """By the names of the model's parameters, put together from all ranks."""
        full_tensors = {}
        for mesh, model in zip(self.ranks.meshes, self.models, strict=True):
            inner = model.get_base_model()
            specs = sharding_specs(inner)
            for name, parameter in inner.named_parameters():
                value = value_of(parameter)
                if value is not None:
                    full = full_tensors.setdefault(name, value.new_zeros(specs[name].shape))
                    put_shard(full, value, specs[name], mesh.shape, mesh.coordinate)
        return full_tensors


def inner_names(model):
    return {name.removeprefix("base_model.model."): x for name, x in model.named_parameters()}


def as_they_are(_, tensor):
    return tensor


def assert_gradients(plain, gradients, as_in_files=as_they_are):
    """Whole gradients are those of plain PEFT, which are returned by name."""
    trained = {name: x.grad for name, x in inner_names(plain).items() if x.requires_grad}
    assert trained
    assert gradients.keys() == trained.keys()
    for name, gradient in trained.items():
        torch.testing.assert_close(as_in_files(name, gradients[name]), gradient, rtol=1e-9, atol=1e-9, msg=name)
    return trained


def assert_step(plain, threaded, micro_batch, as_in_files=as_they_are):
    """A step's loss on each rank is that of plain PEFT, and so is every gradient; these are returned by name."""
    with KeepFloat64():
        expected = step_of(**micro_batch)(plain)
    for loss in threaded.run(step_of(**micro_batch)):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    return assert_gradients(plain, threaded.whole(lambda parameter: parameter.grad), as_in_files)


def assert_as_plain(model, mesh, micro_batch=None, **options):
    plain, threaded = adapted(copy.deepcopy(model), **options), Adapted(model, mesh, **options)
    assert_step(plain, threaded, micro_batch or batch())
    return plain, threaded


CASES = [
    ("llama", {"kv_heads": 2}, "1x2x1", {}),
    ("llama", {"kv_heads": 2}, "1x1x2", {"use_rslora": True}),
    ("llama", {"kv_heads": 2}, "2x1x1", {"target_modules": ["q_proj", "v_proj"]}),
    ("llama", {"kv_heads": 2}, "2x2x2", {"target_modules": "all-linear", "r": 5}),
    ("llama", {"kv_heads": 1}, "1x2x2", {"bias": "all"}),
    (
        "qwen2",
        {"kv_heads": 2},
        "1x4x1",
        {"lora_bias": True, "bias": "lora_only", "target_modules": ["q_proj", "k_proj"]},
    ),
    ("mistral", {"kv_heads": 4}, "3x1x2", {"rank_pattern": {"q_proj": 7}, "layers_to_transform": [1]}),
    ("gpt2", {}, "1x2x2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "lora_bias": True}),
    ("gpt2", {}, "2x1x2", {"target_modules": ["c_attn"]}),
]


def test_a_penalty_on_factors_is_that_of_whole_ones():
    model = built("llama", kv_heads=2)
    plain, threaded = adapted(copy.deepcopy(model)), Adapted(model, "2x1x2")

    def squares(_, factor):
        return factor.square().sum() if factor.requires_grad else None

    def step(rank_model):
        if rank_model is plain:
            penalty = sum(squares(None, x) for x in plain.parameters() if x.requires_grad)
        else:
            penalty = cuboid.sum_over_shards(rank_model, squares)
        loss = rank_model(**batch()).loss + 0.1 * penalty
        loss.backward()
        return loss.detach()

    with KeepFloat64():
        expected = step(plain)
    for loss in threaded.run(step):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert_gradients(plain, threaded.whole(lambda parameter: parameter.grad))


@pytest.mark.sample(4, ci="others")
@pytest.mark.parametrize(("architecture", "sizes", "mesh", "options"), CASES)
def test_loss_and_every_gradient_are_those_of_plain_peft(architecture, sizes, mesh, options):
    assert_as_plain(built(architecture, **sizes), mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1", "1x1x2", "2x1x1", "1x4x1", "1x1x4", "4x1x1", "2x2x2", "3x2x1"])
@pytest.mark.parametrize(("architecture", "sizes", "options"), [(a, s, o) for a, s, _, o in CASES])
def test_every_option_on_every_mesh(architecture, sizes, options, mesh):
    assert_as_plain(built(architecture, **sizes), mesh, batch(rows=6), **options)


LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x2x1"])
def test_projections_to_and_from_latents(mesh):
    model = latent_model("deepseek_v3", **LATENT, **EXPERTS, first_k_dense_replace=1)
    micro_batch = batch(vocabulary=model.config.vocab_size)
    assert_as_plain(model.train(), mesh, micro_batch, target_modules=LATENTS)


def test_activation_checkpointing_changes_nothing():
    model = built("llama", kv_heads=2)
    # The recomputation leaves the mode that keeps float64.
    model.gradient_checkpointing_enable(CHECKPOINTING)
    model.enable_input_require_grads()
    assert_as_plain(model, "1x2x2")


def test_a_rank_keeps_its_part_of_the_factors_and_nothing_for_what_is_frozen():
    _, threaded = assert_as_plain(built("llama", kv_heads=2), "2x2x2", r=8)
    inner = threaded.models[0].get_base_model()
    specs = sharding_specs(inner)
    for name, parameter in inner.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        assert ".lora_" not in name or parameter.numel() * 8 == math.prod(specs[name].shape)
        assert ".lora_" in name or parameter.grad is None


def sent_for_gradients(mesh):
    """Bytes of all reduce-scatters over ranks along `batch`."""
    groups = [mesh.along("batch"), mesh.along("batch", "sequence"), mesh.along(*RANK_ORDER)]
    return sum(
        bytes_ * count
        for along in {id(group): group for group in groups}.values()
        for (kind, bytes_), count in along.counted.items()
        if kind == "reduce_scatter"
    )


def test_nothing_is_sent_for_gradients_of_what_is_frozen():
    threaded = Adapted(built("llama", kv_heads=2), "2x1x1", r=4)
    threaded.run(step_of(**batch()))
    mesh, inner = threaded.ranks.meshes[0], threaded.models[0].get_base_model()
    sent = sent_for_gradients(mesh)
    # Each rank sends the blocks of the factors' gradients, of which two ranks keep a half each.
    assert sent == sum(2 * p.nbytes for name, p in inner.named_parameters() if ".lora_" in name)


def calls_of_a_step(threaded):
    threaded.run(step_of(**batch()))
    return sum(threaded.ranks.meshes[0].comm_counter.calls().values())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("architecture", "mesh", "rows"),
    [("llama", "1x1x2", 3), ("gpt2", "2x2x2", 1), ("llama", "2x1x2", 3), ("gpt2", "1x1x2", 1)],
)
def test_generated_logits_are_those_of_plain_peft(architecture, mesh, rows):
    model, micro_batch = built(architecture, **({"kv_heads": 2} if architecture == "llama" else {})).eval(), batch(rows)
    targets = {"target_modules": "all-linear"}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "output_logits": True}

    def logits(peft_model):
        ids = {name: micro_batch[name] for name in ("input_ids", "attention_mask")}
        return torch.stack(peft_model.generate(**ids, **options, return_dict_in_generate=True).logits)

    with KeepFloat64():
        expected = logits(adapted(copy.deepcopy(model), **targets))
    for rank_logits in Adapted(model, mesh, **targets).run(logits):
        torch.testing.assert_close(rank_logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("mesh", "targets"), [("1x1x2", ["q_proj"]), ("1x2x1", ["q_proj", "gate_proj"])], ids=["1x1x2", "1x2x1"]
)
def test_adapters_of_one_input_share_messages(mesh, targets):
    """Where the sequence is whole, they are those of the projections, but in the first layer's attention."""
    model = built("llama", kv_heads=2)
    fewest, all_ups = (
        calls_of_a_step(Adapted(model, mesh, target_modules=names))
        for names in (targets, ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
    )
    assert all_ups == fewest


class ProductCounter(TorchDispatchMode):
    """Counts floating-point operations of products, backward's too; torch's own counter hangs hooks on every module."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # The registry has no operators that write in place.
        name = func._overloadpacket.__name__.removesuffix("_")
        count = flop_registry.get(getattr(torch.ops.aten, name, None))
        # Some versions count attention on CPUs, too, which isn't a product with weights.
        if count is not None and "attention" not in name:
            self.flops += count(*args, **kwargs, out_val=result)
        return result


def flops_of(step, model):
    with ProductCounter() as counter:
        step(model)
    return counter.flops


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("make", "targets", "mesh"),
    [
        (lambda: built("llama", kv_heads=2), "all-linear", "2x2x1"),
        (lambda: built("llama", kv_heads=2), "all-linear", "1x1x2"),
        # Experts and routers are frozen.
        (lambda: mixture("qwen3_moe"), ["q_proj", "o_proj"], "1x2x1"),
    ],
    ids=["2x2x1", "1x1x2", "mixture"],
)
def test_no_gradient_of_a_frozen_weight_is_computed(make, targets, mesh):
    """Of the products of a full step, LoRA's leaves out on a mesh what it leaves out in one process."""
    model = make()
    options, step = {"target_modules": targets}, step_of(**batch(rows=6, vocabulary=61))
    with KeepFloat64():
        full = flops_of(step, copy.deepcopy(model))
        low_rank = flops_of(step, adapted(copy.deepcopy(model), **options))
    assert low_rank < 0.77 * full
    full_there, low_rank_there = (
        sum(threaded.run(lambda rank_model: flops_of(step, rank_model)))
        for threaded in (Threaded(model, mesh), Adapted(model, mesh, **options))
    )
    # The smallest weight of a layer is 6 % of them.
    assert full_there - low_rank_there == pytest.approx(full - low_rank, rel=0.02)
    # Each rank computes the angles of the positions itself.
    assert low_rank_there == pytest.approx(low_rank, rel=0.02)


@pytest.mark.parametrize(
    ("make", "mesh", "products", "trained"),
    [
        # In the second layer, A is one of the products of the input of q_proj; in the first, that needs no gradient.
        (lambda: built("llama", kv_heads=2), "1x1x2", 7, 1),
        (lambda: built("llama", kv_heads=2), "1x2x1", 7, 0),
        (lambda: mixture("qwen3_moe"), "2x1x1", 3 + 2 * 2, 1),
    ],
    ids=["1x1x2", "1x2x1", "mixture"],
)
def test_no_input_is_kept_for_the_gradient_of_a_frozen_weight(make, mesh, products, trained):
    threaded = Adapted(make(), mesh, target_modules=["q_proj"])

    def kept_inputs(rank_model):
        loss = rank_model(**batch(vocabulary=61), use_cache=False).loss
        names = ("_LinearFunctionBackward", "_GroupedLinearBackward")
        return [node.saved_tensors[0] for node in graph_of(loss) if type(node).__name__ in names]

    for inputs in threaded.run(kept_inputs):
        assert len(inputs) == products
        assert sum(x is not None for x in inputs) == trained


def losses(threaded, micro_batch):
    return [float(loss) for loss in threaded.run(lambda model: model(**micro_batch, use_cache=False).loss.detach())]


def assert_losses(plain, threaded, micro_batch=None):
    micro_batch = micro_batch or batch()
    with KeepFloat64(), torch.no_grad():
        expected = float(plain(**micro_batch, use_cache=False).loss)
    assert losses(threaded, micro_batch) == pytest.approx([expected] * len(threaded.models), abs=1e-12)
    return expected


def in_both(plain, threaded, micro_batch=None):
    """A function that changes the plain model and each rank's alike, and returns the loss, the same in both."""

    def both(change):
        def seeded(peft_model):
            torch.manual_seed(11)
            change(peft_model)

        seeded(plain)
        threaded.run(seeded)
        return assert_losses(plain, threaded, micro_batch)

    return both


def assert_switched_and_merged(plain, threaded, micro_batch):
    """Losses are plain PEFT's while an adapter is disabled, enabled, merged and unmerged, and when it is unloaded."""
    first = assert_losses(plain, threaded, micro_batch)
    both = in_both(plain, threaded, micro_batch)
    disabled = both(lambda peft_model: peft_model.base_model.disable_adapter_layers())
    assert abs(disabled - first) > 1e-4
    assert both(lambda peft_model: peft_model.base_model.enable_adapter_layers()) == pytest.approx(first, abs=1e-9)
    assert both(lambda peft_model: peft_model.merge_adapter()) == pytest.approx(first, abs=1e-9)
    assert both(lambda peft_model: peft_model.unmerge_adapter()) == pytest.approx(first, abs=1e-9)
    plain = plain.merge_and_unload()
    threaded.models = threaded.run(lambda peft_model: peft_model.merge_and_unload())
    assert assert_losses(plain, threaded, micro_batch) == pytest.approx(first, abs=1e-9)


def test_adapters_are_switched_disabled_merged_deleted_and_unloaded():
    model = built("gpt2")
    plain = adapted(copy.deepcopy(model), target_modules=["c_attn", "c_proj"])
    threaded = Adapted(model, "1x2x2", target_modules=["c_attn", "c_proj"])
    first = assert_losses(plain, threaded)
    both = in_both(plain, threaded)
    other = LoraConfig(r=2, init_lora_weights=False, target_modules=["c_fc"])
    both(lambda peft_model: peft_model.add_adapter("other", copy.deepcopy(other)))
    second = both(lambda peft_model: peft_model.set_adapter("other"))
    assert abs(first - second) > 1e-6
    assert both(lambda peft_model: peft_model.set_adapter("default")) == pytest.approx(first, abs=1e-12)
    with plain.disable_adapter(), KeepFloat64():
        expected = float(plain(**batch(), use_cache=False).loss)

    def disabled(peft_model):
        with peft_model.disable_adapter():
            return peft_model(**batch(), use_cache=False).loss.detach()

    assert [float(x) for x in threaded.run(disabled)] == pytest.approx([expected] * 4, abs=1e-12)
    assert both(lambda peft_model: peft_model.merge_adapter()) == pytest.approx(first, abs=1e-9)
    assert both(lambda peft_model: peft_model.unmerge_adapter()) == pytest.approx(first, abs=1e-9)
    both(lambda peft_model: peft_model.delete_adapter("other"))
    plain = plain.merge_and_unload()
    threaded.models = threaded.run(lambda peft_model: peft_model.merge_and_unload())
    assert assert_losses(plain, threaded) == pytest.approx(first, abs=1e-9)
    assert not [name for name, _ in threaded.models[0].named_parameters() if "lora" in name or "base_layer" in name]


def test_an_adapter_from_disk_is_cut(tmp_path):
    model = built("llama", kv_heads=2)
    plain = adapted(copy.deepcopy(model), lora_bias=False)
    plain.save_pretrained(tmp_path)
    threaded = Threaded(model, "2x2x1")
    threaded.models = [
        PeftModel.from_pretrained(rank_model, tmp_path, is_trainable=True) for rank_model in threaded.models
    ]
    assert_losses(plain, threaded)
    assert threaded.models[0].get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()


def test_transformers_own_add_adapter_is_the_same():
    model = built("llama", kv_heads=2)
    plain, threaded = copy.deepcopy(model), Threaded(model, "1x2x2")
    for either in (plain, *threaded.models):
        torch.manual_seed(7)
        either.add_adapter(LoraConfig(r=3, init_lora_weights=False, target_modules=DENSE))
        either.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=DENSE[:2]), "other")
    both = in_both(plain, threaded)
    assert both(lambda model: model.set_adapter("other")) != both(lambda model: model.delete_adapter("other"))
    both(lambda model: model.delete_adapter("default"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"target_modules": ["input_layernorm"]}, "input_layernorm"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "target_parameters"),
        ({"trainable_token_indices": {"q_proj": [1, 2]}}, "trainable_token_indices"),
        ({"layer_replication": [(0, 1)]}, "layer_replication"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_has_no_rule_is_refused_by_name_before_the_model_is_changed(options, named):
    threaded = Threaded(built("llama", kv_heads=2), "1x2x1")
    before = [name for name, _ in threaded.models[0].named_modules()]
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        adapted(threaded.models[0], **options)
    assert [name for name, _ in threaded.models[0].named_modules()] == before


HEADS = {
    "sequence": (AutoModelForSequenceClassification, "SEQ_CLS", "whole"),
    "tokens": (AutoModelForTokenClassification, "TOKEN_CLS", "labels"),
}


def classifier(task):
    torch.manual_seed(0)
    config = SmallModel("llama", heads=4, kv_heads=4).config()
    config.update({"num_labels": 4, "pad_token_id": 0})
    auto_class, _, head = HEADS[task]
    return auto_class.from_config(config, dtype=torch.float64).eval(), MeshVerdict(head=head)


def classes(task):
    ids = batch()["input_ids"].clamp(min=1)
    return {"input_ids": ids, "labels": ids % 4 if task == "tokens" else ids[:, 0] % 4}


def with_head(model, task):
    torch.manual_seed(7)
    options = {"r": 3, "init_lora_weights": False, "target_modules": ["q_proj", "down_proj"]}
    return get_peft_model(model, LoraConfig(task_type=HEADS[task][1], **options))


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("mesh", ["1x2x2", "2x2x1"])
def test_a_head_that_is_trained_whole(task, mesh):
    """PEFT copies the classifier's head for each adapter, ``modules_to_save``, and trains the copy."""
    model, verdict = classifier(task)
    plain, threaded = with_head(copy.deepcopy(model), task), Threaded(model, mesh, verdict)
    threaded.models = [with_head(rank_model, task) for rank_model in threaded.models]
    with KeepFloat64():
        expected = step_of(**classes(task))(plain)
    for loss in threaded.run(step_of(**classes(task))):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    gradients = Adapted.whole(threaded, lambda parameter: parameter.grad)
    trained = {name: x.grad for name, x in inner_names(plain).items() if x.requires_grad}
    assert gradients.keys() == trained.keys()
    assert "score.modules_to_save.default.weight" in trained
    for name, gradient in trained.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
    merged = threaded.run(lambda rank_model: rank_model.merge_and_unload())[0]
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in model.named_parameters()}


def saved_by_ranks(start, folder):
    def on(mesh):
        model = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float64)
        return cuboid.shard(model, {"tensor_parallel": mesh_section(mesh)}).eval()

    model, other = with_head(on("1x2x1"), "sequence"), on("2x1x1")
    with precision(keep_float64=True):
        model(**classes("sequence")).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= parameter.grad
        model.save_pretrained(folder)
        read = PeftModel.from_pretrained(other, folder, is_trainable=True)
        return [either(**classes("sequence")).logits.detach() for either in (model, read)]


def test_a_head_that_is_trained_whole_is_in_pefts_folder(pool, tmp_path):
    model, _ = classifier("sequence")
    model.save_pretrained(tmp_path / "start")
    for logits, read in pool.run(2, saved_by_ranks, tmp_path / "start", tmp_path / "adapter", timeout_s=TIMEOUT_S):
        plain = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter")
        assert "score.weight" in "".join(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
        with torch.no_grad(), KeepFloat64():
            expected = plain(**classes("sequence")).logits
            assert (expected - model(**classes("sequence")).logits).abs().max() > 1e-3
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(read, expected, rtol=1e-9, atol=1e-9)


def test_other_kinds_of_adapters_are_refused_by_name():
    from peft import LoHaConfig, PrefixTuningConfig

    model = Threaded(built("llama", kv_heads=2), "1x2x1").models[0]
    tokens = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    for config, instead in (
        (LoHaConfig(task_type="CAUSAL_LM"), "LoRA"),
        (PrefixTuningConfig(**tokens), "PromptTuningConfig"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{type(config).__name__}: .*: take {instead}"):
            get_peft_model(model, config)
