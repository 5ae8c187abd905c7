"""The pages of `nuclr popularity` and `nuclr hubness`."""

import json

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.report.page import Example, Gallery, Options, SearchBox, Tile
from nuclr.report.write import make_page
from tests.report import folders


@pytest.fixture
def embedded(tmp_path):
    """Write an embedding file, pictures and a list of pairs with a hostile caption."""
    names = folders.write_pictures(tmp_path / "images", 40, 64)
    x = np.random.default_rng(1).normal(size=(40, 6)).astype("float32")
    y = x + 0.5 * np.random.default_rng(2).normal(size=x.shape).astype("float32")
    np.savez(tmp_path / "e.npz", x=x, y=y)
    lines = [{"image": name, "caption": folders.HOSTILE if k == 0 else f"thing {k}"} for k, name in enumerate(names)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_pictures_and_texts(nuclr, embedded):
    arguments = ("--temperature", 0.3, "--names", embedded / "c.jsonl", "--images", embedded / "images", "--top", 40)
    done = nuclr("popularity", embedded / "e.npz", *arguments, "--out", embedded / "out")
    assert done.status == 0, done.err
    page, sections = folders.fill_page("popularity", embedded / "out")
    assert not page.notes
    for key in ("most", "least"):
        y, x = folders.of_kind(sections[key], Gallery)
        assert len(x.cards) == len(y.cards) == 40
        assert all(card.item.picture and card.other.text for card in x.cards)
        assert all(card.item.text and card.other.picture for card in y.cards)
    assert folders.of_kind(sections["negatives"], Example)
    html = (embedded / "out" / "report.html").read_text()
    assert folders.HOSTILE not in html and html.count("data:image/jpeg") >= 80
    assert "data:image" not in make_page(embedded / "out", Options(pictures=False))


def test_the_page_of_hubness(nuclr, embedded):
    names = ("--names", embedded / "c.jsonl", "--images", embedded / "images")
    settings = ("--normalize", "--temperature", 0.2, "--strength", 1)
    done = nuclr("hubness", f"{embedded}/e.npz:y", f"{embedded}/e.npz:x", *settings, *names, "--out", embedded / "h")
    assert done.status == 0, done.err
    page, sections = folders.fill_page("hubness", embedded / "h")
    report = json.loads((embedded / "h" / "hubness.json").read_text())
    assert page.verdict == report["advice"][0]
    assert len(folders.of_kind(sections["summary"], Tile)) == 3
    (hubs,) = folders.of_kind(sections["hubs"], Gallery)
    assert len(hubs.cards) == 30 and all(card.item.picture for card in hubs.cards)
    assert max(max(card.bars) for card in hubs.cards) == 1
    (box,) = folders.of_kind(sections["try"], SearchBox)
    assert len(box.queries) == len(box.plain) == len(box.corrected) == report["counted"]
    assert all(len(found) == report["k"] for found in (*box.plain, *box.corrected))
    assert sum(before for before, _ in box.counts) == report["k"] * report["counted"]
    change = [(after[0] in right) - (before[0] in right) for right, before, after in _searches(box)]
    assert (change.count(1), change.count(-1)) == (report["won_count"], report["lost_count"]) != (0, 0)


def _searches(box):
    return zip(box.right, box.plain, box.corrected, strict=True)


def test_the_search_box_is_as_large_as_a_page_can_hold(nuclr, embedded, monkeypatch):
    monkeypatch.setattr("nuclr.studies.items.searches.TEXT", 60)
    monkeypatch.setattr("nuclr.report.pages.hubness.PICTURES", 700)
    files = [json.loads(line)["image"] for line in (embedded / "c.jsonl").read_text().splitlines()]
    (embedded / "files.txt").write_text("".join(f"{name}\n" for name in files))
    names = ("--normalize", "--names", embedded / "files.txt", "--images", embedded / "images", "--k", 2)
    data = np.load(embedded / "e.npz")
    np.save(embedded / "q.npy", data["y"])
    np.save(embedded / "g.npy", data["x"])
    done = nuclr("hubness", embedded / "q.npy", embedded / "g.npy", *names, "--out", embedded / "h")
    assert done.status == 0, done.err
    page, sections = folders.fill_page("hubness", embedded / "h")
    (box,) = folders.of_kind(sections["try"], SearchBox)
    assert not page.notes and not any(box.right), "no right answers are known"
    assert 0 < len(box.queries) < 20
    assert 0 < sum(item.picture is not None for item in box.items) < len(box.items)


def test_images_outside_of_the_folder_are_not_shown(nuclr, tmp_path):
    """A list from somebody else must not bring private images into a page that is passed on."""
    folders.write_pictures(tmp_path / "private", 2)
    names = folders.write_pictures(tmp_path / "data", 4)
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "private" / "1.png")
    listed = ["../private/0.png", str(tmp_path / "private" / "1.png"), "link.png", *names[3:], "n" * 300]
    x = np.random.default_rng(1).normal(size=(5, 6)).astype("float32")
    np.savez(tmp_path / "e.npz", x=x, y=x)
    (tmp_path / "names.txt").write_text("\n".join(listed))
    arguments = ("--temperature", 0.3, "--x-names", tmp_path / "names.txt", "--images", tmp_path / "data")
    assert nuclr("popularity", tmp_path / "e.npz", *arguments, "--out", tmp_path / "out").status == 0
    _, sections = folders.fill_page("popularity", tmp_path / "out")
    cards = folders.of_kind(sections["most"], Gallery)[1].cards
    assert [card.item.label for card in cards if card.item.picture] == ["3.png"]


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"file": "a", "sides": {"y": {}}}'])
@pytest.mark.parametrize("name", ["popularity.json", "hubness.json"])
def test_damaged_summaries_are_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name):
        make_page(tmp_path, Options())
