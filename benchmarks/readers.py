"""Read the same pairs in eight formats: a hash of all pairs in order, samples per second, and peak memory.

Usage: python benchmarks/readers.py [--rows 200000] [--images 2000] [--folder DIR] [--out FILE.json]

The files are made in a temporary folder, or in DIR, where they are made once and read again. Each format is opened and
read in a process of its own. To compare two versions, run the script with PYTHONPATH set to each of them:

    PYTHONPATH=/before/src python benchmarks/readers.py --folder /tmp/readers --out before.json
    PYTHONPATH=src python benchmarks/readers.py --folder /tmp/readers --out after.json

Pairs are the same if the hashes are. The hash covers number, x, y, ids and name of every pair.
"""

import argparse
import csv
import hashlib
import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

BATCH = 256
WORDS = ["a", "the", "dog", "cat", "runs", "over", "green", "grass", "old", "house", "two", "children", "watch"]
FORMATS = ("csv", "albef", "jsonl", "parquet", "hf", "folder", "tars", "embeddings")


def caption(number: int) -> str:
    """Return a text of about ten words; every tenth text is a repetition."""
    generator = np.random.default_rng(number - number % 10 if number % 10 == 9 else number)
    return " ".join(generator.choice(WORDS, 10))


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(256, size=(24, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((128, 96)).save(file, "JPEG")
    return file.getvalue()


def make_files(folder: Path, rows: int, images: int) -> None:
    """Write the pairs in all formats."""
    import pyarrow
    import pyarrow.parquet

    texts = [caption(number) for number in range(2 * rows)]
    questions, answers = texts[:rows], texts[rows:]
    with (folder / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        writer.writerows(zip(questions, answers, strict=True))
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for question, answer in zip(questions, answers, strict=True):
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")
    table = pyarrow.table({"question": questions, "answer": answers})
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    saved = folder / "hf"
    saved.mkdir()
    with pyarrow.ipc.new_stream(str(saved / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table, 1000)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0", "_split": None}
    (saved / "state.json").write_text(json.dumps(state))
    photos = folder / "folder"
    photos.mkdir()
    for number in range(images):
        (photos / f"{number:06d}.jpg").write_bytes(picture(number))
    entries = [{"image": f"{n:06d}.jpg", "caption": [texts[5 * n + k] for k in range(5)]} for n in range(images)]
    (photos / "albef.json").write_text(json.dumps(entries))
    tars = folder / "tars"
    tars.mkdir()
    for shard in range(4):
        with tarfile.open(tars / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard * images // 4, (shard + 1) * images // 4):
                members = {"jpg": (photos / f"{number:06d}.jpg").read_bytes(), "txt": texts[number].encode()}
                for suffix, content in members.items():
                    info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows // 5, 64)).astype(np.float32)
    y = generator.normal(size=(rows, 64)).astype(np.float32)
    np.savez(folder / "embeddings.npz", x=x, y=y, y_to_x=np.arange(rows) // 5)
    (folder / "done").write_text(f"{rows} {images}")


def open_format(name: str, folder: Path) -> Any:
    from nuclr.data import open_pairs

    paths = {"albef": "folder/albef.json", "embeddings": "embeddings.npz", "csv": "pairs.csv", "jsonl": "pairs.jsonl"}
    paths["parquet"] = "pairs.parquet"
    return open_pairs(folder / paths.get(name, name), views=name == "folder")


def content(item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    return np.asarray(item).tobytes()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Open a format and read all pairs, in random order for the time and in order for the hash."""
    from nuclr.data import open_pairs

    open_pairs("builtin:n=10")  # imports are not part of the time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    pairs = open_format(name, folder)
    opened = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    order = np.random.default_rng(0).permutation(len(pairs))
    for begin in range(0, len(order), BATCH):
        for side in ("x", "y"):
            pairs.items(side, order[begin : begin + BATCH])
    read = time.perf_counter()
    hashed = hashlib.sha256(pairs.fingerprint.encode())
    for number in range(len(pairs)):
        sample = pairs[number]
        hashed.update(f"{sample.number} {sample.x_id} {sample.y_id} {pairs.name(number)}\n".encode())
        hashed.update(content(sample.x) + b"\n" + content(sample.y) + b"\n")
    return {
        "format": name,
        "pairs": len(pairs),
        "hash": hashed.hexdigest()[:16],
        "open_seconds": opened - start,
        "samples_per_second": len(pairs) / (read - start),
        "peak_mb": (max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) - before) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=FORMATS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "done").exists():
            make_files(folder, arguments.rows, arguments.images)
        results = []
        print("| format | pairs | hash | open, s | samples per second | peak above import, MB |")
        print("| --- | --- | --- | --- | --- | --- |")
        for form in FORMATS:
            line = [sys.executable, __file__, "--one", form, "--folder", str(folder)]
            done = subprocess.run(line, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout)
            results.append(row)
            numbers = f"{row['open_seconds']:.2f} | {row['samples_per_second']:,.0f} | {row['peak_mb']:.0f}"
            print(f"| {form} | {row['pairs']:,} | {row['hash']} | {numbers} |", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
