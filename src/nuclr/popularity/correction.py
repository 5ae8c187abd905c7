r"""Popularity-corrected search: rank by s - strength * zeta, so that hubs no longer crowd out the right answer.

A hub is a candidate that is near to too many queries. Its zeta is large. The popularity problem is solved on a *bank*:
queries, and the candidates that they choose from. At its solution all candidates are chosen equally often. One pass
then gives the zeta of any item, whether or not it was a candidate:

    zeta(g) = tau log sum_b a_b exp(<q_b, g>/tau) / Z_b

with the bank's queries q_b, their masses a_b and their partition functions Z_b. Nothing else of the bank is kept.

Equal queries count once: a log repeats what is asked often, and an item that many people want is not a hub. A query
does not count for items that equal it, neither in the problem nor in the sum. So items can search one another: the bank
may consist of the items themselves. Without this rule, an item with a copy in the bank would look like a hub.

The bank may consist of training pairs, so that nothing of a test set is used. If the test queries themselves are the
bank, the result is *transductive* and must be reported as such.

**In an index.** With b = strength * zeta(g), additional coordinates turn the corrected score into what an index
computes. M, R and b_min are constants of the correction, with M >= |g|^2 and R^2 >= |g|^2 + b^2 for all g.

    inner product   g' = (g, -b)                                q' = (q, 1)      <q', g'> = <q, g> - b
    Euclidean       g' = (g, sqrt(2 (b - b_min) + M - |g|^2))   q' = (q, 0)      |q' - g'|^2 = c - 2 (<q, g> - b)
    cosine          g' = (g, -b, sqrt(R^2 - |g|^2 - b^2))       q' = (q, 1, 0)   cos(q', g') = (<q, g> - b) / (R |q'|)

Neither c = |q|^2 + M - 2 b_min nor R |q'| depends on g, so each index ranks by <q, g> - b. The zeta of a unit vector
lies in an interval that is known after `fit`, and the constants follow from it. So items that are added later always
fit, and rows that are in the index never change.

Relations: with Z_b = 1 the bias is that of the inverted softmax (Smith et al. 2017), in which queries with many near
candidates count most. The Euclidean line is the reduction of Bachrach et al. 2014, with the bias in place of the norm.
"""

import inspect
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nuclr.arrays import (
    NORM_TOLERANCE,
    Features,
    Integers,
    Rows,
    Vector,
    as_features,
    as_positive,
    as_rows,
    as_vector,
    checked_rows,
    evenly_spaced,
)
from nuclr.errors import UserError
from nuclr.files import write_atomically
from nuclr.popularity.defaults import default_strength, default_temperature, score_std, zeta_reliability
from nuclr.popularity.hubs import nearest, reciprocal_ranks
from nuclr.popularity.kernel import log_column_sums
from nuclr.popularity.problem import Problem
from nuclr.popularity.solver import EXACT_SCORES, solve

Metric = Literal["ip", "cosine", "l2"]

DEFAULT_STRENGTH = 1.0
# What tuning chooses from. Temperatures are in units of the scores' standard deviation, so that they suit any model.
TEMPERATURE_FACTORS = (0.25, 0.4, 0.6, 0.8)
STRENGTHS = (0.5, 0.75, 1.0, 1.25)
TRANSDUCTIVE_FACTOR = 0.4  # without noise of the bank, a lower temperature than that of other queries is best
BANK_SIZE = 12_000  # queries, and candidates: a larger bank takes longer and hardly changes the result
TOLERANCE = 1e-3  # of the solver's residual: a smaller residual does not change ranks
TUNING_DEPTH = 10  # tuning compares the mean reciprocal rank within the first ten
LARGEST_SCORE = (1 + NORM_TOLERANCE) ** 2  # of features whose norms pass the check
FORMAT = "nuclr.PopularityCorrection"
HINT = "use PopularityCorrection(normalize=True)"  # in messages about features of other norms
CONSTRUCTOR = ("temperature", "strength", "normalize", "bank_size")
# What `fit` itself passes to `solve`.
RESERVED = ("x", "y", "scores", "temperature", "normalize", "x_weight", "y_weight", "exclude_copies")


