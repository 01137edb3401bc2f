import itertools
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import lively
from torch import Tensor, nn

from nanolm import evaluation
from nanolm.evaluation import Score, evaluate, evaluate_texts
from nanolm.generation.language_model import LanguageModel
from nanolm.model.base import Model
from nanolm.model.config import RecurrentConfig, configure
from nanolm.model.huggingface import load_model, save_model
from nanolm.model.rnn import Recurrent
from nanolm.text.decoding import Reading
from nanolm.text.tokenizer import Tokenizer, train_tokenizer
from nanolm.text.tokenizer_files import load_tokenizer
from nanolm.text.tokens import Store

DOCUMENTS = ("the cat sat on the mät. " * 5, "the dog ran. " * 3, "日本")
MULTILINGUAL = "Zwölf Boxkämpfer jagen Viktor.\nЖёлтый лист. 日本語の文 🙂 and\tthe cat, عربي.\n"


def encoded(tokenizer: Tokenizer, *documents: str) -> Store:
    rows = [[tokenizer.start_of_text, *tokenizer.encode(document)] for document in documents]
    return np.array([id for row in rows for id in row], dtype=np.uint16)


def random_model(tokenizer: Tokenizer, family: str = "modern", context: int = 8) -> Model:
    shape = {"layers": 1, "dim": 16, "context": context}
    if family != "lstm":
        shape["heads"] = 2
    return lively(configure(family, vocab_size=tokenizer.vocab_size, **shape))


def token_by_token(
    model: Model, tokenizer: Tokenizer, ids: Store, window: int, stride: int
) -> list[tuple[int, float, int]]:
    """(id, bits, rank) by the definition: the first window that reaches a token scores it."""
    found = []
    for place in range(1, len(ids)):
        start = next(start for start in range(0, place, stride) if place - start <= window)
        with torch.no_grad():
            logits = model(torch.tensor(ids[start:place].astype("int64"))[None])[0, -1]
        id = int(ids[place])
        if id != tokenizer.start_of_text:
            bits = -logits.log_softmax(-1)[id].item() / math.log(2)
            found.append((id, bits, 1 + int((logits > logits[id]).sum())))
    return found


