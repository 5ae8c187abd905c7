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
"""

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.errors import UserError, require
from nuclr.integrations.trainer import (
    ObjectiveTrainerMixin,
    hash_pairs,
    holds_text,
    make_objective,
    read_column,
    unit_norm,
)
from nuclr.objectives import Objective

_Trainer: Any = require("sentence_transformers", purpose=__name__).SentenceTransformerTrainer
_losses: Any = require("sentence_transformers.base.losses")

__all__ = ["CachedNuclrLoss", "NuclrLoss", "NuclrTrainer", "NuclrTrainerMixin", "add_index"]

LABEL = "label"
NEGATIVE = "negative"
LABEL_COLUMNS = (LABEL, "labels", "score", "scores")  # the names that sentence-transformers does not tokenize
ADD_INDEX = "train_dataset = nuclr.integrations.sentence_transformers.add_index(train_dataset)"

# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def add_index(dataset: Any, *, group: str | None = None) -> Any:
    """Add the column `label` with the index of every pair and the ids by which false negatives are masked.

    Row i gets [i, x_id, y_id]. Rows with equal texts in the first column have the same x_id, and those with equal texts
    in the second column the same y_id. Pairs that share an id are not negatives of each other. Columns that do not hold
    texts, such as images, get a different id in every row. After y_id come the ids of the hard negatives, in the
    numbering of the second column: one that is the right answer to another text of the batch is not a negative of it.

    The rows must be in the same order at every start, because the state of row i belongs to pair i: add the index
    before shuffling. Split or concatenate data sets first, so that the numbers go from 0 to ``len(train_dataset)``.

    Args:
        dataset: A `datasets.Dataset` with two columns, the pairs, or a `DatasetDict`, whose data sets are numbered one
            after the other. Further columns whose names begin with "negative" hold hard negatives of the first column,
            as those that `sentence_transformers.util.mine_hard_negatives` writes.
        group: A column that says which pairs belong together, such as the image that two captions describe. Pairs of
            the same group are not negatives of each other. The column is removed, because it would be tokenized.

    Returns:
        The data set with the new column.

    Raises:
        UserError: If it is a stream, has a label column already, lacks `group`, or has other columns than described.

    Example:
        >>> from datasets import Dataset
        >>> texts = {"question": ["How far?", "Why?", "How far?"], "answer": ["a mile", "no", "12 km"]}
        >>> add_index(Dataset.from_dict(texts))["label"][:]
        [[0, 0, 0], [1, 1, 1], [2, 0, 2]]

    """
    # x, y, group: value -> id, over all parts
    known: list[defaultdict[Any, int]] = [defaultdict(count().__next__) for _ in range(3)]
    if not isinstance(dataset, dict):
        return _label(dataset, 0, known, group)
    begin = 0
    parts = {}
    for name, part in dataset.items():
        parts[name] = _label(part, begin, known, group)
        begin += len(part)
    return type(dataset)(parts)


def _label(
    dataset: Any,
    begin: int,
    known: list[defaultdict[Any, int]],
    group: str | None,
) -> Any:
    """Return a data set with the column `label`; its pairs are numbered from `begin`."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "add_column"):
        raise UserError(
            f"dataset: {type(dataset).__name__} is not a datasets.Dataset or DatasetDict; give a stream the column "
            f"{LABEL!r} with [index, x_id, y_id] yourself"
        )
    columns = [column for column in dataset.column_names if column != group]
    others = [column for column in columns[2:] if not column.startswith(NEGATIVE)]
    if len(columns) < 2 or others or not set(LABEL_COLUMNS).isdisjoint(columns):
        raise UserError(
            f"dataset has the columns {', '.join(columns)}; needs the two of a pair, then only hard negatives, whose "
            f"names begin with {NEGATIVE!r}, and none called {', '.join(LABEL_COLUMNS)}; choose them first: "
            "dataset.select_columns(['question', 'answer'])"
        )
    if group not in (None, *dataset.column_names):
        raise UserError(f"group={group!r} is not a column of the data set; it has {', '.join(columns)}")
    index = range(begin, begin + len(dataset))
    label: list[Iterable[int]] = [index]
    for k, column in enumerate(columns):
        side = min(k, 1)  # hard negatives have the ids of equal texts in the second column
        if holds_text(dataset, column) and holds_text(dataset, columns[side]):
            texts = dataset[column][:]
            if None in texts:
                raise UserError(f"dataset: row {texts.index(None)} of {column!r} is empty; drop such rows first")
            label.append([known[side][text] for text in texts])
        elif k >= 2 and holds_text(dataset, columns[1]):
            raise UserError(
                f"dataset: {column!r} holds no texts; each hard negative needs a column, such as negative_1"
            )
        else:
            label.append(index if k < 2 else [-1] * len(dataset))
    if group is not None:
        label.append([known[2][value] for value in dataset[group][:]])
    return dataset.select_columns(columns).add_column(LABEL, [list(row) for row in zip(*label, strict=True)])


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------


