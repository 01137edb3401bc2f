"""Vectors one can compare: a word in its sentences, tokens among themselves, positions.

>>> found = occurrences(model, tokenizer, "bank", ["The bank lent money.", "We sat on the bank."])
>>> similarities(found.vectors).shape  # (layers + 1, occurrences, occurrences)
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanolm.errors import UsageError
from nanolm.inspect.look import streams
from nanolm.model.base import Model
from nanolm.model.gpt import GPT
from nanolm.model.positions import rotation_table, sinusoidal_table
from nanolm.text.page import spelled
from nanolm.text.tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Occurrences:
    """A word wherever it stands in some texts."""

    word: str
    around: list[str]  # the text around each of them, the word itself between []
    vectors: Floats  # (layers + 1, occurrences, dim): after the embedding and after each layer


def occurrences(model: Model, tokenizer: Tokenizer, word: str, texts: list[str]) -> Occurrences:
    """The vector of the word's last token, which has seen the whole word and all before it."""
    if not isinstance(model, GPT):
        raise UsageError("--word: a recurrent model has no layers of vectors to compare")
    pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
    around, vectors = [], []
    for text in texts:
        places = list(pattern.finditer(text))
        if not places:
            continue
        ids = tokenizer.encode_prompt(text)
        if len(ids) > model.config.context:
            raise UsageError(
                f"--word: a text has {len(ids):,} tokens and the model looks back on "
                f"{model.config.context:,}; give a shorter one"
            )
        ends = np.cumsum([len(tokenizer.tokens[id]) for id in ids])
        layers = torch.stack(streams(model, ids))  # (layers + 1, time, dim)
        for place in places:
            end = len(text[: place.end()].encode())
            vectors.append(layers[:, int(np.searchsorted(ends, end))].float().cpu().numpy())
            around.append(shortened(text, place.start(), place.end()))
    if not vectors:
        raise UsageError(f"--word {word}: no text has it; they are compared where it stands")
    return Occurrences(word, around, np.stack(vectors, axis=1))


def shortened(text: str, start: int, stop: int, reach: int = 24) -> str:
    before, after = text[max(0, start - reach) : start], text[stop : stop + reach]
    before = "…" * (start > reach) + before
    after += "…" * (len(text) > stop + reach)
    return " ".join(f"{before}[{text[start:stop]}]{after}".split())


def similarities(vectors: Floats) -> Floats:
    """The cosine of every pair: (..., count, dim) to (..., count, count)."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    directions = vectors / np.maximum(lengths, 1e-12)
    cosines: Floats = directions @ directions.swapaxes(-1, -2)
    return cosines


def between(cosines: Floats) -> list[float]:
    """The mean over pairs of different places, for each layer."""
    count = cosines.shape[-1]
    rows, columns = np.triu_indices(count, 1)
    return [float(layer[rows, columns].mean()) if count > 1 else 1.0 for layer in cosines]


def token_of(tokenizer: Tokenizer, word: str) -> int:
    """The token that a word is: with the space before it, or without."""
    for text in (word, f" {word.strip()}", word.strip()):
        if len(ids := tokenizer.encode(text)) == 1:
            return ids[0]
    pieces = ", ".join(repr(spelled(tokenizer.tokens[id])) for id in tokenizer.encode(word))
    raise UsageError(
        f"--neighbours {word}: no token of this model, but {pieces or 'nothing'}; try one of these"
        if pieces
        else "--neighbours: give a word"
    )


def neighbours(model: Model, id: int, count: int = 10) -> list[tuple[int, float]]:
    """The tokens whose embeddings point most nearly the same way: (id, cosine), nearest first."""
    table = model.token_embedding.weight.detach().float()
    directions = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    cosines = directions @ directions[id]
    cosines[id] = -torch.inf
    best = cosines.topk(min(count, len(cosines) - 1))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def positions(model: Model, most: int = 512) -> tuple[str, Floats]:
    """Of which kind positions are, and the vector of each: (positions, dim)."""
    if not isinstance(model, GPT):
        raise UsageError("--positions: a recurrent model knows where it is by what it has read")
    config = model.config
    length = min(most, config.context)
    if config.positions == "learned":
        table: Tensor = model.position_embedding.weight.detach()[:length]
        return "learned", table.float().cpu().numpy()
    if config.positions == "sinusoidal":
        return "sine and cosine", sinusoidal_table(length, config.dim).numpy()
    if config.positions == "rope":
        cosines, sines = rotation_table(length, config)
        half = config.head_dim // 2
        return "rotary: cosines, then sines", torch.cat(
            [cosines[:, :half], sines[:, :half]], 1
        ).numpy()
    raise UsageError("--positions: this model has no vectors for them")
