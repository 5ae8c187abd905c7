"""Objectives as losses of sentence-transformers: `NuclrLoss`, `CachedNuclrLoss` and `NuclrTrainer`.

    from nuclr.integrations.sentence_transformers import NuclrLoss, NuclrTrainer, add_index

    train_dataset = add_index(train_dataset)
    loss = NuclrLoss(model, num_samples=len(train_dataset))
    trainer = NuclrTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss)

sentence-transformers tokenizes every column of a data set except the one named `label`. So this column carries the
index of the pair and its ids, [index, x_id, y_id], as integers.

Its trainer saves the model and the optimizer. `NuclrTrainer` also saves and loads the state of the objective; for a
subclass of your own, put `NuclrTrainerMixin` in front of the trainer. The trainer puts only the model into eval mode,
and not the loss, so the losses look at the model: they learn only from batches on which the model trains.

`CachedNuclrLoss` and `NuclrTrainer` derive from classes of sentence-transformers, and are created on first use.
"""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nuclr import distributed
from nuclr.errors import UserError, require
from nuclr.integrations.index import arrow_chunks, hash_pairs, holds_text
from nuclr.integrations.state import STATE_FILE, load_state, save_state
from nuclr.objectives import Objective, build, entry

__all__ = ["CachedNuclrLoss", "NuclrLoss", "NuclrTrainer", "NuclrTrainerMixin", "add_index"]  # noqa: F822 (__getattr__)

LABEL = "label"
LABEL_COLUMNS = (LABEL, "labels", "score", "scores")  # the names that sentence-transformers does not tokenize
ID_COLUMNS = ("id", "_id", "ids", "idx", "index", "qid", "docid")  # texts in them are not part of a pair
ADD_INDEX = "train_dataset = nuclr.integrations.sentence_transformers.add_index(train_dataset)"

# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def add_index(dataset: Any, *, group: str | None = None) -> Any:
    """Add the column `label` with the index of every pair and the ids by which false negatives are masked.

    Row i gets [i, x_id, y_id]. Rows with equal texts in the first column have the same x_id, and those with equal texts
    in the second column the same y_id. Pairs that share an id are not negatives of each other. Columns that do not hold
    texts, such as images, get a different id in every row.

    The rows must be in the same order at every start, because the state of row i belongs to pair i: add the index
    before shuffling. Split or concatenate data sets first, so that the numbers go from 0 to ``len(train_dataset)``.

    Args:
        dataset: A `datasets.Dataset` with two columns, the pairs, or a `DatasetDict`, whose data sets are numbered one
            after the other.
        group: A column that says which pairs belong together, such as the image that two captions describe. Pairs of
            the same group are not negatives of each other. The column is removed, because it would be tokenized.

    Returns:
        The data set with the new column.

    Raises:
        UserError: If it is not a `Dataset` or `DatasetDict`, is empty, has a label column already, lacks `group`, or
            does not have two other columns.

    Example:
        >>> from datasets import Dataset
        >>> texts = {"question": ["How far?", "Why?", "How far?"], "answer": ["a mile", "no", "12 km"]}
        >>> add_index(Dataset.from_dict(texts))["label"][:]
        [[0, 0, 0], [1, 1, 1], [2, 0, 2]]

    """
    datasets = require("datasets", extra="st")
    if isinstance(dataset, datasets.Dataset):
        return _with_labels(dataset, _Numbers(), group, "dataset")
    if isinstance(dataset, datasets.DatasetDict):
        numbers = _Numbers()
        return datasets.DatasetDict(
            {name: _with_labels(part, numbers, group, f"dataset[{name!r}]") for name, part in dataset.items()}
        )
    raise UserError(
        f"dataset must be a datasets.Dataset or DatasetDict, but is {type(dataset).__name__}; give a streamed data set "
        f"the column {LABEL!r} with [index, x_id, y_id] yourself"
    )


