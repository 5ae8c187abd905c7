"""Properties of the readers of untrusted files: whatever a file holds gives a result that is right, or one clear error.

`benchmarks/fuzz.py` damages valid files of every format. Here hypothesis makes up the content.
"""

import io
import json
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save

from nuclr import files
from nuclr.data import open_pairs, read_keep, usable
from nuclr.data.selection import check_samples
from nuclr.errors import UserError
from nuclr.popularity import PopularityCorrection
from nuclr.popularity.correction import FORMAT
from nuclr.runs import checkpoint, config
from nuclr.runs.folder import TrainedRun

quick = settings(derandomize=True, database=None, deadline=None, max_examples=40)

texts = st.text(max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
trees = st.recursive(
    scalars, lambda below: st.lists(below, max_size=3) | st.dictionaries(texts, below, max_size=3), max_leaves=8
)
arrays = hnp.arrays(
    st.sampled_from(["f2", "f4", "f8", ">f4", "i8", "u1", "?"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def splice(content, changes):
    """Replace bytes at positions that are given as parts of the length."""
    content = bytearray(content)
    for place, new in changes:
        at = int(place * len(content))
        content[at : at + len(new)] = new
    return bytes(content)


damage = st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=8)), min_size=1, max_size=3)


@quick
@given(st.binary() | trees.map(lambda tree: json.dumps(tree).encode()))
def test_json_is_parsed_or_refused_with_one_type_of_error(data):
    try:
        content = files.parse_json(data)
    except json.JSONDecodeError:
        return
    assert content == json.loads(data) or "NaN" in str(data)


@quick
@given(arrays)
def test_arrays_of_numbers_are_read_as_they_were_written(folder, array):
    path = folder / "written.npy"
    path.write_bytes(npy(array))
    read = files.read_npy(path)
    assert read.dtype == array.dtype and np.array_equal(read, array, equal_nan=array.dtype.kind == "f")


@quick
@given(arrays, damage, st.booleans())
def test_damaged_arrays_are_refused_or_no_larger_than_the_file(folder, array, changes, in_archive):
    content = npy(array)
    if in_archive:
        file = io.BytesIO()
        np.savez(file, x=array)
        content = file.getvalue()
    path = folder / ("a.npz" if in_archive else "a.npy")
    path.write_bytes(splice(content, changes))
    try:
        read = files.read_npz(path, ["x"]).get("x", np.empty(0)) if in_archive else files.read_npy(path)
    except UserError as error:
        assert str(path) in str(error)
        return
    assert read.nbytes <= path.stat().st_size


@quick
@given(trees)
def test_records_are_whole_or_refused(folder, tree):
    path = folder / "results.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"results\.json"):
        files.read_record(TrainedRun, path, folder=folder)
    assert files.read_object(path) == tree or not isinstance(tree, dict) or "nan" in str(tree)


@quick
@given(st.sampled_from(list(vars(checkpoint.Checkpoint)["__dataclass_fields__"])), trees)
def test_checkpoints_with_other_content_are_checkpoints_or_refused(folder, key, tree):
    content = {"version": "1", "position": {"epoch": 3}, "model": {"a": torch.ones(2)}, "objective": {}}
    content |= {"optimizer": {}, "window": {}, "best": 0.5, "metrics_bytes": 0, "data": {}}
    path = folder / "step_000000001.pt"
    torch.save(content | {key: tree}, path)
    try:
        loaded = checkpoint.load(path)
    except checkpoint.BadCheckpoint as error:
        assert str(path) in str(error)
        return
    assert min([0, loaded.metrics_bytes, *loaded.position.values()]) >= 0
    assert all(isinstance(tensor, torch.Tensor) for tensor in [*loaded.model.values(), *loaded.objective.values()])


@quick
@given(st.sampled_from(["temperature", "strength", "prior", "normalize", "bank_size", "scales", "arguments"]), trees)
def test_corrections_with_other_settings_are_finite_or_refused(folder, key, tree):
    path = folder / "fix.safetensors"
    fix = PopularityCorrection(0.5).fit(torch.eye(3), torch.eye(3), items=True)
    fix.save(path)
    content = {"arguments": fix.get_params(), "scales": [[0.5, 1.0]]}
    (content if key in content else content["arguments"])[key] = tree
    path.write_bytes(save(load_file(path), {FORMAT: json.dumps(content)}))
    try:
        fix = PopularityCorrection.load(path)
    except UserError as error:
        assert str(path) in str(error)
        return
    assert bool(fix.bias(torch.eye(3)).isfinite().all())


@quick
@given(trees.map(json.dumps) | texts)
def test_settings_are_keys_and_values_or_refused(folder, text):
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        assert isinstance(config.read(path), dict)
    except UserError as error:
        assert str(path) in str(error)


@quick
@given(st.lists(st.integers(-3, 30).map(str) | texts, max_size=5))
def test_lists_of_pairs_to_keep_are_numbers_of_pairs_or_refused(folder, lines):
    path = folder / "keep.txt"
    path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    try:
        numbers = read_keep(path, 20)
    except UserError as error:
        assert str(path) in str(error)
        return
    assert len(numbers) and numbers.min() >= 0 and numbers.max() < 20 and (np.diff(numbers) > 0).all()


@quick
@given(st.lists(texts.filter(lambda text: "\n" not in text), max_size=5))
def test_lines_are_read_as_they_were_written(folder, lines):
    path = folder / "names.txt"
    files.write_text(path, "".join(f"{line}\n" for line in lines))
    assert files.read_lines(path) == lines


@quick
@given(st.text())
def test_cells_of_tables_are_no_formulas(text):
    cell = files.csv_cell(text)
    assert cell in (text, f"'{text}")
    assert not cell.startswith(("=", "@", "\t", "\r"))
    assert not cell.startswith(("+", "-")) or float(cell) is not None  # a number


@quick
@given(st.lists(st.dictionaries(st.sampled_from(["question", "answer", "x"]), trees, max_size=3), max_size=4))
def test_lists_of_pairs_have_a_row_per_entry_or_are_refused(entries):
    check_pairs("pairs.jsonl", "".join(f"{json.dumps(entry)}\n" for entry in entries).encode())


@quick
@given(st.dictionaries(st.sampled_from(["a", "b", "../c"]), trees, min_size=1), texts)
def test_tars_are_pairs_or_refused(entries, text):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, tree in entries.items():
            for suffix, content in (("json", json.dumps(tree)), ("txt", text)):
                data = content.encode("utf-8", "replace")
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    check_pairs("00000.tar", file.getvalue())


def check_pairs(name, content):
    """Open a file of pairs and check all samples, in a folder of its own because of the caches."""
    with tempfile.TemporaryDirectory() as new:
        path = Path(new, name)
        path.write_bytes(content)
        try:
            pairs = open_pairs(path)
            numbers = usable(pairs, check_samples(pairs, max_bad_share=1.0, workers=1))
        except UserError as error:
            assert new in str(error)
            return
        for number in numbers.tolist():
            x, y = pairs[number]
            assert x and y
