"""Metrics of generated targets: BLEU, chrF, exact match and edit distance.

    >>> scores = score_pairs(["the cat sat on a mat"], ["the cat sat on the mat"])
    >>> round(scores.bleu, 2), round(scores.chrf, 2), scores.exact
    (53.73, 82.48, 0.0)

BLEU and chrF are bit-identical to those of sacrebleu with its default settings (13a tokenization,
exponential smoothing; chrF2).
"""

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from nanolm.report.curves import Chart, Panel, Series

WORD_ORDER = 4  # BLEU: n-grams of up to four words
CHARACTER_ORDER = 6  # chrF: n-grams of up to six characters
BETA = 2  # chrF weights recall twice as much as precision
LENGTH_GROUPS = 5

# The rules of NIST's mteval-v13a: which characters become words of their own. Periods and commas
# stay within numbers, and a dash is separated only after a digit.
ENTITIES = {"&quot;": '"', "&amp;": "&", "&lt;": "<", "&gt;": ">"}
WORD_BREAKS = (
    (re.compile(r"""([!"#$%&()*+/:;<=>?@\[\\\]^_`{|}~])"""), r" \1 "),
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)

References = Sequence[str] | Sequence[Sequence[str]]  # one or several for each hypothesis
Symbols = Sequence[Hashable]  # characters, words or phonemes


@dataclass(frozen=True)
class PairScores:
    bleu: float  # 0 to 100
    chrf: float  # 0 to 100
    exact: float  # share of sources, 0 to 1
    edit_distance: float  # insertions, deletions and substitutions per character of the reference
    symbol_edit_distance: float  # the same per word, or per phoneme if these have spaces between


@dataclass(frozen=True)
class LengthScores(PairScores):
    """The scores of sources of similar length."""

    shortest: int
    longest: int
    mean_length: float
    count: int


def score_pairs(
    hypotheses: Sequence[str], references: References, sources: Sequence[str] | None = None
) -> PairScores:
    """All metrics at once. With `sources`, the references of equal sources are alternatives for
    exact match and edit distance, and each source is counted once, such as a word with several
    pronunciations. BLEU and chrF compare each hypothesis with its own references only."""
    rows = as_lists(references)
    answers: dict[object, str] = {}
    alternatives: dict[object, list[str]] = defaultdict(list)
    names = sources or range(len(rows))
    for source, hypothesis, row in zip(names, hypotheses, rows, strict=True):
        answers.setdefault(source, hypothesis)
        alternatives[source] += row
    right = sum(answer in alternatives[source] for source, answer in answers.items())
    both = [(answer, alternatives[source]) for source, answer in answers.items()]
    return PairScores(
        bleu=bleu(hypotheses, rows),
        chrf=chrf(hypotheses, rows),
        exact=right / max(1, len(answers)),
        edit_distance=mean_edit_distance(both),
        symbol_edit_distance=mean_edit_distance(
            [(answer.split(), [each.split() for each in row]) for answer, row in both]
        ),
    )


def as_lists(references: References) -> list[list[str]]:
    return [[each] if isinstance(each, str) else list(each) for each in references]


def bleu(hypotheses: Sequence[str], references: References) -> float:
    """BLEU of a whole corpus (Papineni et al., 2002): the geometric mean of n-gram precisions,
    times a penalty if the hypotheses are shorter than the references."""
    length = reference_length = 0
    right, total = [0] * WORD_ORDER, [0] * WORD_ORDER
    for hypothesis, row in zip(hypotheses, as_lists(references), strict=True):
        words, others = split_words(hypothesis), [split_words(each) for each in row]
        length += len(words)
        # The closest length; the shorter of two equally close ones.
        reference_length += min(map(len, others), key=lambda n: (abs(n - len(words)), n))
        for n in range(WORD_ORDER):
            found = ngrams(words, n + 1)
            allowed: Counter[Hashable] = Counter()
            for each in others:
                allowed |= ngrams(each, n + 1)
            right[n] += (found & allowed).total()
            total[n] += found.total()
    if not all(total) or not any(right):
        return 0.0
    halved, logs = 1.0, []
    for n in range(WORD_ORDER):
        if right[n]:
            logs.append(math.log(100 * right[n] / total[n]))
        else:  # each order without a match counts as half a match of the one before
            halved *= 2
            logs.append(math.log(100 / (halved * total[n])))
    penalty = math.exp(min(0.0, 1 - reference_length / length))
    return penalty * math.exp(sum(logs) / WORD_ORDER)


