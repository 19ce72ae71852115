"""What fails on one rank ends all of them: loading, starting, reading, uneven data, ranks that die in a step."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import cuboid
from cuboid.distributed.host_identity import host_identity
from cuboid.distributed.mesh import Mesh
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CuboidError, PeerLostError
from cuboid.failures import rank_agreement, rendezvous, startup
from cuboid.failures.rank_agreement import StepGuard, run_on_all_ranks
from cuboid.failures.startup import Launch, await_all_ranks, report_early_failure
from cuboid.verify import SmallModel
from fresh_ranks import endings_of
from launching import as_ranks, free_port, torchrun
from proofs import stuck_group
from training import make_engine, settings, train

TIMEOUT_S = 90.0
SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=2)


# --- the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_start_is_named(absent):
    launch = Launch(1 - absent, 2, "127.0.0.1", free_port())
    with pytest.raises(PeerLostError, match=rf"rank {absent} of 2 didn't come to 127\.0\.0\.1:\d+ .* within 0\.5 s"):
        await_all_ranks(launch, timeout_s=0.5)


def test_ranks_that_all_start_wait_for_one_another():
    port, stores = free_port(), []
    ranks = [threading.Thread(target=lambda r=r: stores.append(await_all_ranks(Launch(r, 3, "127.0.0.1", port)))) for r in (2, 1, 0)]  # fmt: skip  # noqa: E501
    for rank in ranks:
        rank.start()
        time.sleep(0.1)
    for rank in ranks:
        rank.join(TIMEOUT_S)
    assert len(stores) == 3


def _fail_in_the_loader(error):
    def fail(*_, **__):
        raise error

    transformers.modeling_utils.caching_allocator_warmup = fail
    transformers.modeling_utils.PreTrainedModel._load_pretrained_model = fail


def _load_early(path, failing):
    config = settings("1x2x1")
    if int(os.environ["RANK"]) == failing:
        _fail_in_the_loader(RuntimeError("no such operator"))
    model = cuboid.from_pretrained(path, config)
    deepspeed.initialize(model=model, config=config)


@pytest.mark.sample(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_to_load_before_there_is_a_process_group_ends_the_others(checkpoint, failing):
    endings = endings_of(2, _load_early, checkpoint(SMALL), failing)
    text = f"{checkpoint(SMALL)}: can't be loaded: RuntimeError: no such operator"
    assert (endings[failing].kind, endings[failing].text) == ("CheckpointError", text)
    told = endings[1 - failing]
    assert (told.kind, told.rank) == ("RankError", failing)
    assert told.text.endswith(text)


def test_a_failure_that_nobody_can_be_told_of_is_not_kept_back(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(startup, "_LINGER_S", 4 * TIMEOUT_S)
    started = time.monotonic()
    assert report_early_failure("anything")
    assert time.monotonic() - started < TIMEOUT_S


def _report(texts):
    return report_early_failure(texts[int(os.environ["RANK"])])


@pytest.mark.parametrize(("texts", "everywhere"), [("aa", True), ("ab", False)])
def test_an_early_failure_is_everywhere_only_if_every_rank_has_the_same(texts, everywhere):
    assert [ending.text for ending in endings_of(2, _report, texts)] == [everywhere, everywhere]


def test_a_rank_that_fails_twice_counts_once(monkeypatch):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(startup, "_LINGER_S", 0.2)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert [report_early_failure("a") for _ in range(3)] == [False] * 3
    # Rank 0 then comes to make the process group.
    with pytest.raises(CuboidError, match=r"^a$") as caught:
        await_all_ranks(Launch(0, 2, "127.0.0.1", agent.port), timeout_s=TIMEOUT_S)
    assert (caught.value.rank, caught.value.shared) == (1, True)
    assert report_early_failure("a")
    assert not report_early_failure("another one")


def test_ranks_that_a_launcher_starts_again_refuse_the_store_of_those_before(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    earlier = dist.PrefixStore("cuboid/start", agent)
    earlier.set("at/0", f"{host_identity('pid')} {os.getppid()}")
    earlier.add("arrived", 2)
    with pytest.raises(CuboidError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"):
        await_all_ranks(Launch(0, 2, "127.0.0.1", agent.port), timeout_s=TIMEOUT_S)
    # A process that makes a second process group isn't another one.
    earlier.set("at/0", f"{host_identity('pid')} {os.getpid()}")
    assert await_all_ranks(Launch(0, 2, "127.0.0.1", agent.port), timeout_s=TIMEOUT_S) is not None


_UNHEARD = """
    import os, sys, time
    import cuboid
    from cuboid.failures import startup
    from cuboid.failures.rank_agreement import run_on_all_ranks

    startup._LINGER_S = 0.5
    if os.environ["RANK"] == "0":
        time.sleep(4)  # still loading
    elif sys.argv[1] == "together":
        load = lambda: cuboid.load_config("/no/such/file.json")
        run_on_all_ranks(lambda: run_on_all_ranks(load, what="inner"), what="outer")
    else:
        cuboid.load_config("/no/such/file.json")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["together", "alone"])
