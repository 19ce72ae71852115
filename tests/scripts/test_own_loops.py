"""Loops of torch's own, without DeepSpeed or ColossalAI: DDP, gradient scalers, optimizers, accelerate, the Trainer."""

import copy
import re

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import cuboid
from conftest import TIMEOUT_S
from cuboid.config.schema import require_config
from cuboid.distributed.mesh import current_rank
from cuboid.errors import CuboidError, OptimizerError, UnsupportedModelError
from cuboid.integrations.handoff import adopt_model
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.verify import SmallModel
from launching import as_ranks
from threaded import Threaded

SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=2)
IDS = torch.randint(0, 100, (4, 12), generator=torch.Generator().manual_seed(1))


def config_of(mesh, stages=1):
    axes = dict(zip(("batch", "sequence", "hidden"), map(int, mesh.split("x")), strict=True))
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}
    return {**config, "pipeline": {"engine": "seq1f1b", "stages": stages}} if stages > 1 else config


def trained(path, mesh):
    """The weights after three steps of SGD on two replicas, each with half of the rows; or on all rows."""
    if mesh is None:
        model = wrapped = AutoModelForCausalLM.from_pretrained(path)
        pieces = [IDS[:2], IDS[2:]]
    else:
        model = cuboid.from_pretrained(path, config_of(mesh))
        wrapped = DistributedDataParallel(model)
        replica = cuboid.mesh_of(model).coordinate.data
        pieces = [IDS[2 * replica : 2 * replica + 2]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for piece in pieces:
            (wrapped(input_ids=piece, labels=piece, use_cache=False).loss / len(pieces)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict() if mesh is None else cuboid.full_state_dict(model)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["2x1x1", "1x2x1", "1x1x2"])
def test_ddp_averages_replicas(pool, checkpoint, mesh):
    path = checkpoint(SMALL)
    expected = trained(path, None)
    weights = next(filter(None, pool.run(4, trained, path, mesh, timeout_s=TIMEOUT_S)))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def refused_by_ddp(path, way):
    stages = 2 if way == "a stage" else 1
    model = cuboid.from_pretrained(path, config_of("1x1x2" if stages == 1 else "1x1x1", stages))
    group = dist.group.WORLD if way == "a group" else None
    try:
        DistributedDataParallel(model, process_group=group)
    except CuboidError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("way", "said"),
    [("a group", r"process_group of ranks \[0, 1\].*Leave it out"), ("a stage", "cuboid.Pipeline")],
)
def test_ddp_is_refused_where_it_would_average_other_shards(pool, checkpoint, way, said):
    for message in pool.run(2, refused_by_ddp, checkpoint(SMALL), way, timeout_s=TIMEOUT_S):
        assert re.search(said, message), message


