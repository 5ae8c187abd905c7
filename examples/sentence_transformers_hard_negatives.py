"""Fine-tune with hard negatives, nested widths (Matryoshka) and the memory of small batches, with a NUCLR loss.

    python examples/sentence_transformers_hard_negatives.py                           # a few built-in questions
    python examples/sentence_transformers_hard_negatives.py --triplets triplets.csv   # anchor, positive, negative
    python examples/sentence_transformers_hard_negatives.py --resume                  # after an interruption

`sentence_transformers.util.mine_hard_negatives` makes such triplets of pairs; several negatives are columns negative_1,
negative_2, ... Only the lines that end in "# nuclr" differ from a script with CachedMultipleNegativesRankingLoss.
"""

import argparse

import torch
from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from nuclr.integrations.sentence_transformers import CachedNuclrLoss, NuclrTrainer, add_index  # nuclr

CAPITALS = {
    "Australia": ("Canberra", "Sydney"),
    "Bolivia": ("Sucre", "La Paz"),
    "Brazil": ("Brasilia", "Sao Paulo"),
    "Canada": ("Ottawa", "Toronto"),
    "China": ("Beijing", "Shanghai"),
    "Ecuador": ("Quito", "Guayaquil"),
    "Germany": ("Berlin", "Hamburg"),
    "India": ("New Delhi", "Mumbai"),
    "Israel": ("Jerusalem", "Tel Aviv"),
    "Italy": ("Rome", "Milan"),
    "Kazakhstan": ("Astana", "Almaty"),
    "Morocco": ("Rabat", "Casablanca"),
    "New Zealand": ("Wellington", "Auckland"),
    "Nigeria": ("Abuja", "Lagos"),
    "Pakistan": ("Islamabad", "Karachi"),
    "South Africa": ("Pretoria", "Johannesburg"),
    "Spain": ("Madrid", "Barcelona"),
    "Switzerland": ("Bern", "Zurich"),
    "Turkey": ("Ankara", "Istanbul"),
    "Vietnam": ("Hanoi", "Ho Chi Minh City"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triplets", help="a CSV file with the columns anchor, positive, negative_1, ...")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="a name or a folder")
    parser.add_argument("--widths", type=int, nargs="+", default=[384, 128, 64], help="of the embeddings, widest first")
    parser.add_argument("--out", default="run", help="folder of the checkpoints and the final model")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --out")
    options = parser.parse_args()

    if options.triplets:
        data = load_dataset("csv", data_files=options.triplets, split="train")
    else:
        anchors = [f"What is the capital of {country}?" for country in CAPITALS]
        positives, negatives = zip(*CAPITALS.values(), strict=True)
        data = Dataset.from_dict({"anchor": anchors, "positive": positives, "negative": negatives})
    data = add_index(data)  # nuclr

    model = SentenceTransformer(options.model)
    loss = CachedNuclrLoss(model, "nuclr", len(data), mini_batch_size=4, temperature=0.05)  # nuclr
    loss = MatryoshkaLoss(model, loss, options.widths)
    args = SentenceTransformerTrainingArguments(
        output_dir=options.out,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        learning_rate=2e-5,
        save_strategy="epoch",
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = NuclrTrainer(model=model, args=args, train_dataset=data, loss=loss)  # nuclr
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        model.save_pretrained(f"{options.out}/final")


if __name__ == "__main__":
    main()
