"""Objectives in the training loop of open_clip (`open_clip_train` of release 3).

`TrainOneEpoch` takes the place of the function `train_one_epoch`, which open_clip's `main` calls once per epoch:

    import sys
    import open_clip_train.main as training
    from nuclr.integrations.open_clip import TrainOneEpoch

    training.train_one_epoch = TrainOneEpoch("nuclr", temperature=0.03)
    training.main(sys.argv[1:])

It calls open_clip's own function with two changes: the loader also yields the indices of the pairs, and the loss is an
objective. The state of the objective is written next to each of open_clip's checkpoints.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nuclr import distributed
from nuclr.errors import UserError, require
from nuclr.files import user_errors, write_atomically
from nuclr.integrations.state import load_state, save_state
from nuclr.integrations.trainer import add_parameters, make_objective, set_logit_scale, stable_id, unit_norm
from nuclr.objectives import Objective

OPTIMIZER_FILE = "nuclr_optimizer.safetensors"
"""The optimizer's state for parameters of the objective, next to the objective's own state."""


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


class IndexedPairs(Dataset[tuple[Any, Any, Tensor]]):
    """A data set of (image, text) with a third element: the position of the pair and the ids of its two samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.columns = torch.arange(len(dataset))[:, None]
        images = getattr(dataset, "images", None)
        captions = getattr(dataset, "captions", None)
        if isinstance(images, list) and isinstance(captions, list):  # open_clip's CsvDataset
            ids = torch.tensor([[stable_id(str(i)), stable_id(str(c))] for i, c in zip(images, captions, strict=True)])
            if any(len(column.unique()) < len(column) for column in ids.T):
                self.columns = torch.cat([self.columns, ids], dim=1)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.dataset)

    def __getitem__(self, position: int) -> tuple[Any, Any, Tensor]:
        """Return image, text, and (index,) or (index, x_id, y_id)."""
        image, text = self.dataset[position]
        return image, text, self.columns[position]


