"""Steps on a CUDA device that isn't there; prints as JSON what the host would wait for in each of them."""

import json
import traceback
from contextlib import nullcontext
from unittest import mock

import device
import torch
import torch.distributed as dist
import transformers
from torch.distributed._tools import fake_collectives  # noqa: F401  # collectives of tensors without values
from torch.testing._internal.distributed.fake_pg import FakeStore

import cuboid
from cuboid.checkpoint.exchange import Exchange
from cuboid.checkpoint.format.tensor_file import TensorSpec
from cuboid.checkpoint.metadata import ShardedTensor, ShardRange
from cuboid.checkpoint.save_plan import SavePlan, WriteItem
from cuboid.checkpoint.save_planner import gather_ranges, plan_items
from cuboid.checkpoint.snapshot import snapshot as take_snapshot
from cuboid.distributed.mesh import Mesh
from cuboid.failures import rank_agreement
from cuboid.models.pipeline import training_pipeline as pipelines
from cuboid.optim.data_parallel_optimizer import replica_optimizer
from cuboid.optim.grad_norm import scale_to, total_norm
from cuboid.seq1f1b.attention import kernels

ROWS, LENGTH = 4, 24
SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def world(ranks, rank):
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def model_of(config, architecture="llama", auto=transformers.AutoModelForCausalLM, **options):
    """A small model, sharded on the CPU, where it has values."""
    made = transformers.AutoConfig.for_model(architecture, **{**SIZES, **options})
    model = cuboid.shard(auto.from_config(made, dtype=torch.bfloat16), config).train()
    cuboid.mesh_of(model).connect()
    return model


def put_on_device(model):
    """Put a model on the device, without its values. Tied parameters stay tied."""
    moved_of = {}
    for parameter in model.parameters():
        moved = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
        moved_of[parameter] = torch.nn.Parameter(moved, parameter.requires_grad)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, moved_of[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            persistent = name not in module._non_persistent_buffers_set
            moved = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
            module.register_buffer(name, moved, persistent=persistent)


def mesh_of(*axes):
    return {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), axes, strict=True))}


def ids():
    return torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="cuda")


def classes():
    return torch.zeros(ROWS, dtype=torch.int64, device="cuda")


def layers(waits, *axes, extras=(), answer=True, labels=ids, keys=None, sections=None, **options):
    """The second step of a sharded model, so that what is done once for all steps isn't counted."""
    world(axes[0] * axes[1] * axes[2], axes[0] * axes[1] * axes[2] - 1)
    model = model_of({"tensor_parallel": {**mesh_of(*axes), **(keys or {})}, **(sections or {})}, **options)
    with device.watch(waits, answer=answer):
        put_on_device(model)
        for _ in range(2):
            waits.clear()
            extra = {name: torch.ones_like(ids()) for name in extras}
            model(input_ids=ids(), labels=labels(), **extra).loss.backward()


def pipeline(waits, stage, *axes, extras=(), answer=True, keys=None, schedule=None, sections=None, **options):
    """The second step of one stage of two, with two micro-batches of three segments."""
    size = axes[0] * axes[1] * axes[2]
    world(2 * size, 2 * size - 1 if stage else 0)
    config = {"engine": "seq1f1b", "stages": 2, "segments": 3, "partition": "even", "certification": "verified"}
    engine = {"tensor_parallel": {**mesh_of(*axes), **(keys or {})}, "pipeline": {**config, **(schedule or {})}}
    model = model_of({**engine, **(sections or {})}, **options)
    share = pipelines.share_micro_batches
    if stage:
        # Nothing comes from the rank that reads the data.
        share = mock.Mock(side_effect=lambda batches, *others: (list(batches), others[-1]))
    with device.watch(waits, answer=answer), mock.patch.object(pipelines, "share_micro_batches", share):
        put_on_device(model)
        runs = pipelines.Pipeline(model)
        for _ in range(2):
            waits.clear()
            batches = [{name: torch.ones_like(ids()) for name in ("input_ids", "labels", *extras)} for _ in range(2)]
            runs.train(iter(batches), 2)


