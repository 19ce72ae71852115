"""What NCCL and CUDA would make of a step, proven without either: orders, synchronised devices, poisoned results."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import cuboid
from conftest import TIMEOUT_S
from cuboid import Pipeline
from cuboid.distributed import collectives
from cuboid.distributed.async_result import AsyncResult
from cuboid.verify import SmallModel
from cuboid.verify.workers.pool import WorkerError
from proofs.device import SynchronisedDevice
from proofs.former import formerly_lowered
from proofs.mirror import mirrored
from proofs.order import Issued, OrderRecorder, check_orders
from proofs.poison import PoisonError, poisoned

IDS = torch.arange(4 * 12).view(4, 12) * 7 % 131
SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=4)
MESHES = [(1, 2, 2), (2, 2, 2), (2, 1, 1)]


def mesh_section(axes):
    sizes = dict(zip(("batch", "sequence", "hidden"), axes, strict=True))
    return {"tensor_parallel": {"mode": "3d_tensor", "mesh": sizes}}


def step_of_mesh(path, axes, **section):
    """Two forwards and backwards: loss, and this rank's gradients."""
    config = mesh_section(axes)
    config["tensor_parallel"] |= section
    model = cuboid.shard(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), config).train()
    for _ in range(2):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}, cuboid.mesh_of(model)


#: Two ranks of two stages each.
V = {"stages": 2, "chunks": 2, "schedule": "zero_bubble-v"}
ROUND = {"stages": 2, "chunks": 2, "schedule": "seq1f1b-interleaved"}
#: A share of the head on each rank.
SHARES = {"stages": 2, "schedule": "zero_bubble", "head": "spread"}


def step_of_pipeline(path, stages, axes, segments=2, steps=1):
    keys = {"stages": stages} if isinstance(stages, int) else stages
    config = {"pipeline": {"engine": "seq1f1b", "segments": segments, **keys}, **mesh_section(axes)}
    pipeline = Pipeline(cuboid.from_pretrained(path, config, dtype=torch.float64))
    for _ in range(steps):
        batches = [{"input_ids": IDS[[row]], "labels": IDS[[row]]} for row in range(4)]
        loss = pipeline.train(iter(batches), 4)
    return loss.item(), {n: p.grad.clone() for n, p in pipeline._model.named_parameters() if p.grad is not None}


def same(first, second):
    """Whether two steps gave the same loss and gradients, to the bit."""
    return first[0] == second[0] and all(torch.equal(gradient, second[1][name]) for name, gradient in first[1].items())


# --- order ---------------------------------------------------------------------------------------------------------


def recorded(step, *arguments):
    with OrderRecorder() as recorder:
        step(*arguments)
    return recorder.issued


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_all_ranks_of_a_mesh_issue_the_same_in_one_order(pool, checkpoint, axes):
    ranks = axes[0] * axes[1] * axes[2]
    issued = pool.run(ranks, recorded, step_of_mesh, checkpoint(SMALL), axes, timeout_s=TIMEOUT_S)
    assert check_orders(issued).total() > 100


def ranks_of(stages, axes):
    return (stages if isinstance(stages, int) else stages["stages"]) * axes[0] * axes[1] * axes[2]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stages", "axes"),
    [
        *((4, (1, 1, 1)), (2, (1, 2, 1)), (2, (2, 2, 1)), (4, (1, 2, 1)), (ROUND, (1, 1, 1)), (V, (1, 2, 1))),
        *((SHARES, (1, 1, 1)), (V | SHARES | {"schedule": "zero_bubble-v"}, (1, 2, 1))),
    ],
    ids=str,
)
def test_messages_and_collectives_of_a_pipeline_have_one_order(pool, checkpoint, stages, axes):
    ranks = ranks_of(stages, axes)
    issued = pool.run(ranks, recorded, step_of_pipeline, checkpoint(SMALL), stages, axes, timeout_s=TIMEOUT_S)
    counts = check_orders(issued)
    assert counts["send"] == counts["recv_"] > 8
    for calls in issued:
        # Every group has met before the first activation is sent or received, behind a byte for each channel.
        messages = [
            place for place, call in enumerate(calls) if call.peer is not None and call.tensors[0][1] != "torch.uint8"
        ]
        known = {call.group for call in calls[: messages[0]]}
        assert {call.group for call in calls} == known


