"""The page of `nuclr train`: what a model learned, from the run's folder, its model and its data."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nuclr.data.side import SideName
from nuclr.evaluation.metrics import WIDTH, NamedMetric, metrics_of, named_metrics, set_prefixes
from nuclr.files import parse_json, read_text
from nuclr.report import numbers
from nuclr.report.charts import Chart, Series, line_chart
from nuclr.report.page import Block, Fold, LeaveOut, Options, Page, Section, Table, Text, Tile
from nuclr.report.pages.training_samples import popularity, retrieval_examples
from nuclr.report.training_run import TrainingRun
from nuclr.runs import folder
from nuclr.runs.run import Run
from nuclr.training.logging import duration

SIDE_COLORS: dict[SideName, int] = {"y": 1, "x": 3}

USE = """\
from nuclr.models import DualEncoder
from nuclr.popularity import PopularityCorrection

model = DualEncoder.from_pretrained({model!r})
queries = model.encode_x(x)  # {x}
gallery = model.encode_y(y)  # {y}
fix = PopularityCorrection().fit(model.encode_x(past_x), gallery)  # ranks hubs lower; needs no labels
scores, found = (fix.queries(queries) @ fix.gallery(gallery).T).topk(2)  # the two best per query"""


def open_folder(path: Path, options: Options) -> TrainingRun:
    """Open the run in a folder, and read what it logged; notes say what could not be read."""
    notes: list[str] = []
    return TrainingRun(
        run=Run.open(path),
        metrics=folder.read_lines(path / folder.METRICS, {"step", "epoch"}, notes),
        timing=folder.read_lines(path / folder.TIMING, {"seconds"}, notes),
        options=options,
        notes=notes,
    )


def make_page(run: TrainingRun) -> Page:
    """Return the page of a run."""
    settings = run.run.settings
    page = Page(
        kind="training run",
        title=settings.name,
        verdict=describe_run(run),
        notes=run.notes,
        sections=[
            Section("summary", "Summary", summary),
            Section("curves", "Training curves", curves, menu="Curves"),
            Section("examples", "Retrieval examples", retrieval_examples, menu="Examples"),
            Section("popularity", "Popularity", popularity),
            Section("use", "Use this model", use_this_model, menu="Use"),
            Section("repeat", "How to repeat this run", how_to_repeat, menu="Repeat"),
        ],
    )
    if not run.run.finished:
        done = f"{numbers.count(run.step)} steps are done, within {settings.schedule.epochs} epochs"
        page.note(f"This run is not finished: {done}. Resume it with: nuclr train {run.run.folder} --resume")
    if run.views and settings.data.classes is None:
        page.note("This run has no labeled images (data.classes), so its features were not evaluated.")
    if not run.views and not settings.data.val:
        page.note("This run has no held-out pairs (data.val), so there is no recall on pairs it has not seen.")
    return page


def describe_run(run: TrainingRun) -> str:
    """Return one sentence with method, data, encoders and length of the training."""
    data = run.run.settings.data
    model = run.run.settings.model
    things = "images" if data.contrasts_views else "pairs"
    pairs = f"{numbers.count(run.run.results.pairs)} {things}" if run.run.results else things
    encoders = model.pretrained or f"{model.x.encoder or 'default'} and {model.y.encoder or 'default'}"
    length = f"{run.run.settings.schedule.epochs} epochs in batches of {data.batch_size}"
    return f"{run.objective.label} on {pairs} of {data.train}; encoders {encoders}; {length}."


def measures(run: TrainingRun) -> list[NamedMetric]:
    """Return all metrics of the last evaluation that the registry of metrics knows.

    Those of shorter features are left out. So are directions for views: both sides are the same items, so each item
    finds itself.
    """
    return [one for one in named_metrics(run.evaluation) if WIDTH not in one.name and not (run.views and one.direction)]


def summary(run: TrainingRun) -> Iterator[Block]:
    """Show headline numbers next to chance, all metrics of the last evaluation, and facts of the run."""
    results = run.run.results
    rows: list[list[str]] = []
    for measure in measures(run):
        if measure.direction == "mean":
            continue
        value = measure.metric.text(run.evaluation[measure.name])
        chance = numbers.percent(measure.chance(run.evaluation), 2)
        rows.append([measure.label, chance, value])
        # A tile for the first metric of each kind: recall@1, zero-shot accuracy, nearest neighbors.
        if measure.metric is metrics_of(measure.metric.kind)[0]:
            yield Tile(_upper(measure.label), value, f"chance {chance}")
    if results:
        # results.json has the time since the last resume, timing.jsonl that of all epochs without evaluations.
        seconds = max(results.timing["seconds"], sum(line["seconds"] for line in run.timing))
        speed = f"{numbers.count(results.timing['samples_per_second'])} pairs per second"
        yield Tile("Training time", duration(seconds), speed)
    if rows:
        yield Table(
            f"{'Labeled images' if run.views else 'Held-out pairs'}, after the last evaluation",
            ["", "chance", run.objective.label],
            rows,
        )
    if len(run.run.settings.model.matryoshka) > 1 and rows:
        recalls = [metric for metric in metrics_of("retrieval") if metric.both]
        rows = []
        for prefix in set_prefixes(run.evaluation):
            cells = [metric.text(run.evaluation[f"{prefix}mean_{metric.key}"]) for metric in recalls]
            rows.append([prefix.rstrip("/").replace("/", ", ") or "all coordinates", *cells])
        yield Table("Shorter features, mean of both directions", ["", *(metric.label for metric in recalls)], rows)
    yield Table("The run", [], facts(run))
    if results:
        yield Text(f"Protocol: {results.protocol.removesuffix('; fractions, not percent')}.", "small")


