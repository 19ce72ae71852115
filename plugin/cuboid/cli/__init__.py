"""The ``cuboid`` command. One file per subcommand."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from cuboid import CuboidError
from cuboid.cli.bench import bench
from cuboid.cli.convert import convert
from cuboid.cli.estimate import estimate
from cuboid.cli.inspect import inspect
from cuboid.cli.paths import Command
from cuboid.cli.plan import plan
from cuboid.cli.prepare import prepare
from cuboid.cli.profile import profile
from cuboid.cli.timeline import timeline
from cuboid.cli.train import TrainCommand, train
from cuboid.cli.verify import verify
from cuboid.failures.exit_messages import INTERRUPTED, end_interrupted, tell_launcher

commands = typer.Typer(
    name="cuboid",
    help="3-D tensor parallelism and a sequence pipeline for unmodified Hugging Face models, inside DeepSpeed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
commands.command(cls=Command)(bench)
commands.command(cls=Command)(convert)
commands.command(cls=Command)(estimate)
commands.command(cls=Command)(inspect)
commands.command(cls=Command)(plan)
commands.command(cls=Command)(prepare)
commands.command(cls=Command)(profile)
commands.command(cls=Command)(timeline)
commands.command(cls=TrainCommand)(train)
commands.command(cls=Command)(verify)


@commands.callback()
def _root(
    local_rank: Annotated[
        int, typer.Option("--local_rank", "--local-rank", hidden=True, help="Appended by some launchers.")
    ] = 0,
) -> None:
    # Not used: the launcher sets LOCAL_RANK too, which is read instead.
    del local_rank


def app() -> None:
    """Run the command line, and exit.

    Under a launcher every rank runs it. A user's error is printed by rank 0 only, unless it arose on another rank and
    may not be known to rank 0; all ranks exit with its status.
    """
    try:
        status = commands(standalone_mode=False)
    except CuboidError as error:
        # Others than rank 0 print what it may not know of.
        _fail(f"cuboid: {error}", 1, prints=error.rank is not None and not error.shared)
    except typer.TyperException as error:
        _fail(_usage(error), 2)
    if status == INTERRUPTED:
        end_interrupted()
    sys.exit(status if isinstance(status, int) else 0)


def _usage(error: typer.TyperException) -> str:
    """The message for a wrong command line; "" for an empty one, as typer has printed the help already."""
    # pydantic puts this in front of a validator's message.
    message = error.format_message().replace("Value error, ", "").removesuffix(".")
    context = getattr(error, "ctx", None)
    name = f"cuboid {context.info_name}" if context is not None and context.parent is not None else "cuboid"
    return message and f"cuboid: {message} (see {name} --help)"


def _fail(message: str, status: int, *, prints: bool = False) -> None:
    tell_launcher(message)
    if message and (prints or os.environ.get("RANK", "0") == "0"):
        print(message, file=sys.stderr, flush=True)
    sys.exit(status)
