"""Optimizers that are given whole tensors: twenty steps on a mesh, equal to those of one process."""

import copy
import functools
import math
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.optimization import Adafactor as TransformersAdafactor

import cuboid
from cuboid.checkpoint.optimizer_state import OptimizerAdapter
from cuboid.distributed.comm_counter import axes_label
from cuboid.distributed.topology import AXES
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.optim.elementwise import OwnedShards, check_optimizer
from cuboid.optim.grad_norm import scale_to, total_norm
from cuboid.optim.whole_tensors import WholeTensors
from support.threaded import Threaded

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
STEPS = 20
MAX_NORM = 0.5
CUT = OwnedShards(cut="a mesh")


class Lars(torch.optim.SGD):
    """An unknown optimizer that scales each tensor's step by norms of the whole tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.mul_(parameter.norm() / parameter.grad.norm())
        return super().step(closure)


def matrices(model):
    """What users of Muon give it."""
    return [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "head" not in name]


def everything(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def by_muon(model):
    chosen = matrices(model)
    rest = [p for p in model.parameters() if all(p is not other for other in chosen)]
    return [
        {"params": chosen, "lr": 2e-2, "use_muon": True, "ns_method": "standard"},
        {"params": rest, "lr": 1e-3, "use_muon": False},
    ]


OPTIMIZERS = {
    "LARS": lambda model: Lars(everything(model), lr=1e-2, momentum=0.9),
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=2e-2),
    "Adafactor": lambda model: torch.optim.Adafactor(everything(model), lr=2e-2, weight_decay=0.1),
    "transformers' Adafactor": lambda model: TransformersAdafactor(
        everything(model), lr=2e-3, scale_parameter=False, relative_step=False, beta1=0.9
    ),
    "relative Adafactor": lambda model: TransformersAdafactor(everything(model)),
    "DeepSpeed's Muon": lambda model: MuonWithAuxAdam(by_muon(model), torch.optim.AdamW),
}
#: The same in a config.
SECTIONS = {
    "DeepSpeed's Muon": {
        "type": "Muon",
        "params": {"lr": 2e-2, "adam_lr": 1e-3, "ns_method": "standard", "torch_adam": True},
    }
}


def llama(**options):
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **{**SIZES, **options})
    return AutoModelForCausalLM.from_config(config).double().train()


def batch_of(step):
    ids = torch.randint(0, 49, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def train(model, optimizer, clip, steps=range(STEPS)):
    for step in steps:
        model(**batch_of(step), use_cache=False).loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()


def alone(model, make):
    model = copy.deepcopy(model)
    with KeepFloat64():
        train(model, make(model), lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    return model


#: Fused query, key and value; stacks of experts; a matrix of two names, and one that isn't trained.
FORMS = {
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {
        **SIZES,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "experts_implementation": "eager",
    },
    "llama": {**SIZES, "num_attention_heads": 4, "tie_word_embeddings": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FORMS)
def test_tensors_of_other_forms_are_whole_as_transformers_has_them(architecture):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **{**FORMS[architecture], "vocab_size": 50})
    model = AutoModelForCausalLM.from_config(config).double().train()
    next(p for name, p in model.named_parameters() if ".1." in name and p.dim() > 1).requires_grad_(False)
    expected = alone(model, OPTIMIZERS["Adafactor"])
    threaded, _ = on_mesh(model, "2x1x2", OPTIMIZERS["Adafactor"])
    # The gradient of GPT-2's key biases is zero but for rounding, which Adafactor normalizes.
    assert largest_difference(threaded, expected) <= 1e-8
    assert largest_difference(threaded, model) > 1e-3


def test_a_script_may_have_muon_for_matrices_and_another_optimizer_for_the_rest():
    model = llama()

    def pair(model):
        chosen = matrices(model)
        rest = [p for p in model.parameters() if all(p is not other for other in chosen)]
        return torch.optim.Muon(chosen, lr=2e-2), torch.optim.AdamW(rest, lr=1e-3)

    def steps(model, optimizers):
        for step in range(3):
            model(**batch_of(step), use_cache=False).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    threaded = Threaded(model, "1x2x2")
    threaded.run(lambda model: steps(model, [cuboid.prepare_optimizer(model, one) for one in pair(model)]))
    expected = copy.deepcopy(model)
    with KeepFloat64():
        steps(expected, pair(expected))
    assert largest_difference(threaded, expected) <= 1e-9


def on_mesh(model, mesh, make, steps=range(STEPS)):
    """A model after steps on all ranks of a mesh, and each rank's optimizer and :class:`WholeTensors`."""
    threaded = Threaded(model, mesh)
    specs = threaded.plan.by_parameter

    def run(model):
        mesh = model.cuboid.mesh
        optimizer = make(model)
        adapter = OptimizerAdapter.direct(optimizer, {id(p): name for name, p in model.named_parameters()})
        rule = check_optimizer(optimizer, CUT)
        tensors = None if rule is None else WholeTensors(adapter, rule, specs, mesh)

        def clip():
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = total_norm(gradients, [mesh.along(*AXES).process_group], 2.0, gradients[0])
            scale_to(gradients, norm, MAX_NORM)

        mesh.comm_counter.reset()
        train(model, optimizer, clip, steps)
        return optimizer, tensors

    return threaded, threaded.run(run)


