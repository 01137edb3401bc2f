"""Training, stopped and resumed: the result must equal that of an uninterrupted run."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY_MODEL, lines, weights
from faults import Killed, before_step, kill
from models import PUBLISHED_FAMILIES, gpt_config, lively
from torch import Tensor

import nanolm
from nanolm.errors import DataError, ModelError, UsageError
from nanolm.files import verify
from nanolm.model.config_json import model_type
from nanolm.model.gpt import GPT
from nanolm.model.huggingface import save_model
from nanolm.pretraining import language
from nanolm.pretraining.extend import extend
from nanolm.runs.checkpoint import list_checkpoints
from nanolm.text.tokenizer import train_tokenizer
from nanolm.training import budget, trainer
from nanolm.training.events import Progressed, Started
from nanolm.training.interrupt import StopRequest, interrupt
from nanolm.training.trainer import Trainer

SETTINGS: dict[str, Any] = {**TINY_MODEL, "steps": 30, "dropout": 0.1, "threads": 1}


def without_time(run: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines(run)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("unbroken") / "run"
    nanolm.train("embedded:tiny", out=run, **SETTINGS)
    return run


def stop_at(step: int) -> Callable[[object], None]:
    """Press Ctrl-C after the metrics of `step`."""

    def press(event: object) -> None:
        if isinstance(event, Progressed) and event.record["step"] == step:
            signal.raise_signal(signal.SIGINT)

    return press


@pytest.mark.parametrize("steps", [1, 3, 9, 10, 15, 16, 29])
def test_killed_and_resumed_is_bit_identical(
    steps: int, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        before_step(patch, steps, kill)
        with pytest.raises(Killed):
            nanolm.train("embedded:tiny", out=run, **SETTINGS)
    started: list[int] = []
    nanolm.train(
        "embedded:tiny",
        out=run,
        notify=lambda event: started.append(event.step) if isinstance(event, Started) else None,
        **SETTINGS,
    )
    assert steps - 3 <= started[0] <= steps
    assert weights(run) == weights(unbroken)
    assert without_time(run) == without_time(unbroken)
    assert (run / "samples.md").read_text() == (unbroken / "samples.md").read_text()


def test_windows_grow_when_the_learning_rate_decays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kill is in another phase: before the decay, at its first step, later, at the end."""
    how = {**SETTINGS, "steps": 20, "context": 16, "early_context": 8, "evaluations": 5}
    seen: list[tuple[int, ...]] = []

    def hidden_states(self: Any, ids: Tensor, *rest: Any) -> Tensor:
        if self.training:
            seen.append(tuple(ids.shape))
        return plain(self, ids, *rest)

    plain = GPT.hidden_states
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "hidden_states", hidden_states)
        nanolm.train("embedded:tiny", out=tmp_path / "whole", **how)
    batch = SETTINGS["batch"]
    assert seen == 13 * [(2 * batch, 8)] + 7 * [(batch, 16)]
    for step in (5, 12, 13, 17, 19):
        run = tmp_path / f"{step}"
        with monkeypatch.context() as patch:
            before_step(patch, step, kill)
            with pytest.raises(Killed):
                nanolm.train("embedded:tiny", out=run, **how)
        nanolm.train("embedded:tiny", out=run, **how)
        assert weights(run) == weights(tmp_path / "whole")
        assert without_time(run) == without_time(tmp_path / "whole")
    with pytest.raises(UsageError, match="multiple"):
        nanolm.train("embedded:tiny", out=tmp_path / "no", **how | {"early_context": 7})


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "rnn"},
        {"family": "lstm"},
        {"heads": 2, "average": 0.9},
        {"family": "llama", "heads": 2, "kv_heads": 1},
        {"heads": 2, "positions": "sinusoidal", "norm": "layer", "norm_place": "post"},
        {"heads": 2, "positions": "none", "feed_forward": "relu2", "bias": True, "tied": True},
    ],
    ids=str,
)
def test_other_models_resume_too(changes: dict[str, Any], tmp_path: Path) -> None:
    shape = {name: value for name, value in SETTINGS.items() if name != "heads"} | changes
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    nanolm.train("embedded:tiny", out=whole, **shape)
    nanolm.train("embedded:tiny", out=broken, notify=stop_at(20), **shape)
    assert nanolm.train("embedded:tiny", out=broken, **shape).steps == 30
    assert weights(whole) == weights(broken)
    assert without_time(whole) == without_time(broken)
    assert nanolm.load(whole).generate("a cat", tokens=40, greedy=True)


