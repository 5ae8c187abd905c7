"""Vectors and names of a Lance dataset, which is what LanceDB writes per table."""

import numpy as np
import pytest

from nuclr.data.formats.arrow import read_texts
from nuclr.data.vectors import open_vectors
from nuclr.errors import UserError

lance = pytest.importorskip("lance")
arrow = pytest.importorskip("pyarrow")


def test_rows_and_names_follow_the_version(tmp_path):
    rows = np.random.default_rng(0).normal(size=(2500, 8)).astype("float32")
    column = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.ravel()), 8)
    table = arrow.table({"id": [f"item {number}" for number in range(len(rows))], "vector": column})
    path = tmp_path / "items.lance"
    lance.write_dataset(table.slice(0, 2000), path)
    assert np.array_equal(open_vectors(path).rows[:], rows[:2000])
    lance.write_dataset(table.slice(2000), path, mode="append")
    assert np.array_equal(open_vectors(f"{path}:vector").rows[:], rows)
    assert read_texts(path, "id")[-1] == "item 2499"
    with pytest.raises(UserError, match="missing"):
        open_vectors(f"{path}:missing")
