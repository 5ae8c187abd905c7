"""Pictures of files that popularity.csv names."""

from nuclr.report.pictures import pictures_of_files
from tests.data import make


def test_names_that_are_too_long_have_no_picture(tmp_path):
    make.write_images(tmp_path)
    files = ["n" * 300, str(tmp_path / "a.jpg")]
    picture = pictures_of_files({"x": {number: {"image": file} for number, file in enumerate(files)}})
    assert picture("x", 0) is None and picture("x", 1).startswith("data:image/jpeg;base64,")
