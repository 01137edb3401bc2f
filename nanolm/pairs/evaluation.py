"""Evaluates a sequence-to-sequence model on pairs of texts.

>>> pairs = read_pairs(["test.tsv"], PairReading(), report)
>>> evaluate_pairs(Translator.load("runs/de-en", note=print), pairs).scores.bleu
"""

import csv
import io
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanolm import webpage
from nanolm.choice import Report
from nanolm.errors import NOT_FINITE, ModelError
from nanolm.formats import counted
from nanolm.model.seq2seq import Seq2Seq
from nanolm.pairs.data import EncodedPairs, PairBatches, encode_pairs
from nanolm.pairs.metrics import (
    LengthScores,
    PairScores,
    by_length,
    edit_distance,
    length_chart,
    score_pairs,
)
from nanolm.pairs.translator import TranslateParams, Translator
from nanolm.report.figure import STYLE_SHEET
from nanolm.report.page import text_table
from nanolm.text.pairs import Pairs

SCORED_TOKENS = {"cpu": 4_096, "cuda": 65_536, "mps": 16_384}  # per batch, to compute the loss
MOST_LOGITS = 1 << 25  # at a time: 128 MB
SHOWN_MISTAKES = 50  # on the page
LENGTH_COLUMNS = ("source tokens", "pairs", "exact", "BLEU", "chrF", "edit distance")


@dataclass(frozen=True)
class PairMistake:
    source: str
    target: str
    translation: str
    edit_distance: int  # in characters


@dataclass(frozen=True)
class PairEvaluation:
    scores: PairScores
    loss: float  # nats per target token
    by_length: list[LengthScores]  # of the source, in tokens
    count: int  # pairs
    mistakes: list[PairMistake]  # the worst first
    notes: list[str]


def evaluate_pairs(
    translator: Translator,
    pairs: Pairs,
    params: TranslateParams | None = None,
    report: Report = lambda *how_far: None,
) -> PairEvaluation:
    """Translate the sources and compare with the targets. If a source occurs more than once, any of
    its targets is right."""
    context = translator.model.config.context
    source_tokenizer = translator.source_tokenizer or translator.tokenizer
    encoded = encode_pairs(pairs, translator.tokenizer, source_tokenizer, context, 1, report)
    loss = pair_loss(translator.model, encoded, report)
    if not math.isfinite(loss):
        raise ModelError(NOT_FINITE)
    sources = list(dict.fromkeys(pairs.sources))
    stream = translator.stream([sources], params or TranslateParams(), report)
    found = {each.source: each.text for each in stream}
    outputs = [found[source] for source in pairs.sources]
    right = set(zip(pairs.sources, pairs.targets, strict=True))
    mistakes = [
        PairMistake(source, target, found[source], edit_distance(found[source], target))
        for source, target in dict.fromkeys(zip(pairs.sources, pairs.targets, strict=True))
        if (source, found[source]) not in right
    ]
    notes = [pairs.how, *pairs.notes]
    if encoded.truncated:
        long = f"longer than the context of {context:,} tokens"
        few = counted(encoded.truncated, "pair")
        notes.append(f"{few} {long}: the loss ignores the tokens beyond it")
    lengths = (encoded.source.lengths - 1).tolist()
    return PairEvaluation(
        scores=score_pairs(outputs, pairs.targets, pairs.sources),
        loss=loss,
        by_length=by_length(outputs, pairs.targets, pairs.sources, lengths),
        count=len(pairs),
        mistakes=sorted(mistakes, key=lambda each: -each.edit_distance),
        notes=notes,
    )


@torch.inference_mode()
def pair_loss(
    model: Seq2Seq, encoded: EncodedPairs, report: Report = lambda *how_far: None
) -> float:
    """The mean loss per target token, in nats."""
    nats, tokens, size = 0.0, 0, max(1, MOST_LOGITS // model.config.vocab_size)
    batches = PairBatches(encoded, SCORED_TOKENS[model.device.type], seed=0)
    with model.eval_mode():
        for number in range(batches.in_epoch):
            which = batches[number]
            source, target = map(torch.from_numpy, encoded.rows(which))
            # By length, because the padding of a foreign tokenizer may be its end of text.
            sizes = (
                torch.from_numpy(side.lengths[which]) for side in (encoded.source, encoded.target)
            )
            mask, real = (
                (torch.arange(part.shape[1]) < size[:, None]).to(model.device)
                for part, size in zip((source, target), sizes, strict=True)
            )
            source, target = source.to(model.device), target.to(model.device)
            x = model.decode(target[:, :-1], model.encode(source, mask))  # (rows, target, dim)
            x, labels = x[real[:, 1:]], target[:, 1:][real[:, 1:]]  # (tokens, dim), (tokens,)
            for some, right in zip(x.split(size), labels.split(size), strict=True):
                logits = model.head(some).float()  # (tokens, vocabulary)
                nats += F.cross_entropy(logits, right, reduction="sum").item()
            tokens += len(labels)
            report("computing the loss", number + 1, batches.in_epoch)
    return nats / max(1, tokens)


def mistakes_csv(mistakes: list[PairMistake]) -> str:
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["source", "target", "translation", "edit_distance"])
    rows.writerows([m.source, m.target, m.translation, m.edit_distance] for m in mistakes)
    return table.getvalue()


def length_rows(groups: list[LengthScores]) -> list[tuple[str, ...]]:
    """The cells of a table below `LENGTH_COLUMNS`."""
    return [
        (
            f"{each.shortest:,}" + f" to {each.longest:,}" * (each.longest > each.shortest),
            f"{each.count:,}",
            f"{each.exact:.1%}",
            f"{each.bleu:.1f}",
            f"{each.chrf:.1f}",
            f"{each.edit_distance:.3f}",
        )
        for each in groups
    ]


def evaluation_page(result: PairEvaluation, title: str, facts: dict[str, str]) -> str:
    """Scores by length of the source as a picture and a table, and the worst mistakes."""
    body = length_chart("By source length", {title: result.by_length}, "tokens").svg
    body += text_table(LENGTH_COLUMNS, length_rows(result.by_length))
    if result.mistakes:
        shown = result.mistakes[:SHOWN_MISTAKES]
        of = f"{len(shown):,} of {len(result.mistakes):,}" if shown != result.mistakes else "all"
        rows = [(m.source, m.target, m.translation, f"{m.edit_distance:,}") for m in shown]
        header = ("source", "target", "translation", "edit distance")
        body += f"<h2>Mistakes ({of}, worst first)</h2>" + text_table(header, rows)
    return webpage.page(title, facts, body, STYLE_SHEET)
