"""Bytes that each rank reads of a model's files: once by all that see the same ones."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers.modeling_utils
from safetensors.torch import load_file, save_file

import cuboid
from cuboid.checkpoint import reader
from cuboid.checkpoint.metadata import ShardRange, TensorMetadata
from cuboid.checkpoint.reader import LoadPlan, TensorFolder
from cuboid.distributed.mesh import Mesh, current_rank
from cuboid.distributed.topology import MeshShape
from cuboid.errors import CheckpointError
from cuboid.failures.rank_agreement import run_on_all_ranks
from cuboid.tensor3d.sharding.sharded_param import local_state
from cuboid.tensor3d.sharding.sharding_spec import ShardingSpec, take_shard
from cuboid.verify.small_models import SmallModel
from fresh_ranks import endings_of
from launching import as_ranks
from two_hosts import ADDRESSES, INTERFACE, switch_of

LLAMA = SmallModel("llama", heads=8, kv_heads=8)


def config_of(mesh, stages):
    axes = dict(zip(("batch", "sequence", "hidden"), map(int, mesh.split("x")), strict=True))
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": axes}}
    if stages > 1:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2}
    return config


@contextmanager
def counted_reads():
    """Bytes of the tensors and slices that transformers takes out of files."""
    taken, original = [], transformers.modeling_utils.safe_open

    class Slice:
        def __init__(self, inner):
            self.get_shape, self._inner = inner.get_shape, inner

        def __getitem__(self, index):
            values = self._inner[index]
            taken.append(values.nbytes)
            return values

    class File:
        def __init__(self, *args, **kwargs):
            self._inner = original(*args, **kwargs)
            self.keys, self.metadata, self.__exit__ = self._inner.keys, self._inner.metadata, self._inner.__exit__

        def __enter__(self):
            self._inner.__enter__()
            return self

        def __exit__(self, *args):
            self._inner.__exit__(*args)

        def get_slice(self, name):
            return Slice(self._inner.get_slice(name))

    transformers.modeling_utils.safe_open = File
    try:
        yield taken
    finally:
        transformers.modeling_utils.safe_open = original


def loaded(path, mesh, stages):
    """Bytes that this rank reads, and its place and parts of the weights."""
    rank = current_rank()
    with counted_reads() as taken:
        model = cuboid.from_pretrained(path.format(rank=rank), config_of(mesh, stages))
    at = cuboid.mesh_of(model).coordinate
    place = (at.pipe, at.batch, at.sequence, at.hidden)
    return sum(taken), place, {name: x.detach().clone() for name, x in local_state(model).items()}


def stored_bytes(path):
    return sum(x.nbytes for file in Path(path).glob("*.safetensors") for x in load_file(file).values())


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("mesh", "stages"), [("1x1x1", 1), ("2x1x1", 1), ("1x1x1", 2), ("1x2x1", 2)])
def test_one_replica_reads_what_all_see(pool, checkpoint, mesh, stages):
    path = checkpoint(LLAMA)
    results = pool.run(8, loaded, path, mesh, stages)
    assert sum(read for read, _, _ in results) == stored_bytes(path)
    first = {}
    for _, place, parts in results:
        expected = first.setdefault(place, parts)
        assert expected.keys() == parts.keys()
        assert all(torch.equal(expected[name], parts[name]) for name in parts)
    # The first replica's ranks have read theirs.
    assert [read > 0 for read, _, _ in results].count(True) == len(first)


def test_each_host_reads_its_own_copy(pool, checkpoint, tmp_path):
    """Two hosts without a shared file system: each reads its files once."""
    source = checkpoint(LLAMA)
    for host in range(2):
        shutil.copytree(source, tmp_path / f"host-{host}")
    for rank in range(8):
        (tmp_path / f"rank-{rank}").symlink_to(tmp_path / f"host-{rank // 4}")
    results = pool.run(8, loaded, str(tmp_path / "rank-{rank}"), "2x1x1", 1)
    read = [read for read, _, _ in results]
    assert sum(read[:4]) == sum(read[4:]) == stored_bytes(source)
    assert all(torch.equal(results[0][2][name], results[4][2][name]) for name in results[0][2])


def break_reads(path):
    rank = current_rank()
    original = transformers.modeling_utils.safe_open

    def failing(*args, **kwargs):
        raise OSError("the disk is gone")

    if rank == 0:
        transformers.modeling_utils.safe_open = failing
    try:
        cuboid.from_pretrained(path, config_of("1x1x1", 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        transformers.modeling_utils.safe_open = original
    return None


def test_a_reader_that_fails_fails_on_all(pool, checkpoint):
    errors = pool.run(4, break_reads, checkpoint(LLAMA))
    assert all("the disk is gone" in error for error in errors), errors


# --- checkpoints of training ---------------------------------------------------------------------------------------

SHARDINGS = {
    "up": ShardingSpec((24, 16), (("sequence",), ("hidden",))),
    "down": ShardingSpec((16, 24), (("hidden",), ("sequence",))),
    "vocabulary": ShardingSpec((13, 16), (("sequence",), ("hidden",)), ragged=True),
    "norm": ShardingSpec((24,), (("hidden",),)),
    # On some ranks of 2×1×4 and 1×2×2, all of the shard is padding.
    "few": ShardingSpec((3, 8), ((), ()), ragged=True),
    "experts": ShardingSpec((4, 8, 6), ((), ("sequence",), ("hidden",)), (1, 2, 1)),
    "scale": None,
}


def resumed(folder, shape, zero, block_bytes):
    """Bytes that this rank reads of a folder in blocks; checks that its parts are right."""
    mesh = Mesh(MeshShape.parse(shape))
    mesh.connect_host()
    full = {name: load_file(Path(folder) / "model.safetensors")[name] for name in SHARDINGS}
    targets, expected = {}, {}
    for name, sharding in SHARDINGS.items():
        shard = full[name].view(-1) if sharding is None else take_shard(full[name], sharding, mesh).view(-1)
        share = -(-shard.numel() // mesh.topology.data) if zero else shard.numel()
        start = min(mesh.coordinate.data * share, shard.numel()) if zero else 0
        expected[name] = shard[start : start + share]
        targets[name] = ShardRange(start, torch.full_like(expected[name], torch.nan))
    taken, original = [], os.preadv
    os.preadv = lambda *args: taken.append(original(*args)) or taken[-1]
    reader._BLOCK_BYTES, usual = block_bytes, reader._BLOCK_BYTES
    try:
        tensors = {name: TensorMetadata(tuple(full[name].shape), spec) for name, spec in SHARDINGS.items()}
        LoadPlan(Path(folder), targets, tensors, required=list(targets)).read(mesh)
    finally:
        os.preadv, reader._BLOCK_BYTES = original, usual
    assert all(torch.equal(targets[name].values, expected[name]) for name in targets)
    return sum(taken)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("block_bytes", [200, 64 << 20])
@pytest.mark.parametrize(("shape", "zero"), [("2x1x4", False), ("1x2x2", False), ("1x2x1", True), ("1x1x1", False)])
def test_each_byte_of_a_checkpoint_is_read_once(pool, tmp_path, shape, zero, block_bytes):
    torch.manual_seed(0)
    full = {name: torch.randn(() if spec is None else spec.shape) for name, spec in SHARDINGS.items()}
    save_file(full, tmp_path / "model.safetensors")
    read = pool.run(8, resumed, str(tmp_path), shape, zero, block_bytes)
    # Rows at the border of two replicas' ranges are read by both.
    surplus = 8 * max(24, 16) * 4 * len(SHARDINGS) if zero else 0
    assert 0 <= sum(read) - stored_bytes(tmp_path) <= surplus, read


def unreadable(folder):
    mesh = Mesh(MeshShape())
    mesh.connect_host()
    target, tensors = ShardRange(0, torch.zeros(4)), {"x": TensorMetadata((4,), None)}
    original = TensorFolder.read

    def failing(self, name, box=None):
        raise OSError("the disk is gone")

    if mesh.rank == 0:
        TensorFolder.read = failing
    try:
        run_on_all_ranks(lambda: LoadPlan(Path(folder), {"x": target}, tensors, ["x"]).read(mesh), mesh, what="load")
    except CheckpointError as error:
        return str(error)
    finally:
        TensorFolder.read = original
    return None


def missing_on_one(folder):
    mesh = Mesh(MeshShape())
    mesh.connect_host()
    target, tensors = ShardRange(0, torch.zeros(4)), {"x": TensorMetadata((4,), None)}
    here = Path(folder) / ("none" if mesh.rank == 1 else ".")
    try:
        run_on_all_ranks(lambda: LoadPlan(here, {"x": target}, tensors, ["x"]).read(mesh), mesh, what="load")
    except CheckpointError as error:
        return str(error)
    return None


def test_a_folder_that_one_rank_lacks_is_an_error_on_all_ranks(pool, tmp_path):
    save_file({"x": torch.ones(4)}, tmp_path / "model.safetensors")
    errors = pool.run(4, missing_on_one, str(tmp_path))
    assert all("none: has neither" in error for error in errors), errors


def test_a_file_that_cant_be_read_is_an_error_on_all_ranks(pool, tmp_path):
    save_file({"x": torch.ones(4)}, tmp_path / "model.safetensors")
    errors = pool.run(4, unreadable, str(tmp_path))
    assert all("the disk is gone" in error for error in errors), errors


# --- on several hosts ------------------------------------------------------------------------------------------------


def _read_on_a_host(hub, hosts, path, folder):
    """Bytes that the only rank of a host reads of a model and of a checkpoint, which all hosts see."""
    from network.networks import Shaped

    Shaped(hosts, hub).enter(int(os.environ["RANK"]))
    os.environ.update(MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME=INTERFACE)
    dist.init_process_group("gloo")
    read = loaded(path, "1x1x1", 1)[0], resumed(folder, "1x1x1", False, 64 << 20)
    dist.barrier()
    dist.destroy_process_group()
    return read


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_more_hosts_read_no_more_bytes(checkpoint, tmp_path, hosts):
    path = checkpoint(LLAMA)
    save_file(
        {name: torch.randn(() if spec is None else spec.shape) for name, spec in SHARDINGS.items()},
        tmp_path / "model.safetensors",
    )
    with switch_of(hosts) as hub:
        endings = endings_of(hosts, _read_on_a_host, hub, hosts, path, str(tmp_path))
    assert {ending.kind for ending in endings} == {None}, endings
    model, trained = (sum(read) for read in zip(*(ending.text for ending in endings), strict=True))
    assert (model, trained) == (stored_bytes(path), stored_bytes(tmp_path))


# --- before there is a process group --------------------------------------------------------------------------------

SCRIPT = """
import sys, hashlib, json, torch, cuboid
sys.path[:0] = sys.argv[2:]
from checkpoint.test_read_once import counted_reads
with counted_reads() as taken:
    model = cuboid.from_pretrained(sys.argv[1], {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}})