class _Numbers:
    """The numbers of pairs and ids that are in use, over all parts of a data set."""

    def __init__(self) -> None:
        self.pairs = 0
        self.known: list[dict[Any, int]] = [{}, {}, {}]  # x, y, group: value -> id

    def ids(self, column: int, values: Iterable[Any]) -> list[int]:
        known = self.known[column]
        return [known.setdefault(value, len(known)) for value in values]


def _with_labels(dataset: Any, numbers: _Numbers, group: str | None, name: str) -> Any:
    taken = [column for column in LABEL_COLUMNS if column in dataset.column_names]
    if taken:
        raise UserError(
            f"{name} already has a column {taken[0]!r}, which sentence-transformers takes for the label; "
            f"remove it first: dataset.remove_columns({taken[0]!r})"
        )
    if group is not None and group not in dataset.column_names:
        raise UserError(f"group={group!r} is not a column of {name}; it has {', '.join(dataset.column_names)}")
    if not len(dataset):
        raise UserError(f"{name} is empty; a loss needs at least two pairs")
    columns = [column for column in dataset.column_names if column != group]
    if len(columns) < 2:
        raise UserError(f"{name} needs two columns, the pairs, but has {', '.join(columns) or 'none'}")
    if len(columns) > 2:
        texts = [column for column in columns if holds_text(dataset, column) and column not in ID_COLUMNS]
        kept = [*(texts if len(texts) > 1 else columns)[:2], *([group] if group is not None else [])]
        raise UserError(
            f"{name} has the columns {', '.join(columns)}, but a pair has two; choose them before add_index: "
            f"{name} = {name}.select_columns({kept}). Hard negatives are not used"
        )
    index = range(numbers.pairs, numbers.pairs + len(dataset))
    numbers.pairs = index.stop
    ids: list[Iterable[int]] = [
        numbers.ids(side, dataset[column][:]) if holds_text(dataset, column) else index
        for side, column in enumerate(columns)
    ]
    if group is not None:
        ids.append(numbers.ids(2, dataset[group][:]))
        dataset = dataset.remove_columns(group)
    return dataset.add_column(LABEL, [list(row) for row in zip(index, *ids, strict=True)])


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------


