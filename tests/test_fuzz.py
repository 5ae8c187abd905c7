"""A short run of the fuzzer with a fixed seed; `python benchmarks/fuzz.py` runs 4,000 cases per reader."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FUZZ = ROOT / "benchmarks" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_damaged_files_give_a_result_or_a_clear_error(tmp_path):
    # A real hang never ends, so patience is far longer than in the benchmark: tests share their machine.
    command = [sys.executable, str(FUZZ), "--cases", "25", "--seed", "1", "--patience", "300"]
    command += ["--out", str(tmp_path / "fuzz.json"), "--store", str(tmp_path / "store")]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    reproducers = "\n\n".join(path.read_text() for path in sorted((tmp_path / "store").rglob("outcome.txt"))[:3])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}\n{reproducers}"
    readers = json.loads((tmp_path / "fuzz.json").read_text())["readers"]
    assert len(readers) == 21
    for name, counts in readers.items():
        assert counts["cases"] == 25, name
        assert counts.get("clean", 0) > 0, f"{name}: no damaged file is read, so the fuzzer does not reach the reader"
        assert counts["peak_mib"] < 1024, name


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_fuzzer_notices_every_kind_of_failure(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FUZZ.parent)
    import fuzz

    # A small limit, because a slow machine takes seconds to allocate gigabytes, and that would look like a hang.
    monkeypatch.setattr(fuzz, "MEMORY", 2**27)

    def read(folder, case):
        if case == 1:
            raise KeyError("a traceback")
        if case == 2:
            os.abort()
        if case == 3:
            os.read(os.open(folder / "pipe.jpg", os.O_RDWR), 1)
        if case == 4:
            bytearray(3 * 2**26)
        if case == 5:
            raise fuzz_error("a clear line")

    from nuclr.errors import UserError as fuzz_error  # noqa: N813

    monkeypatch.setitem(fuzz.READERS, "fake", fuzz.Reader(lambda _: [{"a.txt": b"1\n2\n"}], read, ("*",)))
    # On a slow machine any case may take seconds. Only the case that hangs is therefore run with little patience.
    counts = Counter()
    for cases, patience in ((range(3), 600.0), (range(3, 4), 2.0), (range(4, 7), 600.0)):
        counts += fuzz.fuzz("fake", cases, 0, patience, tmp_path / "store", tmp_path / "work").counts
    assert counts == {"clean": 2, "error": 1, "traceback": 1, "crash": 1, "hang": 1, "memory": 1}
    assert sorted(int(path.name) for path in (tmp_path / "store" / "fake").iterdir()) == [1, 2, 3, 4]
    assert "KeyError: 'a traceback'" in (tmp_path / "store" / "fake" / "1" / "outcome.txt").read_text()