def test_a_rank_that_fails_before_rank_0_can_know_prints_the_error_itself(tmp_path, way):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_UNHEARD))
    (status, output), (failed, said) = as_ranks(2, script, way)
    assert (status, output) == (0, "")
    assert failed == 1
    assert said.startswith("cuboid: rank 1: ConfigError: config '/no/such/file.json' does not exist"), said


# --- loading and initialising in a world --------------------------------------------------------------------------


def _load_and_go_on(path):
    rank, seen = torch.distributed.get_rank(), []
    original = transformers.modeling_utils.PreTrainedModel._load_pretrained_model
    for error in (RuntimeError("in a loader"), MemoryError(), ValueError("a shape"), KeyError("x")):
        if rank == 1:
            _fail_in_the_loader(error)
        try:
            cuboid.from_pretrained(path, settings("1x2x1"))
        except CuboidError as caught:
            seen.append((type(caught).__name__, str(caught), caught.rank, type(caught.__cause__).__name__))
        transformers.modeling_utils.PreTrainedModel._load_pretrained_model = original
    config = settings("1x2x1")
    if rank == 0:
        config["optimizer"]["params"]["no_such_option"] = 1
    try:
        deepspeed.initialize(model=cuboid.from_pretrained(path, config), config=config)
    except CuboidError as caught:
        seen.append((type(caught).__name__, str(caught), caught.rank))
    return seen, train(make_engine(path, settings("1x2x1")), 1)


def test_any_exception_while_one_rank_loads_is_raised_on_all_and_the_next_load_is_in_step(pool, checkpoint):
    (first, losses), (second, same) = pool.run(2, _load_and_go_on, checkpoint(SMALL), timeout_s=TIMEOUT_S)
    damaged = f"{checkpoint(SMALL)}: can't be loaded: "
    expected = [
        ("CheckpointError", f"{damaged}RuntimeError: in a loader", 1),
        ("RankError", "LlamaForCausalLM.from_pretrained: MemoryError", 1),
        ("CheckpointError", f"{damaged}ValueError: a shape", 1),
        ("CheckpointError", f"{damaged}KeyError: 'x'", 1),
    ]
    assert [failure[:3] for failure in first[:4]] == expected
    assert [failure[:3] for failure in second[:4]] == expected
    assert [failure[3] for failure in first[:4]] == ["NoneType"] * 4
    assert [failure[3] for failure in second[:4]] == ["RuntimeError", "MemoryError", "ValueError", "KeyError"]
    assert first[4] == second[4]
    assert first[4][::2] == ("ConfigError", 0)
    assert losses == same


# --- data ----------------------------------------------------------------------------------------------------------


def _uneven_pipeline(path):
    engine = make_engine(path, settings("1x1x1", stages=2, data=2))
    mesh, seen = engine.pipeline.mesh, []
    ids = torch.randint(0, 131, (2, 12), generator=torch.Generator().manual_seed(3))
    good = {"input_ids": ids, "labels": ids}

    def broken(kind):
        yield good
        if mesh.coordinate.data == 1:
            raise kind("the disk is gone")
        yield good

    shares = {
        "uneven": lambda: iter([good] * (4 if mesh.coordinate.data == 0 else 2)),
        "broken": lambda: broken(KeyError),
        "long": lambda: iter([{n: x.repeat(1, 100 if mesh.coordinate.data == 1 else 1) for n, x in good.items()}] * 2),
    }
    for kind, share in shares.items():
        batches = share()
        try:
            while True:
                engine.train_batch(batches)
        except (CuboidError, StopIteration) as error:
            seen.append((kind, type(error).__name__, str(error), getattr(error, "rank", None), engine.global_steps))
    return seen, float(engine.train_batch(iter([good] * 2)))


