"""Columns of vectors, and of a modality that a plugin registers."""

import io
import json
import tracemalloc

import numpy as np
import pytest
import torch

from nuclr.data import BadSample, Loader, Modality, SideChoice, check_samples, open_pairs, register_modality
from nuclr.data.modalities import base
from nuclr.errors import UserError
from tests.data import make

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

VECTORS = [[0.5, 1.0], [2, 3], [0.5, 1], [4.0, 5.0]]


def jsonl(folder, vectors):
    return make.write_lines(folder / "p.jsonl", *({"name": f"n {k}", "embedding": v} for k, v in enumerate(vectors)))


def table(folder, vectors):
    lines = [f'n {k};"{json.dumps(vector) if vector is not None else ""}"' for k, vector in enumerate(vectors)]
    (folder / "p.csv").write_text("\n".join(["name;embedding", *lines, ""]))
    return folder / "p.csv"


def lists(folder, vectors, kind=None):
    kind = kind or pyarrow.list_(pyarrow.float64())
    columns = {"name": [f"n {k}" for k in range(len(vectors))], "embedding": pyarrow.array(vectors, kind)}
    parquet.write_table(pyarrow.table(columns), folder / "p.parquet")
    return folder / "p.parquet"


def fixed_size(folder, vectors):
    return lists(
        folder, [v if v is None or len(v) == 2 else None for v in vectors], pyarrow.list_(pyarrow.float32(), 2)
    )


@pytest.mark.parametrize("write", [jsonl, table, lists, fixed_size])
def test_vectors_of_all_formats(tmp_path, write):
    pairs = open_pairs(write(tmp_path, VECTORS))
    assert (*pairs.modalities, pairs.sides["y"].name) == ("text", "vector", "embedding")
    assert pairs.sides["y"].ids.tolist() == [0, 1, 0, 2] and check_samples(pairs) == {} and pairs.group is None
    (batch,) = Loader(pairs).load([[3, 0]])
    assert batch.y.dtype == torch.float32 and batch.y.tolist() == [[4, 5], [0.5, 1]]
    assert pairs.item("y", 1).tolist() == [2, 3] and pairs.item("y", 1).dtype == np.float32
    assert pairs.fingerprint == open_pairs(jsonl(tmp_path, VECTORS)).fingerprint


@pytest.mark.parametrize("write", [jsonl, table, lists, fixed_size])
def test_bad_vectors_are_named(tmp_path, write):
    nan, inf = float("nan"), float("inf")
    pairs = open_pairs(write(tmp_path, [*VECTORS, [nan, 1], [1, -inf], [1, 2, 3], None, [1e300, 0], *VECTORS]))
    finite, width = "embedding holds a NaN or an infinity", "embedding has 3 numbers; the first one has 2"
    if write is fixed_size:
        width = "no embedding"
    assert pairs.known_bad == {4: finite, 5: finite, 6: width, 7: "no embedding", 8: finite}
    with pytest.raises(BadSample, match="holds a NaN"):
        pairs.items("y", np.array([0, 4]))


