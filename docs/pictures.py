"""Draw the pictures of the documentation: python docs/pictures.py

They are computed with the library on generated vectors, and written to docs/images as SVG files in the site's style.
The numbers that the pages quote are printed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.evaluation import rank_correlation
from nuclr.objectives import build
from nuclr.popularity import PopularityCorrection, hubness, solve

IMAGES = Path(__file__).parent / "images"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 262, 46, 12, 52, 44
STYLE = (
    ".nuclr-drawing{color:#222}"
    ".nuclr-drawing .blue{--c:#0072b2}.nuclr-drawing .orange{--c:#c75400}.nuclr-drawing .soft{opacity:.7}"
    ".nuclr-drawing .line{fill:none;stroke:var(--c);stroke-width:2.5}.nuclr-drawing .fill{fill:var(--c)}"
    ".nuclr-drawing .grid{stroke:currentColor;opacity:.15}.nuclr-drawing .dash{stroke-dasharray:5 4}"
    "@media(prefers-color-scheme:dark){.nuclr-drawing{color:#ddd}.nuclr-drawing .blue{--c:#5aaeea}"
    ".nuclr-drawing .orange{--c:#ff9451}}"
)


class Drawing:
    """An SVG file of `WIDTH` x `height` with a title."""

    def __init__(self, title: str, height: int = HEIGHT) -> None:
        self.height = height
        self.parts: list[str] = []
        self.text(0, 15, title, size=13.5, weight=600)

    def text(
        self, x: float, y: float, text: str, size: float = 12, anchor: str = "start", weight: int = 400, style: str = ""
    ) -> None:
        """Write a text; y is its baseline."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="currentColor" class="{style}">{escape(text)}</text>'
        )

    def add(self, element: str) -> None:
        """Add an element."""
        self.parts.append(element)

    def write(self, name: str) -> None:
        """Write the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="nuclr-drawing" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" font-family="system-ui, sans-serif"><style>{STYLE}</style>'
        )
        (IMAGES / f"{name}.svg").write_text(head + "".join(self.parts) + "</svg>\n", encoding="utf-8")


class Chart(Drawing):
    """A drawing with two axes."""

    def __init__(
        self,
        title: str,
        x_label: str,
        y_label: str,
        x: tuple[float, float],
        y: tuple[float, float],
        log_x: bool = False,
    ) -> None:
        super().__init__(title)
        self._x, self._y, self._scale = x, y, (math.log if log_x else lambda value: value)
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, anchor="middle", style="soft")
        self.text(0, TOP - 15, y_label, style="soft")

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the position of a point."""
        low, high = map(self._scale, self._x)
        across = (self._scale(x) - low) / (high - low)
        up = (y - self._y[0]) / (self._y[1] - self._y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def ticks(self, x: Iterable[float], y: Iterable[float], form: Callable[[float], str] = "{:g}".format) -> None:
        """Label both axes, with a line per value of y."""
        for value in x:
            self.text(self.at(value, 0)[0], HEIGHT - BOTTOM + 17, form(value), size=11, anchor="middle", style="soft")
        for value in y:
            height = self.at(self._x[0], value)[1]
            self.add(f'<path class="grid" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>')
            self.text(LEFT - 7, height + 4, form(value), size=11, anchor="end", style="soft")

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Draw a line through points."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        self.add(f'<polyline class="line {style}" points="{places}"/>')

    def dots(self, points: Iterable[tuple[float, float]], style: str, radius: float = 2.2) -> None:
        """Draw a dot per point: a line of no length with round ends."""
        places = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in (self.at(*point) for point in points))
        self.add(
            f'<path class="line {style}" style="stroke-width:{2 * radius:g}" stroke-linecap="round" '
            f'stroke-opacity=".55" d="{places}"/>'
        )

    def key(self, entries: dict[str, str], x: float, y: float) -> None:
        """Name the lines; x and y are the position of the first name."""
        for row, (label, style) in enumerate(entries.items()):
            self.add(f'<path class="line {style}" d="M{x - 30:g} {y - 4 + 18 * row:g}h22"/>')
            self.text(x, y + 18 * row, label)


