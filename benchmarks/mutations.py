"""Damage files at random, by bytes and by structure. `benchmarks/fuzz.py` feeds the results to our readers.

`mutate(rng, name, data)` returns damaged content for a file of this name. Half of the mutations change bytes without
knowing the format. The others know it: they replace a value in JSON, YAML, CSV, Arrow or npz by an odd one, or change a
field of a tar, PNG, JPEG or safetensors header and keep lengths and checksums right, so that damage reaches the code
behind them.
"""

import csv
import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]

# Numbers at which lengths and offsets overflow.
LIMITS = [0, 1, 7, 127, 255, 256, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48]
LIMITS += [2**63 - 1, 2**63, 2**64 - 1]
NESTED, DIGITS = "@nested@", "@digits@"
TEXTS = [
    "", " ", "\t", "\n", "0", "-1", "1e999", "nan", "None", "true", "a\x00b", "\ufeff", "\ud800", "\udfff\ud800",
    "a\x1b[31mb\x1b]0;title\x07", "\u202etxt.gpj", "=1+1", "-cmd|' /C calc'!A0", "{}", "{0}", "%s",
    "x" * 300, "x" * 5000,
    "../../../../../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", "/dev/stdin", "pipe.jpg", ".", "..",
    "folder", "folder/", "a.jpg/", "a.jpg/b", "\\a.jpg", "file:///etc/passwd", "http://127.0.0.1:9/a.jpg", "~/a.jpg",
    "<script>alert(1)</script>", "a" * 256 + ".jpg", "é" * 200, "\U0001f600", NESTED, DIGITS,
]  # fmt: skip
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, -1e-320, float("nan"), float("inf")]
VALUES += [2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, [], {}, [[]], [None], [1, "a"], {"": None}, {"a": {"b": []}}]
VALUES += [[0] * 3, ["a", "b"], [{}], {"image": "a.jpg"}, {"bytes": None, "path": None}]
ODD_VECTORS: list[Any] = [[], [0.0], [0.5] * 4, [0.5] * 5, [1e39] * 4, [1e308] * 4, [float("nan")] * 4, [10**400] * 4]
ODD_VECTORS += [[1, None, 2, 3], [1, "2", 3, 4], [True] * 4, [[0.5] * 4] * 2, [[1, 2], [3]], [[[1.0]]], [0] * 10_000]
VALUES += ODD_VECTORS


def mutate(rng: random.Random, name: str, data: bytes) -> bytes:
    """Return damaged content for a file with this name; its suffix selects the mutations that know its format."""
    structured = STRUCTURED.get(PurePath(name).suffix.lower(), [])
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        mutation = rng.choice(structured) if structured and rng.random() < 0.6 else change_bytes
        try:
            data = mutation(rng, data)
        except Exception:  # an earlier mutation has destroyed the structure
            data = change_bytes(rng, data)
    return data


