"""The page of `nuclr toy`."""

from collections.abc import Iterator
from pathlib import Path

from nuclr import files
from nuclr.evaluation import rank_correlation
from nuclr.report import numbers
from nuclr.report.charts import Chart, Series, line_chart, scatter
from nuclr.report.page import Block, Options, Page, Section, Table, Text, Tile
from nuclr.studies.toy.spaces import TEMPERATURES, draw, generator, popularities
from nuclr.studies.toy.study import SUMMARY, VIEWS, Record, ToyStudy
from nuclr.training.logging import duration

METHODS = {  # name, color, dashed
    "gcl": ("GCL: uniform q", 2, False),
    "gcl_constant": ("GCL, best constant", 6, True),
    "mle": ("MLE: exact Z", 8, False),
    "true_q": ("true q", 3, True),
    "nuclr": ("NUCLR, scale from maxima", 1, False),
    "nuclr_area": ("NUCLR, scale from area", 5, True),
}
LEARNED = {"gcl": "GCL", "mle": "MLE", "nuclr": "NUCLR"}
GUIDE = 7  # the color of a guide
SHOWN_N = 100  # pairs of the sample that the page shows, as in the paper


def open_folder(path: Path, _: Options) -> ToyStudy:
    """Read the study in a folder."""
    return files.read_record(ToyStudy, path / SUMMARY)


def make_page(study: ToyStudy) -> Page:
    """Return the page of a study."""
    return Page(
        kind="toy study",
        title="Toy study",
        verdict="A problem in which everything is known: how wrong is a uniform popularity, and how good is one that "
        f"is estimated from scores alone? Up to {numbers.count(study.sizes[-1])} pairs, at least "
        f"{numbers.count(study.seeds)} samples of each size.",
        sections=[
            Section("summary", "Summary", summary),
            Section("error", "Generalization error", error, menu="Error"),
            Section("learning", "Learning the model", learning, menu="Learning"),
            Section("popularity", "Estimated popularity", popularity, menu="Popularity"),
            Section("views", "Several views", views, menu="Views"),
            Section("repeat", "How to repeat this study", repeat, menu="Repeat"),
        ],
    )


def summary(study: ToyStudy) -> Iterator[Block]:
    """Show the errors of the methods at the largest size and the lowest temperature, with their slopes."""
    tau = TEMPERATURES[0]
    labels = {
        "gcl": "Uniform popularity (GCL)",
        "nuclr": "Estimated popularity (NUCLR)",
        "mle": "Exact partition function (MLE)",
    }
    for method, label in labels.items():
        last = study.select("risk", tau, method)[-1]
        detail = f"mean error at n = {numbers.count(last.n)}, τ = {tau:g}; slope {_slope(study, 'risk', tau, method)}"
        yield Tile(label, numbers.number(last.mean["error"], 2), detail)
    correlation = study.select("risk", tau, "nuclr")[-1].mean["rank_correlation"]
    yield Tile("Estimated against true", numbers.score(correlation), "rank correlation")


def error(study: ToyStudy) -> Iterator[Block]:
    """Show the generalization error against the number of pairs, and all slopes."""
    yield Text(
        "InfoNCE and SogCLR assume a uniform popularity. With it, the error of the empirical risk does not vanish "
        "however many pairs there are. With the popularity that the solver estimates, the error falls as with the "
        "exact partition function. A straight line of slope −0.5 is 1/√n. Bands are 95 % intervals of the mean."
    )
    names = {method: name for method, (name, _, _) in METHODS.items()}
    for tau in TEMPERATURES:
        yield _curves(study, "risk", "error", tau, "|empirical risk − true risk|", names, guide=("mle", -0.5))
    rows = []
    for method, name in names.items():
        rows.append([name, *(_slope(study, "risk", tau, method) for tau in TEMPERATURES)])
    yield Table(
        "Fitted slopes of the error against n on logarithmic axes, with 95 % intervals",
        ["", *(f"τ = {tau:g}" for tau in TEMPERATURES)],
        rows,
    )
    yield Text(
        "A contrastive loss is defined up to a constant, which training never sees. If GCL’s q = n is replaced by "
        "q = k n, with one k that is computed once from the true distributions, its error vanishes as that of exact "
        "likelihood does. So the level at which GCL’s error stays here is a constant: it shows that GCL’s value does "
        "not estimate the risk, but not that GCL learns a worse model. Whether it does is the next section."
    )


def learning(study: ToyStudy) -> Iterator[Block]:
    """Show excess true risk and zero-one loss of the learned model against n, and the learned W."""
    yield Text(
        "The 2 × 2 matrix W of the scores s = xᵀWy is learned from n pairs. The true model is the identity. The excess "
        "true risk is the risk of the learned W with the exact partition function, minus that of the identity. For the "
        "zero-one loss, the unit square is divided into four classes of y (at y₁ = 0.5 and y₂ = 0.6), and the most "
        "probable class given x is predicted. It is bounded by √(2 · excess risk / τ), so the class predictions of a "
        "method whose excess risk vanishes become optimal. A wrong model can predict the right classes, too."
    )
    for quantity, title in (("excess_risk", "Excess true risk"), ("zero_one", "Excess zero-one loss")):
        for tau in TEMPERATURES:
            yield _curves(study, "learning", quantity, tau, title, LEARNED, guide=("mle", -1))
    rows = []
    for tau in TEMPERATURES:
        for method, name in LEARNED.items():
            last = study.select("learning", tau, method)[-1]
            cells = [f"{last.mean['w_11']:.2f}, {last.mean['w_22']:.2f}"]
            cells += [_mean(last, key) for key in ("excess_risk", "zero_one", "bound")]
            rows.append([f"τ = {tau:g}, {name}", *cells])
    yield Table(
        "The largest sample of learning, mean with 95 % intervals",
        [f"n = {numbers.count(last.n)}", "diagonal of W", "excess risk", "excess zero-one loss", "its bound"],
        rows,
    )
    yield Text(
        "Exact likelihood knows the measure on Y. NUCLR does not: it estimates one number per y, which costs accuracy. "
        "Where the curve of NUCLR is above that of GCL, this variance is larger than GCL’s bias."
    )


