"""Pairs of texts from training to comparison: nothing that users read calls the items images or captions."""

import random
import re

import pytest

from tests.data.make import write_lines
from tests.studies.tiny import inline  # noqa: F401

FOREIGN = re.compile("image|caption", re.IGNORECASE)
MARKUP = re.compile(r"<style.*?</style>|<script.*?</script>|<[^>]*>", re.DOTALL)
WORDS = {"dog": "Hund", "cat": "Katze", "man": "Mann", "bus": "Bus", "tree": "Baum", "red": "rot", "old": "alt"}


def write_pairs(path, rows, seed):
    """Write lines with three en and three de texts, which all belong together."""
    rng = random.Random(seed)
    lines = []
    for _ in range(rows):
        words = rng.sample(sorted(WORDS), 3)
        en = [" ".join(rng.sample(words, 3)) + f" {rng.randrange(1000)}" for _ in range(3)]
        de = [" ".join(WORDS[word] for word in rng.sample(words, 3)) + f" {rng.randrange(1000)}" for _ in range(3)]
        lines.append({"en": en, "de": de})
    write_lines(path, *lines)


@pytest.fixture
def config(tmp_path):
    write_pairs(tmp_path / "train.jsonl", 40, seed=0)
    write_pairs(tmp_path / "val.jsonl", 12, seed=1)
    path = tmp_path / "pairs.yaml"
    path.write_text(
        f"name: pairs\ndata: {{root: {tmp_path}, train: train.jsonl, val: val.jsonl, batch_size: 16}}\n"
        "model: {x: {encoder: bag_of_words}, y: {encoder: bag_of_words}, shared: false, width: 8}\n"
        "objective: {zeta_lr: 0.01}\nschedule: {epochs: 2}\nlog: {every: 5}\nthreads: 1\n"
    )
    return path


@pytest.mark.usefixtures("inline")
def test_no_command_mentions_other_modalities(nuclr, config, tmp_path):
    run, compared, metrics = tmp_path / "run", tmp_path / "compare", tmp_path / "metrics.json"
    options = ["--halves", "--temperatures", "0.05", "--tune", "lr_factor=1", "--out", compared]
    written = [run / "config.yaml", run / "results.json", run / "report.html"]
    for arguments, files, words in (
        (["train", config, f"out={run}"], written, "recall, en to de"),
        (["evaluate", run, "--correct", "bank=train", "--out", metrics], [metrics], "recall@1, en to de"),
        (["popularity", run], [run / "popularity" / name for name in ("popularity.csv", "report.html")], "en"),
        (["embed", run, "--out", tmp_path / "embedded.npz"], [], "x"),
        (
            ["compare", config, "methods=clip,sogclr", "seeds=1", "schedule.epochs=1", *options],
            [compared / name for name in ("compare.md", "compare.json", "report.html")],
            "en→de recall@1",
        ),
    ):
        done = nuclr(*arguments)
        assert done.status == 0, done.err
        assert words in done.out
        for text in (done.out, done.err, *(file.read_text(encoding="utf-8") for file in files)):
            shown = MARKUP.sub("", text)
            assert not FOREIGN.search(shown), [line for line in shown.splitlines() if FOREIGN.search(line)]
    assert "en to de" in MARKUP.sub("", (run / "report.html").read_text())


def test_too_few_groups_for_halves(nuclr, config, tmp_path):
    write_pairs(tmp_path / "few.jsonl", 3, seed=2)
    refused = nuclr("compare", config, f"data.val={tmp_path / 'few.jsonl'}", "--halves", "--out", tmp_path / "out")
    assert (refused.status, refused.out) == (2, "")
    assert "--halves" in refused.err and "data.val" in refused.err
