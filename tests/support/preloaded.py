"""What a rank's first load does, for the models of most tests. The tests' fork server alone imports this."""

import ctypes
import gc
import sys
from pathlib import Path

# The module of a test imports these two, in each rank that runs one of its functions.
import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import transformers.generation.utils
import transformers.modeling_layers
import transformers.trainer  # noqa: F401
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from cuboid.models.certification.certificates import certificate_of
from cuboid.models.certification.mesh_certificates import mesh_verdict
from cuboid.models.pipeline.staging_plan import outline_of
from cuboid.models.sharded.random_code import libraries_drawn_from
from cuboid.verify import SmallModel

#: An outline is one of a model's own sizes, so that there are several of an architecture.
SMALL = (
    *(SmallModel("llama", layers=layers) for layers in (2, 3, 4, 5)),
    *(SmallModel("llama", layers=layers, tied=True) for layers in (2, 4, 5)),
    *(SmallModel("llama", heads=4, kv_heads=kv_heads, layers=layers) for kv_heads, layers in ((2, 2), (2, 4), (4, 2))),
    *(SmallModel("llama", heads=8, kv_heads=4, layers=layers) for layers in (2, 3, 4)),
    *(SmallModel("gpt2", layers=layers) for layers in (2, 4)),
    *(SmallModel("qwen3", layers=layers) for layers in (2, 4)),
    *map(SmallModel, ("qwen2", "mistral", "mixtral")),
)
#: What a class of transformers answers at a first load, and then remembers as an attribute.
REMEMBERED = ("_can_set_attn_implementation", "_can_set_experts_implementation")
#: Of Linux: advice to put memory into huge pages at once, and their size in bytes.
MADV_COLLAPSE, HUGE = 25, 1 << 21


def models():
    """The models, without tensors."""
    with torch.device("meta"):
        return [AutoModelForCausalLM.from_config(small.config()) for small in SMALL]


def warm_up():
    """First all that transformers adds to classes and lists at a first load: code has a new identity then."""
    made = models()
    made[0].initialize_weights()
    for model in made:
        for kind in {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}:
            for name in REMEMBERED:
                getattr(kind, name)()
        get_checkpoint_conversion_mapping(model.config.model_type)
    for model in made:
        mesh_verdict(type(model), model.config)
        certificate_of(type(model), model.config)
        outline_of(type(model), model.config)
    for kind in {type(module) for model in made for module in model.modules()}:
        libraries_drawn_from(kind)


def collapse_pages():
    """Put this process's memory into huge pages, where Linux has the advice: a fork copies the entry of each page.

    There are 100,000 small ones, which take it 20 ms.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights.startswith("rw") and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin = -(-begin // HUGE) * HUGE
            if end - begin >= HUGE:
                madvise(begin, (end - begin) // HUGE * HUGE, MADV_COLLAPSE)


warm_up()
# Each full collection in a forked process would go through all of this, in 0.3 s, and copy the pages it is on.
gc.collect()
gc.freeze()
collapse_pages()