def largest_difference(threaded, expected):
    with torch.no_grad():
        for model in threaded.models:
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()
    weights = threaded.gradients()
    return max((weights[name] - p).abs().max().item() for name, p in expected.named_parameters())


MESHES = ("1x2x1", "1x1x2", "2x1x1", "2x2x2")
#: One of each for every change, in `make test` that of the first; the others are slow.
QUICK = {("Muon", "2x2x2"), ("Adafactor", "2x1x1"), ("transformers' Adafactor", "1x2x1"), ("LARS", "1x1x2")}


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
        if name not in SECTIONS
        for mesh in MESHES
    ],
)
def test_whole_tensors_are_stepped_as_on_one_process(name, mesh):
    model = llama()
    expected = alone(model, OPTIMIZERS[name])
    threaded, _ = on_mesh(model, mesh, OPTIMIZERS[name])
    assert largest_difference(threaded, expected) <= 1e-9
    assert largest_difference(threaded, model) > 1e-3


@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x2"])
def test_each_tensor_is_stepped_by_one_rank_and_the_bytes_sent_are_those_of_the_formula(mesh):
    model = llama(vocab_size=49)
    threaded, results = on_mesh(model, mesh, OPTIMIZERS["Adafactor"], range(1))
    without, _ = on_mesh(model, mesh, lambda model: torch.optim.SGD(everything(model)), range(1))
    specs, shape = threaded.plan.by_parameter, threaded.plan.mesh
    names = [name for name, _ in model.named_parameters()]
    stepped = [{name for name, key in tensors.keys.items() if key is not None} for _, tensors in results]
    assert sorted(name for on_rank in stepped for name in on_rank) == sorted(names)
    shards = {name: math.prod(specs[name].shard_shape(shape)) for name in names}
    itemsize, everywhere = 8, axes_label([axis for axis in AXES if shape.of(axis) > 1])
    for rank, on_rank in enumerate(stepped):
        sent = threaded.ranks.meshes[rank].comm_counter.snapshot()
        before = without.ranks.meshes[rank].comm_counter.snapshot()
        to_owners = sum(1 + 2 * shards[name] for name in names if name not in on_rank)
        from_owner = (shape.size - 1) * sum(shards[name] for name in on_rank)
        expected = Counter(before) + Counter({everywhere: itemsize * (to_owners + from_owner)})
        assert sent == expected
    # The state of a matrix is a number for each row and each column, there once.
    for optimizer, tensors in results:
        for name, key in tensors.keys.items():
            if key is not None:
                kept = sum(x.numel() for x in optimizer.state[key].values() if x.dim())
                rows_and_columns = sum(specs[name].shape)
                assert kept == rows_and_columns
                assert key.numel() == 0
    largest = max(math.prod(specs[name].shape) for name in names)
    loads = [sum(math.prod(specs[name].shape) for name in on_rank) for on_rank in stepped]
    assert max(loads) <= sum(loads) / shape.size + largest


# --- engines ---------------------------------------------------------------------------------------------------


def config_of(mesh, stages=None, *, zero=0, replicas=1, **precision):
    batch, sequence, hidden = map(int, mesh.split("x"))
    config = {
        "train_micro_batch_size_per_gpu": 2 // replicas,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": batch, "sequence": sequence, "hidden": hidden}},
        **precision,
    }
    if stages is not None:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2}
    return config


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 if step % 2 else 1.0)


def make_engine(name, config, options, dtype=torch.float64):
    # DeepSpeed compiles its Muon.
    torch.compiler.set_stance("force_eager")
    model = llama(**options).to(dtype)
    optimizer = None if name in SECTIONS else OPTIMIZERS[name](model)
    config = {**config, "optimizer": SECTIONS[name]} if name in SECTIONS else config
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=halving)[0]


