"""Which samples of embedded pairs are popular or rare (`nuclr popularity`).

Popularity is solved for both sides: of the y with the x as anchors, and of the x with the y as anchors. All pairs have
the same weight, so an x weighs as much as it has pairs. Rows are scaled to unit norm.
"""

import hashlib
import math
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from nuclr import files
from nuclr.data.vectors import SIDES, Vectors, open_sides, open_vectors, pair_rows, split_argument
from nuclr.errors import UserError
from nuclr.evaluation.corrected import popularity_agreement
from nuclr.popularity import ConvergenceWarning, solve
from nuclr.popularity.false_negatives import false_negatives
from nuclr.studies.items.row_maps import RowMap, row_maps
from nuclr.studies.items.rows import (
    ARRAYS,
    NO_ARRAY,
    Item,
    ItemReport,
    Origin,
    check_rows,
    name_rows,
    vectors_of_pairs,
)

if TYPE_CHECKING:
    from nuclr.data.pairs import Pairs
    from nuclr.runs.features import PairFeatures

OTHER = {"x": "y", "y": "x"}
QUANTILES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.0)
FALSE_NEGATIVES = 12  # that are reported
ANCHORS = 2000  # among which they are searched
SCANNED = 10_000  # of the most (or least) popular samples, among which copies are counted


@dataclass(frozen=True, kw_only=True)
class RankedItem(Item):
    """A sample with its popularity (the mean is 1) and rank; `copies` have the same name, `pair` is its partner."""

    popularity: float
    rank: int
    copies: int = 1
    pair: Item | None = None


@dataclass(frozen=True)
class SidePopularity:
    """Popularity of the samples of one side.

    Attributes:
        origin: where the samples come from.
        anchors: number of samples of the other side.
        iterations: passes of the solver.
        residual: of the solution.
        converged: whether the residual is below the tolerance.
        error: of an estimate from a sample, for very many pairs: root mean square error of the log popularity.
        effective_number: (sum q)^2 / sum q^2: n if all are equally popular, 1 if one sample has all popularity.
        top_share: share of all popularity that the most popular 1 % of the samples has.
        agreement: rank correlation with N_10 of held-out anchors; None if it was not measured.
        quantiles: of the popularity, by share.
        most_popular: the first samples; those with the same name are listed once.
        least_popular: the last samples.
        zeta: (n,), tau log popularity, of mean zero over the pairs. A report that was read from a file has no arrays.
        popularity: (n,), of mean one over the pairs.
        weight: (n,), the number of pairs that each sample belongs to.

    """

    __pydantic_config__ = ARRAYS

    origin: Origin
    anchors: int
    iterations: int
    residual: float
    converged: bool
    error: float | None
    effective_number: float
    top_share: float
    agreement: float | None
    quantiles: dict[str, float]
    most_popular: list[RankedItem]
    least_popular: list[RankedItem]
    zeta: np.ndarray = field(
        default=NO_ARRAY,
        repr=False,
        compare=False,
    )
    popularity: np.ndarray = field(
        default=NO_ARRAY,
        repr=False,
        compare=False,
    )
    weight: np.ndarray = field(
        default=NO_ARRAY,
        repr=False,
        compare=False,
    )

    @property
    def words(self) -> str:
        """What several samples are called: "captions", or their array if it is not known."""
        return self.origin.words or self.origin.side or self.origin.name


@dataclass(frozen=True)
class FalseNegative:
    """A y that may belong to an x that it is not paired with, next to the x's own y."""

    x: Item
    y: Item
    own: Item
    score: float
    own_score: float
    popularity: float


@dataclass(frozen=True)
class FalseNegativeList:
    """The likeliest false negatives, and the share of the examined anchors that have one."""

    anchors: int
    share: float
    rows: list[FalseNegative]


