"""`nuclr popularity RUN`: the run's training pairs as an embedding file with their captions."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr.errors import UserError
from nuclr.training import parts
from nuclr.training.embed import embed_pairs, open_run, write
from nuclr.training.launch import pick_device
from nuclr.training.settings import Data


@dataclass(frozen=True)
class Prepared:
    """Files for the solver; `numbers` (n_y,) are those of the pairs in the rows of y, None where they are the rows."""

    embeddings: Path
    captions: Path | None
    numbers: np.ndarray | None
    temperature: float


def prepare(run: Path, out: Path) -> Prepared:
    """Embed the pairs that the run was trained on."""
    trained = open_run(run)
    data = trained.config["data"]
    source = parts.open_source(Data(**data), data["train"], data["split"], data["keep"])
    pairs, numbers = source.pairs, source.numbers
    device = pick_device("auto")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None
    path, captions = out / "embeddings.npz", None
    write(path, embed_pairs(trained.model.to(device), pairs, numbers, trained.config["evaluate"]["batch_size"], device))
    if pairs.y_kind == "text":
        captions = out / "captions.jsonl"
        with captions.open("w", encoding="utf-8") as file:
            for number in numbers.tolist():
                file.write(json.dumps({"image": pairs.name(number), "caption": pairs.y(number)}) + "\n")
    every = len(numbers) == len(pairs)
    return Prepared(path, captions, None if every else numbers, trained.temperature)


def restore_numbers(keep: Path, numbers: np.ndarray) -> None:
    """Turn the rows in a list of kept pairs into the pairs' own numbers; comments stay."""
    lines = keep.read_text(encoding="utf-8").splitlines()
    restored = [line if line.startswith("#") or not line.strip() else str(numbers[int(line)]) for line in lines]
    keep.write_text("\n".join(restored) + "\n", encoding="utf-8")
