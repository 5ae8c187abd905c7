"""What is shown: examples, near-duplicates, the gallery, confusion, logs."""

import numpy as np
import pytest
import torch

from nuclr.report import gallery
from nuclr.report.confusion import Confusion, heat_map, tally
from nuclr.report.duplicates import duplicates
from nuclr.report.examples import example, examples
from nuclr.report.logs import curve, read_lines


def test_examples_agree_with_sorting():
    torch.manual_seed(0)
    queries, gallery_ = torch.randn(12, 4).double(), torch.randn(30, 4).double()
    links = torch.stack([torch.arange(24) % 12, torch.randperm(30)[:24]], dim=1)
    margins = {}
    for row in range(12):
        scores = gallery_ @ queries[row]
        own = set(links[links[:, 0] == row, 1].tolist())
        order = scores.argsort(descending=True).tolist()
        found = example(queries, gallery_, links, row)
        assert [a.row for a in found.answers] == order[:5]
        assert [a.right for a in found.answers] == [k in own for k in order[:5]]
        rank = next(place for place, k in enumerate(order, 1) if k in own)
        assert (found.rank, found.right) == (rank, order[rank - 1])
        margins[row] = float(max(scores[k] for k in order if k not in own) - scores[found.right])
    worst = [e.query for e in examples(queries, gallery_, links, count=3).worst]
    assert worst == sorted((r for r in margins if margins[r] > 0), key=lambda r: -margins[r])[:3]


def test_duplicates():
    captions = ["A dog runs.", "a dog, runs", "the red dog runs fast", "The red dog runs slow", "other words here"]
    found = duplicates(captions)
    assert found.same == [[0, 1]]
    assert found.near == [(2, 3)]


def test_gallery_picks_both_ends_and_the_middle():
    popularity = np.arange(1.0, 101)[::-1] / 50.5
    picked = gallery.pick(popularity, 10)
    assert [row for row, group in picked if group == "most"] == [0, 1, 2, 3]
    assert [row for row, group in picked if group == "least"] == [96, 97, 98, 99]
    assert [row for row, group in picked if group == "middle"] == [49, 50]
    assert len(gallery.pick(popularity[:5], 30)) == 5
    side = gallery.Side("captions", np.arange(100), popularity, np.ones(100), 7, 0.0, True, truth=popularity)
    cards = gallery.cards(side, 10, lambda k: f"caption {k}", lambda k: None, lambda k: None)
    assert cards[0]["rank"] == 1 and cards[-1]["rank"] == 100 and cards[0]["truth_rank"] == 1
    assert (cards[0]["place"], cards[-1]["place"]) == (1, 0)
    assert side.agreement(-popularity) == pytest.approx(-1)
    assert 1 < side.effective_number() < 100


def test_confusion():
    table = tally(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]), 3)
    found = Confusion(["a", "b<", "c"], table, 4)
    assert table.tolist() == [[1, 1, 0], [0, 1, 0], [0, 1, 0]]
    assert found.accuracy() == 0.5
    assert found.mistakes()[0][:3] == ("a", "b<", 1)
    assert "b&lt;" in heat_map(found).svg
    assert heat_map(Confusion(list(map(str, range(200))), np.zeros((200, 200), int), 0)) is None


def test_a_line_cut_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "epoch": 0.5, "train/loss": 2}\n{"step": 2, "epo')
    notes = []
    lines = read_lines(tmp_path / "metrics.jsonl", notes)
    assert curve(lines, "train/loss") == ([0.5], [2.0])
    assert "metrics.jsonl" in notes[0]
