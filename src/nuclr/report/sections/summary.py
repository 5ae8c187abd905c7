"""The section "summary" of a training page: headline numbers next to chance and baseline, and the facts of the run."""

from dataclasses import dataclass

from nuclr.report import numbers
from nuclr.report.render import Table, Tile
from nuclr.report.training_run import RunLog, TrainingRun
from nuclr.runs.side_words import heading

KS = (1, 5, 10)
ACCURACIES = (
    ("zero_shot_acc1", "zero_shot_chance", "zero-shot accuracy"),
    ("knn_acc1", "knn_chance", "k-nearest-neighbor accuracy"),
)


@dataclass(frozen=True)
class Summary:
    """Content of the section.

    `table` is None if nothing was evaluated; `evaluated` names the data and `protocol` says how it was done.
    """

    tiles: list[Tile]
    table: Table | None
    evaluated: str
    facts: list[tuple[str, str]]
    protocol: str


def run_summary(context: TrainingRun) -> Summary:
    """Return the summary; add a note if the run has no held-out pairs."""
    data = context.log.settings.data
    if context.views and data.classes is None:
        context.note("This run has no labeled images (data.classes), so its features were not evaluated.")
    if not context.views and data.val is None:
        context.note("This run has no held-out pairs (data.val), so there is no recall on pairs it has not seen.")
    return Summary(
        tiles=headline(context),
        table=recall_table(context),
        evaluated="Labeled images" if context.views else "Held-out pairs",
        facts=facts(context),
        protocol=str((context.log.results or {}).get("protocol", "")).removesuffix("; fractions, not percent"),
    )


def describe_run(log: RunLog) -> str:
    """Return one sentence with method, data, encoders and length of the training."""
    settings, results = log.settings, log.results or {}
    data = settings.data
    things = f"images, {data.x.views + data.y.views} views each," if data.contrasts_views else "pairs"
    pairs = f"{numbers.count(results['pairs'])} {things}" if "pairs" in results else things
    model = settings.model
    names = [str(side.encoder or "default") for side in (model.x, model.y)]
    if names == ["vectors", "vectors"]:
        encoders = "linear heads on vectors"
    elif model.shared and model.pretrained is None:
        encoders = f"encoder {names[0]}, shared by both sides"
    else:
        encoders = f"encoders {model.pretrained or ' and '.join(names)}"
    epochs = settings.schedule.epochs
    length = f"{epochs} epoch{'s' if epochs > 1 else ''} in batches of {settings.data.batch_size}"
    return f"{log.method} on {pairs} of {settings.data.train}; {encoders}; {length}."


def directions(context: TrainingRun) -> list[tuple[str, str]]:
    """Return the directions that were evaluated: as metrics name them, and for readers. Views have none.

    Both sides of views are the same items, so each item finds itself. If there are several sets of held-out pairs, a
    direction is that of one set: ("coco/image_to_text", "image to text (coco)").
    """
    named = []
    for key in [] if context.views else context.log.directions():
        name, _, direction = key.rpartition("/")
        named.append((key, direction.replace("_to_", " to ") + (f" ({name})" if name else "")))
    return named


def headline(context: TrainingRun) -> list[Tile]:
    """Return recall@1 in both directions, zero-shot accuracy, and the training time."""
    values = context.log.last_evaluation()
    baseline = context.baseline
    other = baseline.last_evaluation() if baseline else {}
    tiles = []
    headlines = [(f"{key}_R@1", f"{key}_chance@1", f"{heading(name)}, recall@1") for key, name in directions(context)]
    headlines += [(key, chance, label[0].upper() + label[1:]) for key, chance, label in ACCURACIES]
    for key, chance, label in headlines:
        if key in values:
            details = [f"chance {_chance(values.get(chance))}"]
            if baseline and key in other:
                details.append(f"{baseline.method} {numbers.percent(other[key])}")
            tiles.append(Tile(label, numbers.percent(values[key]), " · ".join(details)))
    if context.log.results:
        rate = context.log.results["timing"]["samples_per_second"]  # 0 if no step was left when the run was resumed
        speed = f"{numbers.count(rate)} {'images' if context.views else 'pairs'} per second" if rate else ""
        tiles.append(Tile("Training time", numbers.duration(context.log.seconds()), speed))
    return tiles


def _chance(level: float | None) -> str:
    return numbers.percent(level, 2)


def recall_table(context: TrainingRun) -> Table | None:
    """Return all metrics of the last evaluation next to chance, the better of run and baseline in bold."""
    evaluations = [log.last_evaluation() for log in context.logs]
    rows: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    recalls = [(f"{d}_R@{k}", f"{d}_chance@{k}", f"recall@{k}, {name}") for d, name in directions(context) for k in KS]
    for key, chance, label in (*recalls, *ACCURACIES):
        if key not in evaluations[0]:
            continue
        values = [evaluation.get(key) for evaluation in evaluations]
        rows.append([label, _chance(evaluations[0].get(chance)), *(numbers.percent(v) for v in values)])
        known = [v for v in values if v is not None]
        if len(known) > 1 and max(known) > min(known):
            best.add((len(rows) - 1, 2 + values.index(max(known))))
    columns = ["", "chance", *(log.method for log in context.logs)]
    return Table(columns, rows, frozenset(best)) if rows else None


def facts(context: TrainingRun) -> list[tuple[str, str]]:
    """Return the main facts about a run, as names and values."""
    log = context.log
    results, settings = log.results or {}, log.settings
    rows = [
        ("Method", log.method),
        (
            "Training images" if context.views else "Training pairs",
            numbers.count(results["pairs"]) if "pairs" in results else numbers.MISSING,
        ),
        ("Training data", str(settings.data.train)),
        ("Labeled images", str(settings.data.classes or "none"))
        if context.views
        else ("Held-out data", settings.data.describe_val()),
        ("Batch size", numbers.count(settings.data.batch_size)),
        ("Epochs", numbers.count(settings.schedule.epochs)),
        ("Steps", numbers.count(context.step())),
        ("Temperature", numbers.number(context.temperature())),
        ("Trained parameters", numbers.count(results["parameters"]) if "parameters" in results else numbers.MISSING),
        ("Seed", str(settings.seed)),
        ("Processes", str(results.get("processes", numbers.MISSING))),
        ("Bad samples left out", numbers.count(len(log.bad))),
    ]
    return [(name, value) for name, value in rows if value != numbers.MISSING]
