"""Sequence-to-sequence learning as a training task: predict the target's next token from the source
and the target's tokens before it.

>>> task = PairTask(job, notify)
>>> Trainer(job.run, job.settings, task, job.checkpoint, notify).train(stop)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanolm.choice import Report
from nanolm.errors import ModelError
from nanolm.formats import printable
from nanolm.model.huggingface import load_seq2seq, save_seq2seq, snapshot
from nanolm.model.seq2seq import Seq2Seq
from nanolm.pairs.data import EncodedPairs, PairBatches, PairSplit
from nanolm.pairs.evaluation import pair_loss
from nanolm.pairs.metrics import score_pairs
from nanolm.pairs.settings import RECURRENT, PairSettings
from nanolm.pairs.translator import TranslateParams, Translator
from nanolm.planning import recipe
from nanolm.runs.folder import Run, append
from nanolm.text.tokenizer import Tokenizer
from nanolm.training import distributed
from nanolm.training.distributed import ALONE, World
from nanolm.training.events import Notify, Preparing, Started, Wrote
from nanolm.training.interrupt import StopRequest
from nanolm.training.loss import next_token_loss, smoothing_loss
from nanolm.training.state import State
from nanolm.training.step import AUTOCAST_DTYPES
from nanolm.training.task import Task

EVALUATION_SHARE = 0.03  # of the budget, to score validation pairs
EVALUATION_SPEEDUP = 3  # how many times faster scoring is than training, per token
LEAST_EVALUATED_TOKENS = 4_096
TRANSLATED_SHARE, MOST_TRANSLATED = 0.2, 100  # of the validation pairs that are scored
SAMPLES = 3  # in samples.md, each time
LEAST_SCORED = 256  # pairs of each set that are translated at the end, however little time is left
MOST_GROWTH = 4  # the first pairs may be shorter than the rest: translate more and more at a time
SLACK = 1.1  # of the time left may be used, rather than stop just before the last pairs
SCORING_SECONDS = 0.002  # per pair, to compare a translation with its target
BEAM_COST = 3.0  # of decoding and scoring, relative to greedy decoding
MOST_DECODING = 0.15  # of the time budget, since an untrained model generates long texts
FINAL_SECONDS = 0.7  # to finish a run
GREEDY_SECONDS = 0.02  # per source, until it is measured


@dataclass(frozen=True)
class PairData:
    """The pairs of a run as texts, and those that training needs as ids."""

    split: PairSplit
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer | None  # None: the same
    train: EncodedPairs
    val: EncodedPairs


@dataclass(frozen=True)
class PairJob:
    settings: PairSettings  # resolved: nothing left to choose
    run: Run
    data: PairData
    model: Seq2Seq
    checkpoint: Path | None  # to resume from


class PairTask(Task):
    def __init__(
        self, job: PairJob, notify: Notify, world: World = ALONE, slowdown: float = 1
    ) -> None:
        """`slowdown` is how many times longer than usual everything takes."""
        settings, data = job.settings, job.data
        assert settings.batch and settings.weight_decay is not None and settings.evaluations
        self.job, self.settings, self.data, self.notify = job, settings, data, notify
        self.world, self.slowdown = world, slowdown
        self.network = self.model = job.model.to(settings.device)
        self.batches = PairBatches(data.train, settings.batch, settings.seed)
        self.weight_decay, self.evaluations = settings.weight_decay, settings.evaluations
        self.batch_tokens = 0  # of the last batch, in all processes
        self.evaluated_all = False  # the last evaluation used all validation pairs
        self.seconds_per_token = 0.0  # of scoring
        self.seconds_per_source = GREEDY_SECONDS  # of greedy decoding

    def start_event(self, run: Path, step: int) -> Started:
        split = self.data.split
        data = f"{len(split.train):,} training pairs, {len(split.val):,} validation pairs"
        return Started(run, self.network.parameter_count(), data, step)

    def lr_scale(self, name: str) -> float:
        if self.settings.start_from is not None or self.settings.family in RECURRENT:
            return 1.0
        return recipe.rates(self.network.config.tied).get(name, 1.0)

    def muon_parameters(self) -> dict[str, list[int]]:
        return self.network.muon_parameters()

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """Source, target, and the weight of each target token: with them, the gradient is that of
        the mean over all tokens, however a batch is split among micro-batches and processes."""
        rows, train = self.batches[index], self.data.train
        count = int(train.target_lengths[rows].sum())
        self.batch_tokens = count + int(train.source.lengths[rows].sum())
        mine = rows[self.world.rows(len(rows))]
        share = len(mine) * self.world.size / count
        if not len(mine):  # more processes than pairs
            mine = rows[:1]
        source, target = map(torch.from_numpy, train.rows(mine))
        lengths, targets = (
            torch.from_numpy(side[mine]) for side in (train.source.lengths, train.target_lengths)
        )
        real = torch.arange(target.shape[1] - 1) < targets[:, None]  # (batch, target)
        return source, lengths, target, real * share

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return self.batch_tokens

    def epoch(self, batches: int) -> float:
        return batches / self.batches.in_epoch

    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # (batch, source), (batch,), (batch, target + 1), (batch, target)
        source, lengths, target, weights = batch
        mask = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
        memory = self.network.encode(source, mask)
        x = self.network.decode(target[:, :-1], memory)  # (batch, target, dim)
        what = (self.network.head, x, target[:, 1:], weights / len(source))
        loss = next_token_loss(*what)
        metrics = {"loss": loss}  # without smoothing, to be comparable with the validation loss
        if smoothing := self.settings.label_smoothing:
            loss = loss + smoothing * smoothing_loss(*what)
        return loss, metrics

    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        """Score validation pairs, and translate some of them greedily."""
        val = self.data.val
        total = int(val.target_lengths.sum())
        if state.evaluated_tokens is None:
            share = EVALUATION_SHARE / self.evaluations
            tokens = EVALUATION_SPEEDUP * share * state.tokens / progress
            tokens = max(LEAST_EVALUATED_TOKENS, round(self.world.agree(tokens)[0]))
            state.evaluated_tokens = min(tokens, total)
        self.evaluated_all = state.evaluated_tokens >= total
        start = time.monotonic()
        loss = self.score(state.evaluated_tokens)
        self.seconds_per_token = (time.monotonic() - start) / state.evaluated_tokens
        metrics = {"val_loss": loss}
        if self.world.first:
            some = int(TRANSLATED_SHARE * self.pairs_for(state.evaluated_tokens))
            count = min(MOST_TRANSLATED, max(SAMPLES, some))
            metrics |= self.write(state.step, count)
        return [loss], metrics

    def write(self, step: int, count: int) -> dict[str, float]:
        """Translate the first validation pairs, and add a few of them to samples.md."""
        val = self.data.split.val
        sources, targets = val.sources[:count], val.targets[:count]
        longest = int(self.data.val.target_lengths.max())
        greedy = TranslateParams(beams=1, max_tokens=longest + longest // 2)
        start = time.monotonic()
        try:
            written = self.translate(sources, greedy)
        except ModelError as error:  # the weights may recover
            written = [f"({error})"] * len(sources)
        self.seconds_per_source = (time.monotonic() - start) / len(sources)
        scores = score_pairs(written, targets, sources)
        text = f"## Step {step:,}: BLEU {scores.bleu:.1f}, {scores.exact:.1%} exact\n\n"
        for source, target, translation in list(zip(sources, targets, written, strict=True))[
            :SAMPLES
        ]:
            lines = {"source": source, "target": target, "output": translation}
            text += "".join(f"> {name}: {printable(line)}\n" for name, line in lines.items())
            text += "\n"
        append(self.job.run, self.job.run.samples.name, text)
        self.notify(Wrote(step, f"{sources[0]} → ", written[0]))
        return {"val_bleu": scores.bleu, "val_chrf": scores.chrf, "val_exact": scores.exact}

    def translate(
        self,
        sources: list[str],
        params: TranslateParams,
        stop: StopRequest | None = None,
        report: Report = lambda *how_far: None,
    ) -> list[str]:
        """By the current weights; fewer than all if it has to stop."""
        translator = Translator(self.network, self.data.tokenizer, self.data.source_tokenizer)
        texts = list[str]()
        with self.autocast():
            for ready in translator.steps([sources], params, report):
                texts += [translation.text for translation in ready]
                if stop and stop.requested:
                    break
                self.check_stop()
        return texts

    def translate_within(
        self, seconds: float, sources: list[str], least: int, stop: StopRequest, kind: str
    ) -> list[str]:
        """Translate the first sources as `nanolm eval` does: as many as there is time for, but at
        least `least`."""
        texts, start, size = list[str](), time.monotonic(), least

        def report(what: str, done: int, total: int) -> None:
            self.notify(Preparing(f"{what} {kind}", len(texts) + done, len(texts) + total))

        while size and not stop.requested:
            some = sources[len(texts) :][:size]
            texts += self.translate(some, TranslateParams(), stop, report)
            used = time.monotonic() - start + SCORING_SECONDS * len(texts)
            rest = len(sources) - len(texts)
            fitting = len(texts) * (SLACK * seconds / used - 1)
            size = int(min(rest, fitting, MOST_GROWTH * len(texts)))
            if size < min(rest, least):
                break
        return texts

    def score(self, tokens: int | None = None) -> float:
        """The loss per target token of the validation pairs, or of the first `tokens` tokens. All
        processes return that of the first, to agree on the best step."""
        val = self.data.val if tokens is None else self.data.val.first(self.pairs_for(tokens))
        with self.autocast():
            loss = pair_loss(self.network, val, self.check_stop)
        return float(self.world.agree(loss)[0])

    def pairs_for(self, tokens: int) -> int:
        """The number of validation pairs that have about this many target tokens."""
        ends = np.cumsum(self.data.val.target_lengths)
        return min(len(ends), int(np.searchsorted(ends, tokens)) + 1)

    def autocast(self) -> Any:
        device = self.settings.device
        low = AUTOCAST_DTYPES.get(self.settings.dtype) if device != "cpu" else None
        return torch.autocast(device, low, enabled=low is not None)

    def seconds_after_training(self) -> float:
        split, val = self.data.split, self.data.val
        tokens = 0 if self.evaluated_all else int(val.target_lengths.sum())
        sources = len(split.val) + (len(split.test) if split.test else 0)
        decoding = BEAM_COST * self.seconds_per_source * sources
        if self.settings.minutes:
            decoding = min(decoding, MOST_DECODING * 60 * self.settings.minutes)
        return self.slowdown * FINAL_SECONDS + self.seconds_per_token * tokens + decoding

    def snapshot(self) -> Callable[[Path], None]:
        copy = snapshot(self.network)
        tokenizers = (self.data.tokenizer, self.data.source_tokenizer)
        return lambda folder: save_seq2seq(copy, folder, *tokenizers)

    def load_weights(self, folder: Path) -> None:
        saved = dict(load_seq2seq(folder).named_parameters())
        for name, parameter in self.network.named_parameters():
            distributed.copy_full_tensor(parameter, saved[name])
