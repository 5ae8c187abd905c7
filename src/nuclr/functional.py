"""Pure pieces of the stateful objectives: log-domain averages, and both sides' exponentials of one batch.

For B pairs with scores s_ij = <x_i, y_j>, side x has anchors x and candidates y, side y the other way round:

    e^x_ij = (s_ij - s_ii - zeta^y_j) / tau^x_i,    e^y_ij = (s_ij - s_jj - zeta^x_i) / tau^y_j

SogCLR, iSogCLR and NUCLR all need, first, the log-sums of exp(e^x) along rows and of exp(e^y) along columns over the
pairs that are negatives; then, once the running averages are known and with them a weight a_i per anchor,

    W_ij = exp(e^x_ij) a^x_i + exp(e^y_ij) a^y_j,    W y,  W^T x,  and column and row sums for zeta.

`contrast` returns an object with these two passes. `SharedContrast` takes one exponential for everything and three
matrix products in all; `TiledContrast` is exact for every temperature and needs O(tile x B) memory.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

KEPT_ELEMENTS = 1 << 24  # a B x B buffer is kept up to B = 4096: 64 MiB in float32
TILE_ELEMENTS = 1 << 21  # 8 MiB in float32: 128 rows at B = 16384
SHARED_TILE_ELEMENTS = 1 << 19  # 2 MiB: what one step leaves of a tile in the cache the next one finds there
LOG2_E = math.log2(math.e)


def running_log_mean(log_u: Tensor, log_phi: Tensor, gamma: float) -> Tensor:
    """log((1 - gamma) u + gamma phi), shape (B,); a sample never seen, log u = -inf, starts at phi.

    An anchor without negatives has log phi = -inf and keeps what it has.
    """
    log_old = log_u + (math.log1p(-gamma) if gamma < 1 else -math.inf)
    mixed = torch.logaddexp(log_old, log_phi + math.log(gamma))
    return torch.where(log_phi.isneginf(), log_u, torch.where(log_u.isneginf(), log_phi, mixed))


class Side(NamedTuple):
    """One side of the global batch: features (B, d), zeta (B,) as the other side's candidates, tau as anchors."""

    features: Tensor
    zeta: Tensor
    tau: float | Tensor

    def tau_column(self) -> Tensor:
        """Tau as (B, 1)."""
        tau = torch.as_tensor(self.tau, dtype=self.features.dtype, device=self.features.device)
        return tau.reshape(-1, 1).expand(len(self.features), 1)


class Gradients(NamedTuple):
    """What the second pass returns for this process's b pairs."""

    x: Tensor  # (b, d)  sum_j W_ij y_j
    y: Tensor  # (b, d)  sum_i W_ij x_i
    extra: Tensor | None  # (2, b), masses or moments, as asked for


class Contrast(Protocol):
    """Two passes over the exponentials of one batch."""

    def log_sums(self) -> Tensor:
        """Log sum_j exp(e^x_ij) and log sum_i exp(e^y_ij) over the negatives of this process's anchors, (2, b)."""

    def gradients(self, log_weight: Tensor, log_mass: Tensor | None = None, moments: bool = False) -> Gradients:
        """Weighted sums over the negatives.

        Args:
            log_weight: log a^x and log a^y of all anchors, (2, B).
            log_mass: the same for masses, what all anchors lay on this process's candidates, (2, b):
                sum_i exp(e^x_ij + log_mass^x_i) for each y_j, and sum_j exp(e^y_ij + log_mass^y_j) for each x_i.
            moments: ask for sum_j a^x_i exp(e^x_ij) e^x_ij of this process's anchors, and for side y, (2, b).

        """


class Workspace:
    """Buffers that live from step to step: fresh memory costs a page fault every 4 KiB, more than the arithmetic."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """(rows, columns), uninitialised, in the dtype and on the device of `like`; voids the one of this name."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < rows * columns or kept.dtype != like.dtype or kept.device != like.device:
            with torch.inference_mode(False):  # or an evaluation under it would leave one that training cannot write
                self._kept[name] = kept = torch.empty(rows * columns, dtype=like.dtype, device=like.device)
        return kept[: rows * columns].view(rows, columns)

    def __reduce__(self) -> tuple[type["Workspace"], tuple[()]]:
        return Workspace, ()  # copies and pickles start empty


