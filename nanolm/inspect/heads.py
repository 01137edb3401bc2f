"""Describes what each attention head does.

    >>> describe_heads(inspection.attention, inspection.ids)[1][2].words
    "attends to the previous token (83%)"

A head is named after the pattern that gets most of its attention, or far more than by chance.
Only positions that have a choice count. Attention to the first token is usually a no-op.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanolm.inspect.inspection import Floats

Mask = npt.NDArray[np.bool_]
CLEAR = 0.4, 2.0  # share of attention, and ratio to chance, that make a pattern clear
LEANING = 0.15, 3.0  # a smaller share, but far above chance
EVEN_ENTROPY = 0.9  # of the maximum
MIXED, SPREAD = "mixed", "spread"
PATTERNS = {
    "previous": "the previous token",
    "itself": "the current token",
    "first": "the first token",
    "same": "earlier occurrences of the current token",
    "induction": "the token after an earlier occurrence of the current one, like an induction head",
}
NO_PATTERN = {SPREAD: "attends to all tokens almost equally", MIXED: "has no clear pattern"}


@dataclass(frozen=True)
class HeadPattern:
    kind: str
    shares: dict[str, float]  # of its attention, by pattern
    chance: dict[str, float]  # the same, if attention did not depend on the query
    spread: float  # 0: all attention to one position; 1: uniform

    @property
    def words(self) -> str:
        if self.kind in NO_PATTERN:
            return NO_PATTERN[self.kind]
        share, target = self.shares[self.kind], PATTERNS[self.kind]
        if share >= CLEAR[0]:
            return f"attends to {target} ({share:.0%})"
        return f"favors {target} ({share:.0%}, {self.chance[self.kind]:.0%} by chance)"


def describe_heads(attention: Floats, ids: list[int]) -> list[list[HeadPattern]]:
    masks = pattern_masks(ids)
    return [[describe_head(head, masks) for head in layer] for layer in attention]


def pattern_masks(ids: list[int]) -> dict[str, Mask]:
    """For each pattern, which keys belong to it for each query: (time, time)."""
    tokens, positions = np.array(ids), np.arange(len(ids))
    query, key = positions[:, None], positions[None]
    previous = np.roll(tokens, 1)  # the token before each position
    return {
        "previous": key == query - 1,
        "itself": key == query,
        "first": (key == 0) & (query > 1),
        "same": (tokens[None] == tokens[:, None]) & (key < query),
        "induction": (previous[None] == tokens[:, None]) & (key <= query) & (key > 0),
    }


def describe_head(weights: Floats, masks: dict[str, Mask]) -> HeadPattern:
    time = len(weights)
    rows = np.arange(time) >= 2  # with fewer keys, there is hardly a choice
    causal = np.tril(np.ones_like(weights))
    even = causal / causal.sum(axis=1, keepdims=True)
    by_token = causal * (weights.sum(axis=0) / np.arange(time, 0, -1))  # for any query
    by_token /= np.maximum(by_token.sum(axis=1, keepdims=True), 1e-12)
    shares, chance = {}, {}
    for kind, mask in masks.items():
        some = rows & mask.any(axis=1)
        if some.any():
            # The first token is a single token, so its share is compared with uniform attention.
            expected = even if kind == "first" else by_token
            shares[kind] = float((weights * mask)[some].sum(axis=1).mean())
            chance[kind] = float((expected * mask)[some].sum(axis=1).mean())
    entropy = -(weights * np.log(np.maximum(weights, 1e-12))).sum(axis=1)[rows]
    spread = float((entropy / np.log(np.flatnonzero(rows) + 1)).mean()) if rows.any() else 1.0
    main = SPREAD if spread >= EVEN_ENTROPY else MIXED
    ratios = {kind: share / max(chance[kind], 1e-12) for kind, share in shares.items()}
    for (share, ratio), by in ((LEANING, ratios), (CLEAR, shares)):  # clear patterns win
        kinds = [kind for kind in shares if shares[kind] >= share and ratios[kind] >= ratio]
        main = max(kinds, key=by.__getitem__, default=main)
    return HeadPattern(main, shares, chance, spread)
