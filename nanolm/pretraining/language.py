"""Language modeling as a training task: predict the next token from those before it."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from nanolm.errors import ModelError
from nanolm.evaluation import Score, evaluate, weighted_mean
from nanolm.formats import printable
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.adapters import Adapters
from nanolm.model.base import Model
from nanolm.model.fast.training import block_kernels, speed_up, speedups_of
from nanolm.model.gpt import GPT
from nanolm.model.huggingface import load_model, save_model, save_partial, snapshot
from nanolm.model.peft import load_trained, save_adapter
from nanolm.model.size import non_embedding_parameters
from nanolm.model.stored import ADAPTER
from nanolm.planning import recipe
from nanolm.planning.scaling_law import EARLY, Forecast
from nanolm.planning.tuning import (
    compile_model,
    missing_compiler,
    threads_for,
    use_attention,
    with_kernels,
)
from nanolm.pretraining.prepare import Job
from nanolm.runs.folder import append
from nanolm.text.mix import BITS_OF_PART, share_out
from nanolm.text.split import TO_CHOOSE_BY
from nanolm.text.tokens import Batches, Store
from nanolm.training import distributed
from nanolm.training.checkpointer import save_final
from nanolm.training.distributed import ALONE, World
from nanolm.training.events import Note, Notify, Started, Wrote
from nanolm.training.feed import source
from nanolm.training.loss import next_token_loss
from nanolm.training.state import State
from nanolm.training.step import AUTOCAST_DTYPES
from nanolm.training.task import Task

FEW_STEPS_SHARE = 0.7  # of the planned steps; fewer are reported
COMPILE_SECONDS = 25.0  # approximate time to compile
EVALUATION_SHARE = 0.03  # of the budget
EVALUATION_SPEEDUP = 2  # how many times faster evaluation is than training, per token
LEAST_EVALUATED_TOKENS = 4_096
CALIBRATION = 4  # times as much text, to find out whether the evaluated part is easier
FIRST_EVALUATION_SECONDS = 0.8  # extra time of the first evaluation, if it is also the last
FINAL_SECONDS = 0.7  # to finish a run
SAMPLE_TOKENS = 80
SAMPLE_SHARE = 0.01  # of the training time, if it is limited; the last sample is always written
UNPLANNED_PATIENCE = 3  # evaluations clearly worse than the best, if no number of steps was given
WRONG_FORECAST = 0.03  # relative error from which a corrected forecast is reported
SHIFTED_TEXT = 1.3  # times the n-gram loss of training text: the validation text differs in kind


class NextToken(Task):
    def __init__(self, job: Job, notify: Notify, world: World = ALONE, slowdown: float = 1) -> None:
        """`slowdown` is how many times longer than usual everything takes."""
        settings = self.settings = job.settings
        assert settings.context and settings.batch
        self.job, self.notify, self.world, self.slowdown = job, notify, world, slowdown
        self.step_tokens = settings.batch * settings.context
        self.lengthens = settings.early_context is not None
        shape = (settings.context, settings.batch, settings.seed)
        batches = Batches(job.text.train, *shape, world.rows(settings.batch), job.text.parts)
        self.source = source(batches, settings.device)
        self.loss_weight = world.weight(settings.batch)
        self.network = job.model.to(settings.device)
        self.model: nn.Module = self.network
        self.adapters: Adapters | None = None
        speed_up(self.network, kernels=None)  # used to measure the speed
        if settings.train == "lora":  # without kernels, which skip the adapters
            torch.manual_seed(settings.seed)
            self.network.requires_grad_(False)
            self.adapters = Adapters(self.network)
            self.model = nn.ModuleDict({"network": self.network, "adapters": self.adapters})
            if job.checkpoint:
                self.load_weights(job.checkpoint)
        elif settings.shard and world.joined:
            # No kernels: they cross layers, whose weights are not gathered at the same time.
            self.sharded = distributed.wrap_fsdp(self.network, self.loss)
        else:
            with_kernels(self.network, settings)
        use_attention(self.network, settings)
        assert settings.weight_decay is not None and settings.evaluations
        self.weight_decay, self.evaluations = settings.weight_decay, settings.evaluations
        if not job.fixed_steps:
            self.patience = UNPLANNED_PATIENCE
        held_out = job.text.tokenizer.byte_lengths()[job.text.val[: 2 * TO_CHOOSE_BY]].sum()
        self.keeps_last = len(job.text.val) > 0 and held_out < TO_CHOOSE_BY
        self.evaluated_all = False  # the last evaluation used the whole validation set
        self.has_evaluated = False
        self.samples, self.sample_seconds, self.skipped_sample = 0, 0.0, False
        self.seconds_per_token = 0.0  # of evaluation; a guess until the first one
        forecast = self.forecast = job.forecast
        if forecast and forecast.seconds:
            learned = forecast.passes * job.text.tokens
            self.seconds_per_token = forecast.seconds / learned / EVALUATION_SPEEDUP
        is_gpt = isinstance(self.network, GPT)
        missing = missing_compiler(settings.device) if is_gpt else "the model is recurrent"
        missing = "it would skip the LoRA adapters" if self.adapters else missing
        kernels = None
        if settings.device == "cpu" and isinstance(self.network, GPT):
            kernels = block_kernels(self.network)
        if not missing and (settings.compile or not kernels):  # the kernels are faster
            self.compile_seconds = COMPILE_SECONDS
        elif settings.compile:
            notify(Note(f"--compile ignored: {missing}"))

    def start_event(self, run: Path, step: int) -> Started:
        data, trained = f"{len(self.job.text.train):,} training tokens", self.parameters()
        if self.adapters:
            count = sum(each.numel() for each in trained.values())
            data = f"{count:,} of them trainable in LoRA adapters, {data}"
        return Started(run, self.network.parameter_count(), data, step)

    def parameters(self) -> dict[str, nn.Parameter]:
        if self.adapters:
            return dict(self.adapters.named_parameters(prefix="adapters"))
        return super().parameters()

    def lr_scale(self, name: str) -> float:
        if self.settings.start_from is not None or not isinstance(self.network, GPT):
            return 1.0
        return recipe.rates(self.network.config.tied).get(name, 1.0)

    def muon_parameters(self) -> dict[str, list[int]]:
        return {} if self.adapters else self.network.muon_parameters()

    def expected(self, learned: float) -> float | None:
        return self.forecast.expected(learned) if self.forecast else None

    def forecast_for(self, steps: float) -> Forecast | None:
        """The prediction, recomputed if far fewer steps than planned are possible."""
        forecast = self.job.forecast
        if not forecast or not forecast.steps or steps > FEW_STEPS_SHARE * forecast.steps:
            return forecast
        assert isinstance(self.network, GPT)
        return forecast.at(steps, non_embedding_parameters(self.network.config), self.job.text.size)

    def report_slow_steps(self, steps: int) -> None:
        """Report when far fewer steps than planned were possible in the time."""
        planned, forecast = self.job.forecast, self.forecast_for(steps)
        if planned and forecast and forecast is not planned:
            text = f"{steps:,} steps instead of {planned.steps:,}: the machine was slower than "
            text += f"expected. Prediction for {steps:,} steps: {forecast.bits_per_byte:.3f} bits "
            self.notify(Note(f"{text}per byte instead of {planned.bits_per_byte:.3f}"))

    def why_validation_rises(self) -> str:
        if self.job.text.shift < SHIFTED_TEXT:
            return super().why_validation_rises()
        cure = "Hold out passages from the whole text with --val-split spread"
        if self.settings.val:
            cure = f"Choose a --val text closer to the training text than {self.settings.val}"
        problem = "the validation text differs from the training text, so its loss is misleading"
        return f"{problem}. {cure}"

    def seconds_after_training(self) -> float:
        tokens = 0 if self.evaluated_all else len(self.job.text.val)
        once = FINAL_SECONDS + (0 if self.has_evaluated else FIRST_EVALUATION_SECONDS)
        once += self.sample_seconds / self.samples if self.skipped_sample else 0
        return self.slowdown * once + self.seconds_per_token * tokens

    def batch(self, index: int) -> tuple[Tensor, ...]:
        batch = self.source.batch(index)  # (batch, context + 1), or where the windows start
        if self.lengthens and not self.decaying and batch.dim() == 2:
            batch = batch.unfold(1, self.window + 1, self.window).flatten(0, 1)
        return (batch,)

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return self.step_tokens

    def epoch(self, batches: int) -> float:
        return batches * self.step_tokens / max(1, self.job.text.tokens)

    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ids, cut = self.source.ids(*batch), (-1, self.window)  # (batch, context + 1)
        inputs, targets = (t.unflatten(1, cut).flatten(0, 1) for t in (ids[:, :-1], ids[:, 1:]))
        x = self.network.hidden_states(inputs)  # (windows, window, dim)
        return next_token_loss(self.network.head, x, targets), {}

    @property
    def window(self) -> int:
        """The number of tokens in the windows to train on now."""
        settings = self.settings
        assert settings.context
        return settings.context if self.decaying else settings.early_context or settings.context

    def compile(self, wanted: bool) -> None:
        if wanted:
            compile_model(self.network)
        else:
            speed_up(self.network, compiled=False)

    def save_memory(self) -> bool:
        if not isinstance(self.network, GPT) or speedups_of(self.network).recompute:
            return False
        speed_up(self.network, recompute=True)
        self.notify(Note("still out of memory: recomputing every layer in the backward pass"))
        return True

    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        """Score the validation text and generate a sample."""
        settings, text = self.settings, self.job.text
        if settings.minutes and progress:
            self.forecast = self.forecast_for(state.step / progress)
        if state.evaluated_tokens is None:
            share = EVALUATION_SHARE / self.evaluations
            tokens = EVALUATION_SPEEDUP * share * state.tokens / progress
            if settings.minutes and self.seconds_per_token:  # not all time was spent on steps
                tokens = max(tokens, share * 60 * settings.minutes / self.seconds_per_token)
            tokens = max(LEAST_EVALUATED_TOKENS, round(self.world.agree(tokens)[0]))
            state.evaluated_tokens = min(tokens, len(text.val))
        self.evaluated_all = state.evaluated_tokens == len(text.val)
        network = self.full_model()
        latest = -float(state.step)  # lower is better: the last weights are kept
        if not len(text.val):
            self.write(network, state.step)
            return [latest], {}
        if not self.has_evaluated:
            self.score(network, limit=1, window=self.window)  # warm up, so that timings are fair
            self.has_evaluated = True
        start = time.monotonic()
        score = self.score(network, state.evaluated_tokens, self.window)
        self.seconds_per_token = (time.monotonic() - start) / max(1, score.tokens)
        start = time.monotonic()
        self.skipped_sample = progress < 1 and settings.minutes is not None
        self.skipped_sample &= self.sample_seconds > SAMPLE_SHARE * (state.seconds - state.setup)
        if not self.skipped_sample:
            self.write(network, state.step, f": {score.bits_per_byte:.3f} bits per byte")
            self.samples += 1
            self.sample_seconds += time.monotonic() - start
        metrics = as_metrics(score)
        if self.forecast and 0 < progress < 1:
            if progress >= EARLY and state.whole_to_part is None:
                state.whole_to_part = self.whole_to_part(network, state.evaluated_tokens, score)
            metrics["forecast_bits_per_byte"] = self.correct_forecast(state, progress, score)
        return [latest if self.keeps_last else score.loss], metrics

    def whole_to_part(self, network: Model, tokens: int, part: Score) -> float:
        """How much higher the bits per byte of the whole validation text, or of a larger part, are
        than those of the part with this number of `tokens`, which has just been evaluated."""
        if self.evaluated_all:
            return 1.0
        more = min(CALIBRATION * tokens, len(self.job.text.val))
        larger = self.score(network, more, self.window)
        factor = larger.bits_per_byte / max(part.bits_per_byte, 1e-9)
        return factor if math.isfinite(factor) else 1.0

    def correct_forecast(self, state: State, progress: float, score: Score) -> float:
        """The final bits per byte, predicted again from those measured now and last time."""
        assert self.forecast and self.job.forecast
        bits, measured = self.forecast.bits_per_byte, score.bits_per_byte
        earlier = state.scores.get("val_bits_per_byte", 0.0)
        growth = state.step / max(1, state.step - state.evaluation_steps)
        before = state.step - state.evaluation_steps
        if self.decaying and before <= (state.decay_step or 0):  # windows have grown since then
            bits = state.scores.get("forecast_bits_per_byte", bits)
        elif 0 < earlier * measured < math.inf and growth > 1:
            slope = math.log(measured / earlier) / math.log(growth)
            whole = measured * (state.whole_to_part or 1.0)
            averaged = 1 / (1 - self.settings.average) if self.settings.average else 0.0
            share = averaged * progress / state.step
            bits = self.forecast.correct(progress, whole, score.loss, slope, share)
        run, planned = self.job.run, self.job.forecast
        known = run.facts()["forecast"]["corrected"] or planned.bits_per_byte
        if abs(bits / known - 1) > WRONG_FORECAST:
            run.update({**run.facts(), "forecast": asdict(replace(planned, corrected=bits))})
            text = f"forecast: {bits:.3f} bits per byte instead of {known:.3f}"
            self.notify(Note(f"{text}, from the first {progress:.0%} of the run"))
        return bits

    def full_model(self) -> Model:
        """The model; if it is sharded or has adapters, a whole copy."""
        if self.adapters:
            with self.adapters.merged():
                return snapshot(self.network)
        return snapshot(self.network, distributed.full_tensor) if self.sharded else self.network

    def write(self, network: Model, step: int, measured: str = "") -> None:
        """Generate a sample with the current weights, in the first process only."""
        if not self.world.first:
            return
        text = self.job.text
        writer, sample = LanguageModel(network, text.tokenizer), Sample(text.prompt)
        try:
            params = SamplingParams(tokens=SAMPLE_TOKENS, seed=self.settings.seed)
            list(writer.stream([sample], params, report=self.check_stop))
        except ModelError as error:  # the weights may recover
            sample.text = f" ({error})"
        lines = (text.prompt + sample.text).splitlines()
        quoted = "\n".join("> " + printable(line) for line in lines)
        run = self.job.run
        append(run, run.samples.name, f"## Step {step:,}{measured}\n\n{quoted}\n\n")
        self.notify(Wrote(step, text.prompt, sample.text))

    def score(
        self, network: Model | None = None, limit: int | None = None, window: int | None = None
    ) -> Score:
        """Score the validation text, or about `limit` tokens; `network` is from `full_model`."""
        settings, text = self.settings, self.job.text
        model, context = network or self.full_model(), window or settings.context
        assert context

        def score(ids: Store, limit: int | None) -> Score:
            what = (model, text.tokenizer, ids, context, limit, self.check_stop)
            return evaluate(*what, world=self.world)

        low = AUTOCAST_DTYPES.get(settings.dtype) if settings.device != "cpu" else None
        autocast = torch.autocast(settings.device, low, enabled=low is not None)
        with autocast, threads_for(settings.threads):  # training workers have only a share each
            if not (parts := text.validated_parts):
                return score(text.val, limit)
            sizes = [len(text.val[part.val]) for part in parts]
            limits = share_out(limit or len(text.val), sizes, [part.weight for part in parts])
            limited = zip(parts, limits, strict=True)
            scores = [score(text.val[part.val], max(1, most)) for part, most in limited]
            return weighted_mean(parts, scores)

    def snapshot(self) -> Callable[[Path], None]:
        tokenizer, base = self.job.text.tokenizer, self.job.frozen
        if self.adapters and base:
            low_rank = self.adapters.low_rank()
            return lambda folder: save_partial(self.network, base, {}, low_rank, folder, tokenizer)
        copy = snapshot(self.network, distributed.gathered_copy)
        return lambda folder: save_model(copy, folder, tokenizer)

    def saved_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters().values())

    def save_final(self, state: State) -> None:
        """Merge the adapters of the best checkpoint into a model that needs no other folder."""
        if self.adapters and self.world.first:
            low_rank, base, model = self.adapters.low_rank(), self.job.frozen, self.full_model()
            assert base

            def write(folder: Path) -> None:
                save_model(model, folder, self.job.text.tokenizer)
                save_adapter(model.config, low_rank, {}, folder / ADAPTER, str(base))

            save_final(self.job.run, state, write)

    def load_weights(self, folder: Path) -> None:
        if self.adapters:
            load_trained(self.network, self.adapters, folder)
            return
        saved = dict(load_model(folder).named_parameters())
        for name, parameter in self.network.named_parameters():
            distributed.copy_full_tensor(parameter, saved[name])


def as_metrics(score: Score) -> dict[str, float]:
    overall = {"val_loss": score.loss, "val_bits_per_byte": score.bits_per_byte}
    return overall | {BITS_OF_PART + name: bits for name, bits in score.bits_by_part.items()}
