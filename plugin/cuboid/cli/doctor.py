"""``cuboid doctor``: what stands in the way of a run on this host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuboid.cli.paths import Command

if TYPE_CHECKING:
    from cuboid.doctor.finding import Finding


class DoctorCommand(Command):
    """The command, which finds unsupported versions itself, and runs with them."""

    checks_versions = False


def doctor(
    out: Annotated[
        Path | None, typer.Option(help="Also a run's folder: whether another run has it, and its disk's free space.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Also a hostfile of the deepspeed launcher: its lines, and its hosts' names.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port where ranks are to meet. Default: MASTER_PORT, or 29500.", min=1, max=65535),
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="Only measure the links between the ranks of the launcher that starts this.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Look at this host before a run: packages, GPUs, launchers, network, limits, disk. Exits with 1 on problems.

    Each problem comes with a cure. Nothing is changed, and every wait is bounded. On several hosts, run it on each.
    """
    import os

    from cuboid.doctor.examination import examine
    from cuboid.doctor.finding import State

    if links and "RANK" not in os.environ:
        raise typer.BadParameter("needs a launcher: torchrun … -m cuboid.cli doctor --links", param_hint="--links")
    findings = []

    def say(text: str) -> None:
        typer.echo(text, err=True)

    for finding in examine(out=out, hostfile=hostfile, port=port, say=say, links=links):
        findings.append(finding)
        if not json:
            typer.echo(_line(finding))
    if links and os.environ["RANK"] != "0" and not findings:
        return
    problems = sum(finding.state is State.PROBLEM for finding in findings)
    typer.echo(_as_json(findings) if json else f"{problems} problem{'' if problems == 1 else 's'} found")
    raise typer.Exit(1 if problems else 0)


def _line(finding: Finding) -> str:
    line = f"{finding.state:<8} {finding.check}: {finding.text}"
    return f"{line}\n{'':8} cure: {finding.cure}" if finding.cure else line


def _as_json(findings: list[Finding]) -> str:
    import dataclasses
    import json

    from cuboid.doctor.finding import State

    passed = all(finding.state is not State.PROBLEM for finding in findings)
    return json.dumps({"passed": passed, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=1)
