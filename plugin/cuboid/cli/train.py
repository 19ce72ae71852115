"""``cuboid train``: train a model on stages and a mesh. Started by a launcher, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cuboid.cli.limits import LARGEST_SEED, duration, finite, mixed_path, named_path, trust_option
from cuboid.cli.paths import Command

if TYPE_CHECKING:
    from cuboid.integrations.run_report.schema import TrainReport
    from cuboid.train.run import Stopped

#: Panels of the help.
_DATA, _MODEL, _OUTPUT = "Data", "Model", "Results"
_LENGTH, _WATCHING = "Length, checkpoints and going on", "Evaluation, log and bad losses"


class TrainCommand(Command):
    """The command, whose ``--resume`` may stand alone or before a value; typer's options do one or the other."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a ``--resume`` that stands alone its value."""
        following = [*args[1:], ""]
        values = ("auto", "latest")
        alone = [name == "--resume" and value not in values for name, value in zip(args, following, strict=True)]
        return super().parse_args(
            ctx, [f"{name}=latest" if one else name for name, one in zip(args, alone, strict=True)]
        )


def train(
    # Panels are shown in the order of their first options.
    data: Annotated[
        Path,
        typer.Option(
            help="Text file, folder of text files, rows of texts or conversations (.jsonl, .parquet), or "
            "tokens from `cuboid prepare`.",
            rich_help_panel=_DATA,
        ),
    ],
    config: Annotated[
        Path,
        typer.Option(
            help="DeepSpeed config with a tensor_parallel or pipeline section; JSON or YAML.", rich_help_panel=_MODEL
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for model, report.json, loss.png and metrics.jsonl; created if missing.",
            rich_help_panel=_OUTPUT,
        ),
    ],
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face checkpoint with its tokenizer.", rich_help_panel=_MODEL)
    ] = None,
    arch_config: Annotated[
        Path | None,
        typer.Option(
            help="In place of --model: the config.json of a new model, whose weights --seed gives.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="With --arch-config: folder of the tokenizer. Default: the one in DATA, beside its tokens.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    trust_remote_code: Annotated[bool, trust_option(panel=_MODEL)] = False,
    mixed: Annotated[
        list[str] | None,
        typer.Option(
            "--mix",
            metavar="NAME=PATH:SHARE",
            help="Another text to train on, with its share of the blocks, such as 0.25; DATA has the rest. What is "
            "held out of it is evaluated, too. May be given several times.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a block.", rich_help_panel=_DATA)] = 512,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the data's order, dropout and new weights.", min=0, max=LARGEST_SEED, rich_help_panel=_DATA
        ),
    ] = 0,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps; stretches the learning-rate schedule. Default: the schedule's length, or with "
            "--resume what the run was begun with.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=duration,
            help="Stop in time before the command has run so long, as SIGTERM does, with exit status 124: seconds, "
            "90m, 12h, 1:30:00 or 2-00:00:00.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps from one checkpoint to the next. Default: none are written.", rich_help_panel=_LENGTH
        ),
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(help="Checkpoints to keep. Default: the config's checkpoint.keep_last.", rich_help_panel=_LENGTH),
    ] = None,
    resume: Annotated[
        Literal["latest", "auto"] | None,
        typer.Option(
            "--resume",
            metavar="[auto]",
            help="Resume from the latest checkpoint in OUT/checkpoints. With auto, for a command that is started again "
            "and again: begin a new run if there is none, and pass over a damaged one.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    resume_from: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Resume from this checkpoint in OUT/checkpoints, such as global_step40, where the latest is damaged.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    evaluations: Annotated[
        int, typer.Option(help="Evaluations of the held-out loss, after the first step.", rich_help_panel=_WATCHING)
    ] = 5,
    heldout_blocks: Annotated[
        int, typer.Option(help="Blocks of the held-out loss, at most.", rich_help_panel=_WATCHING)
    ] = 32,
    evaluated: Annotated[
        list[str] | None,
        typer.Option(
            "--eval",
            metavar="NAME=PATH",
            help="Another text to evaluate wherever the held-out loss is, all of it; may be given several times. Text "
            "or tokens as for --data.",
            rich_help_panel=_WATCHING,
        ),
    ] = None,
    log_every: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time between two lines of a log, at least; 0 for each step.",
            min=0,
            callback=finite,
            rich_help_panel=_WATCHING,
        ),
    ] = 10.0,
    on_bad_loss: Annotated[
        Literal["stop", "skip", "continue"],
        typer.Option(
            help="In a step whose loss isn't finite, or jumps up: stop with an error, skip its update, or continue.",
            rich_help_panel=_WATCHING,
        ),
    ] = "stop",
    loss_spike: Annotated[
        float | None,
        typer.Option(
            metavar="DEVIATIONS",
            help="Standard deviations of the last 128 losses, above their mean, from which a loss is bad, such as 6. "
            "Default: only what isn't finite.",
            min=0,
            callback=finite,
            rich_help_panel=_WATCHING,
        ),
    ] = None,
    report_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LOGGER",
            help="Logger of transformers that gets the figures of each step, such as tensorboard, wandb or mlflow; may "
            "be given several times.",
            rich_help_panel=_WATCHING,
        ),
    ] = None,
    trainer_args: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON or YAML with arguments of the Hugging Face Trainer, such as lr_scheduler_type and warmup_steps, "
            "or learning_rate and optim, where CONFIG has no scheduler or optimizer.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    local_rank: Annotated[int, typer.Option("--local_rank", "--local-rank", hidden=True)] = 0,
) -> None:
    """Load or make a model sharded over stages and mesh, train it, and save it as plain transformers opens it.

    Start it with a launcher: `deepspeed --module cuboid.cli train …`, `torchrun -m cuboid.cli train …` or
    `accelerate launch -m cuboid.cli train …`. Ctrl-C or SIGTERM lets it finish the step, save a checkpoint in
    OUT/checkpoints and exit with 130 or 143; `--resume` resumes from there, on any number of ranks. Ctrl-C once more
    ends it at once.
    """
    from cuboid.failures.interrupts import Interrupts, exit_status

    del local_rank  # some launchers append it; LOCAL_RANK is read instead
    # Entered first, so that Ctrl-C ends the process during the imports below too.
    with Interrupts() as interrupts:
        from cuboid.failures.launched_world import World, set_cuda_defaults
        from cuboid.library_warnings import quiet
        from cuboid.train.job import TrainOptions
        from cuboid.train.run import Stopped, run

        set_cuda_defaults()
        world = World.from_environment()
        quiet(speaks=world.is_first)
        options = TrainOptions(
            model=model,
            arch_config=arch_config,
            tokenizer=tokenizer,
            data=data,
            config=config,
            out=out,
            steps=steps,
            sequence_length=sequence_length,
            heldout_blocks=heldout_blocks,
            evaluations=evaluations,
            mixed=tuple(mixed_path(text, "--mix") for text in mixed or ()),
            eval_data=tuple(named_path(text, "--eval") for text in evaluated or ()),
            seed=seed,
            save_every=save_every,
            keep_last=keep_last,
            resume=resume is not None or resume_from is not None,
            resume_from=resume_from,
            trust_remote_code=trust_remote_code,
            resume_if_any=resume == "auto" and resume_from is None,
            max_time_s=max_time,
            log_every_s=log_every,
            on_bad_loss=on_bad_loss,
            loss_spike=loss_spike,
            trainer_args=trainer_args,
            report_to=tuple(report_to or ()),
        )
        result = run(options, world, interrupts)
        if world.is_first:
            typer.echo(_stopped(result) if isinstance(result, Stopped) else _done(result, out))
        world.disconnect()
        if isinstance(result, Stopped):
            raise SystemExit(exit_status(result.by))


def _done(report: TrainReport, out: Path) -> str:
    losses = report.losses
    text = (
        f"loss {_shown(losses.first)} -> {_shown(losses.last)}, held-out {_shown(losses.heldout_last, 4)}; "
        f"{report.speed.tokens_per_s or 0:,.0f} tokens/s; model, report and curve in {out}"
    )
    if report.pipeline is not None and report.pipeline.trace is not None:
        trace = report.pipeline.trace
        text += (
            f"\nschedule of step {trace.step}: bubble {trace.measured_bubble:.1%} measured, "
            f"{trace.simulated_bubble:.1%} simulated; drawn in {trace.picture}"
        )
    return text


def _shown(loss: float | None, digits: int = 3) -> str:
    return "unknown" if loss is None else f"{loss:.{digits}f}"


def _stopped(stopped: Stopped) -> str:
    from cuboid.failures.interrupts import stopped_text

    text = stopped_text(stopped.by, stopped.step, stopped.steps)
    if stopped.step == 0:
        return f"{text}; there is nothing to resume from"
    if stopped.checkpoint is None:
        return f"{text}; the checkpoint could not be written"
    return f"{text}; --resume (make train RESUME=1) resumes from {stopped.checkpoint}"
