"""`nuclr popularity RUN`: the run's training pairs as an embedding file with their captions."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr.errors import UserError
from nuclr.runs import components as parts
from nuclr.runs.embed import embed_pairs, open_run, write
from nuclr.runs.launch import pick_device
from nuclr.runs.settings import Data


@dataclass(frozen=True)
class Prepared:
    """Files for the solver; `numbers` are those of the images ("x") and the pairs ("y") in the rows of the file."""

    embeddings: Path
    captions: Path | None
    numbers: dict[str, np.ndarray]
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
    found = embed_pairs(trained.model.to(device), pairs, numbers, trained.config["evaluate"]["batch_size"], device)
    write(path, found)
    if pairs.y_kind == "text":
        captions = out / "captions.jsonl"
        with captions.open("w", encoding="utf-8") as file:
            for number in numbers.tolist():
                file.write(json.dumps({"image": pairs.name(number), "caption": pairs.y(number)}) + "\n")
    images = np.empty(len(found["x"]), np.int64)
    images[found["y_to_x"].numpy()] = pairs.x_id[numbers]
    return Prepared(path, captions, {"x": images, "y": numbers}, trained.temperature)
