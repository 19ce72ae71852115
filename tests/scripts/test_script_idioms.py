"""What scripts do with any model of transformers, done with a sharded one: as with the whole model, or refused."""

import copy
import functools
import json
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BloomConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import is_peft_available

import cuboid
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.pipeline.training_pipeline import Pipeline
from cuboid.verify import SmallModel
from cuboid.weights.save import full_gradients
from threaded import Threaded

LLAMA = SmallModel("llama", heads=4, kv_heads=4)
TABLE = SmallModel("gpt2", heads=4, kv_heads=4, positions=16)
ROWS, LENGTH = 4, 12
MESHES = ["1x2x1", "2x1x1", "1x1x2"]


def built(small, **options):
    torch.manual_seed(small.seed)
    config = small.config()
    config.update(options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def mode(mesh, stages=None):
    batch, sequence, hidden = map(int, mesh.split("x"))
    config = {
        "tensor_parallel": {"mode": "3d_tensor", "mesh": {"batch": batch, "sequence": sequence, "hidden": hidden}}
    }
    if stages is not None:
        config["pipeline"] = {"engine": "seq1f1b", "stages": stages, "segments": 2, "partition": "even"}
    return config


def sharded(small, mesh):
    return cuboid.shard(built(small), mode(mesh))


def tokens(rows=ROWS, length=LENGTH):
    return torch.randint(0, LLAMA.vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def message(call):
    """What a call is refused with."""
    try:
        call()
    except cuboid.CuboidError as error:
        return str(error)
    raise AssertionError("it wasn't refused")


def largest_difference(model, plain):
    """Between the gradients of a sharded model and a plain one; 0 on ranks that are given none."""
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    return max(
        (float((x - parameters[name].grad).abs().max()) for name, x in full_gradients(model).items()), default=0.0
    )


# --- what a micro-batch may hold ------------------------------------------------------------------------------------


def numbers_out_of_range(mesh):
    ids, errors = tokens(), {}
    model, table = sharded(LLAMA, mesh), sharded(TABLE, mesh)
    model(input_ids=ids, labels=ids)
    for value in (-1, LLAMA.vocabulary, LLAMA.vocabulary + 1, -101):
        labels = ids.clone()
        labels[1, 3] = value
        errors["labels", value] = message(functools.partial(model, input_ids=ids, labels=labels))
        errors["shift_labels", value] = message(
            functools.partial(model, input_ids=ids, shift_labels=labels, labels=ids)
        )
        errors["input_ids", value] = message(functools.partial(model, input_ids=labels))
    # No token predicts the first one.
    first = ids.clone()
    first[:, 0] = -1
    assert torch.equal(model(input_ids=ids, labels=first).loss, model(input_ids=ids, labels=ids).loss)
    last = torch.arange(LENGTH).unsqueeze(0) + TABLE.positions - LENGTH
    table(input_ids=ids, position_ids=last)
    errors["position_ids", 16] = message(lambda: table(input_ids=ids, position_ids=last + 1))
    errors["too long"] = message(lambda: table(input_ids=tokens(length=TABLE.positions + 1)))
    errors["float"] = message(lambda: model(input_ids=ids, labels=ids.float()))
    errors["empty"] = message(lambda: model(input_ids=ids[:0]))
    return errors


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", MESHES)
def test_numbers_that_no_table_has_are_refused_on_all_ranks(pool, mesh):
    first, second = pool.run(2, numbers_out_of_range, mesh)
    assert first == second
    for name, value in (key for key in first if isinstance(key, tuple)):
        place = "[0, 11]" if name == "position_ids" else "[1, 3]"
        assert first[name, value].startswith(f"{name}{place} is {value}, but the model's ")
    assert "vocabulary has 131 entries, 0 to 130; -100 stands for no label" in first["labels", -1]
    assert first["too long"].startswith("position_ids[0, 16] is 16, but the model's position table has 16 entries")
    assert first["float"] == "labels holds torch.float32; give torch.int64"
    assert first["empty"] == "input_ids must be [batch, sequence], not [0, 12]"


def numbers_out_of_range_in_a_pipeline(mesh, stages):
    model = cuboid.shard(built(TABLE), mode(mesh, stages))
    pipeline, ids = Pipeline(model), tokens()
    first = cuboid.mesh_of(model).coordinate.data == 0
    errors = {}

    def run(**tensors):
        micro_batch = {"input_ids": ids, "labels": ids}
        pipeline.train(iter([micro_batch, {**micro_batch, **tensors} if first else micro_batch]), 2)

    run()
    for value in (-1, LLAMA.vocabulary):
        wrong = ids.clone()
        wrong[1, 3] = value
        for name in ("labels", "input_ids"):
            errors[name, value] = message(functools.partial(run, **{name: wrong}))
    errors["position_ids", 16] = message(lambda: run(position_ids=torch.arange(LENGTH).unsqueeze(0) + 5))
    errors["base"] = message(lambda: model.base_model(input_ids=ids))
    errors["generate"] = message(lambda: model.generate(ids))
    errors["state_dict"] = message(model.state_dict)
    plain = built(TABLE)
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    assert message(lambda: model.num_parameters(only_trainable=True)).startswith("num_parameters(only_trainable=True)")
    return errors


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("ranks", "mesh"), [(2, "1x1x1"), (4, "1x2x1"), (4, "1x1x1")])
def test_numbers_that_no_table_has_are_refused_in_a_pipeline_of_all_replicas(pool, ranks, mesh):
    for errors in pool.run(ranks, numbers_out_of_range_in_a_pipeline, mesh, 2):
        for name, value in (key for key in errors if isinstance(key, tuple)):
            place = "[0, 11]" if name == "position_ids" else "[1, 3]"
            named = f"{name}{place} of micro-batch 1 is {value}"
            assert errors[name, value].startswith(named)
        assert errors["generate"].startswith("generate: a pipeline stage has no forward of its own; save the model")
        assert errors["base"].startswith("a pipeline stage has no forward of its own")
        assert "cuboid.full_state_dict" in errors["state_dict"]


def other_data(mesh):
    model = sharded(LLAMA, mesh)
    other = cuboid.mesh_of(model).rank == 1
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "num_items_in_batch": 40}
    batch["position_ids"] = torch.arange(LENGTH).expand(ROWS, -1)
    cases = {name: x.flip(0) for name, x in batch.items() if isinstance(x, torch.Tensor)}
    cases["attention_mask"] = batch["attention_mask"].index_fill(1, torch.tensor([LENGTH - 1]), 0)
    cases["position_ids"] = batch["position_ids"] + 1
    errors = {}
    for _ in range(4):
        model(**batch).loss.backward()
    traffic = cuboid.mesh_of(model).comm_counter
    before = traffic.snapshot()
    for name, tensor in cases.items():
        errors[name] = message(lambda name=name, x=tensor: model(**{**batch, name: x} if other else batch))
    sent = sum(traffic.snapshot().values()) - sum(before.values())
    items = torch.tensor(41 if other else 40)
    errors["num_items_in_batch"] = message(lambda: model(**{**batch, "num_items_in_batch": items}))
    fewer = {name: x[:2] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    errors["shapes"] = message(lambda: model(**fewer if other else batch))
    errors["labels or none"] = message(lambda: model(ids) if other else model(input_ids=ids, labels=ids))
    errors["mode"] = message(lambda: model.train(not other)(input_ids=ids))
    model.train()
    model(**batch).loss.backward()
    return errors, sent / len(cases)


def test_ranks_with_other_data_are_found_out_in_every_batch_before_anything_is_computed(pool):
    (first, sent), (second, _) = pool.run(2, other_data, "1x2x1")
    assert first == second
    for name, text in first.items():
        assert text.startswith("the 2 ranks of a mesh must be given the same micro-batch, but theirs differ in ")
        differing = text.removeprefix(text.partition(" differ in ")[0] + " differ in ").partition(":")[0]
        if name in ("shapes", "labels or none", "mode"):
            assert "shapes or the other arguments" in differing
        else:
            assert differing == name
    # Seven numbers of eight bytes, to the one other rank.
    assert sent == 72


def sizes_of_the_ends(mesh, tied):
    """What scripts read of a stage's embedding and head, either of which another stage may have."""
    small = built(LLAMA, tie_word_embeddings=tied)
    model = cuboid.shard(built(LLAMA, tie_word_embeddings=tied), mode(mesh, 2))
    before = {id(parameter) for parameter in model.parameters()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert table.weight.shape == small.get_input_embeddings().weight.shape
    assert (table.num_embeddings, table.embedding_dim) == (LLAMA.vocabulary, LLAMA.hidden)
    assert head.weight.shape == small.get_output_embeddings().weight.shape
    assert (head.in_features, head.out_features, head.bias) == (LLAMA.hidden, LLAMA.vocabulary, None)
    assert model.resize_token_embeddings(LLAMA.vocabulary) is table
    assert {id(parameter) for parameter in model.parameters()} == before
    assert copy.deepcopy(model).get_input_embeddings().weight.shape == table.weight.shape
    message(lambda: model.resize_token_embeddings(LLAMA.vocabulary + 1))
    for end in (table, head):
        if end.weight.is_meta:
            assert "is on another stage of the pipeline" in message(lambda end=end: end(tokens()))
    return table.weight.is_meta, head.weight.is_meta


@pytest.mark.parametrize("tied", [False, True])
def test_every_stage_tells_the_sizes_of_embedding_and_head(pool, tied):
    first, last = pool.run(2, sizes_of_the_ends, "1x1x1", tied)
    # The last stage has a tied embedding as well, for the head.
    assert (first, last) == ((False, True), (not tied, False))


# --- rows that the mesh doesn't divide ------------------------------------------------------------------------------


def short_batch(mesh, stages, rows):
    ids = tokens(rows)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, LENGTH - 3 :], labels[0, LENGTH - 3 :] = 0, -100
    plain, model = built(LLAMA), cuboid.shard(built(LLAMA), mode(mesh, stages))
    expected = plain(input_ids=ids, labels=labels, attention_mask=mask)
    expected.loss.backward()
    if stages is not None:
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        loss = Pipeline(model).train(iter([batch]), 1)
        return float(loss - expected.loss), largest_difference(model, plain), True
    loss = model(input_ids=ids, labels=labels, attention_mask=mask).loss
    loss.backward()
    difference = largest_difference(model, plain)
    logits = model.eval()(input_ids=ids, attention_mask=mask).logits
    alike = logits.shape == expected.logits.shape and torch.allclose(logits, expected.logits, atol=1e-5)
    return float(loss - expected.loss), difference, alike


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("ranks", "mesh", "stages", "rows"), [(2, "2x1x1", None, 3), (2, "2x1x1", None, 1), (4, "2x1x1", 2, 3)]
)
def test_a_last_short_batch_gives_what_it_gives_alone(pool, ranks, mesh, stages, rows):
    for loss, gradients, alike in pool.run(ranks, short_batch, mesh, stages, rows):
        assert abs(loss) < 1e-5
        assert gradients < 1e-6
        assert alike


