"""A mix: sources with weights, such as `news.txt:0.7 poems.txt:0.3`.

    >>> parse("news.txt:0.7")
    ('news.txt', 0.7)

The weights say which share of the training windows comes from each part, whatever its size. So a
small part with a large weight is repeated more often than the others.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanolm.text import STDIN

WEIGHTED = re.compile(r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
BITS_OF_PART = "val_bits_per_byte/"  # and the name of a part: a key in metrics
HOST = re.compile(r"https?://[^/]*")  # may end with a port


@dataclass(frozen=True)
class Part:
    name: str
    weight: float  # the weights of all parts sum to 1
    size: int  # bytes of training text
    train: slice  # of all training tokens
    val: slice  # of all validation tokens

    @property
    def tokens(self) -> int:
        return int(self.train.stop - self.train.start)

    def epochs(self, tokens: float) -> float:
        """Passes over this part in training on `tokens` tokens of the mix."""
        return tokens * self.weight / self.tokens


def parse(name: str) -> tuple[str, float | None]:
    """A source and its weight, or None. A path that exists as it is has no weight."""
    found = WEIGHTED.fullmatch(name)
    if not found or HOST.fullmatch(name) or os.path.lexists(name):
        return name, None
    return found[1], float(found[2])


def sources(corpus: Sequence[str]) -> list[str]:
    return [parse(name)[0] for name in corpus]


def weights(corpus: Sequence[str]) -> tuple[float, ...]:
    """The normalized weights; none if the corpus is no mix."""
    given = [weight for _, weight in map(parse, corpus) if weight is not None]
    return tuple(weight / sum(given) for weight in given) if len(given) > 1 else ()


def problems(corpus: Sequence[str]) -> list[str]:
    found = [
        f"{name} is listed twice in the corpus; list it once"
        for name, count in Counter(sources(corpus)).items()
        if count > 1
    ]
    given = {name: parse(name)[1] for name in corpus}
    for name, weight in given.items():
        if weight is not None and not 0 < weight < math.inf:
            found.append(f"{name}: a weight must be a positive number; try {parse(name)[0]}:1")
    without = [name for name, weight in given.items() if weight is None]
    if 0 < len(without) < len(given):
        cure = f"try {without[0]}:1, or omit the weights of the others"
        found.append(f"{without[0]} has no weight, but other sources have one; {cure}")
    return found


def part_names(corpus: Sequence[str]) -> list[str]:
    """The last component of each path, or as many as it takes to tell them apart."""
    paths = [Path("stdin" if name == STDIN else name).parts for name in sources(corpus)]
    names: list[str] = []
    for count in range(1, 1 + max(map(len, paths))):
        names = ["/".join(path[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def make_parts(corpus: Sequence[str], facts: list[dict[str, Any]]) -> tuple[Part, ...]:
    """The parts of a corpus, from the `size` in bytes and the `train` and `val` tokens of each."""
    parts: list[Part] = []
    train = val = 0
    for name, weight, each in zip(part_names(corpus), weights(corpus), facts, strict=True):
        ends = train + each["train"], val + each["val"]
        parts.append(Part(name, weight, each["size"], slice(train, ends[0]), slice(val, ends[1])))
        train, val = ends
    return tuple(parts)


def bits_by_part(metrics: Mapping[str, float]) -> dict[str, float]:
    """The validation bits per byte of each part, by name."""
    own = {key: value for key, value in metrics.items() if key.startswith(BITS_OF_PART)}
    return {key.removeprefix(BITS_OF_PART): value for key, value in own.items()}


def mean(parts: Sequence[Part], values: Sequence[float]) -> float:
    """The mean of the values of the parts, weighted by the weights."""
    total = sum(part.weight for part in parts)
    return sum(part.weight / total * value for part, value in zip(parts, values, strict=True))


def epoch_tokens(parts: Sequence[Part]) -> float:
    """Tokens after which the parts have been passed over once, as the mean by weight. If weights
    are proportional to sizes, these are all tokens, else fewer."""
    return 1 / sum(part.weight * part.epochs(1) for part in parts)


def share_out(total: int, most: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Divide `total` by weight. What exceeds the `most` of a part goes to the others."""
    shares, left = [0] * len(most), sum(weights)
    for part in sorted(range(len(most)), key=lambda part: most[part] / weights[part]):
        shares[part] = min(most[part], round(total * weights[part] / left))
        total, left = total - shares[part], left - weights[part]
    return shares
