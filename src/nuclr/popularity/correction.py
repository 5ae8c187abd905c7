r"""Popularity-corrected search: rank by s - bias, so that hubs no longer crowd out the right answer.

A hub is a candidate that is near to too many queries. Its zeta is large. The popularity problem is solved on a *bank*:
queries, and the candidates that they choose from. At its solution all candidates are chosen equally often. One pass
then gives the zeta of any item, whether or not it was a candidate:

    zeta(g; tau) = tau log sum_b a_b exp(<q_b, g>/tau) / Z_b

with the bank's queries q_b, their masses a_b and their partition functions Z_b. Nothing else of the bank is kept.

**Hubness is not demand.** An item that many people ask for is near to many queries of a log, and an item that the log
never touches to none. Neither says anything about hubs, so three things keep the correction from doing harm:

- Queries count by how different they are from the others (`bank`): a hundred wordings of one question count as one.
- A *prior count*: one more query, the zero vector, which is equally near to every item and has the mass of `prior`
  queries per item. It bounds how far an item is lifted that the log does not touch, and a small log moves little. The
  problem stays convex, and zeta(g) stays one pass.
- Known answers (clicks) do not count as crowding: a query does not choose its own answers, as the paper's phi_i leaves
  out j = i. Answers are left out of the column sum and of Z, which keeps the problem convex.

A query does not count for items that equal it either.

**Two scales.** By default the bias is the difference of two solutions,

    bias(g) = 0.75 zeta(g; 0.6 s) - 0.3 zeta(g; 1.5 s),        s = standard deviation of the scores

At 0.6 standard deviations zeta does not describe single queries. At 1.5 it mostly says which part of the gallery the
log is about, and such a part is not one large hub. What is left is popularity relative to the neighborhood. Both parts
are smaller if zeta is sampling noise of the bank (`reliability`).

The bank may consist of training pairs, so that nothing of a test set is used. If the test queries themselves are the
bank, the result is *transductive* and must be reported as such.

If most queries have known answers, the lower temperature is 0.4: answers are what a low temperature mistakes for hubs.

**In an index.** One or two more coordinates per vector make any index rank by s - bias (`coordinates`). The bias of a
unit vector lies in an interval that is known after `fit`. So items that are added later always fit, and rows that are
in the index never change.

Relations: at a given temperature, with strength 1, equal weights and prior=0, the bias is zeta of `solve`. With Z_b = 1
it is that of the inverted softmax (Smith et al. 2017), in which queries with many near candidates count most.
"""

import inspect
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from nuclr.arrays import (
    NORM_TOLERANCE,
    Features,
    Integers,
    Rows,
    Vector,
    as_features,
    as_integers,
    as_links,
    as_positive,
    as_rows,
    as_vector,
    check_norms,
    checked_rows,
    evenly_spaced,
    free_memory,
)
from nuclr.errors import UserError, first_line
from nuclr.files import parse_json, read_bytes, write_atomically
from nuclr.popularity.bank import distinct_rows, query_weights, row_hashes, same_kind, score_std
from nuclr.popularity.coordinates import LARGEST_SCORE, Metric, check_metric, item_coordinates, query_coordinates
from nuclr.popularity.hubs import nearest, reciprocal_ranks
from nuclr.popularity.kernel import log_column_sums
from nuclr.popularity.planted import CleanIndex, Suspicion
from nuclr.popularity.problem import Problem
from nuclr.popularity.reliability import zeta_reliability
from nuclr.popularity.sample import RowMap
from nuclr.popularity.solver import Solver, has_no_solution

# Temperatures are in units of the scores' standard deviation, so that they suit any model.
# The default: factors of temperatures, and the strength of each.
DEFAULT_SCALES = {0.6: 0.75, 1.5: -0.3}
ANSWERED_SCALES = {0.4: 0.75, 1.5: -0.3}  # if most queries have known answers
DEFAULT_STRENGTH = 1.0  # of one given temperature
# What tuning chooses from.
TEMPERATURE_FACTORS = (0.25, 0.4, 0.6, 0.8)
STRENGTHS = (0.5, 0.75, 1.0, 1.25)
TRANSDUCTIVE_SCALES = {0.4: 1.0}  # without noise of the bank, a lower temperature than that of other queries is best
BANK_SIZE = 12_000  # queries, and candidates: a larger bank takes longer and hardly changes the result
TOLERANCE = 1e-3  # of the solver's residual: a smaller residual does not change ranks
PASSES = 300  # of the solver
TUNING_DEPTH = 10  # tuning compares the mean reciprocal rank within the first ten
SIGNIFICANCE = 0.01  # of `check`
FEWEST_TO_CHECK = 10  # queries
SAME_QUERY = 1e-3  # per coordinate: encoders round differently from batch to batch
FORMAT = "nuclr.PopularityCorrection"
LEAST_TEMPERATURE = 1e-6  # scores are float32, and differ by less than this
LARGEST_STRENGTH = 1e6
LARGEST_BIAS = 1e9  # of a file
MOST_ITEMS = 0.5  # share of queries that may be items too, and the reverse
SAMPLED_ITEMS = 1000
FEWEST_ITEMS = 10  # in which copies of queries mean that the arguments of `fit` were swapped
NOTHING_TO_CORRECT = (
    "the correction changes nothing, because what these queries say about popularity is noise; give more queries, or "
    "answers= if the item of each query is known, such as the items of their titles"
)
HINT = "use PopularityCorrection(normalize=True)"  # in messages about features of other norms