def scaled(path):
    """Whether a rank's weights have moved, and the scale, after steps in which one rank's gradient overflows."""
    model = cuboid.from_pretrained(path, config_of("1x1x2"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    results = []
    for overflows in (True, False):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(input_ids=IDS, labels=IDS, use_cache=False).loss).backward()
        if overflows and current_rank() == 1:
            next(p.grad for p in model.parameters()).view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        results.append((moved, scaler.get_scale()))
    return results


def test_all_ranks_skip_a_step_in_which_one_gradient_overflows(pool, checkpoint):
    assert pool.run(2, scaled, checkpoint(SMALL), timeout_s=TIMEOUT_S) == [[(False, 4.0), (True, 4.0)]] * 2


# --- optimizers ------------------------------------------------------------------------------------------------------


class NormalizedSGD(torch.optim.Optimizer):
    """A step of fixed length for each tensor."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / parameter.grad.norm()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SMALL.config(), dtype=torch.float64)


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def loss_after(model, make, prepare=False):
    optimizer = make(model)
    if prepare:
        cuboid.prepare_optimizer(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss.detach()


WHOLE = {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=1e-2),
    "NormalizedSGD": lambda model: NormalizedSGD(matrices(model), lr=1e-2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_of_whole_tensors_is_prepared_or_refused_at_its_first_step(model, name):
    def refused(on_rank):
        with pytest.raises(OptimizerError, match=rf"{name} needs whole tensors.*cuboid.prepare_optimizer"):
            loss_after(on_rank, WHOLE[name])

    Threaded(model, "1x1x2").run(refused)
    with KeepFloat64():
        expected = loss_after(copy.deepcopy(model), WHOLE[name])
    for loss in Threaded(model, "1x1x2").run(lambda on_rank: loss_after(on_rank, WHOLE[name], prepare=True)):
        torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-8)


def test_other_optimizers_step(model):
    def make(on_rank):
        return torch.optim.AdamW(on_rank.parameters(), lr=1e-2)

    with KeepFloat64():
        expected = loss_after(copy.deepcopy(model), make)
    for loss in Threaded(model, "1x2x1").run(lambda on_rank: loss_after(on_rank, make)):
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)


def refused_steps(path):
    said = []
    model = AutoModelForCausalLM.from_pretrained(path)
    before = torch.optim.SGD(model.parameters(), lr=1e-2)
    model = cuboid.shard(model, config_of("1x1x2"))
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    redundant = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-2)
    for optimizer, arguments in (
        (before, ()),
        (redundant, ()),
        (torch.optim.LBFGS(model.parameters()), (lambda: torch.zeros(()),)),
    ):
        try:
            optimizer.step(*arguments)
        except OptimizerError as error:
            said.append(str(error))
    return said


def test_optimizers_that_would_step_in_silence_are_refused(pool, checkpoint):
    for before, redundant, closures in pool.run(2, refused_steps, checkpoint(SMALL), timeout_s=TIMEOUT_S):
        assert "as they were before it was sharded" in before
        assert "ZeroRedundancyOptimizer wraps another optimizer" in redundant
        assert "LBFGS.step needs closure" in closures


# --- accelerate and the Trainer, without DeepSpeed -------------------------------------------------------------------

ACCELERATE = """
import sys, torch, cuboid
from accelerate import Accelerator
path, mesh = sys.argv[1:]
ids = torch.arange(48).view(4, 12)
accelerator = Accelerator(cpu=True)
if mesh == "plain":
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(path)
else:
    model = cuboid.from_pretrained(path, {"tensor_parallel": {"mode": "3d_tensor", "mesh": {mesh: 2}}})
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for _ in range(3):
    optimizer.zero_grad()
    accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
print("loss", model(input_ids=ids, labels=ids, use_cache=False).loss.item())
"""
TRAINER = """
import sys, cuboid
from transformers import Trainer, TrainingArguments
model = cuboid.from_pretrained(sys.argv[1], {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}}})
arguments = TrainingArguments(sys.argv[2], use_cpu=True, report_to=[], max_steps=1)
rows = [{"input_ids": list(range(12)), "labels": list(range(12))}] * 2
Trainer(model, arguments, eval_dataset=rows)
Trainer(model, arguments, train_dataset=rows)
"""


def test_accelerates_own_loop_averages_replicas(checkpoint, tmp_path):
    (tmp_path / "script.py").write_text(ACCELERATE)
    path, losses = checkpoint(SMALL), {}
    for mesh, ranks in (("plain", 1), ("hidden", 2), ("sequence", 4)):
        endings = as_ranks(ranks, tmp_path / "script.py", path, mesh)
        assert all(status == 0 for status, _ in endings), endings
        losses[mesh] = [float(output.split()[-1]) for _, output in endings]
    assert losses["hidden"] + losses["sequence"] == pytest.approx(losses["plain"] * 6, rel=1e-5)


def test_a_trainer_without_deepspeed_is_refused_when_it_is_made(checkpoint, tmp_path):
    (tmp_path / "script.py").write_text(TRAINER)
    endings = as_ranks(2, tmp_path / "script.py", checkpoint(SMALL), tmp_path)
    assert [status for status, _ in endings] == [1, 1]
    assert "ConfigError: the Trainer is given a model that is sharded over 2 ranks" in "".join(
        text for _, text in endings
    )


# --- a script's own module around the model --------------------------------------------------------------------------


class MeanOfRows(nn.Module):
    """A model in a module whose forward computes a loss of its own, with a mask that no checkpoint has."""

    def __init__(self, model):
        super().__init__()
        self.inside = model
        self.register_buffer("weights", torch.tensor([1.0, 0.5, 0.0, 2.0]), persistent=False)

    def forward(self, ids):
        logits = self.inside(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return (loss.mean(1) * self.weights).mean()


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.3,
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


def wrapped_in_an_engine(path, mesh, is_sharded_before, folder):
    """Losses and norms of three steps, the weights after them, and the loss of what a checkpoint of them holds."""
    if mesh is None:
        model = AutoModelForCausalLM.from_pretrained(path)
        run, optimizer, engine = MeanOfRows(model), torch.optim.SGD(model.parameters(), lr=0.5), None
    else:
        config = {**DEEPSPEED, **config_of(mesh)}
        plain = AutoModelForCausalLM.from_pretrained
        model = cuboid.from_pretrained(path, config) if is_sharded_before else plain(path)
        wrapper = MeanOfRows(model)
        run = engine = deepspeed.initialize(model=wrapper, model_parameters=wrapper.parameters(), config=config)[0]
    run.train()
    steps = []
    for _ in range(3):
        loss = run(IDS)
        if engine is None:
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
            norm = engine.get_global_grad_norm()
        steps.append((float(loss.detach()), float(norm)))
    if engine is None:
        return steps, model.state_dict(), None
    engine.save_checkpoint(folder, tag="last")
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/last")
    engine.load_checkpoint(folder, tag="last")
    return steps, cuboid.full_state_dict(engine), float((MeanOfRows(saved)(IDS) - engine(IDS)).detach())


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("mesh", "is_sharded_before"), [("1x2x1", True), ("1x1x2", False)])
def test_an_engine_trains_a_model_in_a_module_of_a_script(pool, checkpoint, tmp_path, mesh, is_sharded_before):
    path = checkpoint(SMALL)
    expected, weights, _ = wrapped_in_an_engine(path, None, None, None)
    for steps, state, saved in pool.run(2, wrapped_in_an_engine, path, mesh, is_sharded_before, tmp_path):
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        assert abs(saved) < 1e-5
        for name, weight in state.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)


class WithHead(MeanOfRows):
    def __init__(self, model):
        super().__init__(model)
        self.head = nn.Linear(4, 2)


class NamedAsInDdp(WithHead):
    def __init__(self, model):
        super().__init__(model)
        self.module = self.inside


class OfTwo(MeanOfRows):
    def __init__(self, model):
        super().__init__(model)
        self.teacher = copy.deepcopy(model)


@pytest.mark.parametrize(
    ("wrap", "stages", "takes", "said"),
    [
        (WithHead, 1, True, r"WithHead has head\.weight beside the LlamaForCausalLM in it, .* loop of torch's alone"),
        (NamedAsInDdp, 1, True, r"NamedAsInDdp has head\.weight beside the LlamaForCausalLM in it"),
        (OfTwo, 1, True, r"OfTwo has 2 models in it \(LlamaForCausalLM, LlamaForCausalLM\)"),
        (MeanOfRows, 2, True, "calls the forward of the LlamaForCausalLM in it, which a stage"),
        (MeanOfRows, 1, False, "MeanOfRows isn't a model of transformers, but has one in it"),
    ],
    ids=["parameters", "parameters beside module", "two models", "stages", "colossalai"],
)
def test_modules_around_a_model_that_no_engine_can_save_are_refused(model, wrap, stages, takes, said):
    config = require_config({**DEEPSPEED, **config_of("1x1x1", stages)})[0]
    with pytest.raises(UnsupportedModelError, match=said):
        adopt_model(wrap(model), config, takes_wrappers=takes)
