"""Every filter agrees with `transformers`, and samples follow the right distribution."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from nanolm.generation.banned_texts import BannedTexts
from nanolm.generation.sampler import RANDOM_BLOCK, Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.text.tokenizer import train_tokenizer

BYTES = train_tokenizer([], "byte")
SIZE = BYTES.vocab_size
CPU = torch.device("cpu")
PROMPT = [1, 2, 3, 2]

FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-k of all": {"temperature": 1.0, "top_k": 10**6},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "typical-p": {"temperature": 1.0, "typical_p": 0.7},
    "tiny typical-p": {"temperature": 1.0, "typical_p": 1e-6},
    "typical-p after others": {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "typical_p": 0.4},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.7},
    "less than one": {"temperature": 1.0, "repetition_penalty": 0.6},
    "ban": {"temperature": 1.0, "ban": ("A", "BC", "\x02D")},
    "min-tokens": {"temperature": 1.0, "min_tokens": 5},
    "all together": {
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.9,
        "repetition_penalty": 1.3,
        "ban": ("A", "\x02D"),
        "min_tokens": 2,
    },
}


def sampler_of(
    params: SamplingParams, prompts: list[list[int]], first: int = 0, top: int = 0
) -> Sampler:
    """Rows with random numbers starting at `first`."""
    sampler = Sampler(BYTES, len(prompts), CPU)
    for row, prompt in enumerate(prompts):
        sampler.begin(row, params, prompt, first + row, top)
    return sampler


def by_transformers(params: SamplingParams) -> LogitsProcessorList:
    """The result of `generate` with the same settings, in its order."""
    parts: list[Any] = []
    if params.repetition_penalty != 1:
        parts.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.ban:
        words = [list(text.encode()) for text in params.ban]
        parts.append(NoBadWordsLogitsProcessor(words, BYTES.end_of_text))
    if params.min_tokens:
        ends = sorted(BYTES.stops)
        parts.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, ends))
    parts.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        parts.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None:
        parts.append(TopPLogitsWarper(params.top_p))
    if params.min_p is not None:
        parts.append(MinPLogitsWarper(params.min_p))
    if params.typical_p is not None:
        parts.append(TypicalLogitsWarper(params.typical_p))
    return LogitsProcessorList(parts)


@pytest.mark.parametrize("name", FILTERS)
def test_what_is_kept_is_what_transformers_keeps(name: str) -> None:
    params = SamplingParams(**FILTERS[name])
    rows = 1000
    generator = torch.Generator().manual_seed(1)
    scale = torch.linspace(0.5, 6, rows)[:, None]
    logits = torch.randn(rows, SIZE, generator=generator) * scale
    sampler = sampler_of(params, [PROMPT] * rows)
    ours = sampler.apply("filter", sampler.scores(logits))
    theirs = by_transformers(params)(torch.tensor([PROMPT] * rows), logits.clone())
    assert torch.equal(ours > -torch.inf, theirs > -torch.inf)
    torch.testing.assert_close(ours.softmax(-1).float(), theirs.softmax(-1), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", FILTERS)
def test_100_000_draws_follow_the_filtered_distribution(name: str) -> None:
    rows, steps = 1000, 100
    params = SamplingParams(**FILTERS[name], seed=3)
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(2)) * 2
    expected = by_transformers(params)(torch.tensor([PROMPT]), logits.clone()).softmax(-1)[0]
    sampler = sampler_of(params, [PROMPT] * rows)
    scores = sampler.scores(logits.expand(rows, -1))
    counts = torch.zeros(SIZE, dtype=torch.float64)
    sampler.scores = lambda logits: scores  # type: ignore[method-assign]  # the first step's, always
    for _ in range(steps):
        sampler.prepare(rows)
        ids, _ = sampler.sample(scores)
        counts += torch.bincount(ids, minlength=SIZE)
    wanted = expected.double() * rows * steps
    assert counts[wanted == 0].sum() == 0
    # Merge outcomes expected fewer than five times, as the test requires.
    rare = (wanted > 0) & (wanted < 5)
    groups = [(c, w) for c, w in zip(counts.tolist(), wanted.tolist(), strict=True) if w >= 5]
    if rare.any():
        groups.append((counts[rare].sum().item(), wanted[rare].sum().item()))
    found = sum((count - want) ** 2 / want for count, want in groups)
    freedom = len(groups) - 1
    # Once in ten thousand seeds, by the cube-root approximation of the chi-squared distribution.
    limit = (
        freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
        if freedom
        else 0
    )
    assert found <= limit


def test_frequency_and_presence_penalties() -> None:
    sampler = sampler_of(SamplingParams(frequency_penalty=0.5, presence_penalty=2.0), [[7, 7, 7]])
    logits = torch.zeros(1, SIZE)
    assert sampler.scores(logits).abs().max() == 0  # tokens of the prompt do not count
    for id in (5, 5, 9):
        sampler.accept(torch.tensor([id]))
    scores = sampler.scores(logits)[0]
    assert (scores[5].item(), scores[9].item(), scores[7].item()) == (-3.0, -2.5, 0.0)


def test_repetition_counts_what_was_written_too() -> None:
    sampler = sampler_of(SamplingParams(repetition_penalty=2.0), [[3], [4]])
    sampler.accept(torch.tensor([5, 6]))
    scores = sampler.scores(torch.tensor([[4.0, -4.0]]).repeat(2, SIZE // 2))
    changed = (scores.abs() != 4).nonzero().tolist()
    assert changed == [[0, 3], [0, 5], [1, 4], [1, 6]]
    assert scores[1, [4, 6]].tolist() == [2.0, 2.0]
    assert scores[0, [3, 5]].tolist() == [-8.0, -8.0]


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_what_is_banned_cannot_be_spelled_in_any_way(kind: str) -> None:
    """Every text of up to three tokens, followed through the automaton."""
    text = "abab caab äbc " * 3
    tokenizer = train_tokenizer([text], kind, 262 if kind == "bpe" else None)
    bans = BannedTexts(("ab", "bä", "c a"), tokenizer, CPU)
    wanted = [b"ab", "bä".encode(), b"c a"]
    ids = [*sorted(set(tokenizer.encode(text))), tokenizer.end_of_text]
    for length in (1, 2, 3):
        for row in itertools.product(ids, repeat=length):
            state = bans.after(row[:-1])
            before, after = (
                b"".join(tokenizer.tokens[id] for id in part) for part in (row[:-1], row)
            )
            completes = any(after.count(each) > before.count(each) for each in wanted)
            assert bool(bans.banned[state, row[-1]]) == completes
            following = bans.next[state, row[-1]]
            assert following == bans.after(row)


def test_a_prompt_counts_for_a_ban() -> None:
    sampler = sampler_of(SamplingParams(ban=("the end",)), [list(b"this is the en"), list(b"the")])
    banned = sampler.scores(torch.zeros(2, SIZE)) == -torch.inf
    assert banned.nonzero().tolist() == [[0, ord("d")]]


def test_rows_draw_the_same_whatever_is_beside_them() -> None:
    logits = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))
    together = sampler_of(SamplingParams(seed=3), [[1]] * 4)
    alone = sampler_of(SamplingParams(seed=3), [[1]], first=2)
    other = sampler_of(SamplingParams(seed=4), [[1]], first=2)
    same, different = [], []
    for _ in range(RANDOM_BLOCK + 20):
        for sampler in (together, alone, other):
            sampler.prepare(sampler.rows)
        found = together.sample(logits)[0][2]
        same.append(found == alone.sample(logits[2:3])[0][0])
        different.append(found == other.sample(logits[2:3])[0][0])
    assert all(same)
    assert not all(different)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(greedy=True),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-310),
    ],
)
def test_greedy(params: SamplingParams) -> None:
    logits = torch.zeros(1, SIZE)
    logits[0, 77] = 1e-3
    assert sampler_of(params, [[1]]).sample(logits)[0].tolist() == [77]


def test_what_is_known_of_a_draw_is_the_models_own() -> None:
    logits = torch.randn(2, SIZE + 5, generator=torch.Generator().manual_seed(4))  # spare rows
    params = SamplingParams(temperature=0.3, top_k=3, repetition_penalty=1.5)
    sampler = sampler_of(params, [[1], [2]], top=6)
    sampler.prepare(2)
    ids, known = sampler.sample(logits)
    own = logits[:, :SIZE].log_softmax(-1)
    best = own.topk(6)
    assert known[:, 0].tolist() == ids.tolist()
    torch.testing.assert_close(known[:, 1].float(), own.gather(1, ids[:, None])[:, 0])
    assert known[:, 2:8].tolist() == best.indices.tolist()
    torch.testing.assert_close(known[:, 8:].float(), best.values)


def test_all_wrong_parameters_are_named_at_once() -> None:
    wrong = SamplingParams(
        tokens=0,
        stop=("",),
        repetition_penalty=0,
        frequency_penalty=math.inf,
        presence_penalty=math.nan,
        ban=("\udcff", ""),
        min_tokens=-1,
        temperature=-1,
        top_k=0,
        top_p=1.5,
        min_p=-0.1,
        typical_p=0,
        beams=0,
        seed=-1,
    )
    named = [problem.split()[0].rstrip(":") for problem in wrong.problems()]
    fields = (
        "tokens repetition frequency presence min-tokens temperature top-k top-p min-p typical-p "
        "beams seed"
    )
    expected = [f"--{name}" for name in fields.split()]
    expected[1:4] = [f"{name}-penalty" for name in expected[1:4]]
    assert named == [*expected, "--stop", "--ban", "--ban"]
    assert SamplingParams(temperature=math.nan).problems()
    for others in ({}, {"temperature": -1}, {"stop": ("",)}):
        problems = SamplingParams(min_tokens=201, **others).problems()
        assert "--min-tokens 201: must be at most --tokens 200" in problems
        assert len(problems) == 1 + len(others)
    assert SamplingParams(ban=("x" * 100, "y" * 101)).problems() == [
        "--ban: all texts together must be at most 200 bytes"
    ]
    assert SamplingParams(top_k=2.5, tokens="9").problems() == [  # type: ignore[arg-type]
        "--tokens 9: must be a whole number",
        "--top-k 2.5: must be a whole number",
    ]
    assert SamplingParams().problems() == []
    assert SamplingParams(seed=None, stop=None).problems() == []  # type: ignore[arg-type]
    assert SamplingParams(stop="x", ban="y") == SamplingParams(stop=("x",), ban=("y",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1, top_k=2, typical_p=0.5),
    ],
)
def test_a_model_that_has_diverged_still_gives_tokens(params: SamplingParams) -> None:
    sampler = sampler_of(params, [[1]])
    sampler.prepare(1)
    for value in (torch.nan, -torch.inf):
        ids, _ = sampler.sample(torch.full((1, SIZE), value))
        assert 0 <= ids.item() < SIZE


def test_nothing_waits_for_the_cpu() -> None:
    """A step reads no value of a tensor, which would make a GPU wait."""
    params = SamplingParams(**FILTERS["all together"], frequency_penalty=0.1, seed=1)
    sampler = sampler_of(params, [PROMPT])
    assert sampler.active.sampled  # computed before a step, as in a batch
    sampler.prepare(1)

    def refuse(tensor: Tensor) -> Any:
        raise AssertionError("a value was read")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        sampler.sample(torch.randn(1, SIZE))


def test_every_row_has_parameters_of_its_own() -> None:
    """A row samples the same tokens as alone, no matter which rows are beside it."""
    every = [
        SamplingParams(**values, seed=number) for number, values in enumerate(FILTERS.values())
    ]
    every += [
        SamplingParams(greedy=True),
        SamplingParams(frequency_penalty=1.5, presence_penalty=-0.5),
    ]
    alone = [sampler_of(params, [PROMPT]) for params in every]
    together = Sampler(BYTES, len(every), CPU)
    for row, params in enumerate(every):
        together.begin(row, params, PROMPT)
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        logits = 3 * torch.randn(len(every), SIZE, generator=generator)
        together.prepare(len(every))
        found = together.sample(logits)[0].tolist()
        for row, sampler in enumerate(alone):
            sampler.prepare(1)
            assert sampler.sample(logits[row : row + 1])[0].item() == found[row], every[row]
