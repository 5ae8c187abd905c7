"""Fine-tune a sentence encoder on pairs of texts with sentence-transformers and a NUCLR loss.

    python examples/sentence_transformers_train.py                                    # a few built-in questions
    python examples/sentence_transformers_train.py --pairs pairs.csv --out run        # your own: two columns of texts
    torchrun --nproc_per_node 2 examples/sentence_transformers_train.py --pairs pairs.csv
    python examples/sentence_transformers_train.py --pairs pairs.csv --resume         # after an interruption

Only the lines that end in "# nuclr" differ from a script that uses sentence-transformers alone.
"""

import argparse

import torch
from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from nuclr.integrations.sentence_transformers import NuclrLoss, NuclrTrainer, add_index  # nuclr

CAPITALS = {
    "Austria": "Vienna",
    "Brazil": "Brasilia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Ghana": "Accra",
    "Greece": "Athens",
    "India": "New Delhi",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", help="a CSV file whose first two columns are the pairs")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="a name or a folder")
    parser.add_argument("--out", default="run", help="folder of the checkpoints and the final model")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--batch-size", type=int, default=8, help="per process")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --out")
    options = parser.parse_args()

    if options.pairs:
        data = load_dataset("csv", data_files=options.pairs, split="train")
        data = data.select_columns(data.column_names[:2])
    else:
        questions = [f"What is the capital of {country}?" for country in CAPITALS]
        data = Dataset.from_dict({"question": questions, "answer": list(CAPITALS.values())})
    data = add_index(data)  # nuclr

    model = SentenceTransformer(options.model)
    loss = NuclrLoss(model, "nuclr", num_samples=len(data), temperature=0.05)  # nuclr
    args = SentenceTransformerTrainingArguments(
        output_dir=options.out,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        learning_rate=2e-5,
        save_strategy="epoch",
        logging_steps=10,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),  # torchrun without an accelerator needs it
    )
    trainer = NuclrTrainer(model=model, args=args, train_dataset=data, loss=loss)  # nuclr
    trainer.train(resume_from_checkpoint=options.resume)

    if trainer.is_world_process_zero():
        model.save_pretrained(f"{options.out}/final")
        x, y = (model.encode(data[name][:], normalize_embeddings=True) for name in data.column_names[:2])
        hits = ((x @ y.T).argmax(axis=1) == range(len(data))).mean()
        print(f"recall@1 {100 * hits:.1f} % of the training pairs, chance {100 / len(data):.1f} %")


if __name__ == "__main__":
    main()
