"""Small random checkpoints of any model type, so that comparisons need no download."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cuboid.errors import CuboidError, MeshError, UnsupportedModelError
from cuboid.models.architectures.small_model_names import ARCHITECTURES, Architecture, Rope
from cuboid.models.certification.default_models import default_config, default_model
from cuboid.models.certification.layer_kinds import on_meta, small_with_all_kinds
from cuboid.models.certification.sides import quiet_cpu, random_model
from cuboid.models.certification.small_config import DEFAULT_SIZES, KEYS, Sizes, layer_count, sizes_by_key
from cuboid.models.certification.trials import ATTEMPTS
from cuboid.models.kinds.probe_rows import CannotProbe

_ROPE_ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3", "mistral", "mixtral")
#: Larger than usual, so that attention scores, gates and norms are outside the range where they are nearly linear.
_WEIGHT_STD, _VECTOR_STD = 0.1, 0.2
_GEMMA_WINDOW = 12
#: LUKE's table of entities, for example, is as large as ever.
_MOST_PARAMETERS = 30_000_000
#: Features of DeepSeek's latents, and of the part of each head that rotary embeddings turn.
_LATENT, _LATENT_ROPE = 24, 4
#: The sizes of small models of :data:`ARCHITECTURES`. The vocabulary is prime, so that no mesh divides it.
_SIZES = Sizes(vocabulary=131, heads=8, kv_heads=2, head_dim=8, positions=256)
#: By a field of :class:`SmallModel`, that of :class:`Sizes`.
_SIZE_FIELDS = {
    **{name: name for name in ("vocabulary", "heads", "kv_heads", "head_dim", "positions")},
    "sliding_window": "window",
}
_BIASES = ("attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias", "use_qkv_bias", "add_bias_linear")
_TIED, _ROPE, _USES_WINDOW = "tie_word_embeddings", "rope_parameters", "use_sliding_window"
_PAD, _ROUTERS, _ROUTER_LOSS = "pad_token_id", "output_router_logits", "router_aux_loss_coef"


@dataclass(frozen=True)
class SmallModel:
    """Sizes and options of a small random model.

    Of an architecture that isn't one of :data:`ARCHITECTURES`, it is the model with which certification tests the type:
    with tiny sizes, all kinds of layers, and at least ``layers`` of them. What its config has no key for is refused.

    Args:
        architecture: one of :data:`ARCHITECTURES`, or the name of a model type or a model's class in transformers.
        heads: query heads; 0 for the default, 8, or 4 if the architecture isn't one of those.
        kv_heads: key and value heads; GPT-2, GPT-NeoX and DeepSeek 3 always have as many as query heads. 0 for the
            default, 2, or else as many as query heads, or half of them, as in the real model.
        head_dim: even, as rotary embeddings need; 0 for the default, 8 or 16. The hidden size is ``heads * head_dim``.
        layers: decoder layers.
        vocabulary: number of tokens; 0 for the default, 131 or 61, which no mesh divides.
        tied: whether the output embedding is the input embedding; None for the architecture's default.
        bias: whether attention and MLP have biases, if the architecture has that option.
        sliding_window: attention window in tokens; in every layer of Mistral and Mixtral (None for no window), in every
            other one of Gemma 2 and 3 (None for 12 tokens); None for the default of other architectures.
        positions: longest sequence: the number of learned positions, or where some rotary embeddings rescale; 0 for the
            default, 256 or 64.
        rope: scaling of rotary embeddings; None for the architecture's default.
        pad_token: its embedding gets no gradient from the input in some architectures; None for no pad token. The
            default, 1, is for those that have one.
        router_loss: coefficient of the routers' load balancing loss, where there are routers; 0 for the default, which
            is none in :data:`ARCHITECTURES`.
        seed: of the weights.
    """

    architecture: str
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    layers: int = 2
    vocabulary: int = 0
    tied: bool | None = None
    bias: bool = False
    sliding_window: int | None = None
    positions: int = 0
    rope: Rope | None = None
    pad_token: int | None = 1
    router_loss: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.is_preset:
            for name in ("heads", "kv_heads", "head_dim", "vocabulary", "positions"):
                object.__setattr__(self, name, getattr(self, name) or getattr(_SIZES, name))

    @property
    def is_preset(self) -> bool:
        """Whether the architecture is one of :data:`ARCHITECTURES`, with sizes and kinds of layers of its own."""
        return self.architecture in ARCHITECTURES

    @classmethod
    def fitting(cls, architecture: str, ranks: int, **options: Any) -> SmallModel:
        """A model whose heads any mesh of ``ranks`` ranks can divide, if it is one of :data:`ARCHITECTURES`.

        ``options`` are fields, and take precedence; those that are None have their defaults.

        Raises:
            CuboidError: the architecture doesn't have one of the options.
        """
        options = {name: value for name, value in options.items() if value is not None}
        sizes: dict[str, int] = {}
        if architecture in ARCHITECTURES:
            heads = options.get("heads") or math.ceil(8 / ranks) * ranks
            sizes = {"heads": heads, "kv_heads": next(heads // share for share in (4, 2, 1) if heads % share == 0)}
        small = cls(architecture, **{**sizes, **options})
        _check_kept(small, small.config(), options)
        return small

    @property
    def sizes(self) -> Sizes:
        """For the maker of small configs."""
        chosen = {name: getattr(self, field) for field, name in _SIZE_FIELDS.items() if getattr(self, field)}
        return replace(DEFAULT_SIZES, **chosen)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.sizes.hidden

    def config(self) -> PretrainedConfig:
        """The Hugging Face config.

        Raises:
            UnsupportedModelError: an unknown architecture, or one that can't be made small.
            CuboidError: inconsistent sizes, or an option that the architecture doesn't have.
        """
        if self.kv_heads and self.sizes.heads % self.kv_heads:
            raise MeshError(f"kv_heads is {self.kv_heads}, which doesn't divide heads = {self.sizes.heads}")
        if not self.is_preset:
            return self._made()[1]
        if self.rope is not None and self.architecture not in _ROPE_ARCHITECTURES:
            raise CuboidError(f"rope goes with arch {', '.join(_ROPE_ARCHITECTURES)}, not with {self.architecture}")
        return _preset(self)

    def write(self, directory: str | Path) -> None:
        """Write a float32 checkpoint, with plain transformers.

        Raises:
            CuboidError: as :meth:`config`.
        """
        self._model().save_pretrained(directory)

    def _model(self) -> PreTrainedModel:
        return _preset_model(self) if self.is_preset else self._made_model()

    def _made(self) -> tuple[type[PreTrainedModel], PretrainedConfig]:
        """The class, and the config that certification would test it with, with these sizes and options."""
        cls, config = default_model(self.architecture)
        if layer_count(config) < self.layers:
            raise CuboidError(f"layers is {self.layers}; {self.architecture} has {layer_count(config)} by default")
        try:
            with quiet_cpu():
                small = small_with_all_kinds(cls, self._with_options(config), self.layers, self.sizes)
        except CuboidError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"no small model of {self.architecture} can be made: {type(error).__name__}: {error}"
            ) from error
        text = small.get_text_config(decoder=True)
        for key in KEYS["window"]:
            # Certification makes windows so small that the longest rows cross them.
            if self.sliding_window is not None and isinstance(getattr(text, key, None), int):
                setattr(text, key, self.sliding_window)
        if self.pad_token != 1:
            setattr(text, _PAD, self.pad_token)
        if self.router_loss and getattr(small, _ROUTER_LOSS, None) is not None:
            setattr(small, _ROUTER_LOSS, self.router_loss)
        defaults = {field.name: field.default for field in fields(self)}
        _check_kept(self, small, (name for name in _KEYS if getattr(self, name) != defaults[name]))
        return cls, small

    def _made_model(self) -> PreTrainedModel:
        cls, config = self._made()
        try:
            with quiet_cpu():
                count = on_meta(cls, config).num_parameters()
                if count > _MOST_PARAMETERS:
                    raise CannotProbe(f"a small one has {count:,} parameters, for some of whose sizes no key is known")
                return random_model(cls, config, None, ATTEMPTS[-1], seed=self.seed + 1)
        except (CannotProbe, ImportError) as error:
            # Some classes need another library, which transformers names in several lines.
            raise UnsupportedModelError(f"{self.architecture}: {' '.join(str(error).split())}") from error

    def _with_options(self, config: PretrainedConfig) -> PretrainedConfig:
        """A real model's config with these options, as far as they decide which code runs."""
        changes: dict[str, Any] = {}
        stored = config.to_dict()
        if self.tied is not None:
            changes[_TIED] = self.tied
        if self.bias:
            changes |= {key: True for key in _BIASES if isinstance(stored.get(key), bool)}
        if self.sliding_window is not None:
            changes |= {key: self.sliding_window for key in KEYS["window"] if key in stored}
            changes |= {key: True for key in (_USES_WINDOW,) if key in stored}
        if self.rope is not None:
            rope = stored.get(_ROPE)
            if isinstance(rope, dict) and not any(isinstance(inner, dict) for inner in rope.values()):
                changes[_ROPE] = {**rope, **_scaled(self.rope, self.sizes)}
        if self.router_loss and _ROUTERS in stored:
            changes[_ROUTERS] = True
        if not changes:
            return config
        # Which layers have a window follows from other keys, where the config's class says so.
        left_out = {"model_type", *(("layer_types",) if _USES_WINDOW in changes else ())}
        return type(config)(**{**{name: x for name, x in stored.items() if name not in left_out}, **changes})