# -- bytes -------------------------------------------------------------------------------------------------------------


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, overwrite, insert, remove, repeat or move bytes, or truncate."""
    if not data:
        return rng.randbytes(rng.randrange(40))
    content = bytearray(data)
    # Headers are at the beginning, and in some formats at the end.
    places = [
        rng.randrange(len(content)),
        rng.randrange(min(len(content), 64)),
        len(content) - 1 - rng.randrange(min(len(content), 64)),
    ]
    at, length = rng.choice(places), rng.choice([1, 1, 2, 4, 8, 16, 64, 512])
    kind = rng.randrange(12)
    if kind == 0:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        content[at] = rng.choice([0, 1, 9, 10, 32, 34, 44, 48, 57, 91, 93, 123, 125, 127, 128, 192, 255])
    elif kind == 2:
        content[at : at + length] = rng.randbytes(length)
    elif kind == 3:
        del content[at : at + length]
    elif kind == 4:
        content[at:at] = rng.randbytes(length)
    elif kind == 5:
        content[at:at] = content[at : at + length] * rng.choice([1, 2, 50])
    elif kind == 6:
        del content[at:]
    elif kind in (7, 8):
        width, order = rng.choice([1, 2, 4, 8]), rng.choice(["little", "big"])
        number = (rng.choice(LIMITS) + rng.choice([-1, 0, 0, 1])) % 2 ** (8 * width)
        content[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
    elif kind == 9:
        other = rng.randrange(len(content))
        content[at : at + length] = content[other : other + length]
    elif kind == 10:
        content[at : at + length] = bytes([rng.choice([0, 255])]) * length
    else:
        content += rng.choice([b"\0" * 512, rng.randbytes(100), bytes(content[:200]), b"\n"])
    return bytes(content[: 2 * len(data) + 4096])


# -- JSON, YAML, CSV ---------------------------------------------------------------------------------------------------


def odd_value(rng: random.Random) -> Any:
    """Return a value that programs rarely expect."""
    return rng.choice(TEXTS) if rng.random() < 0.5 else rng.choice(VALUES)


def change_tree(rng: random.Random, tree: Any) -> Any:
    """Replace, remove, add or rename one value of nested dicts and lists."""
    spots: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []:
            spots.append((node, key))
            visit(node[key])

    visit(tree)
    if not spots or rng.random() < 0.03:
        return odd_value(rng)
    # Values near the root are as likely as the many at the leaves.
    node, key = spots[min(rng.randrange(len(spots)), rng.randrange(len(spots)))]
    kind = rng.randrange(8)
    if kind < 4:
        node[key] = odd_value(rng)
    elif kind == 4:
        del node[key]
    elif kind == 5 and isinstance(node, dict):
        node[str(rng.choice([*TEXTS, key, *node]))] = node.pop(key)
    elif kind == 6:
        other, name = rng.choice(spots)
        node[key] = (
            json.loads(json.dumps(other[name]))
            if name in (other if isinstance(other, dict) else range(len(other)))
            else None
        )
    elif isinstance(node, list):
        node.insert(key, rng.choice([odd_value(rng), node[key]]))
    else:
        node[str(rng.choice(TEXTS))] = odd_value(rng)
    return tree


def _expand(rng: random.Random, text: str) -> bytes:
    deep = rng.choice([30, 2000, 100_000])
    text = text.replace(f'"{NESTED}"', "[" * deep + "]" * deep).replace(f'"{DIGITS}"', rng.choice("-1") + "7" * 5000)
    return text.encode("utf-8", rng.choice(["surrogatepass", "replace"]))


def change_json(rng: random.Random, data: bytes) -> bytes:
    return _expand(rng, json.dumps(change_tree(rng, json.loads(data)), ensure_ascii=rng.random() < 0.7))


def change_json_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind < 3:
        lines[at] = change_json(rng, lines[at])
    elif kind == 3:
        lines[at] = rng.choice([b"", b"null", b"[]", b"7", b"{", b'"', b"\xff", b"{}", b"NaN", b"\0", lines[at][:-1]])
    elif kind == 4:
        lines.insert(at, lines[rng.randrange(len(lines))])
    else:
        return rng.choice([b"\r\n", b"\r", b"\n\n", b"", b"\x85", b"\xe2\x80\xa8"]).join(lines)
    return b"\n".join(lines)


YAML_PARTS = [
    "a: &a [x, x]\nb: &b [*a, *a]\nname: *b", "? [a, b]\n: 1", "<<: {name: x}",
    "name: !!python/object/apply:os.system [ls]",
    "name: !!binary aGk=", "name: !!timestamp 2001-01-01", "name: 2001-01-01", "1: 2", "null: 1", "seed: 1:30:00",
    "seed: 0o17",
    "seed: 1e3", "seed: .inf", "seed: .nan", "\tname: x", "- a", "---\nname: b", "%YAML 9.9\n---", "name: 'x",
    "name: \"\\ud800\"",
    "data: {train: [}", "{" * 3000, "[" * 20000, "a: " * 2000, "name: |\n  x", "name: *missing", "data: &d {train: *d}",
    "*a : 1", "!!set {a, b}", "name: \x07", "seed: " + "7" * 5000, "objective: {name: {}}", "data: []", "plugins: 3",
    "plugins: [[]]",
    "? {a: b}\n: c", "name: !!float x", "name: !!int x", "seed: 0b", "seed: 0x", "seed: 1_000", "seed: _",
    "model: {x: 3}", "log:\n",
    "name: !!timestamp x", "name: 2001-99-99", "name: !!bool maybe", "!!omap [a: 1]", "!!pairs [a]", "a: !!null x",
    "name: !!str [a]",
]  # fmt: skip


def change_yaml(rng: random.Random, data: bytes) -> bytes:
    import yaml

    kind = rng.randrange(3)
    if kind == 0:
        return yaml.safe_dump(change_tree(rng, yaml.safe_load(data)), allow_unicode=True).encode("utf-8", "replace")
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    if kind == 1:
        lines.insert(at, rng.choice(YAML_PARTS).encode())
    else:
        key = lines[at].partition(b":")[0]
        lines[at] = key + b": " + str(odd_value(rng)).encode("utf-8", "replace")
    return b"\n".join(lines)


def odd_cell(rng: random.Random) -> str:
    """Return an odd value as text; a list of numbers is a vector."""
    if rng.random() < 0.2:
        return json.dumps(rng.choice(ODD_VECTORS))
    deep = rng.choice([30, 2000, 50_000])
    cell = str(odd_value(rng)).replace(NESTED, "[" * deep + "]" * deep)
    return cell.replace(DIGITS, rng.choice(["", "["]) + "7" * 5000)


def change_csv(rng: random.Random, data: bytes, separator: str = ",") -> bytes:
    rows = list(csv.reader(io.StringIO(data.decode(), newline=""), delimiter=separator))
    row = rng.choice(rows)
    at = rng.randrange(len(row) + 1)
    kind = rng.randrange(5)
    if kind < 2:
        row[at : at + 1] = [odd_cell(rng)]
    elif kind == 2:
        row.insert(at, odd_cell(rng))
    elif kind == 3:
        del row[at:]
    else:
        row[:] = [rng.choice(['"', '"x', "x\n", "\r", "\0", "'", ";", "\t", "x" * 140_000]) for _ in row]
    file = io.StringIO(newline="")
    delimiter = rng.choice([*[separator] * 5, *";\t| "])
    writer = csv.writer(file, delimiter=delimiter, quoting=rng.choice([0, 1]), escapechar="\\")
    writer.writerows(rows)
    return file.getvalue().encode("utf-8", rng.choice(["replace", "surrogatepass"]))


def change_tsv(rng: random.Random, data: bytes) -> bytes:
    return change_csv(rng, data, "\t")


def change_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    lines[rng.randrange(len(lines))] = str(odd_value(rng)).encode("utf-8", "replace")
    return rng.choice([b"\n", b"\n", b"\r", b"\x0c", b"\xe2\x80\xa8", b" "]).join(lines)


# -- archives and arrays -----------------------------------------------------------------------------------------------


def change_zip(rng: random.Random, data: bytes) -> bytes:
    """Damage one member of an npz and store it again, so that its checksum is right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(members))
    kind = rng.randrange(6)
    if kind == 0:
        members[rng.choice(["x.npy", "y.npy", "z", "../x.npy", "x", "labels.npy", ""])] = members.pop(name)
    elif kind == 1:
        del members[name]
    elif kind == 2:
        members[name] = rng.choice([members[rng.choice(list(members))], b"", b"text", rng.randbytes(200)])
    elif kind == 3:
        members[name] = change_bytes(rng, members[name])
    else:
        members[name] = change_npy(rng, members[name])
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    ) as archive:
        for key, content in members.items():
            archive.writestr(key, content)
    return file.getvalue()


