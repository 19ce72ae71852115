"""Write the tables of docs/choosing.md from the recipes in configs/recipes, and those from the planner's searches.

python -c "from generators.choosing import search_all; search_all()" in docs/ searches anew and writes the recipes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import AutoConfig

from cuboid.config.schema import require_config
from cuboid.errors import ConfigError
from cuboid.planner.description.cluster import Cluster
from cuboid.planner.description.meta_model import describe
from cuboid.planner.description.model import ModelDescription
from cuboid.planner.estimate import Estimate, estimate, layout_of_config
from cuboid.planner.search import config_of, search
from generators.marked import DOCS, table
from generators.planner_rows import CONFIGS

RECIPES = DOCS.parent / "configs" / "recipes"
GIB = 2**30
_QWEN3 = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
_QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": CONFIGS["llama3-8b"],
    "Llama 3 70B": CONFIGS["llama3-70b"],
    "Llama 3 405B": CONFIGS["llama3-405b"],
    "Qwen3 8B": _QWEN3,
    "Qwen3 30B-A3B": _QWEN3_MOE,
    # The rows of measurements have one dense layer.
    "DeepSeek V3": {**CONFIGS["deepseekv3"], "first_k_dense_replace": 3},
}
LENGTHS = {"8k": 2**13, "32k": 2**15, "128k": 2**17, "1M": 2**20}
#: Clusters, and tokens of a step on them.
CLUSTERS = {
    "1xH100-80GB": 2**17,
    "1xH200-141GB": 2**17,
    "8xH100-80GB": 2**20,
    "8x8xH100-80GB": 2**22,
    "128x8xH100-80GB": 2**22,
}


@dataclass(frozen=True)
class Case:
    """One question: which layout for a model, a cluster and a length."""

    model: str
    cluster: str
    length: str

    @property
    def path(self) -> Any:
        """Of its recipe, which is there if anything fits."""
        machines = Cluster.parse(self.cluster)
        kind = machines.gpu.name.partition("-")[0].lower()
        return RECIPES / f"{self.model.lower().replace(' ', '-')}_{machines.gpus}x{kind}_{self.length.lower()}.json"

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return max(1, CLUSTERS[self.cluster] // LENGTHS[self.length])

    def described(self) -> ModelDescription:
        """The model."""
        return _described(self.model)

    def search(self) -> dict[str, Any]:
        """The config of the fastest layout, with a comment.

        Raises:
            ConfigError: nothing fits.
        """
        cluster = Cluster.parse(self.cluster)
        best = search(self.described(), cluster, LENGTHS[self.length], self.rows, count=1).best[0]
        said = f"{self.model}, sequences of {LENGTHS[self.length]} tokens, {self.rows} in a step."
        settings = {"cluster": self.cluster, "sequence_length": LENGTHS[self.length]}
        return {"//": said, **settings, **config_of(best.layout)}

    def read(self) -> Estimate:
        """What the recipe takes."""
        config, rest = require_config(self.path)
        cluster, length = Cluster.parse(config.cluster or ""), config.sequence_length or 0
        layout = layout_of_config(config, rest, self.described(), cluster, length)
        return estimate(self.described(), layout, cluster, length)


@cache
def _described(model: str) -> ModelDescription:
    return describe(AutoConfig.for_model(**MODELS[model]))


def cases() -> Iterator[Case]:
    """All questions."""
    for cluster in CLUSTERS:
        for model in MODELS:
            for length in LENGTHS:
                yield Case(model, cluster, length)


def search_all() -> None:
    """Write every recipe, and remove those of what doesn't fit."""
    RECIPES.mkdir(exist_ok=True)
    for case in cases():
        try:
            text = json.dumps(case.search(), indent=2) + "\n"
        except ConfigError as error:
            case.path.unlink(missing_ok=True)
            print(f"{case.path.name}: {error}", flush=True)
            continue
        case.path.write_text(text, encoding="utf-8")
        print(case.path.name, flush=True)


def _line(case: Case) -> list[str]:
    """Of a table."""
    if not case.path.is_file():
        return [case.model, case.length, "nothing fits", "", "", "", ""]
    chosen = case.read()
    name = f"[{chosen.layout}](../configs/recipes/{case.path.name})"
    cells = [f"{chosen.time.total_s:.1f}", f"{chosen.tokens_per_s:,.0f}", f"{chosen.mfu:.0%}"]
    return [case.model, case.length, name, *cells, f"{chosen.memory_bytes / GIB:.0f}"]


def answers(cluster: str) -> str:
    """Table of a cluster's recipes, and what fits at no length."""
    lines, unfit = [], []
    for model in MODELS:
        matching = [case for case in cases() if (case.cluster, case.model) == (cluster, model)]
        if any(case.path.is_file() for case in matching):
            lines += [_line(case) for case in matching]
        else:
            unfit.append(model)
    header = ["model", "tokens", "layout and its recipe", "step, s", "tokens/s", "MFU", "GiB a GPU"]
    blocks = [table(header, lines, "lrlrrrr")] if lines else []
    if unfit:
        blocks.append(f"Nothing fits, at any length, for {', '.join(unfit)}.")
    return "\n\n".join(blocks)


def parts() -> dict[str, dict[str, str]]:
    """All tables of the page."""
    return {"choosing.md": {cluster: answers(cluster) for cluster in CLUSTERS}}