@dataclass(frozen=True, repr=False, kw_only=True)
class PopularityReport(ItemReport):
    """What `popularity_report` solved.

    Attributes:
        file: the file, folder or run.
        temperature: of the popularity problem.
        pairs: number of pairs.
        views: whether both sides are views of the same items; then only side "y" is solved.
        sides: "y" and "x".
        false_negatives: None if both sides are views of the same items.

    """

    KIND: ClassVar[str] = "popularity"

    file: str
    temperature: float
    pairs: int
    views: bool
    sides: dict[str, SidePopularity]
    false_negatives: FalseNegativeList | None = None

    def __repr__(self) -> str:
        return f"PopularityReport({self.file}, {self.pairs:,} pairs, temperature={self.temperature:g})"

    @property
    def converged(self) -> bool:
        """Whether the solver converged on all sides, except those that are estimated from a sample."""
        return all(side.converged or side.error is not None for side in self.sides.values())


def popularity_report(
    source: str | Path,
    y: str | Path | None = None,
    *,
    temperature: float | None = None,
    names: str | Path | None = None,
    x_names: str | Path | None = None,
    images: Path | None = None,
    top: int = 10,
    progress: bool = False,
    out: Path | None = None,
) -> PopularityReport:
    """Solve the popularity of both sides of embedded pairs.

    Args:
        source: an embedding file with x, y and optionally y_to_x, a folder of clip-retrieval, or a run, whose
            training pairs are encoded.
        y: vectors of the y, if `source` holds only those of the x: row j of both is pair j.
        temperature: of the popularity problem; a lower one distinguishes neighbors more sharply. None: the run's.
        names: a file with the names of the y (`rows.name_rows`); a list of pairs names both sides.
        x_names: a file with the names of the x.
        images: the folder of the pictures that names are files of, for the page.
        top: how many of the most and least popular samples to report.
        progress: print the solver's progress to stderr.
        out: a folder for the summary and the table. None: nothing is written.

    Returns:
        The report.

    Raises:
        UserError: if anything is wrong with the input, before the solver starts.

    """
    PopularityReport.check_folder(out, create=False)  # before pairs are encoded, which takes long
    pairs = _name(_open(str(source), y, temperature), names, x_names)
    PopularityReport.check_folder(out, create=True)
    settings = [pairs.temperature, hashlib.sha256(pairs.links.tobytes()).hexdigest()]
    with row_maps(out, list(pairs.sides.values()), settings) as maps:
        sides = solve_sides(
            pairs,
            top=top,
            images=images,
            progress=progress,
            maps=maps,
        )
    report = PopularityReport(
        file=str(source) if y is None else f"{source}, {y}",
        temperature=pairs.temperature,
        pairs=len(pairs.rows["y"]),
        views=pairs.views,
        sides=sides,
        false_negatives=None if pairs.views else find_false_negatives(pairs, sides["y"].popularity),
    )
    if out is not None:
        with report.publish(out, [_table(pairs, side, solved) for side, solved in sides.items()]):
            pass
    return report


# ---------------------------------------------------------------------------------------------------------------------
# Pairs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbeddedPairs:
    """Both sides of n embedded pairs.

    Attributes:
        sides: "x" and "y".
        rows: (n,) by side, the row of each pair.
        links: (m, 2), which x and y belong together; more than the pairs if the data has groups.
        temperature: of the popularity problem.
        views: whether both sides are views of the same items.

    """

    sides: dict[str, Vectors]
    rows: dict[str, np.ndarray]
    links: np.ndarray
    temperature: float
    views: bool = False

    def partners(self, side: str) -> np.ndarray:
        """Return, per row of a side, the row of the other side in its first pair."""
        first: np.ndarray = np.unique(self.rows[side], return_index=True)[1]
        return self.rows[OTHER[side]][first]