def contrast(x: Side, y: Side, norms: Tensor, excluded: Tensor | None, rows: slice, workspace: Workspace) -> Contrast:
    """Choose the faster exact way for this batch.

    Args:
        x: the one side of the global batch.
        y: the other.
        norms: the largest norm of x's features and of y's, (2,).
        excluded: ids, (B, 2): pairs that agree in a column are not negatives of each other. None: only i = j is out.
        rows: this process's pairs.
        workspace: where what is B x B may stay.

    """
    size = len(x.features)
    whole = rows == slice(0, size)
    one_temperature = isinstance(x.tau, float) and x.tau == y.tau
    # Looking at values is free on a CPU and exponentials are dear there; on an accelerator it is the other way round.
    if whole and one_temperature and size * size <= KEPT_ELEMENTS and x.features.device.type == "cpu":
        shared = SharedContrast.where_exact(x, y, norms, excluded, workspace)
        if shared is not None:
            return shared
    return TiledContrast(x, y, excluded, rows, workspace)


def is_excluded(ids: Tensor, rows: slice) -> Tensor:
    """Pairs that are no negatives: (b, B), true where one of the columns of ids (B, 2) agrees."""
    mine = ids[rows]
    return (mine[:, None, 0] == ids[None, :, 0]) | (mine[:, None, 1] == ids[None, :, 1])


