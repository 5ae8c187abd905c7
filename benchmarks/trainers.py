r"""Objectives inside other people's trainers, compared with the trainer's own loss on real pairs.

    python benchmarks/trainers.py --data ../shared/data [--seeds 3] [--only sentence-transformers]

Each trainer has a baseline, its own loss, and trains the same model on the same pairs with the same number of steps for
every method. Held-out images are split into two halves with a gallery each. The settings of a method (its grid) are
chosen by recall@1 on the first half with seed 0; the table is of the second half and all seeds. Options that are not in
the grid have their documented defaults. Recall@1 is the mean of both directions, in percent; any text or image of the
same image is a right answer. Intervals are 95 % intervals of a paired bootstrap over images and seeds.

- sentence-transformers: Multi30k, English and German descriptions of the same image, written independently. The first
  of each is a training pair, of 6,000 images; the held-out texts are all five of 1,014 images. Static embeddings of
  width 128 from random weights, one table for both languages. Batches of 32, four epochs, AdamW with a linear schedule.
- transformers and open_clip: Flickr8k, 6,000 photographs with their first captions, and 1,000 held out with all five.
  The image tower gets frozen EfficientNet-Lite0 features of the photographs; the text tower is a transformer of two
  layers and width 64 from random weights. Batches of 32, four epochs. The trainers' own losses learn the temperature,
  starting from that of the grid: CLIPModel with `return_loss=True`, and open_clip's `ClipLoss` in `train_one_epoch`.
- lightning: Flickr8k, embeddings of photographs (EfficientNet-Lite0) and captions (MiniLM). The first caption of every
  of 6,000 images is a training pair; held out are 1,000 images with five captions each. Towers with one hidden layer of
  256 to width 128, batches of 32, six epochs, AdamW. The baseline is InfoNCE in both directions, written in the module.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nuclr.evaluation.intervals import Bootstrap, Fold, cut_halves, per_seed
from nuclr.evaluation.ranks import query_ranks

BATCH = 32
Setting = dict[str, float]
# The published estimator with the other options of NUCLR, as in the tables of docs/integrations.md.
OPTIONS: dict[str | None, dict[str, Any]] = {
    "nuclr-authors": {
        "zeta_init": 0.0,
        "zeta_lr": 1e-3,
        "zeta_lr_ratio_x": 1.0,
        "zeta_momentum": 0.0,
        "zeta_velocity_init": "zero",
        "xi_rule": "norm",
        "xi_update": "step",
    }
}


class HeldOut(NamedTuple):
    """Unit-norm features of held-out samples, and the number of the image that each belongs to."""

    x: Tensor
    y: Tensor
    x_image: Tensor
    y_image: Tensor


class Study(NamedTuple):
    """The methods of one trainer: a function of the setting and the seed trains and returns the held-out features."""

    methods: dict[str, Callable[[Setting, int], HeldOut]]  # the first one is the baseline
    grid: dict[str, list[float]]


# -- sentence-transformers ---------------------------------------------------------------------------------------------


def sentence_transformers(data: Path) -> Study:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    from nuclr.integrations.sentence_transformers import NuclrLoss, NuclrTrainer, add_index
    from nuclr.models import train_tokenizer

    def read(name: str) -> list[dict[str, list[str]]]:
        with (data / "multi30k" / name).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    images, held_out = read("train.jsonl")[:6_000], read("val.jsonl")
    texts = {side: [image[side][0] for image in images] for side in ("en", "de")}
    tokenizer = train_tokenizer([*texts["en"], *texts["de"]], vocabulary=8_000)
    pairs = add_index(Dataset.from_dict(texts))
    image_of = torch.arange(len(held_out)).repeat_interleave(5)

    def train(make_loss: Callable[[Any, float], Any], setting: Setting, seed: int) -> HeldOut:
        torch.manual_seed(seed)
        model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=128)], device="cpu")
        loss = make_loss(model, setting["temperature"])
        with tempfile.TemporaryDirectory() as folder:
            args = SentenceTransformerTrainingArguments(
                output_dir=folder,
                seed=seed,
                num_train_epochs=4,
                per_device_train_batch_size=BATCH,
                learning_rate=setting["learning_rate"],
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            plain = isinstance(loss, MultipleNegativesRankingLoss)
            columns = pairs.remove_columns("label") if plain else pairs
            NuclrTrainer(model=model, args=args, train_dataset=columns, loss=loss).train()
        x, y = (
            torch.from_numpy(model.encode([text for image in held_out for text in image[side]], batch_size=1024))
            for side in ("en", "de")
        )
        x, y = (torch.nn.functional.normalize(side, dim=1) for side in (x, y))
        return HeldOut(x, y, image_of, image_of)

    def ranking(model: Any, temperature: float, **options: Any) -> Any:
        return MultipleNegativesRankingLoss(model, scale=1 / temperature, **options)

    def symmetric(model: Any, temperature: float) -> Any:
        return ranking(model, temperature, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")

    def ours(name: str) -> Callable[[Any, float], Any]:
        return lambda model, temperature: NuclrLoss(
            model,
            name,
            num_samples=len(pairs),
            temperature=temperature,
            **OPTIONS.get(name, {}),
        )

    losses = {
        "MultipleNegativesRankingLoss": ranking,
        "the same, both directions": symmetric,
        "SogCLR": ours("sogclr"),
        "NUCLR": ours("nuclr-authors"),
    }
    methods = {
        name: lambda setting, seed, loss=loss: train(loss, setting, seed)  # type: ignore[misc]
        for name, loss in losses.items()
    }
    return Study(methods, {"temperature": [0.05, 0.1, 0.2, 0.4], "learning_rate": [0.03, 0.1, 0.3]})


# -- Lightning ---------------------------------------------------------------------------------------------------------


def lightning(data: Path) -> Study:
    import logging
    import warnings

    from lightning import LightningModule, Trainer, seed_everything
    from torch import nn
    from torch.nn.functional import cross_entropy, normalize
    from torch.utils.data import DataLoader, TensorDataset

    from nuclr.integrations.lightning import NuclrCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    def read(name: str) -> tuple[Tensor, Tensor, Tensor]:
        with np.load(data / "flickr8k" / "embeddings" / f"{name}.npz") as arrays:
            x, y, image_of = (torch.from_numpy(arrays[key]) for key in ("x", "y", "y_to_x"))
            return x.float(), y.float(), image_of.long()

    x, y, image_of = read("train")
    first = torch.searchsorted(image_of, torch.arange(len(x)))  # the captions of an image are next to each other
    pairs = TensorDataset(x, y[first], torch.arange(len(x)))
    held_x, held_y, held_image_of = read("dev")

    class Towers(LightningModule):
        def __init__(self, setting: Setting) -> None:
            super().__init__()
            self.x, self.y = (
                nn.Sequential(nn.Linear(side.shape[1], 256), nn.ReLU(), nn.Linear(256, 128)) for side in (x, y)
            )
            self.setting = setting

        def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
            return normalize(self.x(images), dim=1), normalize(self.y(captions), dim=1)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            images, captions, index = batch
            features = self(images, captions)
            if hasattr(self.trainer, "nuclr"):
                return self.trainer.nuclr(*features, index).loss
            scores, own = features[0] @ features[1].T / self.setting["temperature"], torch.arange(len(index))
            return cross_entropy(scores, own) + cross_entropy(scores.T, own)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=self.setting["learning_rate"])

    def train(objective: str | None, setting: Setting, seed: int) -> HeldOut:
        seed_everything(seed, verbose=False)
        module, callbacks = Towers(setting), []
        if objective is not None:
            options = OPTIONS.get(objective, {}) | {"num_samples": len(pairs), "temperature": setting["temperature"]}
            callbacks = [NuclrCallback(objective, **options)]
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=6,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(pairs, batch_size=BATCH, shuffle=True, drop_last=True))
        with torch.no_grad():
            features = module.eval()(held_x, held_y)
        return HeldOut(*features, torch.arange(len(held_x)), held_image_of)

    methods = {
        name: lambda setting, seed, objective=objective: train(objective, setting, seed)  # type: ignore[misc]
        for name, objective in {"InfoNCE": None, "SogCLR": "sogclr", "NUCLR": "nuclr-authors"}.items()
    }
    return Study(methods, {"temperature": [0.03, 0.05, 0.1], "learning_rate": [3e-4, 1e-3]})


# -- transformers and open_clip ----------------------------------------------------------------------------------------

GRID = {"temperature": [0.03, 0.07], "learning_rate": [1e-3, 3e-3]}
LENGTH, VOCABULARY, WIDTH, EPOCHS = 24, 4_000, 64, 4


class Photographs(NamedTuple):
    """Features of photographs (n, 1280), tokens of captions (m, LENGTH), and the photograph of each caption."""

    images: Tensor
    tokens: Tensor
    image_of: Tensor


def flickr8k(data: Path) -> tuple[Photographs, Photographs]:
    """Return the training pairs and the held-out pairs."""
    from nuclr.models import train_tokenizer

    def captions(split: str) -> list[str]:
        lines = (data / "flickr8k" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        return [caption for line in lines for caption in json.loads(line)["captions"]]

    tokenizer = train_tokenizer(captions("train"), vocabulary=VOCABULARY - 1)

    def read(split: str) -> Photographs:
        with np.load(data / "flickr8k" / "embeddings" / f"{split}.npz") as arrays:
            images = torch.nn.functional.normalize(torch.from_numpy(arrays["x"]).float(), dim=1)
            image_of = torch.from_numpy(arrays["y_to_x"]).long()
        tokens = torch.zeros(len(image_of), LENGTH, dtype=torch.int64)
        for row, ids in enumerate(tokenizer(captions(split), add_special_tokens=False)["input_ids"]):
            # The towers read the text at its last token, which open_clip finds as the largest number.
            ids = [*ids[: LENGTH - 1], VOCABULARY - 1]
            tokens[row, : len(ids)] = torch.tensor(ids)
        return Photographs(images, tokens, image_of)

    trained = read("train")
    first = torch.searchsorted(trained.image_of, torch.arange(len(trained.images)))
    return trained._replace(tokens=trained.tokens[first], image_of=trained.image_of[first]), read("dev")


def encoded(model: torch.nn.Module, held_out: Photographs, encode: Callable[..., tuple[Tensor, Tensor]]) -> HeldOut:
    """Return the features of all held-out photographs and captions."""
    model.eval()
    with torch.no_grad():
        x, y = encode(held_out.images[held_out.image_of], held_out.tokens)
    first = torch.searchsorted(held_out.image_of, torch.arange(len(held_out.images)))
    x, y = (torch.nn.functional.normalize(side, dim=1) for side in (x[first], y))
    return HeldOut(x, y, torch.arange(len(x)), held_out.image_of)


def transformers(data: Path) -> Study:
    from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments

    from nuclr.integrations.transformers import NuclrTrainer, add_index
    from nuclr.objectives import build

    trained, held_out = flickr8k(data)
    tower = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 4}
    text = tower | {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    text |= {"eos_token_id": VOCABULARY - 1, "bos_token_id": 0, "pad_token_id": 0}
    # A picture of one pixel with 1280 channels.
    vision = tower | {"num_hidden_layers": 1, "num_channels": 1280, "image_size": 1, "patch_size": 1}
    pairs = [
        {"pixel_values": image[:, None, None], "input_ids": tokens}
        for image, tokens in zip(trained.images, trained.tokens, strict=True)
    ]

    def train(name: str | None, setting: Setting, seed: int) -> HeldOut:
        torch.manual_seed(seed)
        scale = -float(np.log(setting["temperature"]))
        config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH, logit_scale_init_value=scale)
        model = CLIPModel(config)
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                output_dir=folder,
                seed=seed,
                num_train_epochs=EPOCHS,
                per_device_train_batch_size=BATCH,
                learning_rate=setting["learning_rate"],
                dataloader_drop_last=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            if name is None:
                Trainer(model, args, collate_with_loss, pairs).train()
            else:
                options = OPTIONS.get(name, {}) | {"temperature": setting["temperature"]}
                objective = build(name, num_samples=len(pairs), **options)
                NuclrTrainer(model, args, train_dataset=add_index(pairs), objective=objective).train()

        def encode(images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            outputs = [
                model(pixel_values=some[:, :, None, None], input_ids=ids)
                for some, ids in zip(images.split(500), tokens.split(500), strict=True)
            ]
            return torch.cat([o.image_embeds for o in outputs]), torch.cat([o.text_embeds for o in outputs])

        return encoded(model, held_out, encode)

    return Study({method: partial(train, name) for method, name in OWN_LOSS.items()}, GRID)


def collate_with_loss(samples: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("pixel_values", "input_ids")
    return {name: torch.stack([sample[name] for sample in samples]) for name in names} | {"return_loss": True}


def open_clip(data: Path) -> Study:
    # torchvision imports without its compiled operators if their schemas exist.
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from open_clip import create_loss
    from open_clip.transformer import TextTransformer
    from open_clip_train.data import DataInfo
    from open_clip_train.params import parse_args
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import train_one_epoch
    from torch.utils.data import DataLoader, TensorDataset

    from nuclr.integrations.open_clip import TrainOneEpoch

    trained, held_out = flickr8k(data)
    pairs = TensorDataset(trained.images, trained.tokens)

    class Towers(torch.nn.Module):
        def __init__(self, temperature: float) -> None:
            super().__init__()
            self.image = torch.nn.Linear(1280, WIDTH)
            self.text = TextTransformer(LENGTH, VOCABULARY, WIDTH, heads=4, layers=2, output_dim=WIDTH)
            self.logit_scale = torch.nn.Parameter(torch.tensor(-float(np.log(temperature))))

        def forward(self, images: Tensor, tokens: Tensor) -> dict[str, Tensor]:
            x, y = (torch.nn.functional.normalize(side, dim=1) for side in (self.image(images), self.text(tokens)))
            return {"image_features": x, "text_features": y, "logit_scale": self.logit_scale.exp()}

    def train(name: str | None, setting: Setting, seed: int) -> HeldOut:
        torch.manual_seed(seed)
        model = Towers(setting["temperature"])
        args = parse_args(["--device", "cpu", "--precision", "fp32", "--logs", "none", "--batch-size", str(BATCH)])
        args.distributed, args.rank, args.local_rank, args.world_size, args.distill = False, 0, 0, 1, False
        args.wandb, args.epochs, args.log_every_n_steps = False, EPOCHS, 10**9
        loader = DataLoader(pairs, BATCH, shuffle=True, drop_last=True)
        loader.num_samples, loader.num_batches = len(pairs), len(loader)
        optimizer = torch.optim.AdamW(model.parameters(), lr=setting["learning_rate"], weight_decay=0.0)
        scheduler = cosine_lr(optimizer, setting["learning_rate"], 0, EPOCHS * len(loader))
        one_epoch = (
            train_one_epoch
            if name is None
            else TrainOneEpoch(name, **(OPTIONS.get(name, {}) | {"temperature": setting["temperature"]}))
        )
        for epoch in range(EPOCHS):
            loaders = {"train": DataInfo(loader)}
            one_epoch(model, loaders, create_loss(args), epoch, optimizer, None, scheduler, None, args)

        def encode(images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            outputs = model(images, tokens)
            return outputs["image_features"], outputs["text_features"]

        return encoded(model, held_out, encode)

    return Study({method: partial(train, name) for method, name in OWN_LOSS.items()}, GRID)


OWN_LOSS: dict[str, str | None] = {"the trainer's CLIP loss": None, "SogCLR": "sogclr", "NUCLR": "nuclr-authors"}

STUDIES: dict[str, Callable[[Path], Study]] = {
    "sentence-transformers": sentence_transformers,
    "transformers": transformers,
    "lightning": lightning,
    "open_clip": open_clip,
}

# -- measuring ---------------------------------------------------------------------------------------------------------


def hits(held_out: HeldOut, images: Tensor) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return, per direction, the hits and the number of queries of each of these images."""
    rows_x, rows_y = (torch.isin(of, images).nonzero().squeeze(1) for of in (held_out.x_image, held_out.y_image))
    x, y, of_x, of_y = held_out.x[rows_x], held_out.y[rows_y], held_out.x_image[rows_x], held_out.y_image[rows_y]
    links = (of_x[:, None] == of_y).nonzero()
    measured = {}
    for name, queries, gallery, pairs, owner in (
        ("x_to_y", x, y, links, of_x),
        ("y_to_x", y, x, links.flip(1), of_y),
    ):
        ranks = query_ranks(queries, gallery, pairs)
        cluster = torch.searchsorted(images, owner[ranks.query]).numpy()
        total = np.bincount(cluster, ranks.hits(1), len(images))
        measured[name] = total, np.bincount(cluster, minlength=len(images)).astype(float)
    return measured