def test_a_pipelines_replicas_are_told_whose_data_ended_or_failed(pool, checkpoint):
    small = SmallModel("gpt2", heads=4, layers=2)
    results = pool.run(4, _uneven_pipeline, checkpoint(small), timeout_s=TIMEOUT_S)
    for seen, loss in results:
        (_, kind, text, _, steps), (_, broken, why, origin, _), (_, long, too, _, _) = seen
        assert (kind, steps) == ("CuboidError", 1)
        assert text.startswith("the data of replica 1 of 2 ended before that of the others")
        assert "drop_last" in text
        # Rank 1 reads for the second replica.
        assert (broken, why, origin) == ("RankError", "reading the micro-batches: KeyError: 'the disk is gone'", 1)
        assert (long, "positions" in too) == ("CuboidError", True)
        assert loss == results[0][1]


def _uneven_mesh(path, then):
    engine = make_engine(path, settings("1x1x1", zero=1, data=2))
    replica = cuboid.mesh_of(engine).coordinate.data
    ids = torch.randint(0, 131, (2, 12), generator=torch.Generator().manual_seed(3))
    for _ in range(6 if replica == 0 else 4):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    if then != "exit":
        engine.save_checkpoint(then)
    return engine.global_steps


def test_a_meshs_replica_that_is_given_fewer_batches_ends_all(checkpoint, tmp_path):
    longer, shorter = endings_of(2, _uneven_mesh, checkpoint(SMALL), str(tmp_path))
    expected = "replica 1 of 2 made 2 optimizer steps and went on to save of global_step2, but replica 0 is in step 3"
    for ending in (longer, shorter):
        assert (ending.kind, ending.text[: len(expected)]) == ("RankError", expected), ending
    assert "drop_last" in longer.text

    longer, shorter = endings_of(2, _uneven_mesh, checkpoint(SMALL), "exit")
    assert shorter.text == 2
    assert longer.kind == "PeerLostError", longer
    assert "rank 1 ended while rank 0 waited for it in backward of step 3" in longer.text
    assert "replica 1 of 2 had made 2 optimizer steps, this is step 3" in longer.text


# --- ranks that die in a step -------------------------------------------------------------------------------------


def _die_in_a_step(path, way):
    engine = make_engine(path, settings("1x2x2"))
    train(engine, 1)

    def fail(*_):
        if way == "raise":
            raise MemoryError("no room for more")
        os._exit(1)

    if torch.distributed.get_rank() == 1:
        engine.module.model.layers[1].register_forward_pre_hook(cuboid.local_hook(fail))
    train(engine, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["raise", "die"])
def test_a_rank_of_a_mesh_that_is_gone_in_a_step_is_named_by_the_others(checkpoint, way):
    endings = endings_of(4, _die_in_a_step, checkpoint(SMALL), way)
    for rank in (0, 2, 3):
        ending = endings[rank]
        if way == "die":
            assert endings[1] is None
            assert (ending.kind, ending.rank) == ("PeerLostError", 1), ending
            assert "rank 1 ended while rank" in ending.text
            assert "waited for it in forward" in ending.text
        else:
            assert endings[1].kind == "MemoryError"
            assert (ending.kind, ending.text, ending.rank) == (
                "RankError",
                "forward: MemoryError: no room for more",
                1,
            ), ending


# --- a backend that doesn't notice --------------------------------------------------------------------------------


