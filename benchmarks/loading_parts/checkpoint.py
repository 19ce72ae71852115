"""An ordinary sharded Llama checkpoint of about the size that is asked for, with random weights."""

from __future__ import annotations

import dataclasses
import multiprocessing
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from llama import llama_config
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cuboid.errors import CuboidError

GIB = 2**30
_SEED = 0
#: Of each file.
_SHARD_SIZE = "512MB"
_READ_BYTES = 2**24
#: By which a checkpoint that is there is known to be the one that is asked for.
_COMPARED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "dtype",
)


@dataclass(frozen=True)
class LoadingWorkload:
    """Sizes of the model; as many layers as the size of the checkpoint asks for, at least one.

    Args:
        gib: about so many GiB of weights, once they are loaded as float32.
        stored: in what the checkpoint has them.
    """

    gib: float
    stored: str = "float32"
    hidden: int = 2048
    intermediate: int = 5632
    heads: int = 16
    key_value_heads: int = 8
    vocabulary: int = 8192
    batch: int = 8
    length: int = 16

    def config(self) -> LlamaConfig:
        """The Hugging Face config."""
        one, two = (self._config(layers) for layers in (1, 2))
        smallest, layer_bytes = _bytes(one), _bytes(two) - _bytes(one)
        return self._config(1 + max(0, round((self.gib * GIB - smallest) / layer_bytes)))

    def _config(self, layers: int) -> LlamaConfig:
        return llama_config(self, layers=layers, vocabulary=self.vocabulary, key_value_heads=self.key_value_heads)

    def tokens(self) -> torch.Tensor:
        """A batch ``[B, S]`` by which to see whether everything was loaded, and rightly."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(0, self.vocabulary, (self.batch, self.length), generator=generator)

    def numbers(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "loaded": "float32", "layers": self.config().num_hidden_layers}


#: In a few seconds, to see whether everything works. The figures say nothing.
QUICK = LoadingWorkload(1 / 128, hidden=128, intermediate=256, heads=8, vocabulary=512)


def _bytes(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in LlamaForCausalLM(config).parameters())


def write_checkpoint(workload: LoadingWorkload, folder: Path) -> int:
    """Write it, unless it is there from another run; the bytes of its weights' files.

    Raises:
        CuboidError: the folder has something else in it.
    """
    finished = folder / "config.json"
    if finished.exists():
        there = LlamaConfig.from_pretrained(folder)
        wanted = workload.config()
        wanted.dtype = getattr(torch, workload.stored)
        differing = [key for key in _COMPARED if getattr(there, key) != getattr(wanted, key)]
        if differing:
            raise CuboidError(
                f"{folder} holds a model with {differing[0]} = {getattr(there, differing[0])}, but "
                f"{getattr(wanted, differing[0])} is asked for; remove the folder, or name another one with --out"
            )
    else:
        # In a process of its own, so that the one that ranks are forked from stays small.
        process = multiprocessing.get_context("fork").Process(target=_write, args=(workload, folder))
        process.start()
        process.join()
        if process.exitcode:
            raise CuboidError(f"the checkpoint couldn't be written to {folder} (exit code {process.exitcode})")
    return sum(file.stat().st_size for file in weight_files(folder))


def _write(workload: LoadingWorkload, folder: Path) -> None:
    torch.manual_seed(_SEED)
    model = LlamaForCausalLM(workload.config()).to(getattr(torch, workload.stored))
    # Under its name it is always whole.
    unfinished = folder.with_name(f"{folder.name}.incomplete")
    model.save_pretrained(unfinished, max_shard_size=_SHARD_SIZE)
    unfinished.rename(folder)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold tensors."""
    return sorted(folder.glob("*.safetensors"))


def weights_bytes(workload: LoadingWorkload) -> int:
    """Of the whole model, once it is loaded."""
    return _bytes(workload.config())


def warm_up() -> None:
    """Load one layer, so that what a process imports or compiles at its first load is there in all that are forked."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(dataclasses.replace(QUICK, gib=0.0).config()).save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def warm(folder: Path) -> None:
    """Read every file once, so that all loads find them in the page cache."""
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
