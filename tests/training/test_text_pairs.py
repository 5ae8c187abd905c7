"""Text and text: training, groups of right answers, shared encoders."""

import json

import numpy as np
import pytest
import torch
import yaml

from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.runs import components, config
from nuclr.runs.run import Run
from nuclr.training.loop import train
from tests.training import runs


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
