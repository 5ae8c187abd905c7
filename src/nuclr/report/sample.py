"""Some of a run's pairs with their features, few enough for seconds: what examples and popularity are made from."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nuclr.data import Loader, open_pairs, read_keep
from nuclr.data.modalities.image import check_image
from nuclr.data.pairs import BadSample, Checkable, Pairs
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.report.logs import RunLog
from nuclr.runs import checkpoint, folder
from nuclr.runs import components as parts
from nuclr.runs.config import from_dict
from nuclr.runs.features import encode_x, encode_y
from nuclr.runs.settings import Data

BATCH = 256
PATIENCE = 20.0  # seconds that encoding a sample may take
PROBE = 16  # pairs by which the time of all is told
FEWEST = 100


@dataclass(frozen=True)
class Sample:
    """Distinct x (n_x, d) and y (n_y, d) of some pairs.

    `x_number` (n_x,) and `y_number` (n_y,) are numbers of pairs that have them, `links` (n, 2) says which row of x
    belongs to which of y for the n pairs `numbers`; `total` is how many pairs they were drawn from.
    """

    pairs: Pairs
    numbers: np.ndarray
    x_number: np.ndarray
    y_number: np.ndarray
    links: Tensor
    x: Tensor
    y: Tensor
    total: int


def choose(pairs: Pairs, numbers: np.ndarray, most: int, seed: int = 0) -> np.ndarray:
    """All pairs of as many images as give about `most` pairs, drawn at random; in order of their numbers."""
    if len(numbers) <= most:
        return numbers
    images = np.random.default_rng(seed).permutation(np.unique(pairs.x_id[numbers]))
    each = max(1, round(len(numbers) / len(images)))
    return numbers[np.isin(pairs.x_id[numbers], images[: max(2, most // each)])]


def readable(pairs: Pairs, numbers: np.ndarray) -> np.ndarray:
    """Those of the pairs whose image and caption can be read."""
    if not isinstance(pairs, Checkable):
        return numbers
    known: dict[int, bool] = {}
    kept = []
    for number in numbers.tolist():
        image = int(pairs.x_id[number])
        if image not in known:
            known[image] = _opens(pairs, number)
        if known[image] and number not in pairs.known_bad:
            kept.append(number)
    return np.array(kept, np.int64)


def _opens(pairs: Pairs, number: int) -> bool:
    try:
        found = pairs.x(number)
        if isinstance(found, Image.Image):
            check_image(found)
        pairs.y(number)
    except BadSample:
        return False
    return True


def affordable(model: DualEncoder, pairs: Pairs, numbers: np.ndarray, most: int, data: Data) -> int:
    """At most `most` pairs, and no more than PATIENCE allows: a large model on a CPU takes a second for each."""
    probe = readable(pairs, numbers[: 2 * PROBE])
    if model.images is None or len(probe) < 2 * PROBE:
        return most
    encode(model, pairs, probe[:PROBE], 0, data)  # the first call is slower
    begin = time.perf_counter()
    encode(model, pairs, probe[PROBE:], 0, data)
    pace = (time.perf_counter() - begin) / PROBE
    return max(min(FEWEST, most), min(most, int(PATIENCE / pace)))


def encode(model: DualEncoder, pairs: Pairs, numbers: np.ndarray, total: int, data: Data) -> Sample:
    """Features of these pairs."""
    device = next(model.parameters()).device
    _, first_x, x_row = np.unique(pairs.x_id[numbers], return_index=True, return_inverse=True)
    _, first_y, y_row = np.unique(pairs.y_id[numbers], return_index=True, return_inverse=True)
    size = model.images.size if model.images is not None else 224
    loader = Loader(pairs, size, data.fit, data.workers, memory=0)
    return Sample(
        pairs=pairs,
        numbers=numbers,
        x_number=numbers[first_x],
        y_number=numbers[first_y],
        links=torch.from_numpy(np.stack([x_row, y_row], axis=1)),
        x=encode_x(model, loader, numbers[first_x], BATCH, device, "float32"),
        y=encode_y(model, pairs, numbers[first_y], BATCH, device, "float32"),
        total=total,
    )


def open_train(run: RunLog) -> tuple[Pairs, np.ndarray]:
    """The pairs that the run was trained on, and the numbers of those that it used."""
    data = from_dict(run.config).data
    pairs = cast(Pairs, open_pairs(str(data.train), data.root, data.x.key, data.y.key, data.split))
    kept = np.arange(len(pairs)) if data.keep is None else read_keep(parts.below(data.root, data.keep), len(pairs))
    bad = {int(line["number"]) for line in run.bad if isinstance(line.get("number"), int)}
    return pairs, np.setdiff1d(kept, np.array(sorted(bad), np.int64))


def open_val(run: RunLog) -> tuple[Pairs, np.ndarray] | None:
    """The held-out pairs, None where the run had none."""
    data = from_dict(run.config).data
    if data.val is None:
        return None
    pairs = cast(Pairs, open_pairs(data.val, data.root, data.x.key, data.y.key, data.val_split or data.split))
    return pairs, np.arange(len(pairs))


def open_model(run: RunLog) -> tuple[DualEncoder, str]:
    """The run's model and what it is: that at the end, or that of the newest checkpoint of an unfinished run."""
    saved = run.folder / folder.MODEL
    if run.results is not None and saved.is_dir():
        return DualEncoder.from_pretrained(saved), "the trained model"
    state = newest_state(run.folder)
    if state is None:
        raise UserError("there is no checkpoint yet, and so no model")
    pairs, numbers = open_train(run)
    model = parts.make_model(from_dict(run.config).model, parts.Source(pairs, numbers, {}), run.config["seed"])
    model.load_state_dict(state["model"])
    return model, f"the model after step {state['position']['total']:,}"


def newest_state(run: Path) -> dict[str, Any] | None:
    """What the newest whole checkpoint holds."""
    return checkpoint.load_last(run / folder.CHECKPOINTS, lambda _: None)
