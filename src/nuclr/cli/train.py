"""`nuclr train`: train a dual encoder on pairs."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr.cli.arguments import split_config
from nuclr.cli.report import write_final_report
from nuclr.errors import UserError, printable

EPILOG = """
Examples:

    nuclr train                                                  the demo, about two minutes on two CPU cores
    nuclr train data.train=pairs.csv data.val=held_out.csv       your own pairs, default settings
    nuclr train configs/flickr8k.yaml data.root=DATA seed=1      a config file, two keys changed
    nuclr train runs/flickr8k --resume                           continue a run that was stopped
    nuclr train CONFIG --dry-run --rate 2000                     what it costs; cores for 2000 samples/s per GPU
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
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            metavar="N",
            help="With --dry-run: how many CPU cores the data path needs if each GPU trains N samples per second.",
        ),
    ] = None,
) -> None:
    """Train a dual encoder on pairs; without CONFIG and data.train, run the demo on built-in pairs.

    The run is a folder: config.yaml, metrics.jsonl, results.json, checkpoints/, model/ and the page report.html
    (report=false: no page). Ctrl-C writes a checkpoint and stops; a resumed run ends with the same weights and metrics
    as one that was never stopped.
    """
    from nuclr.runs import config

    if rate is not None and not dry_run:
        raise UserError("--rate is an option of --dry-run; add --dry-run")
    if rate is not None and not 0 < rate < math.inf:
        raise UserError(f"--rate {rate:g}: needs a number of samples per second above 0, such as 2000")
    path, overrides = split_config(arguments, context)
    if resume:
        _check_resumable(path, overrides)
    if path is not None and path.is_dir():
        if not (path / "config.yaml").is_file():
            hint = "" if resume else f"; to train on pairs in it, write data.train={path}"
            raise UserError(f"{path}: not a run folder (it has no config.yaml){hint}")
        overrides.append(f"out={path}")
        path = path / "config.yaml"
    settings = config.load(path, overrides)

    from nuclr.runs import launch
    from nuclr.studies.demo.study import is_demo
    from nuclr.training import dry_run as trial
    from nuclr.training import loop
    from nuclr.training.data_path import bottleneck_warning

    with training_errors(), launch.processes(launch.pick_device(settings.device)):
        if dry_run:
            estimate = trial.dry_run(settings)
            if launch.is_first():
                typer.echo(trial.describe(estimate, rate))
                warning = bottleneck_warning(estimate["data_rate"], estimate["step_rate"], rate)
                for text in [*estimate["overlaps"], *([warning] if warning else [])]:
                    typer.echo(printable(f"nuclr: {text}"), err=True)
            return
        preferred = Path("runs") / settings.name
        out = Path(settings.out) if settings.out else preferred if resume else launch.free_folder(preferred)
        if path is None and is_demo(settings):
            _run_demo(settings, out, resume)
            return
        results = loop.train(settings, out, resume)
        if launch.is_first():
            _print_results(results, out)
    if launch.is_first() and settings.report:
        write_final_report(out)


def _check_resumable(path: Path | None, overrides: list[str]) -> None:
    """Refuse `--resume` without a run: no config and no setting names one, or the folder does not exist.

    Raises:
        UserError: names runs that exist.

    """
    from nuclr.runs.folder import suggest_runs

    if path is None and not {"out", "name", "data.train"} & {text.partition("=")[0] for text in overrides}:
        runs = suggest_runs(Path("runs"))
        example = f"nuclr train {runs[0] if runs else 'runs/NAME'} --resume"
        others = f" (other runs: {', '.join(map(str, runs[1:]))})" if runs[1:] else ""
        raise UserError(f"--resume: name the run to resume, such as {example}{others}")
    if path is not None and not path.exists() and path.suffix.lower() not in (".yaml", ".yml"):
        runs = suggest_runs(path.parent, path.name)
        hint = f"there are {', '.join(map(str, runs))}" if runs else f"there are no runs in {path.parent}"
        raise UserError(f"{path}: no such run; {hint}")