def _open(source: str, y_source: str | Path | None, temperature: float | None) -> EmbeddedPairs:
    """Open pairs, or encode those of a run, and check all rows."""
    if files.is_run(source) and y_source is None:
        from nuclr.runs.run import Run

        run = Run.open_finished(source)
        features = run.features(run.train, merge_y=False)
        used = run.temperature if temperature is None else temperature
        return pairs_of_features(
            source,
            run.train.pairs,
            features,
            used,
        )
    if temperature is None:
        raise UserError(f"--temperature is missing; {source} is not a run folder that could provide it")
    x, y = open_sides(source) if y_source is None else (open_vectors(source, "x"), open_vectors(y_source, "y"))
    if x.rows.shape[1] != y.rows.shape[1]:
        raise UserError(
            f"{source}: x has width {x.rows.shape[1]} and y has width {y.rows.shape[1]}; embed both with one model, or "
            f"train one on them (nuclr train data.train={source}) and name its run"
        )
    links = np.stack([pair_rows(x, y), np.arange(len(y))], axis=1)
    unused = np.setdiff1d(np.arange(len(x)), links[:, 0])
    if len(unused):
        raise UserError(f"{source}: {len(unused):,} rows of x have no y, such as row {unused[0]}; remove them")
    return _checked(EmbeddedPairs({"x": x, "y": y}, {"x": links[:, 0], "y": links[:, 1]}, links, temperature))


def pairs_of_features(
    path: str,
    pairs: "Pairs",
    features: "PairFeatures",
    temperature: float,
) -> EmbeddedPairs:
    """Return the encoded pairs of a run.

    Args:
        path: the folder of the run.
        pairs: its pairs.
        features: the features of some of them.
        temperature: of the popularity problem.

    Raises:
        UserError: if there are fewer than two x.

    """
    embedded = EmbeddedPairs(
        sides=vectors_of_pairs(path, pairs, features),
        rows=dict(zip(SIDES, features.pair_rows.numpy().T, strict=True)),
        links=features.links.numpy(),
        temperature=temperature,
        views=pairs.views,
    )
    return _checked(embedded)


def _checked(pairs: EmbeddedPairs) -> EmbeddedPairs:
    if min(len(vectors) for vectors in pairs.sides.values()) < 2:
        raise UserError(f"{pairs.sides['x'].source}: all pairs have the same x or y; popularity needs at least two")
    return replace(pairs, sides={side: check_rows(vectors, True) for side, vectors in pairs.sides.items()})


def _name(
    pairs: EmbeddedPairs,
    names: str | Path | None,
    x_names: str | Path | None,
) -> EmbeddedPairs:
    """Add names; a list of pairs has those of both sides."""
    y = name_rows(pairs.sides["y"], names)
    is_list = names is not None and split_argument(str(names))[1] is None and Path(names).suffix != ".txt"
    x = name_rows(pairs.sides["x"], names if is_list else None, pairs.partners("x"))
    return replace(pairs, sides={"x": name_rows(x, x_names), "y": y})


# ---------------------------------------------------------------------------------------------------------------------
# Solving
# ---------------------------------------------------------------------------------------------------------------------


