"""A training run as its page sees it: its logs, its model, and a sample of its pairs with features.

A missing or broken file is a note on the page, not an error. Only `config.yaml` is needed.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from nuclr import files, objectives
from nuclr.data.modalities import get_modality
from nuclr.data.pairs import BadSample, Checkable, Pairs
from nuclr.errors import UserError
from nuclr.evaluation.metric_names import set_prefixes, val_metrics
from nuclr.models import DualEncoder
from nuclr.report import numbers
from nuclr.report.charts.lines import Color
from nuclr.report.items import Items
from nuclr.report.render import Context, LeaveOut, Options, describe
from nuclr.runs import folder
from nuclr.runs.components import Source
from nuclr.runs.features import PairFeatures
from nuclr.runs.folder import ENVIRONMENT
from nuclr.runs.run import Run
from nuclr.runs.settings import Settings
from nuclr.runs.side_words import SideWords, name_sides, words_of_pairs

SAMPLES = 3000  # training pairs on which popularity is solved
MOST_HELD_OUT = 2000  # pairs from which examples are drawn
PATIENCE = 20.0  # seconds that encoding a sample may take
PROBE = 16  # pairs whose encoding is timed to predict the time of all
FEWEST = 100
OTHER_COLOR = 7  # of an objective that is not registered

T = TypeVar("T")


@dataclass(frozen=True)
class RunLog:
    """The files of a run as plain values; `results` is None if the run is not finished."""

    folder: Path
    settings: Settings
    results: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    bad: list[dict[str, Any]]
    environment: dict[str, Any]

    @property
    def method(self) -> str:
        """The objective's label."""
        name = self.settings.objective.name
        return objectives.entry(name).label if name in objectives.names() else name

    @property
    def color(self) -> Color:
        """The objective's color in charts."""
        name = self.settings.objective.name
        return objectives.entry(name).color if name in objectives.names() else OTHER_COLOR

    def last_evaluation(self) -> dict[str, float]:
        """Return the metrics of the last evaluation, without their prefix "val/"."""
        for line in reversed(self.metrics):
            values = val_metrics(line)
            if values:
                return values
        return {}

    def directions(self) -> list[str]:
        """Return the directions of the last evaluation as their metrics name them: "image_to_text".

        The names of several sets of held-out pairs are part of them: "coco/image_to_text".
        """
        names = [key.removesuffix("_R@1") for key in self.last_evaluation() if key.endswith("_R@1")]
        return [name for name in names if name.rpartition("/")[2] != "mean"]

    def sets(self) -> list[str]:
        """Return what the metrics of each set of held-out pairs begin with, in order: "coco/", or nothing for one."""
        return set_prefixes(self.last_evaluation())

    def seconds(self) -> float:
        """Return the duration of the whole run.

        results.json has the time since the run was last resumed; timing.jsonl has all of it, unless lines are missing.
        """
        logged = sum(float(line.get("seconds", 0)) for line in self.timing)
        return max(logged, float(self.results["timing"]["seconds"]) if self.results else 0.0)


@dataclass(frozen=True)
class Sample:
    """Features of some pairs, drawn at random from `total` pairs of a source."""

    pairs: Pairs
    features: PairFeatures
    total: int


