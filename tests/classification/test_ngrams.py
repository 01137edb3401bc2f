"""The linear n-gram model that a classifier is mixed with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Killed, kill
from safetensors.torch import load_file, save_file
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from nanolm.classification import finetune as module
from nanolm.classification.bag_of_words import Vocabulary
from nanolm.classification.classifier import load
from nanolm.classification.data import Texts
from nanolm.classification.finetune import FinetuneResult, finetune
from nanolm.classification.metrics import score
from nanolm.classification.ngrams import STRENGTH, WORD, NgramModel, best_ratio, word_ngrams
from nanolm.classification.recipe import choose_settings, wants_ngrams
from nanolm.classification.settings import FinetuneSettings
from nanolm.errors import ModelError
from nanolm.files import MANIFEST, verify
from nanolm.model.config import configure
from nanolm.model.stored import NGRAMS
from nanolm.runs.export import export_folder
from nanolm.text.labeled import LabelReading

NEGATED = ("not good", "never great", "good", "great", "not bad", "never awful", "bad", "awful")
LABELS = (0, 0, 1, 1, 1, 1, 0, 0)  # of NEGATED: only pairs of words say which


def rows(nouns: str) -> tuple[list[str], list[int]]:
    texts = [f"The {noun} was {words}!" for noun in nouns.split() for words in NEGATED]
    return texts, list(LABELS) * len(nouns.split())


def texts_of(nouns: str) -> Texts:
    texts, labels = rows(nouns)
    return Texts(texts, np.array(labels))


TRAIN, VAL = texts_of("film plot cast song"), texts_of("room view")


def fitted(train: Texts, labels: int) -> NgramModel:
    model = NgramModel.fit(train, labels)
    assert model
    return model


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    files = {}
    for name, nouns in (("train", "film plot cast song"), ("val", "room view"), ("test", "tune")):
        lines = (f"{text}\t{label}\n" for text, label in zip(*rows(nouns), strict=True))
        files[name] = str(tmp_path / f"{name}.tsv")
        Path(files[name]).write_text("text\tlabel\n" + "".join(lines))
    return {"data": files["train"], "val": files["val"], "test": files["test"]}


def run(data: dict[str, Any], out: Path, **settings: Any) -> FinetuneResult:
    fast = {"start_from": "none", "preset": "nano", "tokenizer": "byte", "threads": 1, "steps": 2}
    return finetune(FinetuneSettings.from_dict({**data, **fast, **settings}), out)


def test_it_is_the_logistic_regression_of_scikit_learn() -> None:
    vectorizer = TfidfVectorizer(token_pattern=WORD.pattern, ngram_range=(1, 3))
    regression = LogisticRegression(C=STRENGTH, tol=1e-6, max_iter=1000)
    regression.fit(vectorizer.fit_transform(TRAIN.texts), TRAIN.truth)
    theirs = regression.decision_function(vectorizer.transform(VAL.texts))
    ours = fitted(TRAIN, 2).logits(VAL.texts)
    assert np.abs(ours[:, 1] - ours[:, 0] - theirs).max() < 0.02
    assert ((theirs > 0) == VAL.truth).all()


def test_saved_and_loaded(tmp_path: Path) -> None:
    for labels, train in ((2, TRAIN), (3, Texts(TRAIN.texts, np.arange(len(TRAIN)) % 3))):
        model = fitted(train, labels)
        model.save(tmp_path)
        loaded = NgramModel.load(tmp_path, labels)
        strange = [*VAL.texts, "", "\n", "naïve café, isn't it?!"]
        assert np.allclose(loaded.logits(strange), model.logits(strange), atol=1e-5)


def test_negations_in_all_spellings() -> None:
    for text in ("I can't recommend it!", "I can\u2019t recommend it!", "i ca n't recommend it !"):
        assert word_ngrams(text)[:5] == ["ca", "n't", "recommend", "it", "!"]
    assert word_ngrams("isn't")[:2] == ["is", "n't"]
    assert word_ngrams("n't " + "x" * 200_000)[0] == "n't"


@pytest.mark.parametrize("damage", ["shape", "missing", "not text", "twice", "NaN", "labels"])
def test_a_file_that_does_not_fit_is_refused(damage: str, tmp_path: Path) -> None:
    fitted(TRAIN, 2).save(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / NGRAMS).items()}
    if damage == "shape":
        tensors["idf"] = tensors["idf"][1:].clone()
    elif damage == "missing":
        del tensors["bias"]
    elif damage == "not text":
        tensors["words"][0] = 0xFF
    elif damage == "twice":
        words = tensors["words"].numpy().tobytes().split(b"\n")
        same = b"\n".join([words[1], *words[1:]])
        tensors["words"] = torch.frombuffer(bytearray(same), dtype=torch.uint8)
    elif damage == "NaN":
        tensors["weight"][0] = torch.nan
    save_file(tensors, tmp_path / NGRAMS)
    with pytest.raises(ModelError):
        NgramModel.load(tmp_path, 3 if damage == "labels" else 2)


def test_the_ratio_depends_on_what_it_adds() -> None:
    random, truth = np.random.default_rng(1), np.arange(400) % 2
    signal = np.stack([np.zeros(400), 2.0 * truth - 1], axis=1)
    one, other, noise = (
        (signal * scale + random.normal(size=signal.shape)).astype(np.float32)
        for scale in (1, 1, 0)
    )
    ratio = best_ratio(one, other, truth, ("a", "b"))
    assert ratio >= 0.5
    mixed, alone = score(one + ratio * other, truth, "ab"), score(one, truth, "ab")
    assert mixed.accuracy > alone.accuracy
    assert best_ratio(one, noise, truth, ("a", "b")) == 0


def test_a_mixed_classifier(data: dict[str, Any], tmp_path: Path) -> None:
    """The folder gives the scores of the result; an export keeps the n-grams."""
    alone = run(data, tmp_path / "alone", ngrams=False)
    mixed = run(data, tmp_path / "mixed", ngrams=True)
    assert alone.val and mixed.val and mixed.test and mixed.uncalibrated and alone.uncalibrated
    assert alone.ngram_weight is None and mixed.ngram_weight
    assert mixed.val.accuracy == mixed.test.accuracy == 1 > alone.val.accuracy
    assert mixed.accuracy_without_ngrams == alone.val.accuracy
    metrics = (tmp_path / "mixed" / "metrics.jsonl").read_text().splitlines()
    evaluated = [line for line in map(json.loads, metrics) if "val_accuracy" in line]
    assert evaluated[-1]["val_accuracy"] == 1  # the best checkpoint is that of the mix
    assert evaluated[-1]["val_loss"] == pytest.approx(mixed.val.loss, rel=0.1)  # calibrated
    best = tmp_path / "mixed" / "best"
    verify(best)
    export_folder(str(tmp_path / "mixed"), tmp_path / "exported", None, lambda text: None)
    for folder in (best, tmp_path / "exported"):
        measured = load(folder, lambda text: None).measure(
            (data["test"],), LabelReading(), lambda *how_far: None
        )
        assert measured.scores.accuracy == 1
        assert measured.scores.loss == pytest.approx(mixed.test.loss, abs=1e-4)
    assert not (tmp_path / "alone" / "best" / NGRAMS).exists()
    for name in (NGRAMS, MANIFEST):  # as if copied by hand
        (tmp_path / "exported" / name).unlink()
    with pytest.raises(ModelError, match=f"lacks {NGRAMS}"):
        load(tmp_path / "exported", lambda text: None)
    own = run(data, tmp_path / "max", ngrams=True, pool="max")
    assert own.ngram_weight and load(tmp_path / "max", lambda text: None).ngrams


def test_a_kill_before_the_result_is_written(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(data, tmp_path / "whole", ngrams=True)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_result", lambda *how: kill())
        with pytest.raises(Killed):
            run(data, tmp_path / "killed", ngrams=True)
    resumed = run(data, tmp_path / "killed", ngrams=True)
    assert (resumed.val, resumed.temperature) == (whole.val, whole.temperature)
    for name in ("model.safetensors", NGRAMS, "config.json"):
        one, other = (tmp_path / each / "best" / name for each in ("whole", "killed"))
        assert one.read_bytes() == other.read_bytes()


def test_when_it_is_fitted() -> None:
    settings = FinetuneSettings(("x",))
    assert not wants_ngrams(settings, [10] * 9_999, labels=2)
    assert wants_ngrams(settings, [10] * 10_000, labels=2)
    assert not wants_ngrams(settings, [400] * 10_000, labels=2)
    assert not wants_ngrams(settings, [10] * 100_000, labels=5)
    assert not wants_ngrams(FinetuneSettings(("x",), class_weights=True), [10] * 10_000, labels=2)
    assert wants_ngrams(FinetuneSettings(("x",), ngrams=True), [10] * 100, labels=2)
    short = FinetuneSettings(("x",), minutes=0.1)  # no time to fit them
    assert not wants_ngrams(short, [10] * 10_000, labels=2)


def test_texts_without_words_have_no_ngrams() -> None:
    assert NgramModel.fit(Texts(["a", "-", ""], np.array([0, 1, 1])), labels=2) is None


def test_the_same_ngrams_are_kept_in_every_process() -> None:
    """Whatever the order in which a set of strings is iterated."""
    texts = ["one two three", "four five six", "six five", "seven"]
    ids = [Vocabulary.of(order, most=4).ids for order in (texts, texts[::-1])]
    assert ids[0] == ids[1] == {"five": 0, "four": 1, "one": 2, "six": 3}


def test_minutes_are_an_upper_limit_for_many_texts() -> None:
    shape = {"layers": 1, "heads": 1, "dim": 32, "context": 64, "vocab_size": 64}
    base = configure("modern", **shape)
    for count, minutes, steps in ((64_000, 5, 2000), (64_000, None, 2000), (1_000, 5, None)):
        asked = FinetuneSettings(("x",), device="cpu", start_from="x", minutes=minutes)
        assert choose_settings(asked, base, 1_000, [9] * count)[0].steps == steps