# --- calls ----------------------------------------------------------------------------------------------------------


def base_and_head(mesh):
    ids, plain, model = tokens(3), built(LLAMA), sharded(LLAMA, mesh)
    results = []
    for either in (plain, model):
        hidden = either.base_model(input_ids=ids).last_hidden_state
        head = either.get_output_embeddings()
        # As trainers do that make their own loss, in two ways.
        logits = torch.nn.functional.linear(hidden, head.weight) + head(hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        results.append((hidden.detach(), loss.item()))
    (hidden, loss), (own_hidden, own_loss) = results
    assert torch.allclose(own_hidden, hidden, atol=1e-5)
    for call in (lambda: model.get_input_embeddings()(ids), lambda: model.lm_head(own_hidden)):
        assert "was called by itself" in message(call)
    return abs(own_loss - loss), largest_difference(model, plain)


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_base_model_and_a_head_are_whole_for_whoever_calls_them(pool, mesh):
    for loss, gradients in pool.run(2, base_and_head, mesh):
        assert loss < 1e-5
        assert gradients < 1e-6


def generated(mesh):
    ids, plain, model = tokens(3), built(LLAMA).eval(), sharded(LLAMA, mesh).eval()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    alike = []
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 2, "do_sample": False}):
        torch.manual_seed(0)
        expected = plain.generate(ids, attention_mask=mask, max_new_tokens=4, **options)
        # All but the first rank have drawn other numbers before.
        torch.manual_seed(cuboid.mesh_of(model).rank)
        actual = model.generate(ids, attention_mask=mask, max_new_tokens=4, **options)
        alike.append(torch.equal(actual, expected))
    return alike, torch.rand(2).tolist()


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x1"])
def test_generate_gives_the_tokens_of_the_whole_model_on_all_ranks(pool, mesh):
    first, second = pool.run(2, generated, mesh)
    assert first == second
    assert first[0] == [True, True, True]


