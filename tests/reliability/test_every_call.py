"""Every command that writes, killed at its calls that change the disk: nothing is lost.

    make test-slow ARGS="tests/reliability/test_every_call.py -k extend"

What is right is known from the promises alone: what could be used before can still be used; no
command ends in a traceback; and once the same command has been run again, everything is as if it
had never been killed, with nothing temporary left.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from commands import Loaded
from conftest import Tally
from journeys import TIMED, journeys
from kill_points import Point, Trials, chosen

from nanolm.errors import ModelError
from nanolm.files import verify

TINY = "--layers 1 --heads 2 --dim 16 --context 16 --batch 4 --tokenizer char --device cpu"
TINY += " --threads 1 --no-compile --max-bytes 100000"
TRAIN = f"train text.txt {TINY} --steps 12 --evaluations 3 --save-every 3 --out run"
BASE = TRAIN.replace("--out run", "--out base")
LORA = "train text.txt --from base --train lora --context 16 --batch 4 --device cpu --threads 1"
LORA += " --max-bytes 100000 --steps 12 --evaluations 3 --save-every 3 --out run"
LABELS = "labeled.tsv --device cpu --threads 1"
FRESH = "--from none --preset nano --tokenizer byte --batch 4 --steps 6 --evaluations 2"
FINETUNE = f"finetune {LABELS} {FRESH} --save-every 2 --out run"
PAIRS = "train-pairs pairs.tsv --layers 1 --heads 2 --dim 16 --batch 160 --tokenizer char"
PAIRS += " --threads 1 --device cpu --val-fraction 0.1 --steps 12 --evaluations 3 --save-every 3"
PAIRS += " --out run"
SAMPLE = "sample run --tokens 4 --seed 1 --html s.html --csv s.csv --show"
# What depends on the clock; and what tells about a run, or is compared by what it is about.
CLOCK = (*TIMED, "setup_seconds", "started", "forecast", "choices", "long_seconds")
TOLD = ("log.txt", "report.html", "state.json", "MANIFEST.json")


@dataclass(frozen=True)
class Case:
    """A command, and those that make the state it finds."""

    command: str
    first: tuple[str, ...] = ()
    killed: int | None = None  # the state it finds is of a kill there, of the same command
    clock: bool = False  # ours: where it depends on the time what is done
    outputs: tuple[str, ...] = ()  # single files: the old one or the new one, at any moment
    again: Callable[[Path], bool] = field(default=lambda work: True)  # is it to be typed again?


def to_extend(work: Path) -> bool:
    """Not once it is longer and the command has ended, or it would be longer still."""
    facts = json.loads((work / "run/run.json").read_text())
    ended = "result" in facts and facts.get("earlier")
    return not ended or (work / "run/.extending").exists()


CASES = {
    "preparing text": Case("train text.txt --plan --minutes 1 --threads 1"),
    "train": Case(TRAIN),
    "train, resumed": Case(TRAIN, killed=200),
    "train --teachers": Case(f"{TRAIN} --teachers 2"),
    "train, mixed": Case(TRAIN.replace("text.txt", "text.txt:0.6 few.txt:0.4")),
    "train --extend": Case("train --extend run --steps 8", (TRAIN,), again=to_extend),
    "train --train lora": Case(LORA, (BASE,)),
    "train --train lora, extended": Case(
        "train --extend run --steps 8", (BASE, LORA), again=to_extend
    ),
    "finetune": Case(FINETUNE),
    "train-pairs": Case(PAIRS),
    "train-pairs, resumed": Case(PAIRS, killed=150),
    "finetune --seeds": Case(
        f"finetune {LABELS} --from base --val few.tsv --batch 4 --steps 4 --evaluations 2 --seeds 2"
        " --out run",
        (BASE,),
    ),
    "sweep": Case(
        f"sweep text.txt {TINY} --over lr=0.0001:0.001:0.02 --trials 3 --minutes 0.15 --out swept",
        clock=True,
    ),
    "compare": Case(
        f"compare {LABELS} --only majority,bag,transformer --seeds 1 --budget 0.03 --out rows",
        clock=True,
    ),
    "compare, of text": Case(
        "compare text.txt --device cpu --threads 1 --only ngram,rnn --budget 0.05 --out rows",
        clock=True,
    ),
    "compare, of pairs": Case(
        "compare pairs.tsv --device cpu --threads 1 --only modern --budget 0.05 --out rows",
        clock=True,
    ),
    "tokenizer train": Case("tokenizer train text.txt --vocab-size 300 --out tok"),
    "runs rm": Case("runs rm run --yes", (TRAIN,)),
    "export, to GGUF": Case(
        "export run --to m.gguf --type f32",
        (TRAIN, "export run --to m.gguf --type f16"),
        outputs=("m.gguf", "m.Modelfile"),
    ),
    "report": Case("report run", (TRAIN, "report run"), outputs=("run/report.html",)),
    "sample": Case(f"{SAMPLE} probs", (TRAIN, f"{SAMPLE} top"), outputs=("s.html", "s.csv")),
    "eval": Case(
        "eval run few.txt --html e.html",
        (TRAIN, "eval run text.txt --html e.html"),
        outputs=("e.html",),
    ),
    "eval --mistakes": Case(
        "eval run labeled.tsv --mistakes m.csv",
        (FINETUNE, "eval run few.tsv --mistakes m.csv"),
        outputs=("m.csv",),
    ),
    "tokenizer show": Case(
        "tokenizer show --tokenizer run cats --html t.html",
        (TRAIN, "tokenizer show --tokenizer run mats --html t.html"),
        outputs=("t.html",),
    ),
    "inspect": Case(
        "inspect run cats --out i.html",
        (TRAIN, "inspect run mats --out i.html"),
        outputs=("i.html",),
    ),
    "export": Case("export run --to model", (TRAIN,)),
    "export, again": Case("export run --to model --type bf16", (TRAIN, "export run --to model")),
}


class Trial:
    """A case, its end when nothing disturbs it, and what is wrong after a kill."""

    def __init__(self, case: Case, loaded: Loaded, folder: Path, naive: bool = False) -> None:
        self.case, self.trials = case, Trials(loaded, folder, case.clock, naive)
        self.work = work = self.trials.work
        self.command = case.command.split()
        self.classifier = FINETUNE in (case.command, *case.first)
        self.removes = case.command.startswith("runs rm")
        text = "".join(f"The {n} cats sat on {n * 7 % 13} mats.\n" for n in range(200))
        (work / "text.txt").write_text(text)
        (work / "few.txt").write_text(text[:2000])
        journeys(work)  # labeled.tsv, pairs.tsv
        rows = (work / "labeled.tsv").read_text().splitlines(keepends=True)
        (work / "few.tsv").write_text("".join(rows[:20]))
        for command in case.first:
            code, said = self.trials.run(*command.split())
            assert code == 0, said
        if case.killed:
            points = self.trials.record(*self.command)
            self.trials.restore()
            self.trials.run(*self.command, point=points[case.killed])
            shutil.rmtree(self.trials.before)
            self.trials.log.unlink()
        self.old = self.outputs()
        self.saved = whole_checkpoints(work)
        self.points = self.trials.record(*self.command)
        self.new, self.end = self.outputs(), self.state()

    def outputs(self) -> dict[str, str | None]:
        return {name: digest(self.work / name) for name in self.case.outputs}

    def problems(self, point: Point, probed: bool) -> list[str]:
        """What is wrong after a kill there; nothing, if all is right."""
        trials, case = self.trials, self.case
        trials.restore()
        code, said = trials.run(*self.command, point=point)
        if code != -9:
            return ["not reached"] if code == 0 else [f"exit {code}: {said[-300:]}"]
        wrong = [
            f"{name} is neither the old one nor the new one"
            for name, now in self.outputs().items()
            if now not in (self.old[name], self.new[name])
        ]
        wrong += self.lost()
        if probed:
            wrong += self.probe()
        same = self.same_time_left()
        if case.again(self.work):
            code, said = trials.run(*self.command)
            if code not in (0, 3) or "Traceback" in said:  # 3: it is all done
                wrong.append(f"again: exit {code}: {said[-300:]}")
        end = self.state()
        for name in sorted({**self.end, **end}):
            before, now = self.end.get(name, "nothing"), end.get(name, "nothing")
            if before != now and (same or "/.t" in name):
                wrong.append(f"{name}: {before!s:.300} but {now!s:.300}")
        if not same and outcome(end) != outcome(self.end):
            wrong.append(f"{outcome(self.end)} but {outcome(end)}")
        return wrong

    def same_time_left(self) -> bool:
        """A sweep that was killed in its first round may have more or less time for the second."""
        state = self.work / "swept/sweep.json"
        return self.case.command.split()[0] != "sweep" or (
            state.exists() and len(json.loads(state.read_text())["budgets"]) > 1
        )

    def lost(self) -> Iterator[str]:
        now = whole_checkpoints(self.work)
        for name, contents in self.saved.items():
            newer = any(step.name > Path(name).name for step in map(Path, now))
            if contents not in now.values() and not newer and not self.removes:
                yield f"{name} is lost"

    def probe(self) -> Iterator[str]:
        """Others look at what is left."""
        run = self.work / "run"
        commands = [["runs", "--folder", "."]]
        if run.exists():
            commands += [["doctor", "run"], ["report", "run", "--out", "../probe.html"]]
            use = ["sample", "run", "--tokens", "1"]
            if self.case.command == PAIRS:
                use = ["translate", "run", "this soup 7"]
            commands += [["classify", "run", "a good day"] if self.classifier else use]
        for words in commands:
            code, said = self.trials.run(*words)
            usable = (
                words[0] in ("sample", "classify", "translate") and self.saved and not self.removes
            )
            if code in (1, -9) or "Traceback" in said or (code and usable):
                yield f"{' '.join(words)}: exit {code}: {said[-300:]}"
        (self.work.parent / "probe.html").unlink(missing_ok=True)

    def state(self) -> dict[str, Any]:
        """Everything there is that does not depend on the clock."""
        place, found = self.trials.place, dict[str, Any]()
        for file in sorted(place.rglob("*")):
            name = str(file.relative_to(place))
            if file.is_symlink():
                found[name] = str(file.readlink())
            elif file.name in TOLD or file.name.endswith((".lock", ".svg")) or file.is_dir():
                if file.name.startswith((".tmp", ".trash")):
                    found[name] = "left behind"
            elif file.name == "metrics.jsonl":
                lines = file.read_text().splitlines()
                with contextlib.suppress(ValueError):  # half a line is not what it should be
                    found[name] = timeless([json.loads(line) for line in lines])
            elif file.name in ("run.json", "sweep.json", "compare.json"):
                facts = timeless(json.loads(file.read_text()))
                found |= {f"{name} {key}": value for key, value in facts.items()}
            else:
                found[name] = digest(file)
        return found


def outcome(state: dict[str, Any]) -> list[Any]:
    """Of a sweep: the winner, and what every trial came to in the first round."""
    trials = state["work/swept/sweep.json trials"]
    firsts = [(trial["values"], trial["error"], trial["results"][:1]) for trial in trials]
    rounds = [len(trial["results"]) for trial in trials]
    return [state["work/swept/sweep.json finished"], rounds, firsts]


def timeless(value: Any) -> Any:
    """Without what depends on the clock."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in CLOCK}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.exists() else None