@dataclass
class TrainingRun(Context):
    """What the sections of a training page are computed from.

    Args:
        run: the opened run.
        log: its files.
        baseline: the files of the run that it was trained next to, if there is one (as in the demo).
        options: what the user asked for.

    """

    run: Run = field(kw_only=True)
    log: RunLog = field(kw_only=True)
    baseline: RunLog | None = field(default=None, kw_only=True)
    options: Options = field(default_factory=Options, kw_only=True)
    _cache: dict[str, Any] = field(default_factory=dict, kw_only=True, repr=False)

    @property
    def logs(self) -> list[RunLog]:
        """The run, and its baseline if there is one."""
        return [self.log] + ([self.baseline] if self.baseline else [])

    @property
    def model(self) -> DualEncoder:
        """The trained model. Raises `LeaveOut` if it cannot be loaded."""
        if not self.options.model:
            raise LeaveOut("This page was made without the model (--no-model): it has no examples and no popularity.")
        return self._once("The model", lambda: self.run.model)

    def require_model(self) -> None:
        """Raise `LeaveOut` if there is no model to encode pairs with. Sections that need one call this first."""
        _ = self.model

    @property
    def train(self) -> Source:
        """The training pairs. Raises `LeaveOut` if they cannot be opened."""
        return self._once("The training data", lambda: self.run.train)

    @property
    def val(self) -> Source | None:
        """The held-out pairs, None if the run has none. Raises `LeaveOut` if they cannot be opened."""
        return self._once("The held-out data", lambda: self.run.val)

    def step(self) -> int:
        """Return the number of steps done, from the checkpoints or from what was logged."""
        logged = [line["step"] for line in self.log.metrics if isinstance(line["step"], int)]
        try:
            return max([self.run.step, *logged])
        except UserError:  # results.json is damaged, which is a note already
            return max(logged, default=0)

    def temperature(self) -> float:
        """Return the current temperature, or the initial one if the current one cannot be read."""
        try:
            return self.run.temperature
        except Exception:
            return float(self.log.settings.objective.options.get("temperature", math.nan))

    def sample(self, source: Source, most: int) -> Sample:
        """Encode about `most` pairs of a source, drawn at random.

        Raises:
            UserError: if fewer than two pairs can be read.

        """
        chosen = readable(source.pairs, choose_pairs(source.pairs, source.numbers, most))
        if len(chosen) < 2:
            raise UserError("fewer than two of the pairs can be read")
        return Sample(source.pairs, self.run.features(source, chosen), len(source.numbers))

    def affordable(self, source: Source, most: int) -> int:
        """Return how many pairs can be encoded within PATIENCE seconds, at most `most`.

        A large model may need a second per pair on a CPU.
        """
        probe = readable(source.pairs, source.numbers[: 2 * PROBE])
        pairs = source.pairs
        if pairs.x_kind == pairs.y_kind == "vector" or len(probe) < 2 * PROBE:
            return most
        self.run.features(source, probe[:PROBE])  # the first call is slower
        begin = time.perf_counter()
        self.run.features(source, probe[PROBE:])
        pace = (time.perf_counter() - begin) / PROBE
        return max(min(FEWEST, most), min(most, int(PATIENCE / pace)))

    def items(self, pairs: Pairs) -> Items:
        """Return the items of these pairs as the page shows them."""
        if "image" in (pairs.x_kind, pairs.y_kind) and not self.options.pictures:
            self.note("This page was made without pictures (--no-pictures).")
        return Items(pairs, self.options.pictures)

    @cached_property
    def words(self) -> tuple[SideWords, SideWords]:
        """The words for both sides, even if the data is missing."""
        try:
            return words_of_pairs(self.train.pairs)
        except LeaveOut:
            first = next(iter(self.log.directions()), "x_to_y")
            x, _, y = first.rpartition("/")[2].partition("_to_")
            return name_sides(x, "item", y, "item")

    @property
    def views(self) -> bool:
        """Whether both sides are views of the same items."""
        return self.log.settings.data.contrasts_views

    def _once(self, what: str, make: Callable[[], T]) -> T:
        if what not in self._cache:
            try:
                self._cache[what] = make()
            except Exception as error:  # models and data of users can fail in any way
                self._cache[what] = LeaveOut(f"{what} is missing: {describe(error)}")
        if isinstance(self._cache[what], LeaveOut):
            raise self._cache[what]
        return cast(T, self._cache[what])


def open_training_run(path: Path, options: Options) -> TrainingRun:
    """Open the run in a folder, and its baseline: the first run in a folder inside it, or in `seeds/` (the demo).

    Args:
        path: the folder of a run, finished or not.
        options: what the user asked for.

    Raises:
        UserError: if the run's settings cannot be read.

    """
    run = Run.open(path)
    notes: list[str] = []
    context = TrainingRun(
        title=run.settings.name,
        sentence="",
        run=run,
        log=read_log(path, run.settings, notes),
        options=options,
        notes=notes,
    )
    for inner in sorted([*path.iterdir(), *(path / folder.SEEDS).glob("*")]):
        if context.baseline is None and folder.is_run(inner):
            try:
                context.baseline = read_log(inner, Run.open(inner).settings, notes)
            except UserError as error:
                notes.append(f"The baseline is missing: {error}")
    if not run.finished:
        epochs = run.settings.schedule.epochs
        steps = f"{numbers.count(context.step())} steps are done, within {epochs} epochs"
        notes.insert(0, f"This run is not finished: {steps}. Resume it with: nuclr train {path} --resume")
    if context.log.bad:
        count = numbers.count(len(context.log.bad))
        notes.append(f"{count} bad samples were left out of training; {folder.BAD} lists them.")
    return context