def train_engine(engine, steps):
    """The micro-batches of a step are spread over the replicas."""
    at = cuboid.mesh_of(engine)
    for step in steps:
        rows = batch_of(step)["input_ids"]
        parts = [
            {"input_ids": ids, "labels": ids}
            for ids in (part[at.coordinate.data :: at.topology.data] for part in rows.split(2))
        ]
        if hasattr(engine, "train_batch"):
            engine.train_batch(iter(parts))
            continue
        for part in parts:
            engine.backward(engine(**part).loss)
            engine.step()


def engine_steps(name, config, options, steps, folder, *, resume=False):
    """All weights after steps of an engine; unless it has resumed, it saves a checkpoint."""
    accelerator = get_accelerator()
    dtypes = [*accelerator.supported_dtypes(), torch.float64]
    with ExitStack() as stack:
        stack.enter_context(KeepFloat64())
        # DeepSpeed asserts that gradients are of a dtype in this list.
        stack.enter_context(mock.patch.object(accelerator, "supported_dtypes", return_value=dtypes))
        if config["zero_optimization"]["stage"]:
            # Its ZeRO adds them up in the second of these.
            wide = (torch.float64, torch.float64)
            stack.enter_context(mock.patch.object(deepspeed.DeepSpeedEngine, "get_data_types", return_value=wide))
        engine = make_engine(name, config, options)
        if resume:
            engine.load_checkpoint(folder)
        train_engine(engine, steps)
        if not resume:
            engine.save_checkpoint(folder)
        return cuboid.full_state_dict(engine)


@functools.cache
def plain_steps(name, options, *, clips):
    """Weights of one process after all steps."""
    model = llama(**dict(options))
    torch.compiler.set_stance("force_eager")
    with KeepFloat64():
        optimizer = OPTIMIZERS[name](model)
        schedule = halving(optimizer)
        for step in range(STEPS):
            model(**batch_of(step), use_cache=False).loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            # All of them, as engines do: Muon doesn't have them all.
            model.zero_grad()
    return model.state_dict()


#: Mesh, stages, ZeRO's stage, replicas.
PLAIN, ZERO_2 = ("1x2x1", None, 0, 1), ("1x1x2", None, 2, 2)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "first", "second", "options"),
    [
        ("Adafactor", ("1x2x1", None, 1, 2), ("1x1x1", 2, 0, 1), {"tie_word_embeddings": True}),
        pytest.param("DeepSpeed's Muon", ("1x1x2", None, 1, 1), ("1x1x1", None, 2, 2), {}, marks=pytest.mark.slow),
        pytest.param("DeepSpeed's Muon", ("1x1x1", 2, 0, 1), ("1x2x1", None, 1, 2), {}, marks=pytest.mark.slow),
        pytest.param("DeepSpeed's Muon", ("1x1x1", 2, 1, 2), ("2x2x2", None, 1, 1), {}, marks=pytest.mark.slow),
        pytest.param("Muon", ("1x1x2", 2, 1, 2), PLAIN, {}, marks=pytest.mark.slow),
        pytest.param("Adafactor", ("1x1x1", 2, 0, 1), ("1x2x1", None, 0, 1), {}, marks=pytest.mark.slow),
        pytest.param("transformers' Adafactor", ("2x1x1", 2, 0, 1), ZERO_2, {}, marks=pytest.mark.slow),
        pytest.param("LARS", ("1x1x1", 2, 0, 1), ("1x2x2", None, 1, 2), {}, marks=pytest.mark.slow),
    ],
)
def test_an_engine_saves_them_whole_and_resumes_on_another_layout(pool, tmp_path, name, first, second, options):
    # DeepSpeed's ZeRO clips by a norm in float32.
    clips = not first[2] and not second[2]
    half = STEPS // 2
    for layout, function, steps in (
        (first, engine_steps, range(half)),
        (second, resumed_steps, range(half, STEPS)),
    ):
        config = config_on(*layout) | {"gradient_clipping": MAX_NORM * clips}
        results = pool.run(ranks_of(*layout), function, name, config, options, steps, str(tmp_path))
    weights = next(filter(None, results))
    expected = plain_steps(name, tuple(options.items()), clips=clips)
    assert max((weights[key] - value).abs().max().item() for key, value in expected.items()) <= 1e-9


