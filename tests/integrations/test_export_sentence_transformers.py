"""Exports to sentence-transformers are read back by it and give the features of the run."""

import pytest
from PIL import Image, ImageOps

from nuclr.arrays import shorten
from nuclr.evaluation import retrieval_metrics
from nuclr.runs.run import Run
from tests.export.runs import images, largest_difference, oblong_images, run_card, texts

pytest.importorskip("sentence_transformers")

NAMES = ["separate", "other_encoders", "resnet", "towers_of_clip", "clip", "clip_at_another_size", "siglip"]


@pytest.fixture
def exported(runs):
    return lambda name: runs.export(name, "sentence-transformers")


def load(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_size", [1, 32])
def test_texts_have_the_features_of_the_run(runs, exported, name, batch_size):
    chosen = texts() if batch_size > 1 else [*texts()[:3], texts()[-1]]
    features = load(exported(name)).encode(chosen, batch_size=batch_size)
    assert largest_difference(features, runs.model(name).encode_texts(chosen)) < 1e-6


@pytest.mark.parametrize("name", [name for name in NAMES if name != "separate"])
def test_images_have_the_features_of_the_run(runs, exported, name):
    model, loaded = runs.model(name), load(exported(name))
    size = model.x.inputs.size
    for pictures in (images(size), images(80)[:20]):
        assert largest_difference(loaded.encode(pictures, batch_size=16), model.encode_images(pictures)) < 1e-6
    if name != "resnet":  # resizes whole images
        squares = [ImageOps.fit(image.convert("RGB"), (size, size), Image.BICUBIC) for image in oblong_images()]
        assert largest_difference(loaded.encode(squares), model.encode_images(oblong_images())) < 1e-6


@pytest.mark.open_clip  # these tests have torchvision
@pytest.mark.parametrize("name", ["other_encoders", "clip"])
def test_images_have_the_same_features_if_torchvision_is_installed(runs, exported, name):
    pytest.importorskip("torchvision")
    folder = exported(name)
    variables = run_card(folder)  # the lines of the card choose Pillow
    features = variables["model"].encode(images(80))
    assert largest_difference(features, runs.model(name).encode_images(images(80))) < 1e-6


def test_whole_images_are_resized_if_the_run_did_so(runs, exported):
    """`data.fit=squash` is a setting of the data, so `encode_images` of the model does not know it."""
    pictures = oblong_images()
    size = runs.model("resnet").x.inputs.size
    squares = [image.convert("RGB").resize((size, size), Image.BICUBIC) for image in pictures]
    features = load(exported("resnet")).encode([image.convert("RGB") for image in pictures])
    assert largest_difference(features, runs.model("resnet").encode_images(squares)) < 1e-6


def test_two_text_encoders_are_for_queries_and_documents(runs, exported):
    model, loaded = runs.model("questions"), load(exported("questions"))
    assert largest_difference(loaded.encode_query(texts()), model.encode_x(texts())) < 1e-6
    assert largest_difference(loaded.encode_document(texts()), model.encode_y(texts())) < 1e-6
    with pytest.raises(ValueError, match="route"):
        loaded.encode(texts())


def test_one_text_encoder_for_both_sides(runs, exported):
    model, loaded = runs.model("shared_texts"), load(exported("shared_texts"))
    assert largest_difference(loaded.encode(texts()), model.encode_x(texts())) < 1e-6
    assert largest_difference(loaded.encode_query(texts()), model.encode_x(texts())) < 1e-6


def test_truncated_features_are_those_of_the_run(runs, exported):
    from sentence_transformers import SentenceTransformer

    run = Run.open(runs("short_texts"))
    expected = shorten(run.model.encode_x(texts()), 4)
    loaded = SentenceTransformer(str(exported("short_texts")), truncate_dim=4, device="cpu")
    features = loaded.encode(texts(), normalize_embeddings=True)
    assert largest_difference(features, expected) < 1e-6
    scores = loaded.similarity(loaded.encode(texts()), loaded.encode(texts()))
    assert largest_difference(scores, expected @ expected.T) < 1e-6, "cosine similarity needs no unit norm"
    assert loaded.get_embedding_dimension() == 4
    held_out = run.features(run.val)
    short = shorten(held_out.x, 4), shorten(held_out.y, 4)
    recall = retrieval_metrics(*short, held_out.links, sides=held_out.sides)["mean_R@5"]
    assert run.results.val["width=4/mean_R@5"] == pytest.approx(recall)
    card = (exported("short_texts") / "README.md").read_text()
    assert all(part in card for part in ("truncate_dim=4", "normalize_embeddings=True", "first 4 coordinates (all: 8)"))
    assert "truncate_dim" not in (exported("shared_texts") / "README.md").read_text()


def test_a_side_that_cannot_be_written_is_named(nuclr, runs, tmp_path):
    status, out, err = nuclr("export", runs("separate"), "--to", "sentence-transformers", "--out", tmp_path / "out")
    assert status == 0, err
    assert "SentenceTransformer for text" in out and "left out: side x (images)" in out
    assert "side x (images)" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", ["separate", "other_encoders", "clip", "siglip", "questions", "shared_texts"])
def test_the_lines_of_the_card_run(exported, name):
    variables = run_card(exported(name))
    assert variables["y"].shape[0] == 2
    assert ("scores" in variables) == (name not in ("separate", "shared_texts"))