def recorded_with_former_programs(path):
    with formerly_lowered():
        return recorded(step_of_pipeline, path, 2, (1, 1, 1))


@pytest.fixture
def fresh_pool(pool):
    """Whose processes' modules may be changed."""
    with pool.fresh() as workers:
        yield workers


def test_gradients_received_from_the_start_of_a_program_make_a_circle(fresh_pool, checkpoint):
    issued = fresh_pool.run(2, recorded_with_former_programs, checkpoint(SMALL), timeout_s=TIMEOUT_S)
    with pytest.raises(AssertionError, match="wait for one another in a circle"):
        check_orders(issued)


def gather_directly():
    group = dist.group.WORLD
    with OrderRecorder() as recorder:
        for direct in (False, True):
            collectives.gather_into(torch.empty(2, 1 << 15), torch.ones(1 << 15), group, direct=direct)
    return recorder.issued


def test_messages_that_gloo_sends_in_place_of_a_collective_would_wait_for_one_another_on_one_stream(pool):
    """Why they are gloo's alone (:attr:`Mesh.spans_networks`)."""
    issued = pool.run(2, gather_directly, timeout_s=TIMEOUT_S)
    check_orders([calls[:1] for calls in issued])
    with pytest.raises(AssertionError, match="circle"):
        check_orders(issued)


def test_the_recorder_tells_what_differs():
    def one(operation, group="0", tensors=(((4,), "torch.float32"),), peer=None):
        return Issued(group, (0, 1), operation, tensors, peer)

    assert check_orders([[one("allreduce_")] * 2] * 2) == {"allreduce_": 4}
    with pytest.raises(AssertionError, match=r"allreduce_.* but .*broadcast_.* on rank 1"):
        check_orders([[one("allreduce_")], [one("broadcast_")]])
    with pytest.raises(AssertionError, match=r"\(8,\)"):
        check_orders([[one("allreduce_")], [one("allreduce_", tensors=(((8,), "torch.float32"),))]])
    with pytest.raises(AssertionError, match=r"on rank \[0\], but not on all of \(0, 1\)"):
        check_orders([[one("allreduce_")] * 2, [one("allreduce_")]])
    with pytest.raises(AssertionError, match="circle"):
        check_orders(
            [[one("allreduce_", "a"), one("allreduce_", "b")], [one("allreduce_", "b"), one("allreduce_", "a")]]
        )
    # A message's two ends are one operation.
    sent, received = one("send", peer=1), one("recv_", peer=0)
    check_orders([[sent, one("allreduce_")], [received, one("allreduce_")]])
    with pytest.raises(AssertionError, match="circle"):
        check_orders([[one("allreduce_"), sent], [received, one("allreduce_")]])


# --- a device that is synchronised -----------------------------------------------------------------------------------


def synchronised(path, stages, axes):
    expected = step_of_pipeline(path, stages, axes, 2, 2)
    device = SynchronisedDevice(timeout_s=60.0)
    with device.in_use():
        actual = step_of_pipeline(path, stages, axes, 2, 2)
    assert not device.under_way
    return same(expected, actual), device.synchronised


def synchronised_with_former_programs(path, first_only):
    with formerly_lowered(), SynchronisedDevice(first_only=first_only, timeout_s=3.0).in_use():
        step_of_pipeline(path, 2, (1, 1, 1))


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize(
    ("stages", "axes"),
    [(2, (1, 1, 1)), (3, (1, 1, 1)), (4, (1, 1, 1)), (2, (1, 2, 1)), (V, (1, 1, 1)), (ROUND, (1, 1, 1))],
    ids=str,
)
def test_a_pipeline_runs_where_every_operation_waits_for_all_messages(pool, checkpoint, stages, axes):
    ranks = ranks_of(stages, axes)
    arguments = (checkpoint(SMALL), stages, axes)
    for alike, synchronisations in pool.run(ranks, synchronised, *arguments, timeout_s=TIMEOUT_S):
        assert alike
        assert synchronisations > 10


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("first_only", [True, False])
def test_the_former_programs_wait_for_ever_at_the_first_kernel_that_is_loaded(fresh_pool, checkpoint, first_only):
    with pytest.raises(WorkerError, match="waits for ever: a message that is under way doesn't come"):
        fresh_pool.run(2, synchronised_with_former_programs, checkpoint(SMALL), first_only, timeout_s=TIMEOUT_S)


