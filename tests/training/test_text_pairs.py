"""Text and text: training from every format, groups of right answers, shared encoders, resuming, two processes."""

import csv
import json
import re

import numpy as np
import pytest
import torch
import yaml

from nuclr.errors import UserError
from nuclr.models import DualEncoder, train_tokenizer
from nuclr.runs import components, config
from nuclr.runs.run import Run
from nuclr.training import step
from nuclr.training.loop import train
from tests.data import make
from tests.data.formats.test_beir import write as write_beir
from tests.training import runs

FORBIDDEN = re.compile(r"image|caption|picture|photo", re.IGNORECASE)


def load(folder, **changes):
    return config.load(folder / "empty.yaml", runs.text_settings(folder, **changes))


def test_a_run_on_text_pairs(tmp_path):
    settings = load(tmp_path, **{"schedule.epochs": 8})
    results = train(settings, tmp_path / "run")
    assert results.sides == ("question", "answer")
    assert results.val["question_to_answer_R@1"] > 3 * results.val["question_to_answer_chance@1"]
    assert results.val["mean_R@1"] == pytest.approx(
        (results.val["question_to_answer_R@1"] + results.val["answer_to_question_R@1"]) / 2
    )
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    side = {"key": "question", "modality": "text", "name": "question", "views": 1, "text": "plain"}
    assert written["data"]["x"] == side
    assert written["model"]["shared"] is True and written["model"]["y"] == written["model"]["x"]
    model = DualEncoder.from_pretrained(tmp_path / "run" / "model")
    assert model.shared and sorted(path.name for path in (tmp_path / "run" / "model").iterdir() if path.is_dir()) == [
        "x"
    ]
    run = Run.open(tmp_path / "run")
    assert run.sides == ("question", "answer")
    features = run.features(run.val)
    assert features.sides == ("question", "answer")


