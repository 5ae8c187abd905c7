"""Tests work on small tensors: one thread is faster than two that wait for each other, and leaves a core free."""

import sys

import pytest
import torch

from nuclr import cli

torch.set_num_threads(1)


@pytest.fixture
def nuclr(monkeypatch, capsys):
    """The command line as a user meets it: arguments -> exit status, stdout, stderr."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nuclr", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run
