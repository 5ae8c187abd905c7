"""Words for the sides."""

import pytest

from nuclr.data.side import name_sides


@pytest.mark.parametrize(
    ("sides", "many"),
    [
        (("image", "image", "text", "text"), ["images", "captions"]),
        (("text", "text", "image", "image"), ["captions", "images"]),
        (("image", "vector", "text", "vector"), ["images", "captions"]),
        (("en", "text", "de", "text"), ["en texts", "de texts"]),
        (("x", "vector", "y", "vector"), ["x vectors", "y vectors"]),
        (("number", "text", "text", "text"), ["number texts", "texts"]),
        (("price", "series", "text", "text"), ["price series", "texts"]),
    ],
)
def test_words(sides, many):
    assert [side.many for side in name_sides(*sides)] == many


def test_views_have_one_name():
    assert {side.many for side in name_sides("view 1", "image", "view 2", "image", views=True)} == {"images"}
