"""What a script changes on a model, before or after it is sharded: right, or refused by name."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import cuboid
from cuboid.weights.save import full_gradients
from customizing import HEADS, HOOKS, INSTANCES, LENGTH, LLAMA, PARAMETRIZATIONS, ROWS, batch, built, own_forward

MESHES = {"1x2x1": (1, 2, 1), "2x1x1": (2, 1, 1), "1x1x2": (1, 1, 2)}
STAGES = {"pipeline": {"engine": "seq1f1b", "stages": 2, "segments": 2, "partition": "even"}}
#: Which are right on some layout, or need two stages at once; see test_customization_sweep.py.
RIGHT_SOMEWHERE = {"another block", "a block with another bias", "a tied block", "epsilon of a norm", "causality"}
#: Everything else that a script can change on an instance.
CHANGES = {name: of for name, of in (INSTANCES | PARAMETRIZATIONS).items() if name not in RIGHT_SOMEWHERE} | {
    f"a head {name}": HEADS[name].of for name in ("of several modules", "of a subclass", "tied")
}
#: Which of them can't be seen after sharding, since they are right then.
ONLY_BEFORE = {"an option of a block"}


def expected(change=None):
    """Loss and gradients by name of plain transformers, with a change."""
    model = built()
    if change is not None:
        change(model)
    loss = model(**batch(), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def verdict(config, change, *, before):
    """``"refused: …"``, ``"right"``, or what is wrong with a step of a sharded model with a change."""
    try:
        model = built()
        if before:
            change(model)
        model = cuboid.shard(model, config)
        refused = None if before else attempted(change, model)
        if refused is not None:
            return refused
        if "pipeline" in config:
            loss = cuboid.Pipeline(model).train(iter([batch()]), 1)
        else:
            loss = model(**batch()).loss
            loss.backward()
        actual = full_gradients(model)
    except cuboid.CuboidError as error:
        return f"refused: {error}"
    if cuboid.mesh_of(model).rank:
        return "right"  # the first rank is given the gradients
    wanted, gradients = expected(change)
    errors = [float((loss.detach() - wanted).abs())]
    errors += [float((actual[name] - gradients[name]).abs().max()) for name in actual.keys() & gradients.keys()]
    return "right" if max(errors) < 1e-6 and len(errors) > 1 else f"WRONG: {max(errors)}"


def attempted(change, model):
    """Why a change of a sharded model is refused on some rank; None if it isn't, or not before a forward."""
    why = None
    try:
        change(model)
        if cuboid.mesh_of(model).topology.pipe > 1:
            # As a step does first. There it ends the job, if other stages haven't the module.
            model.cuboid.state.made.check(model)
    except cuboid.CuboidError as error:
        why = f"refused: {error}"
    except Exception:
        # The module may be on another stage.
        if cuboid.mesh_of(model).topology.pipe == 1:
            raise
    return next((other for other in gathered(why) if other is not None), None)


def gathered(value):
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def verdicts(config, cases, before):
    return {name: verdict(config, (HOOKS | CHANGES)[name], before=before) for name in cases}


def section(mesh):
    return {
        "tensor_parallel": {"mode": "3d_tensor", "mesh": dict(zip(("batch", "sequence", "hidden"), mesh, strict=True))}
    }


CONFIGS = {**{name: section(mesh) for name, mesh in MESHES.items()}, "stages": STAGES}


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_a_script_changed_before_is_refused_by_name(pool, config):
    for rank in pool.run(2, verdicts, config, [*HOOKS, *CHANGES], True):
        assert [name for name, said in rank.items() if not said.startswith("refused: ")] == []
        assert "'model.layers.0.self_attn.q_proj' has a forward hook" in rank["forward hook of a projection"]
        assert "model.embed_tokens.weight has a gradient hook" in rank["gradient hook of the embedding"]
        assert "model.layers.0.mlp.forward was replaced on this instance" in rank["forward of a block"]
        assert "prune.remove" in rank["pruning"]
        assert "remove_weight_norm" in rank["weight_norm"]
        assert "remove_parametrizations" in rank["of a projection"]
        assert "model.layers.0.self_attn.scaling is 0.9" in rank["an option of a block"]
        assert "'model.layers.1' (LlamaDecoderLayer) was taken out" in rank["a layer less"]
        assert "tie_word_embeddings" in rank["a head tied"]


