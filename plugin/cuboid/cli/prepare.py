"""``cuboid prepare``: prepare data and, if needed, a small model for ``cuboid train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cuboid.cli.limits import LARGEST_SEED, LARGEST_VOCABULARY, TrustRemoteCode


def prepare(
    out: Annotated[Path, typer.Option(help="Folder of the run; created if missing.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text file, folder of text files, or rows of texts or conversations (.jsonl, .parquet). "
            "Default: the Python standard library's own sources."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face checkpoint with its tokenizer. Default: write a new Llama to OUT/start."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of a tokenizer, for a model that `cuboid train --arch-config` will make."),
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Entries of a new tokenizer.", max=LARGEST_VOCABULARY)] = 4096,
    seed: Annotated[int, typer.Option(help="Seed of a new model's weights.", min=0, max=LARGEST_SEED)] = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Tokenize the data into OUT/tokens.

    Without --model and --tokenizer, first learn a tokenizer and write a small Llama.
    """
    from cuboid.library_warnings import quiet
    from cuboid.train.prepare import prepare as run

    quiet()
    run(
        out,
        model=model,
        tokenizer_folder=tokenizer,
        data=data,
        vocabulary=vocabulary,
        seed=seed,
        say=typer.echo,
        trust_remote_code=trust_remote_code,
    )
