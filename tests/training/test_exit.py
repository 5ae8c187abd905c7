"""How a run ends when something outside it fails: another process, or the disk."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nuclr.errors import UserError
from nuclr.runs import checkpoint, folder, launch
from nuclr.runs.settings import Settings
from nuclr.training.guards import TrainingFailed
from nuclr.training.loop import train
from tests.training import runs

# -- processes ---------------------------------------------------------------------------------------------------------

OWN_LOOP = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import nuclr.distributed
from torch.nn.parallel import DistributedDataParallel


def gloo_threads():
    return [name for task in Path("/proc/self/task").glob("*/comm") if (name := task.read_text()).startswith("pt_gloo")]


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(3, 2)).sum().backward()
assert gloo_threads()
del model
dist.destroy_process_group()
sys.exit(len(gloo_threads()))
"""

AFTER_AN_ERROR = """
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from nuclr.runs import launch


def fail():
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    raise KeyError(type(model))


try:
    with launch.processes(torch.device("cpu")):
        fail()
except KeyError as error:
    kept = error
sys.exit(sum(task.read_text().startswith("pt_gloo") for task in Path("/proc/self/task").glob("*/comm")))
"""


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("script", [OWN_LOOP, AFTER_AN_ERROR], ids=["own loop", "after an error"])
def test_no_thread_of_gloo_is_left_when_the_group_is_destroyed(script):
    ended = runs.finish(runs.start_python(["-c", script], 2))
    assert [status for status, _, _ in ended] == [0, 0], ended


