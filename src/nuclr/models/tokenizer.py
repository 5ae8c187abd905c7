"""Prepare texts for a text tower: with the tokenizer that belongs to it, or with one trained on the user's texts."""

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from nuclr.errors import UserError
from nuclr.files import readable
from nuclr.models.backbones import LOCAL, locate, quiet
from nuclr.models.encoder import Inputs
from nuclr.models.towers import OWN_TEXT_POOLING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Padding = Literal["longest", "max_length"]
PADDINGS = ("longest", "max_length")

MAX_LENGTH = 64
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
PAD = "[PAD]"
UNKNOWN = "[UNK]"
FIRST = "[CLS]"
LAST = "[SEP]"
SPECIAL = (PAD, UNKNOWN, FIRST, LAST)


class Tokenizer(Inputs):
    """Convert texts to the tensors that a text tower takes.

    Args:
        tokenizer: a tokenizer of transformers.
        max_length: largest number of tokens per text; longer texts are cut.
        padding: "longest" pads texts to the longest of the batch and masks the padding. "max_length" pads to
            `max_length` without a mask, as SigLIP was trained.

    Example:
        >>> tokenizer = Tokenizer(train_tokenizer(["a red circle", "two green squares"]), max_length=8)
        >>> tokenizer.prepare("a dog")["input_ids"].shape[0]
        1

    """

    modality: ClassVar[str] = "text"

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_length: int,
        padding: Padding = "longest",
    ) -> None:
        if type(max_length) is not int or max_length < 1 or padding not in PADDINGS:
            raise ValueError(f"texts: max_length={max_length!r}, padding={padding!r} cannot be used")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.padding = padding

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self):,} tokens, max_length={self.max_length}, padding={self.padding!r})"

    def example(self) -> dict[str, Tensor]:
        """Return the tokens of two different texts, to try a tower with."""
        return self.prepare(["one dog", "two white cats"])

    def batch(self, items: Any) -> list[str]:
        """Return one text or several as a list of strings; raise UserError if an item is not a string."""
        is_list = isinstance(items, Iterable) and not isinstance(items, str | bytes | dict)
        batch = list(items) if is_list else [items]
        for number, text in enumerate(batch):
            if not isinstance(text, str):
                raise UserError(f"texts: item {number} is of type {type(text).__name__}; needs a string")
        return batch

    def prepare(self, items: str | Iterable[str]) -> dict[str, Tensor]:
        """Tokenize one text or several.

        Args:
            items: a string or a list of strings.

        Returns:
            `input_ids` (n, length), and with padding "longest" also `attention_mask` and the tower's other inputs.

        Raises:
            UserError: if an item is not a string.

        """
        encoded = self.tokenizer(
            self.batch(items),
            padding=self.padding,
            truncation=True,
            max_length=self.max_length,
        )
        names = ["input_ids"] if self.padding == "max_length" else encoded.keys()
        # torch.tensor reads nested lists far more slowly than numpy does.
        return {name: torch.from_numpy(np.array(encoded[name], np.int64)) for name in names}

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files, with `max_length`, at which transformers then truncates."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.model_max_length = self.max_length
        tokenizer.save_pretrained(folder)


def train_tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> "PreTrainedTokenizerBase":
    """Train a lower-casing tokenizer, which encodes a text as "[CLS] text [SEP]".

    It is a byte-level BPE: every text can be encoded, and the same texts give the same tokens in every process. The
    WordPiece of the tokenizers library does not guarantee that (huggingface/tokenizers#1794).

    Args:
        texts: texts to train on.
        vocabulary: largest number of tokens, at least 260: the bytes and the special tokens.

    Returns:
        A tokenizer of transformers.

    Example:
        >>> tokenizer = train_tokenizer(["a red circle", "two green squares"])
        >>> tokenizer.decode(tokenizer("A Circle")["input_ids"])
        '[CLS] a circle[SEP]'

    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

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


def load_tokenizer(
    source: str | os.PathLike[str],
    key: str,
    hub: bool = False,
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in a folder.

    Args:
        source: the folder, or with `hub` a name on the Hugging Face hub.
        key: the settings key to name in messages.
        hub: whether `source` may be a name on the hub.

    """
    from transformers import AutoTokenizer

    folder = Path(source).expanduser()
    if not any((folder / name).is_file() for name in FILES):
        if hub and not folder.is_dir():
            folder = locate(source, key)
        else:
            raise UserError(
                f"{key}: {folder} has no tokenizer (tokenizer.json); save the one it was trained with there: "
                "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
            )
    with quiet(), readable(f"{key}: {folder}", "a tokenizer"):
        return AutoTokenizer.from_pretrained(folder, **LOCAL)


def tokenizer_for(
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int | None,
    key: str,
) -> Tokenizer:
    """Return a `Tokenizer` with the length and the padding that a text tower was trained with.

    Args:
        config: the text tower's configuration.
        tokenizer: a tokenizer of transformers.
        max_length: largest number of tokens. Default: all positions of a CLIP or SigLIP, otherwise at most 64.
        key: the settings key of the side ("model.y"), to name in messages.

    """
    positions = getattr(config, "max_position_embeddings", None) or MAX_LENGTH
    if max_length is not None and max_length > positions:
        raise UserError(f"{key}.max_length: {max_length}; this text encoder takes at most {positions} tokens")
    known = getattr(config, "vocab_size", 0)
    if len(tokenizer) > known:
        raise UserError(
            f"{key}.tokenizer: has {len(tokenizer)} tokens, but the text encoder ({config.model_type}) knows {known}"
        )
    own_pooling = config.model_type in OWN_TEXT_POOLING
    padding: Padding = "max_length" if config.model_type == "siglip_text_model" else "longest"
    return Tokenizer(tokenizer, max_length or (positions if own_pooling else min(positions, MAX_LENGTH)), padding)
