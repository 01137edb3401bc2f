"""Checkpoints of a run: saved in the background, pruned, with links to the best and the last."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanolm import files
from nanolm.errors import ModelError
from nanolm.runs import checkpoint
from nanolm.runs.folder import CHECKPOINTS, Run
from nanolm.training.distributed import gathered_copy
from nanolm.training.ema import EMA, averaged
from nanolm.training.events import Note, Notify
from nanolm.training.state import State, read_state
from nanolm.training.step import Step
from nanolm.training.task import Task

FINAL = "final"  # the folder of the finished model, next to the checkpoints
SAVE_SECONDS = 60.0  # the most work that a kill can cost, for any step time


class Checkpointer:
    """Saves weights, optimizer state, loss scale, EMA and `State` together, and loads them."""

    def __init__(
        self, run: Run, task: Task, state: State, step: Step, ema: EMA | None, notify: Notify
    ) -> None:
        self.run, self.task, self.state, self.ema = run, task, state, ema
        self.notify, self.world = notify, step.world
        self.on_gpu = step.device.type == "cuda"
        self.with_tensors = [part for part in (step.optimizers, step.scale, ema) if part]
        self.saved_step = -1
        self.last_save = time.monotonic()
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future[list[str]] | None = None

    def is_overdue(self) -> bool:
        return time.monotonic() - self.last_save > SAVE_SECONDS

    def folder(self, step: int) -> Path:
        return self.run.checkpoints / f"step-{step:08}"

    def link(self, name: str, folder: Path) -> None:
        if self.world.first:
            # From one path, since the run may be moved meanwhile.
            target = Path(CHECKPOINTS, folder.name)
            self.run.retry_if_moved(lambda path: checkpoint.point(path / name, path / target))

    def load_state(self, folder: Path) -> None:
        """Load everything but the weights from `folder`."""
        vars(self.state).update(vars(read_state(folder)))
        self.saved_step = self.state.step
        file = folder / "optimizer.safetensors"
        tensors = load_file(file)
        try:
            for part in self.with_tensors:
                part.load_state_tensors(tensors)
        except KeyError as error:
            raise ModelError(f"{file}: {error} is missing") from None

    def save(self) -> None:
        """Copy the state of this step; a background thread writes the checkpoint."""
        self.last_save = time.monotonic()
        state, step = self.state, self.state.step
        if self.saved_step == step:
            return
        self.finish()
        if not state.bad_steps:
            state.good_step = state.step
        self.saved_step = step
        if not (self.world.first or self.task.sharded):
            return
        state.lengths = self.run.lengths()
        state_json = state.to_json()  # as it is now
        with averaged(self.ema):
            write_model = self.task.snapshot()
        tensors: dict[str, Tensor] = {}
        for part in self.with_tensors:
            tensors |= part.state_tensors()
        tensors = {name: gathered_copy(tensor) for name, tensor in tensors.items()}
        size = self.task.saved_bytes() + sum(tensor.nbytes for tensor in tensors.values())
        needed = state.needed_checkpoints()

        def write(place: Path) -> None:
            write_model(place)
            on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
            save_file(on_cpu, place / "optimizer.safetensors")
            (place / "state.json").write_text(state_json, encoding="utf-8")
            self.run.flush()

        def commit() -> list[str]:
            damaged: list[str] = []
            # A separate stream, so that copying does not wait for training steps. torch hands out
            # pooled streams in turn; at this priority, none is used for graph capture.
            stream = torch.cuda.Stream(priority=-1) if self.on_gpu else None
            with torch.cuda.stream(stream) if stream else nullcontext():
                try:
                    files.commit(self.run.checkpoints, self.folder(step).name, write, size)
                except FileNotFoundError:  # the run was moved meanwhile
                    files.sweep(self.run.checkpoints)
                    files.commit(self.run.checkpoints, self.folder(step).name, write, size)
            self.link("last", self.folder(step))
            self.run.retry_if_moved(
                lambda path: checkpoint.prune(path / CHECKPOINTS, needed, damaged.append)
            )
            return damaged

        if self.on_gpu:
            torch.cuda.synchronize()  # wait for the copies
        if self.world.first:
            self.writing = self.writer.submit(commit)
        self.last_save = time.monotonic()

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk, or raise the error that prevented it."""
        if self.writing:
            for text in self.writing.result():
                self.notify(Note(text))
            self.writing = None

    def last_good(self) -> Path | None:
        """The newest intact checkpoint that was not saved during a streak of skipped steps."""
        for folder in reversed(checkpoint.list_checkpoints(self.run.checkpoints)):
            try:
                files.verify(folder)
                if not read_state(folder).bad_steps:
                    return folder
            except ModelError as error:
                self.notify(Note(str(error)))
        return None

    def rewind(self, folder: Path) -> None:
        """Restore the run to the checkpoint `folder`, and remove later checkpoints."""
        self.task.load_checkpoint(folder)
        self.load_state(folder)
        self.world.barrier()  # until all processes have read it
        if self.world.first:
            after = (self.run.checkpoints, folder)
            checkpoint.retire_after(*after, lambda text: self.notify(Note(text)))
            self.run.cut_back(self.state.lengths)
        self.link("last", folder)
        if self.state.best:
            self.link("best", self.folder(self.state.best_step))

    def load_best(self) -> None:
        """Load the best checkpoint, or keep the last one if the best is damaged."""
        self.world.barrier()  # until the checkpoint is on disk
        if self.state.best_step == self.state.step:
            if self.ema:
                self.ema.swap()
            return
        folder = self.folder(self.state.best_step)
        try:
            files.verify(folder)
            self.task.load_weights(folder)
        except ModelError as error:
            self.notify(Note(f"{error}; using the last checkpoint instead of the best"))
            self.state.best_step = self.state.step
            if self.ema:
                self.ema.swap()
            self.link("best", self.folder(self.state.step))


def save_final(run: Run, state: State, write_model: Callable[[Path], None]) -> None:
    """Save the finished model next to the checkpoints, and link it as the best."""

    def write(folder: Path) -> None:
        write_model(folder)
        best = {"step": state.best_step, "seconds": state.seconds}
        (folder / "state.json").write_text(json.dumps(best) + "\n", encoding="utf-8")

    checkpoint.point(run.path / "best", files.commit(run.checkpoints, FINAL, write))
