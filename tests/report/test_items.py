"""Items of a side: pictures, texts, numbers."""

import numpy as np
import pytest
from PIL import Image

from nuclr.data import open_pairs
from nuclr.report.items import Items, draw_curve, show_item
from nuclr.report.page import LONGEST


def test_a_picture_a_text_and_numbers():
    picture = show_item(Image.new("RGB", (300, 200)), "image 3")
    assert picture.kind == "picture" and picture.picture.startswith("data:image/jpeg;base64,")
    text = show_item("ein Hund", "de text 3")
    assert (text.kind, text.plain, text.picture) == ("text", "ein Hund", None)
    vector = show_item(np.array([3.0, -4.0]), "x vector 3")
    assert (vector.kind, vector.plain) == ("numbers", "x vector 3")
    assert vector.curve.count("<polyline") == 1 and "2 numbers, norm 5" in vector.curve
    hidden = show_item(Image.new("RGB", (8, 8)), "image 3", pictures=False)
    assert hidden.picture is None and hidden.plain == "image 3"
    assert len(show_item("word " * 10_000, "text 0").text) <= LONGEST


@pytest.mark.parametrize("vector", [[], [1.0], [0.0, 0.0], [np.nan, np.inf], np.sin(np.arange(5000.0))])
def test_any_numbers_have_a_curve_inside_its_box(vector):
    curve = draw_curve(np.nan_to_num(np.array(vector)), '"><script>')
    assert "<script>" not in curve and len(curve) < 3000
    points = [pair.split(",") for pair in curve.partition('points="')[2].partition('"')[0].split()]
    assert all(0 <= float(x) <= 96 and 0 <= float(y) <= 28 for x, y in points)


def test_items_of_pairs_are_made_once(tmp_path):
    pairs = open_pairs("builtin:n=20")
    items = Items(pairs)
    assert items.item("x", 3).label == pairs.name(3) and items.item("y", 3).text == pairs.item("y", 3)
    assert items.item("x", 3) is items.item("x", 3)
    assert Items(pairs, pictures=False).item("x", 3).picture is None
    np.savez(tmp_path / "e.npz", x=np.eye(3), y=np.eye(3))
    vectors = Items(open_pairs(str(tmp_path / "e.npz")))
    assert vectors.item("y", 1).label == "y vector 1" and vectors.item("y", 1).curve


def test_two_images_of_a_pair_have_their_own_file_names(tmp_path):
    for name in ("a", "b", "c"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "two.csv").write_text("before,after\na.png,b.png\nb.png,c.png\n")
    items = Items(open_pairs(tmp_path / "two.csv"))
    assert [items.item(side, 0).label for side in "xy"] == ["a.png", "b.png"]
    (tmp_path / "a.png").write_bytes(b"broken")
    assert Items(open_pairs(tmp_path / "two.csv")).item("x", 0).picture is None
