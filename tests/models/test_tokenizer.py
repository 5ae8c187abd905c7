"""The tokenizer trained on captions: [CLS] first, nothing unknown, the same in every process."""

import subprocess
import sys

import pytest
import torch

from nuclr.errors import UserError
from nuclr.models import Tokenizer, train_tokenizer

from .conftest import CAPTIONS


def test_tokens(tokenizer):
    encode = Tokenizer(tokenizer, max_length=8)
    tokens = encode(["A red CIRCLE", "on"])
    assert tokens.keys() == {"input_ids", "attention_mask"}
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    assert tokenizer.decode(ids[1]) == "[CLS] on[SEP]" + "[PAD]" * int((mask[1] == 0).sum())
    assert torch.equal(encode(["a red circle", "on"])["input_ids"], ids)
    assert mask.dtype == ids.dtype == torch.int64


def test_lengths(tokenizer):
    long = " ".join(CAPTIONS * 5)
    ids = Tokenizer(tokenizer, max_length=8)([long, "a"])["input_ids"]
    assert ids.shape == (2, 8)
    assert ids[0, -1] == tokenizer.sep_token_id
    padded = Tokenizer(tokenizer, max_length=8, padding="max_length")(["a"])
    assert padded.keys() == {"input_ids"}
    assert padded["input_ids"].shape == (1, 8)


def test_nothing_is_unknown(tokenizer):
    for text in ("ünïcödé", "猫と犬", "🤗", ""):
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_vocabulary_is_bounded_and_used():
    captions = [f"number {number}" for number in range(2000)]
    assert len(train_tokenizer(captions, 500)) == 500
    assert len(train_tokenizer(CAPTIONS)) < 500
    with pytest.raises(UserError, match="at least 260"):
        train_tokenizer(captions, 100)


def test_same_captions_same_tokens_in_another_process():
    captions = [f"w{number % 97:x} of {number % 89:x} and {number % 61}" for number in range(400)]
    program = (
        "import sys, hashlib; from nuclr.models import train_tokenizer; "
        "text = train_tokenizer(sys.stdin.read().splitlines(), 400).backend_tokenizer.to_str(); "
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], input="\n".join(captions), capture_output=True, text=True)
        for _ in range(2)
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout


def test_one_string_is_refused(tokenizer):
    with pytest.raises(UserError, match="list"):
        Tokenizer(tokenizer, 8)("a red circle")
