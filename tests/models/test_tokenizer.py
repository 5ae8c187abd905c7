"""The tokenizer trained on texts: [CLS] first, every text can be encoded, the same in every process."""

import subprocess
import sys

import pytest
import torch

from nuclr.errors import UserError
from nuclr.models import Tokenizer, train_tokenizer

from .conftest import CAPTIONS


def test_tokens(tokenizer):
    encode = Tokenizer(tokenizer, max_length=8)
    tokens = encode.prepare(["A red CIRCLE", "on"])
    assert tokens.keys() == {"input_ids", "attention_mask"}
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    assert tokenizer.decode(ids[1]) == "[CLS] on[SEP]" + "[PAD]" * int((mask[1] == 0).sum())
    assert torch.equal(encode.prepare(["a red circle", "on"])["input_ids"], ids)
    assert mask.dtype == ids.dtype == torch.int64


def test_long_texts_are_cut_and_short_ones_padded(tokenizer):
    long = " ".join(CAPTIONS * 5)
    ids = Tokenizer(tokenizer, max_length=8).prepare([long, "a"])["input_ids"]
    assert ids.shape == (2, 8)
    assert ids[0, -1] == tokenizer.sep_token_id
    padded = Tokenizer(tokenizer, max_length=8, padding="max_length").prepare(["a"])
    assert padded.keys() == {"input_ids"}
    assert padded["input_ids"].shape == (1, 8)


def test_every_text_can_be_encoded(tokenizer):
    for text in ("ünïcödé", "猫と犬", "🤗", ""):
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_vocabulary_has_at_most_the_given_size():
    captions = [f"number {number}" for number in range(2000)]
    assert len(train_tokenizer(captions, 500)) == 500
    assert len(train_tokenizer(CAPTIONS)) < 500


@pytest.mark.slow
def test_same_captions_same_tokens_in_another_process():
    captions = [f"w{number % 97:x} of {number % 89:x} and {number % 61}" for number in range(400)]
    program = (
        "import sys; from nuclr.models import train_tokenizer; "
        "print(train_tokenizer(sys.stdin.read().splitlines(), 400).backend_tokenizer.to_str())"
    )
    other = subprocess.run([sys.executable, "-c", program], input="\n".join(captions), capture_output=True, text=True)
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == train_tokenizer(captions, 400).backend_tokenizer.to_str()


@pytest.mark.parametrize("texts", [["a", None], 7, {"a": 1}])
def test_other_inputs_are_refused(tokenizer, texts):
    with pytest.raises(UserError, match="texts"):
        Tokenizer(tokenizer, 8).prepare(texts)
