"""Runs are trained once per session, when a test first asks for one."""

import pytest

from tests.export.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))
