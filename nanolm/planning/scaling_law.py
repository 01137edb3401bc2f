"""What a model will come to on a text, told before it is trained.

    >>> how_hard(prepared.train, prepared.val, prepared.tokenizer)  # bits per byte, by counting
    2.34
    >>> Law(2.34, size=1_000_000).bits_per_byte(parameters=800_000, learned=8e6, steps=1500)
    2.05

How hard a text is, a model that counts what follows a few tokens tells in a moment. A Transformer
does better by a share that grows with its size and with how much text it has learned from: a power
of each. Text that is seen again teaches less each time, and after some passes nothing. The numbers
were fitted to 60 runs on six texts, which they tell to 6 % (docs/experiments.md). Text that was
made by rules is easier to learn than counting lets it seem.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from nanolm.text.tokenizer import Tokenizer
from nanolm.text.tokens import Store
from nanolm.text.vocabulary import counted_bits

COUNTED = 1_000_000  # bytes that are counted
CHUNK = 4_096  # tokens in a row
TESTED = 50_000  # tokens of held-out text
CONTEXTS = (1, 2, 3, 4)  # tokens to count what follows; which is best depends on the tokenizer

SIZE, BY_SIZE = 0.0504, 0.336  # of a million parameters, without the first and last layer
TEXT, BY_TEXT = 0.767, 0.0722  # of ten million bytes
WORTH = 2.4  # passes that all further ones together are worth
SMALL = 0.073  # counting suffers more from a small text than a Transformer does
FEW_STEPS = 2.0  # the same text in fewer, larger steps;
VERY_FEW = 50.0  # in fewer than some hundreds, a model has not converged at all


AHEAD, BEND = 0.106, 0.4  # how far a run is above where it ends, on its way,
EASY = 1.5  # times its bits per byte, or these: what ends lower begins as high


def how_hard(train: Store, val: Store, tokenizer: Tokenizer) -> float:
    """Bits per byte of held-out text when it is foretold by counts of at most a megabyte."""
    if not len(val):  # the end of the training text is not seen by the counts
        cut = len(train) - min(TESTED, max(1, len(train) // 10))
        train, val = train[:cut], train[cut:]
    sizes, val = tokenizer.byte_lengths(), val[:TESTED]
    size = max(1, int(sizes[val].sum()))
    chunks = max(1, len(train) // CHUNK)
    wanted = min(chunks, 1 + COUNTED * len(val) // (size * CHUNK))
    places = np.linspace(0, chunks - 1, num=wanted, dtype=int)  # from all over the text
    text = np.concatenate([train[CHUNK * place :][:CHUNK] for place in places]).astype(np.int64)
    most = int(62 / math.log2(tokenizer.vocab_size)) - 1  # contexts are numbers of 62 bits
    held_out = val.astype(np.int64)
    bits = [
        counted_bits(text, held_out, tokenizer.vocab_size, length)
        for length in CONTEXTS
        if length <= max(1, most)
    ]
    return min(float(found) for found in bits) / size


@dataclass(frozen=True)
class Forecast:
    """What a run should come to."""

    bits_per_byte: float
    seconds: float | None  # of steps; None where nobody measured
    passes: float  # over the text
    steps: int | None = None  # None in runs of 0.1.0

    def expected(self, progress: float) -> float:
        """Bits per byte on the way: they fall fastest at the beginning, and when the rate does."""
        above: float = AHEAD * (1 - progress) / max(progress, 1e-3) ** BEND
        return self.bits_per_byte + max(self.bits_per_byte, EASY) * above

    def at(self, steps: float, parameters: int, size: int) -> "Forecast":
        """The same for another number of steps, of a model with so many parameters on a text of
        `size` bytes."""
        if not self.steps:
            return self
        law, passes = Law(1.0, size), self.passes * steps / self.steps
        then = law.bits_per_byte(parameters, self.passes * size, self.steps)
        now = law.bits_per_byte(parameters, passes * size, steps)
        bits = self.bits_per_byte * now / then
        return replace(self, bits_per_byte=bits, passes=passes, steps=round(steps))


@dataclass(frozen=True)
class Law:
    """For one text."""

    hard: float  # bits per byte by counting
    size: int  # bytes of training text

    def bits_per_byte(self, parameters: float, learned: float, steps: float) -> float:
        """Of held-out text, for a model without its first and last layer, after `learned` bytes."""
        share = (
            SIZE * (parameters / 1e6) ** -BY_SIZE + TEXT * (self.worth(learned) / 1e7) ** -BY_TEXT
        )
        small = (min(self.size, COUNTED) / COUNTED) ** SMALL
        few = FEW_STEPS / max(1.0, steps) + (VERY_FEW / max(1.0, steps)) ** 2
        return float(self.hard * share * small * (1 + few))

    def worth(self, learned: float) -> float:
        """How much new text would teach the same."""
        again = max(0.0, learned / self.size - 1)
        return min(learned, self.size) + self.size * WORTH * (1 - math.exp(-again / WORTH))
