"""Vectors to compare: occurrences of a word, token embeddings, positions.

>>> word = occurrences(model, tokenizer, "bank", ["The bank lent money.", "We sat on the bank."])
>>> similarities(word.vectors).shape  # (layers + 1, occurrences, occurrences)
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from nanolm.errors import UsageError
from nanolm.inspect.inspection import Floats, residual_stream
from nanolm.model.base import Model
from nanolm.model.gpt import GPT
from nanolm.model.positions import rotation_table, sinusoidal_table
from nanolm.text import spelled
from nanolm.text.tokenizer import Tokenizer

CONTEXT_LETTERS = 24  # characters shown before and after a word
MAX_POSITIONS = 512


@dataclass(frozen=True)
class Occurrences:
    word: str
    contexts: list[str]  # the text around each occurrence, with the word in []
    vectors: Floats  # (layers + 1, occurrences, dim): after the embedding and after each layer


def occurrences(model: Model, tokenizer: Tokenizer, word: str, texts: list[str]) -> Occurrences:
    """The vector of the word's last token, which has attended to the whole word."""
    if not isinstance(model, GPT):
        raise UsageError("--word: recurrent models have no per-layer token vectors to compare")
    pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
    contexts, vectors = [], []
    for text in filter(pattern.search, texts):
        ids = tokenizer.encode_prompt(text)
        if len(ids) > model.config.context:
            limit = f"the model's context length is {model.config.context:,}; use a shorter text"
            raise UsageError(f"--word: a text has {len(ids):,} tokens, but {limit}")
        ends = np.cumsum([len(tokenizer.tokens[id]) for id in ids])
        layers = torch.stack(residual_stream(model, ids))  # (layers + 1, time, dim)
        for match in pattern.finditer(text):
            last = int(np.searchsorted(ends, len(text[: match.end()].encode())))
            vectors.append(layers[:, last].float().cpu().numpy())
            contexts.append(context(match))
    if not vectors:
        raise UsageError(f"--word {word}: none of the texts contains it; give texts that do")
    return Occurrences(word, contexts, np.stack(vectors, axis=1))


def context(match: re.Match[str]) -> str:
    before, after = match.string[: match.start()], match.string[match.end() :]
    left, right = ("…" * (len(part) > CONTEXT_LETTERS) for part in (before, after))
    before, after = before[-CONTEXT_LETTERS:], after[:CONTEXT_LETTERS]
    return " ".join(f"{left}{before}[{match[0]}]{after}{right}".split())


def similarities(vectors: Floats) -> Floats:
    """The cosine similarity of every pair: (..., count, dim) to (..., count, count)."""
    unit = directions(vectors)
    return unit @ unit.swapaxes(-1, -2)


def directions(vectors: Floats) -> Floats:
    unit: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return unit


def pca(vectors: Floats) -> tuple[Floats, Floats]:
    """The directions of each layer's vectors in two dimensions: (layers, count, dim) to (layers,
    count, 2), and the share of the variance along each principal component: (layers, 2)."""
    unit = np.nan_to_num(directions(vectors))  # NaN if the model diverged
    left, sizes, _ = np.linalg.svd(unit - unit.mean(axis=1, keepdims=True), full_matrices=False)
    points = left[..., :2] * sizes[:, None, :2]
    for before, after in pairwise(points):  # signs are arbitrary: do not mirror the next layer
        after *= np.where((before * after).sum(axis=0) < 0, -1, 1)
    variance = sizes**2
    total = np.maximum(variance.sum(axis=1, keepdims=True), 1e-9)  # 0 if all are equal
    return points, variance[:, :2] / total


def mean_similarities(cosines: Floats) -> list[float]:
    """The mean over all pairs of different occurrences, for each layer."""
    pairs = np.triu_indices(cosines.shape[-1], 1)
    return [float(layer[pairs].mean()) if len(pairs[0]) else 1.0 for layer in cosines]


def token_of(tokenizer: Tokenizer, word: str) -> int:
    """The token for a word, with or without a space before it."""
    for text in (word, f" {word.strip()}", word.strip()):
        if len(ids := tokenizer.encode(text)) == 1:
            return ids[0]
    pieces = ", ".join(repr(spelled(tokenizer.tokens[id])) for id in tokenizer.encode(word))
    if not pieces:
        raise UsageError("--neighbours: give a word")
    raise UsageError(f"--neighbours {word}: not a single token, but {pieces}; try one of these")


def neighbours(model: Model, id: int, count: int = 10) -> list[tuple[int, float]]:
    """The tokens with the most similar embeddings: (id, cosine), nearest first."""
    directions = torch.nn.functional.normalize(model.token_embedding.weight.detach().float())
    cosines = directions @ directions[id]
    cosines[id] = -torch.inf
    best = cosines.topk(min(count, len(cosines) - 1))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def position_vectors(model: Model) -> tuple[str, Floats]:
    """The kind of positional encoding, and the vector of each position: (positions, dim)."""
    if not isinstance(model, GPT):
        raise UsageError("--positions: a recurrent model has no positional encoding")
    config = model.config
    length = min(MAX_POSITIONS, config.context)
    match config.positions:
        case "learned":
            table = model.position_embedding.weight.detach()[:length]
            return "learned", table.float().cpu().numpy()
        case "sinusoidal":
            return "sinusoidal", sinusoidal_table(length, config.dim).numpy()
        case "rope":
            tables = [table[:, : config.head_dim // 2] for table in rotation_table(length, config)]
            return "rotary (cosines, then sines)", torch.cat(tables, 1).numpy()
    raise UsageError("--positions: this model has no positional encoding")