def recall(measured: dict[str, tuple[np.ndarray, np.ndarray]]) -> float:
    return 100 * float(np.mean([total.sum() / count.sum() for total, count in measured.values()]))


def measure(name: str, study: Study, seeds: int) -> dict[str, Any]:
    """Choose the settings of every method on one half, and return its row of the table from the other half."""
    settings = [dict(zip(study.grid, values, strict=True)) for values in itertools.product(*study.grid.values())]
    folds, rows = {}, {}
    for method, train in study.methods.items():
        started, trained = time.process_time(), []
        for setting in settings:
            outcome = train(setting, 0)
            choosing, reporting = cut_halves(outcome.x_image.unique())
            trained.append((recall(hits(outcome, choosing)), hits(outcome, reporting)))
            print(f"{name}: {method} {setting}: {trained[-1][0]:.2f}", file=sys.stderr, flush=True)
        best = max(range(len(settings)), key=lambda number: trained[number][0])
        measured = [trained[best][1]]
        measured += [hits(train(settings[best], seed), reporting) for seed in range(1, seeds)]
        directions = measured[0]
        folds[method] = Fold(
            "reporting",
            {key: np.stack([one[key][0] for one in measured]) for key in directions},
            {key: directions[key][1] for key in directions},
        )
        values = 100 * per_seed([folds[method]])
        minutes = (time.process_time() - started) / 60
        rows[method] = {"setting": settings[best], "recall@1": values.tolist(), "cpu_minutes": round(minutes, 2)}
    bootstrap, baseline = Bootstrap(seeds), next(iter(study.methods))
    for method, row in rows.items():
        gap = bootstrap.difference([folds[method]], [folds[baseline]])
        row["minus_baseline"] = {"difference": 100 * gap.difference, "low": 100 * gap.low, "high": 100 * gap.high}
    return rows


def show(name: str, rows: dict[str, Any]) -> None:
    baseline = next(iter(rows))
    print(f"\n{name}: held-out recall@1, batch {BATCH}")
    print(f"{'':32}{'mean':>7}{'seeds':>24}{'minus ' + baseline:>38}  setting")
    for method, row in rows.items():
        values = row["recall@1"]
        each = " ".join(f"{value:.2f}" for value in values)
        difference = "{difference:+.2f} [{low:+.2f}, {high:+.2f}]".format(**row["minus_baseline"])
        print(f"{method:32}{np.mean(values):>7.2f}{each:>24}{difference:>38}  {row['setting']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="one trainer: sentence-transformers, transformers or open_clip")
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / "trainers.json"
    path.parent.mkdir(exist_ok=True)
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, make in STUDIES.items():
        if options.only in ("", name):
            content[name] = measure(name, make(options.data), options.seeds)
            show(name, content[name])
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
