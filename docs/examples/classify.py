"""Fine-tune an encoder as a classifier of texts, in two pipeline stages. What Cuboid changes is marked with `# cuboid`.

torchrun --nproc-per-node 2 docs/examples/classify.py MODEL TEXTS OUT

A line of TEXTS has a class, counted from 0, and a text, with a tab between them. MODEL may be without a classifier's
head, such as bert-base-uncased; then a new one is trained with the rest.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

from cuboid import CuboidTrainer as Trainer  # cuboid: instead of transformers' Trainer

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 1},
    "pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 1},  # cuboid: each token sees the whole sequence
}
HELD_OUT = 8


def main(model_path: str, texts: str, out: str) -> None:
    """Train a checkpoint for an epoch on the lines of a file, evaluate it on the last ones, and save it."""
    arguments = TrainingArguments(
        out,
        deepspeed=CONFIG,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        learning_rate=5e-5,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    lines = [line.split("\t", 1) for line in Path(texts).read_text(encoding="utf-8").splitlines()]
    classes = 1 + max(int(label) for label, _ in lines)
    # After TrainingArguments, so that this rank reads only its own stage.
    model = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=classes)

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = [{**tokenizer(text, truncation=True), "labels": int(label)} for label, text in lines]
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows[:-HELD_OUT],
        eval_dataset=rows[-HELD_OUT:],
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    trainer.save_model(out)  # an ordinary checkpoint
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
