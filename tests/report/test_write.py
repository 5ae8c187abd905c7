"""Which page a folder gets, sections of users, and refusals."""

import shutil

import pytest

from nuclr.errors import UserError
from nuclr.report import register_section, unregister_section
from nuclr.report.page import Options, Section, Text
from nuclr.report.write import make_page, write_report
from tests.report import folders
from tests.training import runs

PLUGIN = """
from nuclr.report import Section, Text, register_section


def losses(run):
    return [Text(f"loss {loss}") for loss in run.curve("train/loss")[1]]


register_section("training", Section("losses", "All losses", losses, menu="Losses"), before="repeat")
"""


def test_a_plugin_adds_a_section(nuclr, vector_run, tmp_path):
    run = shutil.copytree(vector_run, tmp_path / "run")
    (tmp_path / "losses.py").write_text(PLUGIN)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("plugins: []", f"plugins: [{tmp_path / 'losses.py'}]"))
    try:
        status, _, errors = nuclr("report", run, "--no-model")
        assert status == 0, errors
        page = (run / "report.html").read_text()
        assert '<li><a href="#losses">Losses</a></li>' in page
        assert page.index('<section id="curves"') < page.index('<section id="losses"') < page.index('id="repeat"')
        assert page.count("<p>loss ") > 3
        assert nuclr("report", run, "--no-model")[0] == 0, "the plugin may be loaded again"
    finally:
        unregister_section("training", "losses")


@pytest.fixture
def toy_sections(tmp_path):
    """Register sections of the page of a toy study during the test."""
    folders.write_toy(tmp_path)
    keys = []

    def register(section, **options):
        register_section("toy", section, **options)
        keys.append(section.key)

    yield register
    for key in dict.fromkeys(keys):
        unregister_section("toy", key)
    assert "<p>seed 0</p>" not in make_page(tmp_path, Options())


def test_sections_of_one_row(tmp_path, toy_sections):
    section = Section("seed", "Seed", lambda study: [Text(f"seed {study.seed}")])
    for _ in range(2):
        toy_sections(section, before="nowhere")
    toy_sections(Section("error", "Other error", lambda _: [Text("other")]))
    page = make_page(tmp_path, Options())
    assert page.count("<p>seed 0</p>") == 1 and '<li><a href="#seed">Seed</a></li>' in page
    assert page.index('id="repeat"') < page.index('id="seed"')
    assert "Other error is left out" in page and "<p>other</p>" not in page
    with pytest.raises(ValueError, match="'seed'"):
        register_section("toy", Section("seed", "Other", lambda _: []))
    with pytest.raises(ValueError, match="'trainings'"):
        register_section("trainings", section)
    with pytest.raises(KeyError, match="'new'"):
        unregister_section("toy", "new")


def test_refusals(nuclr, vector_run, tmp_path):
    for arguments, message in (
        ([tmp_path / "nowhere"], "no such folder"),
        ([tmp_path], "config.yaml"),
        ([vector_run, "--no-model", "--out", tmp_path], str(tmp_path)),
        ([vector_run, "--no-model", "--out", tmp_path / "no" / "page.html"], "page.html"),
    ):
        status, _, errors = nuclr("report", *arguments)
        assert status == 2 and message in errors and "Traceback" not in errors


def test_at_the_end_of_training(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [s for s in runs.vector_settings(tmp_path) if not s.startswith("report")]
    status, output, errors = nuclr("train", "empty.yaml", *settings, "out=run")
    assert status == 0 and "Report page: run/report.html" in output, errors
    assert "nuclr train empty.yaml" in (tmp_path / "run" / "report.html").read_text()
    monkeypatch.setattr("nuclr.report.write.make_page", lambda *_: 1 / 0)
    status, _, errors = nuclr("train", "empty.yaml", *settings, "out=other")
    assert status == 0 and "division by zero" in errors


@pytest.mark.parametrize("name", ["popularity.json", "compare.json", "toy.json", "config.yaml"])
@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5_000, "{}", "[]", "", "\x00", '{"sides": 1}', "{a: 1}: 2"])
def test_damaged_folders_are_a_clear_error(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        write_report(tmp_path)
    message = str(caught.value)
    assert (str(tmp_path) in message or "data.train" in message) and len(message) < 700
