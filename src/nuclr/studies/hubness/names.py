"""What people call the items of a search."""

from collections.abc import Sequence

from nuclr.data.formats import arrow
from nuclr.data.formats.table import TABLES, read_column
from nuclr.errors import UserError
from nuclr.remote import show_urls
from nuclr.runs.vectors import Vectors, local_path, split_argument
from nuclr.studies.popularity.inputs import read_captions


def read_names(argument: str, vectors: Vectors) -> list[str]:
    """Read what the rows are called: `.txt`, `.jsonl`, `.json`, `.csv`, or a column PATH:COLUMN of Parquet or CSV.

    Raises:
        UserError: if the file cannot be read, or has another number of names.

    """
    name, column = split_argument(argument)
    path = local_path(name)
    with show_urls():
        if column is not None and path.suffix.lower() in TABLES:
            names: Sequence[str] = read_column(path, column)
        elif column is not None:
            names = arrow.read_texts(path, column)
        else:
            names = [caption for caption, _ in read_captions(path, f"name it as {name}:COLUMN")]
    if len(names) != len(vectors):
        raise UserError(f"{argument}: {len(names):,} names, but {vectors.name} has {len(vectors):,} rows")
    return list(names)
