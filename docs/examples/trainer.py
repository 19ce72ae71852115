"""A script of the Hugging Face Trainer on a pipeline. The one line that Cuboid changes is marked with `# cuboid`.

torchrun --nproc-per-node 8 docs/examples/trainer.py MODEL TEXT OUT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from cuboid import CuboidTrainer as Trainer  # cuboid: instead of transformers' Trainer

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1},
    "pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 4},
    "tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}},
}
SEQUENCE_LENGTH, HELD_OUT = 128, 16


def main(model_path: str, text: str, out: str) -> None:
    """Train a checkpoint for an epoch on a text file, evaluate it on the file's end, and save it."""
    arguments = TrainingArguments(
        out,
        deepspeed=CONFIG,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        learning_rate=1e-4,
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    # After TrainingArguments, so that this rank reads only its own stage.
    model = AutoModelForCausalLM.from_pretrained(model_path)

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    rows = [{"input_ids": block, "labels": block} for block in blocks]

    trainer = Trainer(model=model, args=arguments, train_dataset=rows[:-HELD_OUT], eval_dataset=rows[-HELD_OUT:])
    trainer.train()
    trainer.save_model(out)  # an ordinary checkpoint


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
