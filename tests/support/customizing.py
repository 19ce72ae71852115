"""What scripts change on a model, as they do it: hooks, code, losses, heads, parametrizations, values."""

import contextlib
import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from transformers import AutoModelForCausalLM, LlamaForCausalLM, modeling_utils
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama as llama

from cuboid.verify import SmallModel

LLAMA = SmallModel("llama", heads=4, kv_heads=4)
ROWS, LENGTH = 4, 12


@dataclass(frozen=True)
class Change:
    """One change.

    Args:
        of: changes a model that is given, whole or sharded.
        code: a context in which code is replaced, for all models.
        cls: of the model, where the script has a class of its own.
        tied: whether the model's head is its embedding.
    """

    of: Callable[[Any], Any] | None = None
    code: Callable[[], AbstractContextManager] | None = None
    cls: type = LlamaForCausalLM
    tied: bool = False

    @contextlib.contextmanager
    def active(self):
        """The context in which its code is replaced."""
        with contextlib.nullcontext() if self.code is None else self.code():
            yield

    def apply(self, model):
        """Change a model; a stage that hasn't the module is left as it is, as scripts leave it that look first.

        Returns:
            The error of a stage that was left as it is; None if the model was changed.
        """
        if self.of is None:
            return None
        try:
            self.of(model)
        except (AttributeError, IndexError, KeyError) as error:
            if not hasattr(model, "staging"):
                raise
            return error
        return None


def small_config(*, tied=False):
    config = LLAMA.config()
    config.tie_word_embeddings = tied
    return config


def built(cls=LlamaForCausalLM, *, tied=False):
    torch.manual_seed(0)
    config = small_config(tied=tied)
    if cls is LlamaForCausalLM:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    return cls._from_config(config, dtype=torch.float64).train()


