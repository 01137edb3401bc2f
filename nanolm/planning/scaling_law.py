"""The loss that a model will reach on a text, predicted before it is trained.

    >>> Law(2.34, size=1_000_000).bits_per_byte(parameters=800_000, learned=8e6, steps=1500)
    2.05

How hard a text is, an n-gram model shows in a moment. A Transformer does better by a power law in
its size and in how much text it has learned from; text seen again teaches less each time. Fitted to
60 runs on six texts, it predicts them to 6 % (docs/experiments.md). Text made by rules is easier.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from nanolm.text.tokenizer import Tokenizer
from nanolm.text.tokens import Store
from nanolm.text.vocabulary import counted_bits

COUNTED_BYTES = 1_000_000  # of training text, from which n-grams are counted
CHUNK_TOKENS = 4_096  # in a row, from all over the text
TESTED_TOKENS = 50_000  # of held-out text
NGRAM_CONTEXTS = (1, 2, 3, 4)  # tokens; which is best depends on the tokenizer

SIZE_FACTOR, SIZE_EXPONENT = 0.0504, 0.336  # of a million parameters, without embedding and head
DATA_FACTOR, DATA_EXPONENT = 0.767, 0.0722  # of ten million bytes
REPEATED_PASSES = 2.4  # what all passes after the first together are worth, in new text
SMALL_TEXT_EXPONENT = 0.073  # n-grams suffer more from a small text than a Transformer does
FEW_STEPS = 2.0  # the same text in fewer, larger steps;
VERY_FEW_STEPS = 50.0  # in fewer than some hundreds, a model has not converged at all

# How far the loss is above its end on the way there, relative to that end or to these bits per
# byte: a run that ends lower begins as high.
CURVE_FACTOR, CURVE_EXPONENT, CURVE_BITS = 0.106, 0.4, 1.5


def ngram_bits_per_byte(train: Store, val: Store, tokenizer: Tokenizer) -> float:
    """Of held-out text, by the best n-gram model of at most a megabyte of training text."""
    if not len(val):  # the end of the training text is not counted
        cut = len(train) - min(TESTED_TOKENS, max(1, len(train) // 10))
        train, val = train[:cut], train[cut:]
    byte_lengths, val = tokenizer.byte_lengths(), val[:TESTED_TOKENS]
    size = max(1, int(byte_lengths[val].sum()))
    chunks = max(1, len(train) // CHUNK_TOKENS)
    wanted = min(chunks, 1 + COUNTED_BYTES * len(val) // (size * CHUNK_TOKENS))
    places = CHUNK_TOKENS * np.linspace(0, chunks - 1, num=wanted, dtype=int)
    text = np.concatenate([train[place:][:CHUNK_TOKENS] for place in places]).astype(np.int64)
    longest = int(62 / math.log2(tokenizer.vocab_size)) - 1  # contexts are numbers of 62 bits
    lengths = [length for length in NGRAM_CONTEXTS if length <= max(1, longest)]
    what = (text, val.astype(np.int64), tokenizer.vocab_size)
    return float(min(counted_bits(*what, length) for length in lengths)) / size


@dataclass(frozen=True)
class Forecast:
    bits_per_byte: float
    seconds: float | None  # of steps; None where nobody measured
    passes: float  # over the text
    steps: int | None = None  # None in runs of 0.1.0

    def expected(self, progress: float) -> float:
        """Bits per byte on the way: they fall fastest at the beginning, and when the rate does."""
        above: float = CURVE_FACTOR * (1 - progress) / max(progress, 1e-3) ** CURVE_EXPONENT
        return self.bits_per_byte + max(self.bits_per_byte, CURVE_BITS) * above

    def at(self, steps: float, parameters: int, size: int) -> "Forecast":
        """The same for another number of steps, on a text of `size` bytes."""
        if not self.steps:
            return self
        law, passes = Law(1.0, size), self.passes * steps / self.steps
        then = law.bits_per_byte(parameters, self.passes * size, self.steps)
        now = law.bits_per_byte(parameters, passes * size, steps)
        bits = self.bits_per_byte * now / then
        return replace(self, bits_per_byte=bits, passes=passes, steps=round(steps))


@dataclass(frozen=True)
class Law:
    ngram_bits: float  # per byte
    size: int  # bytes of training text

    def bits_per_byte(self, parameters: float, learned: float, steps: float) -> float:
        """Of held-out text, after `learned` bytes; parameters without embedding and head."""
        by_size = SIZE_FACTOR * (parameters / 1e6) ** -SIZE_EXPONENT
        by_data = DATA_FACTOR * (self.effective_bytes(learned) / 1e7) ** -DATA_EXPONENT
        small = (min(self.size, COUNTED_BYTES) / COUNTED_BYTES) ** SMALL_TEXT_EXPONENT
        few = FEW_STEPS / max(1.0, steps) + (VERY_FEW_STEPS / max(1.0, steps)) ** 2
        return float(self.ngram_bits * (by_size + by_data) * small * (1 + few))

    def effective_bytes(self, learned: float) -> float:
        """How much new text would teach the same."""
        again = max(0.0, learned / self.size - 1)
        saturation = 1 - math.exp(-again / REPEATED_PASSES)
        return min(learned, self.size) + self.size * REPEATED_PASSES * saturation