class PopularityCorrection:
    """Bias per item that removes the advantage of hubs in a search. It needs no labels and no training.

    Args:
        temperature: Of the popularity problem, not the one used in training; a higher temperature corrects more
            coarsely. None: tuned if `fit` gets labeled pairs, else chosen without labels so that queries that were not
            fitted find the candidates most evenly (`default_temperature`).
        strength: Factor on zeta. None: tuned if `fit` gets labeled pairs; else 1 if the temperature is given. If it is
            not, between 0 (zeta is sampling noise of the bank) and 1 (`default_strength`).
        normalize: Scale all features to unit norm. Without it, features of other norms are refused.
        bank_size: Largest number of queries and of candidates to solve with; of more, evenly spaced rows are used.

    Attributes:
        temperature: As given; after `fit` the one that is used.
        strength: The same.
        normalize: As given.
        bank_size: As given.

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

    def __init__(
        self,
        temperature: float | None = None,
        strength: float | None = None,
        *,
        normalize: bool = False,
        bank_size: int = BANK_SIZE,
    ) -> None:
        self.temperature = None if temperature is None else as_positive("temperature", temperature)
        self.strength = None if strength is None else as_strength(strength)
        self.normalize = normalize
        if bank_size < 2:
            raise ValueError(f"bank_size={bank_size}; a bank needs at least two queries and two candidates")
        self.bank_size = bank_size
        self._asked = self.temperature, self.strength  # so that a second `fit` starts from the same arguments
        self._bank: Tensor | None = None  # queries (n, d)
        self._mass: Tensor | None = None  # of the queries, (n,) float64
        self._log_z: Tensor | None = None  # (n,) float64; None until the candidates are known
        self._options: dict[str, Any] = {}
        self._transductive = False

    def __repr__(self) -> str:
        """Return one line with the settings and the size of the bank."""
        settings = [
            f"{name}={'default' if value is None else format(value, 'g')}"
            for name, value in (("temperature", self.temperature), ("strength", self.strength))
        ]
        if self._bank is None:
            state = ["not fitted"]
        else:
            state = [f"queries={len(self._bank)}", f"dimensions={self._bank.shape[1]}"]
            state += [] if self._log_z is not None else ["no candidates yet"]
        return f"PopularityCorrection({', '.join(settings + state)})"

    @property
    def dimensions(self) -> int | None:
        """Width of the features that it was fitted on; None before `fit`."""
        return None if self._bank is None else self._bank.shape[1]

    # -- fitting -------------------------------------------------------------------------------------------------------

    def fit(
        self,
        queries: Features,
        candidates: Features | None = None,
        *,
        pairs: tuple[Features, Features, Integers] | None = None,
        exclude: Integers | None = None,
        query_weight: Vector | None = None,
        candidate_weight: Vector | None = None,
        transductive: bool = False,
        **options: Any,
    ) -> Self:
        """Solve for the popularity of candidates among queries; labels are not needed.

        If items search one another, such as sentences that are compared, or if there is no log of queries, give the
        items as both: `fit(items, items)`. A query does not count for items that equal it.

        Args:
            queries: Features of queries of the kind that will be asked, (n, d), unit norm. Equal queries count once.
            candidates: Features of the items that they choose from, (m, d), unit norm. None: the first gallery that
                `bias` or `gallery` is called with; items of later calls are added to it without solving again.
            pairs: Labeled pairs to choose temperature and strength on, unless both were given to the constructor:
                (queries, gallery, links), with links (n, 2) of rows (query, right answer). Of 4 temperatures and 4
                strengths, those with the highest mean reciprocal rank among the first ten are chosen if they are
                better than the default by more than one standard error, and else the default.
            exclude: Per query of `pairs`, a row of their gallery that it must not find; -1 for none. If these queries
                are rows of the gallery, pass their rows, so that none finds itself.
            query_weight: Weights of the queries up to a factor, (n,). Do not pass how often each is asked: the
                correction would push back what people want most.
            candidate_weight: Weights of the candidates up to a factor, (m,).
            transductive: The queries are the ones that will be asked, all of them, and the candidates are the gallery.
                By default the temperature is then 0.4 standard deviations of the scores and the strength 1, because
                zeta may describe single queries. Results must be reported as transductive.
            options: Of `solve`: method, tolerance and others; not those of the constructor.

        Returns:
            The correction itself.

        Raises:
            ValueError: If features have a wrong type or shape, are not finite, or do not have unit norm.
            TypeError: If an option is unknown, or belongs to the constructor.

        Example:
            >>> x = torch.nn.functional.normalize(torch.arange(24.0).sin().reshape(8, 3), dim=1)
            >>> tuned = PopularityCorrection().fit(x[:5], x[5:], pairs=(x[:5], x[5:], [[0, 0], [1, 2]]))
            >>> 0 <= tuned.strength <= max(STRENGTHS)
            True

        """
        _check_options(options)
        self.temperature, self.strength = self._asked
        self._bank = None  # so that features of another width than those of an earlier fit are accepted
        rows = evenly_spaced(len(queries), self.bank_size)
        bank = self._rows("queries", queries)[rows]
        mass = None
        if query_weight is not None:
            mass = as_vector("query_weight", query_weight, len(queries))[rows]
        elif not transductive:
            bank = bank[distinct_rows(bank)]
        if len(bank) < 2:
            what = "1 row" if len(queries) == 1 else "only equal rows"
            raise ValueError(f"queries has {what}; a bank needs at least two queries")
        self._bank = bank
        self._mass = mass
        self._log_z = None
        self._transductive = transductive
        self._options = {"tolerance": TOLERANCE} | options
        if candidates is None:
            if candidate_weight is not None:
                raise ValueError("candidate_weight needs candidates")
            if pairs is not None:
                candidates = pairs[1]
        if candidates is not None:
            rows = evenly_spaced(len(candidates), self.bank_size)
            chosen = self._rows("candidates", candidates)[rows]
            if candidate_weight is not None:
                candidate_weight = as_vector("candidate_weight", candidate_weight, len(candidates))[rows]
            if pairs is None or None not in self._asked:
                self._solve(chosen, candidate_weight)
            else:
                self._tune(chosen, candidate_weight, *pairs, exclude)
        return self

    def _solve(self, candidates: Tensor, weight: Vector | None = None) -> None:
        """Find the partition functions of the bank's queries."""
        assert self._bank is not None
        if len(candidates) < 2:
            raise ValueError("candidates has 1 row; a bank needs at least two candidates")
        candidates = candidates.to(self._bank.device)
        by_default = self.temperature is None and not self._transductive
        if self.temperature is None:
            self.temperature = self._default_temperature(candidates)
        result = solve(
            checked_rows(self._bank),
            checked_rows(candidates),
            temperature=self.temperature,
            x_weight=self._mass,
            y_weight=weight,
            exclude_copies=self._is_exact(len(candidates)),
            **self._options,
        )
        assert result.problem.x is not None
        self._bank = result.problem.x[:]
        self._mass = result.problem.a
        self._log_z = result.log_z
        if self.strength is None:
            self.strength = DEFAULT_STRENGTH
            if by_default:
                reliability = zeta_reliability(self._bank, self._mass, self._log_z, candidates, self.temperature)
                self.strength = default_strength(reliability)

    def _is_exact(self, candidates: int) -> bool:
        """Return whether `solve` computes all scores; the sparse method cannot exclude copies."""
        assert self._bank is not None
        method = self._options.get("method", "auto")
        return method != "sparse" and (method != "auto" or len(self._bank) * candidates <= EXACT_SCORES)

    def _default_temperature(self, candidates: Tensor) -> float:
        """Find a temperature without labels."""
        assert self._bank is not None
        if self._transductive:
            return TRANSDUCTIVE_FACTOR * score_std(self._bank, candidates)
        queries = self._bank
        weight = self._mass
        if weight is not None:
            queries = queries[weight > 0]
            weight = weight[weight > 0]
        return default_temperature(queries, candidates, weight, self.strength)

    def _tune(
        self,
        candidates: Tensor,
        weight: Vector | None,
        queries: Features,
        gallery: Features,
        links: Integers,
        exclude: Integers | None,
    ) -> None:
        """Choose temperature and strength on labeled pairs."""
        assert self._bank is not None
        asked = self._rows("queries", queries)
        items = self._rows("gallery", gallery)
        temperature, strength = self._asked
        depth = min(TUNING_DEPTH, len(gallery) - (exclude is not None))
        scale = score_std(self._bank, candidates)
        temperatures = [factor * scale for factor in TEMPERATURE_FACTORS] if temperature is None else [temperature]
        strengths = STRENGTHS if strength is None else (strength,)
        found: dict[tuple[float, float], Tensor] = {}  # reciprocal ranks of each setting
        log_z: dict[float, Tensor | None] = {}

        def measure(settings: Iterable[float]) -> None:
            assert self.temperature is not None
            log_z[self.temperature] = self._log_z
            zeta = self._zeta(items)
            for factor in settings:
                _, rows = nearest(asked, items, depth, factor * zeta, exclude)
                found[self.temperature, factor] = reciprocal_ranks(rows, links, len(items))

        self._solve(candidates, weight)
        assert self.temperature is not None and self.strength is not None
        first = self.temperature, self.strength
        measure([self.strength])
        for tried in temperatures:
            self.temperature = tried
            self.strength = DEFAULT_STRENGTH
            self._solve(candidates, weight)
            measure(strengths)
        best = max(found, key=lambda setting: float(found[setting].mean()))
        # The best of many settings on a few hundred queries is often the luckiest one. The default is kept unless the
        # gain is more than its standard error.
        gain = found[best] - found[first]
        chosen = best if len(gain) > 1 and gain.mean() > gain.std() / math.sqrt(len(gain)) else first
        self.temperature, self.strength = chosen
        self._log_z = log_z[self.temperature]

    # -- using it ------------------------------------------------------------------------------------------------------

    def bias(self, gallery: Features, *, center: bool = True) -> Tensor:
        """Return the bias to subtract from the scores of each item.

        Args:
            gallery: Features of the items, (n, d), unit norm; also a memory-mapped array, which is read in blocks.
            center: Subtract the mean, which does not change any ranking. With False, the biases of two calls have the
                same constant, so that items of both can be ranked together.

        Returns:
            (n,), of mean zero unless `center` is False.

        Raises:
            ValueError: If the correction is not fitted, or features have a wrong type, shape or norm.

        """
        zeta = self._zeta(self._rows("gallery", gallery))
        assert self.strength is not None
        bias = self.strength * (zeta - zeta.mean() if center else zeta)
        return bias.to(self._dtype)

    def _rows(self, name: str, value: Features) -> Rows:
        """Check features: their values, and that their width is the bank's."""
        rows = as_rows(
            name,
            value,
            "normalize" if self.normalize else "unit",
            width=self.dimensions,
            hint=HINT,
        )
        if not len(rows):
            raise ValueError(f"{name} has no rows")
        return rows

    def _zeta(self, gallery: Rows) -> Tensor:
        """Return zeta of each item in float64, with the constant of the fit, and solve first if that is still due."""
        if self._bank is None:
            raise ValueError("the correction is not fitted; call fit(queries, candidates) first")
        if self._log_z is None:
            self._solve(gallery[evenly_spaced(len(gallery), self.bank_size)])
        assert self._log_z is not None and self._mass is not None and self.temperature is not None
        zeta = []
        for _, features in gallery.blocks():
            y = features.to(self._bank)
            ones = torch.ones(
                len(y),
                dtype=torch.float64,
                device=y.device,
            )
            problem = Problem(
                self.temperature,
                self._mass,
                ones,
                self._bank.dtype,
                self._bank,
                y,
                exclude_copies=True,
            )
            zeta.append(self.temperature * log_column_sums(problem, torch.zeros_like(ones), self._log_z))
        return torch.cat(zeta)

    @property
    def _dtype(self) -> torch.dtype:
        assert self._bank is not None
        return self._bank.dtype

    def gallery(self, vectors: Features, metric: Metric = "ip") -> Tensor:
        """Return the items with the coordinates that correct the ranking of an index.

        Items that are added to the index later need no other call, and rows that are in the index stay valid.

        Args:
            vectors: Features of the items, (n, d), unit norm.
            metric: What the index compares: "ip" (inner product), "cosine" or "l2" (Euclidean distance). It must be the
                same in `queries`; a mismatch of "ip" and "l2", which have the same width, cannot be detected.

        Returns:
            (n, d + 1); (n, d + 2) for "cosine". At least float32.

        Raises:
            ValueError: If the correction is not fitted, the metric is unknown, or features have a wrong type, shape or
                norm.

        """
        check_metric(metric)
        rows = self._rows("vectors", vectors)
        zeta = self._zeta(rows)
        assert self.strength is not None
        bias = (self.strength * zeta).to(self._dtype).double()  # equal to `bias`, bit for bit
        features = rows[:]
        bias = bias.to(features.device)
        if metric == "ip":
            return torch.cat([features, -bias[:, None].to(features)], dim=1)
        low, high = self._range()
        square = features.double().square().sum(dim=1)
        if metric == "l2":
            last = (2 * (bias - low) + LARGEST_SCORE - square).clamp(min=0).sqrt()
            return torch.cat([features, last[:, None].to(features)], dim=1)
        middle = (low + high) / 2
        bias = bias - middle
        last = (LARGEST_SCORE + (high - middle) ** 2 - square - bias.square()).clamp(min=0).sqrt()
        return torch.cat([features, torch.stack([-bias, last], dim=1).to(features)], dim=1)

    def _range(self) -> tuple[float, float]:
        """Return bounds on the bias of any unit vector.

        zeta(g) = level + tau log sum_b w_b exp(<q_b, g>/tau) with weights w of sum 1. It is at most level + max <q_b,
        g> and, by Jensen's inequality, at least level + <sum_b w_b q_b, g>.
        """
        assert self._bank is not None and self._mass is not None and self._log_z is not None
        assert self.temperature is not None and self.strength is not None
        log_weight = self._mass.log() - self._log_z
        level = self.temperature * float(log_weight.logsumexp(dim=0))
        mean = log_weight.softmax(dim=0) @ self._bank.double()
        low = level - (1 + NORM_TOLERANCE) * float(mean.norm())
        high = level + LARGEST_SCORE
        margin = 1e-3 * (high - low)  # the bias itself is computed with rounding
        return self.strength * (low - margin), self.strength * (high + margin)

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
        added = {"ip": (1.0,), "l2": (0.0,), "cosine": (1.0, 0.0)}[metric]
        features = self._rows("queries", queries)[:]
        return torch.cat([features, features.new_tensor(added).expand(len(features), -1)], dim=1)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the correction to a safetensors file; `load` gives the same biases bit for bit.

        Args:
            path: The file to create or replace. It holds the bank's queries, two numbers per query, and the settings.

        Raises:
            ValueError: If the correction is not fitted, or its candidates are not known yet.
            OSError: If the file cannot be written.

        """
        if self._bank is None or self._mass is None or self._log_z is None:
            raise ValueError(f"{self!r} cannot be saved; call fit(queries, candidates) first")
        tensors = {
            "queries": self._bank,
            "mass": self._mass,
            "log_z": self._log_z,
        }
        settings = {
            "temperature": self.temperature,
            "strength": self.strength,
            "normalize": self.normalize,
            "bank_size": self.bank_size,
        }
        metadata = {FORMAT: json.dumps(settings)}  # one entry: safetensors writes several in a random order
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
        with write_atomically(Path(path)) as file:
            file.write(content)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a correction that `save` wrote. Nothing is unpickled.

        Args:
            path: The file.

        Returns:
            The fitted correction.

        Raises:
            UserError: If the file cannot be read or does not hold a correction.

        Example:
            >>> import tempfile
            >>> fix = PopularityCorrection(temperature=0.5).fit(torch.eye(3), torch.eye(3))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     fix.save(f"{folder}/fix.safetensors")
            ...     PopularityCorrection.load(f"{folder}/fix.safetensors")
            PopularityCorrection(temperature=0.5, strength=1, queries=3, dimensions=3)

        """
        if not Path(path).is_file():
            raise UserError(f"{path}: no such file")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if FORMAT not in metadata:
                    raise ValueError(f"it was not written by {cls.__name__}.save")
                settings = json.loads(metadata[FORMAT])
                tensors = {name: file.get_tensor(name) for name in ("queries", "mass", "log_z")}
            fix = cls(**settings)
            fix._bank = as_features("queries", tensors["queries"])
            size = len(fix._bank)
            fix._mass, fix._log_z = (as_vector(name, tensors[name], size) for name in ("mass", "log_z"))
            if None in fix._asked or bool((fix._mass < 0).any()) or not bool(fix._mass.sum() > 0):
                raise ValueError("a setting or a weight is missing")
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a popularity correction ({error})") from None
        return fix


