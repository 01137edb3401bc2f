"""What to do when training goes wrong: skipped steps, rollback, out of memory, warnings.

A step without a finite gradient changes nothing (see `Step`). After too many of them in a row, the
run rolls back to the last good checkpoint and continues with the batches behind them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from nanolm.errors import Diverged, OutOfMemory
from nanolm.training.checkpointer import Checkpointer
from nanolm.training.distributed import World
from nanolm.training.events import Note, Notify
from nanolm.training.settings import Settings
from nanolm.training.state import State
from nanolm.training.step import Step, out_of_memory
from nanolm.training.task import Task

MAX_BAD_STEPS = 10  # in a row before rolling back,
MAX_ROLLBACKS = 3  # so many times before giving up
STUCK_PROGRESS, STUCK_STEPS = 0.2, 50  # so far into the run, the training loss should be below
STUCK_RATIO = 0.98  # of the first


class Guard:
    """Keeps a run alive, or ends it with an explanation."""

    def __init__(
        self,
        settings: Settings,
        state: State,
        step: Step,
        checkpointer: Checkpointer,
        notify: Notify,
        world: World,
    ) -> None:
        self.settings, self.state, self.step = settings, state, step
        self.checkpointer, self.notify, self.world = checkpointer, notify, world

    @contextmanager
    def out_of_memory(self, batch: tuple[Tensor, ...]) -> Iterator[None]:
        """Around a step, which splits a batch that does not fit: that is reported and kept; where
        nothing fits, say what to change."""
        state, context = self.state, self.settings.context
        try:
            yield
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if self.world.joined:
                raise OutOfMemory(
                    f"{len(batch[0]):,} sequences of --context {context} do not fit into "
                    "the memory of each process; try more processes, --shard, or a smaller --batch"
                ) from None
            raise OutOfMemory(
                f"not even one sequence of --context {context} fits into memory; "
                f"try --context {max(1, (context or 1) // 2)}, or a smaller model"
            ) from None
        if self.step.grad_accum_steps != state.grad_accum_steps:
            state.grad_accum_steps = self.step.grad_accum_steps
            rows = -(-len(batch[0]) // state.grad_accum_steps)
            self.notify(Note(f"not enough memory for a whole batch: {rows:,} sequences at a time"))

    def skip(self, step: int) -> bool:
        """Count a step without a finite gradient; whether these are too many in a row."""
        self.state.skipped += 1
        self.state.bad_steps += 1
        if not self.step.scale:  # which is found by overflows
            self.notify(Note(f"step {step:,} is left out: no finite gradient"))
        return self.state.bad_steps >= MAX_BAD_STEPS

    def rollback(self, step: int) -> None:
        """After too many bad steps in a row, up to `step`: to the last checkpoint before them, and
        on from there with the batches behind them."""
        state = self.state
        self.checkpointer.finish()
        why = (
            f"no finite gradient for {MAX_BAD_STEPS} steps, up to step {step:,}; they were left out"
        )
        if state.rollbacks >= MAX_ROLLBACKS:
            raise Diverged(
                f"{why}, and going back {MAX_ROLLBACKS} times did not help. Start again with a "
                f"smaller --lr (it was {self.settings.lr:g})."
            )
        kept = {"seconds": state.seconds, "warnings_shown": state.warnings_shown}
        kept |= {"grad_accum_steps": state.grad_accum_steps, "rollbacks": state.rollbacks + 1}
        next_batch = state.step + state.data_offset
        self.world.barrier()  # until what is being saved is there
        good = self.checkpointer.last_good()
        if good:  # else the weights are still those from before: nothing bad was learned
            self.checkpointer.rewind(good)
            why += f"; going back to step {state.step:,}"
        vars(state).update(kept, bad_steps=0, data_offset=next_batch - state.step)
        self.step.grad_accum_steps = state.grad_accum_steps
        self.notify(Note(f"{why}, and on with what comes after them"))

    def warn(self, task: Task, progress: float) -> None:
        """Say what does not look right, once."""
        state = self.state
        warnings = {}
        if state.evals_without_gain:
            warnings["overfitting"] = (
                f"validation loss has been rising since step {state.best_step:,}: "
                f"{task.why_validation_rises()}"
            )
        elif task.keeps_last and state.scores["val_loss"] > 1.1 * (state.lowest_loss or 0):
            warnings["memorizing"] = (
                "validation loss is rising: the model is memorizing the text, and its last weights "
                "are kept; more text would help"
            )
        first, now = state.first_loss, state.train_loss
        late = state.step >= STUCK_STEPS and progress >= STUCK_PROGRESS
        if late and first and now and now > STUCK_RATIO * first:
            warnings["stuck"] = (
                f"the loss does not move: {first:.3f} at first, {now:.3f} now; try a higher --lr, "
                "or look at the text with `nanolm data check`"
            )
        for name, text in warnings.items():
            if name not in state.warnings_shown:
                state.warnings_shown.append(name)
                self.notify(Note(text))