parts = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(json.dumps([sum(taken), hashlib.sha256(parts).hexdigest()]))
"""


def test_before_there_is_a_process_group(checkpoint, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    path = checkpoint(LLAMA)
    endings = as_ranks(3, tmp_path / "script.py", path, Path(__file__).parents[1])
    assert [status for status, _ in endings] == [0, 0, 0], endings
    read, parts = zip(*(json.loads(output.splitlines()[-1]) for _, output in endings), strict=True)
    assert list(read) == [stored_bytes(path), 0, 0]
    assert len(set(parts)) == 1


LATE = """
import gc, os, sys, time, torch.distributed as dist, cuboid, deepspeed
from cuboid.failures import startup
rank, (path, way) = int(os.environ["RANK"]), sys.argv[1:]
config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"hidden": 2}}}
if way == "another place is late" and rank == 3:
    time.sleep(2)
model = cuboid.from_pretrained(path, config)
if way == "the next load":
    # The other place comes to it before rank 0 has left the first one.
    del model
    gc.collect()
    time.sleep({0: 2, 2: 2}.get(rank, 0))
    model = cuboid.from_pretrained(path, config)
if way == "an engine":
    optimizer = {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "train_micro_batch_size_per_gpu": 1}
    deepspeed.initialize(model=model, config={**config, **optimizer})
    # The process group has a store of its own.
    dist.barrier()
    assert startup._kept_store.cache_info().currsize == 0
