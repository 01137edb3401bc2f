from pathlib import Path

import pytest
import torch

import nanolm
from nanolm.errors import UsageError
from nanolm.generation.knobs import Knobs
from nanolm.generation.language_model import (
    Cached,
    LanguageModel,
    Naive,
    Sample,
    first_visible,
)
from nanolm.model.build import build_model
from nanolm.model.config import FAMILIES, configure
from nanolm.text.tokenizer import train_tokenizer


def untrained(family: str, context: int = 24) -> LanguageModel:
    tokenizer = train_tokenizer([], "byte")
    torch.manual_seed(3)
    model = build_model(
        configure(family, vocab_size=258, layers=2, heads=2, dim=16, context=context)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return LanguageModel(model, tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("knobs", [Knobs(tokens=80, greedy=True), Knobs(tokens=80, top_p=0.9)])
@pytest.mark.parametrize("prompt", ["", "abc", "x" * 24, "much longer than the context is"])
def test_cached_and_naive_agree_token_for_token(family: str, knobs: Knobs, prompt: str) -> None:
    writer = untrained(family)
    written = []
    for path in (Cached, Naive):
        samples = [Sample(), Sample(), Sample()]
        for _ in writer.stream(prompt, knobs, samples, path):
            pass
        written.append([sample.tokens for sample in samples])
    assert written[0] == written[1]


@pytest.mark.parametrize("context", [1, 2, 3, 24])
def test_the_window_moves_by_half_a_context_and_always_fits(context: int) -> None:
    for length in range(1, 5 * context):
        start = first_visible(length, context)
        assert 1 <= length - start <= context
        assert start == 0 or length - start > context // 2 - 1


def test_a_character_is_never_split_and_nothing_is_lost() -> None:
    writer = untrained("modern")
    text = "aé日👍"
    spelled = iter([*text.encode(), 0xF0, 0x9F])  # ends in the middle of a character

    class Spelling(Naive):
        def next_logits(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor([next(spelled)]), 258) * 9.0

    samples = [Sample()]
    pieces = list(writer.stream("", Knobs(tokens=12, greedy=True), samples, Spelling))
    assert [piece for _, piece in pieces if piece] == ["a", "é", "日", "👍", "\ufffd"]
    assert samples[0].text == text + "\ufffd"
    assert samples[0].stopped == "length"


def test_a_wrong_knob_is_told_before_anything_is_written() -> None:
    with pytest.raises(UsageError, match="--top-k"):
        untrained("modern").stream("a", Knobs(top_k=0), [Sample()])


def test_end_of_text_ends_a_sample() -> None:
    writer = untrained("modern")

    class Ending(Naive):
        def next_logits(self, ids: torch.Tensor) -> torch.Tensor:
            last = 256 if ids.shape[1] > 3 else 97
            return torch.nn.functional.one_hot(torch.tensor([last]), 258) * 50.0

    samples = [Sample()]
    for _ in writer.stream("ab", Knobs(tokens=50), samples, Ending):
        pass
    assert (samples[0].text, samples[0].tokens, samples[0].stopped) == ("aa", [97, 97, 256], "end")
    assert samples[0].logprobs == pytest.approx([0, 0, 0], abs=1e-6)


def test_the_same_seed_writes_the_same_text(trained: Path) -> None:
    model = nanolm.load(trained)
    first = model.generate("the", seed=4, tokens=30)
    assert model.generate("the", seed=4, tokens=30) == first
    assert model.generate("the", seed=5, tokens=30) != first


def test_logprobs_are_the_models_own(trained: Path) -> None:
    writer = nanolm.load(trained)
    samples = [Sample()]
    for _ in writer.stream("the", Knobs(tokens=5, temperature=0.3, top_k=3), samples):
        pass
    ids = torch.tensor([writer.tokenizer.encode("the") + samples[0].tokens])
    with torch.no_grad():
        chances = writer.model(ids).log_softmax(-1)
    start = ids.shape[1] - 5
    expected = [chances[0, start + n - 1, ids[0, start + n]].item() for n in range(5)]
    assert samples[0].logprobs == pytest.approx(expected, abs=1e-4)