def split_words(text: str) -> tuple[str, ...]:
    """The words and punctuation of a text, by the rules of mteval-v13a."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in ENTITIES.items():
        text = text.replace(entity, character)
    text = f" {text} "
    for pattern, spaced in WORD_BREAKS:
        text = pattern.sub(spaced, text)
    return tuple(text.split())


def ngrams(sequence: Sequence[Hashable], order: int) -> Counter[Hashable]:
    """How often each n-gram occurs in a string or tuple."""
    starts = range(len(sequence) - order + 1)
    return Counter(sequence[at : at + order] for at in starts)


def chrf(hypotheses: Sequence[str], references: References) -> float:
    """chrF2 of a whole corpus (Popović, 2016): the F-score of character n-grams, without spaces.
    Of several references, the one with the best score counts."""
    totals = [Matches()] * CHARACTER_ORDER
    for hypothesis, row in zip(hypotheses, as_lists(references), strict=True):
        best = max((matching_ngrams(hypothesis, each) for each in row), key=f_score)
        totals = [
            Matches(*map(sum, zip(*both, strict=True))) for both in zip(totals, best, strict=True)
        ]
    return f_score(totals)


class Matches(NamedTuple):
    """Numbers of n-grams: of the hypothesis, of the reference, and in both."""

    hypothesis: int = 0
    reference: int = 0
    both: int = 0


def matching_ngrams(hypothesis: str, reference: str) -> list[Matches]:
    """For each order. If the reference is too short for one, it says nothing about it."""
    counts = []
    texts = ["".join(text.split()) for text in (hypothesis, reference)]
    for order in range(1, CHARACTER_ORDER + 1):
        found, actual = (ngrams(text, order) for text in texts)
        both = (found & actual).total()
        counts.append(Matches(found.total() if actual else 0, actual.total(), both))
    return counts


def f_score(counts: Sequence[Matches]) -> float:
    """The F-score of the mean precision and recall of all orders with n-grams on both sides."""
    precision = recall = 0.0
    orders = [each for each in counts if each.hypothesis and each.reference]
    for each in orders:  # not by sum(), which rounds differently from Python 3.12 on
        precision += each.both / each.hypothesis
        recall += each.both / each.reference
    if not precision:
        return 0.0
    precision, recall = precision / len(orders), recall / len(orders)
    return 100 * ((1 + BETA**2) * precision * recall / (BETA**2 * precision + recall))


def mean_edit_distance(rows: Sequence[tuple[Symbols, Sequence[Symbols]]]) -> float:
    """Edits per symbol of the references; of several, the closest counts."""
    edits = length = 0
    for hypothesis, references in rows:
        best = min((edit_distance(hypothesis, each), len(each)) for each in references)
        edits, length = edits + best[0], length + best[1]
    return edits / max(1, length)


def edit_distance(a: Symbols, b: Symbols) -> int:
    """The least number of insertions, deletions and substitutions that turn `a` into `b`. A column
    of the table of distances is kept as the bits of two integers: where it rises by one from a row
    to the next, and where it falls (Myers 1999, Hyyrö 2003)."""
    places: dict[Hashable, int] = defaultdict(int)
    for row, symbol in enumerate(a):
        places[symbol] |= 1 << row
    distance, all_rows, last = len(a), (1 << len(a)) - 1, 1 << len(a) >> 1
    rises, falls = all_rows, 0
    for symbol in b:
        equal = places.get(symbol, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls  # no rise along it
        right_up = falls | (all_rows & ~(diagonal | rises))
        right_down = diagonal & rises
        distance += bool(right_up & last) - bool(right_down & last) if a else 1
        right_up, right_down = right_up << 1 | 1, right_down << 1
        rises = (right_down | ~(diagonal | right_up)) & all_rows
        falls = right_up & diagonal & all_rows
    return distance


def by_length(
    hypotheses: Sequence[str],
    references: References,
    sources: Sequence[str],
    lengths: Sequence[int] | None = None,
) -> list[LengthScores]:
    """The scores of each fifth of the pairs, from the shortest sources to the longest. `lengths`
    are in characters unless given. Sources of equal length are in the same group, so there may be
    fewer groups."""
    sizes = list(map(len, sources)) if lengths is None else lengths
    ordered, count = sorted(sizes), len(sizes)
    # The longest source of each group.
    ends = {ordered[count * n // LENGTH_GROUPS - 1] for n in range(1, LENGTH_GROUPS + 1) if count}
    limits, rows = sorted(ends), as_lists(references)
    groups: dict[int, list[int]] = defaultdict(list)
    for place, size in enumerate(sizes):
        groups[bisect_left(limits, size)].append(place)
    return [
        LengthScores(
            **vars(
                score_pairs(
                    [hypotheses[place] for place in places],
                    [rows[place] for place in places],
                    [sources[place] for place in places],
                )
            ),
            shortest=min(own := [sizes[place] for place in places]),
            longest=max(own),
            mean_length=fmean(own),
            count=len(own),
        )
        for _, places in sorted(groups.items())
    ]


def length_chart(title: str, models: dict[str, list[LengthScores]], unit: str) -> Chart:
    """Exact match and BLEU of one or several models by the length of the source."""

    def panel(title: str, value: Callable[[LengthScores], float]) -> Panel:
        curves = {
            name: [(each.mean_length, value(each)) for each in groups]
            for name, groups in models.items()
        }
        return Panel(title, [Series(*curve) for curve in curves.items()])

    panels = [
        panel("exact match (%)", lambda each: 100 * each.exact),
        panel("BLEU", lambda each: each.bleu),
    ]
    return Chart(title, panels, f"source length in {unit}")
