"""A run goes on only with the data that it was begun with: the same pairs, and the same ones among them in use.

The order of an epoch follows from which pairs are in use. A file that became unreadable meanwhile, or was mended,
would change it in the middle of a run, and an image might be seen twice in an epoch or not at all.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.runs import folder
from nuclr.runs.components import Source

_WAY_OUT = "restore it, or begin another run with out=..."


def identity(train: Source, held_out: Source | None) -> dict[str, dict[str, str]]:
    """For the checkpoint: hashes of the lists, and of the numbers in use."""
    sources = {"data.train": train} | ({"data.val": held_out} if held_out is not None else {})
    return {
        key: {"pairs": source.pairs.fingerprint, "numbers": hashlib.sha256(source.numbers.tobytes()).hexdigest()}
        for key, source in sources.items()
    }


def check_same(found: dict[str, Any], train: Source, held_out: Source | None, run: Path) -> None:
    """Refuse to go on from the checkpoint `found` where the data is another; the message names what changed."""
    now = identity(train, held_out)
    for key, before in found.get("data", {}).items():
        if before["pairs"] != now[key]["pairs"]:
            raise UserError(
                f"{key}: the data is not that of the run in {run}: its pairs have changed, so their numbers may mean "
                f"others; {_WAY_OUT}"
            )
        if before["numbers"] != now[key]["numbers"]:
            told = _changed(train, run) if key == "data.train" else "other samples are bad than when the run was begun"
            raise UserError(f"{key}: {told}; {_WAY_OUT}")


def _changed(train: Source, run: Path) -> str:
    lines = (run / folder.BAD).read_text(encoding="utf-8").splitlines() if (run / folder.BAD).is_file() else []
    before = {int(line["number"]): line["reason"] for line in map(json.loads, lines)}
    changed = sorted(before.keys() ^ train.bad.keys())
    if not changed:
        return f"data.keep names other pairs than when the run in {run} was begun"
    number, more = changed[0], f", and {len(changed) - 1} more like it" if len(changed) > 1 else ""
    sample, begun = f"sample {number} ({train.pairs.name(number)})", f"when the run in {run} was begun"
    if number in before:
        return f"{sample} was bad {begun} ({before[number]}), and is good now{more}"
    return f"{sample} was good {begun}, and is bad now: {train.bad[number]}{more}"
