"""Words: their boundaries, and that their probabilities match those of their tokens."""

import math
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nanolm
from nanolm.generation.decoding import NaiveDecoder
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams
from nanolm.generation.words import WORD_PATTERN, WordBoundaries, score_words
from nanolm.text.tokenizer import train_tokenizer

TEXT = "It's a dog's life. We'll\n\n see 1234 (or 5) -- héllo, 日本 !!\tok"
TOKENIZER = train_tokenizer([TEXT * 3, "the cats sat'd "], "bpe", 400)
BOUNDARIES = WordBoundaries(TOKENIZER, torch.device("cpu"))


def brute_force(word: bytes, token: bytes) -> bool:
    """Whether the token continues the word, by the pattern itself; spaces belong to the next
    word."""
    text, more = (each.decode(errors="surrogateescape") for each in (word, word + token))
    return bool(regex.fullmatch(r"[^\S\r\n]+", text)) or all(
        part.end() != len(text) for part in regex.finditer(WORD_PATTERN, more)
    )


@settings(deadline=None, max_examples=40)
@example("1'S")
@given(st.text(alphabet="ab'sS rlve \t\n\r12.!(é日\u0301\u00a0", min_size=1, max_size=6))
def test_which_tokens_continue_a_word(word: str) -> None:
    mask = BOUNDARIES.continuing(word.encode()).tolist()
    for id, token in enumerate(TOKENIZER.tokens):
        if token and not 0x80 <= token[0] < 0xC0:
            assert mask[id] == brute_force(word.encode(), token), (word, token)
        else:  # a special token, or the rest of another character
            assert not mask[id]


def test_blanks_are_part_of_the_word_behind_them(spelling: LanguageModel) -> None:
    tokens = spelling.tokenizer.encode("  cat.")
    sample = Sample("the", tokens=tokens, logprobs=[-1.0] * len(tokens))
    assert [word.text for word in score_words(spelling, sample)] == ["  cat", "."]


def test_a_number_is_one_word(spelling: LanguageModel) -> None:
    tokens = spelling.tokenizer.encode("in 18765.")
    sample = Sample("", tokens=tokens, logprobs=[-1.0] * len(tokens))
    assert [word.text for word in score_words(spelling, sample)] == ["in", " 18765", "."]


def test_half_a_character_goes_on_with_its_other_half() -> None:
    mask = BOUNDARIES.continuing("日".encode()[:2])
    for id, token in enumerate(TOKENIZER.tokens):
        assert mask[id] == (0x80 <= token[0] < 0xC0 if token else False)


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A character model that has learned a few words."""
    out = tmp_path_factory.mktemp("words")
    (out / "cats.txt").write_text("the cat sat. the cats sit. a cat can sing. " * 40)
    shape: dict[str, Any] = {"layers": 1, "heads": 2, "dim": 32, "context": 24, "batch": 16}
    nanolm.train(out / "cats.txt", out=out / "run", steps=60, tokenizer="char", **shape)
    model: LanguageModel = nanolm.load(out / "run")
    return model


def sampled(model: LanguageModel, prompt: str, **params: Any) -> Sample:
    sample = Sample(prompt)
    for _ in model.stream([sample], SamplingParams(**params)):
        pass
    return sample


def next_probabilities(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.model(torch.tensor([ids]))[0, -1]
    return logits[: model.tokenizer.vocab_size].softmax(dim=-1)


def every_word(model: LanguageModel, ids: list[int], least: float) -> dict[str, float]:
    """All words that may follow, by trying every token that is not too unlikely."""
    boundaries = WordBoundaries(model.tokenizer, torch.device("cpu"))
    found: dict[str, float] = {}

    def follow(path: list[int], probability: float) -> None:
        word = b"".join(model.tokenizer.tokens[id] for id in path)
        following = next_probabilities(model, ids + path)
        continuing = boundaries.continuing(word)
        text = word.decode(errors="backslashreplace")
        ends = following[~continuing].sum().item()
        found[text] = found.get(text, 0.0) + probability * ends
        for id in continuing.nonzero().flatten().tolist():
            if (chance := probability * following[id].item()) > least:
                follow([*path, id], chance)

    first = next_probabilities(model, ids)
    for id in (first > least).nonzero().flatten().tolist():
        follow([id], first[id].item())
    return found


def test_the_likeliest_words_are_those_of_an_exhaustive_search(spelling: LanguageModel) -> None:
    sample = sampled(spelling, "the cat ", tokens=2, seed=1)
    truth = every_word(spelling, spelling.tokenizer.encode_prompt("the cat "), 1e-4)
    best = sorted(truth.items(), key=lambda pair: -pair[1])[:6]
    first = score_words(spelling, sample, top=6)[0]
    assert [text for text, _ in first.top] == [text for text, _ in best]
    for (_, found), (_, expected) in zip(first.top, best, strict=True):
        assert found == pytest.approx(expected, rel=0.02, abs=1e-4)
    assert any(len(text) > 1 for text, _ in first.top)  # several characters


@pytest.mark.parametrize("prompt", ["", "the c", "a cat"])
def test_the_words_together_are_as_likely_as_the_text(spelling: LanguageModel, prompt: str) -> None:
    sample = sampled(spelling, prompt, tokens=15, seed=3)
    words = score_words(spelling, sample)
    assert [id for word in words for id in word.tokens] == sample.tokens
    assert len(words) < len(sample.tokens)
    ids = spelling.tokenizer.encode_prompt(prompt) + sample.tokens
    boundaries = WordBoundaries(spelling.tokenizer, torch.device("cpu"))
    last = (prompt if len(words) == 1 else "") + words[-1].text
    ends = next_probabilities(spelling, ids)[~boundaries.continuing(last.encode())].sum().item()
    together = sum(math.log(word.probability) for word in words)
    assert together == pytest.approx(sum(sample.logprobs) + math.log(ends), abs=1e-3)


def test_searching_changes_nothing_but_finds_more(spelling: LanguageModel) -> None:
    sample = sampled(spelling, "the", tokens=24, seed=2)  # beyond the context length
    plain, searched = score_words(spelling, sample), score_words(spelling, sample, top=4)
    naive = score_words(spelling, sample, top=4, path=NaiveDecoder)
    for one, other, slow in zip(plain, searched, naive, strict=True):
        assert one.text == other.text == slow.text
        assert other.probability == pytest.approx(one.probability, rel=0.05, abs=1e-6)
        assert other.probability == pytest.approx(slow.probability, rel=1e-3, abs=1e-6)
        assert [text for text, _ in other.top[:2]] == [text for text, _ in slow.top[:2]]
        assert sum(chance for _, chance in other.top) <= 1.001
        chances = dict(other.top)
        assert chances.get(other.text, other.probability) == other.probability


def test_where_words_are_tokens_it_is_the_view_of_tokens(trained: Path) -> None:
    model = nanolm.load(trained)
    sample = Sample("the small cat")
    for _ in model.stream([sample], SamplingParams(tokens=8, seed=3), top=3):
        pass
    words = score_words(model, sample, top=3)
    assert [word.tokens for word in words] == [[id] for id in sample.tokens]
    for word, logprob, top in zip(words, sample.logprobs, sample.top, strict=True):
        assert word.probability == pytest.approx(math.exp(logprob), rel=0.1, abs=0.01)
        best = model.tokenizer.tokens[top[0][0]].decode()
        assert dict(word.top)[best] == pytest.approx(math.exp(top[0][1]), rel=0.1, abs=0.01)
