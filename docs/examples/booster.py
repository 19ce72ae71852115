"""Training under ColossalAI's Booster, in pipeline stages that are meshes. What Cuboid adds is marked with `# cuboid`.

colossalai run --nproc_per_node 4 docs/examples/booster.py MODEL TEXT OUT [CONFIG]

OUT/model is an ordinary Hugging Face checkpoint with the state of the training beside it. Run again, perhaps with
another config on other ranks, the script resumes from there; `docs/examples/evaluate.py OUT` checks the result with
plain transformers.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import colossalai
import numpy as np
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, default_data_collator

import cuboid  # cuboid

CONFIG = str(Path(__file__).parents[2] / "configs" / "colossalai_2_stages_1x1x2.yaml")
STEPS, ROWS, SEQUENCE_LENGTH, WARMUP = 20, 8, 128, 5
HELDOUT_ROWS = 2 * ROWS


def main(model_path: str, text: str, out: str, config: str = CONFIG) -> None:
    """Train a checkpoint on a text file, and save it with the state of the training."""
    colossalai.launch_from_torch(verbose=False)
    plugin = cuboid.CuboidPlugin(config)  # cuboid
    booster = Booster(plugin=plugin)
    model = cuboid.from_pretrained(model_path, plugin.config)  # cuboid: this rank reads its own slices
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP, 1.0))
    *rows, heldout = blocks(model_path, text)
    loader = plugin.prepare_dataloader(rows, ROWS, shuffle=True, drop_last=True, collate_fn=default_data_collator)
    model, optimizer, _, loader, schedule = booster.boost(model.train(), optimizer, None, loader, schedule)

    folder = Path(out) / "model"
    if (folder / "manifest.json").exists():
        booster.load_model(model, folder)
        booster.load_optimizer(optimizer, folder)
        booster.load_lr_scheduler(schedule, folder)
    data = batches(loader, model.progress.samples // (ROWS * plugin.dp_size))
    for _ in range(STEPS):
        loss = booster.execute_pipeline(data, model, None, optimizer)["loss"]  # cuboid: needs no criterion
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {model.progress.optimizer}: loss {loss.item():.4f}", flush=True)

    booster.save_model(model, folder)  # an ordinary Hugging Face checkpoint, whole
    booster.save_optimizer(optimizer, folder)
    booster.save_lr_scheduler(schedule, folder)
    with torch.no_grad():
        loss = booster.execute_pipeline(iter([heldout]), model.eval(), None)["loss"]
    if dist.get_rank() == 0:
        write_report(Path(out), heldout["input_ids"], model.module.dtype, loss)
    dist.destroy_process_group()


def blocks(model_path: str, text: str) -> list[Any]:
    """Rows of tokens, which are their own labels; the last ones are held out, as one batch."""
    ids = AutoTokenizer.from_pretrained(model_path)(
        Path(text).read_text(encoding="utf-8"), return_tensors="pt"
    ).input_ids
    rows = ids[0][: ids.shape[1] // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    heldout = rows[-HELDOUT_ROWS:]
    return [
        *({"input_ids": row, "labels": row} for row in rows[:-HELDOUT_ROWS]),
        {"input_ids": heldout, "labels": heldout},
    ]


def batches(loader: DataLoader, first: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end, behind those that were trained on before."""
    epoch, done = divmod(first, len(loader))
    while True:
        loader.sampler.set_epoch(epoch)
        yield from itertools.islice(loader, done, None)
        epoch, done = epoch + 1, 0


def write_report(out: Path, heldout: torch.Tensor, dtype: torch.dtype, loss: torch.Tensor) -> None:
    """What evaluate.py compares its own loss with."""
    np.save(out / "heldout_blocks.npy", heldout.numpy())
    report = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(loss.device),
        "losses": {"heldout_last": loss.item()},
    }
    (out / "report.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
