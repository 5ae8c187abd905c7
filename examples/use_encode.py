"""Load a trained model and encode images and texts.

nuclr demo out=runs/demo
python examples/use_encode.py runs/demo
"""

import sys

from nuclr.data import open_pairs
from nuclr.models import DualEncoder


def main() -> None:
    pairs = open_pairs("builtin:n=5,split=val,shapes=2")
    images, texts = [pairs.item("x", i) for i in range(5)], [pairs.item("y", i) for i in range(5)]

    model = DualEncoder.from_pretrained(f"{sys.argv[1]}/model")
    x = model.encode_images(images)  # paths, PIL images, arrays or tensors
    y = model.encode_texts(texts)

    for text, scores in zip(texts, y @ x.T, strict=True):  # unit norm: inner products are cosine similarities
        print(" ".join(f"{score:6.2f}" for score in scores), " ", text)


if __name__ == "__main__":
    main()