def resumed_steps(*arguments):
    return engine_steps(*arguments, resume=True)


def ranks_of(mesh, stages, _, replicas):
    return math.prod(map(int, mesh.split("x"))) * (stages or 1) * replicas


def config_on(mesh, stages, zero, replicas, **precision):
    return config_of(mesh, stages, zero=zero, replicas=replicas, **precision)


BF16, FP16 = ({key: {"enabled": True}} for key in ("bf16", "fp16"))
#: The first of its five steps overflow.
FP16["fp16"] |= {"initial_scale_power": 20, "hysteresis": 1}


def seen_by_owners(name, config, folder):
    """In each step, by name: the whole master weights and gradients that this rank steps; and the steps left out."""
    dtype = torch.bfloat16 if "bf16" in config else torch.float16
    seen = []
    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        engine = make_engine(name, config, {}, dtype)

        def look(*_):
            keys = engine.whole_states.keys.items()
            # ZeRO steps one group at a time.
            now = {name: (key.detach().clone(), key.grad.clone()) for name, key in keys if key is not None if len(key)}
            seen.append((engine.global_steps, now))

        engine.optimizer.optimizer.register_step_pre_hook(look)
        train_engine(engine, range(5))
        engine.save_checkpoint(folder)
    return seen, engine.skipped_steps


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        ("DeepSpeed's Muon", ("1x2x1", None, 1, 2), BF16),
        # Adds up gradients in float32, in another optimizer of DeepSpeed's.
        pytest.param("DeepSpeed's Muon", ("1x1x2", 2, 1, 1), BF16, marks=pytest.mark.slow),
        pytest.param("Adafactor", ("1x1x1", 2, 1, 2), BF16, marks=pytest.mark.slow),
        pytest.param("Muon", ("2x1x1", None, 2, 1), BF16, marks=pytest.mark.slow),
        pytest.param("Adafactor", ("1x1x2", None, 2, 2), FP16, marks=pytest.mark.slow),
        pytest.param("DeepSpeed's Muon", ("1x1x2", None, 1, 1), FP16, marks=pytest.mark.slow),
    ],
)
def test_in_16_bits_owners_step_whole_float32_masters(pool, tmp_path, name, layout, precision):
    results = pool.run(ranks_of(*layout), seen_by_owners, name, config_on(*layout, **precision), str(tmp_path))
    seen = {}
    for of_rank, skipped in results:
        assert skipped in ((1, 2, 3) if "fp16" in precision else (0,))
        for step, tensors in of_rank:
            for key, values in tensors.items():
                # One owner over all replicas.
                assert seen.setdefault((key, step), values) is values
    model = llama().to(torch.bfloat16 if "bf16" in precision else torch.float16).float()
    parameters = dict(model.named_parameters())
    stepped = {key for key, _ in seen}
    groups = OPTIMIZERS[name](model).param_groups
    by_rule = {id(p) for group in groups if group.get("use_muon", True) for p in group["params"]}
    assert stepped == {key for key, p in parameters.items() if id(p) in by_rule}
    # The masters' steps are those of one process that is given the same gradients in float32.
    optimizer = OPTIMIZERS[name](model)
    schedule = halving(optimizer)
    torch.compiler.set_stance("force_eager")
    steps = sorted({step for _, step in seen})
    assert len(steps) == 5 - results[0][1]
    for step in steps:
        for key in stepped:
            weights, gradient = seen[key, step]
            assert weights.dtype == gradient.dtype == torch.float32
            torch.testing.assert_close(weights, parameters[key].detach(), rtol=1e-6, atol=1e-7)
            parameters[key].grad = gradient.clone()
        optimizer.step()
        schedule.step()
    # Which are the true ones, clipped, but for rounding.
    exact = llama()
    exact(**batch_of(steps[0]), use_cache=False).loss.backward()
    in_optimizer = [p for group in OPTIMIZERS[name](exact).param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(in_optimizer, MAX_NORM)
    exact_parameters = dict(exact.named_parameters())
    for key in stepped:
        wanted = exact_parameters[key].grad
        off = (seen[key, steps[0]][1] - wanted).norm() / wanted.norm()
        assert off < 0.03, key
    saved = {}
    for file in (tmp_path / "global_step5" / "optimizer" / "master").glob("*.safetensors"):
        saved |= load_file(file)
    for key in stepped:
        torch.testing.assert_close(saved[key], parameters[key].detach(), rtol=1e-6, atol=1e-7)
