"""One stage on one GPU: segments against the plain model, what the host waits for, and long sequences."""

import time
from unittest import mock

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import cuboid
from cuboid.models.stages.stage_runner import StageRunner

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2**18,
}
#: A model whose layers are those of an 8B Llama, and as many of them as leave room for long sequences.
LARGE = {
    **SIZES,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def model_of(sizes, device, dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes)
    with torch.device(device):
        # Rounded from float32, because some versions of torch draw other numbers for each type.
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).train()


def pipeline_of(model, segments, mode="none", on_host=False):
    config = {"engine": "seq1f1b", "stages": 1, "segments": segments, "certification": "verified"}
    checkpointing = {"mode": mode, "cpu_checkpointing": on_host}
    return cuboid.Pipeline(cuboid.shard(model, {"pipeline": config, "activation_checkpointing": checkpointing}))


def train_once(model, batch, pipeline=None):
    """Forward and backward of a batch, through a pipeline if there is one, with no gradients of an earlier one."""
    # As after an optimizer's step.
    model.zero_grad()
    if pipeline is None:
        model(**batch, use_cache=False).loss.backward()
    else:
        pipeline.train(iter([batch]), 1)


def batch_of(kind, device, rows=2, length=512):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (rows, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        seen = torch.arange(length) >= torch.tensor([[37], [0]])
        batch["attention_mask"] = seen.long()
        batch["labels"] = ids.masked_fill(~seen, -100)
    if kind == "packed":
        batch["position_ids"] = (torch.arange(length) % 200).expand(rows, -1)
    return {name: x.to(device) for name, x in batch.items()}


def compare(device, kind, segments, mode):
    """Losses and largest relative errors of gradients."""
    plain = model_of(SIZES, device, torch.float32)
    batch = batch_of(kind, device)
    loss = plain(**batch, use_cache=False).loss
    loss.backward()
    staged = model_of(SIZES, device, torch.float32)
    staged_loss = pipeline_of(staged, segments, mode).train(iter([batch]), 1)
    gradients = cuboid.full_gradients(staged)
    errors = {}
    for name, parameter in plain.named_parameters():
        difference = (gradients[name].cpu() - parameter.grad.cpu()).abs().max()
        errors[name] = (difference / parameter.grad.abs().max().cpu()).item()
    return float(loss.detach()), float(staged_loss), errors


@pytest.mark.parametrize("mode", ["none", "layers", "attention"])
@pytest.mark.parametrize("segments", [1, 4, 16])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_segments_are_the_plain_model(alone, device, kind, segments, mode):
    ((loss, staged_loss, errors),) = alone.run(1, compare, device, kind, segments, mode, timeout_s=80)
    assert staged_loss == pytest.approx(loss, rel=1e-5)
    assert max(errors.values()) < 1e-3, errors


class Kernels(TorchDispatchMode):
    """Counts forward calls of torch's fused attention."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name.startswith("_scaled_dot_product") and not name.endswith("backward")
        return func(*args, **(kwargs or {}))


def kernels_of_a_step(device, kind, segments, dropout):
    """Calls with each mode, and whether keeping attention changes a bit of loss, gradients and what is drawn next."""
    calls, results = [], []
    for mode in ("none", "layers", "attention"):
        model = model_of({**SIZES, "attention_dropout": dropout}, device, torch.bfloat16)
        pipeline, batch = pipeline_of(model, segments, mode), batch_of(kind, device)
        torch.manual_seed(2)
        with Kernels() as kernels:
            loss = pipeline.train(iter([batch]), 1)
        calls.append(kernels.count)
        results.append([loss.detach(), torch.rand((), device=device), *cuboid.full_gradients(model).values()])
    return calls, all(torch.equal(layers, kept) for layers, kept in zip(*results[1:], strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "padded"])
def test_kept_attention_runs_its_kernels_once(alone, device, kind, segments, dropout):
    (((none, layers, attention), same),) = alone.run(1, kernels_of_a_step, device, kind, segments, dropout)
    assert (attention, layers) == (none, 2 * none)
    # Backward kernels on GPUs add in no fixed order.
    assert same or device.type == "cuda"


def watched(kind, on_host):
    """The third step, any of whose units raises if the host waits for the device."""
    model = model_of(SIZES, "cuda", torch.bfloat16)
    pipeline = pipeline_of(model, 4, "attention" if on_host else "none", on_host)
    batch = batch_of(kind, "cuda")

    def guarded(original):
        def run(self, *args, **kwargs):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(self, *args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    for _ in range(2):
        pipeline.train(iter([batch] * 2), 2)
    with (
        mock.patch.object(StageRunner, "forward", guarded(StageRunner.forward)),
        mock.patch.object(StageRunner, "backward", guarded(StageRunner.backward)),
    ):
        pipeline.train(iter([batch] * 2), 2)
    return True


@pytest.mark.gpus(1)
@pytest.mark.parametrize(("kind", "on_host"), [("plain", False), ("padded", False), ("packed", False), ("plain", True)])
def test_no_unit_makes_the_host_wait(alone, kind, on_host):
    assert alone.run(1, watched, kind, on_host) == [True]


def measure(device, sizes, dtype, length, segments, mode="layers", on_host=False):
    """Seconds of a step (the second), and its peak bytes over those of the model and all gradients.

    The step begins without gradients, so that at its peak some of them may not be there yet.
    """
    model = model_of(sizes, device, dtype)
    if segments is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = {"input_ids": torch.zeros(1, length, dtype=torch.int64, device=device)}
    batch["labels"] = batch["input_ids"]
    pipeline = None if segments is None else pipeline_of(model, segments, mode, on_host)

    def step():
        train_once(model, batch, pipeline)
        if device.type == "cuda":
            torch.cuda.synchronize()

    step()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0)


@pytest.mark.parametrize("segments", [None, 1, 4, 16])
@pytest.mark.parametrize("length", [32_768, 131_072])
def test_time_and_memory_of_long_sequences(alone, device, length, segments, figure):
    sizes, dtype = (LARGE, torch.bfloat16) if device.type == "cuda" else (SIZES, torch.float32)
    length = length if device.type == "cuda" else length // 128
    row = f"{length // 1024}k tokens, " + ("plain transformers" if segments is None else f"{segments} segments")
    table = "One stage: two layers of an 8B Llama, bf16, with activation checkpointing"
    try:
        ((seconds, peak_bytes),) = alone.run(1, measure, device, sizes, dtype, length, segments, timeout_s=80)
    except cuboid.CuboidError as error:
        if segments is not None or "out of memory" not in str(error):
            raise
        figure(table, row, "tokens/s", "out of memory")
        return
    assert seconds > 0
    figure(table, row, "tokens/s", f"{length / seconds:,.0f}")
    figure(table, row, "peak of activations, GiB", f"{peak_bytes / 2**30:.1f}")


def paces(device, sizes, dtype, length):
    """Tokens per second with attention kept, between two measurements of plain transformers on the same card."""
    contestants = ((None, "layers"), (4, "attention"), (None, "layers"))
    return [length / measure(device, sizes, dtype, length, *contestant)[0] for contestant in contestants]


@pytest.mark.parametrize("length", [32_768, 131_072])
def test_kept_attention_beside_plain_transformers(alone, device, length, figure):
    sizes, dtype = (LARGE, torch.bfloat16) if device.type == "cuda" else (SIZES, torch.float32)
    length = length if device.type == "cuda" else length // 128
    ((first, kept, last),) = alone.run(1, paces, device, sizes, dtype, length, timeout_s=80)
    table = "Attention kept under activation checkpointing: four segments of two layers of an 8B Llama, bf16"
    row = f"{length // 1024}k tokens"
    figure(table, row, "÷ plain transformers with checkpointing", f"{2 * kept / (first + last):.3f}")
    figure(table, row, "plain, last ÷ first", f"{last / first:.3f}")
    assert kept > 0


def beside_host(device, sizes, dtype, length, segments):
    """Seconds and peak bytes with what layers keep on the host, between two measurements with it on the device."""
    return [measure(device, sizes, dtype, length, segments, "attention", on_host) for on_host in (False, True, False)]


@pytest.mark.parametrize(("length", "segments"), [(131_072, 1), (131_072, 16)])
def test_what_layers_keep_on_the_host(alone, device, length, segments, figure):
    sizes, dtype = (LARGE, torch.bfloat16) if device.type == "cuda" else (SIZES, torch.float32)
    sizes, length = {**sizes, "num_hidden_layers": 4}, length if device.type == "cuda" else length // 128
    ((first, moved, last),) = alone.run(1, beside_host, device, sizes, dtype, length, segments, timeout_s=85)
    table = "What layers keep on the host: four layers of an 8B Llama, bf16, attention kept"
    row = f"{length // 1024}k tokens, {segments} segment{'s' * (segments > 1)}"
    figure(table, row, "time ÷ on the device", f"{2 * moved[0] / (first[0] + last[0]):.3f}")
    figure(table, row, "on the device, last ÷ first", f"{last[0] / first[0]:.3f}")
    if device.type == "cuda":
        figure(table, row, "peak of activations ÷ on the device", f"{moved[1] / first[1]:.2f}")
        # Of one segment, what a layer recomputes is as large as what four of them keep.
        assert moved[1] <= (0.55 if segments > 1 else 0.9) * first[1]
