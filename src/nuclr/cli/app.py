"""The command line. Heavy imports happen inside the commands, so that --help answers at once."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr import __version__
from nuclr.cli import compare, evaluate, popularity, report
from nuclr.errors import UserError


class Stopped(Exception):  # noqa: N818 (it was asked to)
    """A run that ended before its time, with the status that a shell should see."""

    def __init__(self, told: str, status: int) -> None:
        super().__init__(told)
        self.status = status


app = typer.Typer(
    name="nuclr",
    help="Contrastive learning on paired data that works at small batch sizes, and tells which data is popular.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point: a user's mistake is one or two lines on stderr and status 2, never a traceback."""
    # Threads that spin while they wait bring a run to a standstill (17 samples/s, not 320) where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except UserError as error:
        typer.echo(f"nuclr: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("nuclr: interrupted", err=True)
        sys.exit(130)
    except Stopped as stopped:
        typer.echo(f"nuclr: {stopped}", err=True)
        sys.exit(stopped.status)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nuclr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def toy(
    out: Annotated[Path, typer.Option(help="Folder for toy.json and the figures.")],
    seeds: Annotated[int, typer.Option(min=2, help="Samples at the largest n; smaller n get up to 5x as many.")] = 40,
    max_n: Annotated[int, typer.Option(min=100, max=3200, help="Largest number of pairs; less is quicker.")] = 3200,
    seed: Annotated[int, typer.Option(min=0, help="Start of the random numbers.")] = 0,
) -> None:
    """Reproduce the paper's toy study: how wrong is a uniform popularity, and how right the estimated one.

    Everything is known exactly here: anchors x on a half disc, y on the unit square, p(y|x) proportional to
    exp(x.y/tau). Writes the generalization error of maximum likelihood, of the global contrastive loss (uniform
    popularity) and of NUCLR (estimated popularity), and six figures, as PNG and SVG.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from nuclr.studies.toy import study

    sizes = tuple(n for n in study.SIZES if n <= max_n)
    columns = (TextColumn("toy study"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_progress_console()) as bar:
        task = bar.add_task("toy", total=study.total_work(seeds, sizes))
        content = study.write_study(out, seeds, sizes, seed, lambda done: bar.advance(task, done))
    for tau in study.TEMPERATURES:
        typer.echo(f"\ntau = {tau}: |empirical risk - true risk|, mean of {seeds} or more samples")
        typer.echo(f"{'n':>8}" + "".join(f"{method:>12}" for method in study.METHODS))
        for n in sizes:
            here = {r["method"]: r["error_mean"] for r in content["records"] if (r["tau"], r["n"]) == (tau, n)}
            typer.echo(f"{n:>8}" + "".join(f"{here[method]:>12.4f}" for method in study.METHODS))
        found = [r for r in content["records"] if r["tau"] == tau and r["method"] == "nuclr"]
        correlations = ", ".join(f"{r['rank_correlation_mean']:.4f} (n = {r['n']})" for r in found)
        typer.echo(f"rank correlation of estimated and true popularity: {correlations}")
    typer.echo(f"\nFigures and {study.SUMMARY} are in {out} ({content['seconds']:.0f} s)")
    report.at_the_end(out)


_TRAIN_EXAMPLES = """
Examples:

    nuclr train                                                  the demo, about two minutes on two CPU cores
    nuclr train configs/flickr8k.yaml data.root=DATA seed=1      a config, two keys changed
    nuclr train runs/flickr8k --resume                           go on with a run that was stopped
    torchrun --nproc_per_node 2 -m nuclr train CONFIG            the same on two processes
"""


@app.command(epilog=_TRAIN_EXAMPLES)
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file or the folder of a run; then settings to change."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in its folder, if there is one.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, try one batch, estimate memory and time, and stop.")
    ] = False,
) -> None:
    """Train a dual encoder on pairs; without CONFIG, the demo on built-in pairs.

    The run is a folder: config.yaml, metrics.jsonl, results.json, checkpoints/, model/ and report.html, a page to look
    at (report=false: without). Ctrl-C writes a checkpoint and stops; --resume goes on, and ends with the same weights
    and metrics as if it had never stopped.
    """
    from nuclr.runs import config

    given = list(arguments or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    if path is not None and path.is_dir():
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path}: no run there (no config.yaml); name a YAML file or the folder of a run")
        given.append(f"out={path}")
        path = path / "config.yaml"
    settings = config.load(path, given)
    from nuclr.runs import launch
    from nuclr.training import demo as demonstration
    from nuclr.training import dry_run as trial
    from nuclr.training import loop, signals

    with _errors_of_training(launch, loop, signals), launch.processes(launch.pick_device(settings.device)):
        if dry_run:
            found = trial.dry_run(settings)
            if launch.is_first():
                typer.echo(trial.describe(found))
            return
        wanted = Path("runs") / settings.name
        out = Path(settings.out) if settings.out else wanted if resume else launch.free_folder(wanted)
        if path is None and demonstration.is_demo(settings):
            found = demonstration.demo(settings, out, resume)
            if launch.is_first():
                typer.echo(demonstration.table(found, out))
        else:
            results = loop.train(settings, out, resume)
            if launch.is_first():
                _print_results(results, out)
    if launch.is_first() and settings.report:
        report.at_the_end(out)


@contextlib.contextmanager
def _errors_of_training(launch: Any, loop: Any, signals: Any) -> Iterator[None]:
    try:
        yield
    except signals.Interrupted as stop:
        raise Stopped(f"{stop}; go on with --resume", stop.status) from None
    except loop.TrainingFailed as failed:
        raise Stopped(str(failed), 1) from None
    except launch.ElsewhereError:
        sys.exit(2)  # the first process says why


def _print_results(results: dict[str, Any], out: Path) -> None:
    found = results["val"]
    if "mean_R@1" in found:
        typer.echo(f"{'':24}{'@1':>9}{'@5':>9}{'@10':>9}")
        for key, told in (("image_to_text", "image to text"), ("text_to_image", "text to image"), ("mean", "mean")):
            cells = "".join(f"{100 * found[f'{key}_R@{k}']:>7.1f} %" for k in (1, 5, 10))
            typer.echo(f"{'recall, ' + told:24}{cells}")
        cells = "".join(f"{100 * found[f'mean_chance@{k}']:>7.1f} %" for k in (1, 5, 10))
        typer.echo(f"{'chance':24}{cells}")
    if "zero_shot_acc1" in found:
        accuracy, chance = (100 * found[key] for key in ("zero_shot_acc1", "zero_shot_chance"))
        typer.echo(f"zero-shot accuracy {accuracy:.1f} % (chance {chance:.1f} %)")
    timing = results["timing"]
    share = timing["share_objective"]
    typer.echo(
        f"{results['steps']} steps in {timing['seconds']:.0f} s, {timing['samples_per_second']:,.0f} samples/s; "
        f"objective, state and logging {share:.1%} of the time\nThe run is in {out}"
    )


@app.command()
def embed(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A trained run, or a folder of encoders (nuclr, CLIP, SigLIP).")
    ],
    out: Annotated[Path, typer.Option(help="Embedding file to write: .npz or .safetensors.")],
    pairs: Annotated[
        str | None, typer.Option(help="Pairs to embed, in any format that training takes; default: the run's own.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Images alone: a folder. Their names go to a .txt beside.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="Texts alone: a file with one a line.")] = None,
    root: Annotated[str | None, typer.Option(help="Folder that the names of the pairs are relative to.")] = None,
    split: Annotated[str | None, typer.Option(help="Which split, where the pairs have several.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint's weights, not the last.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples at a time.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Write the features of pairs, of images alone or of texts alone; under torchrun the work is shared."""
    if sum(option is not None for option in (pairs, images, texts)) > 1:
        raise UserError("--pairs, --images and --texts exclude one another; give one of them")

    from nuclr.runs import embed as embedding
    from nuclr.runs import folder, launch
    from nuclr.training import loop, signals

    with _errors_of_training(launch, loop, signals):
        if folder.is_run(run):
            trained = embedding.open_run(run, best)
            model, data = trained.model, trained.config["data"]
            root = root if root is not None else data["root"]
            if pairs is None and images is None and texts is None:
                pairs, split = data["train"], split or data["split"]
        else:
            if best:
                raise UserError(f"--best needs a run, and {run} is none")
            model = embedding.open_encoders(str(run))
            if pairs is None and images is None and texts is None:
                raise UserError("say what to embed with --pairs, --images or --texts")
        where = launch.pick_device(device)
        with launch.processes(where):
            found = embedding.embed(
                model, out, pairs=pairs, images=images, texts=texts, root=root, split=split, batch=batch_size,
                device=where,
            )  # fmt: skip
    if launch.is_first():
        shapes = ", ".join(f"{name} {shape}" for name, shape in found.items() if name != "bad_samples")
        bad = f"; {len(found['bad_samples'])} bad samples left out" if found["bad_samples"] else ""
        typer.echo(f"{out}: {shapes}{bad}")


app.command()(popularity.popularity)
app.command(epilog=compare.EPILOG)(compare.compare)
app.command(epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command(epilog=report.EPILOG)(report.report)


def _progress_console() -> Any:
    from rich.console import Console

    return Console(stderr=True)
