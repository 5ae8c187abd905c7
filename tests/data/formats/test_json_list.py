"""Caption lists in JSON: splits, keys, and the messages for wrong lists."""

import json
import re

import pytest

from nuclr.data import check_samples, open_pairs
from nuclr.errors import UserError
from tests.data import make


def captions(pairs):
    return [pairs.item("y", number) for number in range(len(pairs))]


def test_a_karpathy_list_is_read_by_split(tmp_path):
    path = make.karpathy(tmp_path)
    content = json.loads(path.read_text())
    for entry, split in zip(content["images"], ["train", "val", "restval", "test", "train"], strict=True):
        entry["split"] = split
    path.write_text(json.dumps(content))
    assert open_pairs(path, split="train").sides["x"].ids.tolist() == [0, 0, 0, 1]
    assert len(open_pairs(path, split="train+restval")) == 5
    with pytest.raises(UserError, match=r"no entry of split 'dev' \(data\.split\); found: restval, test, train, val"):
        open_pairs(path, split="dev")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.jsonl", '{"image": "a.jpg", "caption": "x"}\n{"image": \n', r"l\.jsonl, line 2: not JSON"),
        ("l.jsonl", '["a.jpg", "x"]\n', r"line 1: \[\"a\.jpg\", \"x\"\] is not an entry such as \{\"question\""),
        ("l.jsonl", '{"image": 3, "caption": "x"}\n', "line 1: image is 3"),
        ("l.jsonl", '{"image": "a.jpg", "caption": {"en": "x"}}\n', r"line 1: caption is \{"),
        ("l.jsonl", '{"image": "a.jpg", "label": "x", "id": 3}\n', "'image', 'label'.*data.y.key"),
        ("l.jsonl", b'{"image": "a.jpg", "caption": "caf\xe9"}\n', r"l\.jsonl: not UTF-8"),
        ("l.json", '[{"image": "a.jpg",\n "caption": "x"},\n {"image" "b.png"}]', r"l\.json, line 3: not JSON"),
        ("l.json", '[{"image": "a.jpg", "caption": "x"},\n', r"line 2: not JSON"),
        ("l.json", '{"a.jpg": "x"}', r"is neither a list of .* nor a Karpathy split"),
        ("l.json", '{"images": [{"id": 3}]}', "sentences"),
        ("l.json", '{"images": [{"sentences": [{"tokens": []}]}]}', r"0.*\"filename\""),
        ("l.json", "[]", "holds no pairs"),
        ("l.json", '"text"', "is neither a list"),
    ],
)  # fmt: skip
def test_a_wrong_list_is_refused_with_a_message_that_names_the_line(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message) as caught:
        open_pairs(make.write_list(tmp_path, name, text))
    assert str(caught.value).count("\n") == 0


HUGE = {
    "nested": '{"image": "a.jpg", "caption": "x", "other": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "digits": '{"image": "a.jpg", "caption": "x", "id": ' + "7" * 5_000 + "}",
    "long": '{"image": "a.jpg", "caption": "' + "x" * 10_000_000 + '"}',
    "surrogate": '{"image": "a.jpg", "caption": "a \\ud800 b"}',
}
REASONS = {
    "nested": "line 2: .* nested",
    "digits": "line 2: .* number too long",
    "long": "caption of 10,000,000",
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_line_that_is_too_deep_or_too_long_is_a_bad_sample(tmp_path, kind):
    good = '{"image": "a.jpg", "caption": "good"}\n'
    pairs = open_pairs(make.write_list(tmp_path, "l.jsonl", good + HUGE[kind] + "\n" + good))
    assert len(pairs) == 3
    if kind == "surrogate":
        assert pairs.item("y", 1) == "a \ufffd b" and not pairs.known_bad
        return
    bad = check_samples(pairs, max_bad_share=1)
    assert list(bad) == [1] and re.match(REASONS[kind], bad[1])
    assert (pairs.item("y", 0), pairs.item("y", 2)) == ("good", "good")


@pytest.mark.parametrize("kind", ["nested", "digits"])
@pytest.mark.parametrize("form", ["[{}]", '{{"images": [{}]}}'])
def test_a_json_document_that_is_too_deep_is_refused(tmp_path, kind, form):
    with pytest.raises(UserError, match=r"l\.json, line 1: not JSON"):
        open_pairs(make.write_list(tmp_path, "l.json", form.format(HUGE[kind])))


def test_a_deep_or_long_value_is_shown_in_one_short_line(tmp_path):
    entry = '{"image": ' + "[" * 900 + "]" * 900 + ', "caption": "x"}\n'
    with pytest.raises(UserError, match="image is ") as caught:
        open_pairs(make.write_list(tmp_path, "l.jsonl", entry))
    assert len(str(caught.value)) < 300
