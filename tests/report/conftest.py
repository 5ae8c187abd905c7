import pytest

from nuclr.runs import config
from nuclr.training.loop import train
from tests.report import folders
from tests.training import runs


@pytest.fixture(scope="session")
def picture_run(tmp_path_factory):
    """A finished run on pictures with hostile captions and names."""
    folder = tmp_path_factory.mktemp("pictures")
    folders.write_captions(folder)
    (folder / "run.yaml").write_text(
        f"name: '{folders.HOSTILE}'\n"
        "data: {train: train.jsonl, val: train.jsonl, batch_size: 8}\n"
        "augment: {enabled: false}\n"
        "model: {x: {image_size: 16}, width: 8}\n"
        "objective: {zeta_lr: 0.01}\n"
        "schedule: {epochs: 2}\n"
        "log: {every: 2}\n"
        "threads: 1\n"
    )
    settings = config.load(folder / "run.yaml", [f"data.root={folder}"])
    train(settings, folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def vector_run(tmp_path_factory):
    """A finished run on vectors."""
    folder = tmp_path_factory.mktemp("vectors")
    train(runs.load(folder), folder / "run")
    return folder / "run"
