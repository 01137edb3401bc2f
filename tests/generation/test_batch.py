"""Each text is the same as without a batch, no matter which rows join or leave."""

import random
from dataclasses import replace

import pytest
import torch
from models import lively

from nanolm.generation.batch import Batch, BatchRow
from nanolm.generation.decoding import CachedDecoder, NaiveDecoder
from nanolm.generation.sampler import Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.base import Model
from nanolm.model.config import configure
from nanolm.text.tokenizer import train_tokenizer

BYTES = train_tokenizer([], "byte")
SHAPE = {"vocab_size": 258, "layers": 2, "heads": 2, "dim": 16, "context": 12}
MOST, LENGTH = 5, 80


def batch_of(
    model: Model, rows: int = MOST, path: type[NaiveDecoder] | type[CachedDecoder] = CachedDecoder
) -> Batch:
    sampler = Sampler(BYTES, rows, model.device)
    return Batch(path(model, rows, LENGTH), sampler, LENGTH)


def rows_of(count: int, seed: int) -> list[BatchRow]:
    source = random.Random(seed)
    kinds = (
        SamplingParams(greedy=True),
        SamplingParams(top_p=0.9, repetition_penalty=1.3),
        SamplingParams(top_k=9, frequency_penalty=0.4),
        SamplingParams(temperature=1.4, ban=("a", "bc")),
        SamplingParams(min_p=0.05, min_tokens=4),
    )
    return [
        BatchRow(
            source.choices(range(256), k=source.randint(1, 30)),
            replace(source.choice(kinds), tokens=source.randint(1, 50), seed=source.randint(0, 99)),
            top=source.choice((0, 3)),
        )
        for _ in range(count)
    ]


def alone(
    model: Model, row: BatchRow, path: type[NaiveDecoder] | type[CachedDecoder] = NaiveDecoder
) -> list[int]:
    batch = batch_of(model, 1, path)
    batch.join([row])
    return [token.id for _ in range(row.params.tokens) for _, token in batch.step()]


@pytest.mark.parametrize("family", ["gpt2", "modern", "lstm"])
@pytest.mark.parametrize("seed", range(6))
def test_joining_and_leaving_changes_no_text(family: str, seed: int) -> None:
    model = lively(configure(family, **SHAPE), std=0.4)
    rows, source = rows_of(14, seed), random.Random(seed)
    batch, waiting = batch_of(model), list(rows)
    found: dict[BatchRow, list[int]] = {row: [] for row in rows}
    broken_off = set(source.sample(rows, 3))
    while waiting or batch.busy():
        free = MOST - len(batch.rows)
        some = [waiting.pop() for _ in range(min(free, source.randint(0, 2), len(waiting)))]
        batch.join(some)
        for row, token in batch.step():
            found[row].append(token.id)
            assert len(token.top) == row.top
        for row in broken_off & set(batch.rows):
            if source.random() < 0.2:
                batch.leave(row)
    for row in rows:
        expected = alone(model, row)
        assert found[row] == expected[: len(found[row])]
        assert len(found[row]) == len(expected) or row in broken_off


def test_a_row_that_has_left_is_left_alone() -> None:
    model = lively(configure("modern", **SHAPE), std=0.4)
    batch, (row, other) = batch_of(model), rows_of(2, 9)
    batch.join([row])
    batch.leave(row)
    batch.leave(other)
    assert not batch.busy()
    assert list(batch.step()) == []


def test_sizes_leave_rows_idle() -> None:
    """With a fixed cache, as on a GPU."""
    model = lively(configure("modern", **SHAPE), std=0.4)
    batch, rows = batch_of(model), rows_of(3, 4)
    decoder = CachedDecoder(model, MOST, LENGTH)
    decoder.memory = model.init_cache(MOST, LENGTH, fixed=True)
    batch = Batch(decoder, batch.sampler, LENGTH, sizes=(1, 4))
    batch.join(rows)
    found: dict[BatchRow, list[int]] = {row: [] for row in rows}
    while batch.busy():
        for row, token in batch.step():
            found[row].append(token.id)
    assert list(found.values()) == [alone(model, row) for row in rows]
    assert torch.equal(batch.lengths_there, torch.ones(MOST, dtype=torch.long))
