"""Tiny data sets on disk, the same pairs in every format."""

import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

# Three captions for the first image, two for the second, one for each of the others; two captions are equal.
CAPTIONS = {
    "a.jpg": ["a red square", "something red", "a square, almost"],
    "b.png": ['a "blue" one; and | so on', "something"],
    "c.jpg": ["something"],
    "d.jpg": ["ein grünes Quadrat ✓"],
    "e.jpg": ["the last one"],
}
PAIRS = [(name, caption) for name, captions in CAPTIONS.items() for caption in captions]
X_ID = [0, 0, 0, 1, 1, 2, 3, 4]
Y_ID = [0, 1, 2, 3, 4, 4, 5, 6]


def picture(seed: int, size: tuple[int, int] = (24, 20), kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(256, size=(3, 3, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(file, kind)
    return file.getvalue()


IMAGES = {name: picture(seed, kind="PNG" if name.endswith("png") else "JPEG") for seed, name in enumerate(CAPTIONS)}


def write_images(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in IMAGES.items():
        (folder / name).write_bytes(data)
    return folder


def write_lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def write_list(folder: Path, name: str, text: str | bytes) -> Path:
    """Write the images and a list with this content next to them."""
    write_images(folder)
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def jsonl(folder: Path) -> Path:
    write_images(folder / "train")
    return write_lines(
        folder / "train.jsonl", *({"image": name, "captions": texts} for name, texts in CAPTIONS.items())
    )


def jsonl_one_caption(folder: Path) -> Path:
    write_images(folder)
    return write_lines(folder / "pairs.jsonl", *({"image": name, "caption": text} for name, text in PAIRS))


def albef(folder: Path) -> Path:
    write_images(folder / "images")
    path = folder / "pairs.json"
    entries = [
        {"image": n, "caption": t if len(t) > 1 else t[0], "image_id": i} for i, (n, t) in enumerate(CAPTIONS.items())
    ]
    path.write_text(json.dumps(entries, indent=1))
    return path


def karpathy(folder: Path) -> Path:
    write_images(folder / "val2014")
    images = [
        {
            "filepath": "val2014",
            "filename": name,
            "split": "test",
            "sentences": [{"raw": t, "tokens": t.split()} for t in texts],
        }
        for name, texts in CAPTIONS.items()
    ]
    path = folder / "dataset.json"
    path.write_text(json.dumps({"dataset": "tiny", "images": images}))
    return path


def table(
    folder: Path, name: str = "pairs.csv", separator: str = ",", header: tuple[str, ...] = ("filepath", "title")
) -> Path:
    write_images(folder)
    path = folder / name
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([header, *PAIRS])
    return path


def tsv(folder: Path) -> Path:
    return table(folder, "pairs.tsv", "\t")


def semicolons(folder: Path) -> Path:
    return table(folder, "pairs.csv", ";", ("image", "caption"))


def parquet_names(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    write_images(folder)
    columns = {"filepath": [name for name, _ in PAIRS], "title": [text for _, text in PAIRS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "pairs.parquet", row_group_size=3)
    return folder / "pairs.parquet"


def parquet_bytes(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    (folder / "data").mkdir(parents=True)
    rows = [{"image": {"bytes": data, "path": name}, "captions": CAPTIONS[name]} for name, data in IMAGES.items()]
    for part in range(2):
        shard = pyarrow.Table.from_pylist(rows[3 * part : 3 * part + 3])
        pyarrow.parquet.write_table(shard, folder / "data" / f"train-0000{part}.parquet", row_group_size=2)
    return folder


def hf_dataset(folder: Path) -> Path:
    import datasets

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "caption": datasets.Sequence(datasets.Value("string")),
            "extra": datasets.Value("int64"),
        }
    )
    rows = {
        "image": [{"bytes": data, "path": name} for name, data in IMAGES.items()],
        "caption": list(CAPTIONS.values()),
        "extra": list(range(len(CAPTIONS))),
    }
    datasets.Dataset.from_dict(rows, features).save_to_disk(folder / "set", num_shards=2)
    return folder / "set"


def write_tar(path: Path, members: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, number: int, caption: str = "a caption") -> dict[str, bytes]:
    """The members of one sample as img2dataset writes them."""
    metadata = json.dumps({"key": key, "caption": caption, "status": "success"}).encode()
    return {f"{key}.jpg": picture(number), f"{key}.json": metadata, f"{key}.txt": caption.encode()}


def tars(folder: Path) -> Path:
    """Two tars; the JSON files hold several captions per image."""
    names = list(CAPTIONS)
    for part, chosen in enumerate((names[:2], names[2:])):
        members: dict[str, bytes] = {}
        for name in chosen:
            key, _, suffix = name.partition(".")
            members[f"{key}.{suffix}"] = IMAGES[name]
            members[f"{key}.json"] = json.dumps({"captions": CAPTIONS[name]}).encode()
        write_tar(folder / f"0000{part}.tar", members)
    return folder


FORMATS = (
    jsonl,
    jsonl_one_caption,
    albef,
    karpathy,
    table,
    tsv,
    semicolons,
    parquet_names,
    parquet_bytes,
    hf_dataset,
    tars,
)