print("loaded")
"""


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("way", ["another place is late", "the next load", "an engine"])
def test_rank_0_keeps_the_store_for_ranks_that_are_slower(checkpoint, tmp_path, way):
    (tmp_path / "script.py").write_text(LATE)
    endings = as_ranks(4, tmp_path / "script.py", checkpoint(LLAMA), way, DEEPSPEED_TIMEOUT="1")
    assert [(status, output.splitlines()[-1]) for status, output in endings] == [(0, "loaded")] * 4, endings


LOST = """
import os, sys, cuboid
rank = int(os.environ["RANK"])
if rank == 0:
    from cuboid.weights import read_once
    def end(meeting, files):
        meeting._await(f"{meeting._place}/sees/1", 1)
        meeting._await(f"{meeting._place}/sees/2", 2)
        os._exit(7)
    read_once._LoadMeeting.find_readers = end
cuboid.from_pretrained(sys.argv[1], {"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}})
"""


@pytest.mark.slow
def test_a_rank_0_that_ends_is_named(checkpoint, tmp_path):
    (tmp_path / "script.py").write_text(LOST)
    (status, _), *others = as_ranks(3, tmp_path / "script.py", checkpoint(LLAMA), DEEPSPEED_TIMEOUT="1")
    assert status == 7
    assert all(status == 1 and "see the messages of rank 0" in output for status, output in others), others
