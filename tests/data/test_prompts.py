"""Prompt files in every form, and what is wrong with others."""

import json

import pytest

from nuclr.data.labeled import read_prompts
from nuclr.errors import UserError

FOLDERS, NAMES, OWN = ["n01", "n02"], ["cat", "dog"], ["own {}"]


def write(tmp_path, content, name="prompts.json"):
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
    path = write(tmp_path, content)
    texts = read_prompts(path, "pets").texts(FOLDERS, NAMES, OWN)
    assert (texts.names, texts.prompts, texts.file) == (names, prompts, path)


def test_text_files(tmp_path):
    lines = '# templates\n\na {}.\nthe {c}.\nlambda c: f\'a photo of the "{c}".\',\n  lambda name: f"{name}"\n'
    texts = read_prompts(write(tmp_path, lines, "prompts.txt")).texts(FOLDERS, NAMES, OWN)
    assert texts.templates == ["a {}.", "the {}.", 'a photo of the "{}".', "{}"]
    assert texts.prompts[0] == ["a cat.", "the cat.", 'a photo of the "cat".', "cat"]


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
        read_prompts(write(tmp_path, content)).texts(FOLDERS, NAMES, OWN)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.json"):
        read_prompts(tmp_path / "nothing.json")
    with pytest.raises(UserError, match=r"prompts\.py"):
        read_prompts(write(tmp_path, "a {}", "prompts.py"))
