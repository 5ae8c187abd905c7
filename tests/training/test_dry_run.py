"""`nuclr train --dry-run`."""

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

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


def save_bert(folder, dropout):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(special)})
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=8, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