def _fail_where_nothing_notices(aborts, failing, told, patience_s):
    stuck_group.register()
    rendezvous.waits_for_lost_ranks = lambda: aborts
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mesh = Mesh(MeshShape(1, 2, 1))
    run_on_all_ranks(lambda: None, mesh, what="a meeting")
    group = dist.new_group([0, 1], backend="stuck")
    try:
        with StepGuard(mesh, "step 1"):
            if rank == failing:
                raise ValueError("boom")
            dist.all_reduce(torch.ones(1), group=group)
    finally:
        if rank != failing:
            told.touch()
        # The process that failed doesn't end before, so that no connection is lost either.
        until = time.monotonic() + patience_s
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.01)
        if not told.exists():
            raise TimeoutError("nobody was told")


@pytest.mark.ci
@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_where_nothing_tells_of_a_failed_rank_groups_are_aborted_and_all_raise_its_error(tmp_path, failing):
    endings = endings_of(2, _fail_where_nothing_notices, True, failing, tmp_path / "told", TIMEOUT_S / 2)
    failed, told = endings[failing], endings[1 - failing]
    assert (failed.kind, failed.text) == ("ValueError", "boom")
    assert (told.kind, told.text, told.rank) == ("RankError", "step 1: ValueError: boom", failing)


@pytest.mark.slow
def test_without_aborted_groups_the_others_wait_on(tmp_path):
    endings = endings_of(2, _fail_where_nothing_notices, False, 0, tmp_path / "told", 6.0, timeout_s=20.0)
    assert (endings[0].kind, endings[0].text) == ("TimeoutError", "nobody was told")
    assert endings[1] is None


_LINGERING = """
    import sys, time
    sys.path.insert(0, "tests/support")
    import torch, torch.distributed as dist
    from cuboid.failures import rendezvous
    from cuboid.distributed.mesh import Mesh
    from cuboid.failures.rank_agreement import StepGuard, run_on_all_ranks
    from cuboid.distributed.topology import MeshShape
    from proofs import stuck_group

    stuck_group.register()
    rendezvous.waits_for_lost_ranks = lambda: True
    dist.init_process_group("gloo")
    mesh = Mesh(MeshShape(1, 2, 1))
    run_on_all_ranks(lambda: None, mesh, what="a meeting")
    group = dist.new_group([0, 1], backend="stuck")
    print("started", time.time(), flush=True)
    try:
        with StepGuard(mesh, "step 1"):
            if dist.get_rank() == 0:
                raise ValueError("boom")
            dist.all_reduce(torch.ones(1), group=group)
    finally:
        if dist.get_rank() == 0:
            # What it still does doesn't keep the others, nor the launcher.
            time.sleep(600)
        print("ended", time.time(), flush=True)
"""


@pytest.mark.slow
def test_a_launcher_sees_an_exit_status_within_seconds_of_a_failure_that_nothing_notices(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_LINGERING))
    status, output = torchrun(2, script, timeout_s=120)
    assert status == 1, output
    assert "RankError: step 1: ValueError: boom" in output
    times = dict(line.split()[:2] for line in output.splitlines() if line.startswith(("started", "ended")))
    assert float(times["ended"]) - float(times["started"]) < 10


_ENDING_WHILE_IT_ASKS = """
    import torch.distributed as dist
    from cuboid.failures import rendezvous

    # All the time, and four times over, so that some thread is inside of the store's C++ when the process ends.
    rendezvous._LISTEN_S = 0
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    worlds = [rendezvous.Peers(0, 1, store) for _ in range(4)]
"""


def test_a_process_that_ends_while_it_asks_for_failures_does_not_abort():
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_ENDING_WHILE_IT_ASKS)], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")


def _return_from_what_was_aborted():
    rendezvous.waits_for_lost_ranks = lambda: True
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mesh = Mesh(MeshShape(1, 2, 1))
    run_on_all_ranks(lambda: None, mesh, what="a meeting")
    with StepGuard(mesh, "step 1"):
        if rank == 0:
            raise ValueError("boom")
        # A kernel that was aborted ends, and whoever waited for it goes on with what it has left.
        while not rank_agreement._peers(mesh).aborted_for:
            time.sleep(0.01)
    return "a result"


def test_nobody_goes_on_with_what_an_aborted_collective_has_left():
    told = endings_of(2, _return_from_what_was_aborted, timeout_s=60.0)[1]
    assert (told.kind, told.text, told.rank) == ("RankError", "step 1: ValueError: boom", 0)
