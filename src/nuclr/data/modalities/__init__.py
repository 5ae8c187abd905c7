"""Modalities: what a side of a pair can hold. image, text and vector are built in; a plugin can register others.

`base` has the interface and the registry. `image`, `text` and `vector` have one modality each. `augment` augments
batches of images.
"""

from nuclr.data.modalities.base import Folder, Modality, Shown, get_modality, modality_names, register_modality
from nuclr.data.modalities.image import ImageModality, ImageOptions
from nuclr.data.modalities.text import TextModality, TextOptions, albef_caption
from nuclr.data.modalities.vector import VectorModality

for _modality in (ImageModality(), TextModality(), VectorModality()):
    register_modality(_modality)

__all__ = [
    "Folder",
    "ImageModality",
    "ImageOptions",
    "Modality",
    "Shown",
    "TextModality",
    "TextOptions",
    "VectorModality",
    "albef_caption",
    "get_modality",
    "modality_names",
    "register_modality",
]
