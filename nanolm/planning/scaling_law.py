"""Predicts the loss that a model will reach on a text, before training.

    >>> Law(2.34, size=1_000_000).bits_per_byte(parameters=800_000, learned=8e6, steps=1500)
    2.05

An n-gram model quickly measures how hard a text is. A Transformer improves on it by a power law in
its parameters and in the amount of text seen; repeated text helps less each time. The law, fitted
to 60 runs on six texts, predicts them within 6 % (docs/experiments.md), but too high for text made
by rules.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from nanolm.text.tokenizer import Tokenizer
from nanolm.text.tokens import Store
from nanolm.text.vocabulary import counted_bits

COUNTED_BYTES = 1_000_000  # of training text, to count n-grams in
CHUNK_TOKENS = 4_096  # contiguous tokens per chunk; chunks come from all over the text
TESTED_TOKENS = 50_000  # of validation text
NGRAM_CONTEXTS = (1, 2, 3, 4)  # tokens; the best one depends on the tokenizer

SIZE_FACTOR, SIZE_EXPONENT = 0.0504, 0.336  # in millions of parameters, without embedding and head
DATA_FACTOR, DATA_EXPONENT = 0.767, 0.0722  # in units of ten million bytes
REPEATED_PASSES = 2.4  # passes of new text that all repeated passes together are worth, at most
SMALL_TEXT_EXPONENT = 0.073  # a small text hurts n-grams more than a Transformer
FEW_STEPS = 2.0  # penalty for fewer, larger steps
VERY_FEW_STEPS = 50.0  # penalty below a few hundred steps, where no model has converged

# The loss during training, above its final value: relative to that value, or to CURVE_BITS if
# that is larger, because runs that end lower start just as high.
CURVE_FACTOR, CURVE_EXPONENT, CURVE_BITS = 0.106, 0.4, 1.5


def ngram_bits_per_byte(train: Store, val: Store, tokenizer: Tokenizer) -> float:
    """Validation bits per byte of the best n-gram model of at most a megabyte of training text."""
    if not len(val):  # use the end of the training text instead
        cut = len(train) - min(TESTED_TOKENS, max(1, len(train) // 10))
        train, val = train[:cut], train[cut:]
    byte_lengths, val = tokenizer.byte_lengths(), val[:TESTED_TOKENS]
    size = max(1, int(byte_lengths[val].sum()))
    chunks = max(1, len(train) // CHUNK_TOKENS)
    wanted = min(chunks, 1 + COUNTED_BYTES * len(val) // (size * CHUNK_TOKENS))
    places = CHUNK_TOKENS * np.linspace(0, chunks - 1, num=wanted, dtype=int)
    text = np.concatenate([train[place:][:CHUNK_TOKENS] for place in places]).astype(np.int64)
    longest = int(62 / math.log2(tokenizer.vocab_size)) - 1  # contexts are 62-bit integers
    lengths = [length for length in NGRAM_CONTEXTS if length <= max(1, longest)]
    what = (text, val.astype(np.int64), tokenizer.vocab_size)
    return float(min(counted_bits(*what, length) for length in lengths)) / size


@dataclass(frozen=True)
class Forecast:
    bits_per_byte: float
    seconds: float | None  # of training; None if no step was timed
    passes: float  # over the text
    steps: int | None = None  # None in runs of 0.1.0

    def expected(self, progress: float) -> float:
        """Bits per byte during training: falling fastest early, and as the learning rate decays."""
        above: float = CURVE_FACTOR * (1 - progress) / max(progress, 1e-3) ** CURVE_EXPONENT
        return self.bits_per_byte + max(self.bits_per_byte, CURVE_BITS) * above

    def at(self, steps: float, parameters: int, size: int) -> "Forecast":
        """The forecast for another number of steps, on a text of `size` bytes."""
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
        """Validation bits per byte after `learned` bytes; no embedding or head in `parameters`."""
        by_size = SIZE_FACTOR * (parameters / 1e6) ** -SIZE_EXPONENT
        by_data = DATA_FACTOR * (self.effective_bytes(learned) / 1e7) ** -DATA_EXPONENT
        small = (min(self.size, COUNTED_BYTES) / COUNTED_BYTES) ** SMALL_TEXT_EXPONENT
        few = FEW_STEPS / max(1.0, steps) + (VERY_FEW_STEPS / max(1.0, steps)) ** 2
        return float(self.ngram_bits * (by_size + by_data) * small * (1 + few))

    def effective_bytes(self, learned: float) -> float:
        """The amount of new text that would help as much."""
        again = max(0.0, learned / self.size - 1)
        saturation = 1 - math.exp(-again / REPEATED_PASSES)
        return min(learned, self.size) + self.size * REPEATED_PASSES * saturation