def as_the_whole_model(mesh):
    ids, plain, model = tokens(), built(LLAMA, tie_word_embeddings=True), None
    model = cuboid.shard(built(LLAMA, tie_word_embeddings=True), mode(mesh))
    vocabulary = LLAMA.vocabulary
    # The condition of many scripts, for which a shard's rows are too few.
    assert model.resize_token_embeddings(vocabulary) is model.get_input_embeddings()
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(vocabulary - 1).num_embeddings == vocabulary
    for options in ({}, {"exclude_embeddings": True}, {"only_trainable": True}):
        assert model.num_parameters(**options) == plain.num_parameters(**options)
    model.base_model.norm.weight.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == plain.num_parameters() - LLAMA.hidden
    model.base_model.norm.weight.requires_grad_(True)
    model.tie_weights()
    assert model.lm_head.weight is model.base_model.embed_tokens.weight
    twin = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is None for parameter in twin.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loss = twin(input_ids=ids, labels=ids).loss
    loss.backward()
    differences = [largest_difference(either, plain) for either in (model, twin)]
    for cast in (torch.float64, torch.bfloat16):
        twin.to(cast)
        assert float(twin(input_ids=ids, labels=ids).loss) == pytest.approx(float(expected), rel=2e-2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        under_another_dtype = sharded(LLAMA, mesh)
        bfloat16 = under_another_dtype(input_ids=ids, labels=ids).loss
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(bfloat16) == pytest.approx(float(built(LLAMA)(input_ids=ids, labels=ids).loss), rel=2e-2)
    return float(loss - expected), differences


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", ["1x2x1", "2x1x1"])
def test_sizes_copies_and_casts_are_the_whole_models(pool, mesh):
    for loss, differences in pool.run(2, as_the_whole_model, mesh):
        assert abs(loss) < 1e-5
        assert max(differences) < 1e-6


def refused(mesh):
    model, ids = sharded(LLAMA, mesh), tokens()
    errors = {
        "resize": message(lambda: model.resize_token_embeddings(LLAMA.vocabulary + 1)),
        "pad": message(lambda: model.resize_token_embeddings(pad_to_multiple_of=64)),
        "state_dict": message(model.state_dict),
        "base state_dict": message(model.base_model.state_dict),
        "load_state_dict": message(lambda: model.load_state_dict({})),
        "push_to_hub": message(lambda: model.push_to_hub("mine")),
        "compile": message(lambda: model.compile(mode="max-autotune")),
        "set_input_embeddings": message(lambda: model.set_input_embeddings(torch.nn.Embedding(1, 1))),
        "load_adapter": message(lambda: model.load_adapter("somewhere")),
    }
    with pytest.raises(RuntimeError) as error:
        torch.compile(model)(input_ids=ids)
    errors["torch.compile"] = str(error.value)
    for layer in model.base_model.layers:
        layer.compile(backend="eager")
    model(input_ids=ids, labels=ids).loss.backward()
    model.get_input_embeddings().neftune_noise_alpha = 5
    errors["neftune"] = message(lambda: model(input_ids=ids))
    other = sharded(LLAMA, mesh)
    other.base_model.layers[0].mlp.up_proj = torch.nn.Linear(LLAMA.hidden, 2 * LLAMA.hidden, bias=False)
    errors["surgery"] = message(lambda: other(input_ids=ids))
    return errors


def test_what_a_sharded_model_cant_do_is_refused_with_what_it_can(pool):
    errors, same = pool.run(2, refused, "1x2x1")
    assert errors == same
    assert "the embedding has 131 rows and is sharded" in errors["resize"]
    assert errors["pad"].startswith("resize_token_embeddings(192)")
    for name in ("state_dict", "base state_dict"):
        assert "cuboid.full_state_dict(model)" in errors[name]
    assert "cuboid.from_pretrained" in errors["load_state_dict"]
    assert "save_pretrained(folder, push_to_hub=True" in errors["push_to_hub"]
    assert errors["compile"].startswith("mode='max-autotune' has no rule")
    assert "call model.compile() once the model is sharded" in errors["torch.compile"]
    assert "PeftModel.from_pretrained(model, folder" in errors["load_adapter"]
    assert errors["neftune"].startswith("neftune_noise_alpha")
    assert "layers.0.mlp.up_proj" in errors["surgery"]


def loaded_to(path, mesh, places):
    """What is said of each ``device_map``, or the device of the loaded model."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    config, said = {"tensor_parallel": {"mode": "3d_tensor", "mesh": mesh}}, []
    for place in places:
        place = dist.get_rank() if place == "own" else place
        try:
            said.append(str(cuboid.from_pretrained(path, config, device_map={"": place}).device))
        except cuboid.UnsupportedModelError as error:
            said.append(str(error).partition(" can't")[0])
    return said


def test_a_device_map_may_name_the_ranks_own_device(pool, checkpoint):
    said = pool.run(2, loaded_to, checkpoint(LLAMA), {"sequence": 2}, ["own", "cpu", torch.device("cpu"), 7, "disk"])
    assert said == [["cpu", "cpu", "cpu", *["from_pretrained(device_map=…)"] * 2]] * 2


@pytest.mark.parametrize("stages", [None, 2])
def test_other_kinds_of_models_are_refused_by_name_and_task(monkeypatch, tmp_path, stages):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    config = mode("1x1x1" if stages else "1x2x1", stages)
    bert = BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, vocab_size=50)
    llama = built(LLAMA)
    llama.save_pretrained(tmp_path / "llama")
    expected = {
        "BertForNextSentencePrediction is for next sentence prediction": BertForNextSentencePrediction(bert),
        "Linear isn't a model of transformers": torch.nn.Linear(2, 2),
        "torch.compile can't compile LlamaForCausalLM as a whole": torch.compile(llama),
    }
    if stages:
        # A mesh takes them.
        expected |= {"LlamaModel is for hidden states": llama.base_model}
        for model in (BertForMaskedLM(bert), LlamaForSequenceClassification(LLAMA.config())):
            said = message(lambda model=model: cuboid.shard(model, config))
            assert said.startswith(f"{type(model).__name__} isn't right when its sequences are cut into segments")
            assert said.endswith('"segments": 1 is right')
    for start, model in expected.items():
        assert message(lambda model=model: cuboid.shard(model, config)).startswith(start)
    with cuboid.scope(config):
        for start, model in expected.items():
            if isinstance(model, PreTrainedModel):
                load = functools.partial(type(model).from_pretrained, tmp_path / "llama")
                assert message(load).startswith(start)
        if stages:
            assert message(lambda: AutoModel.from_pretrained(tmp_path / "llama")).startswith("LlamaModel is for hidden")


def with_adapters(model):
    # Nobody needs it to run the other tests.
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.skipif(not is_peft_available(), reason="PEFT isn't installed")
def test_adapters_from_before_sharding_are_refused_wherever_they_are(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    config = mode("1x2x1")
    built(LLAMA).save_pretrained(tmp_path / "llama")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    wrapped = with_adapters(llama)
    wrapped.save_pretrained(tmp_path / "adapters")
    for model, name in ((wrapped, "PeftModelForCausalLM"), (llama, "LlamaForCausalLM")):
        assert message(lambda model=model: cuboid.shard(model, config)).startswith(f"{name} has adapters of PEFT")
    with cuboid.scope(config):
        adapters = message(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "adapters"))
    assert adapters.startswith(f"{tmp_path / 'adapters'} holds adapters of PEFT")


# --- the config, and other models made of it ------------------------------------------------------------------------


def described(config):
    return config.to_json_string(use_diff=False), config._attn_implementation, pickle.dumps(config)


def others_of_its_config(mesh, stages, folder):
    """What a sharded model's config says, and what models give that are made of it, of its class or of its folder."""
    plain, ids = built(LLAMA).eval(), tokens()
    before = described(plain.config)
    model = cuboid.shard(copy.deepcopy(plain), mode(mesh, stages))
    config = copy.deepcopy(model.config)
    made = [
        type(model)(config),
        type(model)._from_config(config),
        AutoModelForCausalLM.from_config(model.config),
        type(plain)(model.config),
        type(model).from_pretrained(folder),
    ]
    alike = [described(model.config) == described(config) == before]
    for other in made:
        other.load_state_dict(plain.state_dict())
        alike += [type(other) is type(plain), torch.equal(other.eval()(ids).logits, plain(ids).logits)]
    base = type(model.base_model)(config)
    base.load_state_dict(plain.base_model.state_dict())
    alike.append(type(base) is type(plain.base_model))
    alike.append(torch.equal(base.eval()(ids).last_hidden_state, plain.base_model(ids).last_hidden_state))
    if stages is None:
        model.eval()
        alone = model(input_ids=ids).logits
        # The others have left it as it is.
        alike.append(float((alone - plain(ids).logits).abs().max()) < 1e-5)
        model.config._attn_implementation = "eager"
        alike.append(message(lambda: model(input_ids=ids)).startswith("attn_implementation is 'eager', but was 'sdpa'"))
        model.config._attn_implementation = "sdpa"
        cuboid.unregister()
        alike.append("cuboid.register()" in message(lambda: model(input_ids=ids)))
        cuboid.register()
        alike.append(torch.equal(model(input_ids=ids).logits, alone))
    cuboid.save_pretrained(model, f"{folder}-saved")
    return alike


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize(("mesh", "stages"), [("1x2x1", None), ("1x1x2", None), ("1x1x1", 2)])
def test_models_made_of_a_sharded_ones_config_or_class_are_plain(pool, tmp_path, mesh, stages):
    plain = built(LLAMA)
    plain.save_pretrained(tmp_path / "start")
    for alike in pool.run(2, others_of_its_config, mesh, stages, str(tmp_path / "start")):
        assert all(alike), alike
    wanted, saved = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("start", "start-saved"))
    assert saved == wanted


