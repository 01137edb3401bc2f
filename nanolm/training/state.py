"""The state of the training loop besides weights and optimizer state: state.json."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nanolm import files
from nanolm.errors import ModelError

NAMES_ON_DISK = {  # where they differ from the fields: the names of version 0.1.0
    "data_offset": "passed_over",
    "grad_accum_steps": "parts",
    "rollbacks": "returns",
    "evals_without_gain": "beyond",
    "warnings_shown": "told",
}


@dataclass
class State:
    # Progress and time.
    step: int = 0
    seconds: float = 0.0  # spent so far, including evaluation and saving
    setup: float = 0.0  # seconds of the budget spent on preparation
    reserve: float = 0.0  # seconds to keep for the final evaluation
    decay_step: int | None = None  # where the learning rate started to decay
    begun: float = 0.0  # in runs of 0.1.0: the share of the budget used before the first step

    # Metrics since the last line of metrics.jsonl.
    tokens: int = 0  # trained on
    sums: dict[str, float] = field(default_factory=dict)  # of loss etc., since the last line
    summed: int = 0  # steps in these sums
    skipped: int = 0  # steps since then with a non-finite gradient
    evaluation_sums: dict[str, float] = field(default_factory=dict)  # since the last evaluation
    evaluation_steps: int = 0  # steps in these sums
    first_loss: float | None = None  # in the first line of metrics
    train_loss: float | None = None  # in the last one
    lengths: dict[str, int] = field(default_factory=dict)  # of metrics.jsonl and samples.md

    # Validation.
    evaluations: int = 0
    evaluated_tokens: int | None = None  # validation tokens per evaluation during training
    whole_to_part: float | None = None  # bits per byte of the whole text / of these tokens
    scores: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: list[float] | None = None  # lower is better, compared from the first number on
    best_step: int = 0
    lowest_loss: float | None = None  # validation loss
    evals_without_gain: int = 0  # evaluations since the best that were clearly worse
    warnings_shown: list[str] = field(default_factory=list)

    # Problems and remedies.
    data_offset: int = 0  # skipped batches; the index of a batch is step + data_offset
    bad_steps: int = 0  # in a row, with a non-finite gradient
    rollbacks: int = 0  # to a checkpoint, after too many bad steps
    good_step: int = 0  # of the last checkpoint not saved during bad steps
    grad_accum_steps: int = 1  # micro-batches per batch, to fit into memory

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
