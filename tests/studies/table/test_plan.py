"""Planned runs: names, commands, states, and settings that changed."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from nuclr.errors import UserError
from nuclr.studies.table.columns import PROMPTS_OPTION, locate, problems
from nuclr.studies.table.plan import check_same, plain_content, plan_runs
from nuclr.studies.table.table_file import Column, read_table
from tests.studies.table import tiny


@pytest.fixture
def runs(tmp_path):
    return plan_runs(read_table(tiny.write_table(tmp_path, seeds=2)), tmp_path / "out", tmp_path)


def pretend(run, finished=True):
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text("name: tiny\n")
    if finished:
        (run.folder / "results.json").write_text("{}")


def test_one_run_per_row_and_seed_labelled_by_the_objective(runs):
    assert [run.name for run in runs] == ["clip-seed0", "clip-seed1", "ours-seed0", "ours-seed1"]
    assert [run.label for run in runs] == ["CLIP", "CLIP", "ours", "ours"]
    assert runs[2].settings.objective.options["gamma"] == 0.5


def test_labels_that_differ_only_in_signs_have_folders_of_their_own(tmp_path):
    path = tiny.write_table(tmp_path)
    text = path.read_text().replace("label: ours", "label: CLIP!")
    path.write_text(text)
    names = [run.name for run in plan_runs(read_table(path), tmp_path / "out", tmp_path)]
    assert names == ["clip-seed0", "clip-seed0-2"]


def test_two_rows_of_one_objective_need_labels(tmp_path):
    path = tiny.write_table(tmp_path)
    path.write_text(path.read_text().replace("label: ours", "label: CLIP"))
    with pytest.raises(UserError, match=r"two rows are called CLIP; give .*tiny\.yaml another label"):
        plan_runs(read_table(path), tmp_path / "out", tmp_path)


def test_commands(runs, tmp_path):
    run = runs[2]
    expected = f"train {tmp_path}/tiny.yaml report=false objective.name=nuclr objective.gamma=0.5 seed=0 "
    expected += f"out={tmp_path}/out/runs/ours-seed0 --resume"
    assert shlex.join(run.train_command()) == f"nuclr {expected}"
    assert shlex.join(run.train_command(2)) == f"torchrun --standalone --nproc_per_node 2 -m nuclr {expected}"
    ((command, path),) = run.evaluate_commands(run.columns)
    tests = f"--retrieval {tmp_path}/test.npz --classification {tmp_path}/classes.npz"
    assert shlex.join(command) == f"nuclr evaluate {tmp_path}/out/runs/ours-seed0 {tests} --out {path}"
    assert path.parent == tmp_path / "out" / "results" / "ours-seed0"
    line = run.shell_line()
    assert line.startswith(f"{{ test -f {tmp_path}/out/runs/ours-seed0/results.json || nuclr train")
    assert line.endswith(f"--out {path}; }}")


def test_columns_with_prompt_files_are_evaluated_by_commands_of_their_own(runs, tmp_path):
    (tmp_path / "p.json").write_text('["a {}"]')
    plain = Column("a", "dtd", "classification", "zero_shot_acc1")
    prompted = dataclasses.replace(plain, title="b", prompts=tmp_path / "p.json")
    run = dataclasses.replace(runs[0], columns=(plain, prompted))
    (first, one), (second, two) = run.evaluate_commands(run.columns)
    assert PROMPTS_OPTION not in first
    assert second[second.index(PROMPTS_OPTION) + 1] == str(tmp_path / "p.json")
    assert one.name.startswith("default-") and not two.name.startswith("default-")
    tiny.write_results(one, "r", {"dtd": 0.5})
    assert [column.title for column in run.missing_columns()] == ["b"]
    tiny.write_results(two, "r", {"dtd": 0.6})
    assert not run.missing_columns()
    (tmp_path / "p.json").write_text('["another {}"]')
    assert [column.title for column in run.missing_columns()] == ["b"]


def test_states(runs):
    run = runs[0]
    assert run.state() == "missing"
    pretend(run, finished=False)
    assert run.state() == "partial (0 % of the training)"
    (run.folder / "metrics.jsonl").write_text('{"step": 7, "epoch": 1}\n')
    assert run.state() == "partial (50 % of the training)"
    (run.folder / "results.json").write_text("{}")
    assert run.state() == "partial (trained; not evaluated on pairs, classes)"
    entries = {"retrieval": run.located(run.columns[0]).test, "classification": run.located(run.columns[1]).test}
    content = {"written_by": "nuclr evaluate", "subject": {"path": "r"}}
    content |= {kind: {test: {"plain": {}}} for kind, test in entries.items()}
    run.results.mkdir(parents=True)
    (run.results / "default-1.json").write_text(json.dumps(content))
    assert run.state() == "done"


def test_an_existing_run_is_not_continued_with_other_settings(runs):
    stored = {run.name: plain_content(run.settings) for run in runs}
    other = dataclasses.replace(runs[0], settings=dataclasses.replace(runs[0].settings, precision="bfloat16"))
    check_same([other], stored)  # nothing was trained yet
    pretend(runs[0])
    check_same(runs, stored)
    with pytest.raises(UserError, match=r"row CLIP: precision is bfloat16, but the default in .*clip-seed0; "):
        check_same([other], stored)


def test_a_wrong_override_names_its_row(tmp_path):
    path = tiny.write_table(tmp_path)
    path.write_text(path.read_text().replace("objective.gamma=0.5", "objective.gama=0.5"))
    with pytest.raises(UserError, match=r"^row ours: unknown key 'objective\.gama'; did you mean objective\.gamma"):
        plan_runs(read_table(path), tmp_path / "out", tmp_path)


def test_test_sets_are_relative_to_one_folder():
    def located(test: str) -> str:
        return locate(Column("a", test, "retrieval", "mean_R@1"), Path("d")).test

    assert located("mscoco") == "mscoco:d/mscoco"
    assert located("mscoco:coco/2014") == "mscoco:d/coco/2014"
    assert located("a/b.npz") == "d/a/b.npz"
    assert located("/a/b.npz") == "/a/b.npz"
    assert located("builtin:n=5") == "builtin:n=5"
    assert located("https://host/a.npz") == "https://host/a.npz"


def test_missing_test_sets_are_found_before_training(runs, tmp_path):
    asked = [(run.located(column), run.settings.data) for run in runs for column in run.columns]
    assert problems(asked) == []
    (tmp_path / "classes.npz").unlink()
    (line,) = problems([*asked, (locate(Column("COCO", "mscoco", "retrieval", "R"), tmp_path), asked[0][1])])[:1]
    assert line.startswith("column classes: ") and "classes.npz: no such file" in line
    lines = problems([(locate(Column("COCO", "mscoco", "retrieval", "R"), tmp_path), asked[0][1])])
    assert lines[0].startswith("column COCO: MSCOCO: ")


def test_a_metric_of_other_directions_is_found_before_training(runs):
    wrong = dataclasses.replace(runs[0].located(runs[0].columns[0]), metric="image_to_text_R@10")
    (line,) = problems([(wrong, runs[0].settings.data)])
    assert "metric is 'image_to_text_R@10'" in line and "mean_R@10" in line
    assert not problems([(dataclasses.replace(wrong, metric="x_to_y_R@10"), runs[0].settings.data)])