def start_torchrun(folder: Path, *options: str) -> subprocess.Popen:
    """Start a training that would last for long under torchrun, and return the parent process."""
    settings = runs.vector_settings(folder, **{"schedule.epochs": 40000, "checkpoint_every": 5})
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "nuclr", "train"]
    return subprocess.Popen(
        [*command, str(folder / "empty.yaml"), *settings, f"out={folder / 'run'}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(process: subprocess.Popen) -> list[int]:
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
@needs_proc
def test_torchrun_does_not_end_the_other_process_before_it_reports_the_reason(tmp_path):
    process = start_torchrun(tmp_path, "--standalone", "--nproc_per_node", "2")
    _wait_until(lambda: checkpoint.newest_first(tmp_path / "run" / "checkpoints"))
    os.kill(workers_of(process)[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    lines = [line for line in stderr.splitlines() if line.startswith("nuclr: ")]
    assert len(lines) == 1 and "process 0 " in lines[0] and "--resume" in lines[0], stderr


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_killed_on_one_of_two_machines_ends_all(tmp_path, killed):
    endpoint = f"127.0.0.1:{runs.reserve_port()}"
    options = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    options += ["--master_port", endpoint.rpartition(":")[2]]
    agents = [start_torchrun(tmp_path, *options, "--node_rank", str(rank)) for rank in range(2)]
    _wait_until(lambda: checkpoint.newest_first(tmp_path / "run" / "checkpoints"))
    workers = [workers_of(agent)[0] for agent in agents]
    os.kill(workers[killed], signal.SIGKILL)
    for agent in agents:
        agent.communicate(timeout=60)
    assert all(map(ended, workers))


@pytest.mark.slow
@needs_proc
def test_workers_end_when_torchrun_is_killed(tmp_path):
    process = start_torchrun(tmp_path, "--standalone", "--nproc_per_node", "2")
    _wait_until(lambda: checkpoint.newest_first(tmp_path / "run" / "checkpoints"))
    workers = workers_of(process)
    process.kill()
    _, stderr = process.communicate(timeout=60)  # until the workers, which share the pipe, have ended
    _wait_until(lambda: all(map(ended, workers)), seconds=10)  # a process closes the pipe a moment before it has ended
    assert all(map(ended, workers)) and "torchrun" in stderr


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_a_process_whose_peer_never_joins_stops(tmp_path, monkeypatch, alone):
    monkeypatch.setenv("NUCLR_TIMEOUT", "8")
    settings = runs.vector_settings(tmp_path)
    [process] = runs.start([tmp_path / "empty.yaml", *settings, f"out={tmp_path / 'run'}"], 2, ranks=[alone])
    [(status, _, stderr)] = runs.finish([process])
    assert status == 1
    assert "2 processes" in stderr and "8 s (NUCLR_TIMEOUT)" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("value", ["soon", "0", "nan", "-1"])
def test_a_wrong_timeout_is_refused(monkeypatch, value):
    monkeypatch.setenv("NUCLR_TIMEOUT", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=f"NUCLR_TIMEOUT is '{value}'"), launch.processes(torch.device("cpu")):
        pytest.fail("the processes joined")


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """An empty file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "nuclr-test", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path, free: int) -> None:
    """Write a file that leaves `free` bytes on the disk."""
    status = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(status.f_bavail * status.f_frsize - free))


def test_a_disk_that_becomes_full_is_one_clear_error(tmp_path, disk):
    """At every level: whatever file is the first that does not fit, the run names it and can be resumed."""
    settings = runs.load(tmp_path, **{"schedule.epochs": 2})
    train(settings, tmp_path / "whole")
    reasons = []
    for kilobytes in (0, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192):
        fill(disk, 1024 * kilobytes)
        run = disk / f"run-{kilobytes}"
        try:
            train(settings, run)
        except (TrainingFailed, UserError) as error:
            assert "No space left on device" in str(error), kilobytes
            assert str(run) in str(error)
            reasons.append(str(error).replace(str(run), "RUN"))
        else:
            break
        (disk / "filler").unlink()
        train(settings, run, resume=True)
        runs.assert_same_outcome(tmp_path / "whole", run)
        subprocess.run(["rm", "-r", str(run)], check=True)
    assert len(set(reasons)) >= 3, reasons  # the disk became full in different files


def test_a_read_only_disk_is_one_clear_error(tmp_path, disk):
    settings = runs.load(tmp_path)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(UserError, match=r"out=.*run: .*Read-only file system"):
        train(settings, disk / "run")


def test_closing_the_logs_on_a_full_disk_releases_the_lock(tmp_path, disk):
    run = folder.RunFolder(disk / "run")
    run.open(Settings(), resume=False)
    run.start_logs(0)
    fill(disk, 0)
    with pytest.raises(OSError, match="No space left"):
        for _ in range(100):
            run.log(folder.METRICS, {"step": "x" * 1000})
    run.close()
    again = folder.RunFolder(disk / "run")
    (disk / "filler").unlink()
    assert again.open(Settings(), resume=True)
    again.close()


def test_torch_reports_a_full_disk_as_such(disk):
    fill(disk, 4096)
    content = checkpoint.Checkpoint(
        version="1",
        position={},
        model={"weight": torch.zeros(100_000)},
        objective={},
        optimizer={},
        window={},
        best=0.0,
        metrics_bytes=0,
        data={},
    )
    with pytest.raises(OSError, match="No space left on device") as caught:
        checkpoint.save(disk / "a.pt", content)
    assert caught.value.filename == str(disk / "a.pt")
    assert [path.name for path in disk.iterdir()] == ["filler"]


# -- killed processes --------------------------------------------------------------------------------------------------


def test_checkpoints_that_killed_processes_left_half_written_are_removed(tmp_path):
    run = folder.RunFolder(tmp_path / "run")
    run.open(Settings(), resume=False)
    run.close()
    (run.checkpoints / ".step_000000005.pt.0123abcd.tmp").write_bytes(b"half")
    (run.folder / ".report.html.0123abcd.tmp").write_bytes(b"half")  # another process may be writing it
    again = folder.RunFolder(tmp_path / "run")
    again.open(Settings(), resume=True)
    again.close()
    assert not list(run.checkpoints.iterdir()) and (run.folder / ".report.html.0123abcd.tmp").exists()


def _wait_until(condition, seconds=240) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
