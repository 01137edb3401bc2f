"""Predicts the loss that a model will reach on a text, before training.

    >>> Law(2.34, size=1_000_000).bits_per_byte(parameters=800_000, learned=8e6, steps=1500)
    2.05

An n-gram model quickly measures how hard a text is. A Transformer improves on it by a power law in
its parameters and in the amount of text seen; repeated text helps less each time. The law was
fitted to 60 runs on six texts. During training, `Forecast.correct` improves the prediction by what
was measured so far. How accurate both are: docs/experiments.md.
"""

import math
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from nanolm.text.tokenizer import Ids, Tokenizer
from nanolm.text.tokens import Store
from nanolm.text.vocabulary import counted_bits
from nanolm.training.schedule import DECAY

COUNTED_BYTES = 1_000_000  # of training text, to count n-grams in
CHUNK_TOKENS = 4_096  # contiguous tokens per chunk; chunks come from all over the text
TESTED_TOKENS = 50_000  # of validation text
NGRAM_LENGTHS = 9  # contexts of up to eight tokens; the best one depends on the tokenizer
SHORT_CONTEXT = 6  # bytes; longer contexts help n-grams only in text made by rules,
LONG_CONTEXT_GAIN = 0.55  # which a Transformer learns better: it gains this much more, in logs

SIZE_FACTOR, SIZE_EXPONENT = 0.0504, 0.336  # in millions of parameters, without embedding and head
DATA_FACTOR, DATA_EXPONENT = 0.767, 0.0722  # in units of ten million bytes
REPEATED_PASSES = 2.4  # passes of new text that all repeated passes together are worth, at most
SMALL_TEXT_EXPONENT = 0.073  # a small text hurts n-grams more than a Transformer
FEW_STEPS = 2.0  # penalty for fewer, larger steps
VERY_FEW_STEPS = 50.0  # penalty below a few hundred steps, where no model has converged

# The loss during training, above its final value: relative to that value, or to CURVE_BITS if
# that is larger, because runs that end lower start just as high.
CURVE_FACTOR, CURVE_EXPONENT, CURVE_BITS = 0.106, 0.4, 1.5

# Corrections, fitted to the curves of 22 runs (docs/experiments.md). Until the learning rate
# decays, the trend of the loss goes on, but more slowly, even more so after many passes. The decay
# lowers the loss by a number of nats per token: less with an EMA of the weights, which has the
# same effect.
# Text made by rules gains most from the decay, which no trend shows, so until then a forecast in
# the range TOO_HIGH is ignored.
EARLY, LATER = 0.1, 0.38  # progress between which the trend says more and more; then all
FAR = 0.15  # in logs: if the trend is so far below the plan, the plan was wrong
TREND, TREND_PER_PASS = 0.61, 0.082  # the latter times log(1 + passes)
DECAY_GAIN, NOISE_GAIN = 0.076, 0.317  # in nats per token; the latter without an EMA
USUAL_TOKEN = 2.4  # bytes; shorter tokens, such as characters, gain less in proportion
FULLY_AVERAGED = 0.1  # an EMA over this share of the steps leaves no noise
MOST_GAIN = 0.7  # in logs, of a loss near zero
TOO_HIGH, LATE = (1.1, 3.0), 1 - 0.65 * DECAY  # times the plan; up to this progress


def ngram_bits_per_byte(train: Store, val: Store, tokenizer: Tokenizer) -> float:
    """Validation bits per byte of the best n-gram model of at most a megabyte of training text;
    less for text made by rules."""
    if not len(val):  # use the end of the training text instead
        cut = len(train) - min(TESTED_TOKENS, max(1, len(train) // 10))
        train, val = train[:cut], train[cut:]
    byte_lengths = tokenizer.byte_lengths()
    tested = sample(val, TESTED_TOKENS)
    size = max(1, int(byte_lengths[tested].sum()))
    text = sample(train, COUNTED_BYTES * len(tested) // size)
    counted = counted_bits(text, tested, tokenizer.vocab_size)
    bits = [each / size for each in islice(counted, NGRAM_LENGTHS)]
    longer = bits[min(math.ceil(SHORT_CONTEXT * len(tested) / size), len(bits) - 1) :]
    return float(min(bits) * (min(longer) / longer[0]) ** LONG_CONTEXT_GAIN)


def sample(ids: Store, tokens: int) -> Ids:
    """About `tokens` of `ids`, in chunks from all over it."""
    chunks = max(1, -(-len(ids) // CHUNK_TOKENS))
    places = np.linspace(0, chunks - 1, num=min(chunks, 1 + tokens // CHUNK_TOKENS), dtype=int)
    parts = [ids[place:][:CHUNK_TOKENS] for place in CHUNK_TOKENS * places]
    return np.concatenate(parts).astype(np.int64)


@dataclass(frozen=True)
class Forecast:
    bits_per_byte: float
    seconds: float | None  # of training; None if no step was timed
    passes: float  # over the text
    steps: int | None = None  # None in runs of 0.1.0
    corrected: float | None = None  # bits per byte, reported during training

    def expected(self, progress: float) -> float:
        """Bits per byte during training: falling fastest early, and as the learning rate decays."""
        above: float = CURVE_FACTOR * (1 - progress) / max(progress, 1e-3) ** CURVE_EXPONENT
        return self.bits_per_byte + max(self.bits_per_byte, CURVE_BITS) * above

    def correct(
        self, progress: float, measured: float, loss: float, slope: float, averaged: float = 0.0
    ) -> float:
        """The final bits per byte, from those `measured`, the `loss` in nats per token, and the
        `slope` of the curve so far: d log(bits per byte) / d log(steps). `averaged` is the share of
        all steps in the EMA of the weights."""
        planned = self.bits_per_byte
        if progress < EARLY:
            return planned
        flatter = max(0.0, TREND - TREND_PER_PASS * math.log1p(self.passes))
        trend = flatter * min(0.0, slope) * math.log(1 / progress)
        noise = max(0.0, 1 - averaged / FULLY_AVERAGED)
        token = loss / max(measured * math.log(2), 1e-9)  # bytes
        gain = (DECAY_GAIN + NOISE_GAIN * noise) * min(1.0, token / USUAL_TOKEN)
        gain = min(MOST_GAIN, gain / max(loss, 1e-9))
        left = min(1.0, (1 - progress) / DECAY)
        bits = measured * math.exp(left * (trend - gain))
        too_high = TOO_HIGH[0] < bits / planned < (TOO_HIGH[1] if progress > LATER else math.inf)
        if too_high and progress < LATE:
            return planned
        apart = math.log(max(bits, 1e-9) / planned)
        trust = max((progress - EARLY) / (LATER - EARLY), -apart / FAR)
        return planned * math.exp(min(1.0, trust) * apart)

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
        """Validation bits per byte after `learned` bytes; `parameters` without embeddings."""
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
