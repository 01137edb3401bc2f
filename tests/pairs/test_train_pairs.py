"""Training on pairs: exact gradients, what a run leaves behind, and what is refused."""

import json
import math
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli, lines
from journeys import journeys
from torch import Tensor

import nanolm
from nanolm.cli.train_pairs import show
from nanolm.errors import DataError, UsageError
from nanolm.model.build import build_seq2seq
from nanolm.model.huggingface import load_seq2seq
from nanolm.model.stored import load_seq2seq_config
from nanolm.pairs import train
from nanolm.pairs.data import PairSplit, encode_pairs
from nanolm.pairs.recipe import fresh_config
from nanolm.pairs.settings import PairSettings
from nanolm.pairs.task import PairData, PairJob, PairTask
from nanolm.pairs.train import PairResult
from nanolm.pairs.translator import Translator
from nanolm.pretraining.begin import RunStart
from nanolm.runs.folder import Run
from nanolm.text.pairs import Pairs
from nanolm.text.tokenizer import train_tokenizer
from nanolm.training.budget import Budget
from nanolm.training.distributed import ALONE, World
from nanolm.training.events import Event, Preparing
from nanolm.training.interrupt import StopRequest
from nanolm.training.optim import Optimizers
from nanolm.training.state import State
from nanolm.training.step import Step

TINY: dict[str, Any] = {"layers": 1, "heads": 2, "dim": 16, "batch": 160, "tokenizer": "char"}
TINY |= {"threads": 1, "steps": 10, "evaluations": 2, "device": "cpu", "val_fraction": 0.1}
RESULT = {"run", "steps", "tokens", "seconds", "train_loss", "val_loss", "best_step", "stopped"}
FAMILIES = ("encoder-decoder", "modern-encoder-decoder", "seq2seq-gru")


def task_of(family: str, world: World) -> PairTask:
    words = ["a", "bcd", "efghij", "kl", "mnopqrstu", "vw", "xyz"]
    pairs = Pairs(words, [word[::-1] * (1 + len(word) % 3) for word in words], "", [], [])
    tokenizer = train_tokenizer([*pairs.sources, *pairs.targets], "char")
    shape: Any = {"family": family, "layers": 1, "dim": 16, "context": 32, "dropout": 0.0}
    settings = PairSettings(("words",), **shape, batch=400, label_smoothing=0.1, device="cpu")
    settings = replace(settings, weight_decay=0.1, evaluations=1)
    if family != "seq2seq-gru":
        settings = replace(settings, heads=2)
    torch.manual_seed(1)
    model = build_seq2seq(fresh_config(settings, tokenizer.vocab_size, None))
    encoded = encode_pairs(pairs, tokenizer, tokenizer, 32, 1, lambda *how_far: None)
    split = PairSplit(pairs, pairs, None, "", [], [])
    data = PairData(split, tokenizer, None, encoded, encoded)
    job = PairJob(settings, Run(Path("nowhere")), data, model, None)
    return PairTask(job, print, world)


def gradients(family: str, parts: int, world: World = ALONE) -> dict[str, Tensor]:
    """Of the first batch, with the recorded loss."""
    task = task_of(family, world)
    parameters = task.parameters()
    step = Step(task.loss, Optimizers(parameters), "float32")
    step.grad_accum_steps = parts
    loss = step.accumulate_gradients(task.batch(0))[0]
    found = {name: value.grad for name, value in parameters.items() if value.grad is not None}
    return {**found, "loss": loss}


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_and_processes_give_the_gradient_of_the_whole_batch(family: str) -> None:
    """However many rows and tokens each has; padding has no weight."""
    whole = gradients(family, 1)
    ways = [gradients(family, 2), gradients(family, 3), gradients(family, 7)]
    for size in (2, 3, 9):  # nine processes for seven rows
        each = [gradients(family, 1, World(rank, size)) for rank in range(size)]
        ways.append({name: sum(one[name] for one in each) / size for name in whole})  # type: ignore[misc]
    for way in ways:
        for name, value in whole.items():
            torch.testing.assert_close(way[name], value, atol=1e-6, rtol=1e-4)
    # And it is the mean over all target tokens.
    task = task_of(family, ALONE)
    source, lengths, target, weights = task.batch(0)
    mask = torch.arange(source.shape[1]) < lengths[:, None]
    logs = task.network(source, mask, target[:, :-1]).log_softmax(dim=2)
    nats = -logs.gather(2, target[:, 1:, None])[..., 0]
    assert whole["loss"].item() == pytest.approx(nats[weights > 0].mean().item(), rel=1e-5)
    assert task.tokens(()) == int(lengths.sum()) + int((weights > 0).sum())


