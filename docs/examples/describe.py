"""Fine-tune a vision-language model with a frozen tower. What Cuboid adds is marked with `# cuboid`.

deepspeed --num_accelerators 2 docs/examples/describe.py MODEL SAMPLES OUT

MODEL is a checkpoint such as llava-hf/llava-1.5-7b-hf. SAMPLES is a file of safetensors with what a processor makes of
texts and images: input_ids, labels and attention_mask [samples, tokens], and pixel_values [images, channels, height,
width], in the order of the samples that they belong to.
"""

import sys

import deepspeed
from safetensors.torch import load_file

import cuboid  # cuboid

STEPS = 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
    "tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": 1, "sequence": 2, "hidden": 1}},  # cuboid
}


def main(model_path: str, samples_path: str, out: str) -> None:
    """Train on one micro-batch, all samples of the file, and save the model."""
    model = cuboid.from_pretrained(model_path, CONFIG).train()  # cuboid: this rank reads its own slices
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=CONFIG)
    batch = {name: x.to(engine.device) for name, x in load_file(samples_path).items()}
    for step in range(STEPS):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)
    cuboid.save_pretrained(engine, out)  # cuboid: an ordinary checkpoint


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
