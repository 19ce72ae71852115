"""What a script changes on a model, before or after it is sharded: as in the whole model, or refused."""

import contextlib
import copy
import functools
import io
import math
import pickle

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
)
from transformers.loss import loss_utils

import cuboid
from cuboid.errors import UnsupportedModelError
from cuboid.models.architectures.certificate import MeshVerdict
from cuboid.models.certification.float64 import KeepFloat64
from cuboid.models.sharded.sharded_model import ShardedModel
from cuboid.models.stages.placeholders import PlaceholderModule
from cuboid.tensor3d.sharding.sharded_param import disable_reshard_after_forward
from support.threaded import Threaded, assert_as_alone

VOCABULARY = 67
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MESHES = ["2x1x1", "1x2x1", "1x1x2"]


def causal(architecture="llama", **options):
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, **options}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes), dtype=torch.float64).train()


def uneven_batch():
    """Three rows of 13 tokens, which no mesh of two ranks divides, with padding and positions without a label."""
    ids = torch.randint(3, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step_of(batch, change=lambda model: None, **more):
    def step(model):
        change(model)
        loss = model(**batch, use_cache=False, **more).loss
        loss.backward()
        return loss.detach()

    return step


# --- loss functions of one's own -----------------------------------------------------------------------------------


def weighted(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """Class weights: the mean's divisor is the sum of the labels' weights, so it isn't one of parts."""
    weights = torch.linspace(0.1, 2.0, vocab_size, dtype=logits.dtype)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=weights, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def focal_of_rows(logits, labels, vocab_size, strength=2.0, **_):
    """A mean over rows of means over the row's labels."""
    rows = []
    for row_logits, targets in zip(logits[:, :-1], labels[:, 1:], strict=True):
        losses = functional.cross_entropy(row_logits, targets, reduction="none", ignore_index=-100)
        rows.append(((1 - torch.exp(-losses)) ** strength * losses)[targets != -100].mean())
    return torch.stack(rows).mean()


def unshifted(logits, labels, config=None, **_):
    """For models whose labels are for the same position; also of classifiers."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.3).square()


def set_loss(function):
    def change(model):
        model.loss_function = function

    return change


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", [*MESHES, "2x3x2"])
@pytest.mark.parametrize("function", [weighted, focal_of_rows])
def test_a_loss_function_of_ones_own_is_as_in_the_plain_model(mesh, function):
    options = {"num_attention_heads": 6, "hidden_size": 48} if mesh == "2x3x2" else {}
    model = causal(**options)
    assert_as_alone(model, mesh, step_of(uneven_batch(), set_loss(function)))
    model.loss_function = function
    threaded = assert_as_alone(model, mesh, step_of(uneven_batch()))
    assert threaded.models[0].loss_function is function
    # Arguments for the loss, and taking it back.
    more = {"strength": 1.0, "num_items_in_batch": torch.tensor(40)}
    assert_as_alone(model, mesh, step_of(uneven_batch(), **more))
    assert_as_alone(
        model, mesh, step_of(uneven_batch(), lambda rank_model: vars(rank_model).pop("_loss_function", None))
    )


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("mesh", ["2x1x1", "1x2x2"])
@pytest.mark.parametrize("options", [{"architecture": "gemma2", "head_dim": 8}, {"tie_word_embeddings": True}])
def test_what_a_model_does_with_logits_precedes_a_loss_of_ones_own(mesh, options):
    assert_as_alone(causal(**options), mesh, step_of(uneven_batch(), set_loss(focal_of_rows)))


def replace_loss(monkeypatch, where):
    """Replace a model's loss by another way than ``model.loss_function``; returns a change of each model."""
    if where == "class":
        monkeypatch.setattr(LlamaForCausalLM, "loss_function", staticmethod(weighted), raising=False)
    elif where == "every class":
        monkeypatch.setattr(PreTrainedModel, "loss_function", property(lambda _: weighted))
    elif where == "mapping":
        monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", weighted)
    elif where == "type":
        return lambda model: setattr(model, "loss_type", "ForMaskedLM")
    elif where == "part":

        def fixed_cross_entropy(source, target, *_, **__):
            return functional.cross_entropy(source, target, ignore_index=-100).square()

        monkeypatch.setattr(loss_utils, "fixed_cross_entropy", fixed_cross_entropy)
    elif where == "torch":
        plain = functional.cross_entropy
        smoothed = functools.wraps(plain)(lambda *args, **keys: plain(*args, **{**keys, "label_smoothing": 0.1}))
        monkeypatch.setattr(functional, "cross_entropy", smoothed)
    return lambda _: None


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize("where", ["class", "every class", "mapping", "type", "part", "torch"])
def test_a_loss_replaced_elsewhere_is_as_in_the_plain_model(monkeypatch, where):
    change = replace_loss(monkeypatch, where)
    assert_as_alone(causal(), "2x2x1", step_of(uneven_batch(), change))
    model = causal()
    change(model)
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(cuboid.UnsupportedModelError, match=r"loss_function is .*Leave the pipeline section out"):
        cuboid.shard(model, {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 2}})
    assert [name for name, _ in model.named_parameters()] == before


def test_a_loss_set_on_the_class_of_a_sharded_model_is_refused():
    threaded = Threaded(causal(), "1x2x1")
    cls = type(threaded.models[0])
    cls.loss_function = staticmethod(weighted)
    try:
        with pytest.raises(cuboid.UnsupportedModelError, match=r"set it on the model, model.loss_function"):
            threaded.run(step_of(uneven_batch()))
    finally:
        del cls.loss_function


def test_ranks_with_different_loss_functions_are_told_apart():
    threaded = Threaded(causal(), "1x2x1")
    threaded.models[0].loss_function = weighted
    with pytest.raises(cuboid.CuboidError, match="must be given the same micro-batch"):
        threaded.run(step_of(uneven_batch()))


def masked(config_class, cls):
    torch.manual_seed(0)
    config = config_class(**SIZES, num_hidden_layers=2, max_position_embeddings=32, pad_token_id=0)
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        setattr(config, name, 1)
    return cls(config).double().train()


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize(
    ("model_of", "verdict"),
    [
        (lambda: masked(ModernBertConfig, ModernBertForMaskedLM), MeshVerdict()),
        # Computes its loss without a call of ``loss_function``, so it ignores one.
        (lambda: masked(BertConfig, BertForMaskedLM).eval(), MeshVerdict(inputs="ids", counts_items=False)),
    ],
)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_loss_of_ones_own_for_labels_of_the_same_position(mesh, model_of, verdict):
    def step(model):
        model.loss_function = unshifted
        loss = model(**uneven_batch()).loss
        loss.backward()
        return loss.detach()

    assert_as_alone(model_of(), mesh, step, verdict)


@pytest.mark.sample(2, ci="others")
@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_loss_of_ones_own_in_a_classifier(mesh, auto):
    torch.manual_seed(0)
    sizes = {
        **SIZES,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_labels": 5,
        "pad_token_id": 0,
        "classifier_dropout": 0.0,
    }
    config = AutoConfig.for_model("llama", **sizes)
    model, batch = auto.from_config(config, dtype=torch.float64).train(), uneven_batch()
    has_rows = auto is AutoModelForSequenceClassification
    batch["labels"] = torch.tensor([1, 4, 2]) if has_rows else batch["labels"].clamp(max=4)

    def own(logits, labels, config, pooled_logits=None):
        return unshifted(logits if pooled_logits is None else pooled_logits, labels)

    assert_as_alone(model, mesh, step_of(batch, set_loss(own)), MeshVerdict(head="labels"))


def test_a_stage_takes_no_loss_function():
    stage = cuboid.shard(causal(), {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 1}})
    with pytest.raises(cuboid.UnsupportedModelError, match=r"loss_function is .*\.weighted, but a pipeline"):
        stage.loss_function = weighted
    pipeline, batch = cuboid.Pipeline(stage), {"input_ids": torch.arange(12).view(2, 6)}
    batch["labels"] = batch["input_ids"]
    pipeline.train(iter([batch]), 1)
    with pytest.MonkeyPatch.context() as patch:
        replace_loss(patch, "mapping")
        for call in (pipeline.train, pipeline.evaluate):
            with pytest.raises(cuboid.UnsupportedModelError, match=r"\.weighted, but a pipeline"):
                call(iter([batch]), 1)


