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
