"""Checkpoints when ranks are killed, files are damaged, disks are full, and when something else is loaded."""

import itertools
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import cuboid
from comparing import stored
from cuboid.checkpoint.format.folder import complete, resolve
from cuboid.checkpoint.format.manifest import Manifest, check_contents, check_sizes
from cuboid.errors import CheckpointError
from cuboid.verify import SmallModel, WorkerPool
from cuboid.verify.workers.pool import WorkerError
from damage import sweep
from training import make_engine, settings, train

SMALL = SmallModel("llama", heads=4, kv_heads=2, layers=2)
#: Its embedding is 2.6 MB.
LARGE = SmallModel("llama", heads=4, kv_heads=2, layers=2, vocabulary=20_000)
KILLS = 50
#: Time limit of the kills, for slow machines; the test ends with the kills made by then.
LIMIT_S = 240.0


# --- ranks that die ------------------------------------------------------------------------------------------------


def save_until_killed(path, config, root, asynchronous):
    """Resume from the last checkpoint, if there is one, and save forever; all tensors have the step as their value."""
    config = {**config, "checkpoint": {"keep_last": 3, "asynchronous": asynchronous}}
    engine = make_engine(path, config)
    train(engine, 1)
    step = 0
    if complete(Path(root)):
        _, client = engine.load_checkpoint(root)
        step = client["value"]
        weights = {float(x) for parameter in engine.module.parameters() for x in (parameter.min(), parameter.max())}
        # Padding stays zero.
        assert weights - {0.0} == {float(step)}, f"weights are {weights} in a checkpoint of {step}"
        moments = _moments(engine)
        assert moments - {0.0} == {float(step)}, f"moments are {moments} in a checkpoint of {step}"
    for saves in itertools.count(1):
        step += 1
        with torch.no_grad():
            for tensor in (*engine.module.parameters(), *_moment_tensors(engine)):
                tensor.fill_(step)
        engine.global_steps = step
        # One tag is overwritten all the time.
        engine.save_checkpoint(root, tag=None if step % 3 else "again", client_state={"value": step})
        if saves > 1:
            # The previous checkpoint is complete, even if this one is still being written.
            Path(root, "began").touch()


def _moment_tensors(engine):
    return [x for state in engine.optimizer.optimizer.state.values() for x in state.values() if x.dim() > 0]


def _moments(engine):
    return {float(x) for tensor in _moment_tensors(engine) for x in (tensor.min(), tensor.max())}