class CallsLossFunction(BartForConditionalGeneration):
    """An encoder-decoder that calls ``loss_function``, as none of those with rules in transformers does."""

    def forward(self, input_ids=None, decoder_input_ids=None, labels=None, **keys):
        output = super().forward(input_ids, decoder_input_ids=decoder_input_ids, labels=labels, **keys)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, vocab_size=self.config.vocab_size)
        return output


@pytest.mark.sample(1, ci="others")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_loss_of_ones_own_in_an_encoder_decoder(mesh):
    torch.manual_seed(0)
    heads = {f"{part}_{name}": 4 for part in ("encoder", "decoder") for name in ("attention_heads",)}
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, **heads}
    config = BartConfig(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=32, dropout=0.0, **sizes)
    model = CallsLossFunction(config).double().train()
    model.final_logits_bias.normal_()
    batch = {**uneven_batch(), "labels": uneven_batch()["labels"][:, :7].clamp(min=3)}
    batch["decoder_input_ids"] = batch["labels"].roll(1, 1)
    assert_as_alone(model, mesh, step_of(batch, set_loss(unshifted)), MeshVerdict(inputs="only ids", splits_late=True))


# --- what is added to a loss from parameters themselves ------------------------------------------------------------


def squares(name, shard):
    return 0.01 * shard.square().sum()


