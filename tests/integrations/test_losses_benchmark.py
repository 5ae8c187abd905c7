"""The pieces of benchmarks/losses.py on generated pairs, and its loop next to the trainer of sentence-transformers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

pytest.importorskip("sentence_transformers")

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
SETTING = {"temperature": 0.1, "rate": 0.01}
TRAINED = 48


@pytest.fixture(scope="module")
def losses():
    """Return the module of the benchmark."""
    sys.path.insert(0, FOLDER)
    try:
        import losses
    finally:
        sys.path.remove(FOLDER)
    return losses


@pytest.fixture(scope="module")
def texts():
    """Return questions and answers about 20 topics, some of them equal."""
    rng = np.random.default_rng(0)
    topics = rng.integers(20, size=80)
    x = [f"question about topic{topic} number{rng.integers(3)}" for topic in topics]
    y = [f"the answer to topic{topic} is word{rng.integers(30)}" for topic in topics]
    return x, y


@pytest.fixture(scope="module")
def tokenizer(texts):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for side in texts for text in side for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.fixture
def table(tokenizer):
    return torch.randn(tokenizer.get_vocab_size(), 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def data(losses, texts, tokenizer, table):
    x, y = ([[text] for text in side] for side in texts)
    return losses.make_data(x, y, tokenizer, table, TRAINED)


@pytest.mark.filterwarnings("ignore:this trainer does not save")
@pytest.mark.parametrize("name", ["MNRL", "NUCLR"])
def test_loop_equals_the_trainer(losses, data, texts, tokenizer, table, tmp_path, name):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    from nuclr.integrations.sentence_transformers import NuclrTrainer, add_index

    torch.manual_seed(0)
    plan = list(losses.batches(data, 8, no_duplicates=False)) + list(losses.batches(data, 8, no_duplicates=False))
    trained = losses.train(data, losses.LOSSES[name], SETTING, plan, mask=True)

    class Planned(DefaultBatchSampler):
        epoch = 0

        def __iter__(self):
            half = len(plan) // 2
            yield from (rows.tolist() for rows in plan[half * self.epoch :][:half])

        def set_epoch(self, epoch):
            self.epoch = epoch

    pairs = Dataset.from_dict({"x": texts[0][:TRAINED], "y": texts[1][:TRAINED]})
    pairs = add_index(pairs) if name == "NUCLR" else pairs
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=table.clone())], device="cpu")
    loss = losses.LOSSES[name](losses.Parts(model, model, TRAINED, SETTING["temperature"]))
    args = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        batch_sampler=lambda dataset, **options: Planned(torch.utils.data.SequentialSampler(dataset), **options),
        learning_rate=SETTING["rate"],
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    NuclrTrainer(model=model, args=args, train_dataset=pairs, loss=loss).train()
    ids = [tokenizer.encode(text).ids for text in texts[0]]
    expected = normalize(torch.stack([model[0].embedding.weight.detach()[row].mean(dim=0) for row in ids]), dim=1)
    after = torch.cat([data.vocabulary.vectors(half.x, trained)[:, 0] for half in data.halves])
    order = TRAINED + torch.randperm(len(ids) - TRAINED, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(after, expected[order], atol=1e-5)
    before = torch.cat([data.vocabulary.vectors(half.x)[:, 0] for half in data.halves])
    assert float((before - after).abs().max()) > 0.01


def test_cached_loss_refuses_the_encoder(tokenizer, table):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=table)], device="cpu")
    with pytest.raises(ValueError, match="StaticEmbedding"):
        CachedMultipleNegativesRankingLoss(model)


def test_margin_mask_drops_negatives_above_the_positive(losses, data):
    rows = torch.arange(TRAINED)
    model = torch.nn.Module()
    x, y = (normalize(data.vocabulary.vectors(side[:, 0]).double(), dim=1) for side in (data.train.x, data.train.y))
    model.forward = lambda features: {"sentence_embedding": features["vectors"]}
    loss = losses.LOSSES["MNRL, margin mask"](losses.Parts(model, model, TRAINED, 0.1))
    columns = [{"vectors": x}, {"vectors": y}]
    dropped = 0
    terms = []
    for i in rows.tolist():
        total = 0.0
        for j in rows.tolist():
            if i != j and float(x[i] @ y[j]) > float(x[i] @ y[i]) + losses.MARGIN:
                dropped += 1
            else:
                total += np.exp(float(x[i] @ y[j]) / 0.1)
        terms.append(np.log(total) - float(x[i] @ y[i]) / 0.1)
    assert dropped > 0
    assert float(loss(columns, None)) == pytest.approx(np.mean(terms), abs=1e-9)


def test_hard_negatives_are_not_right_answers(losses, data):
    mined = losses.mine_hard_negatives(data)
    x = data.train.x[:, 0]
    y = data.train.y[:, 0]
    vectors = [data.vocabulary.vectors(side) for side in (x, y, mined)]
    for row in range(TRAINED):
        assert int(mined[row]) not in y[x == x[row]].tolist()
    near = (vectors[0] * vectors[2]).sum(dim=1)
    own = (vectors[0] * vectors[1]).sum(dim=1)
    positive = own > 0.2
    assert bool((near[positive] < own[positive]).all())
    assert float(near.mean()) > float((vectors[0] @ vectors[1].T).mean())


def test_curation_drops_what_it_says(losses, data):
    wrong = losses.spoil(data, "noise")
    changed = wrong.train.y[:, 0] != data.train.y[:, 0]
    kept = losses.kept_pairs(wrong, "the wrong ones", 1)
    assert len(kept) == TRAINED - round(0.2 * TRAINED)
    assert not bool(changed[kept].any())
    popular = losses.kept_pairs(data, "most popular", 1)
    rare = losses.kept_pairs(data, "least popular", 1)
    assert len(popular) == len(rare) == len(kept)
    assert set(popular.tolist()) | set(rare.tolist()) == set(range(TRAINED))
    first, second = (losses.kept_pairs(data, "at random", seed).tolist() for seed in (1, 2))
    assert first != second


@pytest.mark.filterwarnings("ignore:this trainer does not save")
def test_a_restarted_study_repeats_nothing_and_a_report_names_what_is_missing(
    losses, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(losses, "TEMPERATURES", (0.1,))
    monkeypatch.setattr(losses, "RATES", (0.01, 0.02))
    monkeypatch.setattr(losses.Losses, "seeds", (1, 2))
    file = tmp_path / "toy.jsonl"
    methods = ("MNRL", "MNRL, no_duplicates", "GIST", "NUCLR + hard negatives")
    study = losses.Losses(file, 8)
    rows = {method: losses.try_row(study, "toy/8", data, method, "MNRL") for method in methods}
    lines = file.read_text().splitlines()
    assert rows["MNRL"].gap == 0
    assert len(rows["GIST"].recall) == 2
    report = losses.Losses(file, 8, trains=False)
    again = {method: losses.try_row(report, "toy/8", data, method, "MNRL") for method in (*methods, "SogCLR")}
    assert file.read_text().splitlines() == lines
    assert np.array_equal(again["GIST"].draws, rows["GIST"].draws)
    capsys.readouterr()
    losses.print_table("B = 8", {"toy": again}, "MNRL")
    assert "| SogCLR | missing |" in capsys.readouterr().out
