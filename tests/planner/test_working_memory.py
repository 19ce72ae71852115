"""The memory that the planner says a rank's step takes, against the tensors that are alive in steps of small models."""

from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from cuboid.distributed.topology import MeshShape
from cuboid.models.architectures.transformers_names import checkpoint_activations
from cuboid.models.attention.kept_attention import keeping_attention
from cuboid.planner.cost.layout import Layout
from cuboid.planner.cost.memory import _Stage
from cuboid.planner.cost.step import StepCost
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.meta_model import describe
from cuboid.planner.estimate import cuboid_software
from cuboid.tensor3d.sharding import bucketing
from live_bytes import fullest_moment, uncounted_exchanges
from planning import small
from threaded import Threaded

ROWS, LENGTH = 4, 512
#: Layers that take more than the loss, and few enough heads for a fused kernel on CPUs.
SIZES = {"hidden_size": 96, "intermediate_size": 384, "head_dim": 8, "moe_intermediate_size": 96, "vocab_size": 64}
SIZES |= {"n_embd": 96, "n_inner": 384, "attn_pdrop": 0.0, "n_positions": 1024, "max_position_embeddings": 1024}
MODELS = {
    **{name: {} for name in ("llama", "gpt2", "qwen3", "mixtral", "qwen3_moe")},
    # Its `head_dim` is that of the part with positions.
    "deepseek_v3": {"num_key_value_heads": 12, "v_head_dim": 12, "head_dim": 4},
}
MESHES = ["1x1x1", "1x2x1", "1x1x2", "2x1x1", "1x2x2", "2x2x1", "1x4x1", "1x1x4"]
#: How much of what is predicted may be alive. Where gradients of experts are reduced over `batch`, it is more: a block
#: whose reduction is on its way isn't counted.
LEAST, MOST, MOST_OF_EXPERTS = 0.85, 1.02, 1.05


def most_alive(config, verdict, mesh, checkpointing):
    """On each rank, the bytes at the fullest moment of a step's backward."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    threaded = Threaded(model, mesh, verdict)
    ids = torch.randint(2, 60, (ROWS, LENGTH))

    def step(rank):
        if checkpointing != "none":
            contexts = {"context_fn": keeping_attention(None)} if checkpointing == "attention" else {}
            checkpoint_activations(rank, {"use_reentrant": False, **contexts})
        return fullest_moment(rank, lambda: rank(input_ids=ids, labels=ids, use_cache=False).loss)

    # Weights of small models share messages, whose copies those of large ones don't have.
    with uncounted_exchanges(), mock.patch.object(bucketing, "_BUCKET_BYTES", 0):
        return threaded.run(step)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", ["none", "layers", "attention"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_no_more_alive_than_predicted(name, mesh, checkpointing):
    config = small(name, **{**SIZES, **MODELS[name]})
    described = describe(config)
    layout = Layout(MeshShape.parse(mesh), micro_batch=ROWS, checkpointing=checkpointing)
    cluster = Cluster.parse(f"{layout.ranks}xH100")
    stage = _Stage(StepCost(described, layout, cluster, LENGTH, cuboid_software(layout)), 0)
    assert not stage.count.obstacle
    assert not stage.peak.obstacle
    memory = stage.memory()
    predicted = stage.counted_bytes() - memory.parameters - memory.gradients - memory.optimizer - memory.framework
    alive = max(most_alive(config, described.verdict, mesh, checkpointing))
    has_experts = any(kind.experts is not None for kind in described.kinds)
    assert LEAST < alive / predicted < (MOST_OF_EXPERTS if has_experts and layout.mesh.batch > 1 else MOST)