class NuclrLoss(nn.Module):
    """A contrastive loss for `SentenceTransformerTrainer` on pairs of texts, and hard negatives of the first text.

    With several processes, the objective gathers the batch by itself, and the gradients after DDP's averaging are those
    of one process with the whole batch. A batch of a single pair, such as the last one of an epoch, has no negatives
    and contributes nothing.

    In evaluation the loss of a batch is computed without the table of running averages, because the pairs of another
    data set have no rows in it. The evaluation data needs no label column; if it has one, only its ids are used.

    With `gradient_accumulation_steps`, the gradient is the mean over the accumulated batches. Each of them has its own
    negatives only, and updates the state of its own pairs, so a pair is still updated once per visit.

    Inside of `MatryoshkaLoss` there is one objective per width, because the running averages and popularities of short
    embeddings are not those of long ones. Each of them takes one step when the loss of its width is computed.

    Args:
        model: The `SentenceTransformer` to train. Its embeddings are scaled to unit norm.
        objective: The name of an objective, such as "nuclr", "sogclr" or "clip", or an objective.
        num_samples: The number of training pairs, ``len(train_dataset)``. Objectives with state need it.
        **options: Options of the named objective, such as ``temperature=0.05``; see `nuclr.objectives.options`. The
            temperature is 1 / `scale` of the losses of sentence-transformers.

    Raises:
        ValueError: If the objective, the number of pairs or an option is missing or wrong.

    Example:
        >>> from torch.nn import Identity  # in place of a SentenceTransformer
        >>> NuclrLoss(Identity(), "sogclr", num_samples=1000, temperature=0.05).objective.temperature
        0.05

    """

    def __init__(
        self,
        model: nn.Module,
        objective: str | Objective = "nuclr",
        num_samples: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is {model!r}; give the SentenceTransformer first, and then the objective")
        self.model = model
        self.objective = make_objective(objective, num_samples, **options)
        self.narrower = nn.ModuleDict()  # width -> objective of embeddings that MatryoshkaLoss shortens
        self._weights: dict[int, float] = {}  # of MatryoshkaLoss, per width
        self._width: int | None = None  # of the embeddings that `objective` has state of
        self.warns_of_lost_state = True  # NuclrTrainerMixin, which saves the state, sets it to False
        if self.objective.temperature > 1:
            warnings.warn(
                f"temperature={self.objective.temperature:g} is above 1, but scores of unit-norm embeddings lie in "
                "[-1, 1], so all negatives weigh nearly the same; usual values are 0.01 to 0.2 (1 / scale)",
                stacklevel=2,
            )

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of one batch; if the model is in training mode, also update the state.

        Args:
            sentence_features: The tokenized texts, one dict per column: anchors, positives, hard negatives.
            labels: (b, 3) integers, [index, x_id, y_id] per pair. More columns are the ids of the hard negatives, if
                there are enough columns for all of them, and then more ids of the pair.

        Returns:
            The loss, a scalar.

        Raises:
            UserError: If the batch has less than two columns, or its labels are missing or wrong.

        """
        x, y, *negatives = (self.model(column)["sentence_embedding"] for column in _columns(sentence_features))
        return self.loss_of(x, y, labels, negatives)

    def loss_of(
        self,
        x: Tensor,
        y: Tensor,
        labels: Tensor | None,
        negatives: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the loss of the embeddings (b, d) of both sides and of each column of hard negatives."""
        objective = self.objective_of(x.shape[-1])
        learns = torch.is_grad_enabled() and _unwrap(self.model).training
        objective.train(learns)
        needs_index = learns and objective.needs_index
        index, ids = _index_and_ids(labels, needs_index, len(negatives))
        if learns and objective.keeps_tables and self.warns_of_lost_state:
            self.warns_of_lost_state = False  # one warning is enough
            warnings.warn(
                f"this trainer does not save the state of {type(objective).__name__}, so a run that resumes from "
                "its checkpoints starts with empty tables; use NuclrTrainer, or NuclrTrainerMixin in front of yours",
                stacklevel=2,
            )
        x = unit_norm(x)
        y = unit_norm(y)
        if len(x) * distributed.world_size() == 1:
            return 0 * (x.sum() + y.sum() + sum(side.sum() for side in negatives))
        hard = unit_norm(torch.stack(list(negatives), dim=1)) if negatives else None
        return objective(x, y, index if learns else None, **ids, negatives=hard).loss

    def add_widths(self, widths: Sequence[int], weights: Sequence[float]) -> None:
        """Make the objectives of a `MatryoshkaLoss`, one per width; `NuclrTrainer` calls this before training."""
        self._weights = dict(zip(widths, weights, strict=True))
        self._width = max(widths)
        for width in widths:
            if width < self._width and str(width) not in self.narrower:
                self.narrower[str(width)] = copy.deepcopy(self.objective)

    def objective_of(self, width: int) -> Objective:
        """Return the objective of embeddings of this width.

        Raises:
            UserError: If the objective has state of embeddings of another width.

        """
        if str(width) in self.narrower:
            return self.narrower[str(width)]  # type: ignore[return-value]
        if self._width not in (None, width) and self.objective.keeps_tables:
            raise UserError(
                f"the loss gets embeddings of width {width} and of width {self._width}; around a NuclrLoss with state, "
                "MatryoshkaLoss needs NuclrTrainer, or NuclrTrainerMixin in front of your trainer"
            )
        self._width = width
        return self.objective

    def get_config_dict(self) -> dict[str, Any]:
        """Return the settings for the model card."""
        return {"objective": repr(self.objective)}

    @property
    def citation(self) -> str:
        """The paper, for the model card."""
        return CITATION


def _columns(sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    columns = list(sentence_features)
    if len(columns) < 2:
        raise UserError(
            f"the data has {len(columns)} column of texts, but the loss needs the two of a pair, and after them those "
            "of hard negatives, if there are any"
        )
    return columns


def _index_and_ids(labels: Tensor | None, needed: bool, negatives: int) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the index, and x_id, y_id and negative_id; further ids are further columns of y_id."""
    if labels is None and not needed:
        return None, {}
    if labels is None or labels.ndim != 2 or labels.shape[1] < 3 or labels.is_floating_point():
        form = "missing" if labels is None else f"{tuple(labels.shape)} of {labels.dtype}"
        raise UserError(
            f"labels: {form}; must be integers [index, x_id, y_id] per pair. Training data need the column "
            f"{LABEL!r} of {ADD_INDEX}; evaluation needs none of {', '.join(LABEL_COLUMNS)}"
        )
    own = slice(3, 3 + negatives if negatives <= labels.shape[1] - 3 else 3)
    ids = {"x_id": labels[:, 1], "y_id": torch.cat([labels[:, 2:3], labels[:, own.stop :]], dim=1)}
    return labels[:, 0], ids | ({"negative_id": labels[:, own]} if own.stop > 3 else {})


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP or torch.compile, whose own flag `training` is not kept up to date."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return _unwrap(inner)
    return model


class CachedNuclrLoss(_losses.CachedLossMixin, NuclrLoss):
    """`NuclrLoss` with the memory of a small batch: texts are encoded `mini_batch_size` pairs at a time.

    The gradient is that of the full batch, and the objective runs once per batch. Texts are encoded twice, with the
    same random numbers, so dropout is the same in both passes. Models with static embeddings cannot be cut into
    mini-batches; they need little memory.

    Args:
        model: As in `NuclrLoss`.
        objective: As in `NuclrLoss`.
        num_samples: As in `NuclrLoss`.
        mini_batch_size: The number of texts to encode at once.
        mini_batch_num_tokens: If set, a mini-batch has as many texts as have this number of tokens together.
        **options: As in `NuclrLoss`.

    Raises:
        ValueError: As in `NuclrLoss`, or if the model has static embeddings.

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
        if _losses.has_static_embedding_input(model):
            raise UserError(
                "model: inputs of a StaticEmbedding cannot be cut into mini-batches; use NuclrLoss, which needs little "
                "memory for such a model"
            )
        super().__init__(
            model,
            objective,
            num_samples,
            **options,
        )
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self._parameter_gradients: list[tuple[nn.Parameter, Tensor]] = []

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of one batch; see `NuclrLoss.forward`."""
        self._parameter_gradients = []
        loss: Tensor = self.forward_cached(_columns(sentence_features), labels)  # type: ignore[operator]
        if gradients := self._parameter_gradients:
            loss.register_hook(lambda scale: _accumulate(gradients, scale))
        return loss

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        labels: Tensor | None = None,
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """Return the loss of the embeddings of all mini-batches; with_backward gives them their gradients."""
        x, y, *negatives = (torch.cat(side) for side in reps)
        loss = self.loss_of(x, y, labels, negatives)
        if not with_backward:
            return loss
        parts = list(chain.from_iterable(reps))
        # The gradients of the objective's own parameters wait for the factor of the backward pass: the trainer
        # divides the loss by the number of accumulated batches.
        width = x.shape[-1]
        parameters = [parameter for parameter in self.objective_of(width).parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, [*parts, *parameters], allow_unused=True)
        for part, gradient in zip(parts, gradients, strict=False):
            part.grad = gradient
        for parameter, gradient in zip(parameters, gradients[len(parts) :], strict=True):
            if gradient is not None:
                self._parameter_gradients.append((parameter, gradient * self._weights.get(width, 1.0)))
        return loss.detach()


def _accumulate(gradients: list[tuple[nn.Parameter, Tensor]], scale: Tensor) -> None:
    for parameter, gradient in gradients:
        scaled = (gradient * scale).to(parameter.dtype)
        parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled


# ---------------------------------------------------------------------------------------------------------------------
# Trainer
# ---------------------------------------------------------------------------------------------------------------------


class NuclrTrainerMixin(ObjectiveTrainerMixin):
    """What `SentenceTransformerTrainer` lacks for a loss with state: it is saved and loaded with every checkpoint.

    ``class MyTrainer(NuclrTrainerMixin, SentenceTransformerTrainer)``; `NuclrTrainer` is this class without additions.
    See `ObjectiveTrainerMixin`; if `loss` is a dict, there is one state file per loss.

    The index of the training pairs is checked when the trainer is built, and before each training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_training()

    def _losses(self) -> Iterator[tuple[str, str, Any, NuclrLoss]]:
        """Yield per `NuclrLoss`: the data set of its loss ("" for all), its name inside of the loss, both losses."""
        for name, loss in self.loss.items() if isinstance(self.loss, dict) else [("", self.loss)]:
            for part, module in loss.named_modules():
                if isinstance(module, NuclrLoss):
                    yield name, part, loss, module

    def _objectives(self) -> Iterator[tuple[str, Objective, dict[str, str]]]:
        for name, part, _, module in self._losses():
            key = quote(".".join(filter(None, [name, part])), safe="")  # names of data sets may have slashes
            folder = f"nuclr_{key}" if key else ""
            pairs = self._pairs.get(name, {})
            yield folder, module.objective, pairs
            for width, objective in module.narrower.items():
                yield f"{folder}_{width}", objective, pairs  # type: ignore[misc]

    def _check_training(self) -> None:
        """Check the training pairs of each loss, and remember hashes of some of them."""
        self._pairs: dict[str, dict[str, str]] = {}
        datasets = self.train_dataset if isinstance(self.train_dataset, dict) else {"": self.train_dataset}
        for name, part, loss, module in self._losses():
            module.warns_of_lost_state = False
            per_width = getattr(loss, "loss", None) is module and hasattr(loss, "matryoshka_dims")
            if per_width:
                module.add_widths(loss.matryoshka_dims, loss.matryoshka_weights)
            if not module.objective.keeps_tables:
                continue
            if part and not per_width:
                raise UserError(
                    f"{type(loss).__name__} runs its loss several times per batch, but "
                    f"{type(module.objective).__name__} keeps one row of state per pair; pass the NuclrLoss itself to "
                    "the trainer, or use objective='clip'"
                )
            # Streams have no length; the loss checks their labels in each batch.
            own = [dataset for key, dataset in datasets.items() if key == name or not name]
            self._pairs[name] = _check_data(
                [dataset for dataset in own if hasattr(dataset, "__len__")], module.objective
            )


class NuclrTrainer(NuclrTrainerMixin, _Trainer):
    """`SentenceTransformerTrainer` that saves and loads the state of the objective; see `NuclrTrainerMixin`."""


def _check_data(datasets: list[Any], objective: Any) -> dict[str, str]:
    """Refuse pairs without an index, with one that has no row in the objective's tables, or that share a row.

    Returns:
        Hashes of some pairs, see `hash_pairs`.

    """
    hashes: dict[str, str] = {}
    used = np.empty(0, dtype=np.int64)
    for dataset in datasets:
        index = _read_labels(dataset)[:, 0]
        hashes |= hash_pairs(dataset, index, objective.num_samples)
        used = np.concatenate([used, index])
    numbers, counts = np.unique(used, return_counts=True)
    wrong = numbers[(counts > 1) | (numbers < 0) | (numbers >= objective.num_samples)]
    if len(wrong):
        raise UserError(
            f"train_dataset has the index {wrong[0]} several times, or outside of the rows of state of the loss, which "
            f"was built with num_samples={objective.num_samples}; split or concatenate data sets first, then call "
            "add_index on the result or on a DatasetDict"
        )
    return hashes


def _read_labels(dataset: Any) -> np.ndarray:
    """Return the labels of a `datasets.Dataset`, (rows, 3) or wider integers."""
    try:
        labels = read_column(dataset, LABEL)
    except (KeyError, ValueError):  # there is no such column, or its lists have different lengths
        labels = np.empty(0)
    if labels.ndim != 2 or labels.dtype.kind not in "iu" or labels.shape[1] < 3:
        raise UserError(
            f"train_dataset needs a column {LABEL!r} with integers [index, x_id, y_id] per pair; its columns are "
            f"{', '.join(dataset.column_names)}; {ADD_INDEX}"
        )
    return labels


CITATION = """
@inproceedings{wang2025discriminative,
    title = {On Discriminative Probabilistic Modeling for Self-Supervised Representation Learning},
    author = {Wang, Bokun and Lei, Yunwen and Ying, Yiming and Yang, Tianbao},
    booktitle = {International Conference on Learning Representations},
    year = {2025},
    url = {https://arxiv.org/abs/2410.09156},
}
"""
