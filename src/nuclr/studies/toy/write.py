"""The toy study, from the command line to the folder of numbers and figures."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nuclr
from nuclr.studies import output, style
from nuclr.studies.toy import figures, study, variance

COMMAND = "nuclr toy"
SUMMARY = "toy.json"


def write(
    folder: Path,
    seeds: int,
    sizes: tuple[int, ...] = study.SIZES,
    base_seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Run the study and write `toy.json` and the figures into `folder`; returns what `toy.json` holds."""
    pictures = [f"{name}.{kind}" for name in figures.NAMES for kind in style.FORMATS]
    output.prepare_folder(folder, COMMAND, SUMMARY, [SUMMARY, *pictures])
    start = time.perf_counter()
    result = study.run(seeds, sizes, base_seed, advance)
    result["sampling"] = variance.run(sizes, base_seed=base_seed)
    figures.write(result, folder, shown_n=min(800, sizes[-1]), base_seed=base_seed)
    content = {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "seed": base_seed,
        "seconds": round(time.perf_counter() - start, 1),
        **result,
        "figures": pictures,
    }
    output.write_json(folder / SUMMARY, content)
    return content
