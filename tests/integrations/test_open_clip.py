"""open_clip's own training program with objectives of this package, on one process and on two."""

import logging
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("open_clip")
pytest.importorskip("open_clip_train")

import open_clip_train.data
from open_clip_train.data import CsvDataset
from safetensors.torch import load_file
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from nuclr.errors import UserError
from nuclr.integrations import STATE_FILE
from nuclr.integrations.open_clip import OPTIMIZER_FILE, IndexedBatches, ObjectiveLoss, TrainOneEpoch
from nuclr.objectives import build
from tests.integrations.clip_data import write_pairs
from tests.integrations.common import EXAMPLES, assert_equal, launch, marked_lines
from tests.integrations.open_clip_worker import BATCH, CASES, register_model, train

pytestmark = pytest.mark.open_clip
WORKER = ("-m", "tests.integrations.open_clip_worker")
EXAMPLE = "open_clip_train.py"
PAIRS = 48


@pytest.fixture(scope="module", autouse=True)
def logging_as_before():
    """Undo what open_clip's `main` does to logging: handlers on the captured output, and the level of every logger."""
    loggers = [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    before, handlers = [(logger, logger.level) for logger in loggers], list(logging.root.handlers)
    yield
    logging.root.handlers[:] = handlers
    for logger, level in before:
        logger.setLevel(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with pairs, in which captions occur several times."""
    folder = tmp_path_factory.mktemp("open_clip")
    write_pairs(folder, PAIRS)
    register_model(folder)
    return folder


@pytest.fixture(scope="module")
def one_process(folder):
    """Return a function that trains a case on this process, once."""
    trained = {}

    def run(case):
        if case not in trained:
            trained[case] = train(folder, case, **CASES[case])
        return trained[case]

    return run


def test_two_processes_train_the_weights_of_one(folder, one_process):
    launch(*WORKER, folder, *CASES, processes=2)
    for case in CASES:
        assert_equal(load_file(folder / f"{case}.safetensors"), one_process(case), 1e-6, state=100)


def test_resumed_equals_uninterrupted(folder, one_process):
    """With a learnt temperature, whose moments open_clip's own checkpoint does not hold."""
    uninterrupted = one_process("learnt")
    checkpoints = folder / "logs" / "learnt" / "checkpoints"
    assert {path.name for path in (checkpoints / "epoch_1_objective").iterdir()} == {STATE_FILE, OPTIMIZER_FILE}
    again = ("--resume", f"{checkpoints}/epoch_1.pt")
    assert_equal(train(folder, "resumed", **CASES["learnt"], arguments=again), uninterrupted)
    scale = uninterrupted["objective.log_scale"].item()
    assert abs(scale + math.log(0.05)) > 1e-3
    assert uninterrupted["model.logit_scale"].item() == pytest.approx(scale, rel=1e-6)


def test_evaluation_leaves_state_and_training_alone(folder, one_process):
    evaluated = train(folder, "evaluated", arguments=("--val-data", f"{folder}/pairs.tsv"))
    assert "clip_val_loss" in (folder / "logs" / "evaluated" / "checkpoints" / "results.jsonl").read_text()
    assert_equal(evaluated, one_process("nuclr"))


def test_only_states_of_existing_checkpoints_are_kept(folder):
    train(folder, "latest", epochs=4, arguments=("--save-frequency", "0", "--save-most-recent"))
    names = {path.name for path in (folder / "logs" / "latest" / "checkpoints").iterdir()}
    assert names == {"epoch_4.pt", "epoch_latest.pt", "epoch_3_objective", "epoch_4_objective"}


def test_rows_with_the_same_caption_are_not_negatives(folder):
    data = CsvDataset(folder / "pairs.tsv", ToTensor(), "filepath", "title", tokenizer=lambda texts: torch.zeros(1, 4))
    batches = IndexedBatches(DataLoader(data, batch_size=PAIRS))
    assert len(set(data.captions)) < PAIRS
    objective = build("sogclr", num_samples=PAIRS, temperature=0.05)
    expected = build("sogclr", num_samples=PAIRS, temperature=0.05)
    loss = ObjectiveLoss(objective, batches)
    x, y = (normalize(torch.randn(PAIRS, 8), dim=1) for _ in range(2))
    next(iter(batches))
    value = loss(image_features=x, text_features=y, logit_scale=torch.ones(()), output_dict=True)["contrastive_loss"]
    captions = sorted(set(data.captions))
    same = expected(x, y, torch.arange(PAIRS), y_id=torch.tensor([captions.index(c) for c in data.captions])).loss
    torch.testing.assert_close(value, same)


def test_a_stream_of_tars(folder, monkeypatch):
    """Keys give the pairs of a webdataset the same numbers whatever the order, and their state is complete."""
    webdataset = pytest.importorskip("webdataset")
    expand = open_clip_train.data.tar_file_expander

    def files_only(*args, **kwargs):
        # Releases of webdataset after 0.2.86 also yield a marker at the end of a tar, which open_clip 3.3 cannot read.
        return (file for file in expand(*args, **kwargs) if "fname" in file)

    monkeypatch.setattr(open_clip_train.data, "tar_file_expander", files_only)
    rows = [line.split("\t") for line in (folder / "pairs.tsv").read_text().splitlines()[1:]]
    for tar in range(4):
        with webdataset.TarWriter(str(folder / f"{tar}.tar")) as writer:
            for number in range(12 * tar, 12 * (tar + 1)):
                picture = Path(rows[number][0]).read_bytes()
                writer.write({"__key__": f"{number:09}", "png": picture, "txt": rows[number][1]})
    keys = {f"{number:09}": number for number in range(PAIRS)}
    tars = ("--train-data", f"{folder}/{{0..3}}.tar", "--dataset-type", "webdataset", "--train-num-samples", f"{PAIRS}")
    seen = []

    class Watched(TrainOneEpoch):
        def __call__(self, *args, **kwargs):
            super().__call__(*args, **kwargs)
            seen.append(self.objective.log_u_x.isfinite().sum().item())

    found = train(folder, "tars", arguments=tars, task=Watched("nuclr", keys=keys, temperature=0.05))
    assert seen == [PAIRS, PAIRS] and found["objective.zeta_y"].abs().min() > 0
    with pytest.raises(UserError, match="keys="):
        train(folder, "no_keys", arguments=tars)
    with pytest.raises(UserError, match="--dataset-resampled"):
        train(folder, "resampled", arguments=(*tars, "--dataset-resampled"), task=TrainOneEpoch("nuclr", keys=keys))
    with pytest.raises(UserError, match="keys="):
        train(folder, "no_stream", task=TrainOneEpoch("nuclr", keys=keys))
    with pytest.raises(UserError, match="to_tuple"):
        IndexedBatches(iter([]), keys=keys)


# -- wrong input ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_state(folder, one_process):
    one_process("nuclr")
    checkpoints = folder / "logs" / "nuclr" / "checkpoints"
    lonely = folder / "lonely" / "epoch_1.pt"
    lonely.parent.mkdir()
    lonely.write_bytes((checkpoints / "epoch_1.pt").read_bytes())
    with pytest.raises(UserError, match="epoch_1_objective"):
        train(folder, "lonely", arguments=("--resume", f"{lonely}"))


def test_wrong_options_are_reported_before_training(folder):
    with pytest.raises(ValueError, match="temprature"):
        TrainOneEpoch("nuclr", temprature=0.05)
    with pytest.raises(ValueError, match="temperature"):
        TrainOneEpoch(build("nuclr", num_samples=4), temperature=0.05)
    with pytest.raises(UserError, match="--accum-freq"):
        train(folder, "accumulated", arguments=("--accum-freq", "2"))
    with pytest.raises(ValueError, match=r"\[0, 16\)"):
        train(folder, "fewer", task=TrainOneEpoch(build("nuclr", num_samples=BATCH)))


# -- example ----------------------------------------------------------------------------------------------------------


def test_the_example_trains_and_differs_in_two_lines(folder, tmp_path):
    command = f"--model tiny --train-data {folder}/pairs.tsv --dataset-type csv --workers 0 --batch-size 16 --epochs 1"
    arguments = [*command.split(), "--device", "cpu", "--logs", tmp_path / "logs", "--name", "run"]
    launch(*WORKER, EXAMPLES / EXAMPLE, *arguments, cwd=tmp_path)
    checkpoints = tmp_path / "logs" / "run" / "checkpoints"
    assert (checkpoints / "epoch_1.pt").is_file()
    assert load_file(checkpoints / "epoch_1_objective" / STATE_FILE)["log_u_x"].isfinite().all()
    assert marked_lines(EXAMPLE, "# nuclr") <= 5
