"""Small folders of every kind that has a page."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nuclr.report.page import Block, Options, Page, render_sections
from nuclr.report.write import find_kind, open_page
from nuclr.studies.toy import study

HOSTILE = "<script>alert(1)</script>"
QUOTED = 'it\'s "7" <b>.png'


def write_pictures(folder: Path, count: int = 24, size: int = 32, noise: bool = False) -> list[str]:
    """Write pictures of one color, or of noise that does not compress; one file name has quotes."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [QUOTED if k == 7 else f"{k}.png" for k in range(count)]
    rng = np.random.default_rng(0)
    for name in names:
        pixels = rng.integers(256, size=(size, size, 3) if noise else (1, 1, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((size, size)).save(folder / name)
    return names


def write_captions(folder: Path, count: int = 24) -> Path:
    """Write a caption list with two captions per picture; one caption is markup."""
    lines = []
    for k, name in enumerate(write_pictures(folder / "images", count)):
        captions = [HOSTILE if k == 3 else f"a thing of kind {k}, seen", f"thing {k % 5} & others"]
        lines.append(json.dumps({"image": name, "captions": captions}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "train.jsonl"


def toy() -> study.ToyStudy:
    """Return a toy study of two sizes."""
    methods = {
        "risk": ("mle", "gcl", "gcl_constant", "true_q", "nuclr", "nuclr_area"),
        "learning": ("mle", "gcl", "nuclr"),
        "views": [f"{form}_{m}" for form in ("per_view", "shared") for m in study.VIEWS],
    }
    quantities = {
        "risk": ("error", "error_term", "rank_correlation"),
        "learning": ("excess_risk", "zero_one", "bound", "w_11", "w_22"),
        "views": ("error",),
    }
    records = []
    for part, tau, n in itertools.product(methods, (0.2, 1.0), (100, 200)):
        mean = dict.fromkeys(quantities[part], 1 / n)
        std = dict.fromkeys(quantities[part], 0.1 / n)
        records += [study.Record(part, tau, n, method, 2, mean, std) for method in methods[part]]
    return study.ToyStudy(2, 0, records)


def write_json(path: Path, content: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_toy(folder: Path) -> Path:
    """Write the file of a toy study."""
    write_json(folder / "toy.json", toy().to_json())
    return folder


def fill_page(kind: str, path: Path, options: Options | None = None) -> tuple[Page, dict[str, list[Block]]]:
    """Return the page of a folder and the blocks of its sections by key."""
    assert find_kind(path) == kind
    page, result = open_page(kind, path, options or Options())
    return page, {each.section.key: each.blocks for each in render_sections(page, result)}


def of_kind(blocks: list[Block], kind: type) -> list[Any]:
    """Return the blocks of one kind."""
    return [block for block in blocks if isinstance(block, kind)]
