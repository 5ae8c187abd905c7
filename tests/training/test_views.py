"""Training with several views per side: vectors, texts and images; resume, processes, state, dry run."""

import json

import numpy as np
import pytest
import torch

from nuclr.data import ViewGroups
from nuclr.errors import UserError
from nuclr.runs import checkpoint, components, config
from nuclr.runs.run import Run
from nuclr.training import batch_inputs
from nuclr.training.loop import train
from tests.training import runs


def vectors(folder, **changes):
    return config.load(folder / "empty.yaml", runs.grouped_vector_settings(folder, **changes))


def last_state(run):
    return checkpoint.load(checkpoint.newest_first(run / "checkpoints")[0]).objective


@pytest.fixture
def loaded(monkeypatch):
    """The batches of all steps, as they come from the loader."""
    seen = []
    before = batch_inputs.TrainingInputs.load

    def load(self, *args, **kwargs):
        for batch in before(self, *args, **kwargs):
            seen.append(batch)
            yield batch

    monkeypatch.setattr(batch_inputs.TrainingInputs, "load", load)
    return seen


def test_an_epoch_visits_every_x_once_and_the_state_has_a_row_per_x(tmp_path, loaded):
    results = train(vectors(tmp_path), tmp_path / "run")
    assert results.samples_per_epoch == 60 and results.pairs == 300 and results.steps == 12
    state = last_state(tmp_path / "run")
    assert {len(table) for table in state.values() if table.ndim} == {60}
    assert not state["log_u_x"].isneginf().any() and not state["log_u_y"].isneginf().any()
    file = np.load(tmp_path / "train.npz")
    for batch in loaded:
        assert batch.x.shape == (16, 12) and batch.y.shape == (32, 8) and batch.shared.shape == (16, 0)
        assert torch.equal(batch.row, batch.x_id) and len(set(batch.row.tolist())) == 16
        taken = (batch.y[:, None] == torch.from_numpy(file["y"])).all(2).nonzero()[:, 1].reshape(16, 2)
        assert torch.equal(taken // 5, batch.row[:, None].expand(-1, 2)) and (taken[:, 0] != taken[:, 1]).all()


def test_one_view_is_the_run_without_views(tmp_path):
    train(runs.load(tmp_path), tmp_path / "plain")
    train(runs.load(tmp_path, **{"data.x.views": 1, "data.y.views": 1}), tmp_path / "one")
    runs.assert_same_outcome(tmp_path / "plain", tmp_path / "one")


def test_the_state_of_a_run_has_a_row_per_pair(tmp_path):
    settings = vectors(tmp_path, **{"schedule.zeta_refresh": 1})
    train(settings, tmp_path / "run")
    saved, state = last_state(tmp_path / "run"), Run.open(tmp_path / "run").objective_state
    groups = components.view_groups(settings.data, components.open_train(settings.data))
    assert isinstance(groups, ViewGroups) and saved["zeta_y"].std() > 0
    for name, table in saved.items():
        assert torch.equal(state[name], table[torch.from_numpy(groups.row)] if table.ndim else table)


def test_all_captions_have_a_popularity_of_their_own(tmp_path, loaded):
    settings = vectors(tmp_path, **{"data.y.views": 5, "schedule.zeta_refresh": 1, "objective.zeta_lr": 0})
    train(settings, tmp_path / "run")
    saved, run = last_state(tmp_path / "run"), Run.open(tmp_path / "run")
    assert saved["zeta_y"].shape == (60, 5) and saved["zeta_x"].shape == (60,)
    y = torch.from_numpy(np.load(tmp_path / "train.npz")["y"])
    for batch in loaded:
        taken = (batch.y[:, None] == y).all(2).nonzero()[:, 1].reshape(16, 5)
        assert torch.equal(taken, 5 * batch.row[:, None] + torch.arange(5))
    assert torch.equal(run.objective_state["zeta_y"], saved["zeta_y"].flatten())
    assert run.objective_state["zeta_y"].view(60, 5).std(dim=1).min() > 0
    assert torch.equal(settings.objective.restore(saved).zeta_y, saved["zeta_y"])


def test_the_number_of_stored_views_is_not_a_setting_of_a_run(tmp_path):
    with pytest.raises(UserError, match=r"objective\.state\.y_views follows from data\.y\.views"):
        vectors(tmp_path, **{"objective.state.y_views": 5})
    with pytest.raises(UserError, match=r"objective\.state\.num_x"):
        vectors(tmp_path, **{"objective.state.num_x": 5})


def test_rows_of_lists_have_views_on_both_sides(tmp_path, loaded):
    settings = config.load(tmp_path / "empty.yaml", runs.grouped_text_settings(tmp_path))
    results = train(settings, tmp_path / "run")
    assert results.samples_per_epoch == 50 and results.pairs == 150
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for batch in loaded:
        for i, row in enumerate(batch.row.tolist()):
            questions, answers = batch.x[2 * i : 2 * i + 2], batch.y[3 * i : 3 * i + 3]
            assert set(questions) < set(rows[row]["question"]) and len(set(questions)) == 2
            assert set(answers) == set(rows[row]["answer"])
        # Two rows about the same words share their texts, and are not negatives of each other.
        same = (batch.shared[:, None] == batch.shared[None]).any(2) | torch.eye(16, dtype=torch.bool)
        texts = [set(batch.x[2 * i : 2 * i + 2] + batch.y[3 * i : 3 * i + 3]) for i in range(16)]
        assert same.tolist() == [[bool(one & other) for other in texts] for one in texts]


def test_images_with_several_crops_and_captions(tmp_path, loaded):
    settings = config.load(tmp_path / "empty.yaml", runs.captioned_settings(tmp_path))
    results = train(settings, tmp_path / "run")
    assert results.samples_per_epoch == 60
    for batch in loaded:
        assert batch.x.shape == (16, 2, 3, 16, 16) and not torch.equal(batch.x[:, 0], batch.x[:, 1])
        assert [text.split()[1] for text in batch.y[::2]] == [text.split()[1] for text in batch.y[1::2]]
        assert all(one != two for one, two in zip(batch.y[::2], batch.y[1::2], strict=True))


@pytest.mark.parametrize("crop", [0.5, 1])
def test_several_crops_of_an_image_alone_keep_a_row_per_pair(tmp_path, crop):
    overrides = runs.photograph_settings(tmp_path, **{"data.x.views": 3, "augment.crop": crop, "schedule.epochs": 1})
    results = train(config.load(tmp_path / "empty.yaml", overrides), tmp_path / "run")
    assert results.samples_per_epoch == 60 == len(last_state(tmp_path / "run")["log_u_x"])


def test_a_folder_of_images_contrasts_views_without_a_setting(tmp_path):
    settings = config.load(tmp_path / "empty.yaml", runs.view_settings(tmp_path, **{"data.y.views": 2}))
    assert settings.data.contrasts_views
    train(settings, tmp_path / "run")
    assert Run.open(tmp_path / "run").settings.data.contrast == "views"
    assert Run.open(tmp_path / "run").train.pairs.views


def test_a_list_contrasts_views_if_asked(tmp_path):
    overrides = runs.photograph_settings(tmp_path, **{"schedule.epochs": 1})
    assert not config.load(tmp_path / "empty.yaml", overrides).data.contrasts_views
    results = train(config.load(tmp_path / "empty.yaml", [*overrides, "data.contrast=views"]), tmp_path / "run")
    assert results.sides == ("view 1", "view 2")
