"""Distillation from n-grams: when there is a teacher, what it labels, and the result."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from faults import Killed, before_step, kill
from models import lively
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from nanolm.classification.bag_of_words import Vocabulary, subwords
from nanolm.classification.classifier import LENGTH_MULTIPLE, load
from nanolm.classification.data import LengthBatches, Texts, Truncation, encode, split_data
from nanolm.classification.distill import (
    IGNORED_LABEL,
    LABELED_WEIGHT,
    SYNTHETIC_WORDS,
    Distillation,
    Teacher,
)
from nanolm.classification.finetune import MOST_WORDS, FinetuneResult, extended_size, finetune
from nanolm.classification.recipe import choose_settings, is_small, wants_teacher
from nanolm.classification.settings import DATA, FinetuneSettings
from nanolm.errors import UsageError
from nanolm.model.build import with_vocabulary
from nanolm.model.classifier import pooled, prefix_pooled
from nanolm.model.config import FAMILIES, Pool, configure
from nanolm.runs.folder import model_tokenizer
from nanolm.text.tokenizer import train_tokenizer

FAST: dict[str, Any] = {"start_from": "none", "preset": "nano", "threads": 1, "tokenizer": "byte"}
MOODS = ("pleasant joyful lovely superb clever", "tedious clumsy dreadful hollow stale")
NOUNS = ["film", "plot", "cast", "song", "ending", "scene", "dialogue", "score", "hero", "villain"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that word counts can classify, except for one in ten with the wrong label."""
    random = np.random.default_rng(1)
    rows = []
    for _ in range(160):
        label = int(random.integers(2))
        words = [*random.choice(NOUNS, 3), str(random.choice(MOODS[label].split()))]
        text = " ".join(random.permutation(words))
        rows.append(f"{text}\t{label if random.random() < 0.9 else 1 - label}\n")
    file = tmp_path_factory.mktemp("data") / "moods.tsv"
    file.write_text("text\tlabel\n" + "".join(rows))
    return file


def run(data: Path, out: Path, **settings: Any) -> FinetuneResult:
    asked = FinetuneSettings.from_dict({"data": str(data), **FAST, **settings})
    return finetune(asked, out, lambda event: None)


def train_texts(data: str) -> Texts:
    asked = FinetuneSettings(data=(data,), val_fraction=0.2, start_from="none")
    return split_data(asked, lambda *_: None).train


def test_subwords_are_the_character_ngrams_of_scikit_learn_and_whole_words() -> None:
    texts = ["Boring, not boring at all!", "a lovely film", "  I  "]
    theirs = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5)).build_analyzer()
    for text in texts:
        whole = {f" {word} " for word in text.lower().split()}
        assert set(subwords(text)) == set(theirs(text)) | whole
        assert all(text.lower().count(ngram.strip()) > 0 for ngram in subwords(text))
    assert "boring" not in Vocabulary.of(texts, analyze=subwords).ids  # but " boring " is


def test_a_teacher_is_weighted_by_cross_validation(data: Path) -> None:
    train = train_texts(str(data))
    teacher = Teacher.fit(train, 2, seed=1)
    assert 0.8 < teacher.accuracy < 0.95
    assert 0.4 <= teacher.weight() <= 0.5
    features = TfidfVectorizer().fit(train.texts)
    theirs = LogisticRegression(C=5).fit(features.transform(train.texts), train.truth)
    new = ["a lovely hero", "stale dialogue", "joyfully superb", "the dreadful film"]
    assert (
        teacher.probabilities(new).argmax(axis=1) == theirs.predict(features.transform(new))
    ).all()
    shuffled = Texts(train.texts, np.random.default_rng(1).permutation(train.truth))
    assert Teacher.fit(shuffled, 2, seed=1).weight() == 0
    again = Teacher.fit(train, 2, seed=1)
    assert (again.held_out == teacher.held_out).all()
    assert (again.model.weight == teacher.model.weight).all()


def test_no_teacher_where_only_the_order_of_words_counts() -> None:
    """In the embedded reviews, texts of both labels have the same words."""
    train = train_texts(DATA)
    few = Texts(train.texts[:600], train.truth[:600])
    assert Teacher.fit(few, 2, seed=1).weight() == 0


