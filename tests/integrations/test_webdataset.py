"""Streams of the real webdataset: the example numbers the keys of the samples."""

import pytest

from tests.integrations.common import EXAMPLES, launch

pytest.importorskip("webdataset")


def test_the_example_runs(tmp_path):
    printed = launch(EXAMPLES / "webdataset_stream.py", cwd=tmp_path)
    assert "100% of the pairs seen" in printed
    assert float(printed.split("recall@1 ")[1].split("%")[0]) > 50
