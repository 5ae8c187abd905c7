"""Pairs of texts from training to comparison: nothing that users read calls the items images or captions."""

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.data.make import write_lines
from tests.studies.tiny import inline  # noqa: F401

FOREIGN = re.compile("image|caption", re.IGNORECASE)
WORDS = {"dog": "Hund", "cat": "Katze", "man": "Mann", "bus": "Bus", "tree": "Baum", "red": "rot", "old": "alt"}


class VisibleText(HTMLParser):
    """Collect what a reader of a page meets: its text, attributes that are shown or read aloud, and its data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self._hidden = tag == "style" or (tag == "script" and "json" not in (named.get("type") or ""))
        self.parts += [value or "" for name, value in attrs if name in ("alt", "title", "aria-label", "placeholder")]

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.parts.append(data)


def assert_free(*texts: str) -> None:
    for text in texts:
        assert not FOREIGN.search(text), [line for line in text.splitlines() if FOREIGN.search(line)]


def visible(page: Path) -> str:
    return "\n".join(VisibleText(page.read_text(encoding="utf-8")).parts)


def write_pairs(path: Path, rows: int, seed: int) -> None:
    """Write lines with three en and three de texts, which all belong together."""
    rng = random.Random(seed)
    lines = []
    for _ in range(rows):
        words = rng.sample(sorted(WORDS), 3)
        en = [" ".join(rng.sample(words, 3)) + f" {rng.randrange(1000)}" for _ in range(3)]
        de = [" ".join(WORDS[word] for word in rng.sample(words, 3)) + f" {rng.randrange(1000)}" for _ in range(3)]
        lines.append({"en": en, "de": de})
    write_lines(path, *lines)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_pairs(folder / "train.jsonl", 40, seed=0)
    write_pairs(folder / "val.jsonl", 12, seed=1)
    path = folder / "pairs.yaml"
    path.write_text(
        f"name: pairs\ndata: {{root: {folder}, train: train.jsonl, val: val.jsonl, batch_size: 16}}\n"
        "model: {x: {encoder: bag_of_words}, y: {encoder: bag_of_words}, shared: false, width: 8}\n"
        "objective: {zeta_lr: 0.01}\nschedule: {epochs: 2}\nlog: {every: 5}\nthreads: 1\n"
    )
    return path


def test_a_run_and_what_is_made_of_it(nuclr, config, tmp_path):
    run = tmp_path / "run"
    trained = nuclr("train", config, f"out={run}")
    assert trained.status == 0, trained.err
    assert "recall, en to de" in trained.out
    page = visible(run / "report.html")
    assert "en to de" in page and "de to en" in page
    assert_free(trained.out, trained.err, page, (run / "config.yaml").read_text(), (run / "results.json").read_text())

    metrics = tmp_path / "metrics.json"
    evaluated = nuclr("evaluate", run, "--correct", "bank=train", "--out", metrics)
    assert evaluated.status == 0, evaluated.err
    assert "recall@1, en to de" in evaluated.out
    assert_free(evaluated.out, evaluated.err, metrics.read_text())

    solved = nuclr("popularity", run)
    assert solved.status == 0, solved.err
    table = (run / "popularity/popularity.csv").read_text(encoding="utf-8")
    assert_free(solved.out, solved.err, table, visible(run / "popularity/report.html"))

    for command in (("report", run), ("embed", run, "--out", tmp_path / "embedded.npz")):
        done = nuclr(*command)
        assert done.status == 0, done.err
        assert_free(done.out, done.err)
    assert_free(visible(run / "report.html"))


@pytest.mark.usefixtures("inline")
def test_a_comparison(nuclr, config, tmp_path):
    out = tmp_path / "compare"
    options = ["--halves", "--temperatures", "0.05", "--tune", "lr_factor=1", "--out", out]
    compared = nuclr("compare", config, "methods=clip,sogclr", "seeds=1", "schedule.epochs=1", *options)
    assert compared.status == 0, compared.err
    assert "en→de recall@1" in compared.out and "de→en recall@1" in compared.out
    page = visible(out / "report.html")
    assert "en→de recall@1" in page
    assert_free(compared.out, compared.err, page, (out / "compare.md").read_text())
    content = json.loads((out / "compare.json").read_text())
    assert "halves/en_to_de_R@1" in content["blocks"][0]["rows"][0]["values"]
    assert_free(json.dumps(content))


def test_too_few_groups_for_halves(nuclr, config, tmp_path):
    write_pairs(tmp_path / "few.jsonl", 3, seed=2)
    refused = nuclr("compare", config, f"data.val={tmp_path / 'few.jsonl'}", "--halves", "--out", tmp_path / "out")
    assert (refused.status, refused.out) == (2, "")
    assert "--halves" in refused.err and "data.val" in refused.err
    assert_free(refused.err)