@pytest.mark.sample(0, ci=1)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "behind"])
def test_killed_ranks_leave_the_previous_checkpoint_intact(checkpoint, tmp_path, asynchronous):
    kill_again_and_again(checkpoint, tmp_path, asynchronous, KILLS // 16)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "behind"])
def test_many_killed_ranks_leave_the_previous_checkpoint_intact(checkpoint, tmp_path, asynchronous):
    kill_again_and_again(checkpoint, tmp_path, asynchronous, KILLS)


def kill_again_and_again(checkpoint, tmp_path, asynchronous, times):
    path, config, root = checkpoint(SMALL), settings("1x1x2", stages=1), tmp_path / "saved"
    root.mkdir()
    kills, end, last = 0, time.monotonic() + LIMIT_S, -1
    chance = random.Random(asynchronous)
    with WorkerPool(2) as pool:
        while kills < times and time.monotonic() < end:
            (root / "began").unlink(missing_ok=True)
            failure = []
            job = threading.Thread(target=_run, args=(pool, failure, path, config, str(root), asynchronous))
            job.start()
            while job.is_alive() and not (root / "began").exists():
                time.sleep(0.01)
            # At a random moment of the next two saves.
            time.sleep(chance.uniform(0.0, 0.4))
            victims = chance.choice([[0], [1], [0, 1]])
            for victim in victims:
                os.kill(pool._workers[victim].process.pid, signal.SIGKILL)
            job.join(60)
            assert not job.is_alive()
            assert "AssertionError" not in failure[0], failure[0]
            assert "exit code -9" in failure[0], failure[0]
            kills += 1
            last = _check_whole(root, last)
    assert kills >= min(times, 5)


def _run(pool, failure, *arguments):
    try:
        pool.run(2, save_until_killed, *arguments, timeout_s=60)
    except WorkerError as error:
        failure.append(str(error))


def _check_whole(root, last):
    """Check that the checkpoint that the next start would find is intact, and not older than the previous one."""
    folder = resolve(root)
    manifest = Manifest.read(folder)
    check_sizes(folder, manifest)
    check_contents(folder, manifest, manifest.files)
    assert manifest.step >= last
    # Files don't accumulate: at most the ones to keep, one that is being written, and one that is being replaced.
    assert len([entry for entry in root.iterdir() if entry.is_dir()]) <= 6
    return manifest.step


# --- files that are damaged ----------------------------------------------------------------------------------------


def save_once(path, config, root):
    engine = make_engine(path, config)
    train(engine, 1)
    engine.save_checkpoint(root)


def refusals(path, config, root, damages):
    """This rank's error when loading after each damage, which rank 0 makes and undoes."""
    engine = make_engine(path, config)
    rank, reported = torch.distributed.get_rank(), []
    before = cuboid.full_state_dict(engine)
    for name, kind in damages:
        file = Path(root) / "global_step1" / name
        content = file.read_bytes() if rank == 0 else b""
        if rank == 0:
            _damage(file, content, kind)
        torch.distributed.barrier()
        try:
            engine.load_checkpoint(root)
            reported.append(None)
        except CheckpointError as error:
            reported.append(str(error))
        torch.distributed.barrier()
        if rank == 0:
            if kind == "foreign":
                file.with_name("model-00009-of-00009.safetensors").unlink()
            file.write_bytes(content)
        torch.distributed.barrier()
    untouched = all(torch.equal(x, before[name]) for name, x in cuboid.full_state_dict(engine).items())
    engine.load_checkpoint(root)
    return reported, untouched


def _damage(file, content, kind):
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(content[: len(content) * 2 // 3])
    elif kind == "flipped":
        place = len(content) * 3 // 4
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
    else:
        file.with_name("model-00009-of-00009.safetensors").write_bytes(content)


def test_damaged_files_are_named_in_errors_on_every_rank(pool, checkpoint, tmp_path):
    path, config = checkpoint(SMALL), settings("1x1x2", stages=2)
    pool.run(4, save_once, path, config, str(tmp_path))
    folder = tmp_path / "global_step1"
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    tensors = [name for name in names if name.endswith(".safetensors")]
    kinds = ("flipped", "truncated", "missing")
    possible = [(name, kind) for name in names if name != "manifest.json" for kind in kinds]
    damages = [*random.Random(1).sample(possible, 33), (tensors[0], "foreign")]
    results = pool.run(4, refusals, path, config, str(tmp_path), damages)
    words = {"flipped": "sha256", "truncated": "bytes long", "missing": "is missing", "foreign": "is foreign"}
    for reported, untouched in results:
        for (name, kind), message in zip(damages, reported, strict=True):
            expected = "model-00009-of-00009.safetensors" if kind == "foreign" else name
            assert message is not None, f"{name}, {kind}, was loaded"
            assert expected in message
            assert words[kind] in message
        assert untouched


# --- disks that are full -------------------------------------------------------------------------------------------


def save_on_a_full_disk(path, config, root, settings_):
    """The error of a save when file sizes are limited; training then continues and saves again."""
    engine = make_engine(path, {**config, "checkpoint": settings_})
    train(engine, 1)
    engine.save_checkpoint(root)
    engine.wait_for_checkpoint()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 1:
        # Enough for the file of the pool's rendezvous, but not for the largest tensor.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, usual[1]))
    train(engine, 1)
    try:
        reported = engine.save_checkpoint(root)
        if settings_.get("asynchronous"):
            reported = engine.wait_for_checkpoint()
    except CheckpointError as error:
        reported = (str(error), error.rank)
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    torch.distributed.barrier()
    left = sorted(entry.name for entry in Path(root).iterdir())
    train(engine, 1)
    engine.save_checkpoint(root)
    engine.wait_for_checkpoint()
    return reported, left


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "behind"])
def test_a_full_disk_fails_only_the_save(pool, checkpoint, tmp_path, asynchronous):
    config = settings("1x1x2")
    arguments = (checkpoint(LARGE), config, str(tmp_path), {"asynchronous": asynchronous})
    for (message, rank), left in pool.run(2, save_on_a_full_disk, *arguments):
        assert "can't be written: File too large" in message
        assert "global_step2.incomplete/" in message
        assert rank == 1
        assert left == ["global_step1", "latest"]
    assert (tmp_path / "latest").read_text() == "global_step3"


def test_training_continues_after_a_failed_save_if_so_configured(pool, checkpoint, tmp_path):
    arguments = (checkpoint(LARGE), settings("1x1x2"), str(tmp_path), {"on_failure": "warn"})
    for reported, left in pool.run(2, save_on_a_full_disk, *arguments):
        assert reported is False
        assert left == ["global_step1", "latest"]
    assert resolve(tmp_path).name == "global_step3"


# --- what can't be loaded, or saved --------------------------------------------------------------------------------


def misuses(path, root, deeper):
    """This rank's error for each misuse; training continues after all of them."""
    engine = make_engine(path, settings("1x1x2"))
    train(engine, 1)
    engine.save_checkpoint(root)
    rank = torch.distributed.get_rank()
    attempts = {
        "nothing there": lambda: engine.load_checkpoint(root + "/elsewhere"),
        "unknown tag": lambda: engine.load_checkpoint(root, tag="best"),
        "strict": lambda: engine.load_checkpoint(root, load_module_strict=False),
        "frozen": lambda: engine.save_checkpoint(root, exclude_frozen_parameters=True),
        "tag": lambda: engine.save_checkpoint(root, tag="a/b"),
        "tags": lambda: engine.save_checkpoint(root, tag=f"rank{rank}"),
        "client state": lambda: engine.save_checkpoint(root, tag="x", client_state={"a": [{"b": object()}]}),
        "another model": lambda: engine.load_checkpoint(deeper, load_module_only=True),
    }
    reported = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            reported[name] = "nothing"
        except cuboid.CuboidError as error:
            reported[name] = str(error)
    optimizer = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    other = make_engine(path, {**settings("1x1x2", zero=0), "optimizer": optimizer})
    before = [parameter.detach().clone() for parameter in other.module.parameters()]
    try:
        other.load_checkpoint(root)
    except CheckpointError as error:
        reported["another optimizer"] = str(error)
    reported["weights after it"] = all(map(torch.equal, before, other.module.parameters()))
    other.load_checkpoint(root, load_optimizer_states=False)
    train(engine, 1)
    left = sorted(entry.name for entry in Path(root).iterdir())
    return reported, left


def test_misuse_raises_on_every_rank(pool, checkpoint, tmp_path):
    deeper = checkpoint(SmallModel("llama", heads=8, kv_heads=2, layers=2))
    for reported, left in pool.run(2, misuses, checkpoint(SMALL), str(tmp_path), deeper):
        assert "elsewhere: is not a folder" in reported["nothing there"]
        assert "global_step1" in reported["unknown tag"]
        assert "load_module_strict" in reported["strict"]
        assert "exclude_frozen_parameters" in reported["frozen"]
        assert "'a/b'" in reported["tag"]
        assert "rank1" in reported["tags"]
        assert "client.a.0.b is a builtins.object" in reported["client state"]
        assert "is it of another model?" in reported["another model"] or "shape" in reported["another model"]
        assert "AdamW, but the optimizer is SGD" in reported["another optimizer"]
        assert reported["weights after it"] is True
        assert left == ["global_step1", "latest"]


def test_for_deepspeeds_own_checkpoints_the_error_suggests_convert(pool, checkpoint, tmp_path):
    (tmp_path / "global_step9").mkdir()
    (tmp_path / "global_step9" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(WorkerError, match="cuboid convert"):
        pool.run(2, load_only, checkpoint(SMALL), str(tmp_path))


def load_only(path, root):
    make_engine(path, settings("1x1x2")).load_checkpoint(root)


# --- exports in place ----------------------------------------------------------------------------------------------


def export(path, out, mesh):
    model = cuboid.from_pretrained(path, settings(mesh))
    cuboid.save_pretrained(model, out, max_shard_size="9KB")


def test_an_export_replaces_the_files_of_an_earlier_one(pool, checkpoint, tmp_path):
    pool.run(4, export, checkpoint(SMALL), str(tmp_path), "1x2x2")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    other = checkpoint(SmallModel("llama", heads=4, kv_heads=2, layers=2, seed=3))
    pool.run(2, export, other, str(tmp_path), "1x1x2")
    read, expected = stored(tmp_path), stored(other)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)
    assert not list(tmp_path.glob(".*"))


def export_as_deepspeed(path, out):
    engine = make_engine(path, settings("1x1x2"))
    with pytest.raises(CheckpointError, match="save_filename"):
        engine.save_16bit_model(out, "weights.pt")
    return engine.save_16bit_model(out)


def test_deepspeeds_own_export_is_complete_and_in_safetensors(pool, checkpoint, tmp_path):
    assert pool.run(2, export_as_deepspeed, checkpoint(SMALL), str(tmp_path)) == [True, True]
    read, expected = stored(tmp_path), stored(checkpoint(SMALL))
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)
    assert not list(tmp_path.glob("*.bin"))


