"""transformers' Trainer over DeepSpeed, four micro-batches a step, as a model that takes `num_items_in_batch`.

Reference: the gradient of the mean over all label tokens of the step. torchrun --nproc-per-node 1 accumulation.py
"""

import copy
import tempfile
from typing import Any

import accelerate
import deepspeed
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

#: An op for speed alone, which is compiled for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One row as a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def measure() -> float:
    """The norm of the step's gradient that the Trainer logs, divided by the reference's."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3))
    plain = copy.deepcopy(model)
    rows = [torch.randint(97, (16,)) for _ in range(4)]
    labels = [row.masked_fill(torch.arange(16) >= kept, -100) for row, kept in zip(rows, (16, 4, 9, 2), strict=True)]
    items = sum(int((label[1:] != -100).sum()) for label in labels)
    for row, label in zip(rows, labels, strict=True):
        plain(row[None], labels=label[None], num_items_in_batch=items).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    options: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1}
    options |= {"logging_steps": 1, "report_to": [], "save_strategy": "no", "optim": "adamw_torch", "use_cpu": True}
    arguments = TrainingArguments(tempfile.mkdtemp(), deepspeed=CONFIG, **options)
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate)
    trainer.train()
    return float(next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)) / norm


if __name__ == "__main__":
    versions = ", ".join(f"{peer.__name__} {peer.__version__}" for peer in (transformers, accelerate, deepspeed))
    print(f"{versions}: {measure():.3f} × the gradient of the mean over tokens")
