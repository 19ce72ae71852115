"""``generate`` with a key/value cache on a mesh: the tokens of plain transformers, from caches of ranks' own heads."""

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import cuboid
from cuboid.distributed.topology import MeshShape
from cuboid.models.certification.float64 import KeepFloat64
from threaded import Threaded

SIZES = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
TYPES = {
    "llama": {"intermediate_size": 96, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 96, "num_key_value_heads": 4, "head_dim": 12},
    # A window that ends inside the prompt.
    "gemma2": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6},
    "gpt2": {"n_positions": 40},
}
PROMPT, NEW = 11, 9


def whole_model(architecture, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SIZES, **TYPES[architecture], **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def prompts(rows=3):
    """Ids, and a mask with padding on the left of the first row."""
    ids = torch.randint(1, 61, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.sample(6)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1", "2x2x2"])
@pytest.mark.parametrize("architecture", TYPES)
def test_a_mesh_generates_what_plain_transformers_does(architecture, mesh):
    model = whole_model(architecture)
    threaded, shape = Threaded(model, mesh), MeshShape.parse(mesh)
    limits = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    kinds = [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}]
    for options in kinds if architecture in ("llama", "gemma2") else kinds[:1]:
        batch = prompts(1 if "prompt_lookup_num_tokens" in options else 3)
        # Plain transformers would compute the softmax of a row that sees nothing in float32, where it is NaN.
        with KeepFloat64():
            expected = model.generate(**batch, **limits, **options)

        def step(on_rank, batch=batch, options=options):
            return on_rank.generate(**batch, **limits, **options, return_dict_in_generate=True)

        for output in threaded.run(step):
            assert torch.equal(output.sequences, expected), options
            if not options:
                heads = getattr(model.config, "num_key_value_heads", 4)
                layer = output.past_key_values.layers[-1]
                assert output.past_key_values.get_seq_length() == PROMPT + NEW - 1
                assert layer.keys.shape[:2] == (-(-3 // shape.batch), max(1, heads // (shape.sequence * shape.hidden)))


def generated_by(model, ids, **options):
    try:
        return model.generate(ids, max_new_tokens=3, do_sample=False, **options)
    except cuboid.CuboidError as error:
        return str(error)


def test_other_caches_are_refused_and_other_models_run_without_one(caplog):
    model, ids = whole_model("llama"), prompts()["input_ids"]
    threaded = Threaded(model, "1x2x1")
    for text in threaded.run(lambda rank: generated_by(rank, ids, past_key_values=DynamicCache())):
        assert text.startswith("past_key_values: a DynamicCache of the script's own has no rule on a mesh")
    for text in threaded.run(lambda rank: generated_by(rank, ids, cache_implementation="static")):
        assert text.startswith("cache_implementation='static' has no rule on a mesh")
    with caplog.at_level(logging.WARNING, "cuboid"):
        for tokens in threaded.run(lambda rank: generated_by(rank.train(), ids, use_cache=True)):
            assert torch.equal(tokens, generated_by(model, ids))
    assert [record.getMessage() for record in caplog.records] == [
        "generate(use_cache=True): there is none in training mode; every step runs all tokens"
    ]
