"""Cached and naive decoding agree for all models, prompts and batches."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from models import PUBLISHED_FAMILIES, SCALINGS, every_gpt, gpt_config, lively
from torch import nn

from nanolm.generation.batch import Batch, BatchRow
from nanolm.generation.decoding import CachedDecoder, NaiveDecoder, first_visible
from nanolm.generation.sampler import Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.adapters import Adapters
from nanolm.model.base import Model
from nanolm.model.config import FAMILIES, ModelConfig, Positions, configure
from nanolm.model.fast import native
from nanolm.model.fast.cpu_decoding import OneRow
from nanolm.model.fast.native.decoding import NativeOneRow
from nanolm.model.fast.quantized import quantize
from nanolm.planning.tuning import threads_for
from nanolm.text.tokenizer import train_tokenizer

CONTEXT = 12
TOKENS = 2 * CONTEXT + 2  # well beyond the context length: the window moves three times
BYTES = train_tokenizer([], "byte")
SHAPE = {"vocab_size": 258, "layers": 2, "heads": 2, "dim": 16, "context": CONTEXT}
CONFIGS: dict[str, ModelConfig] = {family: configure(family, **SHAPE) for family in FAMILIES} | {
    f"{positions}, {place}": gpt_config(
        **SHAPE, positions=positions, norm_place=place, kv_heads=1, bias=True
    )
    for positions in get_args(Positions)
    for place in ("pre", "post")
}

needs_compiler = pytest.mark.skipif(not native.available(), reason="there is no C compiler")


def model_of(kind: str) -> Model:
    return lively(CONFIGS[kind], std=0.4)


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(256, (length,), generator=generator).tolist()


def written(
    path: type[NaiveDecoder] | type[CachedDecoder],
    model: Model,
    prompts: list[list[int]],
    params: SamplingParams,
    tokens: int = TOKENS,
) -> list[list[int]]:
    """The ids of each row."""
    length = max(map(len, prompts)) + tokens
    decoder, sampler = path(model, len(prompts), length), Sampler(BYTES, len(prompts), model.device)
    batch = Batch(decoder, sampler, length)
    ids: dict[BatchRow, list[int]] = {
        BatchRow(prompt, replace(params, tokens=tokens)): [] for prompt in prompts
    }
    batch.join(list(ids))
    while batch.busy():
        for row, token in batch.step():
            ids[row].append(token.id)
    return list(ids.values())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("length", [1, 2, 5, CONTEXT - 1, CONTEXT, CONTEXT + 1, 4 * CONTEXT])
def test_cached_and_naive_agree_token_for_token(kind: str, length: int) -> None:
    model, prompts = model_of(kind), [prompt_of(length)] * 3
    for params in (SamplingParams(greedy=True), SamplingParams(top_p=0.9, repetition_penalty=1.2)):
        expected = written(NaiveDecoder, model, prompts, params)
        assert written(CachedDecoder, model, prompts, params) == expected
        assert written(CachedDecoder, model, prompts[:1], params) == expected[:1]
    assert len(set(expected[0])) > 3  # it does not repeat one token


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "params", [SamplingParams(greedy=True), SamplingParams(min_p=0.02, frequency_penalty=0.5)]
)
def test_together_is_one_by_one(kind: str, params: SamplingParams) -> None:
    """Rows of different lengths, whose windows move at different times."""
    model = model_of(kind)
    prompts = [prompt_of(length) for length in (3, 1, CONTEXT, 7, 2 * CONTEXT + 5, CONTEXT + 1)]
    alone = [written(CachedDecoder, model, [prompt], params)[0] for prompt in prompts]
    assert written(CachedDecoder, model, prompts, params) == alone
    assert written(NaiveDecoder, model, prompts, params) == alone


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [OneRow, pytest.param(NativeOneRow, marks=needs_compiler)])
def test_one_row_on_a_cpu(kind: type[OneRow | NativeOneRow], threads: int) -> None:
    """It gives the same logits with fewer operations, for most models."""
    ids = torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(1))
    taken = 0
    every = [*every_gpt(norm_place="pre", tied=True, kv_heads=2), *CONFIGS.values()]
    every += [gpt_config(**changes) for changes in PUBLISHED_FAMILIES.values()]
    every += [gpt_config(rope_scaling=scaling) for scaling in SCALINGS]
    for config in every:
        model: Any = lively(config)
        plain, quick = (model.init_cache(3, 10) for _ in range(2))
        if not OneRow.supports(model, quick):
            continue
        taken += 1
        quick.use(1)
        with torch.inference_mode(), threads_for(threads):
            step = kind(model, quick)
            for id in ids[0]:
                expected = model(id.expand(3, 1), plain)[:1, -1]
                torch.testing.assert_close(step(id[None, None]), expected, rtol=1e-4, atol=1e-4)
    assert taken > len(every) / 2
    decoder = CachedDecoder(model_of("modern"), 1, 5)
    assert isinstance(decoder.fused(1), NativeOneRow if native.available() else OneRow)


@needs_compiler
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["modern", "gpt2"])
@pytest.mark.parametrize("dim", [64, 40])
def test_one_row_with_quantized_weights(family: str, dim: int, bits: int) -> None:
    model: Any = lively(configure(family, **SHAPE | {"dim": dim}), std=0.4)
    quantize(model, bits)
    plain, quick = (model.init_cache(1, 10) for _ in range(2))
    assert NativeOneRow.supports(model)
    with torch.inference_mode(), threads_for(1):
        step = NativeOneRow(model, quick)
    with torch.inference_mode(), threads_for(3):  # as many as it has memory for
        for id in range(200, 208):
            ids = torch.tensor([[id]])
            expected = model(ids, plain)[:, -1]
            # torch's 8-bit layers round their inputs to bfloat16.
            assert (step(ids) - expected).norm() < 0.02 * expected.norm()


@needs_compiler
def test_layers_with_adapters_are_not_read_in_c() -> None:
    model: Any = model_of("modern")
    assert NativeOneRow.supports(model)
    adapters = Adapters(model)
    for matrix in adapters.up.values():
        nn.init.normal_(matrix)
    assert not NativeOneRow.supports(model)
    plain, quick = (model.init_cache(1, 10) for _ in range(2))
    with torch.inference_mode():
        ids, step = torch.tensor([[5]]), OneRow(model, quick)
        torch.testing.assert_close(step(ids), model(ids, plain)[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("context", [1, 2, 3, 24])
def test_the_window_moves_by_half_a_context_and_always_fits(context: int) -> None:
    for length in range(1, 5 * context):
        start = first_visible(length, context)
        assert 1 <= length - start <= context
        assert start == 0 or length - start > context // 2 - 1
        if start > 0:
            assert start % max(1, context // 2) == 0
    assert first_visible(10**9, None) == 0


@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_context_of_next_to_nothing(context: int) -> None:
    model = lively(gpt_config(**SHAPE | {"context": context}), std=0.4)
    params = SamplingParams(greedy=True)
    prompts = [prompt_of(1), prompt_of(4)]
    assert written(CachedDecoder, model, prompts, params) == written(
        NaiveDecoder, model, prompts, params
    )


def test_nothing_is_computed_twice() -> None:
    """One token per step, except for the prompt and each time a window moves."""
    model = model_of("modern")
    sizes: list[int] = []
    plain = model.hidden_states

    def counted(ids: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(ids.shape[1])
        return plain(ids, *rest)

    model.hidden_states = counted  # type: ignore[method-assign,assignment]
    # A single row may take another path.
    written(CachedDecoder, model, [prompt_of(5)] * 2, SamplingParams(greedy=True), tokens=CONTEXT)
    # 5 tokens first, then one at a time, until 13 do not fit in 12 and the window moves.
    assert sizes == [4, *[1] * 8, 6, *[1] * 4]
