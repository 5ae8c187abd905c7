"""`nuclr train`: train a dual encoder on pairs."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from nuclr.cli.arguments import split_config
from nuclr.cli.report import write_final_report
from nuclr.errors import UserError, printable

if TYPE_CHECKING:
    from nuclr.runs.folder import TrainedRun

EPILOG = """
Examples:

    nuclr train data.train=pairs.csv data.val=held_out.csv       your own pairs, default settings
    nuclr train configs/flickr8k.yaml data.root=DATA seed=1      a config file, two keys changed
    nuclr train runs/flickr8k --resume                           continue a run that was stopped
    nuclr train CONFIG --dry-run                                 what it costs in time and memory
    torchrun --nproc_per_node 2 -m nuclr train CONFIG            the same on two processes
"""


def train(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file or a run folder; then settings to change."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in its folder, if there is one.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Build everything, try a few steps, estimate memory and time, and stop."),
    ] = False,
) -> None:
    """Train a dual encoder on pairs.

    The run is a folder: config.yaml, metrics.jsonl, results.json, checkpoints/, model/ and the page report.html
    (report=false: no page). Ctrl-C writes a checkpoint and stops; a resumed run ends with the same weights and metrics
    as one that was never stopped.
    """
    from nuclr.files import is_run
    from nuclr.runs import config
    from nuclr.runs.folder import CONFIG

    path, overrides = split_config(arguments, context)
    named = {"out", "name", "data.train"} & {text.partition("=")[0] for text in overrides}
    if resume and path is None and not named:
        raise UserError("--resume: name the run to resume, such as nuclr train runs/NAME --resume")
    if path is not None and is_run(path):
        overrides.append(f"out={path}")
        path = path / CONFIG
    settings = config.load(path, overrides)

    from nuclr.runs import launch
    from nuclr.training import dry_run as trial
    from nuclr.training import loop

    with training_errors(), launch.processes(launch.pick_device(settings.device)):
        if dry_run:
            estimate = trial.dry_run(settings)
            if launch.is_first():
                typer.echo(estimate.text)
                for warning in estimate.warnings:
                    typer.echo(printable(f"nuclr: {warning}"), err=True)
            return
        trained = loop.train(settings, resume=resume)
        if launch.is_first():
            _print_results(trained)
    if launch.is_first() and settings.report:
        write_final_report(trained.folder)


def _print_results(trained: "TrainedRun") -> None:
    from nuclr.evaluation.metrics import recall_is_near_chance, set_prefixes

    metrics = trained.val
    x, y = trained.sides
    rows = {
        f"recall, {x} to {y}": f"{x}_to_{y}_R",
        f"recall, {y} to {x}": f"{y}_to_{x}_R",
        "recall, mean": "mean_R",
        "chance": "mean_chance",
    }
    width = max(24, 2 + max(map(len, rows)))
    for prefix in set_prefixes(metrics):
        typer.echo(f"{prefix.rstrip('/'):{width}}{'@1':>9}{'@5':>9}{'@10':>9}")
        for label, key in rows.items():
            cells = "".join(f"{100 * metrics[f'{prefix}{key}@{k}']:>7.1f} %" for k in (1, 5, 10))
            typer.echo(f"{label:{width}}{cells}")
    for key, label in (("zero_shot", "zero-shot"), ("knn", "nearest-neighbor")):
        if f"{key}_acc1" in metrics:
            chance = 100 * metrics[f"{key}_chance"]
            typer.echo(f"{label} accuracy {100 * metrics[f'{key}_acc1']:.1f} % (chance {chance:.1f} %)")
    timing = trained.timing
    steps = trained.steps
    typer.echo(
        f"{timing['steps']:.0f} of {steps} steps in {timing['seconds']:.0f} s, {timing['samples_per_second']:,.0f} "
        f"samples/s; objective, state and logging took {timing.get('share_objective', 0):.1%} of the time\n"
        f"The run is in {trained.folder}"
    )
    if recall_is_near_chance(metrics):
        typer.echo(
            f"Recall is hardly above chance after {steps:,} steps. If the loss still falls, train longer "
            "(schedule.epochs) or with smaller batches (data.batch_size), or start from a trained model "
            "(model.pretrained)."
        )


class Stopped(Exception):  # noqa: N818 (not an error in the program)
    """A command that ended early, with the exit status for the shell."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def training_errors(how: str = "resume with --resume") -> Iterator[None]:
    """Turn an interrupted or failed run, or study, into `Stopped`, whose message says how to resume."""
    from nuclr.runs import launch
    from nuclr.training import guards

    try:
        yield
    except launch.Interrupted as stop:
        raise Stopped(f"{stop}; {how}", stop.status) from None
    except (guards.TrainingFailed, launch.LostProcess) as failed:
        raise Stopped(str(failed), 1) from None
    except launch.ElsewhereError:
        sys.exit(2)  # the first process reports the reason
