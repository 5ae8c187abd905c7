"""Use a fine-tuned CLIP in open_clip, here to classify images by texts.

pip install '.[open-clip]'
nuclr train data.train=... model.pretrained=CLIP_FOLDER out=runs/clip
nuclr export runs/clip --to open-clip --out clip-open
python examples/use_open_clip.py clip-open "a circle" "a square" "a triangle"
"""

import sys

import open_clip
import torch

from nuclr.data import open_pairs


def main() -> None:
    folder, classes = f"local-dir:{sys.argv[1]}", sys.argv[2:]
    model, preprocess = open_clip.create_model_from_pretrained(folder)
    tokenizer = open_clip.get_tokenizer(folder)
    model.eval()

    pairs = open_pairs("builtin:n=5,split=val")
    images = torch.stack([preprocess(pairs.item("x", i)) for i in range(len(pairs))])
    with torch.inference_mode():
        x = model.encode_image(images, normalize=True)
        y = model.encode_text(tokenizer(classes), normalize=True)
        shares = (model.logit_scale.exp() * x @ y.T).softmax(dim=1)  # logit_scale is 1 / the run's temperature
    for number, row in enumerate(shares):
        print(
            f"{pairs.item('y', number)}: "
            + ", ".join(f"{name} {share:.0%}" for name, share in zip(classes, row, strict=True))
        )


if __name__ == "__main__":
    main()
