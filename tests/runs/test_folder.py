"""A run folder is locked against a second run, and files of others are never overwritten."""

import pytest
import yaml

from nuclr.errors import UserError
from nuclr.runs.folder import RunFolder
from nuclr.runs.settings import Settings, change, to_dict


def test_two_runs_cannot_use_one_folder(tmp_path):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    assert first.open(Settings(), resume=False) is False
    with pytest.raises(UserError, match=str(tmp_path)):
        second.open(Settings(), resume=True)
    second.close()
    first.close()
    assert second.open(Settings(), resume=True) is True, "the lock is free after the first run has ended"
    second.close()


def test_the_folder_is_locked_for_the_whole_run(tmp_path, monkeypatch):
    from nuclr.training import loop
    from tests.training import runs

    refused = []
    set_schedules = loop.set_schedules

    def open_again(*arguments):
        if not refused:
            with pytest.raises(UserError, match=str(tmp_path)) as error:
                RunFolder(tmp_path / "run").open(Settings(), resume=True)
            refused.append(error)
        set_schedules(*arguments)

    monkeypatch.setattr(loop, "set_schedules", open_again)
    loop.train(runs.load(tmp_path), tmp_path / "run")
    assert refused


def test_a_folder_with_other_files_is_refused_and_left_unchanged(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        RunFolder(tmp_path).open(Settings(), resume=False)
    assert (tmp_path / "thesis.txt").read_text() == "all of it"
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize(("missing", "other"), [("objective.margin_strategy", "relative"), ("data.mask", False)])
def test_a_run_of_a_version_without_a_setting_resumes_with_its_default(tmp_path, missing, other):
    section, _, key = missing.partition(".")
    values = to_dict(Settings())
    del values[section][key]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    folder = RunFolder(tmp_path)
    assert folder.open(Settings(), resume=True) is True
    folder.close()
    with pytest.raises(UserError, match=missing):
        folder.open(change(Settings(), missing, other), resume=True)
