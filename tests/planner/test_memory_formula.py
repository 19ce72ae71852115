"""The closed formulas of memory and communication, compared with running models on real ranks."""

import dataclasses
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.errors import UnsupportedModelError
from cuboid.planner.comm_formula import BlockSizes
from cuboid.planner.description.modules import check_countable, describe_modules
from cuboid.planner.end_memory import end_kept_bytes, end_sent_bytes
from cuboid.planner.layer_memory import KeptSizes, block_bytes, layer_kept_bytes, state_bytes
from cuboid.planner.model_formulas import block_sizes, end_sizes, kept_sizes, model_kept_bytes
from cuboid.tensor3d.layers.linear import ShardedLinear
from cuboid.tensor3d.layers.norm import ShardedLayerNorm, ShardedRMSNorm
from cuboid.verify import SmallModel
from planning import on_meta, small

BATCH, LENGTH = 6, 24
MESHES = ["1x1x1", "1x2x1", "2x1x1", "1x1x2", "1x2x2", "1x2x3", "3x1x2"]
MODELS = {
    "llama": SmallModel("llama", heads=12, kv_heads=12, head_dim=4),
    "few key/value heads": SmallModel("llama", heads=12, kv_heads=4, head_dim=4, bias=True),
    "gpt2": SmallModel("gpt2", heads=12, kv_heads=12, head_dim=4),
    "qwen3": SmallModel("qwen3", heads=12, kv_heads=6, head_dim=8),
    "qwen3, few key/value heads": SmallModel("qwen3", heads=12, kv_heads=2, head_dim=4),
}
BLOCKS = {
    "model.layers.0.self_attn.q_proj": "up",
    "model.layers.1.mlp.up_proj": "up",
    "model.layers.0.self_attn.o_proj": "down",
    "model.layers.1.mlp.down_proj": "down",
    "lm_head": "head",
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def built(small, dtype=torch.float32):
    torch.manual_seed(small.seed)
    config = small.config()
    config.update({name: rate for name, rate in NO_DROPOUT.items() if hasattr(config, name)})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def sharded(small, mesh, dtype=torch.float32):
    shape = MeshShape.parse(mesh)
    axes = {"batch": shape.batch, "sequence": shape.sequence, "hidden": shape.hidden}
    return cuboid.shard(built(small, dtype), {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}})


class Box:
    """Stands for a saved tensor in autograd's graph, and records how long it is kept."""

    def __init__(self, x, account):
        self.x, self.account = x, account


class Keepers:
    """Bytes of the storages that autograd keeps, each once, by the layer and by what keeps them.

    What a linear layer keeps as its input is put to its account, even if something before keeps it as well.
    """

    def __init__(self, model):
        self._boxes = []
        self._inputs = []
        self._running = [("", "")]
        self._known = {address(x) for x in (*model.parameters(), *model.buffers())}
        for name, module in model.named_modules():
            layer = name.partition("layers.")[2] or name.partition(".h.")[2]
            self._watch(module, layer.partition(".")[0], _kind(name, module))
            if name.endswith(("attn", "mlp")):
                module.register_forward_pre_hook(cuboid.local_hook(self._note_input), prepend=True, with_kwargs=True)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box.x)

    def _watch(self, module, *account):
        def enter(*_):
            self._running.append(account)

        def leave(*_):
            self._running.pop()

        module.register_forward_pre_hook(cuboid.local_hook(enter), prepend=True)
        module.register_forward_hook(cuboid.local_hook(leave))

    def _note_input(self, _, args, kwargs):
        # Of the "up" projections behind it, before the sequence is gathered.
        self._inputs.append(args[0] if args else kwargs["hidden_states"])

    def _pack(self, x):
        box = Box(x, self._running[-1])
        if address(x) not in self._known:
            self._boxes.append(weakref.ref(box))
        return box

    def bytes(self):
        """Whether the graph still exists."""
        inputs = {address(x) for x in self._inputs}
        storages = {}
        alive = [box for box in (reference() for reference in self._boxes) if box is not None]
        # Attributed to a linear layer if there is one, else to the first module that saved it.
        for box in sorted(alive, key=lambda box: box.account[1] != "linear_inputs"):
            layer, kind = box.account
            kind = "linear_inputs" if address(box.x) in inputs else kind
            storages.setdefault(address(box.x), ((layer, kind), box.x.untyped_storage().nbytes()))
        totals = Counter()
        for account, size in storages.values():
            totals[account] += size
        return totals


def address(x):
    return x.untyped_storage().data_ptr()


def _kind(name, module):
    if isinstance(module, ShardedLinear):
        return "linear_inputs"
    if isinstance(module, ShardedRMSNorm | ShardedLayerNorm) and "attn" not in name:
        return "norms"
    return "attention" if "attn" in name else "nonlinearity"