# --- poisoned results ------------------------------------------------------------------------------------------------


def poisoned_step(step, *arguments):
    expected = step(*arguments)
    with poisoned() as started:
        actual = step(*arguments)
    assert len(started) > 20
    return same(expected, actual)


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("weight_gather", ["layer", "step"])
def test_nothing_of_a_layer_is_read_written_or_freed_before_its_collective_has_ended(
    pool, checkpoint, axes, weight_gather
):
    ranks = axes[0] * axes[1] * axes[2]
    arguments = (step_with, checkpoint(SMALL), axes, weight_gather)
    assert all(pool.run(ranks, poisoned_step, *arguments, timeout_s=TIMEOUT_S))


def step_with(path, axes, weight_gather):
    return step_of_mesh(path, axes, weight_gather=weight_gather)


@pytest.mark.slow
def test_nothing_of_a_pipeline_is_read_written_or_freed_before_its_collective_has_ended(pool, checkpoint):
    assert all(pool.run(4, poisoned_step, step_of_pipeline, checkpoint(SMALL), 2, (1, 2, 1), timeout_s=TIMEOUT_S))


def poisoned_shares(path, axes):
    expected = step_of_pipeline(path, SHARES, axes)
    with poisoned() as started:
        actual = step_of_pipeline(path, SHARES, axes)
    return same(expected, actual), started


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("axes", [(1, 1, 1), (1, 2, 1)], ids=str)
def test_nothing_of_a_spread_head_is_read_written_or_freed_before_its_collective_has_ended(pool, checkpoint, axes):
    """Its rows are scattered beside the first units, and their gradients gathered beside the last."""
    for is_same, started in pool.run(ranks_of(SHARES, axes), poisoned_shares, checkpoint(SMALL), axes):
        assert is_same
        of_head = [name for name in started if name in ("scatter", "broadcast", "reduce", "gather")]
        units = 4 * 2
        assert of_head[0] == "scatter"
        assert of_head[-1] == "gather"
        assert of_head.count("broadcast") == of_head.count("reduce") == len(of_head) / 2 - 1 == units


def mistakes():
    """What the poison finds, by the mistake."""
    group, rank = dist.group.WORLD, dist.get_rank()
    seen = {}

    def gather(x, out):
        return AsyncResult(out, [collectives._gather(out, x, group=group, async_op=True)])

    with poisoned():
        x, out = torch.full((4,), float(rank)), torch.empty(8)
        pending = gather(x, out)
        seen["early"] = bool(out.isnan().all())
        seen["result"] = pending.wait().tolist()
        for mistake in ("changed", "written", "freed"):
            x, out = torch.full((4,), float(rank)), torch.empty(8)
            pending = gather(x, out)
            if mistake == "changed":
                x.zero_().sub_(1)
            elif mistake == "written":
                out[0] = 1
            else:
                del x
            with pytest.raises(PoisonError) as caught:
                pending.wait()
            seen[mistake] = str(caught.value)
    with pytest.raises(PoisonError, match="1 collectives were never waited for"), poisoned():
        gather(torch.zeros(4), torch.empty(8))
    return seen


def test_the_poison_finds_mistakes(pool):
    for seen in pool.run(2, mistakes, timeout_s=TIMEOUT_S):
        assert seen == {
            "early": True,
            "result": [0.0] * 4 + [1.0] * 4,
            "changed": "an input of all-gather was changed before its end",
            "written": "the result of all-gather was written to before its end",
            "freed": "the memory of the input of all-gather was freed before its end",
        }


def test_a_late_collective_shows_who_reads_or_changes_early():
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    with mirrored(torch.device("cpu"), late=True) as started:
        x, out = torch.arange(2.0), torch.empty(4)
        pending = AsyncResult(out, [collectives._gather(out, x, group=group, async_op=True)])
        assert out.isnan().all()
        x += 1
        assert pending.wait().tolist() == [1.0, 2.0, 1.0, 2.0]
        reduced = torch.empty(1)
        assert collectives._reduce_scatter(reduced, x, group=group) is None
        assert reduced.tolist() == [2.0]
    assert started == ["all-gather", "reduce-scatter"]