def exponentials_of_biased(name, shard):
    """Of some parameters; what pads a shard would count, too."""
    return (shard - 0.5).abs().exp().sum() if "q_proj" in name or "embed" in name else None


def summed(model, function):
    if isinstance(model, ShardedModel):
        return cuboid.sum_over_shards(model, function)
    values = [function(name, parameter) for name, parameter in model.named_parameters()]
    return sum(value for value in values if value is not None)


@pytest.mark.sample(4, ci="others")
@pytest.mark.parametrize("mesh", [*MESHES, "2x3x2"])
@pytest.mark.parametrize("penalty", [squares, exponentials_of_biased])
@pytest.mark.parametrize("root", [False, True])
def test_a_penalty_is_that_of_whole_parameters(mesh, penalty, root):
    def step(model):
        value = summed(model, penalty)
        loss = model(**uneven_batch()).loss + (value.sqrt() if root else value)
        loss.backward()
        return loss.detach()

    assert_as_alone(causal(num_attention_heads=6, hidden_size=48, tie_word_embeddings=root), mesh, step)


@pytest.mark.parametrize("of", ["some", "all", "the head", "none"])
def test_a_loss_that_is_computed_from_shards_is_refused(of):
    threaded = Threaded(causal(), "1x2x2")

    def step(model):
        loss = model(**uneven_batch()).loss
        if of in ("some", "all"):
            parameters = list(model.parameters())
            loss = loss + sum(map(torch.linalg.vector_norm, parameters if of == "all" else parameters[3:4]))
        if of == "the head":
            states = model.base_model(input_ids=uneven_batch()["input_ids"]).last_hidden_state
            loss = loss + states.mean() * model.lm_head.weight.mean()
        loss.backward()

    said = {
        "some": r"computed from model\.layers\.0\.self_attn\.v_proj\.weight itself, of which this rank has a shard",
        "all": r"computed from model\.embed_tokens\.weight and 20 others itself",
        "the head": r"computed from lm_head\.weight itself.* by cuboid\.sum_over_shards\(model, function\)",
    }
    with contextlib.ExitStack() as stack:
        if of in said:
            stack.enter_context(pytest.raises(cuboid.UnsupportedModelError, match=said[of]))
        threaded.run(step)


def test_a_model_that_is_whole_has_penalties_as_it_is():
    def step(model):
        loss = model(**uneven_batch()).loss + sum(0.01 * x.square().sum() for x in model.parameters())
        loss.backward()
        return loss.detach()

    assert_as_alone(causal(), "1x1x1", step)


# --- gradients of gradients ----------------------------------------------------------------------------------------