def change_npy(rng: random.Random, data: bytes) -> bytes:
    """Change dtype, order or shape in the header of an array, or store another array."""
    import numpy as np

    if rng.random() < 0.4:
        kinds = ["f2", "f4", "f8", "i1", "i8", "u8", "c8", "?", "U3", "S5", "M8[s]", "m8", "V7", ">f4", "f4,i4", "g"]
        shape = rng.choice([(), (0,), (1,), (7,), (0, 3), (3, 0), (2, 3), (2, 2, 2), (1,) * 32, (6, 4)])
        array = np.zeros(shape, rng.choice(kinds))
        if array.dtype.kind in "fc" and array.size and rng.random() < 0.7:
            array.flat[0] = rng.choice([np.nan, np.inf, 1e30, -1e-40, 1.0])
        file = io.BytesIO()
        np.save(file, array)
        return file.getvalue()
    (length,) = struct.unpack_from("<H", data, 8)
    header = data[10 : 10 + length].decode()
    body = data[10 + length :]
    before = header[header.index("'shape'") : header.index(")") + 1]
    numbers = ", ".join(str(rng.choice([*LIMITS, -1, 3, "True", "1.5", "10**9"])) for _ in range(rng.randrange(1, 4)))
    header = rng.choice([
        header.replace(before, f"'shape': ({numbers},)"),
        header.replace("<f4", rng.choice(["|O", "<f16", "<U1000000000", "<V9", "f4, (2,)", "x", "<i8", "('a','b')"])),
        header.replace("False", rng.choice(["True", "None", "7", "[" * 300 + "]" * 300])),
        header.replace("'shape'", rng.choice(["'shap'", "'descr'", "1"])),
        change_bytes(rng, header.encode()).decode("latin1"),
    ])  # fmt: skip
    version = rng.choice([b"\x01\x00"] * 5 + [b"\x02\x00", b"\x09\x09"])
    return data[:6] + version + struct.pack("<H", min(len(header), 65535)) + header.encode("latin1") + body


