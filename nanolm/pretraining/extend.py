"""Trains a finished run for longer, as if the larger budget had been requested from the start.

    >>> extend("runs/novel", {"minutes": 10.0})

The learning rate of a finished run has decayed to zero, so training resumes from the checkpoint
before the decay. The run's previous best model is kept in its folder `earlier`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nanolm import files
from nanolm.errors import DataError, TooLittleTime, UsageError
from nanolm.pretraining.begin import reports, saved_settings
from nanolm.pretraining.train import TrainResult, train
from nanolm.runs import checkpoint, journal
from nanolm.runs.checkpoint import EARLIER
from nanolm.runs.folder import CHECKPOINTS, Run, dump_facts, retirement
from nanolm.runs.toml import dump_toml
from nanolm.training.checkpointer import FINAL
from nanolm.training.events import Notify
from nanolm.training.metrics_log import write_result
from nanolm.training.settings import TrainSettings
from nanolm.training.state import State, read_state

BUDGETS = ("minutes", "steps", "tokens")


def extend(
    path: str | Path,
    more: dict[str, float],
    notify: Notify = lambda event: None,
    started: float | None = None,
) -> TrainResult:
    """Train the run at `path` for one more budget, or resume an interrupted extension."""
    run = Run(Path(path))
    if len(more) != 1:
        raise UsageError(f"--extend {path} needs exactly one of --minutes, --steps and --tokens")
    run.settle(report := reports(notify)[0])
    if not run.exists():
        raise UsageError(f"--extend {path}: no such run; `nanolm runs` lists yours")
    TrainSettings((), **more).check()  # type: ignore[arg-type]
    with run.locked():
        run.recover(report)
        facts = run.facts()
        if "result" in facts and run.extending.exists() and facts.get("extension") == more:
            report(f"{path}: this extension has already finished; there is nothing left to train")
            write_result(run, facts["result"], notify)
            run.extending.unlink()
            return TrainResult(**facts["result"])
        if run.finished() or run.too_short():
            rewind(run, more, report)
        elif run.facts().get("extension") != more:
            command = f"nanolm train --config {run.config_file} --out {path}"
            raise DataError(f"{path} is not finished; resume it first: {command}")
    return train(TrainSettings.from_dict(run.settings()), path, notify, started)


def rewind(run: Run, more: dict[str, float], report: Callable[[str], None]) -> None:
    """Restore the run to the step before its learning rate decayed, with the larger budget."""
    facts = run.facts()
    settings = saved_settings(run, TrainSettings)
    if settings.teachers:
        cure = "train a new run with more --minutes, or continue with"
        cure = f"{cure} nanolm train CORPUS --from {run.path}"
        raise DataError(f"{run.path} was distilled, so it cannot be extended; {cure}")
    last = checkpoint.follow(run.path / "last") or checkpoint.newest_valid(run.checkpoints, report)
    decay = read_state(last).decay_step if last and (last / "state.json").is_file() else None
    folder = run.checkpoints / f"step-{decay or 0:08}"
    if decay is None or not folder.is_dir():
        problem = f"{run.path} has no checkpoint from before its learning rate decayed"
        raise DataError(f"{problem}; try nanolm train CORPUS --from {run.path}")
    files.verify(folder)
    state = read_state(folder)
    later = [each for each in checkpoint.list_checkpoints(run.checkpoints) if each > folder]
    best, change = checkpoint.follow(run.path / "best"), list[journal.Operation]()
    if best is None or best.name == FINAL:  # a copy without symbolic links, or LoRA
        best = run.checkpoints / f"step-{facts['result']['best_step']:08}"
    if best.is_dir() and any(each.samefile(best) for each in later):
        kept = files.free_name(run.path / EARLIER / best.name)
        change.append(("move", f"{CHECKPOINTS}/{best.name}", f"{EARLIER}/{kept.name}"))
        report(f"the previous best model is kept in {kept}")
        later = [each for each in later if each.name != best.name]
        best = kept
    change += [retirement(each, report) for each in later]
    if best.parent.name == EARLIER:
        change.append(("link", "best", f"{EARLIER}/{best.name}"))
    # Did the clock end the run before its maximum number of steps?
    capped = facts["result"].get("stopped") in ("minutes", TooLittleTime.stopped)
    if capped and "minutes" not in more:
        settings = replace(settings, steps=facts["result"]["steps"])
    settings = enlarged(settings, more, state, capped)
    facts |= {"request": settings.to_dict(), "extension": more}
    facts["earlier"] = [*facts.get("earlier", []), facts.pop("result")]
    facts.pop("forecast", None)  # it was for the smaller budget
    change += [
        ("link", "last", f"{CHECKPOINTS}/{folder.name}"),
        ("write", run.config_file.name, dump_toml(settings.to_dict())),
        ("write", run.facts_file.name, dump_facts(facts)),
        ("write", run.extending.name, ""),
    ]
    journal.commit(run.path, f"rolling back to step {decay:,} to train longer", change)


def enlarged(
    settings: TrainSettings, more: dict[str, float], state: State, capped: bool
) -> TrainSettings:
    """The settings with a larger budget: minutes count from now, steps from the start."""
    if "minutes" in more:
        minutes = state.seconds / 60 + more["minutes"]
        return replace(settings, minutes=minutes, steps=settings.steps if capped else None)
    steps = more.get("steps", 0)
    if "tokens" in more:
        steps = more["tokens"] * state.step / max(1, state.tokens)
    before = settings.steps or state.step
    return replace(settings, steps=max(before + 1, round(before + steps)), minutes=None)