def _run_demo(settings: Any, out: Path, resume: bool) -> None:
    from nuclr.runs import folder
    from nuclr.studies.compare.pool import Stop
    from nuclr.studies.demo import study, text

    if folder.is_run(out) and not resume:
        raise UserError(f"{out} already holds a run; name another folder with out=..., or add --resume to continue it")
    begin = time.monotonic()
    typer.echo(text.opening(settings))
    progress = study.ProgressLine()
    try:
        results = study.train_all(settings, out, progress.say)
    except Stop as stop:
        raise Stopped(f"{stop}; continue with nuclr train out={out} --resume", stop.status) from None
    finally:
        progress.end()
    typer.echo(text.results_text(results))
    page = settings.report and write_final_report(out, announce=False)
    typer.echo(text.closing(out, page, time.monotonic() - begin))


def _print_results(results: dict[str, Any], out: Path) -> None:
    from nuclr.evaluation.metric_names import set_prefixes

    metrics = results["val"]
    for prefix in set_prefixes(metrics):
        x, y = results["sides"]
        labels = {f"{x}_to_{y}": f"recall, {x} to {y}", f"{y}_to_{x}": f"recall, {y} to {x}", "mean": "recall, mean"}
        width = max(24, 2 + max(map(len, labels.values())))
        typer.echo(f"{prefix.rstrip('/'):{width}}{'@1':>9}{'@5':>9}{'@10':>9}")
        for key, label in labels.items():
            cells = "".join(f"{100 * metrics[f'{prefix}{key}_R@{k}']:>7.1f} %" for k in (1, 5, 10))
            typer.echo(f"{label:{width}}{cells}")
        cells = "".join(f"{100 * metrics[f'{prefix}mean_chance@{k}']:>7.1f} %" for k in (1, 5, 10))
        typer.echo(f"{'chance':{width}}{cells}")
    if "zero_shot_acc1" in metrics:
        accuracy, chance = (100 * metrics[key] for key in ("zero_shot_acc1", "zero_shot_chance"))
        typer.echo(f"zero-shot accuracy {accuracy:.1f} % (chance {chance:.1f} %)")
    if "knn_acc1" in metrics:
        accuracy, chance = (100 * metrics[key] for key in ("knn_acc1", "knn_chance"))
        typer.echo(f"nearest-neighbor accuracy {accuracy:.1f} % (chance {chance:.1f} %)")
    timing, steps = results["timing"], results["steps"]
    measured = timing.get("steps", steps)
    share = f"of {steps} steps" if measured < steps else "steps"
    rate = (
        f", {timing['samples_per_second']:,.0f} samples/s; objective, state and logging took "
        f"{timing['share_objective']:.1%} of the time"
        if measured
        else ""
    )
    typer.echo(f"{measured} {share} in {timing['seconds']:.0f} s{rate}\nThe run is in {out}")
    for prefix in set_prefixes(metrics):
        if metrics[f"{prefix}mean_R@10"] < 2 * metrics[f"{prefix}mean_chance@10"]:
            typer.echo(
                f"Recall is hardly above chance after {steps:,} steps. If the loss still falls, train longer "
                "(schedule.epochs) or with smaller batches (data.batch_size), or start from a trained model "
                "(model.pretrained)."
            )
            break


class Stopped(Exception):  # noqa: N818 (not an error in the program)
    """A command that ended early, with the exit status for the shell."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def training_errors() -> Iterator[None]:
    """Turn an interrupted or failed run into `Stopped`."""
    from nuclr.runs import launch
    from nuclr.training import guards

    try:
        yield
    except guards.Interrupted as stop:
        raise Stopped(f"{stop}; resume with --resume", stop.status) from None
    except (guards.TrainingFailed, launch.LostProcess) as failed:
        raise Stopped(str(failed), 1) from None
    except launch.ElsewhereError:
        sys.exit(2)  # the first process reports the reason