# --- what an output holds -------------------------------------------------------------------------------------------


def step_for(asked, labels):
    """A step on all hidden states, and on the loss if there are labels."""

    def step(model):
        output = model(input_ids=tokens(3, 7), labels=tokens(3, 7) if labels else None, use_cache=False, **asked)
        states = [hidden for hidden in output.hidden_states if hidden is not None]
        loss = sum((at + 1) * hidden.square().mean() for at, hidden in enumerate(states))
        (loss + output.loss if labels else loss).backward()
        return [hidden.detach() for hidden in states]

    return step


@pytest.mark.sample(3, ci=9)
@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", "2x1x1", "2x2x2"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["config", "config after", "argument", "two layers"])
def test_hidden_states_of_all_layers_are_whole_and_differentiable(name, mesh, how):
    plain = built(SmallModel(name, heads=4, kv_heads=4)).double().eval()
    plain.config.output_hidden_states = how == "config"
    asked = {"argument": {"output_hidden_states": True}, "two layers": {"output_hidden_states": [1, -1]}}.get(how, {})
    threaded, step = Threaded(plain, mesh), step_for(asked, labels=how != "config after")
    if how == "config after":
        for model in (plain, *threaded.models):
            model.config.output_hidden_states = True
    with KeepFloat64():
        expected = step(plain)
    assert len(expected) == (2 if how == "two layers" else plain.config.num_hidden_layers + 1)
    for states in threaded.run(step):
        for hidden, wanted in zip(states, expected, strict=True):
            torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-12)
    for parameter, gradient in threaded.gradients().items():
        wanted = plain.get_parameter(parameter).grad
        torch.testing.assert_close(
            gradient, torch.zeros_like(gradient) if wanted is None else wanted, rtol=0, atol=1e-12
        )