def distinct_rows(features: Tensor) -> Tensor:
    """Return the rows of a matrix without repetitions, each by its first row number, in ascending order.

    Example:
        >>> distinct_rows(torch.tensor([[1.0], [0.0], [1.0]])).tolist()
        [0, 1]

    """
    _, number = torch.unique(
        features,
        dim=0,
        return_inverse=True,
    )
    rows = torch.arange(len(features), device=features.device)
    first = torch.full_like(rows, len(rows)).scatter_reduce_(0, number, rows, "amin")
    return first[first < len(rows)].sort().values


def _check_options(options: Iterable[str]) -> None:
    """Raise a TypeError for an option of `fit` that `solve` does not take."""
    allowed = [name for name in inspect.signature(solve).parameters if name not in RESERVED]
    for name in options:
        if name in CONSTRUCTOR:
            raise TypeError(f"fit() takes no {name}; give it to the constructor: PopularityCorrection({name}=...)")
        if name not in allowed:
            raise TypeError(f"fit() takes no option {name}; options of solve that are allowed: {', '.join(allowed)}")


def as_strength(value: Any) -> float:
    """Return `value` as a finite number of at least 0, or raise a ValueError that names it."""
    return 0.0 if value == 0 else as_positive("strength", value)


def check_metric(metric: str) -> None:
    """Raise a ValueError if a metric is unknown."""
    if metric not in get_args(Metric):
        raise ValueError(f"metric={metric!r}; allowed: {', '.join(map(repr, get_args(Metric)))}")