def whole_checkpoints(work: Path) -> dict[str, str | None]:
    found = {}
    for manifest in work.glob("run/**/step-*/MANIFEST.json"):
        if not manifest.parent.parent.is_symlink():
            with contextlib.suppress(ModelError):
                verify(manifest.parent)
                found[str(manifest.parent)] = digest(manifest)
    return found


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("lora" in name)) for name in CASES]
)
def test_killed_at_every_call(
    name: str, few: bool, loaded: Loaded, tmp_path: Path, tally: Tally
) -> None:
    trial = Trial(CASES[name], loaded, tmp_path)
    points = chosen(trial.points)
    if few:
        points = random.Random(name).sample(points, 1 if CASES[name].clock else 2)
    tried = survived = 0
    for number, point in enumerate(points):
        wrong = trial.problems(point, probed=number % 2 == 0)
        if wrong != ["not reached"]:
            tried += 1
            survived += not wrong
            if wrong:
                print(point, *wrong, sep="\n  ")  # noqa: T201
    tally(f"killed at each call that changes the disk, {name}", tried, survived)


def test_writing_in_place_is_caught(loaded: Loaded, tmp_path: Path) -> None:
    """The same kills for a writer as others have it: the trial can fail."""
    trial = Trial(CASES["report"], loaded, tmp_path, naive=True)
    page = next(point for point in chosen(trial.points) if point.after)
    wrong = trial.problems(page, probed=False)
    assert "run/report.html is neither the old one nor the new one" in wrong


def test_metrics_are_on_the_disk_before_a_checkpoint_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without power, too, there is what the checkpoint says; a kill alone would not show it."""
    flushed, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    journeys(tmp_path)["training"].go(tmp_path / "run", steps=10, evaluations=1)
    assert "checkpoints" in flushed[flushed.index("metrics.jsonl") :]
