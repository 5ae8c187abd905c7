"""Tests work on small tensors: one thread is faster than two that wait for each other, and leaves a core free."""

import os
import sys
from typing import NamedTuple

import pytest
import torch

from nuclr.cli import app as cli

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)  # measuring their coverage as well would take a third longer


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def nuclr(monkeypatch, capsys):
    """The command line as a user meets it."""

    def run(*arguments) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["nuclr", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Outcome(ended.value.code or 0, *capsys.readouterr())

    return run
