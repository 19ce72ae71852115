"""What small models are asked for by, in a module that imports nothing: the command line has these in its help."""

from __future__ import annotations

from typing import Literal, get_args

#: Architectures with a parallel plan for a mesh.
MeshArchitecture = Literal["llama", "qwen2", "qwen3", "mistral", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"]
#: Architectures that are supported in a pipeline only.
PipelineArchitecture = Literal["gemma2", "gemma3", "gpt_neox"]
#: Those whose sizes can be chosen. Small models of other types are those of self-tests.
Architecture = Literal[MeshArchitecture, PipelineArchitecture]
#: Scaled rotary embeddings.
Rope = Literal["dynamic", "yarn", "llama3", "longrope"]
#: Of weights and arithmetic.
Dtype = Literal["float64", "float32", "bfloat16"]
MESH_ARCHITECTURES: tuple[MeshArchitecture, ...] = get_args(MeshArchitecture)
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
