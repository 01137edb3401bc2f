"""Choose the tokenizer for a text and its vocabulary size.

A small vocabulary needs many tokens for a word; in a large one, most tokens are rarely seen. So the
size is measured: a sample is encoded with several sizes, and a trigram model of nine tenths of it
is evaluated on the rest. The smallest size within one percent of the best wins, since small
vocabularies also train faster. On a CPU, the last layer takes a large part of a step, so the size
decides how many epochs fit into the time. In many epochs over a small text, a model overfits less
with a smaller vocabulary.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from nanolm.choice import Choice, Report
from nanolm.formats import counted
from nanolm.machine import available_threads
from nanolm.text.bpe import Pair, learn, merges_in_order
from nanolm.text.corpus import Corpus
from nanolm.text.tokenizer import SPECIAL, ByteLevel, Characters, Ids, Tokenizer
from nanolm.text.words import MARK, WordCounter, count_words
from nanolm.text.workers import HAS_PREAD, WorkerPool

TINY_CORPUS = 50_000  # bytes: below this a corpus is a teaching example, not a language
MEASURED_BYTES = 4_000_000  # of text, to measure vocabulary sizes on
VOCAB_SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
USUAL_VOCAB, LARGEST_VOCAB = 1024, 32_768
TOLERANCE = 1.01
MANY_EPOCHS = 20  # more hardly help
CPU_SPEED = 2e8  # tokens per second x (COSTLY_VOCAB + vocabulary), for a 4 x 128 model
COSTLY_VOCAB = 8_192  # the vocabulary whose head takes as long as all other layers of that model
TIME_EXPONENT = 0.072  # loss ~ epochs ** -0.072
# After MANY_EPOCHS over a megabyte, loss ~ vocabulary ** 0.0165, apart from the trigram model's.
# For a smaller text, the exponent is larger (docs/experiments.md).
OVERFITTING, OVERFITTING_BYTES, SMALL_TEXT_EXPONENT = 0.0165, 1_000_000, 0.5
COUNTED_ALONE = 8_000_000  # bytes; fewer are counted before other processes would have started
COUNTED_BYTES = 1 << 19  # per request to a process
SHIFT_TOKENS = 20_000  # from each side, to compare validation with training text
SHIFT_PLACES = 16  # sampled in each
LEAST_SHIFT_TOKENS = 64  # fewer say nothing about how similar they are
DISCOUNT = 0.75  # absolute discounting, for unseen tokens; the usual value


def make_tokenizer(
    corpus: Corpus,
    kind: str | None,
    vocab_size: int | None,
    report: Report,
    most_doublings: int | None = None,
    measured: int = MEASURED_BYTES,
    seconds: float | None = None,
    mix: Sequence[tuple[Corpus, float]] = (),
    lowercase: bool = False,
) -> tuple[Tokenizer, list[Choice]]:
    """Train a tokenizer on the corpus, which `lowercase` says is in lowercase; arguments that are
    None are chosen. With `mix`, the parts of the corpus and their weights, merges follow the
    weights."""
    choices = []
    if kind is None:
        kind = "bpe"
        choices.append(
            Choice("tokenizer", kind, "a model learns more per minute than with characters")
        )
    if kind == "byte":
        return ByteLevel([]), choices
    if kind == "char":
        characters: set[str] = set()
        for start, stop in corpus.parts():
            characters.update(corpus.read(start, stop).replace(MARK, b"").decode())
            report("collecting characters", stop, corpus.length)
        return Characters(sorted(characters)), choices
    if vocab_size is None:
        choice, vocab_size = choose_vocabulary(corpus, report, most_doublings, measured, seconds)
        choices.append(choice)
    words = count_mix(mix, report) if mix else count_corpus(corpus, available_threads(), report)
    merges = learn(words, vocab_size and vocab_size - SPECIAL, partial(report, "learning merges"))
    return ByteLevel(merges, lowercase), choices


def choose_vocabulary(
    corpus: Corpus,
    report: Report,
    most_doublings: int | None = None,
    measured: int = MEASURED_BYTES,
    seconds: float | None = None,
) -> tuple[Choice, int | None]:
    """The vocabulary size for byte-pair encoding; None means merging until words are tokens.
    `measured` is the number of bytes there is time to measure; with 0, a default size is used.
    `seconds` is the time for training on a CPU; infinity: enough for MANY_EPOCHS, None: unknown."""
    size = corpus.length
    if size < TINY_CORPUS:
        tiny = f"{TINY_CORPUS // 1000} kB"
        reason = f"under {tiny} of text, merging continues until every word is a single token"
        return Choice("vocabulary", "all words", reason), None
    if not measured:
        reason = "suits a megabyte of text; no time to measure other sizes"
        return Choice("vocabulary", USUAL_VOCAB, reason), USUAL_VOCAB
    tokens, bits = measure_sizes(corpus, report, measured)
    tokens = {n: count * size / min(measured, size) for n, count in tokens.items()}
    best = min(bits.values())
    chosen = next(number for number, value in bits.items() if value <= best * TOLERANCE)
    table = ", ".join(f"{value:.3f} at {number:,}" for number, value in bits.items())
    reason = f"the smallest within 1% of the best bits per byte of a trigram model: {table}"
    if seconds and (seconds < math.inf or size < OVERFITTING_BYTES):
        epochs = {n: possible_epochs(n, count, seconds) for n, count in tokens.items()}
        exponent = OVERFITTING * (OVERFITTING_BYTES / size) ** SMALL_TEXT_EXPONENT
        exponent *= min(epochs.values()) / MANY_EPOCHS
        loss = {n: bits[n] * n**exponent / epochs[n] ** TIME_EXPONENT for n in bits}
        chosen = min(loss, key=loss.__getitem__)
        number = counted(max(1, round(epochs[chosen])), "epoch")
        reason = f"the best for about {number}; bits per byte of a trigram model: {table}"
    if times := doublings(size):
        reason += f"; measured on {measured / 1e6:.2g} MB, "
        if most_doublings is not None and most_doublings < times:
            times = most_doublings
            reason += f"with no time to read all {size / 1e6:,.0f} MB"
        else:
            reason += f"then increased for {size / 1e6:,.0f} MB"
        chosen = min(LARGEST_VOCAB, chosen << times)
    return Choice("vocabulary", chosen, reason), chosen


def possible_epochs(vocab_size: int, tokens: float, seconds: float) -> float:
    """How many epochs of a text a CPU can train in this time, approximately; no more than help."""
    return min(MANY_EPOCHS, seconds * CPU_SPEED / (tokens * (COSTLY_VOCAB + vocab_size)))


def count_corpus(corpus: Corpus, processes: int, report: Report) -> Counter[bytes]:
    """The count of each word in the corpus, independent of the number of processes."""
    parts = corpus.parts(COUNTED_BYTES)
    if processes < 2 or corpus.length < COUNTED_ALONE or not HAS_PREAD:
        counter = WordCounter()
        for range_ in parts:
            counter.add(corpus.read(*range_))
            report("counting words", range_[1], corpus.length)
        return Counter({word.encode(): count for word, count in counter.counts().items()})
    counts: Counter[bytes] = Counter()
    with WorkerPool("nanolm.text.words", corpus.file, processes) as pool:
        for (_, done), _ in pool.map(parts):
            report("counting words", done, corpus.length)
        for answer in pool.finish():
            numbers, _, joined = answer.partition(b"\n")
            for word, number in zip(joined.split(MARK), numbers.split(), strict=False):
                counts[word] += int(number)
    return counts


def count_mix(mix: Sequence[tuple[Corpus, float]], report: Report) -> Counter[bytes]:
    """The counts as they would be if the parts had sizes in proportion to their weights."""
    counts: Counter[bytes] = Counter()
    total = sum(corpus.length for corpus, _ in mix)
    for corpus, weight in mix:
        factor = weight * total / corpus.length
        for word, count in count_corpus(corpus, available_threads(), report).items():
            counts[word] += max(1, round(factor * count))
    return counts


def doublings(size: float) -> int:
    """How often to double the vocabulary between the measured sample and `size` bytes: four times
    the text supports twice the tokens (docs/experiments.md)."""
    return (int(size) // MEASURED_BYTES).bit_length() // 2 if size > 4 * MEASURED_BYTES else 0


def measure_sizes(
    corpus: Corpus, report: Report, measured: int
) -> tuple[dict[int, float], dict[int, float]]:
    """By vocabulary size: the number of tokens of a sample, and the bits per byte of held-out text
    under a trigram model."""
    report("measuring vocabularies", 0, len(VOCAB_SIZES))
    length, size = corpus.length, min(measured, corpus.length)
    each = max(1, size // 100)
    if size == length:
        ranges = list(corpus.parts(each))
    else:  # spread over a text that is too long to read
        starts = (corpus.between_characters(number * length // 100) for number in range(100))
        ranges = [next(corpus.parts(each, start=start)) for start in starts]
    sample = [corpus.read(*range_).replace(MARK, b"").decode() for range_ in ranges]
    held_out = sample[::10]
    seen = [text for number, text in enumerate(sample) if number % 10]
    new_merges = merges_in_order(count_words(seen))
    merges: list[Pair] = []
    size = sum(len(text.encode()) for text in held_out)
    tokens: dict[int, float] = {}
    bits: dict[int, float] = {}
    for done, number in enumerate(VOCAB_SIZES, start=1):
        merges += islice(new_merges, number - 256 - len(merges))
        if number - 256 > len(merges) and bits:
            break
        tokenizer = ByteLevel(merges)
        train, val = (tokenizer.encode_array("".join(texts)) for texts in (seen, held_out))
        tokens[number] = len(train) + len(val)
        *_, trigram_bits = islice(counted_bits(train, val, number), 3)
        bits[number] = trigram_bits / size
        report("measuring vocabularies", done, len(VOCAB_SIZES))
        if bits[number] > TOLERANCE * min(bits.values()):
            break  # larger sizes get worse
    return tokens, bits


def counted_bits(train: Ids, val: Ids, vocab_size: int) -> Iterator[float]:
    """Bits of `val` when each token is predicted by counts in `train`: without context, then from
    one token before it, from two, and so on. Each count loses DISCOUNT, and that probability goes
    to the shorter context."""
    chance = np.full(len(val), 1 / vocab_size)
    # Each context that occurs in `train` is a number; others are -1.
    contexts, val_contexts = (np.zeros(len(ids), dtype=np.int64) for ids in (train, val))
    for length in range(len(train)):
        train_grams = contexts * vocab_size + train[length:]
        grams, counts = np.unique(train_grams, return_counts=True)
        known, first = np.unique(grams // vocab_size, return_index=True)
        kinds = np.diff(np.append(first, len(grams)))  # different tokens after each context
        total = _look_up(known, np.add.reduceat(counts, first), val_contexts)
        freed = DISCOUNT * _look_up(known, kinds, val_contexts)
        val_grams = val_contexts * vocab_size + val[length:]
        count = _look_up(grams, counts, val_grams)
        shorter = chance[length:]
        mixed = (np.maximum(count - DISCOUNT, 0) + freed * shorter) / np.maximum(total, 1)
        chance[length:] = np.where(total > 0, mixed, shorter)
        yield float(-np.log2(chance).sum())
        contexts = np.searchsorted(grams, train_grams[:-1])
        val_contexts = np.where(count > 0, np.searchsorted(grams, val_grams), -1)[:-1]


def unlikeness(train: Any, val: Any, tokenizer: Tokenizer) -> float:
    """How much harder `val` is than training text for a bigram model, as a ratio: about 1 if both
    are the same kind of text. On another kind, a model may get worse during training."""
    even = len(train) // SHIFT_PLACES * SHIFT_PLACES
    chunks = np.array_split(train[: even or len(train)], SHIFT_PLACES)
    size = max(1, min(SHIFT_TOKENS, len(val), len(train) // 5) // SHIFT_PLACES)
    own = np.concatenate([chunk[:size] for chunk in chunks]).astype(np.int64)
    rest = np.concatenate([chunk[size:][: 10 * SHIFT_TOKENS // SHIFT_PLACES] for chunk in chunks])
    if len(val) < LEAST_SHIFT_TOKENS or len(rest) < LEAST_SHIFT_TOKENS:
        return 1.0
    sizes = tokenizer.byte_lengths()

    def bits_per_byte(ids: Ids) -> float:
        _, bits = islice(counted_bits(rest.astype(np.int64), ids, tokenizer.vocab_size), 2)
        return bits / max(1, int(sizes[ids].sum()))

    spread = np.linspace(0, len(val) - size, SHIFT_PLACES, dtype=int)
    others = np.concatenate([val[start : start + size] for start in spread]).astype(np.int64)
    return round(bits_per_byte(others) / max(bits_per_byte(own), 1e-9), 3)


def _look_up(keys: Any, values: Any, wanted: Any) -> npt.NDArray[np.int64]:
    """The value of each wanted key, 0 if it is missing; `keys` are sorted."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
