"""The table for viewers: the projection is that of an SVD, and the nearest item that of brute force."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.data.formats.embeddings import Embeddings
from nuclr.data.formats.stored_texts import StoredTexts
from nuclr.errors import UserError
from nuclr.popularity.rows import Rows
from nuclr.studies.popularity import keep, viewer
from nuclr.studies.popularity.inputs import read_names
from nuclr.studies.popularity.sides import solve_sides, weigh_pairs


@pytest.fixture
def features():
    generator = torch.Generator().manual_seed(0)
    return normalize(torch.randn(500, 12, generator=generator) * torch.linspace(3, 0.1, 12) + 1, dim=1)


def test_the_projection_is_that_of_an_svd(features, monkeypatch):
    monkeypatch.setattr(viewer, "READ", 64)
    centered = features.double() - features.double().mean(dim=0)
    _, _, vectors = torch.linalg.svd(centered, full_matrices=False)
    expected = (centered @ vectors[:2].T).numpy()
    found = viewer.project(Rows(features, torch.float32))
    for column in (0, 1):
        sign = np.sign(found[:, column] @ expected[:, column])
        np.testing.assert_allclose(found[:, column], sign * expected[:, column], atol=1e-5)
    assert viewer.project(Rows(features[:, :1], torch.float32)).shape == (500, 2)


def test_the_nearest_item(features, monkeypatch):
    scores = features @ features.T
    scores.fill_diagonal_(-2)
    best, expected = scores.max(dim=1)
    row, score = viewer.nearest_items(Rows(3 * features, torch.float32, unit=True))
    np.testing.assert_array_equal(row, expected.numpy())
    np.testing.assert_allclose(score, best.numpy(), atol=1e-6)
    # In cells of similar items most of them are found, and never the item itself.
    monkeypatch.setattr(viewer, "EXACT_SCORES", 1)
    row, score = viewer.nearest_items(Rows(features, torch.float32))
    assert (row == expected.numpy()).mean() > 0.8
    assert (row != np.arange(500)).all() and (score <= best.numpy() + 1e-6).all()
    np.testing.assert_allclose(score, scores[torch.arange(500), torch.from_numpy(row)], atol=1e-6)
    monkeypatch.setattr(viewer, "PROBED", 10_000)
    row, _ = viewer.nearest_items(Rows(features, torch.float32))
    np.testing.assert_array_equal(row, expected.numpy())


def test_the_table_of_an_x_with_several_y(tmp_path, features, monkeypatch):
    monkeypatch.setattr(viewer, "WRITTEN", 7)
    y_to_x = torch.tensor([2, 0, 0, 3, 2, 3, 3, 0, 2, 2])  # the second x has no y
    embeddings = Embeddings(features[:4], features[10:20], y_to_x)
    pairs = weigh_pairs(embeddings, "pairs", "none")
    sides = solve_sides(pairs, 0.1)
    (tmp_path / "texts.txt").write_text("\n".join(f"text {row}" for row in range(10)))
    (tmp_path / "images.txt").write_text("\n".join(f"{row}.jpg" for row in range(4)))
    names = read_names(tmp_path / "texts.txt", tmp_path / "images.txt", 4, y_to_x.tolist())
    viewer.write_viewer(tmp_path / "view.parquet", pairs, sides, names)
    rows = pq.read_table(tmp_path / "view.parquet").to_pylist()
    assert [row["text"] for row in rows] == [f"text {row}" for row in range(10)]
    assert [row["path"] for row in rows] == [f"{x}.jpg" for x in y_to_x.tolist()]
    assert [row["popularity"] for row in rows] == sides["y"].popularity.tolist()
    position = {0: 0, 2: 1, 3: 2}
    assert [row["x_zeta"] for row in rows] == [sides["x"].zeta[position[x]] for x in y_to_x.tolist()]
    assert "uid" not in rows[0]


def test_uids_are_128_bits_in_two_halves(tmp_path):
    uids = [
        "139e4a9b22a614771f06c700a8ebe150",
        "6e356964a967af455c8016b75d691203",
        "ABC",
        "6e356964a967af455c8016b75d691203",
    ]
    pq.write_table(pa.table({"uid": uids}), tmp_path / "0.parquet")
    parsed = keep.parse_uids(StoredTexts([tmp_path / "0.parquet"], "uid"))
    assert parsed.tolist() == [(int(uid, 16) >> 64, int(uid, 16) % 2**64) for uid in uids]
    assert keep.write_uids(tmp_path / "s.npy", parsed) == 3
    subset = np.load(tmp_path / "s.npy")
    assert subset.dtype == np.dtype("u8,u8") and subset.shape == (3,)
    values = [int(high) << 64 | int(low) for high, low in subset.tolist()]
    assert values == sorted({int(uid, 16) for uid in uids})
    # As DataComp's resharder looks a sample up.
    key = np.array([divmod(int(uids[1], 16), 2**64)], np.dtype("u8,u8"))[0]
    assert np.searchsorted(subset, key, "right") - np.searchsorted(subset, key, "left") == 1
    assert keep.write_uids(tmp_path / "empty.npy", parsed[:0]) == 0 and len(np.load(tmp_path / "empty.npy")) == 0


@pytest.mark.parametrize("uid", ["", "xyz", "12 34", "0" * 33, "-1"])
def test_a_wrong_uid_is_named_by_its_row(tmp_path, uid):
    pq.write_table(pa.table({"uid": ["ab", uid]}), tmp_path / "0.parquet")
    with pytest.raises(UserError, match=r"the uid of row 1 is .*; needs up to 32 hexadecimal digits"):
        keep.parse_uids(StoredTexts([tmp_path / "0.parquet"], "uid"))