def facts(run: TrainingRun) -> list[list[str]]:
    """Return the main facts about a run, as names and values."""
    settings = run.run.settings
    results = run.run.results
    data = settings.data
    rows = {
        "Method": run.objective.label,
        "Training data": str(data.train),
        "Labeled images" if run.views else "Held-out data": str(data.classes) if run.views else data.describe_val(),
        "Batch size": numbers.count(data.batch_size),
        "Epochs": numbers.count(settings.schedule.epochs),
        "Steps": numbers.count(results.steps if results else run.step),
        "Seed": str(settings.seed),
    }
    if results:
        rows |= {
            "Temperature": numbers.number(results.temperature),
            "Training pairs": numbers.count(results.pairs),
            "Bad samples left out": numbers.count(results.bad_samples),
            "Trained parameters": numbers.count(results.parameters),
            "Processes": numbers.count(results.processes),
        }
    seconds = sum(line["seconds"] for line in run.timing)
    if seconds:
        shares = []
        for name in ("data", "encoders", "objective", "other"):
            spent = sum(line[name] * line["seconds"] for line in run.timing)
            shares.append(f"{name} {numbers.percent(spent / seconds, 0)}")
        rows["Time within epochs"] = ", ".join(shares)
    return [[name, value] for name, value in rows.items()]


def curves(run: TrainingRun) -> Iterator[Block]:
    """Show a chart of everything that was logged more than once, all over the same epochs."""
    charts = list(_charts(run))
    if not charts:
        raise LeaveOut("Nothing was logged more than once yet, so there are no curves.")
    yield Text(
        "Point at a chart, or use the arrow keys on it, to read values. Click a name in a legend to hide or show its "
        "curve."
    )
    yield from charts


def _charts(run: TrainingRun) -> Iterator[Chart]:
    yield from _chart(
        "Objective, estimated", [Series(run.objective.label, *run.curve("train/loss"), run.objective.color)]
    )
    groups: dict[tuple[str, str], list[NamedMetric]] = {}
    for measure in measures(run):
        groups.setdefault((measure.set, measure.metric.key), []).append(measure)
    for group in groups.values():
        # The mean of both directions, or each of them if the metric has no mean.
        shown = [measure for measure in group if measure.direction in ("mean", "")] or group
        metric = shown[0].metric
        where = f" on {shown[0].set or 'held-out pairs'}" if metric.kind == "retrieval" else ""
        chance = shown[0].chance(run.evaluation)
        series = []
        for k, measure in enumerate(shown):
            direction = f", {measure.direction.replace('_to_', ' to ')}" if len(shown) > 1 else ""
            curve = run.curve(f"val/{measure.name}")
            series.append(Series(run.objective.label + direction, *curve, run.objective.color, dashed=k > 0))
        yield from _chart(
            _upper(metric.label) + where,
            series,
            percent=metric.format == "percent",
            zero=True,
            reference=None if chance is None else (chance, f"chance {numbers.percent(chance, 2)}"),
        )
    for state, title in (("zeta", "Zeta"), ("tau", "Temperatures")):
        bands = []
        for side, words in run.words.items():
            label = f"view {side}" if run.views else words.many
            name = f"state/{state}_{side}"
            band = (run.curve(f"{name}_q05")[1], run.curve(f"{name}_q95")[1])
            bands.append(Series(label, *run.curve(f"{name}_q50"), SIDE_COLORS[side], band=band))
        yield from _chart(f"{title}: median, 5 to 95 %", bands)
    epochs, scale = run.curve("train/scale")
    yield from _chart("Temperature, learned", [Series("temperature", epochs, [1 / value for value in scale], 6)])
    rates = [Series("encoders", *run.curve("train/lr")), Series("zeta", *run.curve("train/zeta_lr"), 2, dashed=True)]
    yield from _chart("Learning rates", rates, zero=True)
    yield from _chart("Norm of the gradient", [Series("norm", *run.curve("train/grad_norm"), 8)], log_y=True)


def _chart(
    title: str,
    series: list[Series],
    **options: Any,
) -> Iterator[Chart]:
    if any(len(s.x) > 1 for s in series):
        yield line_chart(title, series, "epoch", **options)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def use_this_model(run: TrainingRun) -> Iterator[Block]:
    """Show the lines that load the model and search with it, and the commands that measure and export it."""
    path = run.run.folder
    if not (path / folder.MODEL).is_dir():
        raise LeaveOut
    yield Text(
        "These lines of Python load the model and search with it. Put lists of your own items in the place of x and y."
    )
    words = {side: words.many for side, words in run.words.items()}
    yield Text(USE.format(model=str(path / folder.MODEL), **words), "code")
    yield Text(
        "Measure the plain and the corrected search on the held-out pairs, see their hubs, or export the model for "
        "another tool:"
    )
    source = shlex.quote(str(path))
    yield Text(
        f"nuclr evaluate {source} --correct bank=train\n"
        f"nuclr hubness {source} --out hubness\n"
        f"nuclr export {source} --to onnx --out onnx",
        "code",
    )


def how_to_repeat(run: TrainingRun) -> Iterator[Block]:
    """Show the command, the settings, and the versions and machine of the run."""
    path = run.run.folder
    if (path / folder.ENVIRONMENT).is_file():
        environment = parse_json(read_text(path / folder.ENVIRONMENT))
        yield Text("The command that started it:")
        yield Text(str(environment["command"]), "code")
        used = environment["versions"] | environment["machine"]
        yield Text(", ".join(f"{name} {value}" for name, value in used.items()) + ".", "small")
    yield Text("To repeat it in another folder, with the resolved settings below:")
    yield Text(f"nuclr train {path / folder.CONFIG} out={path}-again", "code")
    yield Fold("The resolved settings", [Text(read_text(path / folder.CONFIG), "code")])