def test_without_a_config_and_without_image_words(tmp_path, nuclr, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count, seed in (("pairs.csv", 140, 0), ("held_out.csv", 20, 1)):
        rows = runs.text_rows(count, seed)
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    short = ["schedule.epochs=1", "report=false", "threads=1"]
    status, out, err = nuclr("train", "data.train=pairs.csv", "data.val=held_out.csv", *short)
    assert status == 0, err
    assert "recall, question to answer" in out and "recall, answer to question" in out
    assert "140 pairs" in err
    assert "side y         answer: texts" in err and "one encoder for both sides" in err
    for text in (out, err, (tmp_path / "runs" / "run" / "results.json").read_text()):
        assert not FORBIDDEN.search(text), FORBIDDEN.search(text)
    assert not FORBIDDEN.search((tmp_path / "runs" / "run" / "metrics.jsonl").read_text())


def test_all_right_answers_of_a_row_count(tmp_path):
    settings = load(tmp_path, several=3)
    source = components.open_train(settings.data)
    assert len(source.pairs) == 150
    train(settings, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    features = run.features(run.val)
    rows = runs.text_rows(15, seed=1, several=3)
    texts_x = [run.val.pairs.item("x", int(number)) for number in features.x_number]
    texts_y = [run.val.pairs.item("y", int(number)) for number in features.y_number]
    expected = {(q, a) for row in rows for q in row["question"] for a in row["answer"]}
    assert {(texts_x[x], texts_y[y]) for x, y in features.links.tolist()} == expected
    assert len(features.links) == len(expected)
    for row in rows:  # questions of one row are of one group
        groups = {int(features.x_group[texts_x.index(question)]) for question in row["question"]}
        assert len(groups) == 1
    half = features.of_x(torch.arange(7))
    assert (half.links[:, 0] < 7).all() and len(half.y) == len(half.links[:, 1].unique())


@pytest.mark.parametrize("mask", [True, False])
def test_the_first_loss_leaves_out_right_answers_and_copies(tmp_path, mask):
    """One step of CLIP against loops: pairs that share a question, an answer or a row are not negatives."""
    rows = [(["a 1", "a 2"], ["b 1", "b 2"]), ("c", "d"), ("c", "e"), ("f", "d"), ("g", "h")]
    lines = [json.dumps({"question": x, "answer": y}) for x, y in rows]
    changes = {"data.batch_size": 6, "schedule.epochs": 1, "log.every": 1, "objective.name": "clip", "data.val": ""}
    changes |= {"objective.temperature": 0.2, "objective.zeta_lr": "", "data.mask": str(mask).lower()}
    settings = load(tmp_path, **changes)
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    train(settings, tmp_path / "run")
    loss = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["train/loss"]

    model = components.make_model(settings.model, components.open_train(settings.data), settings.seed).eval()
    questions, answers, row = ["a 1", "a 2", "c", "c", "f", "g"], ["b 1", "b 2", "d", "e", "d", "h"], [0, 0, 1, 2, 3, 4]
    exponents = (model.encode_x(questions) @ model.encode_y(answers).T).double() / 0.2
    expected = 0.0
    for s in (exponents, exponents.T):
        for i in range(6):
            shared = [any(ids[i] == ids[j] for ids in (questions, answers, row)) for j in range(6)]
            others = [j for j in range(6) if j == i or not (mask and shared[j])]
            expected += float(torch.logsumexp(s[i, others], 0) - s[i, i]) / 12
    assert loss == pytest.approx(expected, abs=1e-5)


def write_formats(folder):
    """Write the same questions and answers in all formats; return their paths."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = runs.text_rows(60)
    runs.write_texts(folder / "pairs.jsonl", 60)
    (folder / "pairs.json").write_text(json.dumps(rows))
    for name, delimiter in (("pairs.csv", ","), ("pairs.tsv", "\t")):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "pairs.parquet", row_group_size=7)
    datasets.Dataset.from_list(rows).save_to_disk(folder / "dataset", num_shards=2)
    members = {f"{i:03d}.{key}.txt": text.encode() for i, row in enumerate(rows) for key, text in row.items()}
    make.write_tar(folder / "members.tar", members)
    entries = {f"{i:03d}.json": json.dumps(row).encode() for i, row in enumerate(rows)}
    make.write_tar(folder / "entries.tar", entries)
    write_beir(
        folder / "beir",
        [(f"q{i}", row["question"]) for i, row in enumerate(rows)],
        [(f"d{i}", "", row["answer"]) for i, row in enumerate(rows)],
        train=[(f"q{i}", f"d{i}", 1) for i in range(60)],
    )
    lists = ["pairs.jsonl", "pairs.json", "pairs.csv", "pairs.tsv", "pairs.parquet"]
    return [*lists, "dataset", "members.tar", "entries.tar", "beir"]


@pytest.mark.slow
def test_all_formats_give_the_same_numbers_batches_and_losses(tmp_path, monkeypatch):
    """Each format is trained on in whole: the loss of every step is the same to the last bit, from the first one on."""
    batches = []
    before = step.apply_objective

    def record(objective, x, y, batch, mask):
        batches.append((batch.numbers.tolist(), batch.x_id.tolist(), batch.y_id.tolist(), batch.x, batch.y))
        return before(objective, x, y, batch, mask)

    monkeypatch.setattr("nuclr.training.loop.apply_objective", record)
    seen = {}
    for name in write_formats(tmp_path):
        changes = {"data.train": name, "data.val": "", "schedule.epochs": 1, "log.every": 1}
        if name == "entries.tar":
            changes |= {"data.x.key": "question", "data.y.key": "answer"}
        if name == "beir":
            changes |= {"data.split": "train", "data.x.name": "question", "data.y.name": "answer"}
        batches.clear()
        results = train(load(tmp_path, **changes), tmp_path / f"run-{name}")
        lines = (tmp_path / f"run-{name}" / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["train/loss"] for line in lines if "train/loss" in line]
        seen[name] = (losses, list(batches), results.sides, results.pairs)
    losses, first_batches, sides, pairs = seen["pairs.jsonl"]
    assert len(losses) == len(first_batches) == 3 and (sides, pairs) == (("question", "answer"), 60)
    for name in seen:
        assert seen[name] == seen["pairs.jsonl"], name


def test_encoders_can_be_shared_or_not(tmp_path):
    same = components.make_model(load(tmp_path).model, components.open_train(load(tmp_path).data), 0)
    assert same.shared
    for changes in (
        {"model.shared": "false"},
        {"model.y.encoder": "tiny_text"},
        {"model.shared": "false", "model.y.encoder": "tiny_text", "model.y.pooling": "mean"},
    ):
        settings = load(tmp_path, **changes)
        model = components.make_model(settings.model, components.open_train(settings.data), 0)
        assert not model.shared
    with pytest.raises(UserError, match=r"model\.y\.encoder.*model\.shared"):
        settings = load(tmp_path, **{"model.shared": "true", "model.y.encoder": "tiny_text"})
        components.make_model(settings.model, components.open_train(settings.data), 0)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with a BERT of random weights and its tokenizer, as transformers writes it."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=300, max_position_embeddings=24, **sizes)).save_pretrained(folder)
    train_tokenizer((text for row in runs.text_rows(50) for text in row.values()), 300).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("shared", [True, False])
def test_transformers_by_folder(tmp_path, bert, shared, pooling, nuclr):
    """Train both sides, save and reopen: embed gives what transformers gives for the weights in the model's folder."""
    changes = {"model.x.encoder": bert, "model.x.pooling": pooling, "schedule.epochs": 1}
    if not shared:
        changes |= {"model.y.encoder": bert, "model.y.pooling": pooling, "model.shared": "false"}
    train(load(tmp_path, **changes), tmp_path / "run")
    path = tmp_path / "features.npz"
    status, _, err = nuclr("embed", tmp_path / "run", "--pairs", tmp_path / "val.jsonl", "--out", path)
    assert status == 0, err

    rows = runs.text_rows(15, seed=1, several=2)
    texts = {"x": [q for row in rows for q in row["question"]], "y": [a for row in rows for a in row["answer"]]}
    model = DualEncoder.from_pretrained(tmp_path / "run" / "model")
    assert model.shared == shared and model.x.tower.pooling == model.y.tower.pooling == pooling
    with np.load(path) as features:
        for side, encoder in (("x", model.x), ("y", model.y)):
            folder = tmp_path / "run" / "model" / ("x" if shared else side)
            hidden, mask = run_transformers(folder, texts[side])
            pooled = hidden[:, 0] if pooling == "first" else (hidden * mask).sum(1) / mask.sum(1)
            expected = torch.nn.functional.normalize(encoder.head(pooled).detach(), dim=1)
            unique = [texts[side].index(text) for text in dict.fromkeys(texts[side])]
            rows_of_side = unique if side == "x" else slice(None)  # an x with several y is written once
            np.testing.assert_allclose(features[side], expected[rows_of_side], atol=1e-5)
    weights = (run_transformers(folder, ["is it red?"])[0] for folder in (bert, tmp_path / "run" / "model" / "x"))
    assert not torch.allclose(*weights, atol=1e-3), "the encoder was not trained"


def run_transformers(folder, texts):
    """Return the last hidden states and the mask (b, l, 1) of a saved encoder, without nuclr."""
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        )
    return hidden.last_hidden_state, tokens["attention_mask"][:, :, None]


def test_tower_features(tmp_path):
    settings = load(tmp_path, **{"evaluate.head": "false", "schedule.epochs": 1})
    train(settings, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    features = run.features(run.val)
    assert features.x.shape[1] == run.model.x.head.in_width != 8
    np.testing.assert_allclose(features.x.norm(dim=1), 1, atol=1e-5)
    with pytest.raises(UserError, match=r"evaluate\.head"):
        both = {"data.train": "train.npz", "data.val": "val.npz", "evaluate.head": "false"}
        train(runs.load(tmp_path, **both), tmp_path / "vectors")
