"""Beam search gives the same results as in `transformers`."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from models import lively

from nanolm.generation.beam_search import beam_search
from nanolm.generation.decoding import CachedDecoder, NaiveDecoder
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.config import configure
from nanolm.model.huggingface import load_model, save_model
from nanolm.text.tokenizer import Tokenizer, train_tokenizer

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 16, "context": 64}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Tokenizer]:
    """A model with few tokens, so that the end is often among the most likely: ours and theirs."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("beams")
    tokenizer = train_tokenizer([], "byte")
    model = lively(configure("llama", vocab_size=tokenizer.vocab_size, **SHAPE), std=0.4)
    with torch.no_grad():
        model.head.weight[tokenizer.end_of_text] *= 2  # likely, or very unlikely
    save_model(model, folder, tokenizer)
    return load_model(folder), AutoModelForCausalLM.from_pretrained(folder), tokenizer


@pytest.mark.parametrize("beams", [2, 3, 8])
@pytest.mark.parametrize("more", [{}, {"min_tokens": 9}, {"repetition_penalty": 1.4}])
def test_as_transformers(
    both: tuple[Any, Any, Tokenizer], beams: int, more: dict[str, Any]
) -> None:
    ours, theirs, tokenizer = both
    settings = {"min_new_tokens": more["min_tokens"]} if "min_tokens" in more else more
    ended = 0
    for start in range(12):
        prompt = [start, 2 * start + 1, 100]
        params = SamplingParams(tokens=20, beams=beams, **more)
        search = beam_search(CachedDecoder(ours, beams, 23), tokenizer, [prompt], params)
        ((_, found),) = chain.from_iterable(search)
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 3),
            num_beams=beams,
            num_return_sequences=beams,
            do_sample=False,
            max_new_tokens=20,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        for beam, ids, score in zip(
            found, expected.sequences[:, 3:].tolist(), expected.sequences_scores, strict=True
        ):
            assert beam.ids == ids[: len(beam.tokens)]
            assert set(ids[len(beam.tokens) :]) <= {tokenizer.padding}
            assert beam.score == pytest.approx(score.item(), abs=1e-4)
            ended += beam.ids[-1] == tokenizer.end_of_text
    assert ended  # at least one, or this case was not tested


@pytest.mark.parametrize("family", ["modern", "gpt2", "lstm"])
def test_cached_and_naive_agree_past_the_context(family: str) -> None:
    tokenizer = train_tokenizer([], "byte")
    config = configure(family, vocab_size=tokenizer.vocab_size, **SHAPE | {"context": 8})
    model = lively(config, std=0.4)
    prompts, params = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], SamplingParams(tokens=24, beams=3)
    found = []
    for path in (CachedDecoder, NaiveDecoder):
        search = beam_search(path(model, 6, 29), tokenizer, prompts, params)
        texts = dict(chain.from_iterable(search))
        found.append([[beam.ids for beam in texts[n]] for n in range(2)])
    assert found[0] == found[1]


def test_several_and_likelier_than_greedy(trained: Path) -> None:
    import nanolm

    writer: LanguageModel = nanolm.load(trained)
    samples = [Sample("the cat", number) for number in range(3)]
    pieces = dict(writer.stream(samples, SamplingParams(tokens=12, beams=4, stop=(".",)), top=2))
    assert [pieces[row] for row in range(3)] == [sample.text for sample in samples]
    assert len({tuple(sample.tokens) for sample in samples}) == 3
    for sample in samples:
        assert "." not in sample.text
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.top)
        assert sample.stopped in ("stop", "length", "end")
    greedy = Sample("the cat")
    for _ in writer.stream([greedy], SamplingParams(tokens=6, greedy=True)):
        pass
    best = Sample("the cat")
    for _ in writer.stream([best], SamplingParams(tokens=6, beams=8)):
        pass
    assert sum(best.logprobs) >= sum(greedy.logprobs) - 1e-4  # rounding differs with eight rows


def test_stop_texts_leave_distinct_texts_and_wait_for_the_least_tokens(trained: Path) -> None:
    import nanolm

    writer: LanguageModel = nanolm.load(trained)
    samples = [Sample("the", number) for number in range(8)]
    for _ in writer.stream(samples, SamplingParams(tokens=10, beams=8, stop=("s",))):
        pass
    assert len({tuple(sample.tokens) for sample in samples}) == 8
    sample = Sample("the")
    for _ in writer.stream(
        [sample], SamplingParams(tokens=40, beams=3, stop=("s",), min_tokens=12)
    ):
        pass
    assert len(sample.tokens) >= 12
    assert (sample.stopped == "stop") == (len(sample.tokens) < 40)
