"""`nuclr train --dry-run`."""

import dataclasses

import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from nuclr.runs import config
from nuclr.training import dry_run
from nuclr.training.data_path import DataRate
from tests.training import runs


def test_dry_run_writes_nothing(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = runs.vector_settings(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    status, out, err = nuclr("train", "empty.yaml", *settings, "--dry-run")
    assert status == 0, err
    assert "120 pairs (0 bad)" in out and "28 steps" in out and "memory: model" in out and "min in total" in out
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_dry_run_measures_training_mode(nuclr, tmp_path, monkeypatch):
    """Dropout takes memory and time; with it off, the estimate would be that of an evaluation."""
    folder = save_bert(tmp_path / "bert", dropout=0.5)
    modes = []
    forward = torch.nn.Dropout.forward
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: modes.append(self.training) or forward(self, x))
    encoders = {"model.x.encoder": folder, "model.x.pooling": "mean"}
    status, _, err = nuclr("train", tmp_path / "empty.yaml", *runs.text_settings(tmp_path, **encoders), "--dry-run")
    assert status == 0, err
    steps = modes[modes.index(True) :] if True in modes else []  # loading probes the encoder in eval mode
    assert steps and all(steps)


def test_dry_run_reports_the_rates_of_the_data_path_and_of_the_step(nuclr, tmp_path):
    settings = runs.photograph_settings(tmp_path, **{"data.workers": 3})
    status, out, err = nuclr("train", tmp_path / "empty.yaml", *settings, "--dry-run", "--rate", "1e9")
    assert status == 0, err
    path, step, rate = out.splitlines()[-3:]
    assert path.startswith("data path: ") and "samples/s with data.workers=3 on" in path and "per core" in path
    assert step.startswith("training step: ") and "samples/s on cpu" in step and "is the bottleneck" in step
    assert rate.startswith("reading 1,000,000,000 samples/s (--rate) needs ") and "cores and data.workers=" in rate
    assert err.startswith("nuclr: the data path is the bottleneck: ") and "data.workers=3" in err
    assert len(err.splitlines()) == 2


def test_dry_run_warns_of_held_out_pairs_that_are_training_pairs(nuclr, tmp_path):
    settings = runs.text_settings(tmp_path)
    path = next(text.partition("=")[2] for text in settings if text.startswith("data.train="))
    status, _, err = nuclr("train", tmp_path / "empty.yaml", *settings, f"data.val={path}", "--dry-run")
    assert status == 0 and err.startswith("nuclr: data.val holds the same pairs as data.train, so its recall"), err


def test_dry_run_without_images_reads_in_the_main_thread(nuclr, tmp_path):
    settings = runs.vector_settings(tmp_path)
    status, out, err = nuclr("train", tmp_path / "empty.yaml", *settings, "--dry-run", "--rate", "1")
    assert status == 0 and err == ""
    assert "in the main thread; there is nothing to decode" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "100"], "--rate is an option of --dry-run"),
        (["--dry-run", "--rate", "0"], "--rate 0: needs a number"),
        (["--dry-run", "--rate", "nan"], "--rate nan: needs a number"),
    ],
)
def test_a_wrong_rate_is_refused(nuclr, tmp_path, options, message):
    status, _, err = nuclr("train", "data.train=builtin:n=20", f"out={tmp_path / 'run'}", *options)
    assert status == 2 and message in err and len(err.splitlines()) == 1


def test_images_that_stay_in_memory_are_measured_too(tmp_path, monkeypatch):
    """The second reading finds decoded images in memory, as all epochs after the first do."""
    rates = iter([DataRate(32, 4.0, 4.0, 2, 4), DataRate(32, 1.0, 1.0, 2, 4)])
    sizes = []

    def measure(batches, workers, processes):
        sizes.append(sum(map(len, batches)))
        return next(rates)

    monkeypatch.setattr(dry_run, "measure", measure)
    settings = config.load(tmp_path / "empty.yaml", runs.photograph_settings(tmp_path, **{"schedule.epochs": 4}))
    data = dry_run.dry_run(settings)["data_rate"]
    assert data.seconds == pytest.approx((4.0 + 3 * 1.0) / 4) and sizes == [48, 48]  # three batches of 16
    rates = iter([DataRate(32, 4.0, 4.0, 2, 4)])
    without = dataclasses.replace(settings, data=dataclasses.replace(settings.data, memory=0))
    assert dry_run.dry_run(without)["data_rate"].seconds == 4.0


def save_bert(folder, dropout):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(special)})
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=8, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
