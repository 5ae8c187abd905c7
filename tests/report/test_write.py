"""Which page a folder gets, sections of users, and refusals."""

import shutil

import pytest

from nuclr.errors import UserError
from nuclr.report import register_section, unregister_section
from nuclr.report.render import Options, Section
from nuclr.report.write import PAGES, make_page, write_report
from nuclr.training.loop import train
from tests.report import folders
from tests.training import runs

PLUGIN = """
from dataclasses import dataclass
from pathlib import Path

from nuclr.report import Section, register_section


@dataclass(frozen=True)
class Loss:
    values: list[float]


def losses(context):
    return Loss([line["train/loss"] for line in context.log.metrics if "train/loss" in line])


TEMPLATE = Path(__file__).with_suffix(".html")
register_section("training", Section("losses", "All losses", TEMPLATE, losses, menu="Losses"), before="time")
"""
TEMPLATE = "<ul>{% for value in content.values %}<li>{{ value|number }}</li>{% endfor %}</ul>\n"


@pytest.fixture(scope="module")
def vector_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    train(runs.load(folder), folder / "run")
    return folder / "run"


def test_a_plugin_adds_a_section(nuclr, vector_run, tmp_path):
    run = shutil.copytree(vector_run, tmp_path / "run")
    (tmp_path / "losses.py").write_text(PLUGIN)
    (tmp_path / "losses.html").write_text(TEMPLATE)
    with (run / "config.yaml").open("a") as file:
        file.write(f"\nplugins: [{tmp_path / 'losses.py'}]\n")
    before = [section.key for section in PAGES["training"].sections]
    try:
        status, _, errors = nuclr("report", run, "--no-model")
        assert status == 0, errors
        page = (run / "report.html").read_text()
        assert '<li><a href="#losses">Losses</a></li>' in page
        assert page.index('<section id="curves"') < page.index('<section id="losses"') < page.index('id="time"')
        assert "<h2>All losses</h2>" in page and page.partition("<h2>All losses</h2>")[2].count("<li>") > 3
        assert nuclr("report", run, "--no-model")[0] == 0, "the plugin may be loaded again"
    finally:
        unregister_section("training", "losses")
    assert [section.key for section in PAGES["training"].sections] == before


def test_a_section_of_one_row(tmp_path):
    folders.write_json(tmp_path / "toy.json", folders.toy())
    section = Section("seed", "Seed", "<p>seed {{ content }}</p>", lambda context: str(context.content["seed"]))
    register_section("toy", section)
    try:
        register_section("toy", section)
        page = make_page(tmp_path, Options())
        assert page.count("<p>seed 0</p>") == 1 and '<li><a href="#seed">Seed</a></li>' in page
        with pytest.raises(ValueError, match="'seed' is already a section of the toy page"):
            register_section("toy", Section("seed", "Other", "x", lambda _: 1))
    finally:
        unregister_section("toy", "seed")


def test_wrong_registrations():
    section = Section("new", "New", "x", lambda _: 1)
    with pytest.raises(
        ValueError, match="page is 'trainings'; allowed: training, comparison, popularity, hubness, toy"
    ):
        register_section("trainings", section)
    with pytest.raises(ValueError, match="before is 'nowhere', but the toy page has the sections summary, error"):
        register_section("toy", section, before="nowhere")
    with pytest.raises(ValueError, match="key is 'new', but the toy page has"):
        unregister_section("toy", "new")


def test_refusals(nuclr, vector_run, tmp_path):
    for arguments, message in (
        ([tmp_path / "nowhere"], "no such folder"),
        ([tmp_path], "it has none of the files config.yaml, compare.json"),
        ([vector_run, "--out", tmp_path], "is a folder"),
        ([vector_run, "--no-model", "--out", tmp_path / "no" / "page.html"], "cannot be written"),
    ):
        status, _, errors = nuclr("report", *arguments)
        assert status == 2 and message in errors and "Traceback" not in errors


@pytest.mark.parametrize("content", ["[]", "", "{", "name: [", "objective: {name: unheard}", "\x00", "data: 3"])
def test_damaged_settings_are_a_clear_error(nuclr, tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    status, _, errors = nuclr("report", tmp_path)
    assert status == 2 and "config.yaml" in errors and "Traceback" not in errors


def test_at_the_end_of_training(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [s for s in runs.vector_settings(tmp_path) if not s.startswith("report")]
    status, output, errors = nuclr("train", "empty.yaml", *settings, "out=run")
    assert status == 0 and "Report page: run/report.html" in output, errors
    assert "nuclr train empty.yaml" in (tmp_path / "run" / "report.html").read_text()
    monkeypatch.setattr("nuclr.report.write.make_page", lambda *_: 1 / 0)
    status, _, errors = nuclr("train", "empty.yaml", *settings, "out=other")
    assert status == 0 and "the report page could not be written (division by zero)" in errors


@pytest.mark.parametrize("name", ["popularity.json", "compare.json", "toy.json", "config.yaml"])
@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5_000, "{}", "[]", "\x00", '{"sides": 1}', "{a: 1}: 2"])
def test_damaged_folders_are_a_clear_error(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        write_report(tmp_path)
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 700