#: By a field of :class:`SmallModel`, the keys of which a config has one if its models have such a thing.
_KEYS: dict[str, tuple[str, ...]] = {
    **{field: KEYS[name] for field, name in _SIZE_FIELDS.items()},
    "tied": (_TIED,),
    "bias": _BIASES,
    "rope": ("rope_type",),
}


def _check_kept(small: SmallModel, config: PretrainedConfig, options: Iterable[str]) -> None:
    """Check that a config has what was chosen.

    Raises:
        CuboidError: it has no key for it, or its class keeps another value; names the option.
    """
    stored = list(_items(config.to_dict()))
    for name in options:
        value, keys = getattr(small, name), _KEYS.get(name, ())
        values = {value, small.hidden} if name == "head_dim" else {value}
        if keys and not any(key in keys and kept in values for key, kept in stored):
            raise CuboidError(
                f"{name} is {value!r}; the config of {small.architecture} has no such setting, as others have {keys[0]}"
            )


def _items(stored: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys and values of a config and of what is inside it."""
    for key, value in stored.items():
        if isinstance(value, dict):
            yield from _items(value)
        elif not isinstance(value, list):
            yield key, value


def _scaled(rope: Rope, sizes: Sizes) -> dict[str, Any]:
    """Parameters of scaled rotary embeddings."""
    frequencies, original = sizes.head_dim // 2, {"original_max_position_embeddings": sizes.positions // 4}
    more: dict[str, dict[str, Any]] = {
        "dynamic": {},
        "yarn": original,
        "llama3": {**original, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {
            **original,
            "short_factor": [1.0 + i / 4 for i in range(frequencies)],
            "long_factor": [2.0 + i for i in range(frequencies)],
        },
    }
    return {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0, **more[rope]}


def _preset_model(small: SmallModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(small.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(small.seed)
        model = AutoModelForCausalLM.from_config(small.config(), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms are initialized to one and biases to zero, which would hide mistakes
            parameter.data += _VECTOR_STD * torch.randn(parameter.shape, generator=generator)
    if small.pad_token is not None:  # its embedding is initialized to zero, which would hide mistakes too
        row = model.get_input_embeddings().weight.data[small.pad_token]
        row += _WEIGHT_STD * torch.randn(row.shape, generator=generator)
    return model


def _preset(small: SmallModel) -> PretrainedConfig:
    """The config of one of :data:`ARCHITECTURES`."""
    sizes, architecture = small.sizes, small.architecture
    config = default_config("gemma3_text" if architecture == "gemma3" else architecture)
    stored = config.to_dict()
    wide = {
        "num_hidden_layers": small.layers,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": 2 * sizes.hidden,
    }
    by_key = {**sizes_by_key(sizes), **wide, "n_layer": small.layers}
    settings: dict[str, Any] = {key: size for key, size in by_key.items() if isinstance(stored.get(key), int)}
    settings |= {"initializer_range": _WEIGHT_STD, "bos_token_id": None, "eos_token_id": None, _PAD: small.pad_token}
    settings |= {key: small.bias for key in _BIASES if stored.get(key) is False}
    if small.tied is not None:
        settings[_TIED] = small.tied
    if small.rope is not None:
        settings[_ROPE] = _scaled(small.rope, sizes)
    return type(config)(**{**settings, **_peculiarities(small)})


def _peculiarities(small: SmallModel) -> dict[str, Any]:
    """Settings that only some of :data:`ARCHITECTURES` have, or differ in."""
    match small.architecture:
        case "qwen3":
            return {_TIED: small.tied is not False}
        case "mistral":
            return {"sliding_window": small.sliding_window}
        case "mixtral":
            # The check of those rotary embeddings multiplies it.
            heads = {"head_dim": small.head_dim} if small.rope == "longrope" else {}
            return {"sliding_window": small.sliding_window, "num_local_experts": 4, **heads, **_routing(small)}
        case "qwen3_moe":
            # A number that 4 and larger powers of two don't divide.
            experts = {"num_local_experts": 6, "moe_intermediate_size": small.hidden}
            return {"head_dim": small.head_dim, **experts, **_routing(small)}
        case "deepseek_v3":
            return _latents(small)
        case "gemma2":
            # Caps so low that they affect most scores and logits.
            return {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **_alternating(small)}
        case "gemma3":
            return _alternating(small)
    return {}


def _routing(small: SmallModel) -> dict[str, Any]:
    loss = {_ROUTERS: True, _ROUTER_LOSS: small.router_loss}
    return {"num_experts_per_tok": 2, **(loss if small.router_loss else {})}


def _latents(small: SmallModel) -> dict[str, Any]:
    """Keys, values and queries are products of two matrices; the first layer has an MLP, the others experts."""
    return {
        "q_lora_rank": _LATENT,
        "kv_lora_rank": _LATENT,
        "qk_nope_head_dim": small.head_dim,
        "qk_rope_head_dim": _LATENT_ROPE,
        "qk_head_dim": small.head_dim + _LATENT_ROPE,
        "head_dim": _LATENT_ROPE,
        "v_head_dim": small.head_dim,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": small.hidden,
        "first_k_dense_replace": 1,
        "num_key_value_heads": small.heads,
    }


def _alternating(small: SmallModel) -> dict[str, Any]:
    """Gemma's windows, in every other layer."""
    return {
        "query_pre_attn_scalar": 2 * small.head_dim,  # differs from attention's default, which is head_dim
        "sliding_window": small.sliding_window or _GEMMA_WINDOW,
        "layer_types": ["full_attention" if index % 2 else "sliding_attention" for index in range(small.layers)],
    }