# -- a search by hand --------------------------------------------------------------------------------------------------

QUERIES = ("dog in the grass", "dog in the snow", "two dogs", "child on a swing", "man on a bike")
ITEMS = ("A dog.", "Grass and a dog.", "A dog in snow.", "Two dogs play.", "A child swings.", "He rides a bike.")
SCORES = torch.tensor(
    [
        [0.64, 0.60, 0.42, 0.45, 0.30, 0.22],
        [0.62, 0.45, 0.59, 0.44, 0.22, 0.20],
        [0.66, 0.42, 0.41, 0.63, 0.26, 0.18],
        [0.44, 0.28, 0.24, 0.30, 0.58, 0.31],
        [0.40, 0.22, 0.20, 0.24, 0.33, 0.57],
    ]
)


def table(name: str, title: str, scores: Tensor, zeta: Tensor | None) -> None:
    """Draw the scores of every query and item, with the best item of each query marked."""
    drawing = Drawing(title, height=300)
    left, top, width, height = 106, 118, 38, 27
    for column, item in enumerate(ITEMS):
        x = left + (column + 0.55) * width
        drawing.add(f'<g transform="translate({x:g} {top - 8}) rotate(-60)">')
        drawing.text(0, 0, item, size=11.5)
        drawing.add("</g>")
    for row, query in enumerate(QUERIES):
        y = top + row * height
        drawing.text(left - 8, y + 18, query, size=11.5, anchor="end")
        best = int(scores[row].argmax())
        for column in range(len(ITEMS)):
            x = left + column * width
            if column == best:
                color = "orange" if column == 0 else "blue"
                drawing.add(
                    f'<rect class="fill {color}" x="{x + 2}" y="{y + 2}" width="{width - 4}" height="{height - 4}" '
                    f'rx="4" fill-opacity=".28"/>'
                )
            weight = 700 if column == best else 400
            drawing.text(x + width / 2, y + 18, f"{scores[row, column]:.2f}", size=11.5, anchor="middle", weight=weight)
    bottom = top + len(QUERIES) * height
    drawing.add(f'<path class="grid" d="M0 {bottom + 4}H{WIDTH}"/>')
    wins = torch.bincount(scores.argmax(dim=1), minlength=len(ITEMS)).tolist()
    rows = [("found first by", wins)] + ([("zeta", [f"{value:+.2f}" for value in zeta])] if zeta is not None else [])
    for row, (label, values) in enumerate(rows):
        y = bottom + 22 + 18 * row
        drawing.text(left - 8, y, label, size=11.5, anchor="end", style="soft")
        for column, value in enumerate(values):
            drawing.text(left + (column + 0.5) * width, y, str(value), size=11.5, anchor="middle")
    drawing.write(name)


# -- a search with generated vectors -----------------------------------------------------------------------------------