def change_safetensors(rng: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = change_json(rng, data[8 : 8 + length])
    if rng.random() < 0.3:
        old = rng.choice([b"F32", b"I64"])
        header = header.replace(old, rng.choice([b"F64", b"I8", b"BOOL", b"F8_E4M3", b"BF16", b"F16", b"U64", b"C64"]))
    return struct.pack("<Q", len(header) + rng.choice([0] * 9 + [1, -1, 2**40])) + header + data[8 + length :]


def change_checkpoint(rng: random.Random, data: bytes) -> bytes:
    """Replace a value or a tensor of a file of torch.save."""
    import torch

    content = torch.load(io.BytesIO(data), weights_only=True)
    if rng.random() < 0.5:
        content = change_tree(rng, content)
    else:
        tensors = content[rng.choice(["model", "objective"])]
        name = rng.choice(list(tensors))
        tensor = tensors[name]
        tensors[name] = rng.choice([
            torch.full(tensor.shape, rng.choice([float("nan"), float("inf"), 1e30, -1e30, 0.0])),
            tensor.to(rng.choice([torch.float64, torch.float16, torch.complex64, torch.int8, torch.bool])),
            tensor[None], tensor.flatten()[:1], torch.zeros(0), torch.zeros(()), torch.zeros(1).expand(2**50),
            torch.eye(3).to_sparse(), torch.zeros(tensor.shape, device="meta"),
        ])  # fmt: skip
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def change_tar(rng: random.Random, data: bytes) -> bytes:
    """Change a member, or a field of its header with the checksum kept right."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive if member.isfile()]  # type: ignore[union-attr]
        offsets = [member.offset for member in archive.getmembers()]
    kind = rng.randrange(8)
    at = rng.randrange(len(members))
    if kind < 3:
        field = rng.choice(
            [(0, 100), (100, 8), (124, 12), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155)]
        )
        odd = [
            b"-1",
            b"77777777777",
            b"\x80" + b"\xff" * 11,
            b"\xff" * 12,
            b"\x80" + bytes(7) + b"\x7f\xff\xff\xff",
            b"9",
            b"",
            b"L",
        ]
        odd += [
            b"x",
            b"g",
            b"K",
            b"S",
            b"1",
            b"2",
            b"3",
            b"5",
            b"6",
            b"7",
            b"a\x00/",
            b"../../a.jpg",
            b"/etc/passwd",
            b"40000000000",
        ]
        content = bytearray(data)
        start = rng.choice(offsets)
        content[start + field[0] : start + sum(field)] = rng.choice(odd)[: field[1]].ljust(field[1], b"\0")
        content[start + 148 : start + 156] = b" " * 8
        content[start + 148 : start + 156] = b"%06o\0 " % sum(content[start : start + 512])
        return bytes(content)
    if kind == 3:
        members[at][0].pax_headers = {
            rng.choice(["path", "size", "mtime", "GNU.sparse.map", "GNU.sparse.size", "hdrcharset", "linkpath",
            "comment"]):
            rng.choice(["-1", "99999999999999", "x", "", "a\x00b", "1,2,3", "é" * 300, "../../../a", "0"])
        }  # fmt: skip
    elif kind == 4:
        member, content_of = members[at]
        changed = (
            change_json
            if member.name.endswith(".json")
            else change_lines
            if member.name.endswith(".txt")
            else change_npy
            if member.name.endswith(".npy")
            else change_bytes
        )
        members[at] = (member, changed(rng, content_of))
    elif kind == 5:
        members[at][0].name = str(rng.choice(TEXTS)).replace("\0", "") + rng.choice(
            ["", ".jpg", ".json", ".txt", ".answer.txt", ".npy", "/"]
        )
    elif kind == 6:
        members.insert(at, members[rng.randrange(len(members))])
    else:
        members[at][0].type = rng.choice(
            [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE]
        )
        members[at][0].linkname = rng.choice(["/etc/passwd", "a.jpg", members[at][0].name, ""])
    file = io.BytesIO()
    form = rng.choice([tarfile.PAX_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
    with tarfile.open(fileobj=file, mode="w", format=form, errors="surrogateescape") as archive:
        for member, content_of in members:
            member.size = len(content_of) if member.isfile() else 0
            archive.addfile(member, io.BytesIO(content_of))
    result = file.getvalue()
    if kind == 3 and rng.random() < 0.5:  # the length in front of a PAX record
        result = result.replace(b" path=", b"9 path=", 1).replace(b" size=", rng.choice([b"0 size=", b"- size="]), 1)
    return result


def _odd_columns(rng: random.Random, rows: int, present: list[str]) -> dict[str, Any]:
    import pyarrow as pa

    offsets = pa.py_buffer(struct.pack(f"<{rows + 1}i", *range(rows + 1)))
    not_utf8 = pa.Array.from_buffers(pa.string(), rows, [None, offsets, pa.py_buffer(b"\xff" * rows)])

    def column() -> Any:
        return rng.choice([
            pa.nulls(rows), pa.array(range(rows)), pa.array([0.5] * rows), pa.array([[]] * rows, pa.list_(pa.string())),
            pa.array([["a", None]] * rows), pa.array([[["a"]]] * rows),
            pa.array([{"bytes": None, "path": None}] * rows),
            pa.array([{"bytes": b"\xff\xd8", "path": "a.jpg"}] * rows), pa.array([{"path": 3}] * rows),
            pa.array([True] * rows),
            pa.array([b"\xff\xfe"] * rows),
            pa.array(["a.jpg", None] * rows)[:rows], pa.array([{}] * rows, pa.struct([])),
            pa.array(["a"] * rows, pa.large_string()), pa.array(["a.jpg"] * rows).dictionary_encode(),
            pa.array([b"ab"] * rows, pa.binary(2)), pa.array([1] * rows, pa.timestamp("s")),
            pa.array([[("a", 1)]] * rows, pa.map_(pa.string(), pa.int8())),
            pa.array(["\x1b[31m"] * rows), pa.array(["/dev/zero"] * rows), pa.array(["pipe.jpg"] * rows),
            pa.array(["../../a"] * rows),
            pa.array([{"bytes": b"", "path": "/etc/passwd"}] * rows), pa.array([{"src": "x"}] * rows),
            pa.array([b"a.jpg"] * rows, pa.large_binary()),
            not_utf8,
            pa.array([[0.5, 1.0]] * rows), pa.array([[0.5, None]] * rows), pa.array([[1, 2], []] * rows)[:rows],
            pa.array([[0.5, 1.0], None] * rows)[:rows], pa.array([[1e39, float("nan")]] * rows),
            pa.array([[0.5] * 3] * rows, pa.list_(pa.float32(), 3)), pa.array([None] * rows, pa.list_(pa.float32(), 3)),
            pa.array([[0.5]] * rows, pa.list_(pa.float16())), pa.array([[1]] * rows, pa.large_list(pa.uint64())),
            pa.array([[]] * rows, pa.list_(pa.float32(), 0)), pa.array([[[0.5], [1.0, 2.0]]] * rows),
            pa.array([[[[0.5]]]] * rows), pa.array([[True, False]] * rows), pa.array(["[0.5, 1]"] * rows),
            pa.array([["[1]", "[2]"]] * rows), pa.array(["a"] * rows, pa.string_view()),
            pa.array([b"a"] * rows, pa.binary_view()), pa.array([[0.5]] * rows, pa.list_view(pa.float32())),
        ])  # fmt: skip

    usual = ["image", "caption", "captions", "title", "filepath", "a\0b", "", "\x1b[0m", "é"]
    names = rng.sample([*usual, *present, *present], rng.randrange(1, 5))
    return {name: column() for name in names}


def change_parquet(rng: random.Random, data: bytes) -> bytes:
    """Replace columns by others of odd types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data))
    columns = {name: table[name] for name in table.column_names} | _odd_columns(rng, len(table), table.column_names)
    if rng.random() < 0.1:
        columns = {name: column[:0] for name, column in columns.items()}
    file = io.BytesIO()
    pq.write_table(
        pa.table(columns), file, row_group_size=2, compression=rng.choice(["none", "snappy", "gzip", "zstd"])
    )
    return file.getvalue()


