"""Everything that the training loop changes besides weights and optimizer state: state.json."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nanolm import files
from nanolm.errors import ModelError

NAMES_ON_DISK = {  # where they are not those of the fields: as version 0.1.0 wrote them
    "data_offset": "passed_over",
    "grad_accum_steps": "parts",
    "rollbacks": "returns",
    "evals_without_gain": "beyond",
    "warnings_shown": "told",
}


@dataclass
class State:
    # How far the run is, and what it has cost.
    step: int = 0
    seconds: float = 0.0  # spent in the loop, evaluating and saving included
    setup: float = 0.0  # seconds of the budget that went into preparing, not into steps
    reserve: float = 0.0  # seconds that evaluating takes when the steps are done
    decay_step: int | None = None  # where the learning rate began to fall
    begun: float = 0.0  # of runs of 0.1.0: how much of the budget was used before the first step

    # What was measured since the last line of metrics, and what that line said.
    tokens: int = 0  # trained on
    sums: dict[str, float] = field(default_factory=dict)  # of loss and the like, since the
    summed: int = 0  # last line of metrics, over so many steps
    skipped: int = 0  # steps since then without a finite gradient
    evaluation_sums: dict[str, float] = field(default_factory=dict)  # of the same values since the
    evaluation_steps: int = 0  # last evaluation, and the number of steps
    first_loss: float | None = None  # in the first line of metrics
    train_loss: float | None = None  # in the last one
    lengths: dict[str, int] = field(default_factory=dict)  # of metrics.jsonl and samples.md

    # How good the model was on held-out data.
    evaluations: int = 0
    evaluated_tokens: int | None = None  # how much held-out text is evaluated on the way
    scores: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: list[float] | None = None  # lower is better, the first number deciding first
    best_step: int = 0
    lowest_loss: float | None = None  # on held-out data
    evals_without_gain: int = 0  # since the best, those that were clearly worse
    warnings_shown: list[str] = field(default_factory=list)

    # What went wrong, and what was done about it.
    data_offset: int = 0  # batches left out; the index of a batch is step + data_offset
    bad_steps: int = 0  # in a row without a finite gradient
    rollbacks: int = 0  # to a checkpoint, after too many of them
    good_step: int = 0  # of the last checkpoint that was not saved between them
    grad_accum_steps: int = 1  # micro-batches of a batch, so that it fits into memory

    def to_json(self) -> str:
        values = {NAMES_ON_DISK.get(name, name): value for name, value in asdict(self).items()}
        return json.dumps({"format": files.FORMAT, **values}, indent=1) + "\n"

    def needed_checkpoints(self) -> set[str]:
        """Names of those that are not superseded, besides the newest."""
        steps = (self.best_step, self.decay_step, self.good_step)
        return {f"step-{step:08}" for step in steps if step is not None}


def read_state(folder: Path) -> State:
    file, fields = folder / "state.json", {name: key for key, name in NAMES_ON_DISK.items()}
    try:
        stored = json.loads(file.read_text(encoding="utf-8")).items()
        values = {fields.get(name, name): value for name, value in stored}
        files.check_format(file, values)
        values.pop("format", None)
        state = State(**values)
        files.check_fields(state)
        return state
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
