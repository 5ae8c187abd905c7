"""`Run`: everything a run folder knows, opened the same way for every command.

>>> run = Run.open("runs/demo")                                              # doctest: +SKIP
>>> run.settings.objective.name, run.temperature, len(run.train.pairs)       # doctest: +SKIP
('nuclr', 0.03, 12000)
>>> features = run.features(run.val)                                         # doctest: +SKIP
"""

import contextlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.data import Loader, usable
from nuclr.data.pairs import Pairs, SideName
from nuclr.data.selection import Source
from nuclr.errors import UserError
from nuclr.files import is_run, parse_json, read_text
from nuclr.models import DualEncoder
from nuclr.runs import checkpoint, components, config, folder
from nuclr.runs.components import Loaders
from nuclr.runs.features import Encoding, PairFeatures, encode_pairs
from nuclr.runs.launch import pick_device
from nuclr.runs.settings import Settings


class Run:
    """A run folder: settings, model, pairs, features and the current temperature, exactly as training used them.

    Nothing is read before it is asked for. Open a run with `Run.open`.
    """

    def __init__(
        self,
        path: Path,
        settings: Settings,
        best: bool,
        device: torch.device,
        loaders: Loaders | None = None,
    ) -> None:
        self.folder = path
        self.settings = settings
        self.best = best
        self.device = device
        self._loaders: Loaders = {} if loaders is None else loaders

    @classmethod
    def open(
        cls,
        path: str | Path,
        best: bool = False,
        device: str = "auto",
        loaders: Loaders | None = None,
    ) -> "Run":
        """Open a finished or unfinished run.

        Args:
            path: the folder that `nuclr train` wrote.
            best: use the weights of the best checkpoint instead of the last ones.
            device: where the model runs, such as "cpu" or "cuda"; "auto" takes an accelerator if there is one.
            loaders: shared by several runs on the same pairs, so that images are decoded once.

        Raises:
            UserError: the folder does not hold a run, or its settings cannot be read.

        """
        path = Path(path)
        if not is_run(path):
            problem = f"not a run folder (it has no {folder.CONFIG})" if path.is_dir() else "no such folder"
            raise UserError(f"{path}: {problem}; name a run folder that nuclr train wrote")
        return cls(
            path,
            config.load(path / folder.CONFIG),
            best,
            pick_device(device),
            loaders,
        )

    @classmethod
    def open_finished(
        cls,
        path: str | Path,
        best: bool = False,
        device: str = "auto",
    ) -> "Run":
        """Open a run as `open` does, but refuse one that is not finished."""
        run = cls.open(path, best, device)
        if not run.finished:
            raise UserError(f"{path}: this run is not finished; continue it with nuclr train {path} --resume")
        return run

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"Run({str(self.folder)!r}, {self.settings.objective.name} on {self.settings.data.train}, {state})"

    # -- what training wrote

    @cached_property
    def results(self) -> folder.TrainedRun | None:
        """Content of results.json; None for an unfinished run."""
        return folder.read_results(self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return folder.is_finished(self.folder)

    @cached_property
    def _newest(self) -> checkpoint.Checkpoint | None:
        with contextlib.suppress(checkpoint.BadCheckpoint):  # `nuclr train --resume` shows what is wrong
            return checkpoint.load_last(self.folder / folder.CHECKPOINTS, lambda _: None, self._check)
        return None

    @cached_property
    def saved(self) -> checkpoint.Checkpoint | None:
        """The best checkpoint, or else the newest one; None if there is none yet."""
        if not self.best:
            return self._newest
        return checkpoint.load(self.folder / folder.CHECKPOINTS / checkpoint.BEST, self._check)

    def _check(self, saved: checkpoint.Checkpoint) -> None:
        """Raise any exception if a checkpoint does not fit the run."""
        self.settings.objective.restore(saved.objective)
        if self.best or not self.finished:
            checkpoint.check_state(saved.model, self._empty_model.state_dict())

    @cached_property
    def _empty_model(self) -> DualEncoder:
        """The model without the weights of a checkpoint."""
        if self.finished:
            return DualEncoder.from_pretrained(self.folder / folder.MODEL)
        return components.make_model(self.settings.model, self.train, self.settings.seed)

    @property
    def objective_state(self) -> dict[str, Tensor] | None:
        """The objective's state in the newest checkpoint, with one row per pair; None if there is no checkpoint.

        If several pairs are views of one sample, each of them has the sample's row, or the value of its own view.
        """
        if self._newest is None:
            return None
        state = self._newest.objective
        data = self.settings.data
        groups = components.view_groups(data, self.train) if max(data.x.views, data.y.views) > 1 else None
        if groups is None:
            return state
        row = torch.from_numpy(groups.row)
        of_pairs = {}
        for name, table in state.items():
            # A name with a dot belongs to a parameter of one of the objective's networks.
            if "." not in name and table.ndim and len(table) == groups.count:
                side: SideName = "x" if name.endswith("_x") else "y"
                of_pairs[name] = table[row] if table.ndim == 1 else table[row, torch.from_numpy(groups.position(side))]
            else:
                of_pairs[name] = table
        return of_pairs

    @cached_property
    def temperature(self) -> float:
        """Current temperature: the learnt value if the objective learns it."""
        if self.results is not None:
            return self.results.temperature
        state = self._newest.objective if self._newest else {}
        objective = self.settings.objective
        return float((objective.restore(state) if state else objective.build(2)).current_temperature)

    @cached_property
    def sides(self) -> tuple[str, str]:
        """The names of both sides, as in the names of metrics: ("image", "text"), ("question", "answer")."""
        return str(self.settings.data.x.name), str(self.settings.data.y.name)

    # -- model and data

    @cached_property
    def model(self) -> DualEncoder:
        """The model in eval mode: final, best, or that of an unfinished run's newest checkpoint."""
        model = self._empty_model
        if self.best or not self.finished:
            if self.saved is None:
                raise UserError(
                    f"{self.folder}: the run has no good checkpoint yet; continue it with nuclr train {self.folder} "
                    "--resume"
                )
            model.load_state_dict(self.saved.model)
        return model.to(self.device).eval()

    @cached_property
    def train(self) -> Source:
        """The training pairs as training read them; bad samples are those that training left out."""
        source = components.open_train(self.settings.data, check=False)
        bad = self._recorded_bad()
        return Source(source.pairs, usable(source.pairs, bad, source.numbers), bad)

    def _recorded_bad(self) -> dict[int, str]:
        path = self.folder / folder.BAD
        lines = read_text(path).splitlines() if path.is_file() else []
        try:
            return {int(entry["number"]): str(entry["reason"]) for entry in map(parse_json, lines)}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: damaged; without it, the samples that training left out are unknown") from None

    @cached_property
    def val(self) -> Source | None:
        """The held-out pairs, the first set of several, as training read them; None if there are none, as for views."""
        return next(iter(self.held_out.values()), None)

    @cached_property
    def held_out(self) -> dict[str, Source]:
        """All sets of held-out pairs by name; the first one is `val`."""
        return components.open_held_out(self.settings.data)

    @cached_property
    def classes(self) -> Any:
        """The labeled images of `data.classes`; None if the run has none."""
        return components.open_classes(self.settings.data, self.train.pairs)

    def loader(self, pairs: Pairs) -> Loader:
        """Return a loader that reads pairs as training did, without augmentation."""
        return components.make_loader(
            self.settings.data.outside_training(),
            pairs,
            self.model,
            self._loaders,
        )

    @property
    def encoding(self) -> Encoding:
        """Batch size, device and precision of the run's evaluation, and whether it uses the heads."""
        evaluate = self.settings.evaluate
        return Encoding(
            evaluate.batch_size,
            self.device,
            self.settings.precision,
            evaluate.head,
        )

    def features(
        self,
        source: Source,
        numbers: np.ndarray | None = None,
        merge_y: bool = True,
    ) -> PairFeatures:
        """Return the features of pairs, all that are in use or those with these numbers."""
        chosen = source.numbers if numbers is None else numbers
        return encode_pairs(
            self.model,
            self.loader(source.pairs),
            chosen,
            self.encoding,
            merge_y,
        )
