"""Training on pairs: exact gradients, what a run leaves behind, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from nanolm.pairs.data import PairSplit, encode_pairs
from nanolm.pairs.recipe import fresh_config
from nanolm.pairs.settings import PairSettings
from nanolm.pairs.task import PairData, PairJob, PairTask
from nanolm.pairs.train import PairResult
from nanolm.runs.folder import Run
from nanolm.text.pairs import Pairs
from nanolm.text.tokenizer import train_tokenizer
from nanolm.training.distributed import ALONE, World
from nanolm.training.optim import Optimizers
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
    ],
)
def test_settings_that_do_not_fit(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        PairSettings(("pairs.tsv",), **options).check()


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
