"""`nuclr toy`: the paper's toy study."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nuclr.cli.report import write_final_report


def toy(
    out: Annotated[Path, typer.Option(help="Folder for toy.json and the figures.")],
    seeds: Annotated[int, typer.Option(min=2, help="Samples at the largest n; smaller n get up to 5x as many.")] = 40,
    max_n: Annotated[int, typer.Option(min=100, max=3200, help="Largest number of pairs; less is quicker.")] = 3200,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the random numbers.")] = 0,
) -> None:
    """Reproduce the paper's toy study: the error of a uniform popularity and of the estimated one.

    Everything is known exactly in this study: anchors x on a half disc, y on the unit square, p(y|x) proportional to
    exp(x.y/tau). Writes toy.json, a page and figures as PNG and SVG: the generalization error of maximum likelihood, of
    the global contrastive loss (uniform popularity) and of NUCLR (estimated popularity), the error terms of the
    popularity, the model that each loss learns, and the bias and variance of the balance heuristic.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from nuclr.studies.toy import study

    sizes = tuple(n for n in study.SIZES if n <= max_n)
    columns = (TextColumn("toy study"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("toy", total=study.total_work(seeds, sizes))
        content = study.write_study(out, seeds, sizes, seed, lambda done: bar.advance(task, done))
    for tau in study.TEMPERATURES:
        _print_errors(content, tau, sizes, study.METHODS)
    _print_learning(content)
    _print_checks(content)
    typer.echo(f"\nFigures and {study.SUMMARY} are in {out} ({content['seconds']:.0f} s)")
    write_final_report(out)


def _print_errors(content: dict[str, Any], tau: float, sizes: tuple[int, ...], methods: tuple[str, ...]) -> None:
    seeds = min(r["seeds"] for r in content["records"])
    records = {(r["method"], r["n"]): r for r in content["records"] if r["tau"] == tau}
    for title, key in (
        ("|empirical risk - true risk|", "error"),
        ("error term (1/n) sum_ij |1/q~_j - 1/q_j| exp((s_ij - 1)/tau)", "error_term"),
    ):
        shown = [m for m in methods if m != "true_q" and f"{key}_mean" in records[m, sizes[0]]]
        typer.echo(f"\ntau = {tau}: {title}, mean of {seeds} or more samples")
        typer.echo(f"{'n':>8}" + "".join(f"{method:>14}" for method in shown))
        for n in sizes:
            typer.echo(f"{n:>8}" + "".join(f"{records[method, n][f'{key}_mean']:>14.4f}" for method in shown))
        fits = {
            fit["method"]: fit
            for fit in content["slopes"]
            if (fit["part"], fit["tau"], fit["quantity"]) == ("records", tau, key)
        }
        if fits:
            typer.echo(f"{'slope':>8}" + "".join(f"{fits[method]['slope']:>14.2f}" for method in shown))
            half = "".join(f"{'+-' + format(fits[m]['high'] - fits[m]['slope'], '.2f'):>14}" for m in shown)
            typer.echo(f"{'95 %':>8}" + half)
    correlations = ", ".join(f"{records['nuclr', n]['rank_correlation_mean']:.4f} (n = {n})" for n in sizes)
    typer.echo(f"rank correlation of estimated and true popularity: {correlations}")


def _print_learning(content: dict[str, Any]) -> None:
    typer.echo("\nLearning W in s = x^T W y (true: identity): excess true risk and excess zero-one loss, mean +- 95 %")
    typer.echo(f"{'tau':>5}{'n':>6}" + "".join(f"{method:>40}" for method in ("mle", "gcl", "nuclr")))
    rows = {(r["tau"], r["n"], r["method"]): r for r in content["learning"]}
    for tau, n in dict.fromkeys((tau, n) for tau, n, _ in rows):
        cells = []
        for method in ("mle", "gcl", "nuclr"):
            record = rows[tau, n, method]
            pairs = [
                f"{record[f'{key}_mean']:.5f} +- {1.96 * record[f'{key}_std'] / record['seeds'] ** 0.5:.5f}"
                for key in ("excess_risk", "zero_one")
            ]
            cells.append(f"{'  '.join(pairs):>40}")
        typer.echo(f"{tau:>5}{n:>6}" + "".join(cells))
    for entry in content["constant"]:
        minima = ", ".join(f"{name} {alpha:.2f}" for name, alpha in entry["minimum"].items())
        typer.echo(
            f"tau = {entry['tau']}: minimum over alpha of the models s = alpha x.y, infinite n: {minima} (true: 1)"
        )


def _print_checks(content: dict[str, Any]) -> None:
    typer.echo("\nEstimated partition function: bias of Z_hat/Z with 95 % interval, and variance by quadrature")
    for r in content["bias"]:
        exponent = {"uniform": 0.0, "balance": 1.0}[r["weights"]]
        [row] = [e for e in content["exponents"] if (e["tau"], e["exponent"]) == (r["tau"], exponent)]
        bias = f"bias {r['bias']:+.5f} [{r['low']:+.5f}, {r['high']:+.5f}]"
        moments = f"variance {row['variance']:.5f}  second moment {row['second_moment']:.5f}"
        typer.echo(f"  tau = {r['tau']}, n = {r['n']}, {r['weights'] + ' weights':<16} {bias}  {moments}")
    typer.echo("\nFinite Y of 25 points: |risk - risk of exact likelihood|, and error term")
    largest = max(r["n"] for r in content["finite"])
    for r in content["finite"]:
        if r["n"] == largest and r["method"] != "mle":
            values = f"{r['difference_mean']:.2e}  error term {r['error_term_mean']:.4f}"
            typer.echo(f"  tau = {r['tau']}, n = {r['n']}, {r['method']:<8} {values}")