def read_log(path: Path, settings: Settings, notes: list[str]) -> RunLog:
    """Read the files of a run; what cannot be read is added to the notes."""
    return RunLog(
        folder=path,
        settings=settings,
        results=_read_results(path / folder.RESULTS, notes),
        metrics=[line for line in read_lines(path / folder.METRICS, notes) if "step" in line],
        timing=read_lines(path / folder.TIMING, notes, numeric=True),
        bad=read_lines(path / folder.BAD, notes),
        environment=_read_json(path / ENVIRONMENT, notes) or {},
    )


def read_lines(path: Path, notes: list[str], numeric: bool = False) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl file. Broken lines, as a killed process may leave, are skipped with a note.

    Args:
        path: the file; if it does not exist, there are no lines.
        notes: where the note is added.
        numeric: whether a line with a value that is not a number counts as broken.

    """
    objects, broken = [], 0
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in content.splitlines():
        try:
            value = files.parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and (not numeric or all(_is_number(v) for v in value.values())):
            objects.append(value)
        else:
            broken += bool(line.strip())
    if broken:
        notes.append(f"{path.name}: {broken} lines could not be read and were left out.")
    return objects


def _read_results(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """Return the content of results.json if it has the numbers that the page shows."""
    results = _read_json(path, notes)
    if results is None:
        return None
    timing = results.get("timing")
    shown = [results.get(key) for key in ("pairs", "parameters", "temperature")]
    shown += [timing.get(key) for key in ("seconds", "samples_per_second")] if isinstance(timing, dict) else [None]
    if not all(_is_number(value) for value in shown):
        notes.append(f"{path.name} does not hold the results of a run.")
        return None
    return results


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _read_json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = files.parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        notes.append(f"{path.name} could not be read.")
        return None
    return content


def curve(lines: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Return the epochs and values of all lines that have this key."""
    rows = [line for line in lines if isinstance(line.get(key), int | float) and "epoch" in line]
    return [float(line["epoch"]) for line in rows], [float(line[key]) for line in rows]


def choose_pairs(pairs: Pairs, numbers: np.ndarray, most: int, seed: int = 0) -> np.ndarray:
    """Return the numbers of about `most` pairs: all pairs of groups (or of x) drawn at random, in ascending order."""
    if len(numbers) <= most:
        return numbers
    group = pairs.x_id if pairs.group is None else pairs.group
    drawn = np.random.default_rng(seed).permutation(np.unique(group[numbers]))
    each = max(1, round(len(numbers) / len(drawn)))
    return numbers[np.isin(group[numbers], drawn[: max(2, most // each)])]


def readable(pairs: Pairs, numbers: np.ndarray) -> np.ndarray:
    """Return the numbers of those pairs whose x and y can be read."""
    if not isinstance(pairs, Checkable):
        return numbers
    known: dict[tuple[str, int], bool] = {}

    def opens(side: str, number: int) -> bool:
        key = side, int((pairs.x_id if side == "x" else pairs.y_id)[number])
        if key not in known:
            known[key] = _opens(pairs, side, number)
        return known[key]

    kept = [n for n in numbers.tolist() if n not in pairs.known_bad and opens("x", n) and opens("y", n)]
    return np.array(kept, np.int64)


def _opens(pairs: Pairs, side: str, number: int) -> bool:
    try:
        kind, item = (pairs.x_kind, pairs.x(number)) if side == "x" else (pairs.y_kind, pairs.y(number))
        get_modality(kind).check(item)
    except BadSample:
        return False
    return True
