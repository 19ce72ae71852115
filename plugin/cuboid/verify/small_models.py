"""Small random checkpoints of any model type, so that comparisons need no download."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cuboid.errors import CuboidError, MeshError, UnsupportedModelError
from cuboid.models.architectures.small_model_names import ARCHITECTURES, Architecture, Rope
from cuboid.models.certification.check import name_padding, quiet_cpu, random_model
from cuboid.models.certification.default_models import default_model
from cuboid.models.certification.layer_kinds import small_with_all_kinds
from cuboid.models.certification.small_config import layer_count
from cuboid.models.certification.trials import ATTEMPTS
from cuboid.models.kinds.probe_rows import CannotProbe

_ROPE_ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3", "mistral", "mixtral")
#: Larger than usual, so that attention scores, gates and norms are outside the range where they are nearly linear.
_WEIGHT_STD, _VECTOR_STD = 0.1, 0.2
_GEMMA_WINDOW = 12
#: Features of DeepSeek's latents, and of the part of each head that rotary embeddings turn.
_LATENT, _LATENT_ROPE = 24, 4


@dataclass(frozen=True)
class SmallModel:
    """Sizes and options of a small random model.

    Of an architecture that isn't one of :data:`ARCHITECTURES`, it is the model with which certification tests the type:
    with tiny sizes, all kinds of layers, and at least ``layers`` of them. Other options are refused.

    Args:
        architecture: one of :data:`ARCHITECTURES`, or the name of a model type or a model's class in transformers.
        heads: query heads.
        kv_heads: key and value heads; GPT-2, GPT-NeoX and DeepSeek 3 always have as many as query heads.
        head_dim: even, as rotary embeddings need. The hidden size is ``heads * head_dim``.
        layers: decoder layers.
        vocabulary: number of tokens; the default is prime, so that no mesh divides it.
        tied: whether the output embedding is the input embedding; None for the architecture's default.
        bias: whether attention and MLP have biases, if the architecture has that option.
        sliding_window: attention window in tokens; in every layer of Mistral and Mixtral (None for no window), in every
            other one of Gemma 2 and 3 (None for 12 tokens).
        positions: longest sequence: the number of learned positions, or where some rotary embeddings rescale.
        rope: scaling of rotary embeddings; None for the architecture's default.
        pad_token: its embedding gets no gradient from the input in some architectures; None for no pad token.
        router_loss: coefficient of the routers' load balancing loss, in Mixtral and Qwen 3 MoE; 0 for none.
        seed: of the weights.
    """

    architecture: str
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 8
    layers: int = 2
    vocabulary: int = 131
    tied: bool | None = None
    bias: bool = False
    sliding_window: int | None = None
    positions: int = 256
    rope: Rope | None = None
    pad_token: int | None = 1
    router_loss: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        options = {field.name: (getattr(self, field.name), field.default) for field in fields(self)[1:]}
        _check_options(self.architecture, {name: value for name, (value, plain) in options.items() if value != plain})

    @classmethod
    def fitting(cls, architecture: str, ranks: int, **options: Any) -> SmallModel:
        """A model whose heads any mesh of ``ranks`` ranks can divide, if the architecture's sizes can be chosen.

        ``options`` are fields, and take precedence; those that are None have their defaults.

        Raises:
            CuboidError: the architecture doesn't have one of the options.
        """
        options = {name: value for name, value in options.items() if value is not None}
        _check_options(architecture, options)
        if architecture not in ARCHITECTURES:
            return cls(architecture, **options)
        heads = options.pop("heads", None) or math.ceil(8 / ranks) * ranks
        kv_heads = options.pop("kv_heads", None) or next(heads // share for share in (4, 2, 1) if heads % share == 0)
        return cls(architecture, heads=heads, kv_heads=kv_heads, **options)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    def config(self) -> PretrainedConfig:
        """The Hugging Face config.

        Raises:
            UnsupportedModelError: an unknown architecture, or one that can't be made small.
            CuboidError: inconsistent sizes.
        """
        if self.architecture not in ARCHITECTURES:
            return _tested(self)[1]
        if self.heads % self.kv_heads:
            raise MeshError(f"kv_heads is {self.kv_heads}, which doesn't divide heads = {self.heads}")
        if self.rope is not None and self.architecture not in _ROPE_ARCHITECTURES:
            raise CuboidError(f"rope goes with arch {', '.join(_ROPE_ARCHITECTURES)}, not with {self.architecture}")
        return _config(self)

    def common(self, *, tied_by_default: bool = False) -> dict[str, Any]:
        """Options that all configs have."""
        return {
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": tied_by_default if self.tied is None else self.tied,
            "initializer_range": _WEIGHT_STD,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": self.pad_token,
        }

    def sizes(self, *, tied_by_default: bool = False) -> dict[str, Any]:
        """:meth:`common`, and the sizes with the names that most configs use."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.positions,
            **self.rope_parameters(),
            **self.common(tied_by_default=tied_by_default),
        }

    def write(self, directory: str | Path) -> None:
        """Write a float32 checkpoint, with plain transformers.

        Raises:
            CuboidError: as :meth:`config`.
        """
        self._model().save_pretrained(directory)

    def _model(self) -> PreTrainedModel:
        if self.architecture not in ARCHITECTURES:
            return _tested_model(self)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms are initialized to one and biases to zero, which would hide mistakes
                parameter.data += _VECTOR_STD * torch.randn(parameter.shape, generator=generator)
        if self.pad_token is not None:  # its embedding is initialized to zero, which would hide mistakes too
            row = model.get_input_embeddings().weight.data[self.pad_token]
            row += _WEIGHT_STD * torch.randn(row.shape, generator=generator)
        return model

    def rope_parameters(self) -> dict[str, Any]:
        """The config's ``rope_parameters``, if scaling was chosen."""
        if self.rope is None:
            return {}
        frequencies = self.head_dim // 2
        more: dict[str, dict[str, Any]] = {
            "dynamic": {},
            "yarn": {"original_max_position_embeddings": self.positions // 4},
            "llama3": {
                "original_max_position_embeddings": self.positions // 4,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "longrope": {
                "original_max_position_embeddings": self.positions // 4,
                "short_factor": [1.0 + i / 4 for i in range(frequencies)],
                "long_factor": [2.0 + i for i in range(frequencies)],
            },
        }
        rope = {"rope_type": self.rope, "rope_theta": 10000.0, "factor": 4.0, **more[self.rope]}
        return {"rope_parameters": rope}


def _check_options(architecture: str, options: Mapping[str, Any]) -> None:
    name = next((name for name in options if name != "layers"), None)
    if architecture not in ARCHITECTURES and name is not None:
        raise CuboidError(
            f"{name} is {options[name]!r}; it goes with arch {', '.join(ARCHITECTURES)}, while the small model of "
            f"{architecture} is the one that its type is certified with, of which only layers can be chosen"
        )


def _tested(small: SmallModel) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """The class, and the config that certification tests it with."""
    cls, config = default_model(small.architecture)
    if layer_count(config) < small.layers:
        raise CuboidError(f"layers is {small.layers}; {small.architecture} has {layer_count(config)} by default")
    try:
        with quiet_cpu():
            return cls, small_with_all_kinds(cls, config, small.layers)
    except Exception as error:
        raise UnsupportedModelError(
            f"no small model of {small.architecture} can be made: {type(error).__name__}: {error}"
        ) from error


def _tested_model(small: SmallModel) -> PreTrainedModel:
    cls, config = _tested(small)
    try:
        with quiet_cpu():
            model = random_model(cls, config, None, ATTEMPTS[-1])
    except CannotProbe as error:
        raise UnsupportedModelError(f"{small.architecture}: {error}") from error
    name_padding(model)
    return model


def _config(small: SmallModel) -> PretrainedConfig:
    sizes = small.sizes
    match small.architecture:
        case "llama":
            return transformers.LlamaConfig(attention_bias=small.bias, mlp_bias=small.bias, **sizes())
        case "qwen2":
            return transformers.Qwen2Config(**sizes())
        case "qwen3":
            return transformers.Qwen3Config(
                attention_bias=small.bias, head_dim=small.head_dim, **sizes(tied_by_default=True)
            )
        case "mistral":
            return transformers.MistralConfig(sliding_window=small.sliding_window, **sizes())
        case "mixtral":
            return transformers.MixtralConfig(
                sliding_window=small.sliding_window, num_local_experts=4, **_routing(small), **sizes()
            )
        case "qwen3_moe":
            # A number that 4 and larger powers of two don't divide.
            experts = {"num_experts": 6, "moe_intermediate_size": small.hidden, **_routing(small)}
            return transformers.Qwen3MoeConfig(attention_bias=small.bias, head_dim=small.head_dim, **experts, **sizes())
        case "deepseek_v3":
            return transformers.DeepseekV3Config(**{**sizes(), **_latents(small)})
        case "gemma2":
            # Caps so low that they affect most scores and logits.
            caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
            return transformers.Gemma2Config(**caps, **_gemma_sizes(small))
        case "gemma3":
            return transformers.Gemma3TextConfig(**_gemma_sizes(small))
        case "gpt2":
            return transformers.GPT2Config(
                n_embd=small.hidden,
                n_layer=small.layers,
                n_head=small.heads,
                n_positions=small.positions,
                **small.common(tied_by_default=True),
            )
        case "gpt_neox":
            settings = sizes()
            del settings["num_key_value_heads"]
            return transformers.GPTNeoXConfig(**settings)


def _routing(small: SmallModel) -> dict[str, Any]:
    chosen = {"num_experts_per_tok": 2}
    loss = {"output_router_logits": True, "router_aux_loss_coef": small.router_loss}
    return {**chosen, **loss} if small.router_loss else chosen


def _latents(small: SmallModel) -> dict[str, Any]:
    """Keys, values and queries are products of two matrices; the first layer has an MLP, the others experts."""
    return {
        "q_lora_rank": _LATENT,
        "kv_lora_rank": _LATENT,
        "qk_nope_head_dim": small.head_dim,
        "qk_rope_head_dim": _LATENT_ROPE,
        "v_head_dim": small.head_dim,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": small.hidden,
        "first_k_dense_replace": 1,
        "num_key_value_heads": small.heads,
        "attention_bias": small.bias,
    }


def _gemma_sizes(small: SmallModel) -> dict[str, Any]:
    return {
        "head_dim": small.head_dim,
        "query_pre_attn_scalar": 2 * small.head_dim,  # differs from attention's default, which is head_dim
        "sliding_window": small.sliding_window or _GEMMA_WINDOW,
        "layer_types": ["full_attention" if index % 2 else "sliding_attention" for index in range(small.layers)],
        "attention_bias": small.bias,
        **small.sizes(tied_by_default=True),
    }