class SharedContrast:
    """E_ij = 2^(s_ij log2(e)/tau - shift) serves both sides: the rest of each exponent is a row or a column factor.

    Exact where no E and no product with the factors leaves the floating-point range, which `where_exact` checks: with
    h the half-range of the exponents of E and z that of zeta/tau, h + 2z below 0.85 of the largest exponent. Then
    also a_i b_j <= e^(h + 2z) / gamma for every pair, the left-out ones included, and sums over B stay finite.
    """

    def __init__(
        self, x: Side, y: Side, exponents: Tensor, factors: Tensor, offsets: Tensor, workspace: Workspace
    ) -> None:
        self.x, self.y, self.workspace = x, y, workspace
        self.kernel = exponents  # their exponential once log_sums has run
        self.factor_x, self.factor_y = factors  # of x and of y as candidates
        self.offsets = offsets  # (2, B), the rest of the exponents of both sides' anchors

    @classmethod
    def where_exact(
        cls, x: Side, y: Side, norms: Tensor, excluded: Tensor | None, workspace: Workspace
    ) -> "SharedContrast | None":
        """The shared form of this batch, or None where its exponents span too much."""
        assert isinstance(x.tau, float)
        zeta = torch.stack([x.zeta, y.zeta]) / x.tau
        least, most = zeta.amin(dim=1, keepdim=True), zeta.amax(dim=1, keepdim=True)
        allowed = 0.85 * math.log(torch.finfo(zeta.dtype).max) - (most - least).amax().item()
        size = len(x.features)
        scaled = workspace.take("scores", size, size, x.features)
        scaled.addmm_(x.features, y.features.T, beta=0, alpha=LOG2_E / x.tau)
        diagonal = scaled.diagonal()
        positives = diagonal / LOG2_E
        shift = 0.0
        if not norms.prod().item() / x.tau <= allowed:  # what the scores may be spans too much; look at what they are
            diagonal.copy_(scaled[0, 1].expand_as(diagonal))  # positives do not count in the range
            low, high = (bound.item() for bound in scaled.aminmax())
            if not (high - low) / 2 / LOG2_E <= allowed:
                return None
            shift = (high + low) / 2
            scaled.sub_(shift)
        diagonal.fill_(-math.inf)
        if excluded is not None:
            scaled.masked_fill_(is_excluded(excluded, slice(None)), -math.inf)
        centres = (most + least) / 2
        return cls(x, y, scaled, torch.exp(centres - zeta), shift / LOG2_E - centres.flip(0) - positives, workspace)

    def log_sums(self) -> Tensor:
        """See `Contrast`."""
        sums = torch.zeros_like(self.offsets)
        for rows in self._tiles():
            tile = self.kernel[rows].exp2_()
            torch.mv(tile, self.factor_y, out=sums[0, rows])
            sums[1].addmv_(tile.T, self.factor_x[rows])
        return sums.log_().add_(self.offsets)

    def gradients(self, log_weight: Tensor, log_mass: Tensor | None = None, moments: bool = False) -> Gradients:
        """See `Contrast`."""
        assert not moments, "moments need a temperature per anchor, which TiledContrast serves"
        factor_x, factor_y = self.factor_x, self.factor_y
        weight_x, weight_y = torch.exp(log_weight + self.offsets)
        masses = None
        if log_mass is not None:
            mass_x, mass_y = torch.exp(log_mass + self.offsets)
            masses = torch.zeros_like(self.offsets)
        for rows in self._tiles():
            tile = self.kernel[rows]
            scale = self.workspace.take("scale", len(tile), len(self.kernel), tile)
            if masses is not None:
                masses[0].addmv_(tile.T, mass_x[rows])
                torch.mv(tile, mass_y, out=masses[1, rows])
            torch.mul(weight_x[rows, None], factor_y, out=scale)
            tile.mul_(scale.addcmul_(factor_x[rows, None], weight_y))  # the kernel becomes W
        if masses is not None:
            masses.mul_(torch.stack([factor_y, factor_x]))
        return Gradients(self.kernel @ self.y.features, self.kernel.T @ self.x.features, masses)

    def _tiles(self) -> Iterator[slice]:
        return _tiles(len(self.kernel), SHARED_TILE_ELEMENTS // len(self.kernel))


class TiledContrast:
    """Row tiles of the scores, each side's exponent on its own, every log-sum with its own maximum.

    On one process a tile serves its rows as anchors of side x and all columns as anchors of side y. On several, a
    process needs the rows of its x against all y and of its y against all x: the same loop, once per side.
    """

    def __init__(self, x: Side, y: Side, excluded: Tensor | None, rows: slice, workspace: Workspace) -> None:
        self.positives, self.excluded, self.rows = (x.features * y.features).sum(dim=1), excluded, rows
        self.whole = rows == slice(0, len(x.features))
        self.workspace = workspace
        self.blocks = [_Block(x, y, rows, workspace, "scores")]
        if not self.whole:
            self.blocks.append(_Block(y, x, rows, workspace, "scores of side y"))

    def log_sums(self) -> Tensor:
        """See `Contrast`."""
        sums = []
        for block in self.blocks:
            along_rows, along_columns = [], torch.full_like(self.positives, -math.inf)
            for rows, scores in block.tiles():
                exponents = self._of_rows(block, rows, scores)
                along_rows.append(_log_sum_exp_(exponents, dim=1))
                if self.whole:
                    exponents = self._of_columns(block, rows, scores)
                    along_columns = torch.logaddexp(along_columns, _log_sum_exp_(exponents, dim=0))
            sums.append(torch.cat(along_rows))
            if self.whole:
                sums.append(along_columns)
        return torch.stack(sums)

    def gradients(self, log_weight: Tensor, log_mass: Tensor | None = None, moments: bool = False) -> Gradients:
        """See `Contrast`."""
        one = self._block_gradients(self.blocks[0], log_weight, log_mass, moments)
        if self.whole:
            return one
        # the second block has the sides swapped
        two = self._block_gradients(
            self.blocks[1], log_weight.flip(0), None if log_mass is None else log_mass.flip(0), moments
        )
        extra = None
        if one.extra is not None and two.extra is not None:
            # of each block only the rows are complete: masses on row candidates, moments of row anchors
            extra = torch.stack([one.extra[0], two.extra[0]] if moments else [two.extra[1], one.extra[1]])
        return Gradients(one.x, two.x, extra)

    def _block_gradients(
        self, block: "_Block", log_weight: Tensor, log_mass: Tensor | None, moments: bool
    ) -> Gradients:
        start, count = self.rows.start, self.rows.stop - self.rows.start
        width, new = block.b.features.shape[1], self.positives.new_zeros
        grad_a, grad_b, extra = new(count, width), new(count if self.whole else 0, width), new(2, count)
        # exp(log_mass - log_weight) <= 1: zeta's normaliser holds the positive's own term, which xi bounds from below
        ratio = None if log_mass is None else (log_mass - log_weight).exp()
        for rows, scores in block.tiles():
            local = slice(rows.start - start, rows.stop - start)
            exponents = self._of_rows(block, rows, scores)
            if moments:
                weights = torch.add(exponents, log_weight[0, rows, None], out=self._like("weights", scores)).exp_()
                extra[0, local] = exponents.mul_(weights).sum(dim=1)
            else:
                weights = exponents.add_(log_weight[0, rows, None]).exp_()
            if ratio is not None and self.whole:
                extra[0] += weights.T.mv(ratio[0, rows])
            exponents = self._of_columns(block, rows, scores)
            if moments and self.whole:
                others = torch.add(exponents, log_weight[1], out=self._like("other weights", scores)).exp_()
                extra[1] += exponents.mul_(others).sum(dim=0)
            else:
                others = exponents.add_(log_weight[1]).exp_()
            if ratio is not None:
                extra[1, local] = others.mv(ratio[1])
            weights += others
            torch.mm(weights, block.b.features, out=grad_a[local])
            if self.whole:
                grad_b.addmm_(weights.T, block.a.features[rows])
        return Gradients(grad_a, grad_b, extra if moments or ratio is not None else None)

    def _of_rows(self, block: "_Block", rows: slice, scores: Tensor) -> Tensor:
        """Exponents of the rows as anchors, (tile, B)."""
        exponents = torch.sub(scores, block.b.zeta, out=self._like("rows", scores))
        exponents.sub_(self.positives[rows, None]).div_(block.tau_a[rows])
        return self._without_positives(exponents, rows)

    def _of_columns(self, block: "_Block", rows: slice, scores: Tensor) -> Tensor:
        """Exponents of the columns as anchors, (tile, B)."""
        exponents = torch.sub(scores, block.a.zeta[rows, None], out=self._like("columns", scores))
        exponents.sub_(self.positives).div_(block.tau_b)
        return self._without_positives(exponents, rows)

    def _like(self, name: str, tile: Tensor) -> Tensor:
        return self.workspace.take(name, tile.shape[0], tile.shape[1], tile)

    def _without_positives(self, exponents: Tensor, rows: slice) -> Tensor:
        # the lowest finite number, not -inf: its exponential is 0 as well, and 0 times it is 0
        lowest = torch.finfo(exponents.dtype).min
        exponents.diagonal(rows.start).fill_(lowest)
        return exponents if self.excluded is None else exponents.masked_fill_(is_excluded(self.excluded, rows), lowest)


class _Block:
    """Scores of rows a against all columns b; kept where they are small, multiplied again at each pass otherwise."""

    def __init__(self, a: Side, b: Side, rows: slice, workspace: Workspace, name: str) -> None:
        self.a, self.b, self.rows, self.workspace, self.name = a, b, rows, workspace, name
        self.tau_a, self.tau_b = a.tau_column(), b.tau_column().T
        keep = (rows.stop - rows.start) * len(b.features) <= KEPT_ELEMENTS
        self.kept = self._scores(rows) if keep else None

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Pairs of global row numbers and their scores (tile, B), which are not to be written to."""
        start = self.rows.start
        for local in _tiles(self.rows.stop - start, TILE_ELEMENTS // len(self.b.features)):
            rows = slice(start + local.start, start + local.stop)
            yield rows, self._scores(rows) if self.kept is None else self.kept[local]

    def _scores(self, rows: slice) -> Tensor:
        a, b = self.a.features[rows], self.b.features
        return torch.mm(a, b.T, out=self.workspace.take(self.name, len(a), len(b), b))


def _tiles(total: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _log_sum_exp_(exponents: Tensor, dim: int) -> Tensor:
    """Log sum exp along dim, in place; -inf where all terms are left out."""
    largest = exponents.amax(dim, keepdim=True)
    sums = exponents.sub_(largest).exp_().sum(dim)
    none = largest.squeeze(dim) == torch.finfo(exponents.dtype).min
    return torch.where(none, -math.inf, sums.log_() + largest.squeeze(dim))
