"""Model cards are complete, and every value in them comes from the run."""

import json
from dataclasses import replace

import pytest
import yaml

from nuclr.export.card import write_card
from nuclr.export.trained import Written, open_trained

HEADINGS = ["How to load", "Encoders", "Preprocessing", "Training data", "Objective", "Metrics", "Limits"]
HEADINGS += ["License and citation", "How it was made"]


def write(run, folder, best=False):
    written = Written("nuclr", "feature-extraction", "code = 1", ["A note."])
    write_card(open_trained(run, "hf", best), written, folder)
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["separate", "other_encoders", "resnet", "siglip", "questions", "vectors", "views"])
def test_the_card_is_complete(runs, tmp_path, name):
    text = write(runs(name), tmp_path)
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == HEADINGS
    assert "None" not in text.replace("state.device=None", "") and "nan" not in text
    sections = [part.partition("\n")[2].strip() for part in text.split("\n## ")[1:]]
    assert all(sections)
    results = json.loads((runs(name) / "results.json").read_text())
    assert f"| number of pairs | {results['pairs']} |" in text
    assert f"| temperature | {results['temperature']:.6g} |" in text
    for key, value in (results["val"] or {}).items():
        assert f"| `{key}` | {value:.4g} |" in text


def test_the_facts_of_a_run(runs, tmp_path):
    text = write(runs("clip_at_another_size"), tmp_path)
    header = yaml.safe_load(text.split("---")[1])
    assert header["library_name"] == "nuclr" and header["license"] is None, "the license is left to the user"
    for fact in (
        "48 x 48 pixels", "12 tokens", "(0.1, 0.2, 0.3)", "(0.4, 0.5, 0.6)", "| temperature | 0.05 |",
        "'clip_vision_model', 48 px", f"| started from | `{runs('clip_at_another_size').parent / 'clip'}` |",
        "| training pairs | `builtin:n=32` |", "| augmentation of images | none |",
    ):  # fmt: skip
        assert fact in text
    squashed = write(runs("resnet"), tmp_path)
    assert "40 x 40 pixels" in squashed and "ImageOps.fit" not in squashed
    results = json.loads((runs("separate") / "results.json").read_text())
    assert f"| `mean_R@1` | {results['best']:.4g} |" in write(runs("separate"), tmp_path, best=True)


def test_names_of_users_are_not_markup(runs, tmp_path):
    trained = open_trained(runs("vectors"), "hf")
    trained.run.settings = replace(trained.run.settings, name="<img src=x> | `a`\n# b")
    write_card(trained, Written("nuclr", "feature-extraction", "code = 1"), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "<img" not in text and "\n# b" not in text
