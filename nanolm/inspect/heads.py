"""What each attention head does, in words.

    >>> describe(seen.attention, seen.ids)[1][2].words
    "looks at the token before (83%)"

A head is named after where most of its attention goes, in the mean over all places that have a
choice, or after where more goes than to any other kind of place by chance. Looking at the first
token is mostly a way to look at nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
CLEAR, TIMES = 0.4, 2.0  # a share, and how many times what would be chance, to be named after it
SOME, MANY = 0.15, 3.0  # less of it, but far from chance: a leaning
EVEN = 0.9  # of the most that attention can be spread
MIXED, SPREAD = "mixed", "spread"
KINDS = {
    "previous": "the token before",
    "itself": "the token itself",
    "first": "the first token",
    "same": "the same token, earlier",
    "induction": "what followed the same token, earlier",
}
OTHERS = {SPREAD: "looks at everything about alike", MIXED: "looks here and there"}


@dataclass(frozen=True)
class Head:
    """What a head does with a text: the share of its attention that goes to each kind of place."""

    kind: str
    shares: dict[str, float]
    chance: dict[str, float]  # the same, if it always looked at the same tokens, from everywhere
    spread: float  # 0: to one place; 1: to all alike

    @property
    def words(self) -> str:
        if self.kind in OTHERS:
            return OTHERS[self.kind]
        share, place = self.shares[self.kind], KINDS[self.kind]
        if share >= CLEAR:
            return f"looks at {place} ({share:.0%})"
        return f"leans to {place} ({share:.0%}, by chance {self.chance[self.kind]:.0%})"


def places(ids: list[int]) -> dict[str, Mask]:
    """Which places (time, time) are of a kind for each that looks."""
    tokens = np.array(ids)
    time = len(ids)
    here, there = np.arange(time)[:, None], np.arange(time)[None]
    before = np.roll(tokens, 1)  # what stands before each place
    return {
        "previous": there == here - 1,
        "itself": there == here,
        "first": (there == 0) & (here > 1),
        "same": (tokens[None] == tokens[:, None]) & (there < here),
        "induction": (before[None] == tokens[:, None]) & (there <= here) & (there > 0),
    }


def describe(attention: Floats, ids: list[int]) -> list[list[Head]]:
    """Of every layer, every head."""
    kinds = places(ids)
    return [[name(head, kinds) for head in layer] for layer in attention]


def name(weights: Floats, kinds: dict[str, Mask]) -> Head:
    time = len(weights)
    rows = np.arange(time) >= 2  # with fewer places there is hardly a choice
    behind = np.tril(np.ones_like(weights))
    even = behind / behind.sum(axis=1, keepdims=True)
    liked = behind * (weights.sum(axis=0) / np.arange(time, 0, -1))  # a token, wherever from
    liked /= np.maximum(liked.sum(axis=1, keepdims=True), 1e-12)
    shares, chance = {}, {}
    for kind, mask in kinds.items():
        some = rows & mask.any(axis=1)
        if some.any():
            # The first token is one that can be liked: nothing else would make it a habit.
            guess = even if kind == "first" else liked
            shares[kind] = float((weights * mask)[some].sum(axis=1).mean())
            chance[kind] = float((guess * mask)[some].sum(axis=1).mean())
    entropy = -(weights * np.log(np.maximum(weights, 1e-12))).sum(axis=1)[rows]
    spread = float((entropy / np.log(np.flatnonzero(rows) + 1)).mean()) if rows.any() else 1.0
    return Head(named(shares, chance, spread), shares, chance, spread)


def named(shares: dict[str, float], chance: dict[str, float], spread: float) -> str:
    times = {kind: share / max(chance[kind], 1e-12) for kind, share in shares.items()}
    clear = [kind for kind in shares if shares[kind] >= CLEAR and times[kind] >= TIMES]
    if clear:
        return max(clear, key=lambda kind: shares[kind])
    leaning = [kind for kind in shares if shares[kind] >= SOME and times[kind] >= MANY]
    if leaning:
        return max(leaning, key=lambda kind: times[kind])
    return SPREAD if spread >= EVEN else MIXED
