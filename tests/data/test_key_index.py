"""An index of keys: stable numbers, a memory-mapped file, clear errors."""

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from nuclr.data import KeyIndex, key_index
from nuclr.data.key_index import UnknownKeyError
from nuclr.errors import UserError

KEYS = [f"shard/{number:09d}" for number in range(1000)]


@pytest.fixture
def index(tmp_path):
    return KeyIndex.write(tmp_path / "a.keys", KEYS)


def test_numbers_are_a_permutation_and_16_bytes_each(index):
    numbers = index.numbers(KEYS)
    assert numbers.dtype == np.int64
    assert sorted(numbers.tolist()) == list(range(1000)) and len(index) == 1000
    assert index.path.stat().st_size == 64 + 16 * 1000
    assert index[KEYS[7]] == numbers[7]
    assert KEYS[7] in index and "shard/1" not in index and 7 not in index


def test_numbers_do_not_depend_on_the_order(index, tmp_path):
    other = KeyIndex.write(tmp_path / "b.keys", reversed(KEYS))
    assert other.path.read_bytes() == index.path.read_bytes()


def test_extending_keeps_numbers(index, tmp_path):
    more = [f"new/{number}" for number in range(300)]
    longer = KeyIndex.write(tmp_path / "b.keys", more, extend=index)
    assert np.array_equal(longer.numbers(KEYS), index.numbers(KEYS))
    assert sorted(longer.numbers(more).tolist()) == list(range(1000, 1300))
    # the old keys may be passed again, and the new index may take the old one's place
    again = KeyIndex.write(index.path, more + KEYS[::-1], extend=index)
    assert again.path.read_bytes() == longer.path.read_bytes()
    assert np.array_equal(index.numbers(KEYS), longer.numbers(KEYS))  # still mapped, although its file was replaced


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(), unique=True, min_size=1, max_size=30), st.lists(st.text(), unique=True, max_size=30))
def test_any_text_is_a_key(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("keys")
    index = KeyIndex.write(folder / "a", first)
    longer = KeyIndex.write(folder / "b", second, extend=index)
    expected = {key: index[key] for key in first}
    assert all(longer[key] == number for key, number in expected.items())
    assert len(longer) == len({*first, *second})
    assert sorted(longer.numbers({*first, *second}).tolist()) == list(range(len(longer)))


def test_keys_that_agree_in_64_bits_are_distinguished(tmp_path, monkeypatch):
    def weak(key: str) -> bytes:  # every fourth key has the same 64 bits, and all differ in the others
        number = int(key)
        return struct.pack("<QQ", number % 4, number << 40)

    monkeypatch.setattr(key_index, "_digest", weak)
    keys = [str(number) for number in range(40)]
    index = KeyIndex.write(tmp_path / "a", keys)
    assert sorted(index.numbers(keys).tolist()) == list(range(40))
    assert "41" not in index and "44" not in index


def test_the_same_hash_for_two_keys_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(key_index, "_digest", lambda key: struct.pack("<QQ", len(key), 0))
    with pytest.raises(UserError, match="position 2: key 'cc' has the same hash as key 'bb' of position 1; rename one"):
        KeyIndex.write(tmp_path / "a", ["a", "bb", "cc"])
    assert not (tmp_path / "a").exists()


def test_repeated_keys_are_reported(tmp_path):
    with pytest.raises(UserError, match="key 'b' occurs in position 1 and in position 3; every sample needs a key"):
        KeyIndex.write(tmp_path / "a", iter(["a", "b", "c", "b"]))
    with pytest.raises(UserError, match="; 2 keys occur more than once"):
        KeyIndex.write(tmp_path / "a", ["a", "b", "a", "b"])
    with pytest.raises(UserError, match="there are no keys"):
        KeyIndex.write(tmp_path / "a", [])
    assert not any(tmp_path.iterdir())


def test_an_unknown_key_is_named(index):
    with pytest.raises(UserError, match=r"a.keys: no key 'cat'; add it with `nuclr index SOURCE --extend .*a.keys"):
        index["cat"]
    with pytest.raises(KeyError) as raised:
        index.numbers([KEYS[0], "cat", "dog"])
    assert "no key 'cat' (2 of these 3 keys are not in the index)" in str(raised.value)
    assert isinstance(raised.value, UnknownKeyError)
    with pytest.raises(UserError, match=r"a key must be a text, but is 7 of type int; convert it with str\(\)"):
        index.numbers([7])


def test_keys_with_their_tar(tmp_path):
    keys = [(f"{tar}.tar/{key}", tar) for tar in ("0", "1") for key in ("a", "b")]
    index = key_index.write_entries(tmp_path / "a", lambda: keys, with_tar=True)
    urls = ["s3://bucket/0.tar", "0.tar", "pipe:cat /data/1.tar", "/data/1.tar"]
    assert sorted(index.numbers(["a", "b", "a", "b"], urls).tolist()) == [0, 1, 2, 3]
    assert index.numbers(["a"], urls[:1])[0] == index["0.tar/a"]
    with pytest.raises(UserError, match=r"no key 'a'; it was made with --with-tar; pass the tars .* tars=urls"):
        index.numbers(["a"])


class Numbered(Dataset):
    def __init__(self, index):
        self.index = index

    def __len__(self):
        return len(KEYS)

    def __getitem__(self, position):
        return self.index[KEYS[position]]


def test_workers_open_the_same_file(index):
    copy = pickle.loads(pickle.dumps(index))
    assert np.array_equal(copy.numbers(KEYS), index.numbers(KEYS))
    loader = DataLoader(Numbered(index), batch_size=100, num_workers=2, multiprocessing_context="spawn")
    assert np.array_equal(np.concatenate([batch.numpy() for batch in loader]), index.numbers(KEYS))


def test_bytes_that_are_not_utf8_are_the_same_key_in_both_spellings(tmp_path):
    """Python's tarfile gives lone surrogates, our reader of tars the replacement character."""
    index = KeyIndex.write(tmp_path / "a", ["caf\N{REPLACEMENT CHARACTER}"])
    assert "caf\udce9" in index
    assert "\ud800" not in index


# Damaged files


def damaged(path, position, value):
    content = bytearray(path.read_bytes())
    content[position : position + len(value)] = value
    path.write_bytes(content)
    return path


def test_damage_is_reported(index):
    whole = index.path.read_bytes()
    with pytest.raises(UserError, match="the checksum does not match; write it again with `nuclr index SOURCES --out"):
        KeyIndex.open(damaged(index.path, 64 + 8 * 1000 + 3, b"\xff\xff"))
    assert len(KeyIndex.open(index.path, verify=False)) == 1000
    index.path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="damaged: 16,063 bytes do not hold 1,000 keys"):
        KeyIndex.open(index.path)
    index.path.write_bytes(whole[:40])
    with pytest.raises(UserError, match="truncated"):
        KeyIndex.open(index.path)
    index.path.write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(UserError, match="not an index of keys; `nuclr index` writes one"):
        KeyIndex.open(index.path)
    index.path.write_bytes(whole)
    with pytest.raises(UserError, match="version 7 of the format, but this version of nuclr reads version 1"):
        KeyIndex.open(damaged(index.path, 8, struct.pack("<I", 7)))
    with pytest.raises(UserError, match="nothing: cannot be read"):
        KeyIndex.open(index.path.with_name("nothing"))


def test_a_number_out_of_range_is_not_returned(index):
    damaged(index.path, 64 + 8 * 1000, b"\xff\xff\xff\xff\xff" * 1)
    broken = KeyIndex.open(index.path, verify=False)
    with pytest.raises(UserError, match="damaged: number 1099511627775 of 1,000 keys"):
        broken.numbers(KEYS)


def test_a_file_that_cannot_be_written_is_named(index, tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        KeyIndex.write(tmp_path / "no" / "folder.keys", KEYS)


def test_repr_is_one_line(index):
    assert repr(index) == f"KeyIndex('{index.path}', 1,000 keys)"
