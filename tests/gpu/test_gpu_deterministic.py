"""`"deterministic": true`: the same bits in two processes, torch's error for kernels that have no order, the cost."""

import hashlib
import statistics
import subprocess
import sys
import time

import pytest
import torch
import transformers
from torch.nn import functional

import cuboid
from cuboid.distributed.determinism import use_deterministic
from cuboid.seq1f1b.attention.kernels import choose_kernel
from cuboid.verify import WorkerError, WorkerPool
from gpu.test_gpu_frameworks import CONFIG, batches_of, dropping_model
from gpu.test_gpu_stage import LARGE, SIZES, batch_of, model_of

STEPS, RANKS = 3, 4
NO_MESH = {"mode": "3d_tensor", "mesh": {}}
#: What the processes of a pool need, since their group, and with it CUDA, is there before a config is read.
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}


@pytest.fixture(scope="module")
def variables():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture(scope="module")
def twice(variables):
    """Runs a function in two processes, neither of which knows of the other."""
    with WorkerPool(1) as one, WorkerPool(1) as other:
        yield lambda *job: [workers.run(1, *job, timeout_s=60)[0] for workers in (one, other)]


@pytest.fixture(scope="module")
def ranks_twice(variables):
    """The same with several ranks."""
    with WorkerPool(RANKS) as one, WorkerPool(RANKS) as other:
        yield lambda ranks, *job: [workers.run(ranks, *job, timeout_s=40) for workers in (one, other)]


