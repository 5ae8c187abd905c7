"""Labeled images and prompt files: folders, class names, templates and prompts."""

import json

import pytest

from nuclr.data import check_samples, open_labeled
from nuclr.data.labeled import read_prompts
from nuclr.errors import UserError
from tests.data import make


def folders(tmp_path, **counts):
    for name, count in counts.items():
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.jpg").write_bytes(make.picture(number))
        (tmp_path / name / "notes.txt").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("classes", "names", "labels"),
    [
        (None, ["cat", "dog"], [0, 0, 1, 1, 1]),
        (["dog", "cat"], ["dog", "cat"], [0, 0, 0, 1, 1]),
        (["a cat", "a dog"], ["a cat", "a dog"], [0, 0, 1, 1, 1]),
        ({"dog": "a dog", "cat": "a cat"}, ["a dog", "a cat"], [0, 0, 0, 1, 1]),
    ],
)
def test_class_names_come_from_folders_or_json(tmp_path, classes, names, labels):
    folders(tmp_path, cat=2, dog=3)
    if classes is not None:
        (tmp_path / "classes.json").write_text(json.dumps(classes))
    labeled = open_labeled(tmp_path)
    assert labeled.classes == names
    assert labeled.sides["y"].ids.tolist() == labels
    assert labeled.sides["x"].ids.tolist() == [0, 1, 2, 3, 4]
    assert [labeled.item("y", number) for number in range(5)] == [names[label] for label in labels]
    assert labeled.prompts() == [[f"a photo of a {name}."] for name in names]
    assert labeled.item("x", 4).size == (24, 20)


def test_templates_make_the_prompts(tmp_path):
    (folders(tmp_path, cat=1, dog=1) / "templates.json").write_text('["a {}", "one {} more"]')
    assert open_labeled(tmp_path).prompts() == [["a cat", "one cat more"], ["a dog", "one dog more"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("classes.json", ["cat", "dog", "cow"], r"classes\.json: .*cow"),
        ("classes.json", {"cat": "a", "cow": "b"}, "cow, dog"),
        ("classes.json", "cat", r"classes\.json"),
        ("templates.json", ["no place"], "no place"),
    ],
)
def test_wrong_class_names_and_templates_are_refused(tmp_path, name, content, message):
    (folders(tmp_path, cat=1, dog=1) / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        open_labeled(tmp_path)


def test_wrong_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="gone"):
        open_labeled(tmp_path / "gone")
    with pytest.raises(UserError, match=tmp_path.name):
        open_labeled(tmp_path)
    with pytest.raises(UserError, match=tmp_path.name):
        open_labeled(folders(tmp_path, cat=1))
    folders(tmp_path, dog=0)
    with pytest.raises(UserError, match="dog"):
        open_labeled(tmp_path)


def test_images_that_are_links_out_of_the_folder_are_bad_samples_unless_allowed(tmp_path):
    folder = folders(make.write_images(tmp_path / "data"), cat=2, dog=2)
    image = folder / "cat" / "0.jpg"
    image.rename(tmp_path / "elsewhere.jpg")
    image.symlink_to(tmp_path / "elsewhere.jpg")
    (bad,) = check_samples(open_labeled(folder), max_bad_share=1).values()
    assert bad == "outside data.root; data.allow_outside=true allows this"
    assert check_samples(open_labeled(folder, allow_outside=True)) == {}


@pytest.mark.parametrize("name", ["classes.json", "templates.json"])
@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[" + "9" * 5_000 + "]", '{"classes": 3}', '{"a": []}', "[[]]", "3", b"[\xff]"]
)
def test_damaged_class_names_and_templates_are_refused(tmp_path, name, content):
    folders(tmp_path, cat=1, dog=1)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        open_labeled(tmp_path)
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 500


FOLDERS, NAMES, OWN = ["n01", "n02"], ["cat", "dog"], ["own {}"]


def write_prompts(tmp_path, content, name="prompts.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "names", "prompts"),
    [
        (["a {}", "{c}!"], NAMES, [["a cat", "cat!"], ["a dog", "dog!"]]),
        ({"templates": ["{}?"]}, NAMES, [["cat?"], ["dog?"]]),
        ({"classes": ["Cat", "Dog"]}, ["Cat", "Dog"], [["own Cat"], ["own Dog"]]),
        ({"classes": {"n02": "D", "cat": "C"}, "templates": ["{}"]}, ["C", "D"], [["C"], ["D"]]),
        ({"cat": ["a cat", "one {}"], "n02": "dogs"}, NAMES, [["a cat", "one cat"], ["dogs"]]),
        ({"pets": ["the {c}"], "cars": ["{c}"]}, NAMES, [["the cat"], ["the dog"]]),
        ({"pets": {"cat": "a", "dog": "b", "cow": "c"}}, NAMES, [["a"], ["b"]]),
    ],
)
def test_json_files(tmp_path, content, names, prompts):
    path = write_prompts(tmp_path, content)
    texts = read_prompts(path, "pets").texts(FOLDERS, NAMES, OWN)
    assert (texts.names, texts.prompts, texts.file) == (names, prompts, path)


def test_text_files(tmp_path):
    lines = "# templates\n\na {}.\n  the {c}.\n"
    texts = read_prompts(write_prompts(tmp_path, lines, "prompts.txt")).texts(FOLDERS, NAMES, OWN)
    assert texts.templates == ["a {}.", "the {}."] and texts.prompts[0] == ["a cat.", "the cat."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "line 1"),
        ([], "templates"),
        (["a photo"], "a photo"),
        ([1], "templates"),
        ("3", "templates"),
        ({}, "'n01' or 'cat'"),
        ({"classes": ["cat"]}, "1 classes"),
        ({"classes": {"cat": "C"}}, "'n02' or 'dog'"),
        ({"classes": ["cat", ""]}, "classes"),
        ({"classes": 3}, "classes"),
        ({"cat": "a cat"}, "'n02' or 'dog'"),
        ({"cat": "a cat", "dog": [""]}, "'dog'"),
        ({"cat": "a cat", "dog": {"a": 1}}, "'dog'"),
    ],
)
def test_wrong_files_are_refused(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        read_prompts(write_prompts(tmp_path, content)).texts(FOLDERS, NAMES, OWN)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.json"):
        read_prompts(tmp_path / "nothing.json")
    with pytest.raises(UserError, match=r"prompts\.py"):
        read_prompts(write_prompts(tmp_path, "a {}", "prompts.py"))