def test_training_starts_from_another_model(trained: Path, corpus: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    how: dict[str, Any] = {"start_from": trained, "steps": 30, "batch": 4, "dropout": 0.1}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    nanolm.train(corpus, out=whole, notify=lambda event: notes.append(str(event)), **how)
    assert any("a seventh of the" in note for note in notes)
    before, after = nanolm.load(trained), nanolm.load(whole)
    assert after.model.config == replace(before.model.config, dropout=0.1)
    assert after.tokenizer.fingerprint() == before.tokenizer.fingerprint()
    # It starts from the other model, not from scratch.
    with torch.no_grad():
        change = after.model.head.weight - before.model.head.weight
    assert 0 < change.norm() < 0.5 * before.model.head.weight.norm()
    assert "start_from" in (whole / "config.toml").read_text()

    nanolm.train(corpus, out=broken, notify=stop_at(20), **how)
    nanolm.train(corpus, out=broken, **how)
    assert weights(whole) == weights(broken)


@pytest.mark.parametrize("family", ["gpt_neox", pytest.param("smollm3", marks=pytest.mark.slow)])
def test_switches_of_published_models_survive(family: str, tmp_path: Path) -> None:
    """Started from such a model, resumed and extended."""
    tokenizer, base = train_tokenizer([], "byte"), tmp_path / "base"
    base.mkdir()
    changes = {**PUBLISHED_FAMILIES[family], "vocab_size": tokenizer.vocab_size, "context": 16}
    config = gpt_config(**changes)
    save_model(lively(config, std=0.1), base, tokenizer)
    how: dict[str, Any] = {"start_from": base, "steps": 30, "batch": 4, "threads": 1}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    nanolm.train("embedded:tiny", out=whole, **how)
    nanolm.train("embedded:tiny", out=broken, notify=stop_at(20), **how)
    nanolm.train("embedded:tiny", out=broken, **how)
    assert weights(whole) == weights(broken)
    extend(broken, {"steps": 5})
    after = nanolm.load(broken).model.config
    assert replace(after, dropout=0.0) == config
    assert model_type(after)[0] == family


def test_a_start_that_cannot_be(trained: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--context 99: .* at most 16 tokens"):
        nanolm.train(corpus, out=tmp_path / "x", start_from=trained, context=99)
    with pytest.raises(UsageError, match=r"no folder .* here, and .*OWNER/NAME"):
        nanolm.train(corpus, out=tmp_path / "x", start_from="runs/not/there")
    large = tmp_path / "large"  # a tokenizer that does not match the model
    shutil.copytree(trained / "best", large, ignore=lambda *_: ["MANIFEST.json"])
    train_tokenizer([corpus.read_text()], "bpe", 600).save(large, 16)
    with pytest.raises(ModelError, match=r"its tokenizer has .* tokens, its model"):
        nanolm.train(corpus, out=tmp_path / "x", start_from=large)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number: int, unbroken: Path, tmp_path: Path) -> None:
    def interrupt(event: object) -> None:
        if isinstance(event, Progressed) and event.record["step"] == 20:
            signal.raise_signal(number)

    run = tmp_path / "run"
    result = nanolm.train("embedded:tiny", out=run, notify=interrupt, **SETTINGS)
    assert (result.stopped, result.steps) == ("interrupted", 20)
    assert nanolm.train("embedded:tiny", out=run, **SETTINGS).stopped == "steps"
    assert weights(run) == weights(unbroken)


def test_a_resume_past_damage_keeps_what_is_whole(unbroken: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    nanolm.train("embedded:tiny", out=run, notify=stop_at(20), **SETTINGS)
    damaged = list_checkpoints(run / "checkpoints")[-1]
    (damaged / "model.safetensors").write_bytes(b"rot")
    nanolm.train("embedded:tiny", out=run, notify=stop_at(20), **SETTINGS)
    for folder in list_checkpoints(run / "checkpoints"):
        verify(folder)
    aside = run / "checkpoints" / f"damaged-{damaged.name}"
    assert (aside / "model.safetensors").read_bytes() == b"rot"
    nanolm.train("embedded:tiny", out=run, **SETTINGS)
    assert weights(run) == weights(unbroken)


def test_a_missing_best_checkpoint_does_not_break_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {**SETTINGS, "steps": 60, "lr": 0.05, "dropout": 0.0}  # best long before the end
    nanolm.train("embedded:tiny", out=run, notify=stop_at(50), **settings)
    best = (run / "best").resolve()
    assert best != (run / "last").resolve()
    shutil.rmtree(best)
    result = nanolm.train("embedded:tiny", out=run, **settings)
    assert result.stopped == "steps"
    assert nanolm.load(run).generate("the", tokens=3)


def test_checkpoints_do_not_pile_up(tmp_path: Path) -> None:
    counts: list[int] = []

    def count(event: object) -> None:
        counts.append(len(list_checkpoints(tmp_path / "run" / "checkpoints")))

    nanolm.train("embedded:tiny", out=tmp_path / "run", notify=count, save_every=1, **SETTINGS)
    assert 2 <= max(counts) <= 5  # one more between its commit and the removal of an old one


def test_a_changed_config_file_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    nanolm.train("embedded:tiny", out=run, notify=stop_at(20), **SETTINGS)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("dim = 16", "dim = 32"))
    with pytest.raises(DataError, match=r"config\.toml was changed"):
        nanolm.train("embedded:tiny", out=run, **SETTINGS)


def test_the_run_folder(unbroken: Path) -> None:
    names = {entry.name for entry in unbroken.iterdir()} - {".lock"}
    assert names == {
        "best",
        "checkpoints",
        "config.toml",
        "last",
        "log.txt",
        "loss.svg",
        "metrics.jsonl",
        "report.html",
        "run.json",
        "samples.md",
    }
    facts = json.loads((unbroken / "run.json").read_text())
    assert facts["result"]["steps"] == 30
    assert all(choice["reason"] for choice in facts["choices"])
    for folder in list_checkpoints(unbroken / "checkpoints"):
        verify(folder)
    steps = [line["step"] for line in lines(unbroken) if "loss" in line]
    assert steps == [10, 20, 30]
    assert len([line for line in lines(unbroken) if "val_loss" in line]) == 10
    assert (unbroken / "samples.md").read_text().count("## Step") == 10


def test_checkpoints_kept(unbroken: Path) -> None:
    state = json.loads((unbroken / "last" / "state.json").read_text())
    kept = {int(folder.name[5:]) for folder in list_checkpoints(unbroken / "checkpoints")}
    assert state["decay_step"] == 18
    best = int((unbroken / "best").resolve().name[5:])
    assert kept == {27, 30, 18, best}


def test_it_learns(unbroken: Path, trained: Path) -> None:
    result = json.loads((trained / "run.json").read_text())["result"]
    first = next(line for line in lines(trained) if "loss" in line)
    assert result["train_loss"] < first["loss"] - 0.5
    assert result["val_loss"] < 4
    assert result["val_bits_per_byte"] > 0


def test_a_finished_run_is_refused_and_never_overwritten(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="is finished"):
        nanolm.train("embedded:tiny", out=unbroken, **SETTINGS)
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny-2", "tiny-3"):
        assert nanolm.train("embedded:tiny", **TINY_MODEL, steps=1).run == f"runs/{name}"


def test_an_unfinished_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    def stop(event: object) -> None:
        if isinstance(event, Started):
            signal.raise_signal(signal.SIGINT)

    run = tmp_path / "run"
    nanolm.train("embedded:tiny", out=run, notify=stop, **SETTINGS)
    with pytest.raises(DataError, match=r"--seed: 1 .*, 2 now") as caught:
        nanolm.train("embedded:tiny", out=run, seed=2, **{**SETTINGS, "steps": 40})
    assert "--steps: 30 in that run, 40 now" in str(caught.value)


def test_a_changed_corpus_is_refused(corpus: Path, tmp_path: Path) -> None:
    def stop(event: object) -> None:
        if isinstance(event, Started):
            signal.raise_signal(signal.SIGINT)

    run = tmp_path / "run"
    nanolm.train(corpus, out=run, notify=stop, **SETTINGS)
    before = corpus.read_text()
    for number in (7, 199):  # in the training and in the validation part
        corpus.write_text(before.replace(f" {number} cats", f" {number} dogs"))
        with pytest.raises(DataError, match="the corpus has changed"):
            nanolm.train(corpus, out=run, **SETTINGS)
    corpus.write_text(before)
    assert nanolm.train(corpus, out=run, **SETTINGS).stopped == "steps"


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not touch")
    with pytest.raises(DataError, match="is not a run"):
        nanolm.train("embedded:tiny", out=tmp_path, **SETTINGS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("family", ["modern", "gpt2"])
@pytest.mark.parametrize("tokenizer", ["bpe", "char", "byte"])
def test_families_and_tokenizers(family: str, tokenizer: str, tmp_path: Path) -> None:
    result = nanolm.train(
        "embedded:tiny",
        out=tmp_path / "run",
        family=family,
        tokenizer=tokenizer,
        **{**SETTINGS, "steps": 4},
    )
    assert result.val_loss is not None
    model = nanolm.load(tmp_path / "run")
    assert model.tokenizer.kind == tokenizer
    assert model.generate("never seen: 日本", tokens=3, seed=0) is not None


def test_minutes(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"  # not tiny, or the number of steps would end it
    file.write_text("".join(f"{number} cats sat on the mat.\n" for number in range(4_000)))
    result = nanolm.train(
        file,
        out=tmp_path / "run",
        minutes=0.06,
        weight_decay=0.1,
        tokenizer="byte",
        **TINY_MODEL,
        evaluations=4,
    )
    assert result.stopped == "minutes"
    assert 2.0 <= result.seconds < 10  # 3.6 on an idle machine
    evaluations = [line for line in lines(tmp_path / "run") if "val_loss" in line]
    assert 1 <= len(evaluations) <= 4  # preparation used part of it


def test_a_slow_first_evaluation_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first evaluation includes compiling kernels, so it does not predict the last."""
    evaluate, looked = language.NextToken.evaluate, list[object]()

    def slow(task: Any, *rest: Any) -> Any:
        if not looked:
            time.sleep(1.5)
        looked.append(task)
        return evaluate(task, *rest)

    monkeypatch.setattr(language.NextToken, "evaluate", slow)
    how = {**TINY_MODEL, "minutes": 0.06, "weight_decay": 0.1, "evaluations": 10}
    result = nanolm.train("embedded:tiny", out=tmp_path / "run", **how)
    assert result.seconds > 2.5
    assert len(looked) >= 3


def test_a_validation_file_of_its_own(corpus: Path, tmp_path: Path) -> None:
    validation = tmp_path / "val.txt"
    validation.write_text("The 7 cats sat on 8 mats.\n" * 3)
    result = nanolm.train(
        corpus, out=tmp_path / "run", val=str(validation), **{**SETTINGS, "steps": 2}
    )
    assert result.val_loss is not None


@pytest.mark.parametrize("text", ["a few", "one sentence only.", "x" * 400, "日本語" * 9])
def test_very_short_texts(text: str, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text(text)
    result = nanolm.train(file, out=tmp_path / "run", steps=2, batch=2)
    assert result.steps == 2


def test_one_character_is_too_little(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(DataError, match="too little to train on"):
        nanolm.train(tmp_path / "one.txt", out=tmp_path / "run", steps=2)


def test_a_mistake_does_not_use_up_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        nanolm.train("none.txt")
    assert not Path("runs").exists()
    with pytest.raises(UsageError, match="not a multiple"):
        nanolm.train("embedded:tiny", heads=5, preset="nano", steps=2)
    assert nanolm.train("embedded:tiny", **TINY_MODEL, steps=1).run == "runs/tiny"


def test_a_moved_run_still_works(trained: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(trained, tmp_path / "moved", symlinks=True)
    assert nanolm.load(moved).generate("the", tokens=3)
    assert nanolm.load_tokenizer(moved).decode([97]) == "a"


def test_a_ctrl_c_that_was_swallowed_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As numpy does during import."""
    monkeypatch.setattr(StopRequest, "missed", False)
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)
    assert nanolm.train("embedded:tiny", out=tmp_path, **SETTINGS).stopped == "interrupted"
    monkeypatch.setattr(StopRequest, "missed", False)
    assert nanolm.train("embedded:tiny", out=tmp_path, **SETTINGS).stopped == "steps"


def test_speed_is_that_of_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many evaluations there are, and however long they take."""
    train_step, evaluate, now = Trainer.train_step, language.NextToken.evaluate, 0.0

    def slower_later(trainer: Trainer, lr: float) -> Tensor:
        nonlocal now
        now += 0.25 if trainer.state.step < 30 else 0.5
        return train_step(trainer, lr)

    def thoroughly(task: language.NextToken, *arguments: Any) -> Any:
        nonlocal now
        now += 100
        return evaluate(task, *arguments)

    # Time passes only in these two, so a busy machine does not matter.
    clock = SimpleNamespace(monotonic=lambda: now, strftime=time.strftime)
    for module in (trainer, budget):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Trainer, "train_step", slower_later)
    monkeypatch.setattr(language.NextToken, "evaluate", thoroughly)
    nanolm.train("embedded:tiny", out=tmp_path, **{**SETTINGS, "steps": 60, "evaluations": 6})
    batch = TINY_MODEL["batch"] * TINY_MODEL["context"]
    found = {line["step"]: line["tokens_per_second"] for line in lines(tmp_path) if "loss" in line}
    assert len(found) > 4
    assert found == {step: batch * (4 if step <= 30 else 2) for step in found}


def test_a_final_score_on_more_text_is_reported(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "LEAST_EVALUATED_TOKENS", 32)
    monkeypatch.setattr(language, "EVALUATION_SHARE", 0.0)
    told: list[str] = []

    def watch(event: object) -> None:
        told.append(str(event))

    nanolm.train(corpus, out=tmp_path / "run", steps=4, notify=watch, **TINY_MODEL)
    (note,) = [text for text in told if text.startswith("final validation on all ")]
    assert note.endswith("during training used 32 of them")


def test_metrics_have_epochs(unbroken: Path) -> None:
    rows = lines(unbroken)
    last = rows[-1]
    assert last["epoch"] > 1
    for row in rows:
        assert row["epoch"] * last["tokens"] == pytest.approx(
            row["tokens"] * last["epoch"], rel=1e-3
        )
    assert all("train_loss" in row for row in rows if "val_loss" in row)
