"""What one rank calls alone, the others never come to: an error within seconds, also where nothing else would tell."""

import textwrap
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from transformers.trainer_pt_utils import distributed_concat

from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import PeerLostError
from cuboid.failures import rendezvous, waiting_call, whereabouts
from cuboid.failures.rank_agreement import StepGuard, run_on_all_ranks
from cuboid.verify import SmallModel
from fresh_ranks import endings_of
from launching import as_ranks

TIMEOUT_S = 60.0
#: How often others look at ranks, or for them, before a slow one goes on: a wrong error would need two looks.
LOOKS = 3


def _quick():
    """Waits of tenths of a second in place of seconds, and a process group and a mesh of all ranks."""
    whereabouts.STILL_S, rendezvous._LOOK_AROUND_S = 0.3, 0.5
    for owner, name in LOOKING.values():
        setattr(owner, name, _telling(name, getattr(owner, name)))
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    mesh = Mesh(MeshShape(1, dist.get_world_size(), 1))
    run_on_all_ranks(lambda: None, mesh, what="the start")
    mesh.connect()
    return mesh


#: By what a rank does: writes where it is; is in a step, and looks where the others are; waits in a meeting for them.
LOOKING = {
    "writes": (whereabouts.Whereabouts, "_write"),
    "in a step": (whereabouts.Whereabouts, "_alone"),
    "in a meeting": (rendezvous.Rendezvous, "_look_around"),
}


def _telling(name, function):
    """Count the calls of a function in the store, by rank."""

    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        _events().add(f"{name}/{dist.get_rank()}", 1)
        return result

    return call


def _events():
    return dist.PrefixStore("events", dist.distributed_c10d._get_default_store())


def _await(what, rank):
    """Until another rank has looked so often from now on."""
    key, until = f"{LOOKING[what][1]}/{rank}", time.monotonic() + TIMEOUT_S / 2
    looks = _events().add(key, 0) + LOOKS
    while _events().add(key, 0) < looks:
        assert time.monotonic() < until, f"rank {rank} never {what}"
        time.sleep(0.02)


def _save(mesh):
    run_on_all_ranks(lambda: None, mesh, what="a save")


def _step(mesh):
    with StepGuard(mesh, "a step"):
        dist.all_reduce(torch.ones(1), group=mesh.mesh_group)


def _gather(_):
    dist.all_gather_object([None, None], "metrics")


def _receive(_):
    dist.broadcast_object_list([None], src=0)


CALLS = {
    "save": _save,
    "step": _step,
    "barrier": lambda _: dist.barrier(),
    "gather": _gather,
    "receive": _receive,
}


def _alone(what, then):
    mesh = _quick()
    _step(mesh)
    if mesh.rank == 0:
        if then == "barrier":
            # gloo counts messages as if they were collectives; these are never received.
            messages = [dist.isend(torch.ones(1), 1) for _ in range(3)]
            assert len(messages) == 3
        CALLS[what](mesh)
    CALLS[then](mesh)


