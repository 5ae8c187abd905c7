"""`nuclr index`: stable numbers for samples that are read as a stream."""

from pathlib import Path
from typing import Annotated

import typer

from nuclr.errors import UserError, printable

EPILOG = """
Examples:

    nuclr index 'cc3m/{00000..00331}.tar' --out cc3m.keys             keys of webdataset and img2dataset
    nuclr index 'cc3m/*.tar' 'more/*.tar' --extend cc3m.keys --out all.keys
    nuclr index shards --with-tar --out shards.keys                   keys that start again in every tar
    nuclr index data/train-*.parquet --key url --out train.keys       a column of a Hugging Face dataset
    nuclr index keys.txt --out train.keys                             one key per line
"""


def index(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Tars, Parquet files or lists of keys (.txt): files, folders, patterns such as {00000..00331}.tar, or "
            "several joined by ::; or their URLs"
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write: 16 bytes per key.")],
    extend: Annotated[
        Path | None,
        typer.Option(help="An older index: its keys keep their numbers. It may be the file of --out.", metavar="OLD"),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Of Parquet files, the column of the keys. Of tars, the entry of the .json files, such as key of "
            "img2dataset; by default the name of the members (webdataset's __key__).",
        ),
    ] = None,
    with_tar: Annotated[
        bool,
        typer.Option("--with-tar", help="Put the tar's file name before the key, if keys repeat from tar to tar."),
    ] = False,
) -> None:
    """Write the numbers of all samples of a stream, which objectives with state need.

    In training, `nuclr.data.KeyIndex.open(FILE).numbers(keys)` gives the numbers of a batch. They do not depend on the
    order of the files, and stay the same when files are added with --extend.
    """
    from nuclr.data.formats.keys import KeyReader, key_files
    from nuclr.data.key_index import KeyIndex, RepeatedKeyError, write_entries

    if out.exists() and (extend is None or extend.resolve() != out.resolve()):
        raise UserError(f"--out {out}: exists; name another file, or keep its numbers with --extend {out}")
    old = None if extend is None else KeyIndex.open(extend)
    if old is not None and old.with_tar != with_tar:
        made, fix = ("with", "add it") if old.with_tar else ("without", "leave it out")
        raise UserError(f"--extend {extend}: was made {made} --with-tar; {fix}")
    files = key_files(sources)
    reader = KeyReader(files, key, with_tar)
    try:
        written = write_entries(out, reader, old, with_tar)
    except RepeatedKeyError as error:
        if with_tar or key is not None or files[0].suffix.lower() != ".tar":
            raise
        raise UserError(f"{error}; if keys start again in every tar, use --with-tar") from None
    for tar in reader.truncated:
        problem = f"{tar}: truncated; its lost samples have no number yet, --extend adds them after a repair"
        typer.echo(printable(f"nuclr: {problem}"), err=True)
    known = ""
    if old is not None:
        new = len(written) - len(old)
        known = f" ({new:,} new; {reader.count - new:,} of {len(old):,} old keys were read again)"
    typer.echo(f"{out}: {len(written):,} keys{known}, {out.stat().st_size:,} bytes; num_samples={len(written)}")
