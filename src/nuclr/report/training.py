"""The page of a training run: its folder, and the model and data that its settings name -> what the template shows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.report import confusion, curves, gallery, numbers, popularity, sample, summary
from nuclr.report.charts import Chart
from nuclr.report.logs import RunLog, read_run
from nuclr.report.pictures import Pictures, pictures_of
from nuclr.report.retrieval import caption_of, retrieval
from nuclr.runs import components as parts
from nuclr.runs import folder
from nuclr.runs.config import from_dict
from nuclr.runs.folder import machine, versions
from nuclr.runs.launch import pick_device
from nuclr.runs.settings import Data

SAMPLES = 3000
MOST_HELD_OUT = 2000  # pairs that examples are drawn from
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """`samples`: training pairs that popularity is solved on (None: SAMPLES, or fewer where the model is slow).

    gallery: samples of a side that it shows.
    """

    samples: int | None = None
    gallery: int = 30
    pictures: bool = True
    model: bool = True


@dataclass
class TrainingPage:
    """All that the template needs; what is missing is None or empty, and `notes` say why."""

    title: str
    sentence: str
    state: str
    tiles: list[summary.Tile]
    facts: list[tuple[str, str]]
    notes: list[str]
    table: summary.Table | None
    curves: list[Chart]
    temperature: str
    time: list[tuple[str, float, int]]
    seconds: str
    config: str
    command: str
    again: str
    versions: dict[str, str]
    machine: dict[str, Any]
    recorded: bool
    protocol: str
    retrieval: list[dict[str, Any]] = field(default_factory=list)
    retrieval_of: str = ""
    confusion: dict[str, Any] | None = None
    popularity: dict[str, Any] | None = None


def training_page(path: Path, options: Options) -> TrainingPage:
    """Read the run, encode some of its pairs, solve their popularity."""
    run = read_run(path)
    results = run.results or {}
    page = TrainingPage(
        title=str(run.config.get("name", path.name)),
        sentence=summary.sentence(run),
        state=_state(run),
        tiles=summary.headline(run),
        facts=summary.facts(run),
        notes=[*run.notes, *(run.baseline.notes if run.baseline else [])],
        table=summary.recall_table(run),
        curves=curves.training_curves(run),
        temperature=_temperature_told(run),
        time=summary.time_shares(run),
        seconds=numbers.duration(summary.seconds(run)) if results else "",
        config=(path / folder.CONFIG).read_text(encoding="utf-8"),
        command=str(run.environment.get("command", "")),
        again=f"nuclr train {path / folder.CONFIG} out={path}-again",
        versions=run.environment.get("versions") or versions(),
        machine=run.environment.get("machine") or machine(),
        recorded="versions" in run.environment,
        protocol=str(results.get("protocol", "")).removesuffix("; fractions, not percent"),
    )
    if page.state:
        page.notes.insert(0, page.state)
    if not run.metrics:
        page.notes.append("Nothing was logged yet, so there are no curves.")
    if run.config["data"].get("val") is None:
        page.notes.append("This run has no held-out pairs (data.val), so there is no recall of pairs it never saw.")
    if run.config["data"].get("classes") is None:
        page.notes.append("No labeled images were named (data.classes), so there is no zero-shot classification.")
    if run.bad:
        page.notes.append(f"{numbers.count(len(run.bad))} bad samples were left out of training, see {folder.BAD}.")
    if not options.model:
        page.notes.append("Made without the model, as asked for: no examples and no popularity.")
        return page
    opened = _attempt(page, "The model", lambda: sample.open_model(run))
    if opened is not None:
        _attempt(page, "What needs the model", lambda: _with_model(page, run, *opened, options))
    return page


def _with_model(page: TrainingPage, run: RunLog, model: DualEncoder, told: str, options: Options) -> None:
    data = from_dict(run.config).data
    model.to(pick_device("auto")).eval()
    if run.results is None:
        page.notes.append(f"Examples and popularity are those of {told}.")
    train = _attempt(page, "The training data", lambda: sample.open_train(run))
    held_out = _attempt(page, "The held-out data", lambda: sample.open_val(run)) if data.val is not None else None
    source = held_out or train
    if source is not None:
        seen = "" if held_out else " (which it was trained on)"
        page.retrieval_of = ("held-out" if held_out else "training") + " pairs" + seen
        drawn = _attempt(page, "Retrieval examples", lambda: _held_out(model, *source, data))
        if drawn is not None:
            page.retrieval = retrieval(drawn, _pictures(page, drawn.pairs, options))
            if len(drawn.numbers) < drawn.total:
                page.retrieval_of += f" (a random {numbers.count(len(drawn.numbers))} of {numbers.count(drawn.total)})"
    if data.classes is not None and train is not None:
        found = _attempt(page, "Zero-shot confusion", lambda: _confusion(model, data, train[0]))
        if found is not None:
            page.confusion = {
                "chart": confusion.heat_map(found),
                "mistakes": found.mistakes(),
                "accuracy": found.accuracy(),
                "pictures": int(found.table.sum()),
                "total": found.total,
                "classes": len(found.classes),
            }
    if train is not None:
        page.popularity = _attempt(page, "Popularity", lambda: _popularity(page, run, model, *train, data, options))


def _held_out(model: DualEncoder, pairs: Pairs, used: np.ndarray, data: Data) -> sample.Sample:
    return _encode(model, pairs, used, sample.affordable(model, pairs, used, MOST_HELD_OUT, data), data)


def _confusion(model: DualEncoder, data: Data, pairs: Pairs) -> confusion.Confusion:
    labeled = parts.open_classes(data, pairs)
    most = sample.affordable(model, pairs, np.arange(len(pairs)), confusion.MOST_IMAGES, data)
    return confusion.confusion(model, labeled, most, data.fit, data.workers)


def _attempt(page: TrainingPage, what: str, make: Callable[[], T]) -> T | None:
    """What `make` makes; a page is made in any case, so whatever goes wrong becomes a note on it."""
    try:
        return make()
    except UserError as error:
        page.notes.append(f"{what} is missing: {error}.")
    except Exception as error:  # models and data of other people can fail in any way
        told = (str(error).splitlines() or [""])[0]
        page.notes.append(f"{what} is missing: {type(error).__name__}: {told}")
    return None


def _encode(model: DualEncoder, pairs: Pairs, used: np.ndarray, most: int, data: Data) -> sample.Sample:
    chosen = sample.readable(pairs, sample.choose(pairs, used, most))
    if len(chosen) < 2:
        raise UserError("fewer than two of its pairs can be read")
    return sample.encode(model, pairs, chosen, len(used), data)


def _pictures(page: TrainingPage, pairs: Pairs, options: Options) -> Pictures:
    if pairs.x_kind != "image":
        note = "The data holds vectors, not images, so there are no pictures."
    elif not options.pictures:
        note = "Made without pictures, as asked for."
    else:
        return pictures_of(pairs)
    if note not in page.notes:
        page.notes.append(note)
    return lambda _: None


def _popularity(
    page: TrainingPage, run: RunLog, model: DualEncoder, pairs: Pairs, used: np.ndarray, data: Data, options: Options
) -> dict[str, Any]:
    most = options.samples or sample.affordable(model, pairs, used, SAMPLES, data)
    drawn = _encode(model, pairs, used, most, data)
    state = sample.newest_state(run.folder)
    sides = popularity.solve_sample(drawn, _temperature(run), (state or {}).get("objective"))
    caption, picture = caption_of(pairs), _pictures(page, pairs, options)
    labels = (caption, pairs.name, picture)
    if pairs.y_kind != "text":
        page.notes.append("The data holds no captions: samples are called by their numbers, near-duplicates not told.")
    captions = sides.get("captions")
    texts = [str(pairs.y(int(n))) for n in drawn.y_number] if pairs.y_kind == "text" else None
    return {
        "pairs": len(drawn.numbers),
        "total": drawn.total,
        "temperature": _temperature(run),
        "sides": list(sides.values()),
        "cards": [card for side in sides.values() for card in gallery.cards(side, options.gallery, *labels)],
        "charts": [chart for side in sides.values() for chart in gallery.pictures_of_side(side)],
        "truth": summary.popularity_table(run),
        "negatives": popularity.negatives_of(drawn, captions, caption, picture) if captions else None,
        "duplicates": popularity.duplicate_rows(texts, captions) if captions and texts else None,
    }


def _temperature(run: RunLog) -> float:
    if run.results and "temperature" in run.results:
        return float(run.results["temperature"])
    return float(parts.make_objective(from_dict(run.config).objective, 2).temperature)


def _temperature_told(run: RunLog) -> str:
    learned = any("train/scale" in line for line in run.metrics)
    own = any("state/tau_x_q50" in line for line in run.metrics)
    return "" if learned or own else f"The temperature is fixed at {numbers.number(_temperature(run))}."


def _state(run: RunLog) -> str:
    """Said first where the run is not finished."""
    if run.results is not None:
        return ""
    done = f"{numbers.count(run.step())} steps are done, within {run.config['schedule']['epochs']} epochs"
    return f"This run is not finished: {done}. Go on with: nuclr train {run.folder} --resume"
