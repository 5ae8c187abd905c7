"""Views: a folder of images, or the images of any source, as pairs of an image and itself."""

import numpy as np
import pytest

from nuclr.data import ImageOptions, Loader, SideChoice, check_samples, open_pairs
from nuclr.errors import UserError
from tests.data import make


def test_a_folder_of_images_is_read_recursively(tmp_path):
    make.write_images(tmp_path / "cats")
    make.write_images(tmp_path / "dogs" / "small")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "dogs" / "broken.jpg").write_bytes(b"no image")
    pairs = open_pairs(tmp_path, views=True)
    assert repr(pairs) == f"ViewPairs({tmp_path.name!r}, 11 pairs, image to image)"
    assert pairs.views and pairs.side_names == ("view 1", "view 2")
    assert pairs.sides["x"].ids.tolist() == pairs.sides["y"].ids.tolist() == list(range(11))
    assert [pairs.name(number) for number in (0, 5, 10)] == ["cats/a.jpg", "dogs/broken.jpg", "dogs/small/e.jpg"]
    assert list(check_samples(pairs, max_bad_share=0.1)) == [5]
    (batch,) = Loader(pairs, x=ImageOptions(8)).load([[0, 10]])
    assert batch.x.shape == (2, 3, 8, 8) and batch.y is batch.x
    with pytest.raises(UserError, match=r"data\.contrast=views"):
        open_pairs(tmp_path)


def test_links_that_leave_the_folder_are_bad_samples(tmp_path):
    make.write_images(tmp_path / "data")
    make.write_images(tmp_path / "secret")
    (tmp_path / "data" / "link.jpg").symlink_to(tmp_path / "secret" / "a.jpg")
    bad = check_samples(open_pairs(tmp_path / "data", views=True), max_bad_share=1)
    assert bad == {5: "outside data.root; data.allow_outside=true allows this"}
    assert check_samples(open_pairs(tmp_path / "data", views=True, allow_outside=True)) == {}


@pytest.mark.parametrize("write", make.FORMATS)
def test_every_distinct_image_of_a_source_is_one_pair(tmp_path, write):
    pairs = open_pairs(write(tmp_path), views=True)
    assert len(pairs) == 5 and pairs.views and check_samples(pairs) == {}
    expected = open_pairs(make.jsonl(tmp_path / "list"), views=True)
    for number in range(5):
        assert np.array_equal(np.asarray(pairs[number].x), np.asarray(expected[number].x))
        assert np.array_equal(np.asarray(pairs[number].x), np.asarray(pairs[number].y))


def test_captions_are_not_needed(tmp_path):
    make.write_images(tmp_path)
    pairs = open_pairs(make.write_lines(tmp_path / "p.jsonl", {"image": "a.jpg"}, {"image": "b.png"}), views=True)
    assert len(pairs) == 2 and check_samples(pairs) == {}
    members = {f"{number}.jpg": make.picture(number) for number in range(3)}
    pairs = open_pairs(make.write_tar(tmp_path / "t.tar", members), views=True)
    assert len(pairs) == 3 and check_samples(pairs) == {} and pairs.name(2) == "t.tar/2.jpg"


def test_a_source_without_images_is_refused(tmp_path):
    np.savez(tmp_path / "e.npz", x=np.eye(3), y=np.eye(3))
    with pytest.raises(UserError, match=r"e\.npz: data\.contrast=views needs images, and this source holds vectors"):
        open_pairs(tmp_path / "e.npz", views=True)
    path = make.write_lines(tmp_path / "p.jsonl", {"question": "a", "answer": "b"})
    with pytest.raises(UserError, match=r"data\.contrast=views.*'question', 'answer'"):
        open_pairs(path, views=True)
    with pytest.raises(UserError, match=r"p\.jsonl: data\.contrast=views needs images, and this source holds texts"):
        open_pairs(path, views=True, x=SideChoice("question"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder has no images"):
        open_pairs(tmp_path / "empty", views=True)