def tokens(small):
    return torch.randint(0, small.vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def kept_by_autograd(small, mesh, dtype):
    """Where the rank is, what its last layer keeps by what keeps it, and what the whole model keeps."""
    model = sharded(small, mesh, dtype)
    keepers = Keepers(model)
    ids = tokens(small)
    with keepers.hooks:
        loss = model(input_ids=ids, labels=ids).loss
    kept = keepers.bytes()
    loss.backward()
    last = str(small.layers - 1)
    layer = {kind: size for (number, kind), size in kept.items() if number == last}
    return cuboid.mesh_of(model).coordinate, layer, sum(kept.values())


@pytest.mark.sample(1, ci=3)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("small", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kept_activations_match_the_formula(pool, small, mesh, dtype):
    shape, described, size = MeshShape.parse(mesh), describe_modules(built(small)), dtype.itemsize
    ends = end_kept_bytes(end_sizes(described), shape, BATCH, LENGTH, element_bytes=size)
    for at, layer, model in pool.run(shape.size, kept_by_autograd, small, mesh, dtype):
        sizes = block_sizes(described, shape), kept_sizes(described, shape, at)
        assert layer == layer_kept_bytes(*sizes, shape, BATCH, LENGTH, element_bytes=size)
        assert model == small.layers * sum(layer.values()) + sum(ends.values())
        # And as one sum.
        assert model == sum(model_kept_bytes(described, shape, at, BATCH, LENGTH, element_bytes=size).values())


def bytes_of_ends(small, mesh):
    """Bytes by axes that a model sends besides its layers: thrice those of two layers less twice those of three."""
    counts = []
    for layers in (2, 3):
        model = sharded(dataclasses.replace(small, layers=layers), mesh)
        traffic = cuboid.mesh_of(model).comm_counter
        ids = tokens(small)
        model(input_ids=ids, labels=ids).loss.backward()
        counts.append(traffic.snapshot())
    two, three = counts
    return {axes: 3 * two[axes] - 2 * three[axes] for axes in two}


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("mesh", ["2x2x2", *MESHES])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_communication_of_embedding_and_head_matches_the_formula(pool, name, mesh):
    small = MODELS[name]
    shape = MeshShape.parse(mesh)
    expected = end_sent_bytes(end_sizes(describe_modules(built(small))), shape, BATCH, LENGTH, element_bytes=4)
    for counted in pool.run(shape.size, bytes_of_ends, small, mesh):
        # Exact, because the layers' own rounded bytes cancel.
        assert {axes: count for axes, count in counted.items() if count} == expected


def held_after_a_step(small, mesh):
    """Bytes of parameters, gradients, and states of AdamW, without its counters of steps."""
    model = sharded(small, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = tokens(small)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    return [
        sum(x.nbytes for x in group) for group in (model.parameters(), (p.grad for p in model.parameters()), states)
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_gradients_and_optimizer_states_are_divided_by_the_mesh(pool, mesh):
    small = dataclasses.replace(MODELS["llama"], vocabulary=144)
    total = sum(p.numel() for p in built(small).parameters())
    shape = MeshShape.parse(mesh)
    expected = state_bytes(total, shape, element_bytes=4, optimizer_bytes=8)
    for held in pool.run(shape.size, held_after_a_step, small, mesh):
        assert held == [expected["parameters"], expected["gradients"], expected["optimizer"]]


def gathered_blocks(small, mesh):
    """Size of each weight's unsharded block."""
    model = sharded(small, mesh)
    cuboid.mesh_of(model).connect()
    sizes = {}
    for name in BLOCKS:
        linear = model.get_submodule(name)
        with linear.sharded_params["weight"].unshard(linear.weight) as block:
            sizes[name] = block.untyped_storage().nbytes()
    return sizes


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", ["1x1x1", "2x1x1", "3x1x2", "2x2x2", "1x2x3"])
def test_unsharded_weights_have_the_formulas_size(pool, mesh):
    small = MODELS["llama"]
    shape, model = MeshShape.parse(mesh), built(small)
    expected = {
        name: block_bytes(model.get_parameter(f"{name}.weight").shape, kind, shape, 4) for name, kind in BLOCKS.items()
    }
    for sizes in pool.run(shape.size, gathered_blocks, small, mesh):
        assert sizes == expected


@given(st.sampled_from(["1x1x1", "2x1x1", "1x2x1", "1x1x2", "2x2x2", "1x4x2"]), st.booleans(), st.integers(1, 4))
def test_activations_shrink_as_the_mesh_grows(mesh, gated, nonlinearity):
    sizes = BlockSizes(hidden=64, query=64, key_value=64, intermediate=128, gated=gated)
    shape = MeshShape.parse(mesh)

    def kept(on):
        features = 64 // (on.sequence * on.hidden)
        return layer_kept_bytes(sizes, KeptSizes(8, features, nonlinearity), on, 8, 16)

    alone, on_mesh = kept(MeshShape()), kept(shape)
    for keeper in ("linear_inputs", "attention", "nonlinearity"):
        assert on_mesh[keeper] * shape.size == alone[keeper]
    # Statistics are the same on all ranks along `hidden`, and gathered weights on all of `batch` and `sequence`.
    assert alone["norms"] <= on_mesh["norms"] * shape.size


def test_models_without_a_formula_are_rejected():
    eager = built(MODELS["llama"])
    eager.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="eager"):
        check_countable(eager)
    dropping = AutoModelForCausalLM.from_config(MODELS["gpt2"].config()).train()
    with pytest.raises(UnsupportedModelError, match="attn_pdrop is"):
        check_countable(dropping)
    check_countable(dropping.eval())
    for name, what in (("mixtral", "experts"), ("deepseek_v3", "latents"), ("minicpm3", "latents")):
        config = small(name, **({"first_k_dense_replace": 3} if name == "deepseek_v3" else {}))
        with pytest.raises(UnsupportedModelError, match=f"has {what}"):
            check_countable(on_meta(config))
    assert describe_modules(dropping).nonlinearity == 4


@pytest.mark.parametrize(("name", "kept"), [("silu", 3), ("gelu", 3), ("relu", 2), ("gelu_new", 6)])
def test_tensors_kept_by_the_nonlinearity_are_counted(name, kept):
    config = MODELS["llama"].config()
    config.hidden_act = name
    model = AutoModelForCausalLM.from_config(config)
    assert describe_modules(model).nonlinearity == kept
