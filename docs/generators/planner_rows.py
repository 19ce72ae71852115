"""The measured tables of docs/data as what the planner is told: model, layout, cluster, and whose software it was.

Every row of a table is mapped by the same rules, so that rows that are added are too.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from transformers import AutoConfig

from cuboid.distributed.topology import MeshShape
from cuboid.planner.cost.layout import Layout, Software
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import GPUS, Cluster
from cuboid.planner.description.meta_model import meta_model
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.description.modules import describe_modules
from cuboid.planner.description.planned_lora import PlannedLora
from cuboid.planner.description.trunk import Trunk
from generators.marked import DOCS

DATA = DOCS / "data"
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        table: name of the file, or of a part of it.
        name: of the row, in a table.
        model, layout, cluster, length, software: what ran.
        measured_s: of a step; None where only memory was measured.
        measured_bytes: of the fullest GPU; None where only time was measured.
        out_of_memory: whether it didn't fit.
    """

    table: str
    name: str
    model: ModelDescription
    layout: Layout
    cluster: Cluster
    length: int
    software: Software
    measured_s: float | None = None
    measured_bytes: float | None = None
    out_of_memory: bool = False

    def cost(self, constants: dict[str, float] | None = None) -> StepCost:
        """What the planner makes of it; with ``constants`` in place of the GPU's, or of ``software.…``."""
        overrides = constants or {}
        gpu = replace(self.cluster.gpu, **{name: value for name, value in overrides.items() if "." not in name})
        of_software = {name.partition(".")[2]: value for name, value in overrides.items() if "." in name}
        software = replace(self.software, **of_software)
        return StepCost(self.model, self.layout, replace(self.cluster, gpu=gpu), self.length, software)


def read(name: str) -> Iterator[dict[str, str]]:
    """Rows of a table by their columns. Lines that begin with # say where it comes from."""
    lines = [line for line in (DATA / name).read_text(encoding="utf-8-sig").splitlines() if not line.startswith("#")]
    return csv.DictReader(line.lstrip("\ufeff") for line in lines)


# --- models -----------------------------------------------------------------------------------------------------


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "Llama-65B": _llama(8192, 22016, 80, 64, 64, 32000),
    "Llama2-70B": _llama(8192, 28672, 80, 64, 8, 32000),
    "Llama-175B": _llama(12288, 32768, 96, 96, 96, 32000),
    "deepseekv2": {
        "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 60, "num_attention_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 160,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 102400,
    },
    "deepseekv3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "vocab_size": 129280,
    },
}  # fmt: skip
for _short, _long in (("llama3-8b", "llama3.1-8b"), ("llama3-70b", "llama3.1-70b"), ("llama3-405b", "llama3.1-405b")):
    CONFIGS[_short] = CONFIGS[_long]


def described(config: dict[str, Any]) -> ModelDescription:
    """The model of what a config.json would say, without certificates."""
    return describe_modules(meta_model(AutoConfig.for_model(**config)))


@cache
def model(name: str, layers: int | None = None) -> ModelDescription:
    """A model by the tables' name for it, cut to so many layers."""
    full = described(CONFIGS[name])
    return full.with_layers(layers) if layers is not None else full


@cache
def gpt(hidden: int, layers: int, heads: int, length: int, vocabulary: int = 51200) -> ModelDescription:
    """Megatron's GPT."""
    one = _gpt_layer(hidden, heads, length, vocabulary)
    return replace(one, layers=one.layers * layers, sizes=replace(one.sizes, layers=one.sizes.layers * layers))


@cache
def _gpt_layer(hidden: int, heads: int, length: int, vocabulary: int) -> ModelDescription:
    """That of one layer. The tables have many depths of each width."""
    return described(
        {
            "model_type": "gpt2", "n_embd": hidden, "n_layer": 1, "n_head": heads,
            "n_positions": max(length, 1), "vocab_size": vocabulary, "activation_function": "gelu",
        }
    )  # fmt: skip


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Megatron's cut: as many layers on each stage, whatever the head costs; the first ones have the rest."""
    per_stage, rest = divmod(layers, stages)
    return tuple(per_stage + (stage < rest) for stage in range(stages))


# --- tables -----------------------------------------------------------------------------------------------------