def outputs_that_have_no_rule(mesh):
    ids, answers = tokens(), []
    model = cuboid.shard(built(LLAMA, _attn_implementation="eager"), mode(mesh))
    answers.append(message(lambda: model(input_ids=ids, output_attentions=True)))
    model.config.output_attentions = True
    answers.append(message(lambda: model(input_ids=ids)))
    model.config.output_attentions = False
    answers.append(type(model(input_ids=ids, return_dict=False)).__name__)
    # It splits activations only at its first layer.
    bloom = BloomConfig(vocab_size=LLAMA.vocabulary, hidden_size=16, n_layer=2, n_head=4)
    late = cuboid.shard(AutoModelForCausalLM.from_config(bloom), mode(mesh))
    answers.append(message(lambda: late(input_ids=ids, output_hidden_states=True)))
    # All ranks have to ask for the same.
    is_first = cuboid.mesh_of(model).rank == 0
    answers.append(message(lambda: model(input_ids=ids, output_hidden_states=is_first)))
    return answers


def test_other_outputs_of_layers_are_refused_by_name(pool):
    for argument, config, kind, late, differing in pool.run(2, outputs_that_have_no_rule, "1x2x1"):
        assert argument == config
        assert argument.startswith("output_attentions has no rule on a mesh")
        assert kind == "tuple"
        assert "returns hidden_states, for which there is no rule on a mesh" in late
        assert "must be given the same micro-batch" in differing


def loss_of_a_pipeline(stages, **options):
    model = cuboid.shard(built(LLAMA, **options), mode("1x1x1", stages))
    pipeline = Pipeline(model)
    loss = pipeline.train(iter([{"input_ids": tokens(), "labels": tokens()}]), 1)
    return float(loss), float(sum(p.grad.double().square().sum() for p in model.parameters()))


def losses_whatever_the_config_asks_for(stages):
    usual = loss_of_a_pipeline(stages, _attn_implementation="eager")
    asked = ("output_hidden_states", "output_attentions")
    return [loss_of_a_pipeline(stages, _attn_implementation="eager", **{name: True}) == usual for name in asked]


def test_a_pipeline_trains_alike_whatever_its_config_asks_forwards_for(pool):
    for alike in pool.run(2, losses_whatever_the_config_asks_for, 2):
        assert alike == [True, True]
