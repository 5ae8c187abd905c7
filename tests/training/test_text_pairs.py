"""Text and text: training from every format, groups of right answers, shared encoders, resuming, two processes."""

import csv
import json
import re
import signal

import numpy as np
import pytest
import torch
import yaml

from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.objectives import ObjectiveOutput
from nuclr.runs import components, config
from nuclr.runs.run import Run
from nuclr.training import step
from nuclr.training.loop import train
from tests.training import runs
from tests.training.test_resume import KilledError, killed_at

FORBIDDEN = re.compile(r"image|caption|picture|photo", re.IGNORECASE)


def load(folder, **changes):
    return config.load(folder / "empty.yaml", runs.text_settings(folder, **changes))


def test_a_run_on_text_pairs(tmp_path):
    settings = load(tmp_path, **{"schedule.epochs": 8})
    results = train(settings, tmp_path / "run")
    assert results["sides"] == ["question", "answer"]
    assert results["val"]["question_to_answer_R@1"] > 3 * results["val"]["question_to_answer_chance@1"]
    assert results["val"]["mean_R@1"] == pytest.approx(
        (results["val"]["question_to_answer_R@1"] + results["val"]["answer_to_question_R@1"]) / 2
    )
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["data"]["x"] == {"key": "question", "modality": "text", "name": "question"}
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
    assert "140 pairs, question to answer" in err
    assert "side y         answer: texts, the encoder of side x" in err
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
    texts_x = [run.val.pairs.x(int(number)) for number in features.x_number]
    texts_y = [run.val.pairs.y(int(number)) for number in features.y_number]
    expected = {(q, a) for row in rows for q in row["question"] for a in row["answer"]}
    assert {(texts_x[x], texts_y[y]) for x, y in features.links.tolist()} == expected
    assert len(features.links) == len(expected)
    for row in rows:  # questions of one row are of one group
        groups = {int(features.x_group[texts_x.index(question)]) for question in row["question"]}
        assert len(groups) == 1
    half = features.of_x(torch.arange(7))
    assert (half.links[:, 0] < 7).all() and len(half.y) == len(half.links[:, 1].unique())


def test_pairs_of_one_row_are_not_negatives(tmp_path, monkeypatch):
    settings = load(tmp_path, several=3)
    given = []
    before = step.apply_objective

    def record(objective, x, y, batch, mask):
        given.append(batch)
        return before(objective, x, y, batch, mask)

    monkeypatch.setattr("nuclr.training.loop.apply_objective", record)
    train(settings, tmp_path / "run")
    for batch in given:
        assert torch.equal(batch.group, batch.numbers // 3)


@pytest.mark.parametrize("mask", [True, False])
def test_the_mask_covers_x_y_and_group(mask):
    ids = {}

    class Recorder:
        def __call__(self, *_, **given):
            ids.update(given)
            return ObjectiveOutput(torch.tensor(0.0), {})

    from nuclr.data import Batch

    one, two, group = torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]), torch.tensor([4, 5, 4])
    batch = Batch(torch.arange(3), one, two, ["a", "b", "c"], ["d", "d", "e"], group)
    step.apply_objective(Recorder(), torch.eye(3), torch.eye(3), batch, mask)
    if not mask:
        assert ids == {}
        return
    assert ids["x_id"].tolist() == [[0, 4], [1, 5], [2, 4]] and ids["y_id"].tolist() == [0, 0, 1]


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
    return ["pairs.jsonl", "pairs.json", "pairs.csv", "pairs.tsv", "pairs.parquet", "dataset"]


@pytest.mark.slow
def test_all_formats_give_the_same_batches_and_losses(tmp_path):
    losses, ids = {}, {}
    for name in write_formats(tmp_path):
        changes = {"data.train": name, "data.val": "", "schedule.epochs": 1, "log.every": 1}
        settings = load(tmp_path, **changes)
        train(settings, tmp_path / f"run-{name}")
        lines = (tmp_path / f"run-{name}" / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line).get("train/loss") for line in lines]
        pairs = components.open_train(settings.data).pairs
        ids[name] = (pairs.x_id.tolist(), pairs.y_id.tolist(), pairs.x_name, pairs.y_name)
    assert len(losses["pairs.jsonl"]) >= 3
    for name in losses:
        assert losses[name] == losses["pairs.jsonl"], name
        assert ids[name] == ids["pairs.jsonl"], name


def test_resuming(tmp_path, monkeypatch):
    settings = load(tmp_path, **{"schedule.zeta_refresh": 1, "model.x.encoder": "tiny_text"})
    train(settings, tmp_path / "whole")
    for at in (1, 5, 9):
        with monkeypatch.context() as patch:
            killed_at(patch, at)
            with pytest.raises(KilledError):
                train(settings, tmp_path / "stopped", resume=True)
    train(settings, tmp_path / "stopped", resume=True)
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("make", [runs.text_settings, runs.view_settings])
def test_sigkill_and_resume(tmp_path, make):
    arguments = [tmp_path / "empty.yaml", *make(tmp_path, **{"schedule.epochs": 6, "checkpoint_every": 3}), "--resume"]
    [(status, _, err)] = runs.finish(runs.start([*arguments, f"out={tmp_path / 'whole'}"]))
    assert status == 0, err
    for lines in (2, 5, 9):
        [process] = runs.start([*arguments, f"out={tmp_path / 'run'}"])
        try:
            runs.wait_for(tmp_path / "run" / "timing.jsonl", lines, process)
        finally:
            process.send_signal(signal.SIGKILL)
            runs.finish([process])
    assert not (tmp_path / "run" / "results.json").exists()
    [(status, _, err)] = runs.finish(runs.start([tmp_path / "run", "--resume"]))
    assert status == 0, err
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["shared", "two encoders", "views", "four views"])
def test_two_processes_give_the_results_of_one(tmp_path, case):
    changes = {"optimizer.eps": 1e-3}
    if "views" in case:
        # With a small step, rounding errors of the two runs stay far below the tolerance.
        changes |= {"data.views": 2 if case == "views" else 4, "optimizer.lr": 1e-4}
        settings = runs.view_settings(tmp_path, **changes)
    else:
        settings = runs.text_settings(tmp_path, **changes, **{"model.shared": str(case == "shared").lower()})
    for name, world in (("one", 1), ("two", 2)):
        outcomes = runs.finish(runs.start([tmp_path / "empty.yaml", *settings, f"out={tmp_path / name}"], world))
        assert all(status == 0 for status, _, _ in outcomes), outcomes
    runs.assert_close_outcome(tmp_path / "one", tmp_path / "two", queries=30)


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
    with pytest.raises(UserError, match=r"evaluate\.head is false, but the towers have .* features"):
        both = {"data.train": "train.npz", "data.val": "val.npz", "evaluate.head": "false"}
        train(runs.load(tmp_path, **both), tmp_path / "vectors")