@pytest.mark.parametrize(
    ("what", "then", "words"),
    [
        ("save", "step", "rank 0 is in a save, and rank 1 went on to a step without it"),
        pytest.param(
            "step", "save", "rank 1 is in a save, and rank 0 went on to a step without it", marks=pytest.mark.ci
        ),
        pytest.param(
            "save",
            "barrier",
            "rank 0 is in a save, and rank 1 waits for it in torch.distributed.barrier (",
            marks=pytest.mark.ci,
        ),
        pytest.param(
            "save",
            "receive",
            "rank 0 is in a save, and rank 1 waits for it in torch.distributed.broadcast_object_list (",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_meets_the_others_alone_is_told_where_they_are(what, then, words):
    endings = endings_of(2, _alone, what, then, timeout_s=TIMEOUT_S / 2)
    meeting, other = endings if what == "save" else reversed(endings)
    assert (meeting.kind, meeting.text[: len(words)]) == ("RankError", words)
    assert "as under `if rank == 0`" in meeting.text
    # It is in a step, whose error is the same; or in a collective of its own, and loses the connection.
    assert (other.kind, other.text) == (meeting.kind, meeting.text) or then in ("barrier", "receive")


_SCRIPT = """
    import sys
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import cuboid
    from cuboid.failures import whereabouts

    whereabouts.STILL_S = 0.3
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}}
    model = cuboid.from_pretrained(sys.argv[1], config).eval()
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        model(input_ids=ids)
        print("so far")
        if dist.get_rank() == 0:
            ALONE
    THEN
"""


@pytest.mark.parametrize(
    ("alone", "then", "what", "call"),
    [
        ("model(input_ids=ids)", "dist.barrier()", "forward", "barrier"),
        pytest.param(
            "model.generate(ids)", "dist.barrier()", "torch.distributed.broadcast", "barrier", marks=pytest.mark.ci
        ),
        pytest.param(
            "model(input_ids=ids)",
            "dist.all_gather_object([None, None], 1)",
            "forward",
            "all_gather_object",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_one_rank_calls_ends_with_its_place_where_nothing_can_interrupt_it(
    checkpoint, tmp_path, alone, then, what, call
):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT).replace("ALONE", alone).replace("THEN", then))
    (status, output), (other_status, other_output) = as_ranks(
        2, script, checkpoint(SmallModel("llama")), timeout_s=TIMEOUT_S / 2
    )
    assert status == 1
    assert other_status != 0
    lines = script.read_text().splitlines()
    line, waiting = (max(n for n, line in enumerate(lines, 1) if line.strip() == text) for text in (alone, then))
    what += "" if what == "forward" else f" ({script}:{line})"
    why = (
        f"RankError: rank 0 is in {what}, and rank 1 waits for it in torch.distributed.{call} ({script}:{waiting}): "
        "all ranks must make the same calls in the same order, and not one alone, as under `if rank == 0`"
    )
    assert f"cuboid: rank 0: {why} ({script}:{line})" in output
    assert "so far" in output
    # Where it loses the connection, in place of the backend's words.
    assert f"cuboid: rank 1, for rank 0: {why}\n" in other_output
    assert "Traceback" not in other_output


def _accelerate_alone():
    """What each collective of accelerate raises on a rank that has lost the other one."""
    # Rank 0 waits twice as long after each failure.
    rendezvous._LISTEN_S = 0.05
    mesh = _quick()
    PartialState(cpu=True)
    accelerator = Accelerator(cpu=True)
    if mesh.rank == 1:
        return None
    calls = [
        lambda: accelerator.gather(torch.ones(1)),
        lambda: accelerator.gather_for_metrics(["an object"], use_gather_object=True),
        lambda: accelerator.reduce(torch.ones(1)),
        lambda: accelerate.utils.reduce(torch.ones(1)),
        lambda: accelerate.utils.broadcast(torch.ones(1), from_process=1),
        lambda: accelerate.utils.broadcast_object_list([None], from_process=1),
        lambda: accelerator.check_trigger(),
        accelerator.wait_for_everyone,
        lambda: distributed_concat(torch.ones(1)),
    ]
    said = []
    for call in calls:
        with pytest.raises(PeerLostError) as caught:
            call()
        assert caught.value.rank == 1
        said.append(str(caught.value))
    return said


@pytest.mark.ci
def test_a_collective_of_accelerate_says_which_rank_was_lost():
    ending, _ = endings_of(2, _accelerate_alone, timeout_s=TIMEOUT_S / 2)
    assert ending.kind is None, ending
    assert ending.text[0].startswith(f"rank 1 ended while rank 0 waited for it in accelerate's gather ({__file__}:")
    # The others find that it is known already.
    assert set(ending.text) == {ending.text[0]}


def _slow(where):
    mesh = _quick()
    for number in range(2):
        if where == "in a step" and mesh.rank == 1:
            with StepGuard(mesh, "a step"):
                _await("in a step", 0)
                dist.all_reduce(torch.ones(1), group=mesh.mesh_group)
        else:
            _step(mesh)
        if where == "in the script" and mesh.rank == 1:
            _await("in a meeting", 0)
        if where == "in a step that fails":
            try:
                with StepGuard(mesh, "a step"):
                    if mesh.rank == 1:
                        raise StopIteration
                    _step(mesh)
            except StopIteration:
                dist.all_reduce(torch.ones(1), group=mesh.mesh_group)
                if mesh.rank == 1:
                    _await("in a meeting", 0)
        _save(mesh)
        if where == "before a barrier" and mesh.rank == number % 2:
            _await("writes", 1 - mesh.rank)
        dist.barrier()
    return "done"


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("in a step", marks=pytest.mark.ci),
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in ("in the script", "in a step that fails", "before a barrier")
        ),
    ],
)
def test_ranks_that_are_slow_are_waited_for(where):
    assert [ending.text for ending in endings_of(2, _slow, where, timeout_s=TIMEOUT_S)] == ["done", "done"]


def _begun_and_not_waited_for():
    """A barrier that one rank has begun, and that takes long on another since a third one comes late."""
    mesh = _quick()
    rendezvous.CONFIRMED_S = 0.3
    # gloo counts messages as if they were collectives.
    for _ in range(3 if mesh.rank else 0):
        dist.send(torch.ones(1), 2) if mesh.rank == 1 else dist.recv(torch.ones(1), 1)
    if mesh.rank == 2:
        _await("writes", 1)
        _await("in a meeting", 0)
    barrier = dist.barrier(async_op=mesh.rank == 0)
    _save(mesh)
    if barrier is not None:
        barrier.wait()
    return "done"


def _saved_by_a_thread():
    """A save by threads of the script, one of which is late, while the main threads do something else."""
    mesh = _quick()
    rendezvous.CONFIRMED_S = 0.3

    def save():
        if mesh.rank == 1:
            # Its main thread waits in the barrier.
            _await("writes", 1)
            _await("in a meeting", 0)
        _save(mesh)

    with ThreadPoolExecutor(1) as threads:
        saving = threads.submit(save)
        if mesh.rank == 0:
            wait([saving])
        dist.barrier()
        saving.result()
    return "done"


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "script"), [(3, _begun_and_not_waited_for), (2, _saved_by_a_thread)])
def test_a_rank_that_waits_for_another_one_is_not_taken_to_wait_for_this_one(ranks, script):
    assert [ending.text for ending in endings_of(ranks, script, timeout_s=TIMEOUT_S)] == ["done"] * ranks