class NuclrLoss(nn.Module):
    """A contrastive loss for `SentenceTransformerTrainer` on pairs of texts.

    With several processes, the objective gathers the batch by itself, and the gradients after DDP's averaging are those
    of one process with the whole batch. A batch of a single pair, such as the last one of an epoch, has no negatives
    and contributes nothing.

    In evaluation the loss of a batch is computed without the table of running averages, because the pairs of another
    data set have no rows in it. The evaluation data needs no label column; if it has one, only its ids are used.

    Args:
        model: The `SentenceTransformer` to train. Its embeddings are scaled to unit norm.
        objective: The name of an objective, such as "nuclr", "sogclr" or "clip", or an objective.
        num_samples: The number of training pairs, ``len(train_dataset)``. Objectives with state need it.
        **options: Options of the named objective, such as ``temperature=0.05``; see `nuclr.objectives.options`. The
            temperature is 1 / `scale` of the losses of sentence-transformers.

    Raises:
        UserError: If the objective, the number of pairs or an option is missing or wrong.

    Example:
        >>> from torch.nn import Identity  # in place of a SentenceTransformer
        >>> NuclrLoss(Identity(), "sogclr", num_samples=1000, temperature=0.05).objective.temperature
        0.05

    """

    def __init__(
        self, model: nn.Module, objective: str | Objective = "nuclr", num_samples: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = _objective(type(self).__name__, objective, num_samples, options)
        self.state_is_saved = False  # set by NuclrTrainerMixin
        self._warned: set[str] = set()
        self._is_first = True
        self._batches_of_one = 0  # without another batch in between

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of one batch; if the model is in training mode, also update the state.

        Args:
            sentence_features: The tokenized texts, one dict per column.
            labels: (b, 3) integers, [index, x_id, y_id] per pair. More columns are more ids.

        Returns:
            The loss, a scalar.

        Raises:
            UserError: If the batch does not have two columns, or its labels are missing or wrong.

        """
        x, y = (self.model(column)["sentence_embedding"] for column in _two_columns(sentence_features))
        return self.loss_of(x, y, labels)

    def loss_of(self, x: Tensor, y: Tensor, labels: Tensor | None) -> Tensor:
        """Return the loss of the embeddings (b, d) of both sides."""
        learns = torch.is_grad_enabled() and _unwrap(self.model).training
        self.objective.train(learns)
        index, ids = _index_and_ids(labels, len(x), learns, self.objective.needs_index)
        if learns:
            self._warn_of_what_does_not_train(len(x), ids)
        x, y = (normalize(side if side.dtype == torch.float64 else side.float(), dim=-1) for side in (x, y))
        if len(x) * distributed.world_size() == 1:
            return 0 * (x.sum() + y.sum())
        return self.objective(x, y, index if learns else None, ids).loss

    def _warn_of_what_does_not_train(self, pairs: int, ids: Tensor | None) -> None:
        """Warn of state that nobody saves and of batches without negatives, once each."""
        name = type(self.objective).__name__
        if self.objective.needs_index and not self.state_is_saved:
            self.warn_once(
                f"this trainer does not save the state of {name}, so a run that resumes from its checkpoints starts "
                "with empty tables; use NuclrTrainer, or NuclrTrainerMixin in front of your trainer"
            )
        if distributed.world_size() > 1:
            return
        self._batches_of_one = self._batches_of_one + 1 if pairs == 1 else 0
        if self._batches_of_one > 1:  # one alone is the last of an epoch
            self.warn_once("batches of one pair have no negatives, so nothing is trained; set a larger batch size")
        # Reading a value of an accelerator makes it wait, so only the first batch is looked at there.
        first, self._is_first = self._is_first, False
        if pairs > 1 and ids is not None and (first or ids.device.type == "cpu") and _share_an_id(ids):
            self.warn_once(
                "a batch has no negatives, because all of its pairs share a text or group, and trains nothing; shuffle "
                "the data, and check that both columns have different texts"
            )

    def warn_once(self, message: str) -> None:
        """Give a warning, unless this loss gave it before."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings for the model card."""
        return {"objective": repr(self.objective)}

    @property
    def citation(self) -> str:
        """The paper, for the model card."""
        return CITATION


def _objective(loss: str, objective: str | Objective, num_samples: int | None, options: dict[str, Any]) -> Objective:
    if isinstance(objective, Objective):
        if num_samples is not None or options:
            extra = ", ".join(["num_samples"] * (num_samples is not None) + list(options))
            raise UserError(f"{loss}: objective is already built, so {extra} would have no effect; remove it")
        _check_temperature(loss, objective)
        return objective
    if not isinstance(objective, str):
        raise UserError(f"{loss}: objective must be a name or an Objective, but is {type(objective).__name__}")
    try:
        if entry(objective).needs_num_samples and num_samples is None:
            raise UserError(
                f"{loss}: num_samples is missing; {objective} keeps state per pair: num_samples=len(train_dataset)"
            )
        if "scale" in options and "scale" not in entry(objective).options:
            scale = options["scale"]
            is_number = isinstance(scale, int | float) and scale > 0
            value = f"temperature={1 / scale:.4g}, which is 1 / scale" if is_number else "temperature=1 / scale"
            raise UserError(f"{loss}: {objective} has no option 'scale'; use {value}")
        built = build(objective, num_samples=num_samples, **options)
        _check_temperature(loss, built)
        return built
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"{loss}: {error}") from None


def _check_temperature(loss: str, objective: Objective) -> None:
    if objective.temperature > 1:
        warnings.warn(
            f"{loss}: temperature={objective.temperature:g} is above 1, but scores of unit-norm embeddings lie in "
            "[-1, 1], so all negatives weigh nearly the same; usual values are 0.01 to 0.2 (1 / scale)",
            stacklevel=4,
        )


