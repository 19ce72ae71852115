"""The errors for models whose kind has rules, and that still can't be cut: with adapters, quantised, or
compiled as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig

from cuboid.errors import UnsupportedModelError


def check_checkpoint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that a call of ``from_pretrained`` with these arguments doesn't load adapters.

    Raises:
        UnsupportedModelError: it does.
    """
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    adapters: str | Path | None = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if adapters is None and path is not None and (Path(path) / "adapter_config.json").is_file():
        adapters = path
    if adapters is not None:
        raise adapters_refused(f"{adapters} holds adapters of PEFT")


def check_unquantized(config: Mapping[str, Any] | PretrainedConfig, where: str) -> None:
    """Check that a model's config doesn't say that its weights are quantised.

    Args:
        config: of transformers, or what is in its file.
        where: what has the config, for the error.

    Raises:
        UnsupportedModelError: it has a ``quantization_config``.
    """
    section = (config if isinstance(config, Mapping) else vars(config)).get("quantization_config")
    if not section:
        return
    method = section.get("quant_method") if isinstance(section, Mapping) else getattr(section, "quant_method", None)
    # Of transformers, members of an enum.
    method = getattr(method, "value", method)
    raise UnsupportedModelError(
        f"{where}: quantization_config (quant_method {method!r}) has no rule here: blocks and scales of quantised "
        "weights are those of whole tensors. from_pretrained takes checkpoints of 16 or 32 bits, also with "
        "quantization_config=BitsAndBytesConfig(load_in_4bit=True, …), and those that bitsandbytes has stored in 4 "
        "bits; plain transformers' model.dequantize() and save_pretrained make one of 16 bits"
    )


def check_plain_weights(model: nn.Module) -> None:
    """Check that a model's weights are plain ones of 16 bits or more: quantising in place leaves the config as it was.

    Raises:
        UnsupportedModelError: names one that isn't.
    """
    for name, parameter in model.named_parameters():
        is_wrapped = is_traceable_wrapper_subclass(parameter.data) and not isinstance(parameter.data, DTensor)
        if is_wrapped or not parameter.is_floating_point() or parameter.itemsize < 2:
            what = type(parameter.data).__name__ if is_wrapped else str(parameter.dtype)
            raise UnsupportedModelError(
                f"{name} is quantised ({what}), for which there is no rule on a mesh or in a pipeline; shard the model "
                "with weights of 16 or 32 bits, and adapt those with LoRA"
            )


def adapters_refused(what: str) -> UnsupportedModelError:
    """The error for PEFT adapters."""
    return UnsupportedModelError(
        f"{what}: they came before the model was sharded, which can't cut them. Load the model without them, by "
        "cuboid.from_pretrained or, with the Trainer, after its TrainingArguments(deepspeed=…), and then take PEFT's "
        "get_peft_model(model, LoraConfig(…)) or PeftModel.from_pretrained(model, folder)"
    )


def transforms_refused(model: nn.Module) -> UnsupportedModelError:
    """The error for ``torch.func``'s transforms of a forward, and for forward-mode differentiation."""
    return UnsupportedModelError(
        f"torch.func's transforms (grad, vmap, jvp, jacrev, …) and forward-mode differentiation can't run a sharded "
        f"{type(model).__name__}, whose forward and backward have collectives; use loss.backward() or "
        "torch.autograd.grad, and a loop over rows"
    )


def compiling_refused(model: nn.Module) -> UnsupportedModelError:
    """The error for ``torch.compile`` of a whole model."""
    return UnsupportedModelError(
        f"torch.compile can't compile {type(model).__name__} as a whole, between whose layers ranks talk; leave "
        'it out, and write "compile": true in the config\'s section tensor_parallel, or call model.compile() once the '
        "model is sharded: either compiles its layers"
    )
