"""Which tokenizer a text gets, and how large its vocabulary is.

Too small a vocabulary needs many steps for one word; of one too large, most tokens are hardly ever
seen. So it is measured: a sample is encoded with several sizes, and three-token counts on nine
tenths of it are tested on the rest. The smallest size within one percent of the best is taken,
since a small one is also faster to train.
"""

from collections import Counter
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from nanolm.choice import Choice, Report
from nanolm.machine import available_threads
from nanolm.text.bpe import Pair, learn, merges_in_order
from nanolm.text.corpus import Corpus
from nanolm.text.tokenizer import SPECIAL, ByteLevel, Characters, Ids, Tokenizer
from nanolm.text.words import MARK, WordCounter, count_words
from nanolm.text.workers import HAS_PREAD, WorkerPool

TINY_CORPUS = 50_000  # bytes: below this a corpus is a teaching example, not a language
MEASURED_BYTES = 4_000_000  # of text, to find the size of a vocabulary on
VOCAB_SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
USUAL_VOCAB, LARGEST_VOCAB = 1024, 32_768
TOLERANCE = 1.01
COUNTED_ALONE = 8_000_000  # bytes; fewer are counted before other processes would have started
COUNTED_BYTES = 1 << 19  # that a process counts at once
SHIFT_TOKENS = 20_000  # of either side, when held-out text is compared with training text
SHIFT_PLACES = 16  # of each that are compared
LEAST_SHIFT_TOKENS = 64  # fewer say nothing about how alike they are
DISCOUNT = 0.75  # taken off every count and given to what was not seen; the usual value


def make_tokenizer(
    corpus: Corpus,
    kind: str | None,
    vocab_size: int | None,
    report: Report,
    most_doublings: int | None = None,
    measured: int = MEASURED_BYTES,
) -> tuple[Tokenizer, list[Choice]]:
    """A tokenizer for the corpus; what is None is chosen."""
    choices = []
    if kind is None:
        kind = "bpe"
        choices.append(Choice("tokenizer", kind, "learns more per minute than characters"))
    if kind == "byte":
        return ByteLevel([]), choices
    if kind == "char":
        characters: set[str] = set()
        for start, stop in corpus.parts():
            characters.update(corpus.read(start, stop).replace(MARK, b"").decode())
            report("collecting characters", stop, corpus.length)
        return Characters(sorted(characters)), choices
    if vocab_size is None:
        choice, vocab_size = choose_vocabulary(corpus, report, most_doublings, measured)
        choices.append(choice)
    words = count_corpus(corpus, available_threads(), report)
    merges = learn(words, vocab_size and vocab_size - SPECIAL, partial(report, "learning merges"))
    return ByteLevel(merges), choices


def choose_vocabulary(
    corpus: Corpus,
    report: Report,
    most_doublings: int | None = None,
    measured: int = MEASURED_BYTES,
) -> tuple[Choice, int | None]:
    """How far byte-pair encoding should go; None is: until words are tokens. `measured` is how
    many bytes there is time to measure it on; with 0 it is the usual one."""
    size = corpus.length
    if size < TINY_CORPUS:
        reason = f"under {TINY_CORPUS // 1000} kB of text: merging until its words are tokens"
        return Choice("vocabulary", "all words", reason), None
    if not measured:
        reason = "suits a megabyte; no time to measure others"
        return Choice("vocabulary", USUAL_VOCAB, reason), USUAL_VOCAB
    bits = measure_sizes(corpus, report, measured)
    best = min(bits.values())
    chosen = next(number for number, value in bits.items() if value <= best * TOLERANCE)
    table = ", ".join(f"{number:,}: {value:.3f}" for number, value in bits.items())
    reason = f"the smallest within 1% of the best bits per byte by three-token counts: {table}"
    if times := doublings(size):
        reason += f"; measured on {measured / 1e6:.2g} MB, "
        if most_doublings is not None and most_doublings < times:
            times = most_doublings
            reason += f"and there is no time to read all {size / 1e6:,.0f} MB"
        else:
            reason += f"raised for {size / 1e6:,.0f} MB"
        chosen = min(LARGEST_VOCAB, chosen << times)
    return Choice("vocabulary", chosen, reason), chosen


def count_corpus(corpus: Corpus, processes: int, report: Report) -> Counter[bytes]:
    """How often each word occurs in the corpus; the same however many processes count."""
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


