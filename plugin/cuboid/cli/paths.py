"""The paths on a command line: those of results are checked before anything is computed, and errors name the option."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from cuboid.errors import ConfigError, CuboidError

#: More characters than a path or a value has.
_LONGEST = 4096


class Command(TyperCommand):
    """A command whose errors name the option that a path or number was given with.

    Those who read a file don't know by which option it was named. So this finds the option whose value the message
    begins with, or names first.
    """

    #: Whether it runs with supported versions only.
    checks_versions = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reject empty values, since ``--out "$UNSET"`` would be the current folder, and those that are too long."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        for parameter in self.params:
            value = values.get(parameter.name)
            if value == "":
                raise typer.BadParameter("is empty", ctx, param_hint=_names(parameter)[0])
            # Python refuses to parse a number of 4,300 digits, with an error of its own.
            if isinstance(value, str) and len(value) > _LONGEST and parameter.name != "config":
                raise typer.BadParameter(f"has {len(value)} characters", ctx, param_hint=_names(parameter)[0])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if self.checks_versions:
            from cuboid.requirements import check_installed

            check_installed()
        try:
            for parameter in self.params:
                if isinstance(path := ctx.params.get(parameter.name), Path):
                    _check_reachable(path, may_be_text=parameter.name == "config")
            return super().invoke(ctx)
        except CuboidError as error:
            error.args = (_with_option(error, ctx),)
            raise
        except OSError as error:
            # Of a folder without rights, which pathlib's questions raise too. A closed pipe has no name.
            if not isinstance(error.filename, str | bytes):
                raise
            told = CuboidError(f"{os.fsdecode(error.filename)}: can't be used: {error.strerror}")
            raise CuboidError(_with_option(told, ctx)) from error


def _check_reachable(path: Path, *, may_be_text: bool) -> None:
    """Check that a path isn't too long, nor in a folder that can't be searched. A config may be its text in base64."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # of which those who read or write there say more
    except OSError as error:
        if not (may_be_text and error.errno == errno.ENAMETOOLONG):
            raise CuboidError(f"{path}: can't be reached: {error.strerror}") from None


def _with_option(error: CuboidError, ctx: Any) -> str:
    """The message of an error, with the option whose value it is about."""
    message = str(error)
    values = [(parameter, ctx.params.get(parameter.name)) for parameter in ctx.command.params]
    for parameter, value in values:
        # Where numbers are checked, they are called by the parameter's name.
        if isinstance(value, int | float) and message.startswith(f"{parameter.name} is "):
            return f"{_names(parameter)[0]}{message.removeprefix(parameter.name)}"
    # The value that comes first; of a folder and one inside it, the inner one.
    matches = [
        ((at, -len(str(value))), _names(parameter)) for parameter, value in values for at in _places(message, value)
    ]
    first = min((place for place, _ in matches), default=None)
    blamed = dict.fromkeys(names for place, names in matches if place == first)
    if blamed:
        known = any(re.search(rf"(?<!\S){name}(?![\w-])", message) for names in blamed for name in names)
        return message if known else f"{' and '.join(names[0] for names in blamed)}: {message}"
    # A key of the config that the command line sets, or may set.
    options = {parameter.name: (value is None, parameter) for parameter, value in values}
    keys = [key for key in re.findall(r"(?:pipeline|tensor_parallel|checkpoint)\.(\w+)", message) if key in options]
    if keys:
        is_absent, parameter = min((options[key] for key in keys), key=lambda option: option[0])
        if not (is_absent and ctx.params.get("config")):
            return f"{_names(parameter)[0]}: {message}"
    # Another key of the config, or what it lacks.
    config = ctx.params.get("config")
    is_about_config = isinstance(error, ConfigError) and isinstance(config, Path) and "--" not in message
    return f"--config {config}: {message}" if is_about_config else message


def _names(parameter: Any) -> tuple[str, ...]:
    """How a user knows it: an option's names, or the word for an argument."""
    return (parameter.metavar,) if parameter.param_type_name == "argument" else tuple(parameter.opts)


def _places(message: str, value: object) -> Iterator[int]:
    """Where a message names a path, or one inside it, or a text in quotes."""
    if not isinstance(value, Path | str):
        return
    for text in {str(value), repr(str(value))[1:-1], str(Path(value).absolute())}:
        # What may be an ordinary word counts in quotes and, if it is a path, at the beginning.
        if isinstance(value, str) and not value.endswith(".json"):
            before, after = "(?<=')", "'"
        elif text.isidentifier():
            before, after = "(?:^|(?<='))", "[:/']"
        else:
            before, after = "(?:^|(?<=[ '(]))", "[:/', )]|$"
        yield from (match.start() for match in re.finditer(f"{before}{re.escape(text)}(?={after})", message))


def check_outputs(
    *files: Path | None, pictures: tuple[Path | None, ...] = (), inputs: tuple[str | Path | None, ...] = ()
) -> None:
    """Check that the files of a command can be written; their folders are created if missing.

    Args:
        files: of any kind; None for those that weren't asked for.
        pictures: likewise, whose suffix has to be that of a format.
        inputs: what the command reads, which no result may replace; of a model's folder, the config in it.

    Raises:
        CuboidError: names the first that can't be written.
    """
    from cuboid.checkpoint.format.bounded_files import check_output_file
    from cuboid.seq1f1b.schedule.timeline_picture import check_picture

    for picture in pictures:
        if picture is not None:
            check_picture(picture)
    results = [file for file in (*files, *pictures) if file is not None]
    named = [Path(path) for path in inputs if path]
    read = [*named, *(folder / "config.json" for folder in named)]
    for number, file in enumerate(results):
        check_output_file(file)
        if any(_are_one_file(file, other) for other in read):
            raise CuboidError(f"{file}: can't be written: it is what this command reads; name another file")
        if any(_are_one_file(file, other) for other in results[:number]):
            raise CuboidError(f"{file}: can't be written: another result goes there; name a file for each")


def _are_one_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, which may not be there yet. Devices and pipes take several results."""
    # Not those of pathlib, which raise an error where a folder can't be searched.
    if os.path.exists(one) != os.path.exists(other):
        return False
    if os.path.exists(one):
        return os.path.isfile(one) and os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)