@pytest.mark.sample(3, ci="others")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("of", ["loss", "logits", "last_hidden_state"])
def test_a_gradient_penalty_is_refused_before_the_backward(mesh, of):
    ids = uneven_batch()["input_ids"]

    def step(model):
        part = model.base_model if of == "last_hidden_state" else model
        output = part(input_ids=ids, **({"labels": ids} if of == "loss" else {}))
        loss = output[of].square().mean()
        with pytest.raises(cuboid.UnsupportedModelError, match=r"create_graph=True: .* plain model on one rank"):
            torch.autograd.grad(loss, list(part.parameters()), create_graph=True, allow_unused=True)
        # The usual kind is as before.
        part(input_ids=ids)[0].square().mean().backward()

    Threaded(causal(), mesh).run(step)


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "max_norm", "sparse"])
def test_an_option_of_a_table_that_its_shards_have_not_is_refused(option):
    def step(model):
        setattr(model.model.embed_tokens, option, 0.5 if option == "max_norm" else True)
        with pytest.raises(cuboid.UnsupportedModelError, match=f"embed_tokens.{option} was set after the model was"):
            model(**uneven_batch())

    Threaded(causal(), "1x2x1").run(step)


# --- torch.func ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", [*MESHES, "2x2x2"])
@pytest.mark.parametrize("architecture", ["llama", "olmoe"])
def test_functional_call_takes_other_tensors_in_the_places_of_shards(mesh, architecture):
    def step(model):
        call = functools.partial(torch.func.functional_call, kwargs={**uneven_batch(), "use_cache": False})
        tensors = {name: 0.9 * parameter.detach() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            loss = call(model, tensors).loss
        if isinstance(model, ShardedModel):
            # Backward would unshard the parameters, which are in their places again by then.
            with pytest.raises(cuboid.UnsupportedModelError, match=r"is a tensor in the place .* torch\.no_grad"):
                call(model, tensors)
        (loss * call(model, dict(model.named_parameters())).loss).backward()
        return loss

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    assert_as_alone(causal(architecture, **({} if architecture == "llama" else experts)), mesh, step)


def gradient_of_a_norm(model, batch):
    def loss(weight):
        return torch.func.functional_call(model, {"model.norm.weight": weight}, kwargs=batch).loss

    return torch.func.grad(loss)(model.model.norm.weight.detach())


def each_row(model, batch):
    return torch.func.vmap(lambda ids: model.model(input_ids=ids[None]).last_hidden_state)(batch["input_ids"])


def forward_mode(model, batch):
    with torch.autograd.forward_ad.dual_level():
        return model(**batch).loss


@pytest.mark.parametrize("transform", [gradient_of_a_norm, each_row, forward_mode])
def test_transforms_of_torch_func_are_refused(transform):
    def step(model):
        with pytest.raises(cuboid.UnsupportedModelError, match=r"transforms .* can't run a sharded Llama"):
            transform(model, uneven_batch())
        model(**uneven_batch()).loss.backward()

    Threaded(causal(), "1x2x1").run(step)


# --- values changed by ``.data`` -----------------------------------------------------------------------------------


def subtract(parameter):
    parameter.data -= 0.1 * parameter.grad


def swap(parameter):
    parameter.data = parameter.data - 0.1 * parameter.grad


def add_detached(parameter):
    parameter.detach().add_(parameter.grad, alpha=-0.1)


@pytest.mark.sample(4, ci="others")
@pytest.mark.parametrize("mesh", ["2x1x1", "1x2x2"])
@pytest.mark.parametrize("change", [subtract, swap, add_detached])
@pytest.mark.parametrize("kept", [False, True])
def test_values_changed_by_data_are_those_of_the_next_forward(mesh, change, kept):
    batch = uneven_batch()

    def losses(model):
        if kept and isinstance(model, ShardedModel):
            disable_reshard_after_forward(model)
        values = []
        for _ in range(2):
            model(**batch).loss.backward()
            # Its graph keeps unsharded weights while they change.
            before = model(**batch).loss
            for parameter in model.parameters():
                change(parameter)
            values += [before.item(), model(**batch).loss.item()]
            model.zero_grad()
        return torch.tensor(values, dtype=torch.float64)

    with KeepFloat64():
        wanted = losses(causal())
    for values in Threaded(causal(), mesh).run(losses):
        torch.testing.assert_close(values, wanted, rtol=1e-9, atol=1e-9)


# --- new values, and pickles ----------------------------------------------------------------------------------------

DRAWS = {
    "init_weights": (lambda m: m.init_weights(), r"init_weights.*normal_"),
    "apply of a layer": (lambda m: m.model.layers[1].apply(m._init_weights), r"apply\(PreTrainedModel._init_weights\)"),
    "init": (lambda m: torch.nn.init.xavier_uniform_(m.lm_head.weight), r"init.xavier_uniform_ .* for lm_head.weight"),
    "init of rows": (lambda m: torch.nn.init.normal_(m.model.embed_tokens.weight.data[-1:]), r"for model.embed_tokens"),
    "reset_parameters": (lambda m: m.model.layers[0].mlp.up_proj.reset_parameters(), r"layers.0.mlp.up_proj.weight"),
}


@pytest.mark.parametrize(("draw", "said"), DRAWS.values(), ids=DRAWS)
def test_new_values_for_shards_are_refused(draw, said):
    with pytest.raises(cuboid.UnsupportedModelError, match=f"{said}.*the same ones on all ranks"):
        Threaded(causal(), "1x2x1").run(draw)


def test_other_values_and_modules_are_not():
    def step(model):
        torch.nn.init.zeros_(model.lm_head.weight)
        torch.nn.init.normal_(torch.nn.Linear(3, 4).weight)
        for shard in model.model.layers[0].apply(torch.nn.Module.train).parameters():
            assert shard.any()
        return model(**uneven_batch()).loss

    for loss in Threaded(causal(), "1x1x2").run(step):
        assert float(loss) == pytest.approx(math.log(VOCABULARY))


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.base_model])
def test_a_pickle_of_a_sharded_model_is_refused(part):
    (model, _) = Threaded(causal(), "1x2x1").models
    with pytest.raises(cuboid.CuboidError, match=r"can't be pickled.*cuboid.save_pretrained"):
        torch.save(part(model), io.BytesIO())
    with pytest.raises(cuboid.CuboidError, match="can't be pickled"):
        pickle.dumps([part(model)])
    assert type(copy.deepcopy(part(model))) is type(part(model))