def doublings(size: float) -> int:
    """How many times a vocabulary doubles, from the sample it is measured on to so many bytes: four
    times the text bears twice the tokens (docs/experiments.md)."""
    return (int(size) // MEASURED_BYTES).bit_length() // 2 if size > 4 * MEASURED_BYTES else 0


def measure_sizes(corpus: Corpus, report: Report, measured: int) -> dict[int, float]:
    """Bits per byte of held-out text under a three-token model, by size of the vocabulary."""
    report("measuring vocabularies", 0, len(VOCAB_SIZES))
    length, size = corpus.length, min(measured, corpus.length)
    each = max(1, size // 100)
    if size == length:
        ranges = list(corpus.parts(each))
    else:  # from all over a text that is too long to go through
        starts = (corpus.between_characters(number * length // 100) for number in range(100))
        ranges = [next(corpus.parts(each, start=start)) for start in starts]
    sample = [corpus.read(*range_).replace(MARK, b"").decode() for range_ in ranges]
    held_out = sample[::10]
    seen = [text for number, text in enumerate(sample) if number % 10]
    new_merges = merges_in_order(count_words(seen))
    merges: list[Pair] = []
    size = sum(len(text.encode()) for text in held_out)
    bits: dict[int, float] = {}
    for done, number in enumerate(VOCAB_SIZES, start=1):
        merges += islice(new_merges, number - 256 - len(merges))
        if number - 256 > len(merges) and bits:
            break
        tokenizer = ByteLevel(merges)
        train, val = (tokenizer.encode_array("".join(texts)) for texts in (seen, held_out))
        bits[number] = counted_bits(train, val, number) / size
        report("measuring vocabularies", done, len(VOCAB_SIZES))
        if bits[number] > TOLERANCE * min(bits.values()):
            break  # from here on it gets worse
    return bits


def counted_bits(train: Ids, val: Ids, vocab_size: int, longest: int = 2) -> float:
    """Bits of `val` when each token is predicted from the `longest` before, by counts in `train`:
    what was seen n times counts n - DISCOUNT, and what that frees goes to the shorter context."""
    chance = np.full(len(val), 1 / vocab_size)
    for length in range(longest + 1):  # of the context
        contexts, val_contexts = (_contexts(ids, length, vocab_size) for ids in (train, val))
        grams, counts = np.unique(contexts * vocab_size + train[length:], return_counts=True)
        known, first = np.unique(grams // vocab_size, return_index=True)
        kinds = np.diff(np.append(first, len(grams)))  # different tokens after each context
        total = _look_up(known, np.add.reduceat(counts, first), val_contexts)
        freed = DISCOUNT * _look_up(known, kinds, val_contexts)
        count = _look_up(grams, counts, val_contexts * vocab_size + val[length:])
        shorter = chance[length:]
        mixed = (np.maximum(count - DISCOUNT, 0) + freed * shorter) / np.maximum(total, 1)
        chance[length:] = np.where(total > 0, mixed, shorter)
    return float(-np.log2(chance).sum())


def unlikeness(train: Any, val: Any, tokenizer: Tokenizer) -> float:
    """How many times as hard `val` is as training text itself, for counts of pairs of tokens: about
    1 where both are the same kind of text. On another kind, a model may get worse as it learns."""
    even = len(train) // SHIFT_PLACES * SHIFT_PLACES
    chunks = np.array_split(train[: even or len(train)], SHIFT_PLACES)
    size = max(1, min(SHIFT_TOKENS, len(val), len(train) // 5) // SHIFT_PLACES)
    own = np.concatenate([chunk[:size] for chunk in chunks]).astype(np.int64)
    rest = np.concatenate([chunk[size:][: 10 * SHIFT_TOKENS // SHIFT_PLACES] for chunk in chunks])
    if len(val) < LEAST_SHIFT_TOKENS or len(rest) < LEAST_SHIFT_TOKENS:
        return 1.0
    sizes = tokenizer.byte_lengths()

    def bits_per_byte(ids: Ids) -> float:
        bits = counted_bits(rest.astype(np.int64), ids, tokenizer.vocab_size, 1)
        return bits / max(1, int(sizes[ids].sum()))

    spread = np.linspace(0, len(val) - size, SHIFT_PLACES, dtype=int)
    others = np.concatenate([val[start : start + size] for start in spread]).astype(np.int64)
    return round(bits_per_byte(others) / max(bits_per_byte(own), 1e-9), 3)


def _contexts(ids: Ids, length: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """For each token but the first `length`, those before it as one number."""
    numbers = np.zeros(len(ids) - length, dtype=np.int64)
    for place in range(length):
        numbers = numbers * vocab_size + ids[place : place + len(numbers)]
    return numbers


def _look_up(keys: Any, values: Any, wanted: Any) -> npt.NDArray[np.int64]:
    """The value of each wanted key, 0 where there is none; `keys` are sorted."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
