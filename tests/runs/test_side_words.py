"""Words for the sides."""

import pytest

from nuclr.runs.side_words import heading, name_sides


@pytest.mark.parametrize(
    ("sides", "many", "columns"),
    [
        (("image", "image", "text", "text"), ["images", "captions"], ["image", "caption"]),
        (("text", "text", "image", "image"), ["captions", "images"], ["caption", "image"]),
        (("image", "vector", "text", "vector"), ["images", "captions"], ["image", "caption"]),
        (("en", "text", "de", "text"), ["en texts", "de texts"], ["en", "de"]),
        (("x", "vector", "y", "vector"), ["x vectors", "y vectors"], ["x vector", "y vector"]),
        (("number", "text", "text", "text"), ["number texts", "texts"], ["number text", "text"]),
        (("price", "series", "text", "text"), ["price series", "texts"], ["price", "text"]),
    ],
)
def test_words(sides, many, columns):
    words = name_sides(*sides)
    assert [side.many for side in words] == many and [side.column for side in words] == columns


def test_views_have_one_name():
    assert {side.many for side in name_sides("view 1", "image", "view 2", "image", views=True)} == {"images"}


def test_articles_and_headings():
    image, caption = name_sides("image", "image", "text", "text")
    assert (image.a, caption.a, image.title) == ("an image", "a caption", "Images")
    assert name_sides("en", "text", "de", "text")[0].title == "en texts", "names of users keep their case"
    assert (heading("image to text"), heading("en to de")) == ("Image to text", "en to de")