@pytest.mark.parametrize("stride", [8, 4, 1])
@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_bits_per_byte_of_a_file(kind: str, stride: int, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(MULTILINGUAL, encoding="utf-8")
    tokenizer = train_tokenizer(DOCUMENTS, kind)
    model = random_model(tokenizer)
    (score,) = evaluate_texts(
        [(LanguageModel(model, tokenizer), 8)],
        (str(file),),
        Reading(),
        "cpu",
        lambda *how_far: None,
        stride,
    )
    tokens = token_by_token(model, tokenizer, encoded(tokenizer, MULTILINGUAL), 8, stride)
    bits = sum(bits for _, bits, _ in tokens)
    size = len(file.read_bytes())
    assert (score.tokens, score.bytes) == (len(tokens), size)
    assert score.bits_per_byte == pytest.approx(bits / size, abs=1e-5)
    assert score.characters == len(MULTILINGUAL)
    assert score.bits_per_character == pytest.approx(bits / len(MULTILINGUAL), abs=1e-5)


@pytest.mark.parametrize("stride", [8, 3, 1])
@pytest.mark.parametrize("family", ["modern", "gpt2", "lstm"])
def test_windows_by_the_definition(
    family: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(DOCUMENTS[:2], "bpe")
    model = random_model(tokenizer, family)
    ids = encoded(tokenizer, *DOCUMENTS)
    # Fewer tokens than a window, just one window, all windows full, a shorter last one.
    for length in (2, 5, 9, 8 + 2 * stride + 1, len(ids)):
        expected = token_by_token(model, tokenizer, ids[:length], 8, stride)
        for tokens in (3, 8, 24, 8000):  # part of a window, or several of them
            monkeypatch.setattr(evaluation, "MOST_LOGITS", tokens * tokenizer.vocab_size)
            score = evaluate(
                model, tokenizer, ids[:length], 8, stride=stride, ranked=True, keep=len(ids)
            )
            kept = [
                tuple(row) for row in score.surprises.tolist() if row[0] != tokenizer.end_of_text
            ]
            assert [(id, rank) for id, _, rank in kept] == [(id, rank) for id, _, rank in expected]
            bits = [bits for _, bits, _ in expected]
            assert [bits for _, bits, _ in kept] == pytest.approx(bits, abs=1e-4)
            assert score.loss == pytest.approx(sum(bits) / len(bits) * math.log(2), abs=1e-5)
    assert len(score.surprises) == len(ids) - 1  # boundaries are included, to be shown on a page
    some = evaluate(model, tokenizer, ids, 8, stride=stride, ranked=True, keep=5)
    assert some.surprises.tolist() == score.surprises[:5].tolist()
    assert some == score


@pytest.mark.parametrize("stride", [8, 3])
def test_a_full_last_window(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tokens of the last window change: each has more context."""
    tokenizer = train_tokenizer(DOCUMENTS[:2], "byte")
    model = random_model(tokenizer)
    ids = encoded(tokenizer, DOCUMENTS[0])
    for length, rows in itertools.product((5, 9, 8 + stride + 1, 8 + stride + 2, 40), (1, 1000)):
        monkeypatch.setattr(evaluation, "MOST_LOGITS", rows * 8 * tokenizer.vocab_size)
        some = ids[:length]
        targets, window = length - 1, min(8, length - 1)
        last = max(0, targets - window) % stride or stride  # targets that are new in it
        full = evaluate(
            model, tokenizer, some, 8, None, stride=stride, ranked=True, keep=99, full_windows=True
        )
        usual = evaluate(model, tokenizer, some, 8, None, stride=stride, ranked=True, keep=99)
        end = targets - last if targets > 8 else 0
        bits = full.surprises["bits"].tolist()
        assert bits[:end] == usual.surprises["bits"][:end].tolist()
        start = targets - window
        with torch.no_grad():
            logits = model(torch.tensor(some[start:-1].astype("int64"))[None])[0]
        right = torch.tensor(some[start + 1 :].astype("int64"))[:, None]
        expected = -logits.log_softmax(-1).gather(1, right)[:, 0] / math.log(2)
        assert bits[end:] == pytest.approx(expected[end - targets or None :].tolist(), abs=1e-4)
        assert full.tokens == usual.tokens == targets


def by_transformers(model: Any, ids: list[int], length: int, stride: int) -> float:
    """The recipe of transformers: `length` ids at a time, `stride` apart, scored ones masked.

    The label of each id is the next id within the window, so `length` ids correspond to our window
    of `length - 1` inputs.
    """
    nats, scored, end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        part = torch.tensor(ids[begin : begin + length])[None]
        labels = part.clone()
        labels[:, : max(0, end - begin)] = -100
        end = begin + part.shape[1]
        count = int((labels[:, 1:] != -100).sum())  # the divisor of their mean
        with torch.no_grad():
            nats += model(part, labels=labels).loss.item() * count
        scored += count
        if end == len(ids):
            break
    return nats / scored


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_perplexity_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = train_tokenizer(DOCUMENTS, "bpe")
    save_model(random_model(tokenizer, family, context=64), tmp_path, tokenizer)
    ours, theirs = load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = encoded(tokenizer, DOCUMENTS[0] + MULTILINGUAL)
    assert len(ids) > 100
    whole = torch.tensor(ids[:64].astype("int64"))[None]
    with torch.no_grad():
        loss = theirs(whole, labels=whole).loss.item()
    assert evaluate(ours, tokenizer, ids[:64], 63).loss == pytest.approx(loss, abs=5e-5)
    for length, stride in ((64, 63), (64, 32), (33, 5), (20, 1)):
        score = evaluate(ours, tokenizer, ids, length - 1, stride=stride)
        expected = by_transformers(theirs, ids.tolist(), length, stride)
        assert score.loss == pytest.approx(expected, abs=5e-5)
        assert score.perplexity == pytest.approx(math.exp(expected), rel=5e-5)


def test_perplexity_of_the_real_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = Path(os.environ.get("NANOLM_TEST_DATA") or "no such folder") / "weights/stories260K"
    if not place.exists():
        pytest.skip("NANOLM_TEST_DATA has no weights/stories260K")
    theirs, their_tokenizer = (
        kind.from_pretrained(place) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    ours = LanguageModel(load_model(place), load_tokenizer(place))
    text = "Once upon a time, there was a little girl named Lily. She loved to play. " * 12
    (tmp_path / "story.txt").write_text(text)
    ids = their_tokenizer(text)["input_ids"]
    assert ids[0] == ours.tokenizer.begin[0]
    for length, stride in ((257, 256), (129, 64)):
        (score,) = evaluate_texts(
            [(ours, length - 1)],
            (str(tmp_path / "story.txt"),),
            Reading(),
            "cpu",
            lambda *how_far: None,
            stride,
        )
        expected = math.exp(by_transformers(theirs, ids, length, stride))
        assert score.tokens == len(ids) - 1
        assert score.bytes == len(text)  # although its tokenizer adds a leading space
        assert score.perplexity == pytest.approx(expected, abs=5e-5)


class Same(nn.Linear):
    """A last layer that returns its input as logits."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Bigrams(Recurrent):
    """A row of logits for each token, independent of the context."""

    def __init__(self, size: int) -> None:
        config = configure("lstm", vocab_size=size, layers=1, dim=1, context=8)
        assert isinstance(config, RecurrentConfig)
        super().__init__(config)
        self.table = torch.zeros(size, size)
        self.head = Same()

    def hidden_states(self, ids: Tensor, memory: object = None) -> Tensor:
        return self.table[ids]


def test_top_1_and_top_5_accuracy() -> None:
    tokenizer = train_tokenizer([], "byte")
    model = Bigrams(tokenizer.vocab_size)
    after = model.table
    after[ord("a"), list(b"bxyz")] = torch.tensor([4.0, 3, 2, 1])  # then c, one of the others
    after[ord("b"), list(b"vwxyz")] = 1.0  # five before a
    after[ord("c"), ord("c")] = torch.nan  # a NaN row is never correct
    score = evaluate(model, tokenizer, encoded(tokenizer, "abacc"), 8, ranked=True, keep=9)
    # All are equal at the start, and none is more likely than a.
    assert [rank for _, _, rank in score.surprises.tolist()] == [1, 1, 6, 5, 259]
    assert (score.top_1_accuracy, score.top_5_accuracy) == (2 / 5, 3 / 5)


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer([], "byte")
    model = Bigrams(tokenizer.vocab_size)
    ids: Store = np.zeros(100_000, dtype=np.uint16)
    monkeypatch.setattr(evaluation, "MOST_LOGITS", 1 << 18)
    for window, stride in ((64, 64), (2, 1)):
        tracemalloc.start()
        score = evaluate(model, tokenizer, ids, window, stride=stride)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert score.tokens == len(ids) - 1
        assert peak < 2 * len(ids)  # bytes


def test_training_asks_for_a_part_and_no_ranks() -> None:
    tokenizer = train_tokenizer([], "byte")
    model = random_model(tokenizer, "gpt2").train()
    ids = encoded(tokenizer, *DOCUMENTS)
    score = evaluate(model, tokenizer, ids, 8, len(ids) // 3 + 1)
    every_third = [
        evaluate(model, tokenizer, ids[n : n + 9], 8) for n in range(0, len(ids) - 1, 24)
    ]
    assert score.tokens == sum(part.tokens for part in every_third)
    nats = sum(part.loss * part.tokens for part in every_third)
    assert score.loss == pytest.approx(nats / score.tokens)
    assert (score.top_1_accuracy, score.top_5_accuracy) == (None, None)
    assert not len(score.surprises)
    assert model.training


def test_perplexity_of_a_hopeless_model() -> None:
    assert math.isfinite(Score(1e9, 1, 1, 1, 1, 1, 1).perplexity)