def search(items: int = 400, queries: int = 1600, width: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, items, and the item that each query looks for. Some items resemble all queries a little."""
    generator = torch.Generator().manual_seed(0)
    common = normalize(torch.randn(width, generator=generator), dim=0) * math.sqrt(width)
    content = torch.randn(items, width, generator=generator)
    share = torch.rand(items, 1, generator=generator)
    wanted = torch.randint(items, (queries,), generator=generator)
    asked = content[wanted] + 1.6 * torch.randn(queries, width, generator=generator) + 1.5 * common
    return normalize(asked, dim=1), normalize(content + 1.5 * share * common, dim=1), wanted


def hubs() -> None:
    """Draw how often items are found, before and after correction, and how well popularity predicts it."""
    queries, items, wanted = search()
    bank, asked, wanted = queries[::2], queries[1::2], wanted[1::2]
    fix = PopularityCorrection().fit(bank, items)
    bias = fix.bias(items)
    plain, corrected = hubness(asked, items), hubness(asked, items, bias=bias)
    links = torch.stack([torch.arange(len(asked)), wanted], dim=1)
    for label, found in (("plain", plain), ("corrected", corrected)):
        print(f"{label}: {found}, recall@1 {found.recall(links):.3f}, recall@10 {found.recall(links, 10):.3f}")
    print(fix, f"rank correlation {rank_correlation(bias, plain.counts):.3f}")

    chart = Chart("How often each item is found", "items, the most frequent first", "N_10", (0, len(items)), (0, 120))
    chart.ticks((0, 100, 200, 300, 400), (0, 30, 60, 90, 120))
    for found, style in ((plain, "orange"), (corrected, "blue")):
        counts = found.counts.sort(descending=True).values.tolist()
        chart.line([(place, min(count, 120)) for place, count in enumerate(counts)], style)
    mean = 10 * len(asked) / len(items)
    chart.add(
        '<path class="grid dash" style="opacity:.6" d="M{:.1f} {:.1f}H{}"/>'.format(*chart.at(0, mean), WIDTH - RIGHT)
    )
    chart.text(WIDTH - RIGHT, chart.at(0, mean)[1] - 6, "equally often", size=11, anchor="end", style="soft")
    chart.key({"plain": "orange", "corrected": "blue"}, 232, 74)
    chart.write("hubs_sorted")

    low, high = float(bias.min()), max(0.2, float(bias.max()))
    chart = Chart("Popularity predicts what is found", "zeta, from other queries", "N_10", (low, high), (0, 120))
    chart.ticks((-0.4, -0.2, 0, 0.2), (0, 30, 60, 90, 120))
    chart.dots(zip(bias.tolist(), plain.counts.clamp(max=120).tolist(), strict=True), "orange")
    chart.write("hubs_predicted")


# -- the normalizer of a small batch -----------------------------------------------------------------------------------


def normalizers(pairs: int = 2048, width: int = 32, temperature: float = 0.1) -> None:
    """Draw the error of an anchor's log normalizer, from one batch and from a running average over visits."""
    generator = torch.Generator().manual_seed(0)
    x = normalize(torch.randn(pairs, width, generator=generator), dim=1)
    y = normalize(x + 0.15 * torch.randn(pairs, width, generator=generator), dim=1)
    logits = (x @ y.T - (x * y).sum(dim=1, keepdim=True)) / temperature
    truth = logits.fill_diagonal_(-math.inf).logsumexp(dim=1)
    sizes, lines = (8, 16, 32, 64, 128, 256, 512), {}
    for gamma, label, style in ((1.0, "one batch", "orange"), (0.1, "running average", "blue")):
        errors = []
        for size in sizes:
            objective = build("sogclr", num_samples=pairs, temperature=temperature, gamma=gamma)
            for _ in range(20):
                for index in torch.randperm(pairs, generator=generator).split(size):
                    objective(x[index], y[index], index)
            errors.append(float((objective.log_u_x - truth).square().mean().sqrt()))
        lines[label] = style, errors
        print(f"{label} (gamma {gamma}):", ", ".join(f"B={b}: {e:.3f}" for b, e in zip(sizes, errors, strict=True)))
    top = max(max(errors) for _, errors in lines.values()) * 1.05
    chart = Chart("Error of the normalizer", "pairs in a batch, B", "error of log u", (8, 512), (0, top), log_x=True)
    chart.ticks((8, 32, 128, 512), (0, 0.2, 0.4, 0.6, 0.8))
    for style, errors in lines.values():
        chart.line(list(zip(sizes, errors, strict=True)), style)
    chart.key({label: style for label, (style, _) in lines.items()}, 210, 74)
    chart.write("normalizer_error")


def main() -> None:
    """Draw all pictures."""
    zeta = solve(scores=SCORES, temperature=0.1).zeta
    table("search_plain", "Scores", SCORES, None)
    table("search_corrected", "Scores minus zeta", SCORES - zeta, zeta)
    print("zeta", [round(value, 3) for value in zeta.tolist()])
    hubs()
    normalizers()


if __name__ == "__main__":
    main()