def bits(tensors):
    """A checksum of tensors by name."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stage_of(segments, **options):
    return {"engine": "seq1f1b", "stages": 1, "segments": segments, "certification": "verified", **options}


def made(name, device, dtype):
    if name == "gpt2":
        return dropping_model(device)
    if name == "llama":
        return model_of(SIZES, device, dtype)
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).train()


#: The model, its dtype, and sections of the config.
KINDS = {
    "segments": ("llama", torch.bfloat16, {"pipeline": stage_of(4)}),
    "segments in float32": ("llama", torch.float32, {"pipeline": stage_of(4)}),
    "split backwards": ("llama", torch.bfloat16, {"pipeline": stage_of(4, schedule="zero_bubble")}),
    "dropout": ("gpt2", torch.float32, {"pipeline": stage_of(4)}),
    "a mesh": ("llama", torch.bfloat16, {"tensor_parallel": NO_MESH}),
    "experts on a mesh": ("mixtral", torch.bfloat16, {"tensor_parallel": NO_MESH}),
    "experts in a stage": ("mixtral", torch.bfloat16, {"pipeline": stage_of(1)}),
}


def engine_runs(device):
    """What each kind of engine gives, or its error; in one job, since DeepSpeed keeps its first groups."""
    by_kind = {}
    for kind in KINDS:
        try:
            by_kind[kind] = engine_run(device, kind)
        except RuntimeError as error:
            by_kind[kind] = str(error)
    return by_kind


def engine_run(device, kind):
    """Losses of a DeepSpeed engine, and the bits of its weights."""
    import deepspeed

    name, dtype, sections = KINDS[kind]
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {**CONFIG, **sections, "optimizer": adam, "zero_optimization": {"stage": 1}, "deterministic": True}
    config["bf16"] = {"enabled": dtype == torch.bfloat16}
    model = cuboid.shard(made(name, torch.device(device), dtype), config)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert torch.are_deterministic_algorithms_enabled()
    losses = []
    for step in range(STEPS):
        batches = batches_of(step, device)
        if hasattr(engine, "train_batch"):
            losses.append(float(engine.train_batch(batches)))
            continue
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses, bits(cuboid.full_state_dict(engine))


@pytest.fixture(scope="module")
def engines(twice, device):
    return twice(engine_runs, str(device))


@pytest.mark.limit(150)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gives_the_same_bits_twice(engines, kind):
    first, again = (by_kind[kind] for by_kind in engines)
    assert not isinstance(first, str), first
    assert again == first


def gradients(device, axes, stages, schedule):
    """The loss of two micro-batches, and the bits of the gradients."""
    mesh = dict(zip(("batch", "sequence", "hidden"), axes, strict=True))
    config = {"tensor_parallel": {"mode": "3d_tensor", "mesh": mesh}, "deterministic": True}
    if stages > 1:
        config["pipeline"] = {**stage_of(2, schedule=schedule), "stages": stages}
    torch.manual_seed(3)
    model = cuboid.shard(model_of(SIZES, torch.device(device), torch.bfloat16), config)
    parts = [batch_of(kind, torch.device(device), 4, 128) for kind in ("plain", "packed")]
    if stages > 1:
        loss = cuboid.Pipeline(model).train(iter(parts), 2)
    else:
        loss = sum(model(**part).loss / 2 for part in parts)
        loss.backward()
    return float(loss.detach()), bits(cuboid.full_gradients(model) or {})


@pytest.mark.parametrize(
    ("axes", "stages", "schedule"),
    [((1, 2, 2), 1, ""), ((4, 1, 1), 1, ""), ((1, 1, 1), 2, "zero_bubble"), ((1, 2, 1), 2, "seq1f1b")],
    ids=str,
)
def test_ranks_give_the_same_bits_twice(ranks_twice, device, axes, stages, schedule):
    ranks = stages * axes[0] * axes[1] * axes[2]
    first, again = ranks_twice(ranks, gradients, str(device), axes, stages, schedule)
    assert again == first


def _put(tensor):
    tensor.new_zeros(4).put_(tensor.new_tensor([1, 1], dtype=torch.int64), tensor.new_tensor([1.0, 2.0]))


def _pooled(tensor):
    functional.adaptive_avg_pool2d(tensor, 3).sum().backward()


def _sampled(tensor):
    grid = torch.zeros(1, 2, 2, 2, device=tensor.device)
    functional.grid_sample(tensor, grid, align_corners=False).sum().backward()


#: Kernels of which torch has no deterministic form, by the names that its errors have for them.
KERNELS = {"put_": _put, "adaptive_avg_pool2d_backward": _pooled, "grid_sampler_2d_backward": _sampled}


def message_of(device, name):
    with cuboid.scope({"tensor_parallel": NO_MESH, "deterministic": True}):
        pass
    with pytest.raises(RuntimeError) as caught:
        KERNELS[name](torch.ones(1, 1, 4, 4, device=device, requires_grad=True))
    return str(caught.value)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "put_" else pytest.mark.gpus(1)) for name in KERNELS]
)
def test_a_kernel_without_a_fixed_order_is_named(twice, device, name):
    for message in twice(message_of, str(device), name):
        assert name in message
        assert "does not have a deterministic implementation" in message


def step_with_put(device):
    """A stage, one of whose modules has a hook with such a kernel."""
    config = {"pipeline": stage_of(4), "deterministic": True}
    model = cuboid.shard(model_of(SIZES, torch.device(device), torch.float32), config)
    hook = cuboid.local_hook(lambda _, arguments: _put(arguments[0]))
    model.get_submodule("lm_head").register_forward_pre_hook(hook)
    cuboid.Pipeline(model).train(iter([batch_of("plain", torch.device(device))]), 1)


def test_a_step_ends_with_the_name_of_such_a_kernel(variables, fresh, device):
    with pytest.raises(WorkerError, match="put_ does not have a deterministic implementation"):
        fresh.run(1, step_with_put, str(device), timeout_s=80)


SCRIPT = """
import os, cuboid
with cuboid.scope({"tensor_parallel": {"mode": "3d_tensor", "mesh": {}}, "deterministic": True}):
    print(os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"])
"""


@pytest.mark.gpus(1)
def test_a_script_gets_the_variables_before_cuda_reads_them(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == list(VARIABLES.values())


@pytest.mark.gpus(1)
def test_variables_that_come_too_late_are_named(monkeypatch, fresh, device):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorkerError, match=r"start the job with (CUBLAS_WORKSPACE_CONFIG=:4096:8|NCCL_ALGO=\^NVLS)"):
        fresh.run(1, message_of, str(device), "put_", timeout_s=80)


def kernel_of(device):
    """Of a long segment: without the key, and with it."""
    query, key = (torch.empty(1, heads, 4096, 128, device=device, dtype=torch.bfloat16) for heads in (32, 8))
    before = type(choose_kernel(query, key, key, past=12_288, length=16_384)).__name__
    use_deterministic()
    return before, type(choose_kernel(query, key, key, past=12_288, length=16_384)).__name__


@pytest.mark.gpus(1)
def test_segments_leave_the_kernel_that_adds_in_any_order(variables, fresh, device, figure):
    ((before, after),) = fresh.run(1, kernel_of, str(device), timeout_s=80)
    figure("Deterministic mode: attention of a long segment", "kernel", "without", before)
    figure("Deterministic mode: attention of a long segment", "kernel", "with", after)
    assert after == "CudaFlash"


def times(device, kind):
    """Median seconds of a step, without the key and with it."""
    place = torch.device(device)
    is_large = place.type == "cuda"
    sizes, dtype, length = (LARGE, torch.bfloat16, 8192) if is_large else (SIZES, torch.float32, 128)
    model = model_of(sizes, place, dtype)
    model = cuboid.shard(model, {"pipeline": stage_of(4)} if kind == "4 segments" else {"tensor_parallel": NO_MESH})
    pipeline = cuboid.Pipeline(model) if kind == "4 segments" else None
    ids = torch.arange(length, device=place).view(1, -1) % 512
    batch = {"input_ids": ids, "labels": ids}

    def step():
        start = time.perf_counter()
        if pipeline is None:
            model(**batch).loss.backward()
        else:
            pipeline.train(iter([batch]), 1)
        if is_large:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def median():
        step()
        return statistics.median(step() for _ in range(7))

    without = median()
    use_deterministic()
    return without, median()


@pytest.mark.parametrize("kind", ["4 segments", "a mesh of one"])
def test_time_of_a_step(variables, fresh, device, kind, figure):
    ((without, with_key),) = fresh.run(1, times, str(device), kind, timeout_s=80)
    table = "Deterministic mode: two layers of an 8B Llama, bf16, 8k tokens"
    figure(table, kind, "ms without", f"{without * 1e3:.1f}")
    figure(table, kind, "ms with", f"{with_key * 1e3:.1f}")
    figure(table, kind, "longer by", f"{(with_key / without - 1) * 100:.1f} %")
    assert min(without, with_key) > 0
