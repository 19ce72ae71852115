"""Fine-tune an adapter for each of several texts, all at once, on one trunk in 4 bits (QLoRA).

deepspeed --num_accelerators 4 docs/examples/qlora.py MODEL OUT CONFIG TEXT...
"""

import sys
from pathlib import Path

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, BitsAndBytesConfig

import cuboid  # cuboid

STEPS, SEQUENCE_LENGTH = 20, 64


def main(model_path: str, out: str, config: str, *texts: str) -> None:
    """Train one adapter on each text, and save each in a folder of its own."""
    dtype = torch.bfloat16 if "bf16" in cuboid.load_config(config) else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    deepspeed.init_distributed()  # cuboid: to round scales twice, ranks gather them while they load
    model = cuboid.from_pretrained(model_path, config, dtype=dtype, quantization_config=quantization)
    names = [f"text{number}" for number in range(len(texts))]
    for number, name in enumerate(names):
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        if number == 0:
            model = get_peft_model(model, lora, name)
        else:
            model.add_adapter(name, lora)
    model.base_model.set_adapter(names)  # all of them are trained
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model.train(), model_parameters=trained, config=config)

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    blocks = []
    for text in texts:
        ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        blocks.append(ids[: len(ids) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH))
    # A micro-batch has rows of all texts, each with the adapter of its text; every rank of a mesh is given all of them.
    text_of_row = [row % len(texts) for row in range(engine.train_micro_batch_size_per_gpu())]
    adapter_names = [names[text] for text in text_of_row]
    taken = [0] * len(texts)
    for step in range(STEPS):
        for _ in range(engine.gradient_accumulation_steps()):
            rows = []
            for text in text_of_row:
                rows.append(blocks[text][taken[text] % len(blocks[text])])
                taken[text] += 1
            ids = torch.stack(rows).to(engine.device)
            loss = engine(input_ids=ids, labels=ids, adapter_names=adapter_names).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    model.save_pretrained(out)  # a folder for each adapter, as PEFT writes them


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