def _numbers():
    one, two, rank = torch.ones(1), torch.ones(2), dist.get_rank()
    calls = [
        lambda: dist.all_gather([one.clone(), one.clone()], one),
        lambda: dist.all_gather_into_tensor(two.clone(), one),
        lambda: dist.all_reduce(one.clone()),
        lambda: dist.all_to_all_single(two.clone(), two),
        dist.barrier,
        lambda: dist.broadcast(one.clone(), 0),
        lambda: dist.gather(one, [one.clone(), one.clone()] if rank == 0 else None),
        lambda: dist.reduce_scatter_tensor(one.clone(), two),
        lambda: dist.send(one, 1) if rank == 0 else dist.recv(one.clone(), 0),
        lambda: (
            [work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 1)])]
            if rank == 0
            else dist.recv(one.clone(), 0)
        ),
    ]
    name, numbers = dist.group.WORLD.group_name, []
    for call in calls:
        before = waiting_call.begun_collectives()
        call()
        after = waiting_call.begun_collectives()
        assert after.at_least[name] == after.at_most[name]
        numbers.append(after.at_least[name] > before.at_most[name])
    return numbers


def test_every_collective_is_numbered_and_no_message(pool):
    assert pool.run(2, _numbers) == [[True] * 8 + [False] * 2] * 2