def batch():
    ids = torch.randint(0, LLAMA.vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Shifted(nn.Module):
    """Takes the place of an activation; mixes neighbouring tokens."""

    def forward(self, x):
        return functional.silu(x + functional.pad(x[:, :-1], (0, 0, 1, 0)))


class OtherLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class LowRank(nn.Module):
    """An adapter that a script puts around a projection by hand."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        made = {"dtype": base.weight.dtype, "bias": False}
        self.down, self.up = nn.Linear(base.in_features, rank, **made), nn.Linear(rank, base.out_features, **made)
        nn.init.constant_(self.down.weight, 0.1)
        nn.init.constant_(self.up.weight, 0.1)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def layer(model):
    return model.model.layers[0]


def replace(owner, name, make):
    setattr(owner, name, make(getattr(owner, name)))


def widened(linear):
    other = OtherLinear(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
    other.weight = linear.weight
    return other


def with_bias(linear):
    other = nn.Linear(linear.in_features, linear.out_features, bias=True, dtype=linear.weight.dtype)
    with torch.no_grad():
        other.weight.copy_(linear.weight)
        other.bias.copy_(torch.linspace(-1, 1, linear.out_features))
    return other


def own_forward(module):
    plain = type(module).forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: plain(self, *args, **kwargs) * 2, module)


def centred(_, __, out):
    return out - out.mean(-1, keepdim=True)


def lengthened(parameter):
    parameter.grad.mul_(parameter.grad.norm())


def doubled_first(_, grads, *__):
    return tuple(g if g is None else g * 2 for g in grads)


class Recorder:
    """A hook with a state, as tools for looking at activations have."""

    def __init__(self):
        self.seen = []

    def __call__(self, _, __, out):
        self.seen.append(out.mean() if isinstance(out, torch.Tensor) else None)

    def as_method(self, *arguments):
        self(*arguments)


#: Every kind of hook, on every kind of module.
HOOKS = {
    "forward hook of a projection": lambda m: layer(m).self_attn.q_proj.register_forward_hook(centred),
    "forward hook of a norm": lambda m: layer(m).input_layernorm.register_forward_hook(centred),
    "forward hook of the embedding": lambda m: m.model.embed_tokens.register_forward_hook(centred),
    "forward hook of the head": lambda m: m.lm_head.register_forward_hook(centred),
    "forward hook of a layer": lambda m: m.model.layers[1].register_forward_hook(centred),
    "forward hook with keywords": lambda m: layer(m).self_attn.register_forward_hook(
        lambda _, args, kwargs, out: (out[0] - out[0].mean(), *out[1:]), with_kwargs=True
    ),
    "forward pre-hook": lambda m: layer(m).mlp.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(),)),
    "forward pre-hook of a projection": lambda m: layer(m).mlp.up_proj.register_forward_pre_hook(
        lambda _, args: (args[0] * 2,), prepend=True
    ),
    "backward hook": lambda m: layer(m).mlp.down_proj.register_full_backward_hook(
        lambda _, grads, __: tuple(g * 2 for g in grads)
    ),
    "backward pre-hook": lambda m: layer(m).register_full_backward_pre_hook(
        lambda _, grads: tuple(g * 2 for g in grads)
    ),
    "gradient hook": lambda m: layer(m).mlp.up_proj.weight.register_hook(lambda g: g / g.norm()),
    "gradient hook of the embedding": lambda m: m.model.embed_tokens.weight.register_hook(
        lambda g: g * (torch.arange(len(g)) >= 10).unsqueeze(1)
    ),
    "hook of the accumulated gradient": lambda m: m.model.norm.weight.register_post_accumulate_grad_hook(lengthened),
}
MORE_HOOKS = {
    "hook by functools.partial": lambda m: layer(m).mlp.register_forward_hook(functools.partial(centred)),
    "hook that only looks": lambda m: layer(m).mlp.register_forward_hook(Recorder()),
    "hook that is a method": lambda m: m.model.norm.register_forward_hook(Recorder().as_method),
    "hook of the rotary embedding": lambda m: m.model.rotary_emb.register_forward_hook(
        lambda _, __, out: tuple(x * 0.5 for x in out)
    ),
    "hook of the base model": lambda m: m.model.register_forward_hook(Recorder()),
    "hook that is always called": lambda m: layer(m).mlp.act_fn.register_forward_hook(Recorder(), always_call=True),
    "old backward hook": lambda m: layer(m).mlp.register_backward_hook(lambda _, grads, __: grads),
    "gradient hook of a norm": lambda m: m.model.norm.weight.register_hook(lambda g: g * 2),
}


@contextlib.contextmanager
def global_hook(register, hook):
    """Hooks of all modules."""
    handle = getattr(global_hooks, register)(hook)
    try:
        yield
    finally:
        handle.remove()


def doubled_norms(module, _, out):
    return out * 2 if isinstance(module, llama.LlamaRMSNorm) or "Norm" in type(module).__name__ else None


HOOKS_OF_ALL_MODULES = {
    "forward hook of all modules": ("register_module_forward_hook", doubled_norms),
    "forward pre-hook of all modules": ("register_module_forward_pre_hook", lambda module, args: None),
    "backward hook of all modules": (
        "register_module_full_backward_hook",
        lambda module, grads, _: doubled_first(module, grads) if isinstance(module, llama.LlamaMLP) else None,
    ),
}

# --- code ------------------------------------------------------------------------------------------------------------


def liger_norm(self, x):
    """As Liger's patch of ``LlamaRMSNorm.forward``: the same formula, with an offset."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return x * scale * (1.0 + self.weight)


def interleaved_rotary(q, k, cos, sin, unsqueeze_dim=1):
    """Another convention of rotary embeddings: neighbouring features are pairs."""

    def rotated(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin


def gated_by_relu(self, x):
    return self.down_proj(functional.relu(self.gate_proj(x)) * self.up_proj(x))


def shifted_tokens(self, x):
    x = 0.5 * (x + functional.pad(x[:, :-1], (0, 0, 1, 0)))
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def scaled_layer(forward, factor):
    @functools.wraps(forward)
    def inner(self, hidden_states, *args, **kwargs):
        return forward(self, hidden_states, *args, **kwargs) * factor

    return inner


def centred_layer(forward):
    """Subtracts the mean over features, of which a rank of `hidden` has a part."""

    def inner(self, hidden_states, *args, **kwargs):
        out = forward(self, hidden_states, *args, **kwargs)
        return out - out.mean(-1, keepdim=True)

    return inner


def own_causal_forward(self, input_ids=None, labels=None, **kwargs):
    """As Liger's ``lce_forward``: the loss inside of the forward."""
    kwargs.pop("use_cache", None)
    hidden = self.model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
    logits = self.lm_head(hidden)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
    return llama.CausalLMOutputWithPast(loss=loss, logits=logits)


def scaled_attention(attention):
    def inner(module, query, key, value, mask, **kwargs):
        return attention(module, query * 2, key, value, mask, **kwargs)

    return inner


def passed_on(call):
    return lambda self, *args, **kwargs: call(self, *args, **kwargs)


def patched(owner, name, value):
    return lambda: mock.patch.object(owner, name, value)


CODE = {
    "norm of a kernel library": patched(llama.LlamaRMSNorm, "forward", liger_norm),
    "rotary embedding": patched(llama, "apply_rotary_pos_emb", interleaved_rotary),
    "block": patched(llama.LlamaMLP, "forward", gated_by_relu),
    "block that mixes tokens": patched(llama.LlamaMLP, "forward", shifted_tokens),
    "layer": patched(llama.LlamaDecoderLayer, "forward", scaled_layer(llama.LlamaDecoderLayer.forward, 0.5)),
    "layer that mixes features": patched(
        llama.LlamaDecoderLayer, "forward", centred_layer(llama.LlamaDecoderLayer.forward)
    ),
    "forward of the model": patched(LlamaForCausalLM, "forward", own_causal_forward),
    "activation of torch": patched(functional, "silu", lambda x, inplace=False: functional.gelu(x)),
    "attention function": lambda: mock.patch.dict(
        modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping,
        {"sdpa": scaled_attention(modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"])},
    ),
    "linear layers of torch": patched(
        nn.Linear, "forward", lambda self, x: functional.linear(x, self.weight * 2, self.bias)
    ),
    "call of all modules": patched(nn.Module, "__call__", passed_on(nn.Module.__call__)),
}


class ScaledMLP(llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x) * 0.5


class ShiftedMLP(llama.LlamaMLP):
    def forward(self, x):
        return shifted_tokens(self, x)


class WithOwnBlocks(LlamaForCausalLM):
    """A subclass of a certified class, whose blocks are the script's."""

    block = ScaledMLP

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = self.block(config)
        self.post_init()


class WithShiftedBlocks(WithOwnBlocks):
    block = ShiftedMLP


class WithScaledLogits(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        logits = output.logits * 0.5
        return llama.CausalLMOutputWithPast(
            loss=self.loss_function(logits, labels, vocab_size=self.config.vocab_size), logits=logits
        )


# --- losses ----------------------------------------------------------------------------------------------------------


def weighted(logits, labels, vocab_size, num_items_in_batch=None, power=1.0, **_):
    weights = torch.linspace(0.1, 2.0, vocab_size, dtype=logits.dtype) ** power
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=weights)


def focal(logits, labels, vocab_size, **_):
    losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


class LossModule(nn.Module):
    def forward(self, logits, labels, vocab_size, **_):
        return weighted(logits, labels, vocab_size, power=2.0)


class LossObject:
    def __call__(self, logits, labels, vocab_size, **_):
        return focal(logits, labels, vocab_size) * 3


def set_loss(function):
    return lambda model: setattr(model, "loss_function", function)


def scaled_ce(ce):
    return functools.wraps(ce)(lambda *args, **kwargs: ce(*args, **kwargs) * 2)


LOSSES = {
    "class weights": Change(set_loss(weighted)),
    "focal": Change(set_loss(focal)),
    "functools.partial": Change(set_loss(functools.partial(weighted, power=3.0))),
    "a module": Change(set_loss(LossModule())),
    "an object": Change(set_loss(LossObject())),
    "torch's own with smoothing": Change(
        set_loss(
            lambda logits, labels, **_: nn.CrossEntropyLoss(label_smoothing=0.2)(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        )
    ),
    "of another task": Change(lambda m: setattr(m, "loss_type", "ForMaskedLM")),
    "in the table": Change(code=lambda: mock.patch.dict(loss_utils.LOSS_MAPPING, {"ForCausalLM": focal})),
    "of the class": Change(
        code=lambda: mock.patch.object(LlamaForCausalLM, "loss_function", staticmethod(focal), create=True)
    ),
    "torch's cross-entropy": Change(code=patched(functional, "cross_entropy", scaled_ce(functional.cross_entropy))),
    "the part that losses share": Change(
        code=patched(
            loss_utils,
            "fixed_cross_entropy",
            lambda source, target, *_, **__: functional.cross_entropy(source, target, ignore_index=-100).square(),
        )
    ),
}

# --- heads -----------------------------------------------------------------------------------------------------------


def untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone() * 0.5)


HEADS = {
    "with a bias": Change(lambda m: replace(m, "lm_head", with_bias)),
    "with a bias, by its setter": Change(lambda m: m.set_output_embeddings(with_bias(m.lm_head))),
    "of several modules": Change(lambda m: replace(m, "lm_head", lambda old: nn.Sequential(old, nn.Identity()))),
    "of a subclass": Change(lambda m: replace(m, "lm_head", widened)),
    "with an adapter": Change(lambda m: replace(m, "lm_head", LowRank)),
    "tied": Change(lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight)),
    "untied": Change(untied, tied=True),
    "with more rows": Change(
        lambda m: replace(m, "lm_head", lambda old: nn.Linear(old.in_features, 200, bias=False, dtype=torch.float64))
    ),
    "resized": Change(lambda m: m.resize_token_embeddings(LLAMA.vocabulary + 9, mean_resizing=False)),
    "its own forward": Change(lambda m: own_forward(m.lm_head)),
    "frozen": Change(lambda m: m.lm_head.weight.requires_grad_(False)),
}

# --- parametrizations and modules ------------------------------------------------------------------------------------

PARAMETRIZATIONS = {
    "of a projection": lambda m: parametrize.register_parametrization(layer(m).mlp.up_proj, "weight", Halved()),
    "of the embedding": lambda m: parametrize.register_parametrization(m.model.embed_tokens, "weight", Halved()),
    "of the head": lambda m: parametrize.register_parametrization(m.lm_head, "weight", Halved()),
    "of a norm": lambda m: parametrize.register_parametrization(m.model.norm, "weight", Halved()),
    "weight_norm, by parametrization": lambda m: parametrizations.weight_norm(layer(m).mlp.up_proj),
    "orthogonal": lambda m: parametrizations.orthogonal(layer(m).self_attn.o_proj),
    "weight_norm": lambda m: weight_norm(layer(m).mlp.up_proj),
    "spectral_norm": lambda m: nn.utils.spectral_norm(layer(m).mlp.down_proj),
    "pruning": lambda m: prune.l1_unstructured(layer(m).mlp.up_proj, "weight", 0.3),
    "pruning of the head": lambda m: prune.random_unstructured(m.lm_head, "weight", 0.3),
}
INSTANCES = {
    "forward of a block": lambda m: own_forward(layer(m).mlp),
    "forward of a projection": lambda m: own_forward(layer(m).mlp.up_proj),
    "forward of a norm": lambda m: own_forward(layer(m).post_attention_layernorm),
    "forward of the embedding": lambda m: own_forward(m.model.embed_tokens),
    "forward of the head": lambda m: own_forward(m.lm_head),
    "forward of a layer": lambda m: own_forward(layer(m)),
    "forward of the rotary embedding": lambda m: setattr(
        m.model.rotary_emb,
        "forward",
        functools.partial(scaled_cosines, type(m.model.rotary_emb).forward, m.model.rotary_emb),
    ),
    "a module without parameters": lambda m: setattr(layer(m).mlp, "act_fn", Shifted()),
    "a subclass of a projection": lambda m: replace(layer(m).mlp, "up_proj", widened),
    "an adapter around a projection": lambda m: replace(layer(m).self_attn, "q_proj", LowRank),
    "another class of a block": lambda m: setattr(layer(m).mlp, "__class__", ScaledMLP),
    "another block": lambda m: replace(layer(m), "mlp", block_like),
    "a block with another bias": lambda m: replace(layer(m).mlp, "up_proj", with_bias),
    "a layer less": lambda m: setattr(m.model, "layers", m.model.layers[:1]),
    "a shared layer": lambda m: m.model.layers.__setitem__(1, layer(m)),
    "a tied block": lambda m: setattr(m.model.layers[1].mlp.up_proj, "weight", layer(m).mlp.up_proj.weight),
    "a module more": lambda m: layer(m).add_module("adapter", nn.Linear(4, 4, dtype=torch.float64)),
    "layers in another order": lambda m: setattr(m.model, "layers", nn.ModuleList(reversed(list(m.model.layers)))),
    "an option of a block": lambda m: setattr(layer(m).self_attn, "scaling", 0.9),
    "epsilon of a norm": lambda m: setattr(layer(m).input_layernorm, "variance_epsilon", 0.5),
    "causality": lambda m: setattr(layer(m).self_attn, "is_causal", False),
    "activation by another name": lambda m: setattr(layer(m).mlp, "act_fn", nn.GELU()),
    "activation by a function": lambda m: replace_plainly(layer(m).mlp, "act_fn", functional.relu),
}


def scaled_cosines(module, *args, **kwargs):
    return tuple(x * 0.5 for x in type(module).forward(module, *args, **kwargs))


def replace_plainly(module, name, function):
    del module._modules[name]
    module.__dict__[name] = function


def block_like(old):
    torch.manual_seed(5)
    return llama.LlamaMLP(small_config()).double()


# --- values ----------------------------------------------------------------------------------------------------------


def each_parameter(change):
    def of(model):
        for parameter in model.parameters():
            change(parameter)

    return of


def swapped(parameter):
    parameter.data = parameter.data * 0.5


@torch.no_grad()
def copied(parameter):
    parameter.copy_(parameter * 0.5)


@torch.no_grad()
def constant(module):
    """What scripts give to ``model.apply``."""
    if isinstance(module, nn.Linear):
        module.weight.fill_(0.01)


@torch.no_grad()
def drawn(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.05, generator=torch.Generator().manual_seed(3))


def cut(parameter):
    parameter.data = parameter.data[: max(1, parameter.shape[0] - 1)].clone()


def vector(model):
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(flat * 0.5, model.parameters())


def fresh_parameters(model):
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach() * 0.5))


def scaled_frequencies(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


VALUES = {
    "another tensor of the same shape": Change(each_parameter(swapped)),
    "in place": Change(each_parameter(lambda p: p.data.mul_(0.5))),
    "copy_": Change(each_parameter(copied)),
    "detached": Change(each_parameter(lambda p: p.detach().mul_(0.5))),
    "a tensor of another shape": Change(lambda m: cut(layer(m).mlp.up_proj.weight)),
    "another shape of the head": Change(lambda m: cut(m.lm_head.weight)),
    "a whole tensor": Change(
        lambda m: setattr(
            layer(m).mlp.up_proj.weight, "data", built().model.layers[0].mlp.up_proj.weight.detach().clone() * 0.5
        )
    ),
    "apply, a constant": Change(lambda m: m.apply(constant)),
    "apply, drawn": Change(lambda m: m.apply(drawn)),
    "a vector": Change(vector),
    "new parameters": Change(fresh_parameters),
    "frozen": Change(lambda m: m.model.embed_tokens.weight.requires_grad_(False)),
    "a buffer": Change(scaled_frequencies),
    "a buffer in place": Change(lambda m: m.model.rotary_emb.inv_freq.mul_(0.5)),
    "a buffer by data": Change(
        lambda m: setattr(m.model.rotary_emb.inv_freq, "data", m.model.rotary_emb.inv_freq * 0.5)
    ),
    "a state dict": Change(lambda m: m.load_state_dict({name: x * 0.5 for name, x in built().state_dict().items()})),
}


def all_changes():
    """Every change by kind and name."""
    global_ones = {
        name: Change(code=functools.partial(global_hook, register, hook))
        for name, (register, hook) in HOOKS_OF_ALL_MODULES.items()
    }
    classes = {
        "a subclass": Change(cls=WithOwnBlocks),
        "a subclass that mixes tokens": Change(cls=WithShiftedBlocks),
        "a subclass with other logits": Change(cls=WithScaledLogits),
    }
    by_kind = {
        "hook": {name: Change(of) for name, of in (HOOKS | MORE_HOOKS).items()} | global_ones,
        "class": {name: Change(code=code) for name, code in CODE.items()} | classes,
        "instance": {name: Change(of) for name, of in INSTANCES.items()},
        "loss": LOSSES,
        "head": HEADS,
        "parametrization": {name: Change(of) for name, of in PARAMETRIZATIONS.items()},
        "values": VALUES,
    }
    return {f"{kind}: {name}": change for kind, changes in by_kind.items() for name, change in changes.items()}


#: What a refusal must name of a kind of change, as a regular expression.
NAMED = {
    "hook": r"hook \(",
    "class": r"its code was replaced: |isn't right on a mesh|segments|stages|customizing\.|can't cut With",
    "instance": r"layers|embed_tokens|norm|lm_head|rotary_emb",
    "loss": "loss|cross_entropy",
    "head": "lm_head|token_embeddings|output_embeddings|vocab_size",
    "parametrization": "up_proj|down_proj|o_proj|embed_tokens|norm|lm_head",
    "values": r"up_proj|lm_head|embed_tokens|load_state_dict|model\.apply",
}
