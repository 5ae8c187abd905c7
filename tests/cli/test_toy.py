"""`nuclr toy` at a small scale."""

import pytest

from nuclr.files import read_record
from nuclr.studies.toy.study import SUMMARY, ToyStudy


@pytest.mark.slow
def test_the_study_is_written_and_printed(nuclr, tmp_path):
    done = nuclr("toy", "--out", tmp_path / "toy", "--seeds", 2, "--max-n", 100)
    assert done.status == 0, done.err
    assert read_record(ToyStudy, tmp_path / "toy" / SUMMARY).sizes == [100]
    assert str(tmp_path / "toy") in done.out and "Several views" in (tmp_path / "toy" / "report.html").read_text()


def test_a_file_named_out_is_refused_and_left_unchanged(nuclr, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused = nuclr("toy", "--out", tmp_path / "file")
    assert refused.status == 2 and str(tmp_path / "file") in refused.err
    assert (tmp_path / "file").read_text() == "mine"