def test_when_a_teacher_is_fitted() -> None:
    asked = FinetuneSettings(start_from="x", device="cpu")
    few, many, long = [20] * 1000, [20] * 10_000, [2000] * 1000
    assert wants_teacher(asked, 1_000_000, few)
    assert not wants_teacher(asked, 100_000_000, few)
    assert not wants_teacher(asked, 1_000_000, many)
    assert not wants_teacher(asked, 1_000_000, long)
    assert not wants_teacher(asked, 1_000_000, [20] * 30)
    assert wants_teacher(FinetuneSettings(distill=0.5), 100_000_000, long)
    assert not wants_teacher(FinetuneSettings(distill=0.0), 1_000_000, few)
    assert not wants_teacher(FinetuneSettings(train="head"), 1_000_000, few)
    trained = configure("modern", vocab_size=64, context=32, layers=1, heads=2, dim=16)
    settings, choices = choose_settings(asked, trained, 1_000_000, few)
    assert settings.distill == 0
    assert "distill" not in [choice.what for choice in choices]
    assert FinetuneSettings(distill=0.5, train="lora").problems()


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_batches_are_labeled_and_synthetic_texts(kind: str, data: Path) -> None:
    train = train_texts(str(data))
    teacher = Teacher.fit(train, 2, seed=1)
    tokenizer = train_tokenizer(train.texts, kind, None)
    encoded = encode(
        train, tokenizer, Truncation(256, "windows"), lambda *_: None, LENGTH_MULTIPLE["cpu"]
    )
    batches = LengthBatches(encoded.lengths, 4, seed=1)
    source = Distillation(teacher, 0.4, train, encoded, batches, tokenizer)
    ids, lengths, truth, target = source.batch(3)
    assert target.shape == (*ids.shape, 2)
    assert ids.shape[0] == len(lengths) == len(truth) == 8
    weights = target.sum(axis=2)  # (texts, time)
    np.testing.assert_allclose(weights[::2].sum(), LABELED_WEIGHT * weights[1::2].sum(), rtol=1e-5)
    for row in range(8):
        (places,) = np.nonzero(weights[row])
        prefixes = [tokenizer.decode(ids[row, : place + 1].tolist()) for place in places]
        expected = target[row, places] / weights[row, places][:, None]
        if row % 2:
            assert truth[row] == IGNORED_LABEL
            assert SYNTHETIC_WORDS[0] <= len(prefixes) <= SYNTHETIC_WORDS[1]
            assert all(len(one.split()) == count for count, one in enumerate(prefixes, start=1))
            np.testing.assert_allclose(expected, teacher.probabilities(prefixes), atol=1e-6)
        else:
            assert train.truth[train.texts.index(prefixes[-1])] == truth[row]
            assert len(prefixes) == 1
            assert expected[0, truth[row]] >= 0.6
    for one, other in zip(source.batch(3), (ids, lengths, truth, target), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("how", get_args(Pool))
def test_every_prefix_is_pooled_as_a_text_of_its_own(how: Pool) -> None:
    x = torch.randn(2, 5, 3)
    prefixes = prefix_pooled(x, how)
    for length in range(1, 6):
        alone = pooled(x, torch.full((2,), length), how)
        torch.testing.assert_close(prefixes[:, length - 1], alone)


def test_a_tiny_model_learns_what_counting_words_knows(data: Path, tmp_path: Path) -> None:
    result = run(data, tmp_path / "run", steps=60, batch=8, evaluations=2, tokenizer="bpe")
    classifier = load(tmp_path / "run", note=lambda text: None)
    texts = [
        f"{first} {mood} {second}"
        for moods in MOODS
        for mood in moods.split()
        for first, second in (("film", "cast"), ("score", "hero"))
    ]
    truth = np.repeat([0, 1], len(texts) // 2)
    assert result.val
    assert (classifier.logits(texts).argmax(axis=1) == truth).mean() >= 0.9


OWN: dict[str, Any] = {"preset": None, "tokenizer": None}  # fixed in a pretrained model


def test_the_words_of_the_labeled_texts_become_tokens(
    data: Path, tmp_path: Path, trained: Path
) -> None:
    events: list[Any] = []
    settings = {"start_from": str(trained), "steps": 2, "batch": 4, **OWN}
    asked = FinetuneSettings.from_dict({"data": str(data), "threads": 1, **settings})
    finetune(asked, tmp_path / "run", events.append)
    before, after = model_tokenizer(trained / "best"), model_tokenizer(tmp_path / "run" / "best")
    assert len(before.encode(" dreadful")) > 1 == len(after.encode(" dreadful"))
    assert after.tokens[: before.vocab_size - 2] == before.tokens[:-2]
    said = (choice for event in events for choice in getattr(event, "choices", ()))
    vocabulary = next(choice for choice in said if choice.what == "vocabulary")
    assert vocabulary.value == after.vocab_size
    added = after.vocab_size - before.vocab_size
    assert f"{before.vocab_size:,} from the model" in vocabulary.reason
    assert f"{added:,} learned" in vocabulary.reason


def test_a_vocabulary_that_is_asked_for(data: Path, tmp_path: Path, trained: Path) -> None:
    settings = {"start_from": str(trained), "steps": 1, "batch": 4, "distill": 0.0, **OWN}
    run(data, tmp_path / "as it was", **settings)
    run(data, tmp_path / "more", vocab_size=310, **settings)
    size = model_tokenizer(trained / "best").vocab_size
    assert size < 310
    assert load(tmp_path / "as it was", note=lambda text: None).tokenizer.vocab_size == size
    assert load(tmp_path / "more", note=lambda text: None).tokenizer.vocab_size == 310
    with pytest.raises(UsageError, match=f" {size} tokens"):
        run(data, tmp_path / "fewer", vocab_size=size - 1, **settings)
    with pytest.raises(UsageError, match="--vocab-size with --from needs --train all"):
        run(data, tmp_path / "frozen", vocab_size=310, train="head", **settings)


def test_a_small_model_gets_the_words_of_many_texts() -> None:
    tokenizer, asked = train_tokenizer(["a film " * 9], "bpe", 260), FinetuneSettings()
    assert extended_size(asked, tokenizer, None, 9_999) is None
    assert extended_size(asked, tokenizer, None, 10_000) == MOST_WORDS
    assert extended_size(asked, train_tokenizer(["a film"], "char"), None, 10_000) is None
    assert is_small(asked, 1_000_000)
    assert not is_small(asked, 100_000_000)
    base = configure("modern", vocab_size=64, context=32, layers=1, heads=2, dim=16)
    for size, decay in ((None, 0.8), (300, 1.0)):
        wanted = FinetuneSettings(start_from="x", device="cpu", vocab_size=size)
        assert choose_settings(wanted, base, 1_000, [9] * 10_000)[0].layer_decay == decay


@pytest.mark.parametrize("family", FAMILIES)
def test_known_tokens_mean_what_they_did(family: str) -> None:
    model = lively(configure(family, vocab_size=9, layers=1, heads=2, dim=16, context=8))
    extended = with_vocabulary(model, [[0], [1], [2], [3], [4], [1, 3], [0, 1, 2], [5], [6]])
    ids = torch.tensor([[0, 3, 4, 1]])
    with torch.no_grad():
        torch.testing.assert_close(extended(ids)[..., :5], model(ids)[..., :5])
        embedding = model.token_embedding.weight
        torch.testing.assert_close(extended.token_embedding.weight[5], embedding[[1, 3]].mean(0))
        torch.testing.assert_close(extended.token_embedding.weight[8], embedding[6])
    assert extended.config.tied == (extended.head.weight is extended.token_embedding.weight)


@pytest.mark.parametrize("start", ["none", "a trained model"])
def test_distillation_resumes_bit_identically(
    start: str, data: Path, tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"steps": 12, "evaluations": 3, "batch": 4, "dropout": 0.1}
    if start != "none":
        settings |= {"start_from": str(trained), **OWN}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(data, whole, **settings)
    with monkeypatch.context() as patch:
        before_step(patch, 9, kill)
        with pytest.raises(Killed):
            run(data, killed, **settings)
    run(data, killed, **settings)
    for name in ("last", "best"):
        first, second = (folder / name / "model.safetensors" for folder in (whole, killed))
        assert first.read_bytes() == second.read_bytes()
