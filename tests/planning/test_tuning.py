"""The training loop: compiling, threads, saving in the background, too little memory."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY_MODEL
from faults import short_of_memory
from models import gpt_config

import nanolm
from nanolm import files
from nanolm.errors import OutOfMemory, UsageError
from nanolm.model import huggingface
from nanolm.model.build import build_model
from nanolm.model.config import configure
from nanolm.model.fast import native
from nanolm.planning import planner, tuning
from nanolm.pretraining import language
from nanolm.runs import checkpoint
from nanolm.training import budget, compile_choice, trainer
from nanolm.training.events import Progressed
from nanolm.training.settings import TrainSettings

SETTINGS: dict[str, Any] = {**TINY_MODEL, "steps": 30, "threads": 1}


@pytest.mark.parametrize(
    "config",
    [gpt_config(norm_place="post"), configure("lstm", vocab_size=40, layers=1, dim=16, context=8)],
)
def test_float8_is_refused_by_models_without_kernels_for_it(config: Any) -> None:
    settings = TrainSettings((), dtype="float8", context=8, batch=2, device="cuda")
    with pytest.raises(UsageError, match="--dtype float8: only for Transformers with pre-norm"):
        tuning.fit_to_machine(settings, build_model(config))


def weights(run: Path) -> str:
    return hashlib.sha256((run / "last" / "model.safetensors").read_bytes()).hexdigest()


def train(out: Path, notes: list[str] | None = None, **changes: Any) -> Any:
    def notify(event: object) -> None:
        if notes is not None and not isinstance(event, Progressed):
            notes.append(str(event))

    return nanolm.train("embedded:tiny", out=out, notify=notify, **(SETTINGS | changes))


def config(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text())


def test_a_compiler_failure_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: object, **more: object) -> Any:
        def call(*anything: object) -> torch.Tensor:
            raise RuntimeError("no such compiler\nand much more")

        return call

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(language, "missing_compiler", lambda device: None)
    notes: list[str] = []
    train(tmp_path / "tried", notes, compile=True)
    told = "torch.compile failed (no such compiler); continuing without it"
    assert told in notes
    train(tmp_path / "plain", compile=False)
    assert weights(tmp_path / "tried") == weights(tmp_path / "plain")


@pytest.mark.parametrize(("gain", "wanted"), [(1e9, True), (1e-9, False)])
def test_the_compile_decision_is_made_once_and_saved(
    gain: float, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []

    def compile_(block: Any, dynamic: bool) -> Any:
        compiled.append(block)
        return block

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(language, "missing_compiler", lambda device: None)
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(compile_choice, "EXPECTED_GAIN", {"cpu": gain})
    notes: list[str] = []
    run = tmp_path / "run"
    train(run, notes)
    assert bool(compiled) == wanted
    told = [note for note in notes if note.startswith("compile: ")]
    if wanted:  # the outcome depends on the timings
        assert told[0].startswith("compile: trying it (")
        assert config(run)["compile"] is told[1].startswith("compile: yes (")
    else:
        assert told[0].startswith("compile: no (")
        assert config(run)["compile"] is False
    # With all settings given, the same run has nothing to decide.
    again = nanolm.train(out=tmp_path / "again", **config(run))
    assert again.steps == 30
    assert weights(run) == weights(tmp_path / "again")


def test_a_slow_first_step_is_no_reason_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gain is estimated from the steps after it."""
    train_step, now = trainer.Trainer.train_step, 0.0

    def step(trainer: trainer.Trainer, lr: float) -> torch.Tensor:
        nonlocal now
        now += 0.5 if trainer.state.step else 1_000
        return train_step(trainer, lr)

    clock = SimpleNamespace(monotonic=lambda: now, strftime=time.strftime)
    for module in (trainer, budget):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(trainer.Trainer, "train_step", step)
    monkeypatch.setattr(language, "missing_compiler", lambda device: None)
    monkeypatch.setattr(native, "available", lambda: False)
    notes: list[str] = []
    train(tmp_path / "run", notes)
    choices = [note for note in notes if note.startswith("compile: no (")]
    assert all(f" {seconds} s" in choices[0] for seconds in (1, 10)), choices


@pytest.mark.skipif(not native.available(), reason="there is no C compiler")
def test_kernels_are_faster_than_a_compiled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "missing_compiler", lambda device: None)
    monkeypatch.setattr(compile_choice, "EXPECTED_GAIN", {"cpu": 1e9})
    notes: list[str] = []
    train(tmp_path / "run", notes, steps=12)
    assert not [note for note in notes if note.startswith("compile: ")]


@pytest.mark.slow
def test_a_compiled_run_learns_the_same_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    if tuning.missing_compiler("cpu"):
        pytest.skip("no C++ compiler here")
    plain = train(tmp_path / "plain", compile=False)
    whole = train(tmp_path / "whole", compile=True)
    assert whole.train_loss == pytest.approx(plain.train_loss, abs=1e-3)

    def stop(event: object) -> None:
        if isinstance(event, Progressed) and event.record["step"] == 20:
            import signal

            signal.raise_signal(signal.SIGINT)

    settings = SETTINGS | {"compile": True}
    nanolm.train("embedded:tiny", out=tmp_path / "broken", notify=stop, **settings)
    nanolm.train("embedded:tiny", out=tmp_path / "broken", **settings)
    assert weights(tmp_path / "whole") == weights(tmp_path / "broken")


