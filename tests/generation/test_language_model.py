from pathlib import Path

import pytest
import torch

import nanolm
from nanolm.errors import UsageError
from nanolm.generation import language_model
from nanolm.generation.decoding import NaiveDecoder
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.build import build_model
from nanolm.model.config import configure
from nanolm.text.tokenizer import train_tokenizer


def untrained(family: str = "modern", context: int = 24) -> LanguageModel:
    tokenizer = train_tokenizer([], "byte")
    torch.manual_seed(3)
    model = build_model(
        configure(family, vocab_size=258, layers=2, heads=2, dim=16, context=context)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return LanguageModel(model, tokenizer)


def spelling(ids: list[int]) -> type[NaiveDecoder]:
    """A decoder that predicts these ids in order."""
    rest = iter(ids)

    class Spelling(NaiveDecoder):
        def logits(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor([next(rest)]), 258) * 50.0

    return Spelling


def written(sample: Sample, params: SamplingParams, ids: list[int]) -> list[str]:
    """The pieces of a streamed text."""
    writer = untrained()
    return [text for _, text in writer.stream([sample], params, path=spelling(ids)) if text]


def test_a_character_is_never_split_and_nothing_is_lost() -> None:
    sample = Sample()
    ids = [*"aé日👍".encode(), 0xF0, 0x9F]  # ends in the middle of a character
    pieces = written(sample, SamplingParams(tokens=12, greedy=True), ids)
    assert pieces == ["a", "é", "日", "👍", "\ufffd"]
    assert sample.text == "aé日👍\ufffd"
    assert sample.stopped == "length"


def test_a_stop_text_ends_a_sample_and_is_not_part_of_it() -> None:
    sample = Sample()
    pieces = written(
        sample, SamplingParams(tokens=50, stop=("<end>", "zz")), [*b"a <e <enz <end>bc", *b"d" * 40]
    )
    assert pieces == ["a", " ", "<e ", "<en", "z "]  # a second z might have followed
    assert (sample.text, sample.stopped) == ("a <e <enz ", "stop")
    assert bytes(sample.tokens) == b"a <e <enz <end>"
    assert len(sample.logprobs) == len(sample.tokens)


def test_what_was_held_back_is_given_at_the_end() -> None:
    sample = Sample()
    assert written(sample, SamplingParams(tokens=4, stop=("abcde",)), [*b"xabc"]) == ["x", "abc"]
    assert sample.text == "xabc"


def test_end_of_text_ends_a_sample() -> None:
    sample = Sample("ab")
    written(sample, SamplingParams(tokens=50), [97, 97, 256, 98])
    assert (sample.text, sample.tokens, sample.stopped) == ("aa", [97, 97, 256], "end")
    assert sample.logprobs == pytest.approx([0, 0, 0], abs=1e-6)


def test_nothing_ends_before_the_least_number_of_tokens() -> None:
    sample = Sample()
    params = SamplingParams(tokens=8, min_tokens=4, stop=(".",))
    written(sample, params, [*b"a.b.c.d."])
    assert (sample.text, sample.stopped) == ("a.b", "stop")

    class Ending(NaiveDecoder):
        """The end of text is always the most likely, then the letter a."""

        def logits(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(1, 258)
            logits[0, [256, 97]] = torch.tensor([9.0, 5.0])
            return logits

    for least in (0, 6):
        sample = Sample()
        params = SamplingParams(tokens=9, min_tokens=least, greedy=True)
        for _ in untrained().stream([sample], params, path=Ending):
            pass
        assert (sample.text, sample.stopped) == ("a" * least, "end")


def test_a_wrong_parameter_is_reported_before_anything_is_written() -> None:
    with pytest.raises(UsageError, match="--top-k"):
        untrained().stream([Sample("a")], SamplingParams(top_k=0))


def test_banned_text_is_never_written() -> None:
    writer = untrained()
    text = writer.generate("", tokens=300, seed=1)
    letters = sorted(char for char in set(text) if char.isascii())[:30]
    assert len(letters) == 30
    again = writer.generate("", tokens=300, seed=1, ban=tuple(letters))
    assert not set(letters) & set(again)


@pytest.mark.parametrize("family", ["modern", "gpt2", "lstm"])
def test_prompts_together_give_what_they_give_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = untrained(family)
    params = SamplingParams(tokens=40, temperature=1, seed=5)
    prompts = ["", "abc", "much longer than the context is", "x"]

    def together() -> list[list[int]]:
        samples = [Sample(prompt, number) for prompt in prompts for number in range(2)]
        for _ in writer.stream(samples, params):
            pass
        return [sample.tokens for sample in samples]

    alone = []
    for prompt in prompts:
        for number in range(2):
            sample = Sample(prompt, number)
            for _ in writer.stream([sample], params):
                pass
            alone.append(sample.tokens)
    assert together() == alone
    assert alone[0] != alone[1]
    monkeypatch.setattr(language_model, "KV_CACHE_BYTES", 3 * writer.model.cache_bytes(10**6))
    assert together() == alone  # in parts


def test_the_same_seed_writes_the_same_text(trained: Path) -> None:
    model = nanolm.load(trained)
    first = model.generate("the", seed=4, tokens=30)
    assert model.generate("the", seed=4, tokens=30) == first
    assert model.generate("the", seed=5, tokens=30) != first


def test_logprobs_and_the_likeliest_are_the_models_own(trained: Path) -> None:
    writer = nanolm.load(trained)
    sample = Sample("the")
    for _ in writer.stream([sample], SamplingParams(tokens=5, temperature=0.3, top_k=3), top=4):
        pass
    ids = torch.tensor([writer.tokenizer.encode("the") + sample.tokens])
    with torch.no_grad():
        chances = writer.model(ids)[0, :, : writer.tokenizer.vocab_size].log_softmax(-1)
    start = ids.shape[1] - 5
    expected = [chances[start + n - 1, ids[0, start + n]].item() for n in range(5)]
    assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    for number, place in enumerate(sample.top):
        best = chances[start + number - 1].topk(4)
        assert [id for id, _ in place] == best.indices.tolist()
        assert [logprob for _, logprob in place] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_model_is_left_as_it_was(trained: Path) -> None:
    writer = nanolm.load(trained)
    writer.model.train()
    for _ in writer.stream([Sample("a")], SamplingParams(tokens=3)):
        break  # the caller stops early
    assert writer.model.training


def test_how_much_of_a_prompt_is_out_of_sight() -> None:
    writer = untrained(context=24)
    assert writer.unseen("x" * 24) == 0
    assert writer.unseen("x" * 25) == 12
    assert untrained("lstm", context=24).unseen("x" * 1000) == 0
