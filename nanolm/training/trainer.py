"""The training loop: one story, top to bottom, whatever is learned.

    >>> Trainer(run, settings, task, checkpoint, notify).train(stop)

What is learned is a `Task`. Everything that the loop changes lives in `State`, the weights and the
optimizer. The three are saved together, and a batch is a pure function of its index, so a run that
is killed goes on from its last checkpoint as if nothing had happened.
"""

import json
import math
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanolm import files
from nanolm.choice import Choice
from nanolm.errors import Diverged, ModelError, OutOfMemory
from nanolm.report.page import write_report
from nanolm.runs import checkpoint
from nanolm.runs.folder import Run, append
from nanolm.training.distributed import ALONE, World, gathered_copy, wrap_ddp
from nanolm.training.ema import EMA
from nanolm.training.events import Event, Note, Notify, Preparing, Progressed, Wrote
from nanolm.training.interrupt import StopRequest
from nanolm.training.optim import Optimizer, load_tensors
from nanolm.training.schedule import DECAY, lr_factor
from nanolm.training.settings import Settings
from nanolm.training.step import Scale, Step, out_of_memory
from nanolm.training.task import State, Task, read_state

LOG_EVERY = 10  # steps
SAVE_SECONDS = 60.0  # a kill costs at most this much work, however long the steps are
PATIENCE = 10  # steps in a row without a finite gradient before going back,
RETURNS = 3  # so many times before giving up
MIN_STEPS = 20  # fewer teach nothing:
OVERTIME = 1.05  # times the budget, where they would not be done otherwise
LOOKING = 0.25  # of the time, at most, where the clock ends the run
RESERVED = 0.4  # of the time for steps, at most, before it is known what the end takes
AHEAD = 10  # steps that a GPU may be behind what it was told,
AHEAD_SECONDS = 0.25  # and for how long;
AHEAD_TOGETHER = 4  # where others have to be as far behind
COMPILED_FROM = 10  # the step; those before tell what there is to gain
STUCK, STILL = 0.2, 0.98  # so far into the run, the loss should be below so much of the first,
MOVING = 50  # after so many steps
GAIN = {"cpu": 0.1}  # of the time, perhaps; on a GPU our own kernels gain more


@dataclass(frozen=True)
class Launched:
    """A step that was told to the device, which may still be at it."""

    step: int
    tokens: int
    lr: float
    numbers: Tensor  # the norm of the gradient, the loss and what else is recorded
    done: torch.cuda.Event | None  # when they are there