def solve_sides(
    pairs: EmbeddedPairs,
    *,
    top: int = 10,
    images: Path | None = None,
    progress: bool = False,
    tolerance: float = 1e-4,
    max_iterations: int = 10_000,
    maps: RowMap | None = None,
) -> dict[str, SidePopularity]:
    """Solve the popularity of each side among the other; of views, which are the same items, only that of the y.

    Args:
        pairs: the pairs.
        top: how many of the most and least popular samples to return.
        images: the folder of the pictures that names are files of.
        progress: print the solver's progress to stderr.
        tolerance: residual at which the solver stops.
        max_iterations: largest number of its passes.
        maps: maps functions over the rows of large sets (`row_maps`).

    """
    sides = {}
    weights = {name: np.bincount(rows).astype(np.float64) for name, rows in pairs.rows.items()}
    for side in ("y",) if pairs.views else ("y", "x"):
        candidates = pairs.sides[side]
        anchors = pairs.sides[OTHER[side]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the callers show `converged`
            result = solve(
                x=anchors.rows,
                y=candidates.rows,
                temperature=pairs.temperature,
                x_weight=weights[OTHER[side]],
                y_weight=weights[side],
                progress=progress,
                tolerance=tolerance,
                max_iterations=max_iterations,
                row_map=maps and (lambda name, *rest, side=side: maps(f"{side}-{name}", *rest)),
            )
        share = weights[side] / weights[side].sum()
        zeta = result.zeta.double().numpy()
        zeta = zeta - share @ zeta
        popularity = np.exp((zeta - zeta.max()) / pairs.temperature)
        popularity = popularity / (share @ popularity)
        mass = np.sort(share * popularity)[::-1]
        agreement = math.nan
        if not pairs.views:
            agreement = popularity_agreement(anchors.rows, candidates.rows, pairs.temperature)
        order = np.argsort(-zeta, kind="stable")
        sides[side] = SidePopularity(
            origin=Origin.of(candidates, images),
            anchors=len(anchors),
            iterations=result.iterations,
            residual=result.residual,
            converged=result.converged,
            error=result.error,
            effective_number=float(len(share) / (share @ popularity**2)),
            top_share=float(mass[: max(1, round(0.01 * len(mass)))].sum()),
            agreement=agreement if math.isfinite(agreement) else None,
            quantiles={str(q): float(np.quantile(popularity, q)) for q in QUANTILES},
            most_popular=_first(pairs, side, popularity, order, top),
            least_popular=_first(pairs, side, popularity, order[::-1], top),
            zeta=zeta,
            popularity=popularity,
            weight=weights[side].astype(np.int64),
        )
    return sides


def _first(
    pairs: EmbeddedPairs,
    side: str,
    popularity: np.ndarray,
    order: np.ndarray,
    top: int,
) -> list[RankedItem]:
    """Return the first samples of an order; those with the same name appear once, with the number of copies."""
    vectors = pairs.sides[side]
    order = order[:SCANNED]
    labels: Any = order.tolist()
    if vectors.ids is not None:
        take = getattr(vectors.ids, "take", None)  # of texts in files, which are read together
        labels = [vectors.ids[row] for row in labels] if take is None else take(labels)
    rows: dict[Any, int] = {}
    for row, label in zip(order.tolist(), labels, strict=True):
        rows.setdefault(label, row)
    copies = Counter(labels)
    partners = pairs.partners(side)
    items = []
    for label, row in list(rows.items())[:top]:
        ranked = RankedItem.of(
            vectors,
            row,
            popularity=float(popularity[row]),
            rank=1 + int((popularity > popularity[row]).sum()),
            copies=copies[label],
            pair=None if pairs.views else Item.of(pairs.sides[OTHER[side]], int(partners[row])),
        )
        items.append(ranked)
    return items


def find_false_negatives(pairs: EmbeddedPairs, popularity: np.ndarray) -> FalseNegativeList:
    """Return the strongest likely false negatives, searched among at most ANCHORS random anchors.

    Args:
        pairs: the pairs.
        popularity: (n,), of the y.

    """
    x = pairs.sides["x"]
    y = pairs.sides["y"]
    anchors = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:ANCHORS]
    likely = false_negatives(
        x.rows,
        y.rows,
        pairs.links,
        popularity,
        FALSE_NEGATIVES,
        anchors,
    )
    rows = []
    for k in range(len(likely.x)):
        found = int(likely.y[k])
        rows.append(
            FalseNegative(
                x=Item.of(x, int(likely.x[k])),
                y=Item.of(y, found),
                own=Item.of(y, int(likely.own[k])),
                score=float(likely.score[k]),
                own_score=float(likely.own_score[k]),
                popularity=float(popularity[found]),
            )
        )
    return FalseNegativeList(likely.anchors, likely.share, rows)


def _table(
    pairs: EmbeddedPairs,
    side: str,
    solved: SidePopularity,
) -> dict[str, Any]:
    """Return one side of popularity.csv."""
    vectors = pairs.sides[side]
    number_of_x = _numbers(pairs.sides["x"])
    table = {
        "side": [side] * len(vectors),
        "number": _numbers(vectors),
        "zeta": solved.zeta,
        "popularity": solved.popularity,
        "rank": np.argsort(np.argsort(-solved.zeta, kind="stable")) + 1,
        "x": number_of_x if side == "x" else number_of_x[pairs.partners("y")],
    }
    if any(one.ids is not None for one in pairs.sides.values()):
        table["name"] = [""] * len(vectors) if vectors.ids is None else vectors.ids
    return table


def _numbers(vectors: Vectors) -> np.ndarray:
    return np.arange(len(vectors)) if vectors.numbers is None else vectors.numbers
