"""Echoed prompts: the tokens of a prompt, with their log probabilities if those are wanted."""

import math
from array import array
from typing import Any

from torch import Tensor

from nanolm.generation.batch import BatchRow
from nanolm.generation.scoring import ScoredText, score
from nanolm.model.device import use_fitting_threads
from nanolm.serve.engine import Tokens
from nanolm.serve.models import ServedLanguageModel, pieces
from nanolm.serve.queues import Steps
from nanolm.text.tokenizer import Tokenizer


def echo_prompts(writer: ServedLanguageModel, rows: list[BatchRow], logprobs: bool) -> Steps:
    """The tokens of the prompt of each row, in steps, for the compute thread."""
    model, vocab_size = writer.loaded.model, writer.tokenizer.vocab_size
    texts = {id(row.prompt): ScoredText(row.prompt, min(row.top, vocab_size)) for row in rows}
    steps = score(model, list(texts.values()), vocab_size)
    while logprobs:
        if model.device.type == "cpu":
            use_fitting_threads(model)  # another model may have run in between
        if next(steps, None) is None:
            break
        yield []
    for row in rows:
        yield [prompt_tokens(writer.tokenizer, texts[id(row.prompt)])]


def prompt_tokens(tokenizer: Tokenizer, text: ScoredText) -> Tokens:
    """The first token follows nothing, so its log probability is NaN."""
    tokens, parts = Tokens(), pieces(tokenizer, text.ids)
    tokens.text += "".join(parts).encode()
    tokens.lengths, tokens.ids = array("I", map(len, parts)), array("i", text.ids)
    tokens.top = text.top
    columns: tuple[tuple[Any, list[Any], Tensor], ...] = (
        (tokens.logprobs, [math.nan], text.logprobs),
        (tokens.top_ids, [0] * text.top, text.top_ids),
        (tokens.top_logprobs, [math.nan] * text.top, text.top_logprobs),
    )
    for kept, first, rest in columns:
        kept.extend(first)
        kept.frombytes(rest.numpy().tobytes())
    return tokens
