"""The training loop, the same for every task.

    >>> Trainer(run, settings, task, saved, notify).train(stop)

A `Task` defines what is trained: model, loss, batches and evaluation. All that changes from step to
step is saved together: the weights, the optimizer state, the EMA and `State`. A batch is a pure
function of its index, so a run that is killed continues from its last checkpoint as if nothing had
happened (bit for bit, unless the budget is in minutes).

The other modules: `step.py` computes forward, backward and update; `budget.py` tracks progress,
`metrics_log.py` logs, `checkpointer.py` saves and loads, `guard.py` handles non-finite gradients
and running out of memory, `compile_choice.py` decides whether to use torch.compile.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanolm.runs.folder import Run
from nanolm.training.budget import Budget
from nanolm.training.checkpointer import Checkpointer
from nanolm.training.compile_choice import CompileChoice
from nanolm.training.distributed import ALONE, World, wrap_ddp
from nanolm.training.ema import EMA, averaged
from nanolm.training.events import Notify
from nanolm.training.guard import Guard
from nanolm.training.interrupt import StopRequest
from nanolm.training.metrics_log import MetricsLog
from nanolm.training.optim import Optimizers
from nanolm.training.schedule import lr_factor
from nanolm.training.settings import Settings
from nanolm.training.state import State
from nanolm.training.step import Step
from nanolm.training.task import Task

OVERFITTING = 1.05  # validation loss / lowest validation loss


class Trainer:
    """A task, its optimizers and its state."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        task: Task,
        saved: Path | None,
        notify: Notify,
        spent: float = 0.0,
        world: World = ALONE,
    ) -> None:
        """`saved` is the checkpoint to resume from, whose weights the task has loaded; `spent` is
        the number of seconds of the budget used before the first step."""
        self.run, self.settings, self.task = run, settings, task
        self.notify, self.world = notify, world
        loss: Any = task.loss
        if world.joined:
            loss = task.sharded or wrap_ddp(task.model, task.loss)
        optimizers = Optimizers(
            task.parameters(),
            getattr(settings, "optimizer", None) or "adamw",
            task.weight_decay,
            task.muon_parameters(),
            task.lr_scale,
            workers=getattr(settings, "workers", None) or 1,
        )
        optimizers.init_state()  # now, so that all remaining memory is for batches
        how = (settings.dtype, task.tokens, task.save_memory, world)
        self.step = Step(loss, optimizers, *how, task.loss_weight)
        self.ema = EMA(task.parameters(), settings.average) if settings.average else None

        state = self.state = State()
        self.budget = Budget(settings, state)
        self.metrics = MetricsLog(run, task, self.budget, notify, world)
        self.checkpointer = Checkpointer(run, task, state, self.step, self.ema, notify)
        self.guard = Guard(settings, state, self.step, self.checkpointer, notify)
        self.compile_choice = CompileChoice(run, settings, task, self.step, notify)

        self.budget.reserve_for_end(task.seconds_after_training(), spent)
        if saved:
            self.checkpointer.load_state(saved)
            self.checkpointer.link("last", saved)  # the process may have died before updating it
            self.step.grad_accum_steps = state.grad_accum_steps
        progress = self.budget.spend(spent)
        # Preparation may have used much of the time, and extending a run lowers its progress.
        due = int(min(1, progress) * task.evaluations + 1e-9)
        state.evaluations = min(state.evaluations, due) if saved else due
        if world.first:
            run.cut_back(state.lengths)

    def train(self, stop: StopRequest) -> str:
        """Train; returns why it ended: "steps", "minutes" (budget), "enough" or "interrupted"."""
        state, task, budget, checkpointer = self.state, self.task, self.budget, self.checkpointer
        self.set_up()
        while True:
            if self.compile_choice.is_due(state.step):
                self.choose_compile()

            decaying = state.decay_step is not None and state.step > state.decay_step
            if decaying != task.decaying and task.lengthens:
                if self.drain_pending_steps():
                    continue  # after a rollback
                task.decaying = decaying
                self.step.discard_graphs()

            # Keep all processes in lockstep.
            progress, stopping, save = self.world.agree(
                budget.progress(), stop.requested, checkpointer.is_overdue()
            )
            evaluate = self.evaluation_is_due(progress)
            save = save or evaluate or stopping or self.save_is_due()
            if budget.decay_begins(progress):
                save = True  # a longer run resumes from here, before the decay

            begin = time.monotonic()
            if save:
                if self.drain_pending_steps():
                    continue  # after a rollback
                checkpointer.save()
            if stopping and progress < 1:
                checkpointer.finish()
                return "interrupted"
            if evaluate:
                self.evaluate(progress)
                budget.count_evaluation(time.monotonic() - begin, task.seconds_after_training())
                if task.patience is not None and state.evals_without_gain >= task.patience:
                    return "enough"
            if progress >= 1:
                checkpointer.finish()
                return budget.used_up_by()

            assert self.settings.lr
            lr = self.settings.lr * lr_factor(progress)  # warmup, constant, linear decay
            begin = time.monotonic()
            metrics = self.train_step(lr)
            if self.compile_choice.open:
                self.compile_choice.step_seconds.append(time.monotonic() - begin)
            state.step += 1
            self.metrics.record_launch(lr, self.step.names, metrics)
            self.drain_pending_steps(keep=self.metrics.max_pending)

    def set_up(self) -> None:
        """Set up before the first step."""
        state, task = self.state, self.task
        self.notify(task.start_event(self.run.path, state.step))
        self.budget.start_clock()
        self.metrics.measure_speed_from_here()
        task.model.train()
        if self.world.joined:
            self.step.fit_to_memory(task.batch(0))
            state.grad_accum_steps = self.step.grad_accum_steps
        if task.evaluate_first and state.best is None and state.step == 0:
            self.checkpointer.save()
            self.evaluate(0.0)

    def train_step(self, lr: float) -> Tensor:
        """One training step on the next batch. Returns the gradient norm, the loss and other
        metrics, which a GPU may still be computing."""
        state, settings = self.state, self.settings
        batch = self.task.batch(state.step + state.data_offset)
        if settings.dropout:
            seed = settings.seed * 1_000_003 + state.step + (self.world.rank << 40)
            torch.manual_seed(seed % (1 << 63))
        with self.guard.out_of_memory(batch):
            # Forward and backward of each micro-batch, accumulating gradients; clip; optimizer
            # step, skipped if the loss or the gradient is not finite.
            metrics = self.step(batch, lr)
        state.tokens += self.task.tokens(batch)
        if self.ema:
            self.ema.update(state.step + 1)
        return metrics

    def drain_pending_steps(self, keep: int = 0) -> bool:
        """Read back and log the metrics of launched steps, leaving the last `keep` pending. Returns
        whether it rolled back."""
        for step in self.metrics.read_back(keep):
            if step.is_finite():
                self.metrics.add(step)
                self.state.bad_steps = 0
            elif self.guard.skip(step.step):
                self.metrics.pending.clear()
                self.guard.rollback(step.step)
                self.metrics.measure_speed_from_here()
                return True
            self.metrics.log(step)
        return False

    def evaluation_is_due(self, progress: float) -> bool:
        due = bool(progress >= (self.state.evaluations + 1) / self.task.evaluations)
        return due and (self.world.joined or self.budget.allows_evaluation(progress))

    def save_is_due(self) -> bool:
        every, step = self.settings.save_every, self.state.step
        return every is not None and step > 0 and step % every == 0

    def evaluate(self, progress: float) -> None:
        """Evaluate the model (its EMA, if any) on validation data, and track the best."""
        state, task = self.state, self.task
        before = state.seconds  # training time so far
        with averaged(self.ema):
            score, state.scores = task.evaluate(state, progress)
        self.checkpointer.finish()  # what was evaluated must be on disk
        state.evaluations = int(progress * task.evaluations + 1e-9)
        loss = state.scores.get("val_loss", math.nan)  # there may be no validation data
        state.lowest_loss = min(loss, loss if state.lowest_loss is None else state.lowest_loss)
        if state.best is None or score < state.best:
            state.best, state.best_step, state.evals_without_gain = score, state.step, 0
            self.checkpointer.link("best", self.checkpointer.folder(state.step))
        elif loss > OVERFITTING * state.lowest_loss:
            state.evals_without_gain += 1
        self.metrics.log_evaluation()
        self.metrics.exclude_since(before)
        self.guard.warn(task, progress)

    def choose_compile(self) -> None:
        """Decide whether to compile, from the timings of the first steps."""
        self.drain_pending_steps()
        before = self.state.seconds
        self.compile_choice.decide(self.budget)
        self.budget.tick()
        self.metrics.exclude_since(before)