def test_bad_vectors_take_no_memory(tmp_path):
    path = make.write_lines(
        tmp_path / "p.jsonl",
        {"name": "a", "embedding": [1] * 100_000},
        *({"name": f"n {k}", "embedding": None} for k in range(500)),
    )
    tracemalloc.start()
    try:
        pairs = open_pairs(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * 2**20  # 200 MB if every bad vector were stored
    assert pairs.known_bad == dict.fromkeys(range(1, 501), "no embedding")
    assert pairs.sides["y"].ids.tolist() == [0] + [1] * 500 and pairs.item("y", 0).tolist() == [1] * 100_000


def test_several_vectors_in_a_row(tmp_path):
    for path in (
        jsonl(tmp_path, [[[1, 2], [3, 4]], [[5, 6]]]),
        lists(tmp_path, [[[1, 2], [3, 4]], [[5, 6]]], pyarrow.list_(pyarrow.list_(pyarrow.float32()))),
    ):
        pairs = open_pairs(path)
        assert pairs.sides["y"].modality.name == "vector" and pairs.sides["x"].ids.tolist() == [0, 0, 1]
        assert pairs.items("y", np.arange(3)).tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("value", [[1, "a"], ["1", "2"], "[1, 2", "[[1], [2]]", "{}", 3, [True, False], [10**400]])
def test_cells_that_are_not_vectors_are_bad_samples(tmp_path, value):
    pairs = open_pairs(jsonl(tmp_path, [[1, 2], value, [3, 4]]), y=SideChoice(modality="vector"))
    assert "is not a list of numbers" in pairs.known_bad[1]


# -- a modality from outside of the package ----------------------------------------------------------------------------


class Waveform(Modality):
    """Waveforms of eight samples, from .npy files or lists of numbers."""

    name = "waveform"

    def read(self, cell, folder):
        if isinstance(cell, np.ndarray):
            return cell.astype(np.float32)
        data = cell if isinstance(cell, bytes) else folder.read(cell)
        return np.load(io.BytesIO(data)).astype(np.float32)

    def check(self, item):
        if item.shape != (8,):
            raise BadSample(f"{len(item)} samples; needs 8")

    def collate(self, items, options=None):
        return torch.from_numpy(np.stack(items))

    def show(self, item):
        return item


@pytest.fixture
def waveform(monkeypatch):
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    register_modality(Waveform())


def write_waveforms(folder):
    for k in range(3):
        np.save(folder / f"{k}.npy", np.full(8, k, "f4"))
    np.save(folder / "short.npy", np.zeros(5))
    (folder / "broken.npy").write_bytes(b"broken")


NAMES = ["0.npy", "1.npy", "2.npy", "short.npy", "broken.npy", "gone.npy", "../other.npy", ""]
REASONS = ["5 samples; needs 8", "cannot be read (", "missing file", "outside data.root", "no "]


@pytest.mark.usefixtures("waveform")
def test_an_own_modality_reads_files_by_name(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    np.save(tmp_path / "other.npy", np.zeros(8))
    write_waveforms(folder)
    rows = [{"wave": name, "text": f"t {k}"} for k, name in enumerate(NAMES)]
    (folder / "p.csv").write_text("wave,text\n" + "".join(f"{row['wave']},{row['text']}\n" for row in rows))
    for path in (make.write_lines(folder / "p.jsonl", *rows), folder / "p.csv"):
        pairs = open_pairs(path, x=SideChoice(modality="waveform"))
        assert (pairs.sides["x"].modality.name, pairs.sides["x"].name, pairs.sides["y"].name) == (
            "waveform",
            "wave",
            "text",
        )
        bad = check_samples(pairs, max_bad_share=1)
        assert list(bad) == [3, 4, 5, 6, 7]
        for reason, start in zip(bad.values(), REASONS, strict=True):
            assert reason.startswith(start)
        (batch,) = Loader(pairs).load([[2, 0]])
        assert batch.x[:, 0].tolist() == [2, 0] and batch.y == ["t 2", "t 0"]
        with pytest.raises(UserError, match=r"sample 5 \(gone\.npy\): missing file"):
            list(Loader(pairs).load([[0, 5]]))


@pytest.mark.usefixtures("waveform")
def test_an_own_modality_reads_numbers_and_bytes(tmp_path):
    rows = [{"wave": list(range(k, k + 8)), "text": f"t {k}"} for k in range(3)]
    pairs = open_pairs(make.write_lines(tmp_path / "p.jsonl", *rows), x=SideChoice(modality="waveform"))
    assert pairs.item("x", 2).tolist() == list(range(2, 10))
    assert pairs.name(2) == "line 3"
    assert check_samples(pairs) == {}
    write_waveforms(tmp_path)
    content = [(tmp_path / name).read_bytes() for name in ("0.npy", "1.npy", "short.npy")]
    parquet.write_table(pyarrow.table({"wave": content, "text": ["a", "b", "c"]}), tmp_path / "p.parquet")
    pairs = open_pairs(tmp_path / "p.parquet", x=SideChoice(modality="waveform"))
    assert pairs.item("x", 1).tolist() == [1] * 8
    assert check_samples(pairs, max_bad_share=1) == {2: "5 samples; needs 8"}


@pytest.mark.usefixtures("waveform")
def test_an_own_modality_is_recognized_if_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(Waveform, "recognize", lambda _, cells: all(str(cell).endswith(".npy") for cell in cells))
    write_waveforms(tmp_path)
    path = make.write_lines(tmp_path / "p.jsonl", {"wave": "0.npy", "text": "a"}, {"wave": "1.npy", "text": "b"})
    assert open_pairs(path).sides["x"].modality.name == "waveform"


@pytest.mark.parametrize(("modality", "error"), [(Waveform, TypeError), (3, TypeError)])
def test_only_modalities_can_be_registered(modality, error):
    with pytest.raises(error, match="needs an object of a class derived from Modality"):
        register_modality(modality)


def test_names_of_modalities_are_checked():
    class Wrong(Waveform):
        name = "Wave form"

    with pytest.raises(ValueError, match=r"modality\.name='Wave form'; needs a lower-case word"):
        register_modality(Wrong())
    with pytest.raises(ValueError, match="modality 'sound'; allowed: image, text, vector"):
        base.get_modality("sound")