@pytest.mark.sample(1, ci=1)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_a_script_changes_after_is_refused_by_name(pool, config):
    cases = [name for name in (*HOOKS, *CHANGES) if name not in ONLY_BEFORE]
    for rank, by_case in enumerate(pool.run(2, verdicts, config, cases, False)):
        # On the stage that hasn't a module, the script itself fails.
        wrong = [name for name, said in by_case.items() if not said.startswith("refused: ")]
        assert wrong == [], f"rank {rank}: {wrong}"


def alone(_):
    """On one rank without a pipeline nothing is cut, and hooks are carried over to the modules that replace others."""
    return verdicts(section((1, 1, 1)), HOOKS, True) | {
        f"{name}, after": verdict(section((1, 1, 1)), hook, before=False) for name, hook in HOOKS.items()
    }


def test_hooks_are_carried_over_where_nothing_is_cut(pool):
    (by_case,) = pool.run(1, alone, None)
    assert set(by_case.values()) == {"right"}, by_case


def marked(config):
    """Hooks that say that they work on parts: what they see, and that they are called where the model computes."""
    seen, model = [], built()
    gradients = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        cuboid.local_hook(lambda _, __, out: seen.append(tuple(out.shape)))
    )
    model.model.embed_tokens.weight.register_hook(cuboid.local_hook(lambda g: gradients.append(g.shape) or g * 2))
    sharded = cuboid.shard(model, config)
    sharded.model.layers[1].register_forward_hook(cuboid.local_hook(lambda _, __, out: seen.append(tuple(out.shape))))
    sharded(**batch()).loss.backward()
    copied = copy.deepcopy(sharded)
    copied(**batch())
    return seen, gradients, full_gradients(sharded)


def test_a_hook_that_is_marked_as_local_is_given_parts(pool):
    _, wanted = expected()
    for rank, (seen, shapes, gradients) in enumerate(pool.run(2, marked, section((1, 2, 1)))):
        features = LLAMA.config().intermediate_size
        assert seen == [(ROWS, LENGTH, features // 2), (ROWS, LENGTH // 2, LLAMA.config().hidden_size)] * 2
        assert shapes == [(-(-LLAMA.vocabulary // 2), LLAMA.config().hidden_size)]
        if rank == 0:
            for name, gradient in gradients.items():
                factor = 2 if name == "model.embed_tokens.weight" else 1
                torch.testing.assert_close(gradient, factor * wanted[name], rtol=1e-4, atol=1e-6)


def a_base_model_of_its_own(config):
    model = cuboid.shard(built(), config)
    own_forward(model.model)
    with pytest.raises(cuboid.UnsupportedModelError, match=r"model\.forward was replaced after the model was sharded"):
        cuboid.Pipeline(model).train(iter([batch()]), 1)


def test_a_step_of_a_pipeline_checks_first(pool):
    pool.run(2, a_base_model_of_its_own, STAGES)


def replaced_code_later(_):
    """What a forward says after a class, or a function that it calls, was patched behind the sharding."""
    modeling, messages = transformers.models.llama.modeling_llama, []
    patches = [
        mock.patch.object(modeling.LlamaDecoderLayer, "forward", lambda self, hidden, **_: hidden),
        mock.patch.object(modeling, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k)),
        mock.patch.object(nn.functional, "silu", lambda x: x),
    ]
    for patch in patches:
        model = cuboid.shard(built(), section((1, 2, 1)))
        with patch, pytest.raises(cuboid.UnsupportedModelError) as error:
            model(**batch())
        messages.append(str(error.value))
        model(**batch())
    return messages


def test_code_that_is_replaced_after_sharding_is_named(pool):
    for layer_said, function_said, silu_said in pool.run(2, replaced_code_later, None):
        assert "isn't what was certified when it was sharded" in layer_said
        assert "LlamaDecoderLayer.forward" in layer_said
        assert "apply_rotary_pos_emb" in function_said
        assert "silu" in silu_said