#: Files of the user's with names like weights, one of them like a shard, that no index names.
OWN = ["model-best.safetensors", "model_backup.safetensors", "model-00001-of-00009.safetensors"]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def save_through_every_door(path, out):
    """The file names after each kind of call, on rank 0."""
    engine = make_engine(path, settings("1x1x2"))
    model, rank = engine.module, torch.distributed.get_rank()
    state = cuboid.full_state_dict(model)
    doors = {
        "cuboid": lambda: cuboid.save_pretrained(engine, out, max_shard_size="40KB"),
        "model": lambda: model.save_pretrained(out),
        "gathered": lambda: model.save_pretrained(out, max_shard_size="30KB", variant="fp16"),
        "16 bit": lambda: engine.save_16bit_model(out),
        "handed over": lambda: model.save_pretrained(out, state_dict=state),
    }
    files_by_door = {}
    for name, door in doors.items():
        door()
        torch.distributed.barrier()
        if rank == 0:
            files_by_door[name] = sorted(os.listdir(out))
        torch.distributed.barrier()
    return files_by_door


def test_every_way_to_save_keeps_the_users_files(pool, checkpoint, tmp_path):
    for name in OWN:
        (tmp_path / name).write_text(f"mine: {name}")
    (tmp_path / "tokenizer.json").write_text('{"mine": 1}')
    save_file({"x": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
    files_by_door, _ = pool.run(2, save_through_every_door, checkpoint(SMALL), str(tmp_path))
    for names in files_by_door.values():
        assert set(OWN) <= set(names)
        assert ".cuboid-incomplete" not in names
    assert all((tmp_path / name).read_text() == f"mine: {name}" for name in OWN)
    assert (tmp_path / "tokenizer.json").read_text() == '{"mine": 1}'
    assert INDEX in files_by_door["cuboid"]
    assert SINGLE not in files_by_door["cuboid"]
    assert SINGLE in files_by_door["handed over"]
    assert INDEX not in files_by_door["handed over"]
    # Another variant's weights aren't replaced.
    assert INDEX in files_by_door["gathered"]
    assert "model.safetensors.index.fp16.json" in files_by_door["gathered"]
    assert "model.fp16.safetensors" not in files_by_door["gathered"]
    expected = AutoModelForCausalLM.from_pretrained(checkpoint(SMALL)).state_dict()
    for variant in (None, "fp16"):
        read = AutoModelForCausalLM.from_pretrained(tmp_path, variant=variant).state_dict()
        assert all(torch.equal(read[name], x) for name, x in expected.items())


# --- every reader --------------------------------------------------------------------------------------------------


def check_sweep(checkpoint, tmp_path, least, **chosen):
    # In a separate process, because a damage may crash a reader, and DeepSpeed can't change its world size.
    with WorkerPool(1) as pool:
        ((counts, wrong),) = pool.run(1, sweep, checkpoint(SMALL), str(tmp_path), *chosen.values(), timeout_s=3000)
    damages = sum(count for (_, kind), count in counts.items() if kind == "damages")
    print(f"{damages} damages:", {f"{form}: {kind}": count for (form, kind), count in sorted(counts.items())})
    assert not wrong, wrong
    assert damages >= least


@pytest.mark.ci
def test_readers_reject_a_sample_of_damages(checkpoint, tmp_path):
    check_sweep(checkpoint, tmp_path, 20, seed=1, flips=1, share=0.12)


@pytest.mark.slow
def test_readers_reject_all_damages(checkpoint, tmp_path):
    check_sweep(checkpoint, tmp_path, 400, seed=2, flips=4, share=1.0)
