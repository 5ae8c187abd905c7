"""Share the model of a run, and the correction of a search with it, on the Hugging Face hub.

    pip install huggingface_hub && hf auth login
    python examples/share_on_hub.py push runs/demo fix.safetensors me/model
    python examples/share_on_hub.py load me/model

FIX is a correction that `PopularityCorrection.save` wrote; it goes next to the files of the model. For exports to
sentence-transformers or transformers, give `upload_folder` their folder; they load by the name of the repository.
"""

import sys
from pathlib import Path

from huggingface_hub import create_repo, snapshot_download, upload_file, upload_folder

from nuclr.models import DualEncoder
from nuclr.popularity import PopularityCorrection

CORRECTION = "popularity.safetensors"


def push(run: str, fix: str, repository: str) -> None:
    """Upload RUN/model and a correction; a repository that exists gets new versions of its files."""
    create_repo(repository, exist_ok=True)
    upload_folder(repo_id=repository, folder_path=Path(run) / "model")
    upload_file(repo_id=repository, path_or_fileobj=fix, path_in_repo=CORRECTION)


def load(repository: str) -> tuple[DualEncoder, PopularityCorrection]:
    """Download both, or take them from the cache of the hub."""
    folder = snapshot_download(repository)
    return DualEncoder.from_pretrained(folder), PopularityCorrection.load(Path(folder) / CORRECTION)


if __name__ == "__main__":
    if sys.argv[1] == "push":
        push(*sys.argv[2:])
    else:
        print(*load(sys.argv[2]), sep="\n")