@dataclass(frozen=True)
class Scale:
    """One solution of the popularity problem, and its part in the bias.

    Attributes:
        temperature: Of the problem.
        strength: Factor on zeta.
        log_z: Log partition functions of the bank's queries, (n,) float64.

    """

    temperature: float
    strength: float
    log_z: Tensor


@dataclass(frozen=True, repr=False)
class BankCheck:
    """Whether queries are like the bank of a correction.

    Attributes:
        p_value: Of the hypothesis that they come from the same distribution.

    """

    p_value: float

    def __repr__(self) -> str:
        """Return the verdict and the p-value in one line."""
        return f"BankCheck(fits={self.fits}, p_value={self.p_value:.2g})"

    @property
    def fits(self) -> bool:
        """Whether the test finds no difference."""
        return self.p_value > SIGNIFICANCE

    @property
    def message(self) -> str:
        """One sentence for a log or a page."""
        if self.fits:
            return f"no sign that the queries differ from the bank (p = {self.p_value:.2g})"
        return (
            f"the queries differ from the bank in kind or in topic (p = {self.p_value:.2g}); fit the correction "
            "on queries like these"
        )


class PopularityCorrection:
    """Bias per item that removes the advantage of hubs in a search. It needs no labels and no training.

    Args:
        temperature: Of the popularity problem, not the one used in training; a higher temperature corrects more
            coarsely. None: two scales, 0.6 (0.4 if most answers are known) and 1.5 standard deviations of the scores,
            or one that is tuned if `fit` gets labeled pairs.
        strength: Factor on zeta. None: 0.75, and -0.3 at the wide scale, less if zeta is sampling noise of the bank, or
            tuned if `fit` gets labeled pairs; 1 if the temperature is given. Another strength of two scales changes
            both in proportion.
        prior: How often each item counts as chosen before the queries are read. Larger values correct less where
            the log says little; 0 lifts items that no query is near to without a bound.
        normalize: Scale all features to unit norm. Without it, features of other norms are refused.
        bank_size: Largest number of queries and of candidates to solve with; of more, evenly spaced rows are used.

    The arguments are attributes of the same names, unchanged. `get_params`, `set_params`, `fit` and `transform` follow
    scikit-learn, and `sklearn.base.clone` works.

    Attributes:
        temperature_: The temperature that is used, the lower one of two; after `fit`.
        strength_: The strength that is used at this temperature; after `fit`.
        scales_: The solutions whose sum is the bias, one or two; after `fit`.

    Example:
        >>> queries = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [1.0, -0.2], [0.2, 1.0]]), dim=1)
        >>> fix = PopularityCorrection(temperature=0.5).fit(queries, torch.eye(2))
        >>> fix
        PopularityCorrection(temperature=0.5, strength=1, queries=3, dimensions=2)
        >>> bias = fix.bias(torch.eye(2))
        >>> bool(bias[0] > bias[1])  # near to two of the three queries
        True
        >>> corrected = fix.queries(queries) @ fix.gallery(torch.eye(2)).T  # any inner-product index does this
        >>> bool(torch.allclose(corrected.diff(dim=1), (queries @ torch.eye(2) - bias).diff(dim=1)))
        True

    """

    temperature_: float
    strength_: float
    # After `fit`, that is if there are `scales_`:
    _bank: Tensor  # queries, and the zero vector of the prior count, (n, d)
    _mass: Tensor  # of these, (n,) float64
    _clean: CleanIndex  # the gallery, for `suspicious`

    def __init__(
        self,
        temperature: float | None = None,
        strength: float | None = None,
        *,
        prior: float = 0.1,
        normalize: bool = False,
        bank_size: int = BANK_SIZE,
    ) -> None:
        if temperature is not None:
            _check_temperature(temperature)
        if strength is not None and as_share("strength", strength) > LARGEST_STRENGTH:
            raise ValueError(f"strength={strength!r}; give a number from 0 to 1e6")
        as_share("prior", prior)
        if bank_size < 2:
            raise ValueError(f"bank_size={bank_size}; a bank needs at least two queries and two candidates")
        self.temperature = temperature
        self.strength = strength
        self.prior = prior
        self.normalize = normalize
        self.bank_size = bank_size
        self.scales_: list[Scale] = []
        self._answer_scores: Tensor | None = None  # (n, k), nan where there is no answer
        self._query_hashes: Tensor | None = None  # of queries that are not items; unknown after `load`

    def __repr__(self) -> str:
        """Return one line with the settings and the size of the bank."""
        if not self.scales_:
            settings = [
                f"{name}={'default' if value is None else format(value, 'g')}"
                for name, value in (("temperature", self.temperature), ("strength", self.strength))
            ]
            return f"PopularityCorrection({', '.join(settings)}, not fitted)"
        return (
            f"PopularityCorrection(temperature={self.temperature_:g}, strength={self.strength_:g}, "
            f"queries={int(self._bank.any(dim=1).sum())}, dimensions={self._bank.shape[1]})"
        )

    @property
    def dimensions(self) -> int | None:
        """Width of the features that it was fitted on; None before `fit`."""
        return self._bank.shape[1] if self.scales_ else None

    # -- scikit-learn's manners ----------------------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """Return the arguments of the constructor; `deep` is scikit-learn's and has no effect.

        Example:
            >>> PopularityCorrection(0.05).get_params()["temperature"]
            0.05

        """
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Replace arguments of the constructor; what was fitted stays until the next `fit`.

        Raises:
            ValueError: If an argument does not exist or has a wrong value.

        """
        known = self.get_params()
        for name in params:
            if name not in known:
                raise ValueError(f"{name} is not an argument of {type(self).__name__}; allowed: {', '.join(known)}")
        type(self)(**known | params)  # refuses wrong values
        vars(self).update(params)
        return self

    def transform(self, vectors: Features) -> Tensor:
        """Return the items for an inner-product index; the same as `gallery(vectors)`."""
        return self.gallery(vectors)

    # -- fitting -------------------------------------------------------------------------------------------------------

    def fit(
        self,
        queries: Features,
        gallery: Features,
        answers: Integers | None = None,
        demand: Vector | None = None,
        *,
        items: bool = False,
        pairs: tuple[Features, Features, Integers] | None = None,
        exclude: Integers | None = None,
        transductive: bool = False,
    ) -> Self:
        """Solve for the popularity of the gallery's items among queries; labels are not needed.

        Args:
            queries: Features of queries of the kind that will be asked, (n, d), unit norm. Equal queries count once,
                and similar ones little more. Without a log, encode titles or first sentences of the items, and give
                the item of each as its answer.
            gallery: Features of the items that they choose from, (m, d), unit norm.
            answers: Known answers, such as clicks: the gallery's row per query, (n,), -1 for none, or links (k, 2) of
                rows (query, item). A query does not count as crowding for its answers. They are known by their
                scores, so fit again if the gallery is encoded again.
            demand: How often each item is wanted, (m,), up to a factor. At the solution, items are chosen in these
                proportions. To rank by it, add `boost=fix.temperature_ * demand.log()` in `gallery` or `bias`.
            items: The items themselves are the queries, because items search items. Without it, queries that are mostly
                rows of the gallery are refused: they are of another kind than queries that people type.
            pairs: Labeled pairs to choose temperature and strength on, unless both were given to the constructor:
                (queries, gallery, links), with links (n, 2) of rows (query, right answer). Of 4 temperatures and 4
                strengths, those with the highest mean reciprocal rank among the first ten are chosen if they are
                better than the default by more than one standard error, and else the default.
            exclude: Per query of `pairs`, a row of their gallery that it must not find; -1 for none. If these queries
                are rows of the gallery, pass their rows, so that none finds itself.
            transductive: The queries are the ones that will be asked, all of them. All count the same, there is no
                prior count, and the default temperature is 0.4 standard deviations of the scores, because zeta may
                describe single queries. Results must be reported as transductive.

        Returns:
            The correction itself.

        Raises:
            ValueError: If an argument has a wrong type, shape or value; the message names it.

        Example:
            >>> x = torch.nn.functional.normalize(torch.arange(24.0).sin().reshape(8, 3), dim=1)
            >>> tuned = PopularityCorrection().fit(x[:5], x[5:], pairs=(x[:5], x[5:], [[0, 0], [1, 2]]))
            >>> 0 <= tuned.strength_ <= max(STRENGTHS)
            True

        """
        fitted = type(self)(**self.get_params())
        fitted._fit(queries, gallery, answers, demand, items, pairs, exclude, transductive)
        vars(self).update(vars(fitted))  # at once: a fit that fails or is interrupted changes nothing
        return self

    def _fit(
        self,
        queries: Features,
        gallery: Features,
        answers: Integers | None,
        demand: Vector | None,
        items: bool,
        pairs: tuple[Features, Features, Integers] | None,
        exclude: Integers | None,
        transductive: bool,
    ) -> None:
        asked = self._rows("queries", queries)
        found = self._rows("gallery", gallery, asked.shape[1])
        if len(found) < 2:
            raise ValueError("gallery has 1 row; there is nothing to correct")
        # -- the queries that count: without repetitions, then at most `bank_size`
        rows = torch.arange(len(asked)) if transductive else distinct_rows(asked)
        rows = rows[evenly_spaced(len(rows), self.bank_size)]
        bank = asked[rows]
        if bool(((bank - bank[0]).abs() < SAME_QUERY).all()):
            what = "1 row" if len(asked) == 1 else "only equal rows"
            raise ValueError(f"queries has {what}; a bank needs at least two different queries")
        weight = torch.ones(len(bank), dtype=torch.float64, device=bank.device) if transductive else query_weights(bank)
        scores = None if answers is None else _answer_scores(asked, found, rows, answers)
        # -- the candidates, and the prior count
        chosen = evenly_spaced(len(found), self.bank_size)
        candidates = found[chosen].to(bank)
        if not items and not transductive:
            self._query_hashes = row_hashes(checked_rows(bank))
            _refuse_items(self._query_hashes, found)
        wanted = None if demand is None else _positive("demand", demand, len(found))[chosen]
        if self.prior > 0 and not transductive:
            bank = torch.cat([bank, bank.new_zeros(1, bank.shape[1])])
            weight = torch.cat([weight, weight.new_tensor([self.prior * len(candidates)])])
            scores = None if scores is None else torch.cat([scores, scores.new_full((1, scores.shape[1]), math.nan)])
        self._bank = bank
        self._mass = weight * (len(candidates) / weight.sum())
        self._answer_scores = None if scores is None else scores.to(bank)
        spread = score_std(asked[rows], candidates)
        defaults = self._default_strengths(spread, transductive)
        scales = [self._solve(candidates, wanted, *setting) for setting in defaults.items()]
        if self.temperature is None and self.strength is None and not transductive:
            share = min(1.0, 2 * zeta_reliability(self._problem(candidates, scales[0].temperature), scales[0].log_z))
            scales = [replace(scale, strength=share * scale.strength) for scale in scales]
        self._use(scales)
        if pairs is not None and None in (self.temperature, self.strength):
            self._tune(candidates, wanted, spread, *pairs, exclude)
        if self.strength_ == 0 and self.strength is None and not items:
            warnings.warn(NOTHING_TO_CORRECT, stacklevel=3)
        self._clean = CleanIndex.of(self._problem(candidates, self.temperature_))

    def _default_strengths(self, spread: float, transductive: bool) -> dict[float, float]:
        """Return the strengths by temperature that are used without labels."""
        if self.temperature is not None:
            return {float(self.temperature): DEFAULT_STRENGTH if self.strength is None else float(self.strength)}
        answered = 0.0  # share of the queries
        if self._answer_scores is not None:
            answered = 1 - float(self._answer_scores.isnan().all(dim=1).double().mean())
        factors = ANSWERED_SCALES if answered > 0.5 else DEFAULT_SCALES
        if transductive:
            factors = TRANSDUCTIVE_SCALES
        share = 1.0 if self.strength is None else self.strength / next(iter(factors.values()))
        return {factor * spread: share * strength for factor, strength in factors.items()}

    def _solve(self, candidates: Tensor, wanted: Tensor | None, temperature: float, strength: float) -> Scale:
        """Solve the popularity problem of the bank at a temperature."""
        problem = self._problem(candidates, temperature)
        if wanted is not None:
            problem = replace(problem, b=wanted.to(problem.b) * (len(wanted) / wanted.sum()))
        result = Solver(tolerance=TOLERANCE, max_iterations=PASSES)(problem)
        if has_no_solution(problem, result.zeta):
            raise ValueError(
                "answers, or copies of queries, leave an item that no query may choose, so nothing says how popular it "
                "is; use a larger prior, or leave these answers out"
            )
        return Scale(temperature, strength, result.log_z)

    def _use(self, scales: list[Scale]) -> None:
        self.scales_ = scales
        self.temperature_ = scales[0].temperature
        self.strength_ = scales[0].strength

    def _problem(self, y: Tensor, temperature: float) -> Problem:
        """Return the problem of the bank's queries with some items."""
        return Problem(
            temperature,
            self._mass,
            torch.ones(len(y), dtype=torch.float64, device=y.device),
            self._bank.dtype,
            self._bank,
            y,
            exclude_copies=True,
            answer_scores=self._answer_scores,
        )

    def _tune(
        self,
        candidates: Tensor,
        wanted: Tensor | None,
        spread: float,
        queries: Features,
        gallery: Features,
        links: Integers,
        exclude: Integers | None,
    ) -> None:
        """Choose temperature and strength on labeled pairs."""
        asked = self._rows("queries", queries)
        found = self._rows("gallery", gallery)
        depth = min(TUNING_DEPTH, len(found) - (exclude is not None))
        temperatures = {self.temperature_}
        if self.temperature is None:
            temperatures |= {factor * spread for factor in TEMPERATURE_FACTORS}
        strengths = {self.strength_}
        if self.strength is None:
            strengths |= set(STRENGTHS)

        def reciprocal(bias: Tensor) -> Tensor:
            _, rows = nearest(asked, found, depth, bias, exclude)
            return reciprocal_ranks(rows, links, len(found))

        default = reciprocal(self._bias(found))
        best, best_scale = default, None
        for temperature in sorted(temperatures):
            solved = self._solve(candidates, wanted, temperature, 1.0)
            zeta = self._sum([solved], found)
            for strength in sorted(strengths):
                ranks = reciprocal(strength * zeta)
                if ranks.mean() > best.mean():
                    best, best_scale = ranks, replace(solved, strength=strength)
        # The best of many settings on a few hundred queries is often the luckiest one. The default is kept unless the
        # gain is more than its standard error.
        gain = best - default
        if best_scale is not None and len(gain) > 1 and gain.mean() > gain.std() / math.sqrt(len(gain)):
            self._use([best_scale])

    def check(self, queries: Features) -> BankCheck:
        """Test, without labels, whether queries that are asked are like the bank; some 50 are enough.

        Args:
            queries: Features of queries that were really asked, (n, d), unit norm, n >= 10.

        Returns:
            The p-value of a two-sample test (`bank.same_kind`). If it is at most 0.01, the bank is of another kind or
            about another part of the gallery, and the correction may do harm.

        Raises:
            ValueError: If the correction is not fitted, or there are fewer than ten different queries.

        Example:
            >>> x = torch.nn.functional.normalize(torch.randn(90, 4, generator=torch.Generator().manual_seed(0)), dim=1)
            >>> fix = PopularityCorrection(temperature=0.5).fit(x[:40], x[80:])
            >>> fix.check(x[40:80]).fits, fix.check(-x[40:80].abs()).fits
            (True, False)

        """
        self._fitted()
        rows = self._rows("queries", queries)
        asked = rows[distinct_rows(rows)]
        if len(asked) < FEWEST_TO_CHECK:
            raise ValueError(f"queries has {len(asked)} different rows; the check needs at least {FEWEST_TO_CHECK}")
        return BankCheck(same_kind(self._bank[self._bank.any(dim=1)], asked))

    def suspicious(self, vectors: Features) -> Suspicion:
        """Score documents before they enter an index: would they come back for more queries than clean items do?

        A planted document is near to all queries (a global hub) or to all queries of a topic. The gallery of `fit`
        counts as clean. If it holds planted documents, p-values are too large, and the order of the scores is right.

        Args:
            vectors: Features of the documents, (n, d), unit norm.

        Returns:
            Per document a score, a p-value and the kind of hub (`planted`). About 1 % of clean documents have a
            p-value of at most 0.01.

        Raises:
            ValueError: If the correction is not fitted, or features have a wrong type, shape or norm.

        Example:
            >>> x = torch.randn(400, 9, generator=torch.Generator().manual_seed(0))
            >>> x = torch.nn.functional.normalize(x, dim=1)
            >>> fix = PopularityCorrection(temperature=0.5).fit(x[:100], x[100:300])
            >>> fix.suspicious(x[300:])
            Suspicion(documents=100, p<=0.01: 0, smallest p=0.03)
            >>> fix.suspicious(torch.nn.functional.normalize(x[:100].mean(dim=0, keepdim=True), dim=1))
            Suspicion(documents=1, p<=0.01: 1, smallest p=0.005)

        """
        rows = self._rows("vectors", vectors)
        temperature = self._fitted()[0].temperature
        problems = (self._problem(features.to(self._bank), temperature) for _, features in rows.blocks())
        return self._clean.suspicion(problems)

    # -- using it ------------------------------------------------------------------------------------------------------

    def bias(
        self,
        gallery: Features,
        *,
        center: bool = True,
        boost: Vector | None = None,
        row_map: RowMap | None = None,
    ) -> Tensor:
        """Return the bias to subtract from the scores of each item.

        Args:
            gallery: Features of the items, (n, d), unit norm; also a memory-mapped array, which is read in blocks.
            boost: Any static score per item to add to its scores, (n,): sales, recency, trust, demand.
            center: Subtract the mean, which does not change any ranking. With False, the biases of two calls have the
                same constant, so that items of both can be ranked together.
            row_map: How to map a function of consecutive rows over all rows, called with a name, the rows and the
                function; it may keep results of blocks in files. None: the function is called once.

        Returns:
            (n,), of mean zero unless `center` is False.

        Raises:
            ValueError: If the correction is not fitted, or features have a wrong type, shape or norm.

        """
        bias = self._bias(self._rows("gallery", gallery), boost, row_map)
        return bias.sub_(bias.mean() if center else 0).to(self._bank.dtype)

    def _bias(self, gallery: Rows, boost: Vector | None = None, row_map: RowMap | None = None) -> Tensor:
        """Return the bias minus the boost in float64, with the constant of the fit."""
        scales = self._fitted()
        if self._query_hashes is not None and len(gallery) >= FEWEST_ITEMS:
            some = checked_rows(gallery[evenly_spaced(len(gallery), SAMPLED_ITEMS)])
            if _share_of(row_hashes(some), self._query_hashes) > MOST_ITEMS:
                raise ValueError(
                    "gallery: most rows are queries of the fit; give items, or fit(queries, gallery) again if its "
                    "arguments were swapped"
                )

        def sums(rows: Rows, _: slice | None = None) -> Tensor:
            return self._sum(scales, rows)

        bias = sums(gallery) if row_map is None else row_map("bias", gallery, sums)
        return bias if boost is None else bias - as_vector("boost", boost, len(gallery)).to(bias)

    def _fitted(self) -> list[Scale]:
        if not self.scales_:
            raise ValueError(f"{self!r}: call fit(queries, gallery) first")
        return self.scales_

    def _rows(self, name: str, value: Features, width: int | None = None) -> Rows:
        """Check features: their values, and that their width is the given one or the bank's."""
        rows = as_rows(
            name,
            value,
            "normalize" if self.normalize else "unit",
            width=width or self.dimensions,
            hint=HINT,
        )
        if not len(rows):
            raise ValueError(f"{name} has no rows")
        return rows

    def _sum(self, scales: Sequence[Scale], gallery: Rows) -> Tensor:
        """Return the sum of strength times zeta of each item in float64, with the constant of the fit."""
        first = scales[0].temperature
        log_z = torch.stack([scale.log_z for scale in scales])
        factors = [first / scale.temperature for scale in scales]
        weights = log_z.new_tensor([scale.strength * scale.temperature for scale in scales])
        total = []
        for _, features in gallery.blocks():
            problem = self._problem(features.to(self._bank), first)
            total.append(weights @ log_column_sums(problem, torch.zeros_like(problem.b), log_z, factors))
        return torch.cat(total)

    def gallery(self, vectors: Features, metric: Metric = "ip", boost: Vector | None = None) -> Tensor:
        """Return the items with the coordinates that correct the ranking of an index.

        Items that are added to the index later need no other call, and rows that are in the index stay valid.

        Args:
            vectors: Features of the items, (n, d), unit norm.
            metric: What the index compares: "ip" (inner product), "cosine" or "l2" (Euclidean distance). It must be the
                same in `queries`; a mismatch of "ip" and "l2", which have the same width, cannot be detected.
            boost: Any static score per item to add to its scores, (n,): sales, recency, trust, demand. With "cosine"
                and "l2" it must leave the bias within the range that rows of the index have room for. A constant that
                is subtracted from all boosts changes no ranking, so penalties (a largest boost of 0) mostly fit.

        Returns:
            (n, d + 1); (n, d + 2) for "cosine". At least float32.

        Raises:
            ValueError: If the correction is not fitted, the metric is unknown, features have a wrong type, shape or
                norm, or a boost is too large for the metric.

        """
        check_metric(metric)
        rows = self._rows("vectors", vectors)
        bias = self._bias(rows, boost).to(self._bank.dtype).double()  # equal to `bias`, bit for bit
        low, high = self._range()
        if boost is not None and metric != "ip" and not low <= bias.min() <= bias.max() <= high:
            raise ValueError(
                f"boost: bias - boost is {bias.min():.3g} to {bias.max():.3g}, and metric={metric!r} has room "
                f'from {low:.3g} to {high:.3g}; subtract a constant from all boosts, scale them, or use metric="ip"'
            )
        return item_coordinates(rows[:], bias.to(rows.device), metric, (low, high))

    def _range(self) -> tuple[float, float]:
        """Return bounds on the bias of any unit vector.

        zeta(g) = level + tau log sum_b w_b exp(<q_b, g>/tau) with weights w of sum 1. It is at most level + max <q_b,
        g> and, by Jensen's inequality, at least level + <sum_b w_b q_b, g>, or the part of the prior count if all
        queries leave g out. A negative strength swaps the bounds.
        """
        lowest = 0.0
        highest = 0.0
        is_prior = ~self._bank.any(dim=1)  # no row, if the fit was transductive
        for scale in self.scales_:
            log_weight = self._mass.log() - scale.log_z
            level = scale.temperature * float(log_weight.logsumexp(dim=0))
            mean = log_weight.softmax(dim=0) @ self._bank.double()
            low = level - (1 + NORM_TOLERANCE) * float(mean.norm())
            if bool(is_prior.any()):
                low = min(low, scale.temperature * float(log_weight[is_prior].logsumexp(dim=0)))
            high = level + LARGEST_SCORE
            margin = 1e-3 * (high - low)  # zeta itself is computed with rounding
            low, high = sorted([scale.strength * (low - margin), scale.strength * (high + margin)])
            lowest += low
            highest += high
        return lowest, highest

    def queries(self, queries: Features, metric: Metric = "ip") -> Tensor:
        """Return queries for an index that holds the rows of `gallery`.

        Args:
            queries: Features, (n, d), unit norm.
            metric: The same as that of `gallery`. A mismatch of "ip" and "l2" cannot be detected; rankings are wrong.

        Returns:
            (n, d + 1); (n, d + 2) for "cosine". At least float32.

        Raises:
            ValueError: If the metric is unknown, or features have a wrong type, shape or norm.

        Example:
            >>> PopularityCorrection().queries(torch.tensor([[0.0, 1.0]])).tolist()
            [[0.0, 1.0, 1.0]]

        """
        check_metric(metric)
        return query_coordinates(self._rows("queries", queries)[:], metric)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the correction to a safetensors file; `load` gives the same biases bit for bit.

        Args:
            path: The file to create or replace. It holds the bank's queries, a few numbers per query, one number per
                candidate, and the settings.

        Raises:
            ValueError: If the correction is not fitted.
            OSError: If the file cannot be written.

        """
        scales = self._fitted()
        tensors = {
            "queries": self._bank,
            "mass": self._mass,
            "log_z": torch.stack([scale.log_z for scale in scales]),
            **self._clean.tensors(),
        }
        if self._answer_scores is not None:
            tensors["answer_scores"] = self._answer_scores
        settings = {"arguments": self.get_params(), "scales": [[scale.temperature, scale.strength] for scale in scales]}
        # One entry, because safetensors writes several in a random order; settings may be numbers of numpy.
        metadata = {FORMAT: json.dumps(settings, default=lambda number: number.item())}
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
        with write_atomically(Path(path)) as file:
            file.write(content)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a correction that `save` wrote. Nothing is unpickled.

        Args:
            path: The file.

        Returns:
            The fitted correction, with the arguments that it had.

        Raises:
            UserError: If the file cannot be read or does not hold a correction.

        Example:
            >>> import tempfile
            >>> fix = PopularityCorrection(temperature=0.5).fit(torch.eye(3), torch.eye(3), items=True)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     fix.save(f"{folder}/fix.safetensors")
            ...     PopularityCorrection.load(f"{folder}/fix.safetensors")
            PopularityCorrection(temperature=0.5, strength=1, queries=3, dimensions=3)

        """
        try:
            # Once, because another process may replace the file.
            settings, tensors = _parse(read_bytes(Path(path), free_memory(torch.device("cpu")) / 2))
            fix = cls(**settings["arguments"])
            fix._bank = as_features("queries", tensors["queries"], "any")
            check_norms("queries", fix._bank[fix._bank.any(dim=1)], "unit")
            fix._mass = as_vector("mass", tensors["mass"], len(fix._bank))
            scales = []
            for (temperature, strength), log_z in zip(settings["scales"], tensors["log_z"], strict=True):
                _check_temperature(temperature)
                scales.append(Scale(temperature, float(strength), as_vector("log_z", log_z, len(fix._bank))))
            fix._use(scales)
            scores = tensors.get("answer_scores")
            fix._answer_scores = None if scores is None else scores.to(fix._bank)
            fix._clean = CleanIndex.from_tensors(tensors, len(fix._bank))
            levels = torch.stack([scale.temperature * scale.log_z for scale in scales])
            _check_values(fix._mass, levels, fix._answer_scores, fix._range())
        except (ArithmeticError, AttributeError, LookupError, OSError, SafetensorError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not a popularity correction ({first_line(error)})") from None
        return fix


def _parse(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors in the content of an untrusted file.

    Raises:
        ArithmeticError, AttributeError, LookupError, SafetensorError, TypeError, ValueError: `save` did not write it.

    """
    header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = header.pop("__metadata__", {})
    if FORMAT not in metadata:
        raise ValueError("it was not written by PopularityCorrection.save")
    for name, entry in header.items():
        if entry["dtype"] not in ("F16", "BF16", "F32", "F64") or max(entry["shape"], default=0) > len(content):
            raise ValueError(f"{name} is {entry['dtype']} of shape {entry['shape']}")
    settings = parse_json(metadata[FORMAT])
    if "scales" not in settings:
        raise ValueError("it was saved by another version; fit again")
    return settings, load(content)


def _check_values(
    mass: Tensor,
    levels: Tensor,
    answer_scores: Tensor | None,
    bias_range: tuple[float, float],
) -> None:
    """Raise a ValueError if the content of a file would give biases that are not finite."""
    if bool((mass < 0).any()) or not bool(mass.sum() > 0) or bool((levels.abs() > LARGEST_BIAS).any()):
        raise ValueError("a weight is missing, or too large")
    if not -LARGEST_BIAS < bias_range[0] <= bias_range[1] < LARGEST_BIAS:
        raise ValueError(f"its biases are between {bias_range[0]:g} and {bias_range[1]:g}")
    if answer_scores is None:
        return
    if answer_scores.ndim != 2 or len(answer_scores) != len(mass) or bool((answer_scores.abs() > LARGEST_SCORE).any()):
        raise ValueError(f"answer_scores has shape {tuple(answer_scores.shape)}, or scores that are too large")


def _check_temperature(temperature: float) -> None:
    as_positive("temperature", temperature)
    if not LEAST_TEMPERATURE <= temperature <= 1 / LEAST_TEMPERATURE:
        raise ValueError(f"temperature={temperature!r}; give a number from 1e-6 to 1e6")


def _share_of(hashes: Tensor, others: Tensor) -> float:
    """Return the share of rows that are among other rows."""
    return float(torch.isin(hashes, others).double().mean())


def _refuse_items(query_hashes: Tensor, gallery: Rows) -> None:
    """Raise a ValueError if most queries are rows of the gallery."""
    same = _share_of(query_hashes, row_hashes(gallery))
    if same > MOST_ITEMS:
        raise ValueError(
            f"queries: {same:.0%} of them are rows of the gallery; give queries of the kind that people ask, or "
            "items=True if items search items"
        )


def _answer_scores(queries: Rows, gallery: Rows, rows: Tensor, answers: Integers) -> Tensor:
    """Return the scores of the answers of the distinct queries `rows`, (n, k), nan where there are fewer."""
    if np.ndim(answers) == 1:
        row = as_integers("answers", answers, len(queries))
        answers = torch.stack([torch.arange(len(row), device=row.device), row], dim=1)[row != -1]
        if not len(answers):
            return torch.full((len(rows), 1), math.nan)
    links = as_links("answers", answers, len(queries), len(gallery), ("queries", "gallery")).cpu()
    # a query that is asked again brings its answers to the row that stands for it, if not all rows are kept
    number = torch.arange(len(queries))
    if len(rows) < len(queries):
        _, number = torch.unique(row_hashes(queries), return_inverse=True)
    place = torch.full((int(number.max()) + 1,), -1).scatter_(0, number[rows], torch.arange(len(rows)))
    links = torch.stack([place[number[links[:, 0]]], links[:, 1]], dim=1)
    links = torch.unique(links[links[:, 0] >= 0], dim=0)
    counts = torch.bincount(links[:, 0], minlength=len(rows))
    column = torch.arange(len(links)) - (counts.cumsum(0) - counts)[links[:, 0]]
    scores = torch.full((len(rows), max(1, int(counts.max()))), math.nan, dtype=torch.float64)
    pairs = queries[rows[links[:, 0]]].double() * gallery[links[:, 1]].double()
    scores[links[:, 0], column] = pairs.sum(dim=1).cpu()
    return scores


def _positive(name: str, value: Vector, size: int) -> Tensor:
    """Return a vector whose values are all positive, or raise a ValueError that names it."""
    vector = as_vector(name, value, size)
    if not bool((vector > 0).all()):
        raise ValueError(f"{name} has minimum {float(vector.min()):g}; values must be positive")
    return vector


def as_share(name: str, value: Any) -> float:
    """Return `value` as a finite number of at least 0, or raise a ValueError that names it."""
    return 0.0 if value == 0 else as_positive(name, value)
