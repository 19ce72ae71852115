"""The ``cuboid`` command. One file per subcommand."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from cuboid.cli.bench import bench
from cuboid.cli.convert import convert
from cuboid.cli.doctor import DoctorCommand, doctor
from cuboid.cli.estimate import estimate
from cuboid.cli.inspect import inspect
from cuboid.cli.paths import Command
from cuboid.cli.plan import plan
from cuboid.cli.prepare import prepare
from cuboid.cli.profile import profile
from cuboid.cli.timeline import timeline
from cuboid.cli.train import TrainCommand, train
from cuboid.cli.verify import verify
from cuboid.errors import CuboidError
from cuboid.failures.exit_messages import INTERRUPTED, end_interrupted, tell_launcher
from cuboid.version import __version__

commands = typer.Typer(
    name="cuboid",
    help="3-D tensor parallelism and a sequence pipeline for unmodified Hugging Face models, inside DeepSpeed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
commands.command(cls=Command)(bench)
commands.command(cls=Command)(convert)
commands.command(cls=DoctorCommand)(doctor)
commands.command(cls=Command)(estimate)
commands.command(cls=Command)(inspect)
commands.command(cls=Command)(plan)
commands.command(cls=Command)(prepare)
commands.command(cls=Command)(profile)
commands.command(cls=Command)(timeline)
commands.command(cls=TrainCommand)(train)
commands.command(cls=Command)(verify)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"cuboid {__version__}")
        raise typer.Exit


@commands.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    del version  # its callback has printed it


def app() -> None:
    """Run the command line, and exit.

    Under a launcher every rank runs it. A user's error is printed by rank 0 only, unless it arose on another rank and
    may not be known to rank 0; all ranks exit with its status.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An encoding such as ASCII lacks characters of ours, and the names of some files are in no encoding.
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except CuboidError as error:
        # Others than rank 0 print what it may not know of.
        _fail(f"cuboid: {error}", 1, prints=error.rank is not None and not error.shared)
    except typer.TyperException as error:
        _fail(_usage(error), 2)
    except OSError as error:
        if error.filename is not None:
            raise
        # What is printed goes to a full disk, or to nobody. The rest of it would fail again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail("" if error.errno == errno.EPIPE else f"cuboid: can't print: {error.strerror}", 1, prints=True)
    if status == INTERRUPTED:
        end_interrupted()
    sys.exit(status if isinstance(status, int) else 0)


def _run(arguments: list[str]) -> Any:
    """Run a subcommand, or what else is asked for; returns the exit status, if there is one."""
    root = typer.main.get_command(commands)
    assert isinstance(root, TyperGroup)
    name, equals, _ = arguments[0].partition("=") if arguments else ("", "", "")
    if name in ("--local_rank", "--local-rank"):
        # Put in front by some launchers, which set LOCAL_RANK too; that is read instead.
        arguments = arguments[1 if equals else 2 :]
    # Past the root, whose options typer converts with pydantic, which takes longer to import than help to print.
    command = root.commands.get(arguments[0]) if arguments else None
    if command is None:
        return root.main(arguments, prog_name="cuboid", standalone_mode=False)
    return command.main(arguments[1:], prog_name=f"cuboid {arguments[0]}", standalone_mode=False)


def _usage(error: typer.TyperException) -> str:
    """The message for a wrong command line; "" for an empty one, as typer has printed the help already."""
    # pydantic puts this in front of a validator's message.
    message = error.format_message().replace("Value error, ", "").removesuffix(".")
    context = getattr(error, "ctx", None)
    name = "cuboid" if context is None else context.command_path
    return message and f"cuboid: {message} (see {name} --help)"


def _fail(message: str, status: int, *, prints: bool = False) -> None:
    tell_launcher(message)
    if message and (prints or os.environ.get("RANK", "0") == "0"):
        print(message, file=sys.stderr, flush=True)
    sys.exit(status)
