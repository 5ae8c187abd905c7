"""The page of a popularity folder."""

import json

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.report.render import Options
from nuclr.report.write import make_page
from tests.report import folders


def test_many_pictures(nuclr, tmp_path):
    names = folders.write_pictures(tmp_path / "images", 70, 160, noise=True)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(70, 6)).astype("float32")
    np.savez(tmp_path / "e.npz", x=x, y=(x + 0.5 * rng.normal(size=x.shape)).astype("float32"))
    lines = [{"image": name, "caption": folders.HOSTILE if k == 0 else f"thing {k}"} for k, name in enumerate(names)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("popularity", tmp_path / "e.npz", "--temperature", 0.3, "--captions", tmp_path / "c.jsonl")
    status, output, errors = nuclr(*arguments, "--images", tmp_path / "images", "--out", tmp_path / "out")
    assert status == 0 and "report.html" in output, errors
    assert nuclr("report", tmp_path / "out", "--gallery", 60)[0] == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('class="card ') == 120 and page.count("data:image/jpeg") >= 120
    assert len(page) < 2 * 3_000_000, "120 pictures of noise, twice those of a gallery of 60"
    assert folders.HOSTILE not in page and "false negatives" in page

    (tmp_path / "out" / "popularity.csv").write_text("side,number\nz,1\n")
    with pytest.raises(UserError, match=r"popularity\.csv was not written by nuclr popularity, or is damaged"):
        make_page(tmp_path / "out", Options())
    (tmp_path / "out" / "popularity.csv").write_text("side,number,x\ny,1,1\n")
    with pytest.raises(UserError, match="the files of this popularity are damaged"):
        make_page(tmp_path / "out", Options())
    (tmp_path / "out" / "popularity.json").write_text("{}")
    with pytest.raises(UserError, match="align is missing"):
        make_page(tmp_path / "out", Options())


def test_popularity_of_a_run(nuclr, picture_run, tmp_path):
    status, _, errors = nuclr("popularity", picture_run, "--temperature", 0.3, "--out", tmp_path / "out")
    assert status == 0, errors
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/jpeg" in page and "zeta at the end of training" in page


@pytest.mark.parametrize("with_folder", [False, True])
def test_images_outside_of_the_folder_are_not_shown(nuclr, tmp_path, with_folder):
    """A list from somebody else must not bring private images into a page that is passed on."""
    folders.write_pictures(tmp_path / "private", 2)
    names = folders.write_pictures(tmp_path / "data", 4)
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "private" / "1.png")
    listed = ["../private/0.png", str(tmp_path / "private" / "1.png"), "link.png", *names[3:]]
    x = np.random.default_rng(1).normal(size=(4, 6)).astype("float32")
    np.savez(tmp_path / "e.npz", x=x, y=x)
    lines = [{"image": name, "caption": f"thing {k}"} for k, name in enumerate(listed)]
    (tmp_path / "data" / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("popularity", tmp_path / "e.npz", "--temperature", 0.3, "--captions", tmp_path / "data" / "c.jsonl")
    if with_folder:
        arguments += ("--images", tmp_path / "data")
    shown = {}
    for options in ((), ("--allow-outside",)):
        status, _, errors = nuclr(*arguments, *options, "--out", tmp_path / "out")
        assert status == 0, errors
        context, contents = folders.open_page("popularity", tmp_path / "out")
        shown[options] = {card.number for card in contents["gallery"].cards if card.face.picture}
        assert not any("no pictures" in note for note in context.notes)
    assert shown == {(): {3}, ("--allow-outside",): {0, 1, 2, 3}}


def test_names_that_are_too_long_have_no_picture(nuclr, tmp_path):
    folders.write_pictures(tmp_path, 2)
    np.savez(tmp_path / "e.npz", x=np.eye(3), y=np.eye(3))
    (tmp_path / "files.txt").write_text("n" * 300 + "\n0.png\n1.png\n")
    arguments = ("--temperature", 0.3, "--images", tmp_path / "files.txt", "--out", tmp_path / "out")
    assert nuclr("popularity", tmp_path / "e.npz", *arguments)[0] == 0
    _, contents = folders.open_page("popularity", tmp_path / "out")
    pictures = {card.number: card.face.picture for card in contents["gallery"].cards if card.side == "images"}
    assert pictures[0] is None and pictures[1].startswith("data:image/jpeg;base64,")


def test_vectors_without_names_are_shown_as_curves(nuclr, tmp_path):
    np.savez(tmp_path / "e.npz", x=np.eye(5), y=np.eye(5))
    assert nuclr("popularity", tmp_path / "e.npz", "--temperature", 0.3, "--out", tmp_path / "out")[0] == 0
    context, contents = folders.open_page("popularity", tmp_path / "out")
    faces = [card.face for card in contents["gallery"].cards]
    assert {face.text for face in faces} == {f"{side} vector {k}" for side in "xy" for k in range(5)}
    assert all(face.curve for face in faces)
    assert any("--pairs or --captions shows them" in note for note in context.notes)
    (tmp_path / "e.npz").unlink()
    _, contents = folders.open_page("popularity", tmp_path / "out")
    assert not any(card.face.curve for card in contents["gallery"].cards)
