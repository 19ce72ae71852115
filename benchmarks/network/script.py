"""What scripts that fork ranks do around their measuring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cuboid.errors import CuboidError
from cuboid.library_warnings import quiet
from network.interrupts import signals_as_exceptions


def run_script(
    name: str,
    given: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    print_table: Callable[[dict[str, Any]], None],
    draw: Callable[[dict[str, Any], Path], None],
) -> int:
    """Measure, print and write; the exit status.

    Args:
        name: of the files in the folder ``given.out``.
        given: options of the command line.
        measure: gives the result, and writes it as JSON meanwhile.
        print_table, draw: show the result.
    """
    quiet()
    # A process that has multiplied on several threads can't be forked safely; and a rank has one core at most.
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        with signals_as_exceptions():
            result = measure(given)
    except CuboidError as error:
        print(error, file=sys.stderr)
        return 1
    print_table(result)
    draw(result, given.out / f"{name}.png")
    print(f"\n{given.out}/{name}.json, {name}.png")
    return 0
