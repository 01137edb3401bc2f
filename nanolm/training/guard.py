"""Handles training problems: skipped steps, rollback, out of memory, warnings.

A step with a non-finite gradient changes nothing (see `Step`). After too many in a row, the run
rolls back to the last good checkpoint and continues with the batches that follow.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from nanolm.errors import Diverged, OutOfMemory
from nanolm.formats import counted
from nanolm.training.checkpointer import Checkpointer
from nanolm.training.events import Note, Notify
from nanolm.training.settings import Settings
from nanolm.training.state import State
from nanolm.training.step import Step, out_of_memory
from nanolm.training.task import Task

MAX_BAD_STEPS = 10  # in a row before a rollback
MAX_ROLLBACKS = 3  # before giving up
STUCK_PROGRESS, STUCK_STEPS = 0.2, 50  # after both, the training loss should be below
STUCK_RATIO = 0.98  # times its first value


@dataclass
class Guard:
    """Keeps a run alive, or ends it with an explanation."""

    settings: Settings
    state: State
    step: Step
    checkpointer: Checkpointer
    notify: Notify

    @contextmanager
    def out_of_memory(self, batch: tuple[Tensor, ...]) -> Iterator[None]:
        """Wraps a step, which splits a batch that does not fit. If a single sequence does not fit,
        the error says what to change."""
        state, context = self.state, self.settings.context
        try:
            yield
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            rows, hint = 1, f"--context {max(1, (context or 1) // 2)}, or a smaller model"
            if self.step.world.joined:
                shard = "--shard, " if hasattr(self.settings, "shard") else ""
                rows, hint = len(batch[0]), f"more processes, {shard}or a smaller --batch"
            tokens = f" of {context:,} tokens" if context else ""
            problem = f"out of memory with {counted(rows, 'sequence')}{tokens}"
            raise OutOfMemory(f"{problem}; try {hint}") from None
        if self.step.grad_accum_steps != state.grad_accum_steps:
            state.grad_accum_steps = self.step.grad_accum_steps
            rows = -(-len(batch[0]) // state.grad_accum_steps)
            self.notify(
                Note(f"not enough memory for a whole batch: using {rows:,} sequences at a time")
            )

    def skip(self, step: int) -> bool:
        """Count a step with a non-finite gradient; returns whether there are too many in a row."""
        self.state.skipped += 1
        self.state.bad_steps += 1
        if not self.step.scale:  # loss scaling overflows on purpose
            self.notify(Note(f"step {step:,} skipped: non-finite gradient"))
        return self.state.bad_steps >= MAX_BAD_STEPS

    def rollback(self, step: int) -> None:
        """After too many bad steps in a row, up to `step`: restore the last good checkpoint."""
        state = self.state
        self.checkpointer.finish()
        why = f"{MAX_BAD_STEPS} steps in a row skipped, up to step {step:,}: non-finite gradients"
        if state.rollbacks >= MAX_ROLLBACKS:
            why += f"; {MAX_ROLLBACKS} rollbacks did not help"
            raise Diverged(f"{why}. Start again with a smaller --lr than {self.settings.lr:g}.")
        kept = {"seconds": state.seconds, "warnings_shown": state.warnings_shown}
        kept |= {"grad_accum_steps": state.grad_accum_steps, "rollbacks": state.rollbacks + 1}
        next_batch = state.step + state.data_offset
        self.step.world.barrier()  # until the checkpoint is on disk
        good, action = self.checkpointer.last_good(), "continuing with the next batches"
        if good:  # otherwise, keep the weights: skipped steps did not change them
            self.checkpointer.rewind(good)
            action = f"rolling back to step {state.step:,} and {action}"
        vars(state).update(kept, bad_steps=0, data_offset=next_batch - state.step)
        self.step.grad_accum_steps = state.grad_accum_steps
        self.notify(Note(f"{why}; {action}"))

    def warn(self, task: Task, progress: float) -> None:
        """Warn about each problem once."""
        state = self.state
        warnings = {}
        if state.evals_without_gain:
            since = f"validation loss has been rising since step {state.best_step:,}"
            warnings["overfitting"] = f"{since}: {task.why_validation_rises()}"
        elif task.keeps_last and state.scores["val_loss"] > 1.1 * (state.lowest_loss or 0):
            reason = "the model is memorizing the text, and the last weights are kept"
            warnings["memorizing"] = f"validation loss is rising: {reason}. More text would help"
        first, now = state.first_loss, state.train_loss
        late = state.step >= STUCK_STEPS and progress >= STUCK_PROGRESS
        if late and first and now and now > STUCK_RATIO * first:
            cure = "try a higher --lr, or inspect the text with `nanolm data check`"
            warnings["stuck"] = f"the loss is not falling ({first:.3f}, now {now:.3f}); {cure}"
        for name in [name for name in warnings if name not in state.warnings_shown]:
            state.warnings_shown.append(name)
            self.notify(Note(warnings[name]))
