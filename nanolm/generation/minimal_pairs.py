"""Minimal pairs: does the model find the acceptable sentence more likely than the other?

    >>> evaluate_pairs(load("runs/novel", print), read_minimal_pairs(["blimp/"], report), report)

Like the BLiMP tasks of lm-evaluation-harness: the log probability of a sentence is the sum over its
tokens, after the start of a text and a space, and a tie counts as correct.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanolm.choice import Report
from nanolm.errors import DataError
from nanolm.formats import listed
from nanolm.generation.language_model import LanguageModel
from nanolm.generation.scoring import ScoredText, score
from nanolm.machine import cache_folder
from nanolm.text.bounds import ROW_BYTES, ExpansionLimit
from nanolm.text.labeled import ReadLog, open_each
from nanolm.text.sources import find_sources
from nanolm.text.tables import read_table

GOOD, BAD = ("sentence_good", "good"), ("sentence_bad", "bad")
GROUP, PHENOMENON = ("uid",), ("linguistics_term", "phenomenon")  # may be missing


@dataclass(frozen=True)
class MinimalPair:
    good: str
    bad: str
    group: str  # BLiMP's UID, or else the name of the file
    phenomenon: str  # to which several groups may belong; empty if unknown


@dataclass(frozen=True)
class Accuracy:
    accuracy: float
    pairs: int


@dataclass(frozen=True)
class MinimalPairScores:
    accuracy: float
    pairs: int
    by_file: dict[str, Accuracy]
    by_phenomenon: dict[str, Accuracy]


def read_minimal_pairs(names: Sequence[str], report: Report) -> list[MinimalPair]:
    """The pairs in JSON lines or tables, compressed or not, or in a folder of these."""
    files, pairs, log = find_sources(names, cache_folder(), report), list[MinimalPair](), ReadLog()
    bound, known = ExpansionLimit(listed(names, 5), files.size()), set[str]()
    for source, stream, lines in open_each(files.files, "utf-8", report, log):
        table = read_table(source, stream, lines, certain=True, cautious=False)
        header = table.names or (table.sample[0][1] if table.sample else [])
        columns = {name.strip().lower(): number for number, name in enumerate(header)}
        wanted = (GOOD, BAD, GROUP, PHENOMENON)
        good, bad, group, phenomenon = (
            next((columns[name] for name in some if name in columns), None) for some in wanted
        )
        if good is None or bad is None:
            needed = "needs the columns sentence_good and sentence_bad (or good and bad)"
            raise DataError(f"{source.name} {needed}; it has {listed(header)}")
        file = Path(source.name).name.partition(".")[0]
        file = source.name if file in known else file  # another one of the same name
        known.add(file)
        used = [place for place in (good, bad, group, phenomenon) if place is not None]
        for cells in table.rows(used):
            if cells == header:
                continue
            one, other = cells[good].strip(), cells[bad].strip()
            bound.add(len(one) + len(other) + 2 * ROW_BYTES)
            if not one or not other:
                raise DataError(f"{source.name}: a sentence is empty; both are needed in each row")
            about = ["" if place is None else cells[place] for place in (group, phenomenon)]
            pairs.append(MinimalPair(one, other, about[0] or file, about[1]))
    if not pairs:
        raise DataError(f"{listed(names, 5)}: no minimal pairs")
    return pairs


def evaluate_pairs(
    writer: LanguageModel, pairs: Sequence[MinimalPair], report: Report
) -> MinimalPairScores:
    tokenizer = writer.tokenizer

    def texts(sentences: Sequence[str]) -> list[ScoredText]:
        start = tokenizer.start_of_text
        return [ScoredText([start, *tokenizer.encode(f" {each}")]) for each in sentences]

    good, bad = texts([pair.good for pair in pairs]), texts([pair.bad for pair in pairs])
    total = sum(len(text.logprobs) for text in (*good, *bad))
    with writer.model.eval_mode():
        for done in score(writer.model, [*good, *bad], tokenizer.vocab_size):
            report("evaluating", done, total)
    sums = ([text.logprobs.double().sum().item() for text in side] for side in (good, bad))
    right = [one >= other for one, other in zip(*sums, strict=True)]

    def grouped(names: Sequence[str]) -> dict[str, Accuracy]:
        groups: dict[str, list[bool]] = {}
        for name, each in zip(names, right, strict=True):
            groups.setdefault(name, []).append(each)
        return {name: Accuracy(sum(of) / len(of), len(of)) for name, of in groups.items() if name}

    return MinimalPairScores(
        accuracy=sum(right) / len(right),
        pairs=len(right),
        by_file=grouped([pair.group for pair in pairs]),
        by_phenomenon=grouped([pair.phenomenon for pair in pairs]),
    )
