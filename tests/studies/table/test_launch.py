"""Running what is missing: finished work is not repeated, a failure is reported, a command ends with its parent."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nuclr.studies.table import attached, estimate, launch
from nuclr.studies.table.aggregate import summarize
from nuclr.studies.table.plan import plan_runs
from nuclr.studies.table.table_file import read_table
from tests.studies.table import tiny

SLEEP = "import time; print('ready', flush=True); time.sleep(60)"


def ends(pid: int, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_runs_are_trained_and_evaluated_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "execute", tiny.run_inline)
    table = read_table(tiny.write_table(tmp_path))
    runs = plan_runs(table, tmp_path / "out", tmp_path)
    said, done = [], []
    assert launch.run_missing(runs[:1], say=said.append, done=lambda run: done.append(run.name)) == {}
    assert done == ["clip-seed0"]
    assert said[0] == "0 of 1 runs are already done"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}

    assert launch.run_missing(runs, say=said.append, done=lambda run: done.append(run.name)) == {}
    assert done == ["clip-seed0", "ours-seed0"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [run.state() for run in runs] == ["done", "done"]

    content = summarize(table, runs, tmp_path, "")
    clip = content["blocks"][0]["rows"][0]
    assert set(clip["cells"]) == {"pairs", "classes", "Mean"}
    assert 0 <= clip["cells"]["pairs"]["mean"] <= 100

    # a column that is added later is evaluated without training again
    results = (runs[0].folder / "results.json").stat().st_mtime_ns
    path = tmp_path / "table.yaml"
    path.write_text(path.read_text().replace("rows:", "  - {title: val, test: val.npz, kind: retrieval}\nrows:"))
    more = plan_runs(read_table(path), tmp_path / "out", tmp_path)[:1]
    assert [column.title for column in more[0].missing_columns()] == ["val"]
    assert launch.run_missing(more) == {}
    assert (runs[0].folder / "results.json").stat().st_mtime_ns == results
    assert len(list(more[0].results.glob("*.json"))) == 2

    times = estimate.estimate_rows(runs)
    assert {one.source for one in times.values()} == {"mean of 1 finished run"}
    assert estimate.left(runs[0], times[estimate.row_key(runs[0])]) == 0.0


def test_the_time_of_rows_without_a_finished_run_is_from_a_trial_the_table_file_or_unknown(tmp_path):
    runs = plan_runs(read_table(tiny.write_table(tmp_path)), tmp_path / "out", tmp_path)
    assert all(one.seconds > 0 and "trial" in one.source for one in estimate.estimate_rows(runs[:1]).values())
    (tmp_path / "train.npz").unlink()
    (unknown,) = estimate.estimate_rows(runs[:1]).values()
    assert unknown.seconds is None and unknown.source.startswith("unknown: ") and "train.npz" in unknown.source
    (elsewhere,) = estimate.estimate_rows([dataclasses.replace(runs[0], hours=(2.0, "a log"))]).values()
    assert elsewhere.seconds == 7200 and elsewhere.source.startswith("a log; no trial here: ")


def test_a_resumed_runs_time_is_that_at_its_speed():
    timing = {"seconds": 10.0, "samples_per_second": 4.0}
    assert estimate.training_seconds({"timing": timing, "steps": 30, "batch_size": 8}) == 60.0
    assert estimate.training_seconds({"timing": timing, "steps": 2, "batch_size": 8}) == 10.0
    assert estimate.training_seconds({}) is None


def test_a_failed_run_is_reported_and_the_others_are_worked_on(tmp_path, monkeypatch):
    runs = plan_runs(read_table(tiny.write_table(tmp_path)), tmp_path / "out", tmp_path)
    asked = []

    def execute(command, log):
        asked.append(command[3])
        return "status 1: no" if len(asked) == 1 else None

    monkeypatch.setattr(launch, "execute", execute)
    assert launch.run_missing(runs) == {"clip-seed0": "status 1: no"}
    assert asked == ["train", "train", "evaluate"]


def test_a_command_that_fails_shows_its_last_lines(tmp_path):
    log = tmp_path / "log"
    assert launch.execute([sys.executable, "-c", "print('fine')"], log) is None
    program = "import sys; print('first'); sys.exit('nuclr: the reason')"
    assert launch.execute([sys.executable, "-c", program], log) == "status 1: first nuclr: the reason"
    assert log.read_text().splitlines() == ["fine", "first", "nuclr: the reason"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_a_command_ends_when_its_parent_is_killed(tmp_path):
    program = (
        "import subprocess, sys; command = [sys.executable, '-m', 'nuclr.studies.table.attached']; "
        f"command += [sys.executable, '-c', {SLEEP!r}]; "
        "subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    (wrapper,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    (command,) = Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert ends(int(command)) and ends(int(wrapper))
    parent.stdout.close()


def test_the_wrapper_passes_the_status_on():
    def status(program: str) -> int:
        command = [sys.executable, "-m", attached.__name__, sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            return process.wait()

    assert status("raise SystemExit(3)") == 3
    assert status("import os; os.kill(os.getpid(), 9)") == 137
