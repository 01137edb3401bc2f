"""Sends the metrics of a run to experiment trackers: TensorBoard, Weights & Biases, Trackio.

    >>> with Trackers(["tensorboard"], notify) as notify:
    ...     train(settings, notify=notify)

They receive the contents of metrics.jsonl. All are optional, and if one fails, training continues.
"""

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanolm.errors import UsageError

# Events and run folders are imported only when needed, because the help imports this module.
if TYPE_CHECKING:
    from nanolm.training.events import Event, Notify, Started

PROJECT = "nanolm"
Values = dict[str, float]


class Tracker(NamedTuple):
    log: Callable[[Values, int], None]
    close: Callable[[], None]


def tensorboard(run: Path, settings: dict[str, Any], step: int) -> Tracker:
    library: Any = importlib.import_module("torch.utils.tensorboard")
    # Hide what was logged after the step that the run resumes from.
    writer = library.SummaryWriter(str(run / "tensorboard"), purge_step=step or None)
    writer.add_text("settings", "\n".join(f"    {key} = {settings[key]}" for key in settings), step)

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def wandb(run: Path, settings: dict[str, Any], step: int) -> Tracker:
    library: Any = importlib.import_module("wandb")
    run_ = library.init(project=PROJECT, name=run.name, dir=str(run), config=settings)
    return Tracker(lambda values, step: run_.log(values, step=step), run_.finish)


def trackio(run: Path, settings: dict[str, Any], step: int) -> Tracker:
    library: Any = importlib.import_module("trackio")
    library.init(project=PROJECT, name=run.name, config=settings)
    return Tracker(lambda values, step: library.log(values, step=step), library.finish)


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


def known(names: str) -> list[str]:
    """The names in "wandb,trackio". Problems are reported before any work is done."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in TRACKERS:
            raise UsageError(f"--report-to {name}: choose from {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--report-to {name}: not installed; try `pip install {name}`")
    return chosen


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """Forwards every event, and sends metrics to the trackers."""

    def __init__(self, names: Sequence[str], notify: "Notify") -> None:
        self.names, self.notify = names, notify
        self.open: dict[str, Tracker] = {}

    def __call__(self, event: "Event") -> None:
        from nanolm.training.events import Progressed, Started

        self.notify(event)
        if isinstance(event, Started):
            self.close()  # the previous run's trackers
            for name in self.names:
                self.attempt(name, lambda name=name: self.begin(name, event))  # type: ignore[misc]
        elif isinstance(event, Progressed):
            numbers = {k: float(v) for k, v in event.record.items() if isinstance(v, int | float)}
            step = int(numbers.pop("step", 0))
            for name, tracker in list(self.open.items()):
                self.attempt(name, lambda log=tracker.log: log(numbers, step))  # type: ignore[misc]

    def begin(self, name: str, event: "Started") -> None:
        from nanolm.runs.folder import Run

        self.open[name] = TRACKERS[name](event.run, Run(event.run).settings(), event.step)

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Call a tracker. If it fails, training continues; its output becomes notes."""
        from nanolm.training.events import Note

        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                work()
        except Exception as error:
            self.open.pop(name, None)
            self.notify(Note(f"{name} failed and will receive no more metrics: {error!r}"))
        if text := said.getvalue().strip():
            self.notify(Note(text))

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        while self.open:
            name, tracker = self.open.popitem()
            self.attempt(name, tracker.close)