def test_a_head_is_whole_before_the_first_forward(threads):
    def weight():
        model = causal()
        full_weight = model.lm_head.weight.detach().clone()
        sharded = cuboid.shard(model, {"tensor_parallel": {"mode": "3d_tensor", "mesh": {"sequence": 2}}})
        torch.testing.assert_close(sharded.get_output_embeddings().weight, full_weight)

    threads.run(2, weight)


def test_what_decides_which_layers_run_is_refused_on_stages():
    config = {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 2}}
    stage = cuboid.shard(causal(), config)
    stage.config.num_hidden_layers = 1
    with pytest.raises(UnsupportedModelError, match=r"config.num_hidden_layers was set to 1 after .* have 2 layers"):
        cuboid.Pipeline(stage).train(iter([uneven_batch()]), 1)
    stage.config.num_hidden_layers, stage.model.layerdrop = 2, 0.5
    with pytest.raises(UnsupportedModelError, match=r"model\.layerdrop was set to 0.5"):
        cuboid.Pipeline(stage).train(iter([uneven_batch()]), 1)


def test_what_another_stage_has_is_said_to_be_there():
    module = PlaceholderModule(torch.float64)
    assert not hasattr(module, "word_embeddings")
    with pytest.raises(AttributeError, match="'word_embeddings' belongs to a module that another stage has"):
        module.word_embeddings.weight  # noqa: B018


def test_a_head_is_tied_and_replaced_before_a_model_is_sharded():
    stage = cuboid.shard(causal(), {"pipeline": {"engine": "seq1f1b", "stages": 1, "segments": 2}})
    stage.tie_weights()
    stage.config.tie_word_embeddings = True
    with pytest.raises(UnsupportedModelError, match=r"tie_weights: config\.tie_word_embeddings was set after"):
        stage.tie_weights()

    def replace(model):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())

    with pytest.raises(cuboid.CuboidError, match=r"get_output_embeddings\(\).weight is the head's whole tensor"):
        Threaded(causal(), "1x2x1").run(replace)


def test_what_is_no_tensor_is_named():
    batch = {**uneven_batch(), "attention_mask": {"full_attention": torch.ones(3, 13)}}
    with pytest.raises(cuboid.CuboidError, match="attention_mask is a dict; give a tensor"):
        Threaded(causal(), "1x2x1").run(lambda rank_model: rank_model(**batch))
