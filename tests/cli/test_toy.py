"""`nuclr toy` at a small scale."""

import json

import pytest


@pytest.mark.slow
def test_the_study_is_written_and_printed(nuclr, tmp_path):
    done = nuclr("toy", "--out", tmp_path / "toy", "--seeds", 2, "--max-n", 100)
    assert done.status == 0, done.err
    content = json.loads((tmp_path / "toy" / "toy.json").read_text())
    assert {"tau", "n", "method", "error_mean", "error_std"} <= set(content["records"][0])
    assert "tau = 0.2" in done.out
    assert str(tmp_path / "toy") in done.out


def test_a_file_named_out_is_refused_and_left_unchanged(nuclr, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused = nuclr("toy", "--out", tmp_path / "file")
    assert refused.status == 2
    assert f"--out {tmp_path / 'file'}: there is a file with this name; name a folder" in refused.err
    assert (tmp_path / "file").read_text() == "mine"