def test_threads_and_workers_are_measured_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "available_threads", lambda: 4)
    monkeypatch.setattr(planner, "NARROW_DIM", 0)  # otherwise, such a small model uses one thread
    monkeypatch.setattr(tuning, "is_busy", lambda: False)
    asked: list[tuple[int | None, int | None]] = []

    def seconds(ways: list[Any], *rest: object) -> list[float]:
        asked.extend((way.threads, way.workers) for way in ways)
        known = {(1, 1): 3.0, (2, 2): 1.0, (2, 1): 0.99}
        return [known.get((way.threads, way.workers), 2.0) for way in ways]

    monkeypatch.setattr(tuning, "step_seconds", seconds)
    notes: list[str] = []
    train(tmp_path / "run", notes, threads=None, steps=4)
    assert asked == [(1, 1), (2, 2), (2, 1), (4, 4), (4, 1)]
    assert (config(tmp_path / "run")["threads"], config(tmp_path / "run")["workers"]) == (2, 2)
    assert any("threads: 2 (1: 3,000, 2 with 2 workers: 1,000" in note for note in notes)
    # Dropout draws one sequence of random numbers, so there are no workers.
    asked.clear()
    train(tmp_path / "dropping", threads=None, steps=4, dropout=0.1)
    assert asked == [(1, 1), (2, 1), (4, 1)]
    # On a busy machine, threads do not share an operation.
    monkeypatch.setattr(tuning, "is_busy", lambda: True)
    asked.clear()
    train(tmp_path / "busy", threads=None, steps=4)
    assert asked == [(1, 1), (2, 2), (4, 4)]
    assert config(tmp_path / "busy")["threads"] == 2

    def slightly_slower(ways: list[Any], *rest: object) -> list[float]:
        return [1 + 0.04 * (way.threads > 1) + (way.threads > 2) for way in ways]

    # There, more threads are not much faster, but they are once the other processes end.
    monkeypatch.setattr(tuning, "step_seconds", slightly_slower)
    train(tmp_path / "busier", threads=None, steps=4)
    assert config(tmp_path / "busier")["threads"] == 2


def test_a_real_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "available_threads", lambda: 2)
    train(tmp_path / "run", threads=None, steps=2, dim=96, heads=2)
    found = config(tmp_path / "run")
    assert found["threads"] in (1, 2)
    assert found["workers"] in (1, 2)
    assert found["dtype"] in ("float32", "bfloat16")


def test_workers_resume_bit_identically(tmp_path: Path) -> None:
    how: dict[str, Any] = {"threads": 2, "workers": 2}
    train(tmp_path / "whole", **how)
    train(tmp_path / "broken", **how, save_every=7)
    for folder in checkpoint.list_checkpoints(tmp_path / "broken" / "checkpoints")[-2:]:
        files.discard(folder)  # as if it had been killed before
    facts = json.loads((tmp_path / "broken" / "run.json").read_text())
    del facts["result"]
    (tmp_path / "broken" / "run.json").write_text(json.dumps(facts))
    train(tmp_path / "broken", **how, save_every=7)
    assert weights(tmp_path / "whole") == weights(tmp_path / "broken")


def test_workers_and_dropout_cannot_be_combined(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--workers 2 cannot be used with --dropout 0\.1"):
        train(tmp_path / "run", workers=2, dropout=0.1)


def test_a_checkpoint_holds_the_model_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even though training continues while it is written."""
    save = huggingface.save_model

    def slowly(*anything: Any) -> None:
        time.sleep(0.2)
        save(*anything)

    train(tmp_path / "plain", save_every=6, evaluations=1)
    monkeypatch.setattr(language, "save_model", slowly)
    train(tmp_path / "slow", save_every=6, evaluations=1)
    for step in ("step-00000024", "step-00000030"):
        one, two = (tmp_path / name / "checkpoints" / step for name in ("plain", "slow"))
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (one / file).read_bytes() == (two / file).read_bytes()


@pytest.mark.parametrize("most", [1, 2, 0])
def test_a_batch_that_does_not_fit(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole")
    short_of_memory(monkeypatch, most)
    notes: list[str] = []
    if most == 0:
        with pytest.raises(OutOfMemory, match="try --context 8"):
            train(tmp_path / "short", notes)
        assert any("recomputing every layer" in note for note in notes)
        return
    found = train(tmp_path / "short", notes)
    assert any("not enough memory" in note and f" {most} sequences" in note for note in notes)
    state = json.loads((tmp_path / "short" / "last" / "state.json").read_text())
    assert state["parts"] == 4 // most
    whole = json.loads((tmp_path / "whole" / "run.json").read_text())["result"]
    assert found.tokens == whole["tokens"]
    assert found.val_loss == pytest.approx(whole["val_loss"], abs=1e-3)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_memory_freed_by_a_step_is_reused() -> None:
    """Counts new 4 kB pages after all sizes have been allocated once. By default, the library may
    or may not return freed memory; here it is set to, above a size. (Torch may have its own
    allocator, as on ARM, which keeps memory.)"""
    count = """
import resource, sys, torch
from nanolm.planning.tuning import threads_for
from nanolm.planning import tuning
if sys.argv[1] == "given back":
    tuning.keep_memory = lambda: None
with threads_for(1):
    for step in range(12):
        if step == 4:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        some = [torch.zeros(1 << 22) for _ in range(4)]  # 64 MB in all
        del some
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    given_back, kept = (
        int(
            subprocess.run(
                [sys.executable, "-c", count, how],
                capture_output=True,
                check=True,
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
            ).stdout
        )
        for how in ("given back", "kept")
    )
    assert kept < 1_000
    if given_back < 1_000:
        pytest.skip("torch keeps its memory by itself here")