def change_arrow(rng: random.Random, data: bytes) -> bytes:
    import pyarrow as pa

    table = pa.ipc.open_stream(data).read_all()
    columns = {name: table[name] for name in table.column_names} | _odd_columns(rng, len(table), table.column_names)
    changed = pa.table(columns)
    file = io.BytesIO()
    keep = rng.random() < 0.5  # the schema that the dataset describes, or not
    with pa.ipc.new_stream(file, changed.schema.with_metadata(table.schema.metadata if keep else None)) as writer:
        writer.write_table(changed.replace_schema_metadata(table.schema.metadata if keep else None))
    return file.getvalue()


# -- images ------------------------------------------------------------------------------------------------------------


def change_png(rng: random.Random, data: bytes) -> bytes:
    """Change one chunk, with its checksum right."""
    chunks, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += length + 12
    at = rng.choice([0, rng.randrange(len(chunks))])
    kind, body = chunks[at]
    if kind == b"IHDR" and rng.random() < 0.8:
        width, height = (rng.choice([0, 1, 7, 24, 2**15, 13_000, 2**31 - 1]) for _ in range(2))
        body = struct.pack(
            ">IIBBBBB",
            width,
            height,
            rng.choice([1, 2, 4, 8, 16, 3]),
            rng.choice([0, 2, 3, 4, 6, 5]),
            0,
            0,
            rng.choice([0, 1, 9]),
        )
    elif kind == b"IDAT" and rng.random() < 0.5:
        body = zlib.compress(rng.choice([b"", bytes(10), bytes(3_000_000), rng.randbytes(300)]))
    else:
        body = change_bytes(rng, body)
    chunks[at] = (kind, body)
    if rng.random() < 0.3:
        name = rng.choice([b"tRNS", b"PLTE", b"zTXt", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"gAMA", b"IEND"])
        chunks.insert(
            rng.randrange(len(chunks) + 1),
            (name, rng.choice([b"", bytes(3), b"k\0\0" + zlib.compress(bytes(2_000_000)), rng.randbytes(20)])),
        )
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return data[:8] + b"".join(parts)