def popularity(study: ToyStudy) -> Iterator[Block]:
    """Show the error term, rank correlations with the true popularity, and one sample with both popularities."""
    yield Text(
        "How far an approximate popularity q̃ is from the true q, by the paper’s error term "
        "(1/n) Σᵢⱼ |1/q̃ⱼ − 1/qⱼ| exp((sᵢⱼ − 1)/τ) and by rank."
    )
    names = {method: METHODS[method][0] for method in ("gcl", "gcl_constant", "nuclr", "nuclr_area")}
    for tau in TEMPERATURES:
        yield _curves(study, "risk", "error_term", tau, "The paper’s error term", names, guide=("nuclr", -0.5))
    rows = []
    for tau in TEMPERATURES:
        measured = study.select("risk", tau, "nuclr")
        rows.append([f"τ = {tau:g}", *(f"{record.mean['rank_correlation']:.4f}" for record in measured)])
    yield Table(
        "Rank correlation of the estimated with the true popularity",
        ["", *(f"n = {numbers.count(n)}" for n in study.sizes)],
        rows,
    )
    yield Text(f"One sample of {numbers.count(SHOWN_N)} pairs, as in the paper’s figures.")
    for k, tau in enumerate(TEMPERATURES):
        sample = draw(SHOWN_N, tau, generator(study.seed, k, SHOWN_N, 0))
        log_q = popularities(sample, tau)["nuclr"]
        yield scatter(
            f"Estimated against true, τ = {tau:g}",
            (sample.log_q_true.exp() / SHOWN_N).tolist(),
            (log_q.exp() / SHOWN_N).tolist(),
            "true q(y)/n",
            "estimated q(y)/n",
            note=f"Rank correlation {numbers.score(rank_correlation(log_q, sample.log_q_true))}.",
        )


def views(study: ToyStudy) -> Iterator[Block]:
    """Show the error of Z against the number of views, with a popularity per view and with a shared one."""
    yield Text(
        "The paper’s Remark 2 draws m samples y of each x, each with its own popularity. The table has the standard "
        "deviation over the anchors of log Ẑ(xᵢ) − log Z(xᵢ), also for one popularity that the m samples share."
    )
    rows = []
    for tau in TEMPERATURES:
        for m in VIEWS:
            records = [study.select("views", tau, f"{form}_{m}")[-1] for form in ("per_view", "shared")]
            rows.append([f"τ = {tau:g}, m = {m}", *(_mean(record, "error") for record in records)])
    yield Table(
        "Error of the estimated Z, mean with 95 % intervals",
        [f"n = {numbers.count(records[0].n)}", "one per view", "one per pair"],
        rows,
    )


def repeat(study: ToyStudy) -> Iterator[Block]:
    """Show the command of the study and its duration."""
    yield Text(f"nuclr toy --out toy --seeds {study.seeds} --max-n {study.sizes[-1]} --seed {study.seed}", "code")
    yield Text(f"It took {duration(study.seconds)} with nuclr {study.version}.", "small")


def _curves(
    study: ToyStudy,
    part: str,
    quantity: str,
    tau: float,
    title: str,
    names: dict[str, str],
    *,
    guide: tuple[str, float],
) -> Chart:
    """Draw the mean of a quantity against n on logarithmic axes, with its fitted slope next to each name.

    Bands are 95 % intervals of the mean. `guide` is a method and the exponent of a straight line below its curve.
    """
    series = []
    for method, name in names.items():
        _, color, dashed = METHODS[method]
        records = [record for record in study.select(part, tau, method) if record.mean[quantity] > 0]
        sizes = [float(record.n) for record in records]
        means = [record.mean[quantity] for record in records]
        lower = [max(r.mean[quantity] - r.half_width(quantity), r.mean[quantity] / 5) for r in records]
        upper = [record.mean[quantity] + record.half_width(quantity) for record in records]
        fitted = study.slope(part, tau, method, quantity)
        label = f"{name}, slope {numbers.signed(fitted[0])}" if fitted else name
        series.append(Series(label, sizes, means, color, dashed, (lower, upper)))
        if method == guide[0]:
            guiding = Series(
                f"guide: slope {numbers.signed(guide[1])}",
                sizes,
                [means[0] / 2 * (n / sizes[0]) ** guide[1] for n in sizes],
                GUIDE,
                dashed=True,
            )
    return line_chart(
        f"{title}, τ = {tau:g}",
        [*series, guiding],
        "pairs n",
        log_x=True,
        log_y=True,
        x_ticks=sorted({x for s in series for x in s.x}),
    )


def _mean(record: Record, quantity: str) -> str:
    """Write a mean over samples with its 95 % interval."""
    return f"{numbers.number(record.mean[quantity], 2)} ± {numbers.number(record.half_width(quantity), 1)}"


def _slope(
    study: ToyStudy,
    part: str,
    tau: float,
    method: str,
) -> str:
    """Write the slope of the error with its 95 % interval."""
    fitted = study.slope(part, tau, method, "error")
    return f"{numbers.signed(fitted[0])} ± {fitted[1]:.2f}" if fitted else numbers.MISSING
