"""Reports on vectors in shards: the results of one file, after a kill as well, and in little memory."""

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nuclr.arrays import Rows, as_rows
from nuclr.data.vectors import Vectors, open_vectors
from nuclr.popularity import PopularityCorrection
from nuclr.studies.items import popularity_report
from nuclr.studies.items.row_maps import row_maps
from tests.data.embedding_folders import make_clip_retrieval, make_features, slices

SIZES = (250, 1, 149)
X, Y = make_features(rows=sum(SIZES), width=8)
BLOCK = 60
FOURTH = "bias-measured-180.npy"


def write(folder: Path, rows: np.ndarray, kind: str) -> Path:
    """Write rows as shards: `.npy` files, or Parquet files as Spark writes them, one of them without rows."""
    folder.mkdir()
    for number, part in enumerate(slices(SIZES)):
        if kind == "npy":
            np.save(folder / f"part-{number}.npy", rows[part])
        else:
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows[part].ravel()), rows.shape[1])
            pq.write_table(pa.table({"embedding": column, "id": range(len(column))}), folder / f"part-{number}.parquet")
    if kind == "parquet":
        schema = pq.read_schema(folder / "part-0.parquet")
        pq.write_table(schema.empty_table(), folder / "part-3.parquet")
    return folder


@pytest.fixture(params=["npy", "parquet"])
def shards(request, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("nuclr.arrays.BLOCK", BLOCK)
    write(tmp_path / "x", X, request.param)
    write(tmp_path / "y", Y, request.param)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    return tmp_path


def test_hubness_of_shards_is_that_of_one_file(nuclr, shards):
    for out, x, y in (("one", "x.npy", "y.npy"), ("parts", "x", "y")):
        done = nuclr("hubness", shards / x, shards / y, "--normalize", "--out", shards / out)
        assert done.status == 0, done.err
    assert "bias: 400 of 400 rows, 400 computed now" in done.err and "of one core" in done.err
    one, parts = (np.load(shards / out / "bias.npy") for out in ("one", "parts"))
    np.testing.assert_array_equal(parts, one)
    fix = PopularityCorrection.load(shards / "parts" / "correction.safetensors")
    np.testing.assert_array_equal(parts, fix.bias(Y).numpy())
    counts = [json.loads((shards / out / "hubness.json").read_text())["corrected"] for out in ("one", "parts")]
    assert counts[0] == counts[1]
    assert not list((shards / "parts").glob(".unfinished*"))


def test_popularity_of_two_folders_is_that_of_one_file(nuclr, shards, monkeypatch):
    monkeypatch.setattr("nuclr.popularity.solver.EXACT_SCORES", 0)  # estimated from a sample, as of many pairs
    np.savez(shards / "pairs.npz", x=X, y=Y)
    tables = []
    for arguments in ([shards / "pairs.npz"], [shards / "x", shards / "y"]):
        done = nuclr("popularity", *arguments, "--temperature", 0.2, "--out", shards / "out")
        assert done.status == 0, done.err
        tables.append((shards / "out" / "popularity.csv").read_text())
    assert tables[0] == tables[1]


@pytest.mark.parametrize("side", ["x", "y"])
def test_the_maps_of_an_estimate_are_named(nuclr, shards, monkeypatch, side):
    original = popularity_report.solve
    sampled = {"method": "sample", "sample": 100}
    monkeypatch.setattr(popularity_report, "solve", lambda **options: original(**(options | sampled)))
    done = nuclr("popularity", shards / "x", shards / "y", "--temperature", 0.2, "--out", shards / "out")
    assert done.status == 0, done.err
    for name in ("zeta", "log-z"):
        assert f"{side}-{name}: 400 of 400 rows" in done.err


def test_an_estimate_of_other_links_is_not_used(nuclr, tmp_path, monkeypatch):
    """The first command ends with an error after the y are solved."""
    monkeypatch.setattr("nuclr.arrays.BLOCK", BLOCK)
    original = popularity_report.solve
    sampled = {"method": "sample", "sample": 100}
    monkeypatch.setattr(popularity_report, "solve", lambda **options: original(**(options | sampled)))
    write(tmp_path / "x", X, "npy")
    command = ("popularity", tmp_path / "x", tmp_path / "y.npz:y", "--temperature", 0.2, "--out", tmp_path / "out")
    y = np.concatenate([Y, Y[:9]])
    rows = np.arange(len(X))
    np.savez(tmp_path / "y.npz", y=y, y_to_x=np.concatenate([rows, rows[:9]]))
    with monkeypatch.context() as patch:
        patch.setattr(popularity_report, "popularity_agreement", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            nuclr(*command)
    np.savez(tmp_path / "y.npz", y=y, y_to_x=np.concatenate([rows, rows[-9:]]))
    done = nuclr(*command)
    assert done.status == 0, done.err
    assert done.err.count("y-zeta: 409 of 409 rows, 409 computed now") == 2, "by both commands"


def test_folders_of_unequal_lengths_or_widths_are_refused(nuclr, tmp_path):
    write(tmp_path / "x", X, "npy")
    (tmp_path / "y").mkdir()
    np.save(tmp_path / "y" / "0.npy", Y[:7])
    done = nuclr("popularity", tmp_path / "x", tmp_path / "y", "--temperature", 0.2, "--out", tmp_path / "out")
    assert done.status == 2 and "400 rows" in done.err and "7" in done.err
    np.save(tmp_path / "y" / "1.npy", Y[:7, :5])
    done = nuclr("hubness", tmp_path / "x", tmp_path / "y", "--out", tmp_path / "out")
    assert done.status == 2 and "[5, 8]" in done.err and "1.npy" in done.err


KILLED = """if True:
    import os, signal, sys
    import nuclr.arrays
    from nuclr import files
    from nuclr.cli import app

    nuclr.arrays.BLOCK = {block}
    original = files.write_atomically

    def write(path, **options):
        if path.name == "{killed}":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(path, **options)

    files.write_atomically = write
    sys.argv = ["nuclr", *sys.argv[1:]]
    app.main()
"""


def run(killed: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that is killed when it is about to write a file of this name."""
    code = KILLED.format(block=BLOCK, killed=killed)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_killed_command_computes_only_what_is_missing(tmp_path):
    """The first run dies in the fourth of seven blocks of the first bias, the second in the third of the last one."""
    x = write(tmp_path / "x", X, "npy")
    y = write(tmp_path / "y", Y, "npy")
    command = ("hubness", x, y, "--normalize", "--out", tmp_path / "out")
    assert run(FOURTH, *command).returncode == -9
    second = run("bias-120.npy", *command)
    assert second.returncode == -9 and "bias-measured: 400 of 400 rows, 220 computed now" in second.stderr
    third = run("", *command)
    assert third.returncode == 0, third.stderr
    for line in ("bias-measured: 400 of 400 rows, 0 computed now", "bias: 400 of 400 rows, 280 computed now"):
        assert line in third.stderr
    assert run("", *command[:-1], tmp_path / "whole").returncode == 0
    assert (tmp_path / "out" / "bias.npy").read_bytes() == (tmp_path / "whole" / "bias.npy").read_bytes()
    assert (tmp_path / "out" / "hubness.csv").read_bytes() == (tmp_path / "whole" / "hubness.csv").read_bytes()


@pytest.mark.parametrize("change", ["k", "file"])
def test_results_of_other_settings_or_files_are_not_used(tmp_path, change):
    x = write(tmp_path / "x", X, "npy")
    y = write(tmp_path / "y", Y, "npy")
    command = ("hubness", x, y, "--normalize", "--out", tmp_path / "out")
    assert run(FOURTH, *command).returncode == -9
    if change == "file":
        np.save(y / "part-1.npy", Y[:1])
    done = run("", *command, *(["-k", 5] if change == "k" else []))
    assert done.returncode == 0, done.stderr
    assert "bias-measured: 400 of 400 rows, 400 computed now" in done.stderr
    assert not list((tmp_path / "out").glob(".unfinished*"))


def count_maps(out: Path, argument: str, fails: bool = False) -> int:
    """Map the rows of one argument, with an error in the end if `fails`; return how many were computed."""
    vectors = checked(open_vectors(argument))
    computed = []

    def compute(rows: Rows, _: slice) -> torch.Tensor:
        computed.append(len(rows))
        return rows[:][:, 0]

    with contextlib.suppress(KeyboardInterrupt), row_maps(out, [vectors], []) as maps:
        assert torch.equal(maps("first", vectors.rows, compute), vectors.rows[:][:, 0])
        if fails:
            raise KeyboardInterrupt
    return sum(computed)


def checked(vectors: Vectors) -> Vectors:
    return replace(vectors, rows=as_rows("rows", vectors.rows, "any"))


def test_results_of_another_array_in_the_same_file_are_not_used(tmp_path):
    folder = make_clip_retrieval(tmp_path / "laion", X[:30], Y[:30], sizes=(30,))
    for name in ("x", "y"):
        assert count_maps(tmp_path, f"{folder}:{name}", fails=True) == 30
    assert count_maps(tmp_path, f"{folder}:x") == 0


def test_a_command_that_ends_leaves_the_results_of_a_running_one(tmp_path):
    write(tmp_path / "x", X, "npy")
    write(tmp_path / "y", Y, "npy")
    vectors = checked(open_vectors(tmp_path / "x"))
    with row_maps(tmp_path, [vectors], []) as maps:
        assert count_maps(tmp_path, f"{tmp_path / 'y'}") == len(Y)
        assert len(maps("late", vectors.rows, lambda rows, _: rows[:])) == len(X)
    assert not list(tmp_path.glob(".unfinished*"))


def test_a_full_disk_is_a_clear_error(tmp_path):
    """A limit on the size of files stands for the disk."""
    write(tmp_path / "x", X, "npy")
    code = """if True:
        import resource, signal, sys
        from nuclr.cli import app

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        sys.argv = ["nuclr", *sys.argv[1:]]
        app.main()
    """
    command = ["hubness", tmp_path / "x", tmp_path / "x", "--normalize", "--out", tmp_path / "out"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "bias-measured-0.npy: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the limit on memory is that of Linux")
def test_five_million_rows_need_little_memory(tmp_path):
    """Map 2.4 GiB of sparse float16 files, 4.8 GiB as float32, by a process that may allocate 0.5 GiB."""
    (tmp_path / "items").mkdir()
    for part in range(5):
        np.lib.format.open_memmap(tmp_path / "items" / f"{part}.npy", "w+", np.float16, (1_000_000, 256))
    code = """if True:
        import resource, sys
        from pathlib import Path
        import torch
        from nuclr.arrays import Rows
        from nuclr.data.vectors import open_vectors
        from nuclr.popularity import PopularityCorrection
        from nuclr.studies.items.row_maps import row_maps
        from dataclasses import replace

        x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
        fix = PopularityCorrection(normalize=True).fit(x[:20], x[20:])
        lines = Path("/proc/self/status").read_text().splitlines()
        data = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + 2**29, data + 2**29))
        vectors = open_vectors(Path(sys.argv[1], "items"))
        rows = Rows(vectors.rows, torch.float32, "normalize")
        with row_maps(Path(sys.argv[1]), [replace(vectors, rows=rows)], []) as maps:
            print(len(fix.bias(rows, row_map=maps)))
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.split() == ["5000000"], done.stderr[-2000:]