def change_jpeg(rng: random.Random, data: bytes) -> bytes:
    """Change the body of one marker segment."""
    segments, at = [], 2
    while data[at : at + 1] == b"\xff" and data[at + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", data, at + 2)
        segments.append((at, length))
        at += 2 + length
    at, length = rng.choice(segments)
    body = data[at + 4 : at + 2 + length]
    if data[at + 1] in (0xC0, 0xC2) and rng.random() < 0.7:
        body = body[:1] + struct.pack(">HH", *(rng.choice([0, 1, 9, 65535, 20000, 300]) for _ in range(2))) + body[5:]
    else:
        body = change_bytes(rng, body)[:65000]
    segment = data[at : at + 2] + struct.pack(">H", len(body) + 2) + body
    return data[:at] + segment * rng.choice([1, 1, 1, 2]) + data[at + 2 + length :]


def change_header(rng: random.Random, data: bytes) -> bytes:
    """Put odd numbers into the first bytes, where BMP, GIF, TIFF, PPM and WebP have sizes and offsets."""
    content = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at, width = rng.randrange(2, min(len(content), 120)), rng.choice([1, 2, 4])
        content[at : at + width] = (rng.choice([*LIMITS, 13_000, 30_000]) % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(content)


def change_ppm(rng: random.Random, data: bytes) -> bytes:
    fields = data.split(None, 4)
    fields[rng.randrange(1, 4)] = str(rng.choice([*LIMITS, -1, "x", "", 13_000, "7" * 5000])).encode()
    return rng.choice([b"P1", b"P3", b"P4", b"P5", b"P6", b"P7", b"PF", b"Pf", b"Py"]) + b" " + b" ".join(fields[1:])


STRUCTURED: dict[str, list[Mutation]] = {
    ".json": [change_json],
    ".jsonl": [change_json_lines],
    ".yaml": [change_yaml],
    ".csv": [change_csv],
    ".tsv": [change_tsv],
    ".txt": [change_lines],
    ".npz": [change_zip],
    ".npy": [change_npy],
    ".pt": [change_checkpoint, change_zip],
    ".safetensors": [change_safetensors],
    ".tar": [change_tar],
    ".parquet": [change_parquet],
    ".arrow": [change_arrow],
    ".png": [change_png],
    ".jpg": [change_jpeg],
    ".gif": [change_header],
    ".bmp": [change_header],
    ".tif": [change_header],
    ".webp": [change_header],
    ".ppm": [change_ppm],
}