def test_a_run_on_pairs(tmp_path: Path) -> None:
    """Two files line by line, with a test set; the result, the samples, the report."""
    for part in ("train", "val", "test"):
        numbers = range(60) if part == "train" else range(60, 70)
        for side, end in (("in", ""), ("out", " und so")):
            text = "".join(f"Nummer {n}{end}\n" for n in numbers)
            (tmp_path / f"{part}.{side}").write_text(text)
    files = {n: [tmp_path / f"{n}.in", tmp_path / f"{n}.out"] for n in ("train", "val", "test")}
    options = {**TINY, "val_fraction": None, "val": files["val"], "test": files["test"]}
    said: list[str] = []
    run = tmp_path / "run"
    result = nanolm.train_pairs(
        files["train"], out=run, notify=lambda event: said.append(str(event)), **options
    )
    values = result.to_json()
    assert values.keys() >= RESULT | {"val", "test"}
    assert values["val"].keys() >= {"bleu", "chrf", "exact"} <= values["test"].keys()
    assert json.loads((run / "run.json").read_text())["result"] == values
    assert "60 training pairs, 10 validation pairs" in "".join(said)
    samples = (run / "samples.md").read_text()
    assert samples.count("## Step") == 2
    assert "> source: Nummer 60\n> target: Nummer 60 und so\n> output: " in samples
    page = (run / "report.html").read_text()
    assert "BLEU" in page and "nanolm train-pairs --config" in page and "Nummer 60" in page
    assert {"val_loss", "val_bleu", "val_exact", "epoch"} <= lines(run)[-1].keys()
    assert load_seq2seq(run / "best").config.layers == 1


def test_start_from_another_run(tmp_path: Path) -> None:
    """With its tokenizer and its shape, even for pairs that its tokenizer does not know."""
    first, second = tmp_path / "first", tmp_path / "second"
    text = journeys(tmp_path)["pairs"].text
    nanolm.train_pairs(text, out=first, separate_vocabularies=True, **TINY)
    (tmp_path / "new.tsv").write_text("".join(f"ä{n}\tö{n}\n" for n in range(40)))
    fits = {name: TINY[name] for name in ("batch", "threads", "steps", "device", "val_fraction")}
    nanolm.train_pairs(tmp_path / "new.tsv", out=second, start_from=first, **fits)
    assert load_seq2seq_config(second / "last").dim == 16
    for name in ("tokenizer.json", "source_tokenizer.json"):
        assert (second / "last" / name).read_bytes() == (first / "last" / name).read_bytes()
    with pytest.raises(UsageError, match="--dim cannot be used with --from"):
        nanolm.train_pairs(text, out=tmp_path / "third", start_from=first, dim=8)


def test_a_changed_file_is_not_resumed(tmp_path: Path) -> None:
    journey = journeys(tmp_path)["pairs"]
    from faults import before_step, press

    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 3, press)
        assert journey.go(tmp_path / "run").stopped == "interrupted"
    whole = Path(journey.text).read_text()
    Path(journey.text).write_text(whole.replace("band", "bond"))
    with pytest.raises(DataError, match="the data has changed"):
        journey.go(tmp_path / "run")
    Path(journey.text).write_text(whole)
    assert journey.go(tmp_path / "run").stopped == "steps"


