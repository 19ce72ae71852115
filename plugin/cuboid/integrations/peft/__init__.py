"""LoRA by PEFT on a sharded model: layers, what is accepted, and PEFT's own files."""

from cuboid.requirements import check_version

# Before the imports of this package's modules, which use names that other versions of PEFT don't have.
check_version("peft")