MEGATRON_CORE = Software(
    loss="fused", gradient_bytes=4, reduce_bytes=4, regathers=0.5, overlaps_messages=False, fused_weight_gradients=True,
    buffers_weight_gradients=True, fused_nonlinearity=True, shares_keys=False, own_bytes=GIB // 4,
)  # fmt: skip
MEGATRON_2021 = Software(
    attention="scores", loss="whole", gradient_bytes=2, reduce_bytes=2, sequence_parallel=False,
    overlaps_messages=False, dropout=True, host_s=1e-3, host_collective_s=8e-5, fused_nonlinearity=True,
    shares_keys=False, own_bytes=GIB // 4,
)  # fmt: skip
MEGATRON_2022 = replace(MEGATRON_2021, sequence_parallel=True, regathers=0.5)
#: Its head takes a third of the rate of all else where tensor parallelism doesn't cut it: seen in the slope of
#: times over rows at equal layers, of both sizes.
VTRAIN = replace(MEGATRON_2021, unsplit_head=0.35)
KWAI = replace(
    MEGATRON_CORE, overlaps_reduction=True, overlaps_messages=True, hides_exchange=0.5, buffers_weight_gradients=False
)  # fmt: skip
NEMO = replace(MEGATRON_CORE, overlaps_reduction=True, overlaps_messages=True)
SEQ1F1B = replace(
    MEGATRON_CORE, loss="whole", gradient_bytes=2, dropout=True, buffers_weight_gradients=False, keeps_prefixes=True
)
TORCHTITAN = Software(
    loss="whole", gradient_bytes=4, reduce_bytes=4, balances_context=False, shards_over_context=True,
    fused_nonlinearity=True, keeps_whole_gradients=True,
)  # fmt: skip
#: Plain transformers, which launches kernels one by one and writes all logits.
TRANSFORMERS = Software(loss="whole", gradient_bytes=4, is_eager=True, own_bytes=GIB // 4)


def _cluster(gpu: str, gpus: int, per_node: int = 8) -> Cluster:
    per_node = min(gpus, per_node)
    return Cluster(GPUS[gpu], -(-gpus // per_node), per_node)


def simumax() -> Iterator[Row]:
    """B200, Megatron-LM core, micro-batches of one row; models cut to few layers."""
    for row in read("simumax_b200.csv"):
        tp, cp, ep, pp, dp = (int(row[name]) for name in ("tp", "cp", "ep", "pp", "dp"))
        layout = Layout(
            MeshShape(1, tp, 1), pp, 1, int(row["micro_batches"]), dp, chunks=int(row["vp"]), context=cp,
            expert_ranks=ep,
        )  # fmt: skip
        layout = replace(layout, stage_layers=_even(int(row["layers"]), pp))
        measured = float(row["real_ms"]) / 1e3, float(row["real_alloc_gib"]) * GIB
        described = model(row["model"], int(row["layers"]))
        yield Row("simumax", row["case"], described, layout, _cluster("B200-180GB", layout.ranks), int(row["seq"]),
                  MEGATRON_CORE, *measured)  # fmt: skip


def kwai() -> Iterator[Row]:
    """H800, Megatron with context parallelism, interleaved chunks, balanced recomputation and offloading."""
    for row in read("kwai_atc24_throughput.csv"):
        tp, cp, pp, gpus, batch = (int(row[name]) for name in ("tp", "cp", "pp", "gpus", "global_batch"))
        replicas = gpus // (tp * cp * pp)
        length = int(row["seq"])
        layout = Layout(
            MeshShape(1, tp, 1), pp, 1, batch // replicas, replicas, chunks=int(row["chunks"]), context=cp,
            checkpointing="mlp_up" if row["ckpt"] == "ours" else "none", offload=float(row["offload_alpha"]),
        )  # fmt: skip
        layout = replace(layout, stage_layers=_even(len(model(row["model"]).layers), pp))
        name = f"{row['model']} {gpus} GPUs, tp {tp} cp {cp} pp {pp} × {row['chunks']}"
        name += f", {row['ckpt']}, {row['offload_alpha']}"
        step_s = batch * length / float(row["tokens_per_second"])
        yield Row("kwai", name, model(row["model"]), layout, _cluster("H800-80GB", gpus), length, KWAI, step_s)


def kwai_memory() -> Iterator[Row]:
    """The same for one layout, by the share of activations that is offloaded."""
    for row in read("kwai_atc24_memory.csv"):
        for checkpointing, column in (("none", "ckpt_no_bytes"), ("mlp_up", "ckpt_ours_bytes")):
            layout = Layout(
                MeshShape(1, 2, 1), 8, 1, 256 // 8, 8, chunks=2, context=2, checkpointing=checkpointing,
                offload=float(row["offload_alpha"]), stage_layers=_even(80, 8),
            )  # fmt: skip
            out = row[column] == "OOM"
            name = f"Llama-65B, {checkpointing}, {row['offload_alpha']} offloaded"
            yield Row("kwai_memory", name, model("Llama-65B"), layout, _cluster("H800-80GB", 256), 8192, KWAI,
                      measured_bytes=None if out else float(row[column]), out_of_memory=out)  # fmt: skip


def vtrain(file: str, table: str) -> Iterator[Row]:
    """A100, Megatron with activation recomputation."""
    for row in read(file):
        by = {key.strip("# ").strip(): value for key, value in row.items()}
        tp, dp, pp = (int(by[f"{name} parallelism"]) for name in ("tensor", "data", "pipeline"))
        hidden, heads, layers, length, rows, batch = (
            int(by[name])
            for name in ("hidden size", "attention heads", "layers" if "layers" in by else "# layers",
                         "sequence length", "micro batch", "global batch")
        )  # fmt: skip
        layout = Layout(MeshShape(1, tp, 1), pp, rows, batch // (rows * dp), dp, zero_stage=0,
                        checkpointing="layers" if table == "vtrain_multi" else "none")  # fmt: skip
        layout = replace(layout, stage_layers=_even(layers, pp))
        name = f"h{hidden} l{layers} s{length}: {tp}×{dp}×{pp}, {rows} of {batch} rows"
        yield Row(table, name, gpt(hidden, layers, heads, length), layout, _cluster("A100-80GB", layout.ranks), length,
                  VTRAIN, float(by["iteration time (ms)"]) / 1e3)  # fmt: skip


_KORTHIKANTI = {
    "megatron-22B": (6144, 48, 64), "gpt3-175B": (12288, 96, 96), "turing-530B": (20480, 105, 128),
    "megatron-1T": (25600, 128, 160),
}  # fmt: skip


def korthikanti() -> Iterator[Row]:
    """A100, Megatron with and without sequence parallelism, recomputing all or only attention."""
    for row in read("korthikanti_2205_05198.csv"):
        hidden, layers, heads = _KORTHIKANTI[row["model"]]
        tp, pp, dp, batch, rows = (int(row[name]) for name in ("tp", "pp", "dp", "batch", "micro_batch"))
        full = row["recompute"] == "full"
        layout = Layout(
            MeshShape(1, tp, 1), pp, rows, batch // (rows * dp), dp, chunks=int(row["interleave"]), zero_stage=0,
            checkpointing="layers" if full else "scores",
        )  # fmt: skip
        layout = replace(layout, stage_layers=_even(layers, pp))
        software = MEGATRON_2022 if row["seq_parallel"] == "rs_ag" else MEGATRON_2021
        yield Row("korthikanti", f"{row['model']}, {row['recompute']}", gpt(hidden, layers, heads, 2048), layout,
                  _cluster("A100-80GB", layout.ranks), 2048, software, float(row["iteration_s"]))  # fmt: skip


def seq1f1b() -> Iterator[Row]:
    """A100; GPT of 32 layers; four segments cut by cost where the schedule has any."""
    sizes = {"2.7B": (2560, 8, 1), "7B": (4096, 4, 8)}
    for row in read("seq1f1b_throughput.csv"):
        length, count = int(row["seq"]), int(row["micro_batches"])
        out = row["tflops_per_gpu"] == "OOM"
        layout = _seq1f1b_layout(row["schedule"], *sizes["7B"][1:], count)
        measured_s = None if out else count * length / float(row["tokens_per_s"])
        name = f"7B {row['schedule']}, {length} tokens, {count} micro-batches"
        yield Row("seq1f1b", name, gpt(4096, 32, 32, 0), layout,
                  _cluster("A100-80GB", 32), length, SEQ1F1B, measured_s, out_of_memory=out)  # fmt: skip
    for row in read("seq1f1b_memory.csv"):
        hidden, stages, split = sizes[row["model"]]
        length = int(row["seq"])
        for schedule in ("1f1b", "1f1b_interleaved", "seq1f1b", "seq1f1b_interleaved"):
            layout = _seq1f1b_layout(schedule, stages, split, 16)
            out = row[schedule] == "OOM"
            yield Row("seq1f1b_memory", f"{row['model']} {schedule}, {length} tokens", gpt(hidden, 32, 32, 0), layout,
                      _cluster("A100-80GB", stages * split), length, SEQ1F1B,
                      measured_bytes=None if out else float(row[schedule]) * GIB, out_of_memory=out)  # fmt: skip


def _seq1f1b_layout(schedule: str, stages: int, split: int, micro_batches: int) -> Layout:
    return Layout(
        MeshShape(1, split, 1), stages, 1, micro_batches, segments=4 if schedule.startswith("seq") else 1,
        chunks=2 if schedule.endswith("interleaved") else 1, zero_stage=0, stage_layers=_even(32, stages),
    )  # fmt: skip


def torchtitan() -> Iterator[Row]:
    """H100 with 96 GB of slower memory; FSDP is the mesh's `batch` axis."""
    for row in read("torchtitan.csv"):
        fsdp, tp, pp, cp, rows = (int(row[name]) for name in ("fsdp", "tp", "pp", "cp", "local_batch"))
        described, length = model(row["model"]), int(row["seq"])
        # A pipeline cuts its local batch into as many micro-batches as it has stages.
        micro = fsdp * rows // pp
        layout = Layout(
            MeshShape(fsdp, tp, 1), pp, micro, pp, chunks=2 if row["schedule"].startswith("Inter") else 1, context=cp,
            checkpointing="layers" if row["ac"] == "full" else "mlp_up", weight_gather="step" if pp > 1 else "layer",
        )  # fmt: skip
        software = replace(
            TORCHTITAN, products_speed=1.5 if row["dtype"] == "fp8" else 1.0,
            hides_exchange=0.7 if row["async_tp"] == "1" else 0.0,
        )  # fmt: skip
        step_s = rows * length * fsdp / (float(row["tps_per_gpu"]) * int(row["gpus"]))
        name = f"{row['model']} {row['gpus']} GPUs, fsdp {fsdp} tp {tp} pp {pp} cp {cp}, {length} tokens"
        name += f", {row['dtype']}{', async' if row['async_tp'] == '1' else ''}"
        name += f", {row['schedule']}" if row["schedule"] else ""
        memory = float(row["memory_gib"]) * GIB if row["memory_gib"] else None
        yield Row("torchtitan", name, described, layout, _cluster("H100-96GB", int(row["gpus"])), length, software,
                  step_s, memory)  # fmt: skip


#: Width, inner width, layers, heads and vocabulary of Qwen's first models, whose layers are those of Qwen2.
_QWEN = {
    "1.8b": (2048, 5504, 24, 16, 151936), "7b": (4096, 11008, 32, 32, 151936), "14b": (5120, 13696, 40, 40, 152064),
}  # fmt: skip


@cache
def _qwen_with_lora(name: str) -> ModelDescription:
    hidden, inner, layers, heads, vocabulary = _QWEN[name]
    config = {**_llama(hidden, inner, layers, heads, heads, vocabulary), "model_type": "qwen2"}
    return describe_modules(meta_model(AutoConfig.for_model(**config)), trunk=Trunk(PlannedLora(64)))


def qwen_lora() -> Iterator[Row]:
    """One A100, LoRA on all linear layers by transformers, PEFT and its Trainer, with checkpointing."""
    for row in read("qwen_lora.csv"):
        layout = Layout(MeshShape(), micro_batch=1, micro_batches=8, zero_stage=0, checkpointing="layers")
        yield Row("qwen_lora", f"Qwen {row['model']}, {row['seq']} tokens", _qwen_with_lora(row["model"]), layout,
                  _cluster("A100-80GB", 1), int(row["seq"]), TRANSFORMERS, float(row["step_s"]),
                  float(row["memory_gb"]) * GIB)  # fmt: skip


def mlperf() -> Iterator[Row]:
    """H100, H200, B200 and GB200, Megatron in NeMo in 8 bits; of what is known which config ran."""
    for row in read("mlperf_step_times.csv"):
        if not row["median_step_s"] or row["configs_that_fit"] != "1" or row["bench"] == "llama31_8b":
            continue
        gpu = "GB200-186GB" if "GB200" in row["config"] else "H200-141GB" if "H200" in row["config"] else "H100-80GB"
        tp, pp, vp, cp, rows = (int(row[name] or 1) for name in ("tp", "pp", "vp", "cp", "mbs"))
        count = int(row["minibs_per_dp"]) // rows
        gpt3 = row["bench"] == "gpt3"
        described = gpt(12288, 96, 96, 2048) if gpt3 else model("llama3.1-405b")
        layout = Layout(
            MeshShape(1, tp, 1), pp, rows, count, int(row["gbs"]) // (count * rows), chunks=vp, context=cp,
            stage_layers=_even(96, pp) if gpt3 else (15, *(16,) * 6, 15),
        )  # fmt: skip
        fp4 = "fp4" in row["config"]
        yield Row(
            f"mlperf {row['bench']} {gpu}{' fp4' if fp4 else ''} tp{tp} pp{pp} cp{cp}",
            f"{row['round']} {row['system']}", described, layout,
            Cluster(GPUS[gpu], int(row["nodes"]), int(row["gpus_per_node"])), int(row["seq"]),
            replace(NEMO, products_speed=2.5 if fp4 else 1.6), float(row["median_step_s"]),
        )  # fmt: skip


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "simumax": simumax,
    "kwai": kwai,
    "vtrain_multi": lambda: vtrain("vtrain_multi.csv", "vtrain_multi"),
    "vtrain_single": lambda: vtrain("vtrain_single.csv", "vtrain_single"),
    "korthikanti": korthikanti,
    "kwai_memory": kwai_memory,
    "seq1f1b": seq1f1b,
    "torchtitan": torchtitan,
    "qwen_lora": qwen_lora,
    "mlperf": mlperf,
}