def test_epochs_and_minutes(tmp_path: Path) -> None:
    text = journeys(tmp_path)["pairs"].text
    how = {**TINY, "steps": None}
    by_epochs = nanolm.train_pairs(text, out=tmp_path / "epochs", **how, epochs=2)
    assert lines(tmp_path / "epochs")[-1]["epoch"] == pytest.approx(2, abs=0.1)
    assert by_epochs.stopped == "steps"
    by_time = nanolm.train_pairs(text, out=tmp_path / "time", **how, minutes=0.05)
    assert by_time.stopped in ("minutes", "too little time")
    assert by_time.seconds < 15


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"family": "modern"}, "--family modern: choose from encoder-decoder"),
        ({"attention": "dot"}, "try --family seq2seq-gru --attention dot"),
        ({"family": "seq2seq-rnn", "heads": 2}, "--heads is for Transformers"),
        ({"family": "seq2seq-rnn", "attention": "flash"}, "choose from none, additive, dot"),
        ({"label_smoothing": 1.0}, "--label-smoothing 1.0: must be from 0 to 0.9"),
        ({"val": ("pairs.tsv",)}, "--val pairs.tsv is also training data"),
        ({"val": ("a", "b", "c")}, "one table, or two files"),
        ({"val": ("a",), "test": ("a",)}, "--test a is the same as --val"),
        ({"steps": 5, "epochs": 2.0}, "use only one of --steps and --epochs"),
        ({"dtype": "float8"}, "try --dtype bfloat16"),
        ({"encoding": "nonsense"}, "--encoding nonsense: unknown encoding"),
        ({"workers": 2, "dropout": 0.1}, "^workers = 2 needs --dropout 0"),
        ({"dim": 100, "heads": 3}, "--dim 100 is not a multiple of --heads 3; try --dim 102"),
        ({"dim": 100, "heads": 3, "family": "encoder-decoder"}, "not a multiple of --heads 3"),
        ({"dim": 10, "heads": 2}, "an even width per head"),
        ({"dim": 101}, "an even width per head"),
        ({"dim": 0, "heads": 0}, "--dim 0: must be from 1"),
        ({"deterministic": True}, "--deterministic needs --steps or --epochs"),
        (
            {"tokenizer": "gpt2", "separate_vocabularies": True},
            "--separate-vocabularies cannot be used with --tokenizer gpt2",
        ),
        (
            {"tokenizer": "gpt2", "source_tokenizer": "char"},
            "--source-tokenizer char cannot be used with --tokenizer gpt2",
        ),
        (
            {"separate_vocabularies": False, "source_tokenizer": "char"},
            "--source-tokenizer char and --no-separate-vocabularies contradict",
        ),
    ],
)
def test_settings_that_do_not_fit(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        PairSettings(("pairs.tsv",), **options).check()


def test_sizes_that_fit() -> None:
    for shape in ({"dim": 99, "heads": 3, "family": "encoder-decoder"}, {"dim": 96}, {"heads": 5}):
        PairSettings(("pairs.tsv",), **shape).check()
    PairSettings(("pairs.tsv",), family="seq2seq-gru", dim=7).check()


def test_several_processes_cannot_share_a_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.tsv")
    monkeypatch.setattr(train, "first_process", lambda settings: nullcontext(World(0, 2)))
    for settings in (PairSettings(("-",)), PairSettings(("a.tsv",), test=("pipe.tsv",))):
        with pytest.raises(UsageError, match=r"can be read only once, .*save it to a file first"):
            train.train_pairs(settings)
    assert not Path("runs").exists()


def test_the_context_is_the_same_for_all_pairs_and_processes(tmp_path: Path) -> None:
    for name, size in (("train", 5), ("val", 100)):
        rows = [f"{'ab' * (n % size)} x\t{'ba' * (n % size)} y\n" for n in range(200)]
        (tmp_path / f"{name}.tsv").write_text("".join(rows))
    files = [(str(tmp_path / f"{name}.tsv"),) for name in ("train", "val")]
    how = {**TINY, "val_fraction": None, "dtype": "float32"}
    settings = PairSettings(files[0], val=files[1], **how)
    start = RunStart(settings, tmp_path / "run", lambda event: None)
    text = train.read_text(settings, None, lambda event: None)
    with start.locked():
        job = train.make_job(start, None, text)
    assert job.settings.context == 64
    theirs = train.encoded(text, job.settings, lambda *how_far: None)  # of another process
    for ours, other in ((job.data.train, theirs.train), (job.data.val, theirs.val)):
        assert max(ours.source.lengths.max(), ours.target.lengths.max()) <= 64
        for side in ("source", "target"):
            assert np.array_equal(getattr(ours, side).ids, getattr(other, side).ids)


def test_translations_fit_into_the_time() -> None:
    task, said = task_of("encoder-decoder", ALONE), list[Event]()
    task.notify = said.append
    sources = [f"{word} {n}" for n in range(5) for word in ("a", "bcd", "efghij", "kl")]
    translator = Translator(task.network, task.data.tokenizer)
    expected = [each.text for each in translator.translate(sources)]
    assert max(map(len, expected)) > 6
    # As `nanolm eval` does, also if the targets of the validation are short.
    task.data = replace(task.data, val=task.data.val.first(1))
    with StopRequest() as stop:
        assert task.translate_within(math.inf, sources, 4, stop, "test pairs") == expected
        assert {event.done for event in said if isinstance(event, Preparing)} == {*range(1, 21)}
        assert str(said[-1]).startswith("Preparing(what='translating test pairs', done=20")
        assert task.translate_within(-1, sources, 4, stop, "test pairs") == expected[:4]

        def press(event: Event) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        task.notify = press
        assert len(task.translate_within(math.inf, sources, 4, stop, "test pairs")) <= 4


def test_scores_of_some_pairs(tmp_path: Path) -> None:
    """There is time only for the first ones, and a note says so."""
    task, said = task_of("seq2seq-gru", ALONE), list[str]()
    task.notify = lambda event: said.append(str(event))
    split = replace(task.data.split, test=task.data.split.val)
    task.data = replace(task.data, split=split)
    task.settings = replace(task.settings, test=("a.tsv",), minutes=1.0)
    state = State(seconds=59.0)
    trainer: Any = SimpleNamespace(budget=Budget(task.settings, state), state=state)
    task.slowdown = 100.0
    with StopRequest() as stop:
        scores = train.final_scores(task, trainer, 3, stop)
    assert scores.keys() == {"val", "by_length", "test"}
    assert sum(group.count for group in scores["by_length"]) == 3
    assert "scored on the first 3 of 7 validation pairs" in said
    command = "`nanolm eval nowhere a.tsv` scores all"
    assert f"scored on the first 3 of 7 test pairs; {command}" in said


def test_stopped_while_it_translates(tmp_path: Path) -> None:
    journey, run = journeys(tmp_path)["pairs"], tmp_path / "run"

    def press(event: Event) -> None:
        if isinstance(event, Preparing) and event.what == "translating validation pairs":
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = journey.go(run, press, evaluations=1)
    assert (stopped.stopped, stopped.steps, stopped.val) == ("interrupted", 30, None)
    assert not Run(run).finished()
    weights = (run / "last" / "model.safetensors").read_bytes()
    done = journey.go(run, evaluations=1)
    assert (done.stopped, done.steps, done.val_loss) == ("steps", 30, stopped.val_loss)
    assert done.val is not None and Run(run).finished()
    assert (run / "last" / "model.safetensors").read_bytes() == weights


def test_settings_survive_a_file() -> None:
    settings = PairSettings(("a", "b"), val=("c", "d"), dropout=0.1)
    assert settings.to_dict()["val"] == ["c", "d"]
    assert PairSettings.from_dict(settings.to_dict()) == settings
    assert PairSettings.from_dict({"pairs": "a", "val": "c"}).val == ("c",)


def test_a_loss_that_is_not_finite_is_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    how: dict[str, Any] = {"steps": 9, "tokens": 9, "seconds": 1.0, "train_loss": None}
    show(PairResult("runs/x", **how, val_loss=None, best_step=9, stopped="steps"))
    assert "validation loss is not finite at step 9" in capsys.readouterr().out


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    journey = journeys(tmp_path)["pairs"]
    shown = cli(*journey.words("run", steps=10, evaluations=1), "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout).keys() >= RESULT | {"val"}
    assert "the plan" in shown.stderr and "source is 'source'" in shown.stderr
    missing = cli("train-pairs")
    assert missing.returncode == 2 and "nanolm train-pairs train.de train.en" in missing.stderr
    again = cli(*journey.words("run", steps=10, evaluations=1))
    assert again.returncode == 3 and "run is finished" in again.stderr
