"""Fine-tuning: every way to start and to train, stopping and resuming, and the files written."""

import hashlib
import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import TINY_MODEL
from faults import Killed, before_step, kill
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

import nanolm
from nanolm.classification.classifier import TextClassifier, load
from nanolm.classification.data import split_data
from nanolm.classification.finetune import FinetuneResult, finetune
from nanolm.classification.recipe import choose_settings, evaluations_for
from nanolm.classification.seeds import finetune_seeds
from nanolm.classification.settings import FinetuneSettings
from nanolm.classification.task import trained_names
from nanolm.errors import DataError, UsageError
from nanolm.files import verify
from nanolm.model.adapters import Adapters
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, configure
from nanolm.runs.checkpoint import list_checkpoints
from nanolm.training.events import Note, Progressed, Started
from nanolm.training.trainer import Trainer

FAST: dict[str, Any] = {"preset": "nano", "threads": 1, "batch": 8, "tokenizer": "byte"}
WORDS = ("good", "fine", "great"), ("bad", "poor", "awful")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose label depends on one word."""
    file = tmp_path_factory.mktemp("data") / "films.tsv"
    rows = [
        f"the {noun} was {word}\t{label}\n"
        for noun in ("film", "plot", "cast", "song", "end", "set", "food", "room", "view", "tune")
        for label, words in enumerate(WORDS)
        for word in words
    ]
    file.write_text("text\tlabel\n" + "".join(rows))
    return file


def quiet(event: object) -> None:
    pass


def run(
    data: Path, out: Path, notify: Callable[[Any], None] = quiet, **settings: Any
) -> FinetuneResult:
    return finetune(FinetuneSettings.from_dict({"data": str(data), **settings}), out, notify)


def weights(run: Path) -> dict[str, str]:
    """A checksum of each file with tensors in the last checkpoint."""
    files = sorted((run / "last").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def lines(run: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second")
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in timed} for line in found]


def stop_at(step: int) -> Callable[[object], None]:
    def press(event: object) -> None:
        if isinstance(event, Progressed) and event.record["step"] == step:
            signal.raise_signal(signal.SIGINT)

    return press


def test_it_learns_and_leaves_everything_behind(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(data, out, start_from="none", steps=120, lr=3e-3, sentiment=True, **FAST)
    assert result.stopped == "steps"
    assert result.labels == ("negative", "positive")
    assert result.val
    assert result.val.accuracy == 1.0
    assert result.val.count == 12
    assert result.test is None
    names = {entry.name for entry in out.iterdir()} - {".lock"}
    kept = {"best", "checkpoints", "config.toml", "epochs.svg", "last", "log.txt", "loss.svg"}
    assert names == {*kept, "metrics.jsonl", "mistakes.csv", "report.html", "run.json"}
    assert json.loads((out / "run.json").read_text())["result"]["val"]["accuracy"] == 1.0
    for folder in (*list_checkpoints(out / "checkpoints"), (out / "best").resolve()):
        verify(folder)
    known = load(out, print)
    assert next(iter(known.classify("the band was bad"))) == "positive"  # labels: 0 was good
    assert known.classify("  the band was good ") == known.classify("the band was good")


def test_calibration_is_in_the_folder_itself(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(data, out, start_from="none", steps=25, val_fraction=0.4, **FAST)
    assert result.temperature
    assert result.temperature != 1
    assert result.val
    assert result.uncalibrated
    assert result.val.confusion == result.uncalibrated.confusion
    split = split_data(FinetuneSettings(data=(str(data),), val_fraction=0.4), lambda *_: None)
    logits = load(out, print).logits(split.val.texts)
    lower = -np.log(
        np.exp(logits)[np.arange(len(split.val)), split.val.truth] / np.exp(logits).sum(axis=1)
    ).mean()
    assert lower == pytest.approx(result.val.loss, rel=1e-4)


HOW: dict[str, dict[str, Any]] = {
    "scratch": {"start_from": "none", "language_loss": 0.5, **FAST},
    "scratch, tied": {"start_from": "none", "language_loss": 0.5, **FAST, "family": "gpt2"},
    "scratch, mean": {"start_from": "none", "pool": "mean", **FAST},
    "scratch, lstm": {"start_from": "none", **FAST, "family": "lstm"},
    "scratch, muon": {"start_from": "none", **FAST, "optimizer": "muon", "dtype": "bfloat16"},
    "windows": {"start_from": "none", **FAST, "context": 9, "long": "windows"},
    "all": {"train": "all", "layer_decay": 0.8, "language_loss": 0.5},
    "last-1": {"train": "last-1"},
    "head": {"train": "head"},
    "lora": {"train": "lora"},
    "lora, mean of steps": {"train": "lora", "average": 0.8},
    "weighted": {"train": "all", "class_weights": True},
}


def test_what_is_open_follows_from_model_and_texts() -> None:
    trained = configure("modern", vocab_size=4096, layers=6, heads=6, dim=384, context=256)
    asked = FinetuneSettings(device="cpu")
    few, choices = choose_settings(asked, trained, 11_000_000, [20] * 960)
    many, _ = choose_settings(asked, trained, 11_000_000, [20] * 60_000)
    fresh, _ = choose_settings(replace(asked, start_from="none"), None, 1_000_000, [20] * 960)
    head, _ = choose_settings(replace(asked, train="head"), trained, 11_000_000, [20] * 960)
    assert (few.batch, many.batch) == (16, 64)
    assert (few.language_loss, many.language_loss) == (0.5, 0.0)
    assert [each.layer_decay for each in (few, many, fresh, head)] == [0.8, 0.8, 1.0, 1.0]
    assert [each.optimizer for each in (few, fresh, head)] == ["adamw", "adamw", "adamw"]
    # Batches of 32 such texts justify the cost of Muon's updates.
    more, _ = choose_settings(replace(asked, start_from="none"), None, 1_000_000, [20] * 1000)
    assert (more.optimizer, more.lr) == ("muon", 2e-3)
    assert more.dtype == "auto"  # on a CPU, it is measured
    # Narrower models get a higher rate for many texts: times the root of 768 / width.
    assert (few.lr, many.lr) == pytest.approx((0.05 / 384, 2**0.5 * 0.05 / 384), rel=1e-3)
    wide, _ = choose_settings(asked, replace(trained, dim=1536), 11_000_000, [20] * 60_000)
    nano, _ = choose_settings(asked, replace(trained, dim=48), 11_000_000, [20] * 60_000)
    assert (wide.lr, nano.lr) == pytest.approx((0.05 / 1536, 2e-3), rel=1e-2)
    assert "layer_decay" in [choice.what for choice in choices]
    for longest, context, reason in ((41, 128, "minimum"), (300, 300, ""), (900, 512, "maximum")):
        _, choices = choose_settings(asked, None, 1_000_000, [20, longest])
        length = next(choice for choice in choices if choice.what == "context")
        assert length.value == context and reason in length.reason
        assert f" {longest} tokens" in length.reason


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "tiny"
    nanolm.train("embedded:tiny", out=out, steps=30, **{**TINY_MODEL, "layers": 2, "context": 32})
    return out


@pytest.mark.parametrize("how", HOW)
def test_stopped_or_killed_and_resumed_is_bit_identical(
    how: str, data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"steps": 24, "evaluations": 4, "batch": 8, "dropout": 0.1}
    settings |= {"start_from": str(base)} | HOW[how]
    whole, stopped, killed = (tmp_path / name for name in ("whole", "stopped", "killed"))
    first = run(data, whole, **settings)
    assert run(data, stopped, stop_at(20), **settings).stopped == "interrupted"
    assert run(data, stopped, **settings).stopped == first.stopped
    with monkeypatch.context() as patch:
        before_step(patch, 15, kill)
        with pytest.raises(Killed):
            run(data, killed, **settings)
    started: list[int] = []
    last = run(
        data,
        killed,
        lambda event: started.append(event.step) if isinstance(event, Started) else None,
        **settings,
    )
    assert started[0] in (12, 15)  # 15 may not have been complete
    for other in (stopped, killed):
        assert weights(other) == weights(whole)
        assert lines(other) == lines(whole)
        assert (other / "best/model.safetensors").read_bytes() == (
            whole / "best/model.safetensors"
        ).read_bytes()
    assert last.val == first.val


def test_what_is_frozen_stays(data: Path, base: Path, tmp_path: Path) -> None:
    before = nanolm.load(base).model.state_dict()
    changed: dict[str, set[str]] = {}
    for which in ("all", "last-1", "head", "lora"):
        out = tmp_path / which
        run(data, out, start_from=str(base), steps=4, train=which, language_loss=0.0, batch=8)
        after = load(out / "last", print).model.base.state_dict()
        changed[which] = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed["all"] == set(before) - {"head.weight"}
    assert changed["last-1"] == {name for name in before if name.startswith(("blocks.1.", "norm."))}
    assert changed["head"] == set()
    assert changed["lora"] == {  # merged
        name for name in before if ".attention." in name or ".feed_forward." in name
    } - {name for name in before if "norm" in name}


def test_lora_adds_what_is_merged() -> None:
    torch.manual_seed(0)
    base = configure("modern", vocab_size=50, layers=2, heads=2, dim=16, context=8)
    model = Classifier(ClassifierConfig(base=base, labels=("a", "b"), window=8)).eval()
    ids, lengths = torch.randint(50, (3, 8)), torch.tensor([8, 2, 5])
    plain = model(ids, lengths)
    adapters = Adapters(model.base, rank=2)
    assert torch.equal(model(ids, lengths), plain)  # no change yet
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    beside = model(ids, lengths)
    with adapters.merged():
        torch.testing.assert_close(model(ids, lengths), beside, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_layers_far_from_the_end_learn_more_slowly(data: Path, base: Path, tmp_path: Path) -> None:
    rates: dict[float, list[str]] = {}

    def look(self: Trainer, *rest: Any) -> str:
        for name in self.task.parameters():
            rates.setdefault(round(self.task.lr_scale(name), 6), []).append(name)
        return "interrupted"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", look)
        run(data, tmp_path / "run", start_from=str(base), steps=3, layer_decay=0.5, train="all")
    assert rates[1.0] == ["score.weight"] or "language_head.weight" in rates[1.0]
    assert {name.split(".")[1] for name in rates[0.5]} == {"blocks", "norm"}
    assert all(name.startswith("base.blocks.0.") for name in rates[0.25])
    assert rates[0.125] == ["base.token_embedding.weight"]


def test_names_of_what_is_trained() -> None:
    base = configure("gpt2", vocab_size=50, layers=3, heads=2, dim=16, context=8)
    model = Classifier(ClassifierConfig(base=base, labels=("a", "b"), window=8))
    assert trained_names(model, "head") == ["score.weight"]
    late = trained_names(model, "last-2")
    assert {name.split(".")[2] for name in late if ".blocks." in name} == {"1", "2"}
    assert "base.norm.bias" in late
    assert "base.position_embedding.weight" not in late
    with pytest.raises(UsageError, match="the model has 3 layers"):
        trained_names(model, "last-3")


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_from_a_hugging_face_folder_to_a_pipeline(
    family: str, data: Path, base: Path, tmp_path: Path
) -> None:
    """Load a Hugging Face model, fine-tune it, and use it in their pipeline."""
    shape = {
        "vocab_size": 300,
        "max_position_embeddings": 48,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if family != "gpt2":
        shape |= {"num_key_value_heads": 1, "intermediate_size": 48, "head_dim": 16}
    config = transformers.AutoConfig.for_model(family, **shape)
    transformers.set_seed(0)
    theirs = tmp_path / "theirs"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(theirs)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / "best" / name, theirs)
    out = tmp_path / "run"
    result = run(
        data, out, start_from=str(theirs), steps=30, lr=1e-3, train="all", sentiment=True, batch=8
    )
    assert result.val
    pipeline = transformers.pipeline("text-classification", model=str(out / "best"), top_k=None)
    known = load(out, print)
    assert isinstance(known, TextClassifier)
    for text in ("the band was bad", "a", "the film was great and the plot was fine"):
        ours = known.classify(text)
        (given,) = pipeline([text])
        assert [each["label"] for each in given] == list(ours)
        for each in given:
            assert each["score"] == pytest.approx(ours[each["label"]], abs=1e-4)


def test_a_classifier_can_be_taken_further(data: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run(data, first, start_from="none", steps=4, **FAST)
    result = run(data, tmp_path / "second", start_from=str(first), steps=4)
    assert result.val
    with pytest.raises(DataError, match="--language-loss needs a language model"):
        run(data, tmp_path / "third", start_from=str(first), steps=4, language_loss=0.5)


def test_it_stops_when_validation_is_past_its_best(tmp_path: Path) -> None:
    file = tmp_path / "noise.tsv"
    random = np.random.default_rng(0)
    rows = [f"text {random.integers(10**9)}\t{random.integers(2)}\n" for _ in range(60)]
    file.write_text("text\tlabel\n" + "".join(rows))  # can only be memorized
    result = run(file, tmp_path / "run", start_from="none", epochs=200, lr=1e-2, patience=3, **FAST)
    assert result.stopped == "enough"
    assert result.steps < 200 * 48 / 8
    assert result.best_step < result.steps


def test_what_is_used_up_first_ends_it(data: Path, tmp_path: Path) -> None:
    one = run(data, tmp_path / "one", start_from="none", epochs=1, **FAST)
    both = run(data, tmp_path / "both", start_from="none", epochs=1, minutes=5.0, **FAST)
    assert (both.stopped, both.steps) == ("steps", one.steps)


def test_a_changed_file_or_model_is_refused(data: Path, base: Path, tmp_path: Path) -> None:
    file, start = tmp_path / "mine.tsv", shutil.copytree(base, tmp_path / "base", symlinks=True)
    shutil.copy(data, file)
    how: dict[str, Any] = {"start_from": str(start), "steps": 20, "batch": 8}
    run(file, tmp_path / "run", stop_at(10), **how)
    before = file.read_text()
    file.write_text(before.replace("the film was bad", "the film was mad"))
    with pytest.raises(DataError, match="the data has changed"):
        run(file, tmp_path / "run", **how)
    file.write_text(before)
    nanolm.train(
        "embedded:tiny", out=tmp_path / "x", steps=2, seed=2, **{**TINY_MODEL, "context": 32}
    )
    shutil.rmtree(start)
    (tmp_path / "x").rename(start)
    with pytest.raises(DataError, match=r"the (tokenizer|model to start from) has changed"):
        run(file, tmp_path / "run", **how)


def test_the_newest_language_model_is_where_it_starts(
    data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []

    def keep(event: object) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    result = finetune(FinetuneSettings(data=(str(data),), steps=2, **FAST), notify=keep)
    assert result.run == "runs/films"
    assert any("training from scratch" in text for text in notes)
    shutil.copytree(base, "runs/tiny", symlinks=True)
    finetune(FinetuneSettings(data=(str(data),), steps=2), notify=keep)
    assert any("starting from runs/tiny, the newest" in text for text in notes)
    settings = json.loads(Path("runs/films-2/run.json").read_text())["request"]
    assert settings["start_from"] == str((tmp_path / "runs/tiny").absolute())


def test_mean_and_spread_over_seeds(data: Path, tmp_path: Path) -> None:
    settings = FinetuneSettings(
        data=(str(data),), start_from="none", steps=30, test_fraction=0.2, **FAST
    )
    spread = finetune_seeds(settings, 3, tmp_path / "seeds", quiet)
    accuracies = [result["val"]["accuracy"] for result in spread.results]
    summary = spread.summary()
    assert summary["val"]["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert summary["val"]["accuracy"]["spread"] == pytest.approx(np.std(accuracies, ddof=1))
    assert summary["test"].keys() == {"accuracy", "macro_f1", "loss"}
    notes: list[str] = []
    again = finetune_seeds(settings, 3, tmp_path / "seeds", lambda e: notes.append(str(e)))
    assert again.summary() == summary
    assert len([note for note in notes if "is already finished" in note]) == 3


@pytest.mark.parametrize("train", ["all", "last-1"])
def test_the_weights_of_several_seeds_are_averaged(
    data: Path, base: Path, tmp_path: Path, train: str
) -> None:
    how: Any = {"data": (str(data),), "start_from": str(base), "steps": 20, "threads": 1}
    settings = FinetuneSettings(**how, batch=8, train=train, val=str(tmp_path / "val.tsv"))
    rows = data.read_text().splitlines(keepends=True)
    Path(str(settings.val)).write_text("".join([rows[0], *(f"so {row}" for row in rows[1:])]))
    spread = finetune_seeds(settings, 2, tmp_path / "seeds", quiet)
    assert spread.average
    assert spread.average["run"] == str(tmp_path / "seeds/average-1-2")
    average = nanolm.load_classifier(spread.average["run"])
    members = [nanolm.load_classifier(result["run"]) for result in spread.results]
    raw = [
        classifier.model.score.weight * result["temperature"]
        for classifier, result in zip(members, spread.results, strict=True)
    ]
    own = average.model.score.weight * spread.average["temperature"]
    assert torch.allclose(own, sum(raw) / 2, rtol=1e-3, atol=1e-6)
    last = [list(each.model.base.parameters())[-2] for each in (average, *members)]
    assert torch.allclose(last[0], (last[1] + last[2]) / 2, atol=1e-6)
    assert not torch.equal(last[1], last[2])
    correct = sum(
        next(iter(average.classify(text))) == label
        for text, label in (
            row.split("\t") for row in Path(str(settings.val)).read_text().splitlines()[1:]
        )
    )
    assert spread.average["val"]["accuracy"] == pytest.approx(correct / (len(rows) - 1))
    notes: list[str] = []
    again = finetune_seeds(settings, 2, tmp_path / "seeds", lambda e: notes.append(str(e)))
    assert again.average == spread.average
    assert len([note for note in notes if "is already finished" in note]) == 3
    # If the seed decides what is held out, each was trained on texts that another holds out.
    apart = replace(settings, val=None)
    assert finetune_seeds(apart, 2, tmp_path / "apart", quiet).average is None


def test_counting_words_tells_nothing_in_the_embedded_reviews() -> None:
    split = split_data(FinetuneSettings(val_fraction=0.2), lambda *_: None)
    counts = TfidfVectorizer()
    model = LogisticRegression(max_iter=1000)
    model.fit(counts.fit_transform(split.train.texts), split.train.truth)
    assert model.score(counts.transform(split.val.texts), split.val.truth) < 0.65


@pytest.mark.slow
def test_word_order_is_learned_from_scratch(tmp_path: Path) -> None:
    result = finetune(FinetuneSettings(start_from="none"), tmp_path / "run")
    assert result.val
    assert result.val.accuracy > 0.97
    assert result.seconds < 120


def test_metrics_have_epochs_and_training_means_over_them(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "run", start_from="none", epochs=5, **FAST)  # 48 texts, 6 batches each
    rows = lines(tmp_path / "run")
    assert all(row["epoch"] == pytest.approx(row["step"] / 6, abs=1e-4) for row in rows)
    evaluated = [row for row in rows if "val_loss" in row]
    assert [row["epoch"] for row in evaluated] == [1, 2, 3, 4, 5]
    assert all(0 <= row["train_accuracy"] <= 1 for row in evaluated)
    # Metrics are means over ten steps, here five lines in all.
    by_step = [row["loss"] for row in rows if "loss" in row]
    by_epoch = [row["train_loss"] for row in evaluated]
    assert np.mean(by_epoch) == pytest.approx(np.mean(by_step), abs=1e-6)
    assert (tmp_path / "run/epochs.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("epochs", "times"), [(1, 5), (3, 6), (8, 8), (20, 20), (70, 35), (0.2, 5)]
)
def test_evaluations_fall_on_epochs(epochs: float, times: int) -> None:
    assert evaluations_for(epochs) == times
