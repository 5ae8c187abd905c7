"""Train a CLIP model on your own pairs with the Trainer of transformers.

    python examples/transformers_trainer.py MODEL pairs.jsonl OUT
    torchrun --nproc_per_node 2 examples/transformers_trainer.py MODEL pairs.jsonl OUT

MODEL is a CLIP model on the Hub or in a folder. Each line of pairs.jsonl is {"image": FILE, "caption": TEXT}, with
files relative to its folder. Only the five lines marked "nuclr" differ from training with the model's own loss. A run
that was killed resumes from its last checkpoint if it is started again.
"""

import json
import sys
from pathlib import Path

import datasets
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from nuclr.integrations.transformers import NuclrTrainer, add_index  # nuclr
from nuclr.objectives import build  # nuclr


def main(name: str, pairs: Path, out: Path) -> None:
    model, tokenizer = CLIPModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    processor = AutoImageProcessor.from_pretrained(name)
    data = datasets.Dataset.from_list([json.loads(line) for line in pairs.read_text().splitlines()])
    data = add_index(data, x_id="image", y_id="caption")  # nuclr

    def collate(samples: list[dict[str, str]]) -> dict[str, object]:
        images = [Image.open(pairs.parent / sample["image"]).convert("RGB") for sample in samples]
        captions = [sample["caption"] for sample in samples]
        texts = tokenizer(captions, padding=True, truncation=True, return_tensors="pt")
        return {**processor(images, return_tensors="pt"), **texts, "return_loss": True}

    args = TrainingArguments(
        str(out),
        per_device_train_batch_size=32,
        num_train_epochs=3,
        learning_rate=1e-3,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        save_strategy="epoch",
        logging_strategy="epoch",
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),  # torchrun without an accelerator needs it
    )
    trainer = NuclrTrainer(  # nuclr
        model,
        args,
        data_collator=collate,
        train_dataset=data,
        objective=build("nuclr", num_samples=len(data), temperature=0.05),  # nuclr
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)) if out.is_dir() else None)
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
