"""The long things a user can do, each as small as it can be: training, fine-tuning, pairs."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import nanolm
from nanolm.classification import finetune
from nanolm.classification.settings import FinetuneSettings
from nanolm.classification.task import ClassifierTask
from nanolm.pairs.task import PairTask
from nanolm.pretraining.language import NextToken
from nanolm.training.events import Event
from nanolm.training.task import Task

SETTINGS: dict[str, Any] = {"layers": 1, "heads": 2, "dim": 16, "context": 16, "batch": 4}
SETTINGS |= {"dropout": 0.1, "threads": 1, "steps": 30, "device": "cpu"}
LABELS: dict[str, Any] = {"start_from": "none", "preset": "nano", "tokenizer": "byte", "batch": 4}
LABELS |= {"dropout": 0.1, "threads": 1, "steps": 30, "evaluations": 10, "patience": 99}
LABELS |= {"device": "cpu"}
PAIRS: dict[str, Any] = {"layers": 1, "heads": 2, "dim": 16, "batch": 160, "tokenizer": "char"}
PAIRS |= {"dropout": 0.1, "threads": 1, "steps": 30, "val_fraction": 0.1, "device": "cpu"}
TIMED = ("seconds", "tokens_per_second")


@dataclass(frozen=True)
class Journey:
    """What is trained, from Python and from the command line."""

    name: str
    verb: str
    text: str
    task: type[Task]
    settings: dict[str, Any]

    def go(
        self, out: Path, notify: Callable[[Event], None] = lambda event: None, **more: Any
    ) -> Any:
        """From the beginning, or on from where it was."""
        settings = {**self.settings, **more}
        if self.task is not ClassifierTask:
            train = nanolm.train if self.task is NextToken else nanolm.train_pairs
            return train(self.text, out=out, notify=notify, **settings)
        asked = FinetuneSettings(data=(self.text,), **settings)
        return finetune.finetune(asked, out, notify=notify)

    def words(self, out: object, **more: Any) -> list[str]:
        """What to type for the same."""
        settings = {**self.settings, **more}
        settings["from"] = settings.pop("start_from", None)
        named = {
            name.replace("_", "-"): value for name, value in settings.items() if value is not None
        }
        options = [word for name, value in named.items() for word in (f"--{name}", str(value))]
        return [self.verb, self.text, *options, "--out", str(out)]


def journeys(folder: Path) -> dict[str, Journey]:
    labeled = folder / "labeled.tsv"
    things = ("the band", "this soup", "my shoe", "that film", "our house", "a long day")
    rows = [
        f"{thing} was {word} {n}\t{word}"
        for n in range(9)
        for thing in things
        for word in ("good", "bad")
    ]
    labeled.write_text("sentence\tlabel\n" + "\n".join(rows) + "\n", encoding="utf-8")
    pairs = folder / "pairs.tsv"
    counted = [f"{thing} {n}\t{n} {thing[::-1]}" for n in range(20) for thing in things]
    pairs.write_text("source\ttarget\n" + "\n".join(counted) + "\n", encoding="utf-8")
    return {
        "training": Journey("training", "train", "embedded:tiny", NextToken, SETTINGS),
        "fine-tuning": Journey("fine-tuning", "finetune", str(labeled), ClassifierTask, LABELS),
        "pairs": Journey("pairs", "train-pairs", str(pairs), PairTask, PAIRS),
    }


def weights(run: Path) -> list[str]:
    """Of the last checkpoint: all of them, or those that were trained."""
    names = ("model.safetensors", "trained.safetensors", "adapter/adapter_model.safetensors")
    found = [run / "last" / name for name in names if (run / "last" / name).exists()]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in found]


def lines(run: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without what depends on the clock."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMED} for line in found]


def same(run: Path, other: Path) -> bool:
    """The same weights to the last bit, and every logged step once."""
    return weights(run) == weights(other) and lines(run) == lines(other)


def counts(few: int, many: int) -> list[Any]:
    """So many in `make test`, and so many in `make test-slow`."""
    return [few, pytest.param(many, marks=pytest.mark.slow)]