class Trainer:
    """A task, its optimizer and its state."""

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
        """`spent` are seconds of the budget that are used up before a first step."""
        self.run, self.settings, self.task, self.notify = run, settings, task, notify
        self.world = world
        assert settings.lr
        self.lr = settings.lr
        workers = getattr(settings, "workers", None) or 1
        loss: Any = task.loss
        if world.joined:
            loss = task.sharded or wrap_ddp(task.model, task.loss)
        self.optimizer = Optimizer(
            task.parameters(),
            task.weight_decay,
            task.lr_scale,
            workers,
            task.muon_parameters(),
            world,
        )
        self.optimizer.prepare()  # what is left is for the batches
        how = (settings.dtype, task.tokens, task.save_memory, world)
        self.step = Step(loss, self.optimizer, *how, world.weight(settings.batch or 1))
        self.average = None
        if settings.average:
            self.average = EMA(task.parameters(), settings.average)
        self.launched: deque[Launched] = deque()
        self.ahead = AHEAD_TOGETHER if world.joined and self.step.device.type == "cuda" else 0
        self.looked = False  # at held-out data, by this process
        self.saver = ThreadPoolExecutor(1)
        self.saving: Future[None] | None = None
        self.state = State()
        if settings.minutes:
            left = max(0.0, 60 * settings.minutes - spent)
            self.state.reserve = min(task.seconds_after_training(), RESERVED * left)
        self.saved_step = -1
        if saved:
            self.take_up(saved)
            self.point("last", saved)  # it may have been killed before that
        self.state.seconds += spent
        self.state.setup += spent
        progress = self.progress()
        behind = int(min(1, progress) * task.evaluations + 1e-9)
        # Time may be gone before a first step, and a longer run is not as far as it was.
        self.state.evaluations = min(self.state.evaluations, behind) if saved else behind
        if progress < 1 - DECAY:
            self.state.decay_step = None
        if world.first:
            run.cut_back(self.state.lengths)

    def point(self, name: str, folder: Path) -> None:
        """Let the run's link of this name be to a checkpoint."""
        if self.world.first:
            checkpoint.point(self.run.path / name, folder)

    def take_up(self, folder: Path) -> None:
        """All but the weights, as it was saved in `folder`."""
        vars(self.state).update(vars(read_state(folder)))
        self.saved_step = self.state.step
        self.step.parts = self.state.parts
        load_tensors(folder / "optimizer.safetensors", self.load)

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer.load(tensors)
        for more in self.also_saved():
            more.load(tensors)

    def also_saved(self) -> list[Scale | EMA]:
        """What changes with each step besides the optimizer."""
        return [more for more in (self.step.scale, self.average) if more]

    def averaged(self) -> AbstractContextManager[None]:
        """The model as it is judged and saved, meanwhile."""
        return self.average.used() if self.average else nullcontext()

    def train(self, stop: StopRequest) -> str:
        """Train; why it ended: "steps", "minutes" (the budget), "enough", or "interrupted"."""
        state, task = self.state, self.task
        self.notify(task.start_event(self.run.path, state.step))
        last_save = self.clock = time.monotonic()
        self.last_log, self.speed = (state.tokens, state.seconds), 0
        task.model.train()
        if self.world.joined:
            self.step.fit(task.batch(0))
            state.parts = self.step.parts
        if task.evaluate_first and state.best is None and state.step == 0:
            self.save()
            self.finish_saving()
            self.evaluate(0.0)
        undecided, taken = task.compile_seconds is not None, list[float]()
        looking = 0.0  # seconds that evaluating and saving took
        while True:
            if undecided and state.step >= COMPILED_FROM:
                # Not the mean: much is made ready in the first one.
                self.decide_on_compiling(median(taken or [state.seconds / state.step]))
                undecided = False
            long_ago = time.monotonic() - last_save > SAVE_SECONDS
            progress, stopping, save = self.world.agree(self.progress(), stop.requested, long_ago)
            due = progress >= (state.evaluations + 1) / task.evaluations
            if self.settings.minutes and progress < 1 and not self.world.joined:
                due = due and looking <= LOOKING * (state.seconds - state.setup)
            save = save or due or stopping
            if self.settings.save_every and state.step % self.settings.save_every == 0:
                save = save or state.step > 0
            if state.decay_step is None and progress >= 1 - DECAY:
                state.decay_step, save = state.step, True  # the place to extend the run from
            begin, returns = time.monotonic(), state.returns
            if save:
                self.save()
                last_save = time.monotonic()
            if state.returns > returns:
                continue
            if stopping and progress < 1:
                self.finish_saving()
                return "interrupted"
            if due:
                self.finish_saving()  # what is found is about a checkpoint that is there
                self.evaluate(progress)
                # The first time is not like the others: much is made ready in it.
                state.reserve = task.seconds_after_training()
                if self.looked:
                    state.reserve += time.monotonic() - begin
                    looking += time.monotonic() - begin
                self.looked = True
                if task.patience is not None and state.beyond >= task.patience:
                    return "enough"
            if progress >= 1:
                self.finish_saving()
                all_steps = self.settings.steps and state.step >= self.settings.steps
                return "steps" if all_steps else "minutes"

            lr, begin = self.lr * lr_factor(progress), time.monotonic()
            numbers = self.train_step(lr)
            if undecided:
                taken.append(time.monotonic() - begin)
            state.step += 1
            self.launched.append(told(state, lr, numbers))
            self.look_back(self.ahead)

    def train_step(self, lr: float) -> Tensor:
        """Forward, backward, update; the gradient's norm, the loss and what else there is."""
        state, settings = self.state, self.settings
        batch = self.task.batch(state.step + state.passed_over)
        if settings.dropout:
            seed = settings.seed * 1_000_003 + state.step + (self.world.rank << 40)
            torch.manual_seed(seed % (1 << 63))
        try:
            numbers = self.step(batch, lr)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if self.world.joined:
                raise OutOfMemory(
                    f"{len(batch[0]):,} sequences of --context {settings.context} do not fit into "
                    "the memory of each process; try more processes, --shard, or a smaller --batch"
                ) from None
            raise OutOfMemory(
                f"not even one sequence of --context {settings.context} fits into memory; "
                f"try --context {max(1, (settings.context or 1) // 2)}, or a smaller model"
            ) from None
        if self.step.parts != state.parts:
            state.parts = self.step.parts
            rows = -(-len(batch[0]) // state.parts)
            self.notify(Note(f"not enough memory for a whole batch: {rows:,} sequences at a time"))
        state.tokens += self.task.tokens(batch)
        if self.average:
            self.average.update(state.step + 1)
        return numbers

    def look_back(self, ahead: int) -> None:
        """Take note of the steps that were launched, but for the last `ahead` of them."""
        state, before = self.state, self.state.seconds
        count = 0
        while len(self.launched) > ahead:
            found, count = self.launched.popleft(), count + 1
            if found.done:
                found.done.synchronize()
            norm, *values = found.numbers.tolist()
            self.tick()
            if all(map(math.isfinite, (norm, *values))):
                for name, value in zip(self.step.names, values, strict=True):
                    for sums in (state.sums, state.evaluation_sums):
                        sums[name] = sums.get(name, 0.0) + value
                state.summed, state.bad_steps = state.summed + 1, 0
                state.evaluation_steps += 1
            else:
                state.skipped, state.bad_steps = state.skipped + 1, state.bad_steps + 1
                if not self.step.scale:  # which is found by overflows
                    self.notify(Note(f"step {found.step:,} is left out: no finite gradient"))
                if state.bad_steps >= PATIENCE:
                    return self.go_back(found.step)
            if found.step % LOG_EVERY == 0:
                seconds = state.seconds - self.last_log[1]
                if seconds >= AHEAD_SECONDS or not self.speed:  # shorter times tell of clocks
                    self.speed = round((found.tokens - self.last_log[0]) / max(seconds, 1e-9))
                    self.last_log = (found.tokens, state.seconds)
                means = {name: value / state.summed for name, value in state.sums.items()}
                state.train_loss = means.get("loss", state.train_loss)
                means.setdefault("loss", math.nan)
                if state.first_loss is None:
                    state.first_loss = state.train_loss
                means |= {"lr": found.lr, "grad_norm": norm, "tokens_per_second": self.speed}
                if state.skipped:
                    means["skipped"] = state.skipped
                state.sums, state.summed, state.skipped = {}, 0, 0
                self.record(found.step, found.tokens, means)
            if found.done and not self.world.joined:
                each = (state.seconds - before) / count
                self.ahead = max(1, min(AHEAD, int(AHEAD_SECONDS / max(each, 1e-9))))

    def go_back(self, step: int) -> None:
        """After too many steps in a row without a finite gradient, up to `step`: to the last
        checkpoint before them, and on from there with the data behind them."""
        state = self.state
        self.launched.clear()
        self.finish_saving()
        why = f"no finite gradient for {PATIENCE} steps, up to step {step:,}; they were left out"
        if state.returns >= RETURNS:
            raise Diverged(
                f"{why}, and going back {RETURNS} times did not help. Start again with a smaller "
                f"--lr (it was {self.lr:g})."
            )
        kept = {"seconds": state.seconds, "parts": state.parts, "told": state.told}
        kept |= {"returns": state.returns + 1, "bad_steps": 0}
        next_batch = state.step + state.passed_over
        self.world.barrier()  # for what is being saved
        good = self.last_good()
        if good:  # else the weights are still those from before: nothing bad was learned
            self.task.load_checkpoint(good)
            self.take_up(good)
            self.world.barrier()  # until all have read it
            if self.world.first:
                checkpoint.discard_after(self.run.checkpoints, good)
                self.run.cut_back(state.lengths)
            self.point("last", good)
            if state.best:
                self.point("best", self.checkpoint_folder(state.best_step))
            why += f"; going back to step {state.step:,}"
        vars(state).update(kept, passed_over=next_batch - state.step)
        self.step.parts = state.parts
        self.last_log = (state.tokens, state.seconds)
        self.notify(Note(f"{why}, and on with what comes after them"))

    def last_good(self) -> Path | None:
        """The newest whole checkpoint that was not saved between steps that were left out."""
        for folder in reversed(checkpoint.list_checkpoints(self.run.checkpoints)):
            try:
                files.verify(folder)
                if not read_state(folder).bad_steps:
                    return folder
            except ModelError as error:
                self.notify(Note(str(error)))
        return None

    def decide_on_compiling(self, each: float) -> None:
        """Compile what is to be compiled; what was not asked for, only where it pays back within
        the run, whose steps take `each` seconds, and stays only where it is faster. What is
        decided is saved."""
        self.look_back(0)
        state, cost = self.state, self.task.compile_seconds
        before = state.seconds
        assert cost is not None
        asked = getattr(self.settings, "compile", None)
        wanted = bool(asked)
        if asked is None and self.settings.device in GAIN and not self.world.joined:
            left = math.inf
            if self.settings.steps:
                left = each * (self.settings.steps - state.step)
            if self.settings.minutes:
                left = min(left, 60 * self.settings.minutes - state.seconds)
            gain = GAIN[self.settings.device] * left
            wanted = gain > cost
            reason = f"might save {gain:.0f} s of {left:.0f}, takes about {cost:.0f}"
            self.notify(Choice("compile", "let us see" if wanted else "no", reason))
        if wanted:
            compiled = self.try_compiled()
            if asked is None and compiled is not None:
                self.task.compile(False)
                plain = self.seconds_of_gradients()
                wanted = compiled < plain
                self.task.compile(wanted)
                times = f"{1000 * compiled:.1f} ms a step, {1000 * plain:.1f} without"
                self.notify(Choice("compile", "yes" if wanted else "no", times))
        if asked is None:
            self.settings = replace(self.settings, compile=wanted)  # type: ignore[call-arg]
            if self.world.first:
                self.run.configure(self.settings.to_dict())
        self.step.forget_captured()
        self.tick()
        self.leave_out(before)

    def try_compiled(self) -> float | None:
        """Seconds of a compiled step; None if that did not work, and nothing is compiled now."""
        self.task.compile(True)
        try:
            return self.seconds_of_gradients()
        except Exception as error:  # a compiler has many ways to fail
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise
            self.task.compile(False)
            first = str(error).strip().partition("\n")[0][:200]
            self.notify(Note(f"torch.compile did not work ({first}); going on without it"))
            return None

    def seconds_of_gradients(self) -> float:
        """Of the way forward and back, once more after what a first time takes."""
        taken = []
        for _ in range(4):
            start = time.perf_counter()
            self.step.gradients(self.task.batch(0)).tolist()
            taken.append(time.perf_counter() - start)
        self.optimizer.zero_grad()
        return sorted(taken[1:])[1]

    def progress(self) -> float:
        """How much of the steps, or of the time that there is for them, is used: 0 to 1."""
        used, state = [], self.state
        if self.settings.steps:
            used.append(state.step / self.settings.steps)
        if self.settings.minutes:
            end = 60 * self.settings.minutes - state.reserve
            share = (state.seconds - state.setup) / max(end - state.setup, 1e-3)
            if state.step < MIN_STEPS and state.seconds < OVERTIME * end:
                share = min(share, state.step / MIN_STEPS)
            used.append(share)
        return max(used)

    def tick(self) -> None:
        """Add the time since the last call to what the run has cost."""
        now = time.monotonic()
        self.state.seconds += now - self.clock
        self.clock = now

    def record(self, step: int, tokens: int, values: dict[str, float]) -> None:
        """Write a line of metrics, and tell."""
        self.tick()
        state = self.state
        epoch = self.task.epoch(step + state.passed_over)
        line = {
            "step": step,
            **({} if epoch is None else {"epoch": round(epoch, 4)}),
            "tokens": tokens,
            "seconds": round(state.seconds, 3),
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
        }
        if self.world.first:
            append(self.run.metrics, json.dumps(line) + "\n")
        progress = self.progress()
        taken = state.seconds - state.setup
        left = taken / progress * max(0, 1 - progress) if progress else math.inf
        expected = self.task.expected(min(1, progress)) if "val_loss" in values else None
        self.notify(Progressed(line, min(1, progress), left, expected))

    def evaluate(self, progress: float) -> None:
        """Look at what was held out, and keep the best."""
        state, task = self.state, self.task
        before = state.seconds  # when the last step was done
        with self.averaged():
            found, state.scores = task.evaluate(state, progress)
        state.evaluations = int(progress * task.evaluations + 1e-9)
        loss = state.scores.get("val_loss", math.nan)  # nothing may be held out
        state.lowest_loss = min(loss, loss if state.lowest_loss is None else state.lowest_loss)
        if state.best is None or found < state.best:
            state.best, state.best_step, state.beyond = found, state.step, 0
            self.point("best", self.checkpoint_folder(state.step))
        elif loss > 1.05 * state.lowest_loss:
            state.beyond += 1
        # The running mean over all steps since the last evaluation, to compare with `val_*`.
        means = {
            f"train_{name}": value / state.evaluation_steps
            for name, value in state.evaluation_sums.items()
        }
        state.evaluation_sums, state.evaluation_steps = {}, 0
        self.record(state.step, state.tokens, means | state.scores)
        self.leave_out(before)
        self.warn(progress)

    def leave_out(self, before: float) -> None:
        """Let the time since then not count as time to learn in, when speed is told."""
        tokens, since = self.last_log
        self.last_log = (tokens, since + self.state.seconds - before)

    def warn(self, progress: float) -> None:
        """Say what does not look right, once."""
        state = self.state
        found = {}
        if state.beyond:
            found["overfitting"] = (
                f"validation loss has been rising since step {state.best_step:,}: "
                f"{self.task.why_validation_rises()}"
            )
        elif self.task.keeps_last and state.scores["val_loss"] > 1.1 * (state.lowest_loss or 0):
            found["memorizing"] = (
                "validation loss is rising: the model is memorizing the text, and its last weights "
                "are kept; more text would help"
            )
        first, now = state.first_loss, state.train_loss
        moved = state.step >= MOVING and progress >= STUCK
        if moved and first and now and now > STILL * first:
            found["stuck"] = (
                f"the loss does not move: {first:.3f} at first, {now:.3f} now; try a higher --lr, "
                "or look at the text with `nanolm data check`"
            )
        for name, text in found.items():
            if name not in state.told:
                state.told.append(name)
                self.notify(Note(text))

    def save(self) -> None:
        """Copy out what a checkpoint of this step needs, unless it is there already; another
        thread writes it."""
        self.look_back(0)
        if self.saved_step == self.state.step:
            return
        self.finish_saving()
        if not self.state.bad_steps:
            self.state.good_step = self.state.step
        self.saved_step = self.state.step
        if not (self.world.first or self.task.sharded):
            return
        self.state.lengths = self.run.lengths()
        state = json.dumps(asdict(self.state), indent=1) + "\n"
        with self.averaged():
            write_model = self.task.snapshot()
        tensors = self.optimizer.tensors()
        for more in self.also_saved():
            tensors |= more.tensors()
        tensors = {name: gathered_copy(tensor) for name, tensor in tensors.items()}
        size = self.task.saved_bytes() + sum(tensor.nbytes for tensor in tensors.values())
        folder = self.checkpoint_folder(self.state.step)
        kept = (self.state.best_step, self.state.decay_step, self.state.good_step)
        names = {self.checkpoint_folder(step).name for step in kept if step is not None}

        def write(place: Path) -> None:
            write_model(place)
            on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
            save_file(on_cpu, place / "optimizer.safetensors")
            (place / "state.json").write_text(state, encoding="utf-8")

        on_gpu = self.step.device.type == "cuda"

        def commit() -> None:
            # On a stream of its own: copying does not wait for what is being learned. There are
            # few, given out in turn; of this priority, it is none that an update is captured on.
            with torch.cuda.stream(torch.cuda.Stream(priority=-1)) if on_gpu else nullcontext():
                files.commit(self.run.checkpoints, folder.name, write, size)
            checkpoint.point(self.run.path / "last", folder)
            checkpoint.prune(self.run.checkpoints, names)

        if on_gpu:
            torch.cuda.synchronize()  # the copies are made
        if self.world.first:
            self.saving = self.saver.submit(commit)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is whole on the disk, or say why it is not."""
        if self.saving:
            self.saving.result()
            self.saving = None

    def checkpoint_folder(self, step: int) -> Path:
        return self.run.checkpoints / f"step-{step:08}"

    def load_best(self) -> None:
        """Let the model be the best that was seen; where that is damaged, the last one is."""
        self.world.barrier()  # for what was being saved
        if self.state.best_step == self.state.step:
            if self.average:
                self.average.swap()
            return
        folder = self.checkpoint_folder(self.state.best_step)
        try:
            files.verify(folder)
            self.task.load_weights(folder)
        except ModelError as error:
            self.notify(Note(f"{error}; taking the last checkpoint as the best"))
            self.state.best_step = self.state.step
            self.point("best", self.checkpoint_folder(self.state.step))


def told(state: State, lr: float, numbers: Tensor) -> Launched:
    """The step that was just launched; its numbers are on their way to where they can be read."""
    done = None
    if numbers.is_cuda:
        here = torch.empty(numbers.shape, pin_memory=True)
        numbers = here.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    return Launched(state.step, state.tokens, lr, numbers, done)


def end(run: Run, result: dict[str, Any], notify: Notify) -> None:
    """Write down what came of it; the run is whole without the report, whatever happens there."""
    run.update({**run.facts(), "result": result})
    try:
        write_report(run)
    except Exception as error:
        notify(Note(f"there is no report ({error!r}); try `nanolm report {run.path}`"))


def also_to_log(run: Run, notify: Notify) -> Notify:
    """`notify`, and a line of log.txt for everything but the metrics, which have their own file."""

    def both(event: Event) -> None:
        if not isinstance(event, Preparing | Progressed | Wrote):
            append(run.log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {event}\n")
        notify(event)

    return both