class IndexedBatches:
    """The batches of a loader as open_clip's loop expects them. The indices of the last one are kept for the loss.

    Args:
        loader: The training loader that open_clip made. Its order and settings are kept.
        keys: For webdataset, key of a sample -> its number, from 0.

    Attributes:
        columns: (b, 1) or (b, 3), the index, and ids of image and text, of each pair of the last batch.

    Raises:
        UserError: If the data is a stream and there are no keys, or its samples have none.

    """

    def __init__(self, loader: Any, keys: Mapping[str, int] | None = None) -> None:
        self._keys = keys
        has_positions = isinstance(loader, DataLoader) and hasattr(loader.dataset, "__getitem__")
        if has_positions == (keys is not None):
            raise UserError(
                "keys= is a dict from the key of each sample to its number; streams (webdataset) need it, because "
                "their pairs have no index, and other data must not have it"
            )
        self._loader = _with_keys(loader) if keys is not None else _with_positions(loader)
        self.num_pairs = len(loader.dataset if keys is None else keys)
        self.num_batches: int = getattr(loader, "num_batches", 0) or len(loader)
        self.num_samples: int = getattr(loader, "num_samples", self.num_pairs)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield images and texts."""
        for images, texts, columns in self._loader:
            if self._keys is not None:
                columns = torch.tensor([self._keys[name] for name in columns])[:, None]
            self.columns: Tensor = columns
            yield images, texts


def _with_positions(loader: DataLoader[Any]) -> DataLoader[Any]:
    return DataLoader(
        IndexedPairs(loader.dataset),
        batch_sampler=loader.batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _with_keys(loader: Any) -> Any:
    """Let the pipeline of a webdataset loader keep the key of each sample, next to image and text."""
    stages = getattr(getattr(getattr(loader, "pipeline", [None])[0], "dataset", None), "pipeline", [])
    for position, stage in enumerate(stages):
        if getattr(stage, "args", None) == ("image", "text"):
            stages[position] = type(stage)(
                stage.f,
                *stage.args,
                "__key__",
                **stage.kw,
            )
            return loader
    raise UserError('the stream has no stage to_tuple("image", "text"), as that of open_clip\'s get_wds_dataset')


# ---------------------------------------------------------------------------------------------------------------------
# Loss
# ---------------------------------------------------------------------------------------------------------------------


class ObjectiveLoss(nn.Module):
    """An objective with the signature of open_clip's losses.

    Args:
        objective: The objective.
        batches: The loader that the features come from.

    """

    def __init__(self, objective: Objective, batches: IndexedBatches) -> None:
        super().__init__()
        self.objective = objective
        self._batches = batches

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss of the batch, in a dict if `output_dict`.

        Args:
            image_features: (b, d).
            text_features: (b, d).
            logit_scale: Of the model; not used, but DDP needs a gradient for it.
            logit_bias: As `logit_scale`.
            output_dict: Whether to return a dict.

        """
        columns = self._batches.columns
        ids = columns[:, 1:] if columns.shape[1] > 1 else None
        loss: Tensor = self.objective(unit_norm(image_features), unit_norm(text_features), columns[:, 0], ids).loss
        for unused in (logit_scale, logit_bias):
            if isinstance(unused, Tensor) and unused.requires_grad:
                loss = loss + 0 * unused.sum()
        return {"contrastive_loss": loss} if output_dict else loss


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class TrainOneEpoch:
    """open_clip's `train_one_epoch` with an objective as the loss; call it with the same arguments.

    The index of a pair is its row in the CSV file, or the number of its key in a webdataset. Rows of a CSV file with
    the same image file or the same caption are not negatives of each other. Under torchrun, the batch is that of all
    processes; ``--local-loss`` and ``--gather-with-grad`` have no effect.

    The state of the objective after epoch N is written to ``checkpoints/epoch_N_objective`` before open_clip writes its
    own checkpoint, and is read with ``--resume``. The model's `logit_scale` is set to the objective's temperature at
    the end of each epoch.

    Args:
        objective: The name of an objective, such as "nuclr", or an objective. If it is a name, the objective is built
            when training starts, with the number of pairs in the training data.
        keys: Key of a sample -> its number, for ``--dataset-type webdataset``.
        **options: Options of the named objective, such as `temperature`.

    Raises:
        ValueError: If the name or an option is unknown.

    Example:
        >>> train_one_epoch = TrainOneEpoch("nuclr", temperature=0.03)

    """

    objective: Objective
    """The objective, once training has started."""

    def __init__(self, objective: str | Objective, *, keys: Mapping[str, int] | None = None, **options: Any) -> None:
        self._build = partial(make_objective, objective, **options)
        self._build(num_samples=2)  # a wrong option is reported before any data is read
        self._keys = keys
        self._batches: IndexedBatches | None = None

    def __call__(
        self,
        model: nn.Module,
        data: dict[str, Any],
        loss: Any,
        epoch: int,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        scheduler: Any,
        dist_model: Any,
        args: Any,
        tb_writer: Any = None,
    ) -> None:
        """Train one epoch; the arguments are those of open_clip's function, whose `loss` is not used."""
        del loss
        loop = require("open_clip_train.train", purpose=type(self).__name__)
        if self._batches is None:
            self._start(data, epoch, optimizer, args)
        self.objective.train()
        data = {**data, "train": dataclasses.replace(data["train"], dataloader=self._batches)}
        loop.train_one_epoch(
            model,
            data,
            self.loss,
            epoch,
            optimizer,
            scaler,
            scheduler,
            dist_model,
            args,
            tb_writer=tb_writer,
        )
        set_logit_scale(loop.unwrap_model(model), self.objective.current_temperature)
        if args.logs and args.logs.lower() != "none":
            folder = state_folder(args.checkpoint_path, epoch + 1)
            save_state(self.objective, folder)
            if distributed.rank() == 0:
                _save_optimizer(self.objective, optimizer, folder)
                _remove_old(Path(args.checkpoint_path), epoch + 1)

    def _start(
        self,
        data: dict[str, Any],
        epoch: int,
        optimizer: torch.optim.Optimizer,
        args: Any,
    ) -> None:
        if getattr(args, "dataset_resampled", False) or getattr(args, "horovod", False) or args.accum_freq > 1:
            raise UserError(
                "leave out --dataset-resampled, which repeats pairs within a batch, --horovod, since torchrun starts "
                "several processes, and --accum-freq, which calls the loss several times per batch"
            )
        self._batches = IndexedBatches(data["train"].dataloader, self._keys)
        self.objective = self._build(num_samples=self._batches.num_pairs)
        self.loss = ObjectiveLoss(self.objective.to(torch.device(args.device)), self._batches)
        if add_parameters(optimizer, self.objective):
            optimizer.register_state_dict_post_hook(_without_last_group)
        if getattr(args, "resume", None) and epoch > 0:
            folder = state_folder(Path(args.resume).parent, epoch)
            load_state(self.objective, folder)
            _load_optimizer(self.objective, optimizer, folder)


def state_folder(checkpoints: str | Path, epoch: int) -> Path:
    """Return the folder of the objective's state after a number of epochs.

    Example:
        >>> str(state_folder("logs/run/checkpoints", 3))
        'logs/run/checkpoints/epoch_3_objective'

    """
    return Path(checkpoints) / f"epoch_{epoch}_objective"


def _without_last_group(_optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    # open_clip loads the optimizer before the objective exists, so its checkpoint holds the model's parameters only.
    *groups, own = state["param_groups"]
    kept = {number: value for number, value in state["state"].items() if number not in own["params"]}
    return {
        **state,
        "param_groups": groups,
        "state": kept,
    }


def _save_optimizer(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    folder: Path,
) -> None:
    tensors = {}
    for name, parameter in objective.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    if tensors:
        with user_errors(folder / OPTIMIZER_FILE), write_atomically(folder / OPTIMIZER_FILE) as file:
            file.write(save(tensors))


def _load_optimizer(
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    folder: Path,
) -> None:
    path = folder / OPTIMIZER_FILE
    parameters = dict(objective.named_parameters())
    if not parameters or not path.is_file():
        return
    try:
        for entry, tensor in load_file(path).items():
            name, _, key = entry.rpartition("/")
            # Adam counts its steps on the host.
            device = tensor.device if key == "step" else parameters[name].device
            optimizer.state[parameters[name]][key] = tensor.to(device)
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"{path}: does not fit {type(objective).__name__} ({error}); use another checkpoint") from None


def _remove_old(checkpoints: Path, completed: int) -> None:
    """Remove states whose checkpoint is gone, except the last two: the newest checkpoint is yet to be written."""
    for folder in checkpoints.glob("epoch_*_objective"):
        epoch = folder.name.split("_")[1]
        if epoch.isdigit() and int(epoch) < completed - 1 and not (checkpoints / f"epoch_{epoch}.pt").exists():
            shutil.rmtree(folder)
