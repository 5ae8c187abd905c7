"""Which page a folder gets, and refusals."""

import pytest

from nuclr.errors import UserError
from nuclr.report.write import write_report
from tests.training import runs


def test_refusals(nuclr, vector_run, tmp_path):
    for arguments, message in (
        ([tmp_path / "nowhere"], "no such folder"),
        ([tmp_path], "config.yaml"),
        ([vector_run, "--no-model", "--out", tmp_path], str(tmp_path)),
        ([vector_run, "--no-model", "--out", tmp_path / "no" / "page.html"], "page.html"),
    ):
        status, _, errors = nuclr("report", *arguments)
        assert status == 2 and message in errors and "Traceback" not in errors


def test_at_the_end_of_training(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [s for s in runs.vector_settings(tmp_path) if not s.startswith("report")]
    status, output, errors = nuclr("train", "empty.yaml", *settings, "out=run")
    assert status == 0 and "Report page: run/report.html" in output, errors
    assert "nuclr train empty.yaml" in (tmp_path / "run" / "report.html").read_text()
    monkeypatch.setattr("nuclr.report.write.make_page", lambda *_: 1 / 0)
    status, _, errors = nuclr("train", "empty.yaml", *settings, "out=other")
    assert status == 0 and "division by zero" in errors


@pytest.mark.parametrize("name", ["popularity.json", "compare.json", "toy.json", "config.yaml"])
@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5_000, "{}", "[]", "", "\x00", '{"sides": 1}', "{a: 1}: 2"])
def test_damaged_folders_are_a_clear_error(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        write_report(tmp_path)
    message = str(caught.value)
    assert (str(tmp_path) in message or "data.train" in message) and len(message) < 700
