"""`nuclr train --dry-run`."""

from tests.training import runs


def test_dry_run_writes_nothing(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = runs.vector_settings(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    status, out, err = nuclr("train", "empty.yaml", *settings, "--dry-run")
    assert status == 0, err
    assert "120 pairs (0 bad)" in out and "28 steps" in out and "memory: model" in out and "min in total" in out
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
