"""LoRA by PEFT on a sharded model: layers, what is accepted, and PEFT's own files."""
