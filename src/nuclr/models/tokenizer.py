"""Texts -> tokens. A tower that comes with a tokenizer uses that; one from scratch gets one trained on the captions."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from nuclr.errors import UserError
from nuclr.models.backbones import first_line, quiet
from nuclr.models.locate import locate
from nuclr.models.towers import OWN_TEXT_POOLING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Padding = Literal["longest", "max_length"]

MAX_LENGTH = 64
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
PAD, UNKNOWN, FIRST, LAST = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class Tokenizer:
    """Lists of texts to tensors: at most `max_length` tokens, padded to the longest and masked.

    With `padding` "max_length" all have that length, and no mask: SigLIP was trained to read its padding.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int, padding: Padding = "longest") -> None:
        self.tokenizer, self.max_length, self.padding = tokenizer, max_length, padding

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """`input_ids` (b, length), with `attention_mask` and what else the tower was trained with."""
        if isinstance(texts, str):
            raise UserError("texts: a single string; needs a list of them")
        encoded = self.tokenizer(list(texts), padding=self.padding, truncation=True, max_length=self.max_length)
        names = ["input_ids"] if self.padding == "max_length" else encoded.keys()
        return {name: torch.tensor(encoded[name]) for name in names}


def train_tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> "PreTrainedTokenizerBase":
    """A lower-casing tokenizer of at most `vocabulary` tokens: "[CLS] text [SEP]".

    Byte-level BPE: no text is unknown to it, and the same captions give the same tokens in every process, which the
    library's WordPiece does not (huggingface/tokenizers#1794).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < (least := len(SPECIAL) + 256):
        raise UserError(f"vocabulary: {vocabulary}; needs at least {least}, one for each byte and the special tokens")
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in (FIRST, LAST)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{FIRST} $A {LAST}", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=FIRST,
        sep_token=LAST,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(source: str | os.PathLike[str], key: str, hub: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder or hub name; `key` names the argument in messages."""
    from transformers import AutoTokenizer

    folder = Path(source)
    if not any((folder / name).is_file() for name in FILES):
        if hub and not folder.is_dir():
            folder = locate(source, key)
        else:
            raise UserError(
                f"{key}: {folder} holds no tokenizer (tokenizer.json); save the one it was trained with there: "
                "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
            )
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever the format's reader did
        raise UserError(f"{key}: the tokenizer in {folder} cannot be read ({first_line(error)})") from None


def tokenizer_for(
    config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase", max_length: int | None
) -> Tokenizer:
    """How a text tower was trained to be fed: CLIP and SigLIP to their full length, SigLIP padded to it."""
    longest = getattr(config, "max_position_embeddings", None) or MAX_LENGTH
    if max_length is not None and max_length > longest:
        raise UserError(f"model.y.max_length: {max_length}; this text tower takes at most {longest} tokens")
    known = getattr(config, "vocab_size", 0)
    if len(tokenizer) > known:
        raise UserError(
            f"model.y.tokenizer: has {len(tokenizer)} tokens, but the text tower ({config.model_type}) knows {known}"
        )
    joint = config.model_type in OWN_TEXT_POOLING
    padding: Padding = "max_length" if config.model_type == "siglip_text_model" else "longest"
    return Tokenizer(tokenizer, max_length or (longest if joint else min(longest, MAX_LENGTH)), padding)
