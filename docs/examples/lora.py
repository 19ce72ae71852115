"""Fine-tune with LoRA on a mesh or in a pipeline. What Cuboid adds to a plain DeepSpeed and PEFT script is marked.

deepspeed --num_accelerators 4 docs/examples/lora.py MODEL TEXT OUT [CONFIG]
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import cuboid  # cuboid

CONFIG = str(Path(__file__).parents[2] / "configs" / "llama_2x2x2.json")
STEPS, SEQUENCE_LENGTH = 20, 128


def main(model_path: str, text: str, out: str, config: str = CONFIG) -> None:
    """Train an adapter on the beginning of a text file and save it in PEFT's own form."""
    model = cuboid.from_pretrained(model_path, config)  # cuboid: this rank reads its own slices
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)  # its factors are cut as finely as the layers
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model.train(), model_parameters=trained, config=config)

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    batch = engine.train_micro_batch_size_per_gpu()
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)

    def batches() -> Iterator[dict[str, torch.Tensor]]:  # every rank of a mesh is given the same rows
        for step in range(STEPS * engine.gradient_accumulation_steps()):
            rows = blocks[[(step * batch + row) % len(blocks) for row in range(batch)]].to(engine.device)
            yield {"input_ids": rows, "labels": rows}

    micro_batches = batches()
    for step in range(STEPS):
        if hasattr(engine, "train_batch"):  # cuboid: with stages, a call for each step
            loss = engine.train_batch(micro_batches)
        else:
            for _ in range(engine.gradient_accumulation_steps()):
                loss = engine(**next(micro_batches)).loss
                engine.backward(loss)
                engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    model.save_pretrained(out)  # adapter_config.json and adapter_model.safetensors, written once


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
