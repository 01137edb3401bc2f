"""Small versions of what is not here yet: reading, batches, saving, translating, scores."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanolm.choice import Report
from nanolm.model.build import build_seq2seq
from nanolm.model.config import EncoderDecoderConfig
from nanolm.model.seq2seq import Seq2Seq
from nanolm.pairs.settings import PairSettings
from nanolm.text.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    sources: list[str]
    targets: list[str]
    how: str = ""
    examples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sources)

    def part(self, rows: Sequence[int]) -> "Pairs":
        return Pairs([self.sources[row] for row in rows], [self.targets[row] for row in rows])


@dataclass(frozen=True)
class PairSplit:
    train: Pairs
    val: Pairs
    test: Pairs | None
    how: str
    examples: list[str]
    notes: list[str]


def read_lines(name: str) -> list[str]:
    raw = Path(name).read_bytes()
    return (gzip.decompress(raw) if name.endswith(".gz") else raw).decode().splitlines()


def read(names: Sequence[str], settings: PairSettings) -> Pairs:
    if len(names) == 2:
        rows = list(zip(*map(read_lines, names), strict=True))
    else:
        rows = [tuple(line.split("\t")[:2]) for line in read_lines(names[0])]
    rows = rows[: settings.limit]
    if settings.reverse:
        rows = [(target, source) for source, target in rows]
    sources, targets = ([part.strip() for part in side] for side in zip(*rows, strict=True))
    examples = [f"  {a[:40]} → {b[:40]}" for a, b in rows[:3]]
    return Pairs(sources, targets, f"{len(rows):,} pairs", examples)


def split_pairs(settings: PairSettings, report: Report) -> PairSplit:
    whole = read(settings.pairs, settings)
    val = read(settings.val, settings) if settings.val else None
    test = read(settings.test, settings) if settings.test else None
    train = whole
    if val is None:
        order = np.random.default_rng(settings.seed).permutation(len(whole)).tolist()
        fraction = settings.val_fraction or 0.05
        count = max(1, min(2000, round(fraction * len(whole))))
        val, train = whole.part(sorted(order[:count])), whole.part(sorted(order[count:]))
    return PairSplit(train, val, test, whole.how, whole.examples, [])


@dataclass(frozen=True)
class Side:
    ids: npt.NDArray[np.int32]
    starts: Ints
    lengths: Ints

    def rows(self, which: Ints, padding: int, multiple: int) -> Ints:
        lengths = self.lengths[which][:, None]
        columns = np.arange(-(-int(lengths.max()) // multiple) * multiple)
        places = np.minimum(self.starts[which][:, None] + columns, len(self.ids) - 1)
        return np.where(columns < lengths, self.ids[places], padding).astype(np.int64)


@dataclass(frozen=True)
class EncodedPairs:
    source: Side
    target: Side  # with start and end
    padding: tuple[int, int]  # source, target
    multiple: int

    @property
    def source_lengths(self) -> Ints:
        return self.source.lengths

    @property
    def target_lengths(self) -> Ints:
        return self.target.lengths - 1

    def __len__(self) -> int:
        return len(self.source.lengths)

    def rows(self, which: Ints) -> tuple[Ints, Ints]:
        source = self.source.rows(which, self.padding[0], self.multiple)
        target = self.target.rows(which, self.padding[1], self.multiple)
        return source, target


def encode_pairs(
    pairs: Pairs, tokenizer: Tokenizer, source_tokenizer: Tokenizer, context: int, multiple: int
) -> EncodedPairs:
    def side(texts: list[str], tok: Tokenizer, before: list[int]) -> Side:
        end = tok.end_of_text
        rows = [[*before, *tok.encode(text)[: context - 1], end] for text in texts]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        ids = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
        return Side(ids, np.cumsum(lengths) - lengths, lengths)

    source = side(pairs.sources, source_tokenizer, [])
    target = side(pairs.targets, tokenizer, [tokenizer.end_of_text])
    return EncodedPairs(source, target, (source_tokenizer.padding, tokenizer.padding), multiple)


class PairBatches:
    def __init__(self, encoded: EncodedPairs, tokens: int, seed: int) -> None:
        self.encoded, self.tokens, self.seed = encoded, tokens, seed
        sizes = encoded.source_lengths + encoded.target_lengths
        self.batches: list[Ints] = []
        row: list[int] = []
        order = np.lexsort((encoded.target_lengths, sizes))
        longest = [0, 0]
        for index in order.tolist():
            both = (int(encoded.source_lengths[index]), int(encoded.target_lengths[index]))
            now = [max(a, b) for a, b in zip(longest, both, strict=True)]
            if row and sum(now) * (len(row) + 1) > tokens:
                self.batches.append(np.array(row))
                row, now = [], list(both)
            row.append(index)
            longest = now
        self.batches.append(np.array(row))
        self.in_epoch = len(self.batches)

    def __getitem__(self, index: int) -> Ints:
        epoch, number = divmod(index, self.in_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.in_epoch)
        return self.batches[int(order[number])]


def save_seq2seq(
    model: Seq2Seq, folder: Path, tokenizer: Tokenizer, source_tokenizer: Tokenizer | None = None
) -> None:
    assert isinstance(model.config, EncoderDecoderConfig)
    (folder / "config.json").write_text(json.dumps(asdict(model.config)))
    tensors = {name: value.detach().cpu() for name, value in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(folder, model.config.context)
    if source_tokenizer:
        text = source_tokenizer.to_json()
        (folder / "source_tokenizer.json").write_text(text, encoding="utf-8")


def load_seq2seq(folder: Path, dropout: float | None = None) -> Seq2Seq:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if dropout is not None:
        values["dropout"] = dropout
    model = build_seq2seq(EncoderDecoderConfig(**values))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model


@dataclass(frozen=True)
class TranslateParams:
    beams: int = 4
    max_tokens: int | None = None


@dataclass(frozen=True)
class Translation:
    source: str
    text: str


@dataclass(frozen=True)
class Translator:
    model: Seq2Seq
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer | None = None

    @torch.inference_mode()
    def translate(self, sources: list[str], params: TranslateParams) -> list[Translation]:
        model, found, tok = self.model, [], self.tokenizer
        source_tok = self.source_tokenizer or tok
        with model.eval_mode():
            for first in range(0, len(sources), 64):
                some = sources[first : first + 64]
                ids = [[*source_tok.encode(text), source_tok.end_of_text] for text in some]
                longest = max(map(len, ids))
                rows = [row + [source_tok.padding] * (longest - len(row)) for row in ids]
                source = torch.tensor(rows, device=model.device)
                memory = model.encode(source, source != source_tok.padding)
                most = params.max_tokens or model.config.context
                cache = model.init_cache(len(some), most)
                last = torch.full((len(some), 1), tok.end_of_text, device=model.device)
                written: list[Tensor] = []
                done = torch.zeros(len(some), dtype=torch.bool, device=model.device)
                for _ in range(most):
                    last = model.head(model.decode(last, memory, cache)[:, -1:]).argmax(dim=-1)
                    written.append(last)
                    done |= last[:, 0] == tok.end_of_text
                    if done.all():
                        break
                for text, row in zip(some, torch.cat(written, dim=1).tolist(), strict=True):
                    end = row.index(tok.end_of_text) if tok.end_of_text in row else len(row)
                    found.append(Translation(text, tok.decode(row[:end])))
        return found


@dataclass(frozen=True)
class PairScores:
    bleu: float
    chrf: float
    exact: float
    edit_distance: float


def score_pairs(hypotheses: list[str], references: list[str]) -> PairScores:
    right = sum(a == b for a, b in zip(hypotheses, references, strict=True))
    bleu = 0.0
    try:
        import sacrebleu

        bleu = float(sacrebleu.corpus_bleu(hypotheses, [references]).score)
    except ImportError:
        pass
    return PairScores(bleu, 0.0, right / max(1, len(references)), 0.0)


def snapshot(model: Seq2Seq) -> Seq2Seq:
    import copy

    return copy.deepcopy(model)


def model_tokenizers(folder: Path) -> tuple[Tokenizer, Tokenizer | None]:
    from nanolm.text.tokenizer import own_tokenizer
    from nanolm.text.tokenizer_files import load_tokenizer

    file = folder / "source_tokenizer.json"
    return load_tokenizer(folder), own_tokenizer(file.read_text()) if file.exists() else None