def optimizer(waits, *, split):
    """The second optimizer step of one of two replicas, with clipping."""
    world(4, 3)
    model = model_of({"tensor_parallel": mesh_of(1, 2, 1)})
    mesh = cuboid.mesh_of(model)
    with device.watch(waits):
        put_on_device(model)
        replica = replica_optimizer(torch.optim.AdamW(model.parameters()), mesh, torch.bfloat16, split=split)
        counted = set(map(id, model.parameters()))
        for _ in range(2):
            waits.clear()
            for parameter in model.parameters():
                parameter.main_grad.zero_()
            replica.reduce()
            gradients = replica.gradients(counted)
            scale_to(gradients, total_norm(gradients, [mesh.data_parallel_group], 2.0, next(model.parameters())), 1.0)
            replica.step()
            replica.clear()


def flash(waits):
    """As on a GPU with kernels for bfloat16, which are given fewer heads of keys, and a segment with all before it."""
    calls = []
    forward = kernels.CudaFlash.forward

    def note(self, query, key, value, **options):
        if query.shape[1] == SIZES["num_attention_heads"]:
            calls.append((query.shape[2], *key.shape[1:3]))
        return forward(self, query, key, value, **options)

    with (
        mock.patch.object(torch.backends.cuda, "can_use_flash_attention", return_value=True),
        mock.patch.object(kernels.CudaFlash, "forward", note),
    ):
        pipeline(waits, 1, 1, 1, 1)
    # Two steps of two micro-batches of three segments, in one layer.
    segments = [(LENGTH // 3, 2, keys) for keys in range(LENGTH // 3, LENGTH + 1, LENGTH // 3)]
    assert sorted(calls) == sorted(segments * 4), calls


def grouped_experts(waits):
    """As on a GPU with a kernel for the products of all experts; without it, the host reads how many rows each has."""
    products = []
    multiply = torch.nn.functional.grouped_mm

    def note(*args, **kwargs):
        products.append(args)
        return multiply(*args, **kwargs)

    with mock.patch.object(torch.nn.functional, "grouped_mm", note):
        layers(waits, 2, 2, 2, **EXPERTS)
    # Two steps of two layers: up and down, and for each of them the gradients of input and weight.
    assert len(products) == 2 * 2 * 6, len(products)


def fused_norms(waits):
    """Where a mesh leaves rows whole, torch's kernel normalises them."""
    norms = []
    normalise = torch.nn.functional.rms_norm

    def note(*args):
        norms.append(args)
        return normalise(*args)

    with mock.patch.object(torch.nn.functional, "rms_norm", note):
        layers(waits, 2, 2, 1)
    # Two steps of two layers with two norms each, and one behind them.
    assert len(norms) == 2 * 5, len(norms)


def snapshot(waits):
    """What stops training for a checkpoint that is written in the background: one wait for all copies."""
    with device.watch(waits):
        values = [torch.empty(64, 64, device="cuda") for _ in range(8)]
        tensors = [
            ShardedTensor(f"t{n}", TensorSpec(torch.float32, tuple(x.shape)), None, ShardRange.of_shard(x))
            for n, x in enumerate(values)
        ]
        items = tuple(WriteItem.plain("", tensor) for tensor in tensors)
        take_snapshot(SavePlan(0, items, None, {}, {}, lambda _: None))


def save(waits):
    """A checkpoint that training waits for: one wait for all copies of a round, and none for each tensor."""
    with device.watch(waits):
        values = [torch.empty(64, 64, device="cuda") for _ in range(8)]
        tensors = tuple(
            ShardedTensor(f"t{n}", TensorSpec(torch.float32, tuple(x.shape)), None, ShardRange.of_shard(x))
            for n, x in enumerate(values)
        )
        item = WriteItem("", tensors, {x.name: x.spec for x in tensors}, dict)
        mesh = Mesh(cuboid.MeshShape(), rank=0, world_size=1)
        rounds = Exchange(mesh, gather_ranges([item], mesh)).rounds(plan_items([item], mesh))
        assert [len(full_tensors) for _, _, full_tensors in rounds] == [8]


MASK, POSITIONS = ("attention_mask",), ("position_ids",)
EXPERTS = {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
BERT = {"architecture": "bert", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1}
SEQUENCES = transformers.AutoModelForSequenceClassification
#: What is gathered and reduced once a step, and not in every unit.
ONCE = {"weight_gather": "step", "gradient_sync": "step"}
V = {"chunks": 2, "schedule": "zero_bubble-v"}
HOST = {"activation_checkpointing": {"mode": "attention", "cpu_checkpointing": True}}


class Event(torch.cpu.Event):
    """An event for which the computing stream may wait, and the host may not."""

    def query(self):
        raise AssertionError("the host asks for an event")

    def synchronize(self):
        raise AssertionError("the host waits for an event")


STEPS = {
    "layers": lambda waits: layers(waits, 2, 2, 2),
    "layers with a head of keys for each rank": lambda waits: layers(waits, 2, 2, 2, num_key_value_heads=8),
    "layers with a mask": lambda waits: layers(waits, 2, 2, 2, extras=MASK),
    "layers with positions": lambda waits: layers(waits, 2, 2, 2, extras=POSITIONS),
    "packed layers": lambda waits: layers(waits, 2, 2, 2, extras=POSITIONS, answer=False),
    "layers with whole rows": fused_norms,
    "layers whose weights are kept": lambda waits: layers(waits, 2, 2, 2, keys={"weight_gather": "step"}),
    "experts": grouped_experts,
    "encoder": lambda waits: layers(
        waits, 2, 2, 2, extras=MASK, auto=transformers.AutoModelForMaskedLM, **BERT, num_key_value_heads=8
    ),
    "head for sequences": lambda waits: layers(
        waits, 2, 2, 2, auto=SEQUENCES, labels=classes, pad_token_id=1, num_labels=2
    ),
    "stage that reduces once a step": lambda waits: pipeline(waits, 1, 2, 2, 1, keys=ONCE),
    "two chunks": lambda waits: pipeline(waits, 1, 1, 2, 1, schedule=V, num_hidden_layers=4),
    "two chunks that reduce once a step": lambda waits: pipeline(
        waits, 0, 2, 1, 1, keys=ONCE, schedule=V, num_hidden_layers=4
    ),
    "stage of experts": lambda waits: pipeline(waits, 1, 1, 2, 2, **EXPERTS),
    "layers on the host": lambda waits: layers(waits, 2, 2, 2, sections=HOST),
    "stage on the host": lambda waits: pipeline(waits, 1, 1, 2, 2, sections=HOST),
    "two chunks on the host": lambda waits: pipeline(waits, 1, 1, 2, 1, schedule=V, num_hidden_layers=4, sections=HOST),
    "first stage": lambda waits: pipeline(waits, 0, 1, 2, 2),
    "last stage": lambda waits: pipeline(waits, 1, 1, 2, 2),
    "last stage without a mesh": lambda waits: pipeline(waits, 1, 1, 1, 1),
    "padded stage": lambda waits: pipeline(waits, 1, 1, 2, 2, extras=MASK, answer=False),
    "packed stage": lambda waits: pipeline(waits, 1, 1, 2, 2, extras=POSITIONS, answer=False),
    "padded eager stage": lambda waits: pipeline(
        waits, 1, 1, 2, 2, extras=MASK, answer=False, attn_implementation="eager"
    ),
    "stage with flash attention": flash,
    "snapshot": snapshot,
    "save": save,
    "optimizer": lambda waits: optimizer(waits, split=False),
    "optimizer with ZeRO-1": lambda waits: optimizer(waits, split=True),
}


def main(names):
    """Run steps by name, and print a line of JSON for each."""
    rank_agreement._peers = lambda mesh: None
    torch.cuda.get_device_capability = lambda _: (9, 0)
    # The state of a CUDA generator is in the host's memory: asking for it waits for nothing. Made before there are only
    # fake tensors.
    rng_state = torch.zeros(16, dtype=torch.uint8)
    torch.cuda.get_rng_state = lambda _: rng_state
    torch.cuda.set_rng_state = lambda *_: None
    torch.cuda.manual_seed = lambda _: None
    torch.cuda.device = lambda _: nullcontext()
    # Streams and events of this device do nothing, as a CPU's.
    torch.cuda.Stream, torch.cuda.stream = lambda _: torch.cpu.Stream(), torch.cpu.stream
    torch.cuda.Event, torch.cuda.current_stream = Event, torch.cpu.current_stream
    # transformers leaves out what it would look at in tensors without values.
    transformers.masking_utils.is_tracing = lambda *_: False
    for name in names or STEPS:
        waits, error = [], None
        try:
            STEPS[name](waits)
        except Exception as raised:
            error = "".join(traceback.format_exception(raised))
        print(json.dumps({"step": name, "waits": waits, "error": error}), flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
