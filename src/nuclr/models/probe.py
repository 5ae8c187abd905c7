"""Trying a tower once: the number of its features, and what of it they do not depend on."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from nuclr.errors import UserError
from nuclr.models.backbones import first_line
from nuclr.models.image_format import ImageFormat
from nuclr.models.tokenizer import Tokenizer

Name = str | os.PathLike[str]


def probe_images(encoder: nn.Module, images: ImageFormat, source: Name) -> int:
    """The number of features, by trying one image."""
    try:
        features = _probe(encoder, torch.zeros(1, 3, images.size, images.size))
    except Exception as error:  # whatever a foreign network raises
        raise UserError(f"image: {source} does not take {images.size}-pixel images ({first_line(error)})") from None
    return features.shape[1]


def probe_texts(encoder: nn.Module, texts: Tokenizer, source: Name) -> int:
    """The number of features, by trying two texts; refused if they look the same to it."""
    tokens = texts(["one dog", "two white cats"])
    try:
        features = _probe(encoder, tokens)
    except Exception as error:  # whatever a foreign network raises
        raise UserError(f"text: {source} does not take its tokenizer's texts ({first_line(error)})") from None
    if torch.equal(*features) and not torch.equal(*tokens["input_ids"]):
        raise UserError(f"text: in {source} the first token sees no other; needs an encoder such as BERT, no decoder")
    return features.shape[1]


def _probe(encoder: nn.Module, inputs: Any) -> Tensor:
    """Features in eval mode; parameters that they do not depend on stop asking for a gradient.

    Such are mask tokens and unused poolers: DistributedDataParallel would wait for their gradients in vain.
    """
    was_training = encoder.training
    encoder.eval()
    with torch.enable_grad():
        features: Tensor = encoder(inputs)
        parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True) if parameters else ()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)
    encoder.train(was_training)
    return features.detach()