def _share_an_id(ids: Any) -> bool:
    """Return whether all pairs have the same id in a column (of a tensor or array), so that none has negatives."""
    return bool((ids == ids[:1]).all(0).any())


def _two_columns(sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    columns = list(sentence_features)
    if len(columns) != 2:
        raise UserError(
            f"the data has {len(columns)} columns of texts, but the loss needs the two of a pair: "
            "dataset.select_columns([...]) chooses two; negatives come from the other pairs"
        )
    return columns


def _index_and_ids(
    labels: Tensor | None, pairs: int, learns: bool, needs_index: bool
) -> tuple[Tensor | None, Tensor | None]:
    if labels is None:
        if learns and needs_index:
            raise UserError(
                f"the training data has no column {LABEL!r} with the index of each pair; add it: {ADD_INDEX}"
            )
        return None, None
    right = labels.ndim == 2 and labels.shape[0] == pairs and labels.shape[1] >= 3
    if not right or labels.is_floating_point() or labels.dtype == torch.bool:
        kind = "training" if learns else "evaluation"
        fix = f"and add the right one: {ADD_INDEX}" if learns else "(evaluation needs none)"
        raise UserError(
            f"the label of the {kind} data must hold integers [index, x_id, y_id] per pair, but a batch of {pairs} "
            f"pairs has {tuple(labels.shape)} of {labels.dtype}; remove its column "
            f"({', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}) {fix}"
        )
    return labels[:, 0], labels[:, 1:]


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP or torch.compile, whose own flag `training` is not kept up to date."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return _unwrap(inner)
    return model


def _make_cached_loss() -> type:
    losses = require("sentence_transformers.base.losses", purpose="CachedNuclrLoss")

    class CachedNuclrLoss(losses.CachedLossMixin, NuclrLoss):  # type: ignore[name-defined]
        """`NuclrLoss` with the memory of a small batch: texts are encoded `mini_batch_size` pairs at a time.

        The gradient is that of the full batch, and the objective runs once per batch. Texts are encoded twice, with the
        same random numbers, so dropout is the same in both passes.

        Args:
            model: As in `NuclrLoss`.
            objective: As in `NuclrLoss`.
            num_samples: As in `NuclrLoss`.
            mini_batch_size: The number of texts to encode at once.
            mini_batch_num_tokens: If set, a mini-batch has as many texts as have this number of tokens together.
            **options: As in `NuclrLoss`.

        Raises:
            UserError: As `NuclrLoss`; also if the model has static embeddings, which cannot be cut into mini-batches.

        """

        def __init__(
            self,
            model: nn.Module,
            objective: str | Objective = "nuclr",
            num_samples: int | None = None,
            *,
            mini_batch_size: int = 32,
            mini_batch_num_tokens: int | None = None,
            **options: Any,
        ) -> None:
            super().__init__(model, objective, num_samples, **options)
            for name, size in (("mini_batch_size", mini_batch_size), ("mini_batch_num_tokens", mini_batch_num_tokens)):
                if size is not None and (not isinstance(size, int) or size < 1):
                    raise UserError(f"CachedNuclrLoss: {name} must be a whole number of at least 1, but is {size!r}")
            if losses.has_static_embedding_input(model):
                raise UserError(
                    "CachedNuclrLoss: the texts of a model with StaticEmbedding cannot be cut into mini-batches; "
                    "use NuclrLoss, such a model needs little memory"
                )
            self.mini_batch_size = mini_batch_size
            self.mini_batch_num_tokens = mini_batch_num_tokens
            self._parameter_gradients: list[tuple[nn.Parameter, Tensor]] = []

        def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
            """Compute the loss of one batch; see `NuclrLoss.forward`."""
            self._parameter_gradients = []
            loss: Tensor = self.forward_cached(_two_columns(sentence_features), labels)  # type: ignore[operator]
            if gradients := self._parameter_gradients:
                loss.register_hook(lambda scale: _accumulate(gradients, scale))
            return loss

        def calculate_loss(
            self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
        ) -> Tensor:
            """Return the loss of the embeddings of all mini-batches; with_backward gives them their gradients."""
            x, y = (torch.cat(side) for side in reps)
            loss = self.loss_of(x, y, labels)
            if not with_backward:
                return loss
            parts = [part for side in reps for part in side]
            # The gradients of the objective's own parameters wait for the factor of the backward pass: the trainer
            # divides the loss by the number of accumulated batches.
            parameters = [parameter for parameter in self.objective.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(loss, [*parts, *parameters], allow_unused=True)
            for part, gradient in zip(parts, gradients, strict=False):
                part.grad = gradient
            self._parameter_gradients += [
                (parameter, gradient)
                for parameter, gradient in zip(parameters, gradients[len(parts) :], strict=True)
                if gradient is not None
            ]
            return loss.detach()

    return CachedNuclrLoss


def _accumulate(gradients: list[tuple[nn.Parameter, Tensor]], scale: Tensor) -> None:
    for parameter, gradient in gradients:
        scaled = gradient * scale
        parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled


# ---------------------------------------------------------------------------------------------------------------------
# Trainer
# ---------------------------------------------------------------------------------------------------------------------


class NuclrTrainerMixin:
    """What `SentenceTransformerTrainer` lacks for a loss with state: it is saved and loaded with every checkpoint.

    ``class MyTrainer(NuclrTrainerMixin, SentenceTransformerTrainer)``; `NuclrTrainer` is this class without additions.
    Checkpoint folders get a file ``nuclr_objective.safetensors``; if `loss` is a dict, one per loss. Resuming from a
    checkpoint without it is refused, because the tables of running averages would start again, and so is resuming with
    pairs that were numbered in another order.

    The data is checked when the trainer is built: the index and ids of each pair, and whether batches have negatives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_training()
        self._check_evaluation(self.eval_dataset)  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """Return the trainer's data loader after checking that processes and training data fit the loss."""
        processes = self.args.world_size  # type: ignore[attr-defined]
        if processes != distributed.world_size():
            raise UserError(
                f"torch.distributed has {distributed.world_size()} processes, but the trainer uses {processes}, so "
                "each would train on all pairs; without an accelerator, set use_cpu=True in the training arguments"
            )
        self._check_training()  # data or loss may have been replaced
        return super().get_train_dataloader()  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the trainer's data loader after checking the label column of data that is passed to `evaluate`."""
        if not isinstance(eval_dataset, str):
            self._check_evaluation(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def _check_training(self) -> None:
        """Check data and batches of each loss, and remember hashes of some of its pairs."""
        self._pairs: dict[str, dict[str, str]] = {}
        dataset, args = self.train_dataset, self.args  # type: ignore[attr-defined]
        for name, loss in _parts(self.loss):  # type: ignore[attr-defined]
            modules = [module for module in loss.modules() if isinstance(module, NuclrLoss)]
            for module in modules:
                module.state_is_saved = True
            if dataset is None or not modules:
                continue
            _check_batches(args, args.train_batch_size, "per_device_train_batch_size")
            _check_wrapper(loss)
            self._pairs[name] = _check_data(_named(dataset, "train_dataset", name), modules[0])

    def _check_evaluation(self, dataset: Any) -> None:
        if dataset is None:
            return
        for name, loss in _parts(self.loss):  # type: ignore[attr-defined]
            if not any(isinstance(module, NuclrLoss) for module in loss.modules()):
                continue
            args = self.args  # type: ignore[attr-defined]
            _check_batches(args, args.eval_batch_size, "per_device_eval_batch_size")
            for where, part in _named(dataset, "eval_dataset", name):
                _check_eval_data(part, where)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        for path, objective, pairs in self._objectives(output_dir):
            save_state(objective, path, pairs)
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            for path, objective, pairs in self._objectives(checkpoint):
                load_state(objective, path, pairs)

    def _objectives(self, folder: str) -> Iterator[tuple[Path, Objective, dict[str, str]]]:
        """Yield the folder of the state file, the objective, and hashes of its pairs, per loss that has one."""
        for name, loss in _parts(self.loss):  # type: ignore[attr-defined]
            for part, module in loss.named_modules():
                if isinstance(module, NuclrLoss):
                    key = quote(".".join(filter(None, [name, part])), safe="")  # names of data sets may have slashes
                    yield Path(folder) / (f"nuclr_{key}" if key else ""), module.objective, self._pairs.get(name, {})

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        # The objective describes the model that is in use. Without a state file only the weights were saved.
        for path, objective, _ in self._objectives(self.state.best_model_checkpoint):  # type: ignore[attr-defined]
            if (path / STATE_FILE).is_file():
                load_state(objective, path, resumes=False)


def _parts(loss: Any) -> list[tuple[str, Any]]:
    """Return (name, loss) per data set, or the only loss with an empty name."""
    return list(loss.items()) if isinstance(loss, dict) else [("", loss)]


def _named(dataset: Any, name: str, key: str) -> list[tuple[str, Any]]:
    """Return (name for messages, data set) of the loss `key`, or of all data sets if it is the only loss."""
    if not isinstance(dataset, dict):
        return [(name, dataset)]
    return [(f"{name}[{part!r}]", dataset[part]) for part in dataset if key in ("", part)]


def _check_batches(args: Any, size: int, setting: str) -> None:
    """Refuse batches without negatives."""
    if size * args.world_size == 1:
        raise UserError(f"{setting}=1 leaves no negatives, so the loss would be 0; set it to at least 2")
    if args.batch_sampler == "group_by_label":
        raise UserError(
            f"batch_sampler='group_by_label' groups rows by class, but the column {LABEL!r} holds the index of each "
            "pair; leave it out, or use 'no_duplicates'"
        )


def _check_wrapper(loss: nn.Module) -> None:
    """Refuse losses that would run an objective with state several times per batch."""
    inner = [module for module in loss.modules() if isinstance(module, NuclrLoss) and module.objective.needs_index]
    if inner and not isinstance(loss, NuclrLoss):
        raise UserError(
            f"{type(loss).__name__} runs its loss several times per batch, but {type(inner[0].objective).__name__} "
            "keeps one row of state per pair; pass the NuclrLoss itself to the trainer, or use objective='clip'"
        )


def _check_data(parts: list[tuple[str, Any]], loss: NuclrLoss) -> dict[str, str]:
    """Refuse training data without the right index; return hashes of some pairs."""
    objective = loss.objective
    tables = [(where, part) for where, part in parts if hasattr(part, "__len__")]  # streams have no length
    for where, part in tables:
        if not len(part):
            raise UserError(f"{where} is empty; a loss needs at least two pairs")
    if not objective.needs_index:
        return {}
    for where, part in parts:
        names = getattr(part, "column_names", None)
        if names is not None and LABEL not in names:
            raise UserError(
                f"{where} has no column {LABEL!r} with the index of each pair (it has {', '.join(names)}); "
                f"add it: {ADD_INDEX}"
            )
    if not tables:
        return {}
    labels = []
    for where, part in tables:
        label = _read_labels(part, LABEL)
        if label is None:
            raise UserError(
                f"the column {LABEL!r} of {where} must hold integers [index, x_id, y_id] per pair, but holds "
                f"{_content(part, LABEL)}; remove the column and add the right one: {ADD_INDEX}"
            )
        labels.append(label)
    pairs: int | None = getattr(objective, "num_samples", None)
    index = np.concatenate([label[:, 0] for label in labels])
    _check_index(index, pairs, several=len(parts) > 1)
    if len(index) > 1 and all(_share_an_id(label[:, 1:]) for label in labels):
        loss.warn_once(
            f"all pairs of {' and '.join(where for where, _ in tables)} share a text or group, so none has negatives "
            "and the loss stays 0; check the columns"
        )
    if pairs is None:
        return {}
    hashes: dict[str, str] = {}
    for (_, part), label in zip(tables, labels, strict=True):
        hashes |= hash_pairs(part, label[:, 0], pairs)
    return hashes


def _check_index(index: np.ndarray, pairs: int | None, several: bool) -> None:
    """Refuse indices that have no row in the tables of the objective, or share one."""
    low, high = int(index.min()), int(index.max())
    if low < 0:
        raise UserError(f"the indices in the column {LABEL!r} must not be negative, but the smallest is {low}")
    if pairs is not None and high >= pairs:
        raise UserError(
            f"the indices of train_dataset go up to {high}, but the loss was built with num_samples={pairs}; pass "
            f"num_samples={high + 1} (the length before split or select), or split first and then call add_index"
        )
    seen = np.zeros(high + 1, dtype=bool)
    seen[index] = True
    if np.count_nonzero(seen) < len(index):
        repeated = int(np.bincount(index).argmax())
        fix = (
            "number all of them together: train_dataset = add_index(datasets.DatasetDict(train_dataset))"
            if several
            else "concatenate data sets first, then call add_index"
        )
        raise UserError(
            f"several pairs of train_dataset have the index {repeated}, so they would share a row of state; {fix}"
        )


def _check_eval_data(dataset: Any, where: str) -> None:
    """Refuse evaluation data whose label is not the one of `add_index`; it needs none."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "column_names"):
        return
    if not len(dataset):
        raise UserError(f"{where} is empty; leave it out")
    present = [column for column in LABEL_COLUMNS if column in dataset.column_names]
    if present and _read_labels(dataset, present[0]) is None:
        raise UserError(
            f"{where} has a column {present[0]!r} of {_content(dataset, present[0])}, which sentence-transformers "
            f"passes to the loss as its label; remove it: {where} = {where}.remove_columns({present[0]!r})"
        )


def _read_labels(dataset: Any, column: str) -> np.ndarray | None:
    """Return the labels of a `datasets.Dataset`, (rows, 3) or wider integers; None if they are something else."""
    chunks, rows = arrow_chunks(dataset, column)
    parts = []
    for chunk in filter(len, chunks):
        if not hasattr(chunk, "flatten") or not hasattr(chunk, "value_lengths"):
            return None
        values, lengths = np.asarray(chunk.flatten()), np.asarray(chunk.value_lengths())
        if values.dtype.kind not in "iu" or lengths.min() != lengths.max() or lengths.min() < 3:
            return None
        parts.append(values.reshape(len(chunk), -1))
    return np.concatenate(parts)[rows] if len({part.shape[1] for part in parts}) == 1 else None


def _content(dataset: Any, column: str) -> str:
    """Return the type and first value of a column for messages."""
    feature = dataset.features[column]
    value = repr(dataset.select_columns(column).with_format(None)[0][column])[:60]
    return f"{getattr(feature, 'dtype', None) or type(feature).__name__} such as {value}"


def _make_trainer() -> type:
    package = require("sentence_transformers", purpose="NuclrTrainer")

    class NuclrTrainer(NuclrTrainerMixin, package.SentenceTransformerTrainer):  # type: ignore[name-defined]
        """`SentenceTransformerTrainer` that saves and loads the state of the objective; see `NuclrTrainerMixin`."""

    return NuclrTrainer


_CLASSES = {"CachedNuclrLoss": _make_cached_loss, "NuclrTrainer": _make_trainer}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _CLASSES[name]()
    made.__qualname__ = name  # as if it were defined in the module, for pickling and the model card
    globals()[name] = made
    return made


CITATION = """
@inproceedings{wang2025discriminative,
    title = {On Discriminative Probabilistic Modeling for Self-Supervised Representation Learning},
    author = {Wang, Bokun and Lei, Yunwen and Ying, Yiming and Yang, Tianbao},
    booktitle = {International Conference on Learning Representations},
    year = {2025},
    url = {https://arxiv.org/abs/2410.09156},
}
"""
