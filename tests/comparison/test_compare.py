"""A complete comparison of models, on a small scale."""

import json
import os
import signal
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from journeys import journeys

from nanolm.classification.settings import FinetuneSettings
from nanolm.comparison import pairs as of_pairs
from nanolm.comparison import step_times
from nanolm.comparison.compare import CompareRequest, RowTrained, averaged, compare
from nanolm.comparison.page import compare_page
from nanolm.comparison.pairs import PairComparison
from nanolm.comparison.training import train_in_run
from nanolm.errors import DataError, UsageError
from nanolm.pairs.settings import PairSettings
from nanolm.pairs.task import SAMPLES
from nanolm.training.events import Progressed
from nanolm.training.settings import TrainSettings

QUICK = ("majority", "bag", "averaging")


@pytest.fixture
def labeled(tmp_path: Path) -> FinetuneSettings:
    data = journeys(tmp_path)["fine-tuning"].text
    return FinetuneSettings(data=(data,), device="cpu", threads=1)


@pytest.mark.slow
def test_all_rows_learn(labeled: FinetuneSettings, trained: Path, tmp_path: Path) -> None:
    settings = FinetuneSettings(**{**vars(labeled), "start_from": str(trained)})
    outcome = compare(CompareRequest(settings, minutes=0.4, seeds=1), tmp_path / "all")
    assert outcome.finished
    assert outcome.measure == "accuracy"
    assert [row.name for row in outcome.rows] == list(CompareRequest(settings).kinds())
    found = {row.name: row.means["accuracy"] for row in outcome.rows}
    assert found["majority"] == 0.5
    assert found["bag"] == found["pairs"] == 1.0  # one word decides
    for row in outcome.rows[1:]:
        assert row.means["parameters"] > 0
        assert row.means["long_seconds"] > 0
    picture = (tmp_path / "all" / "compare.svg").read_text()
    assert all(row.title in picture for row in outcome.rows)
    assert (tmp_path / "all" / "transformer" / "seed-1" / "best").exists()
    page = compare_page(tmp_path / "all")
    assert "Validation accuracy: 100.0%." in page and ">majority class<" in page


def test_it_goes_on_with_the_row_it_was_at(labeled: FinetuneSettings, tmp_path: Path) -> None:
    request = CompareRequest(labeled, minutes=0.2, only=QUICK, seeds=2)

    def press(event: Any) -> None:
        if isinstance(event, RowTrained) and event.row.title == "bag of words, linear":
            os.kill(os.getpid(), signal.SIGINT)

    stopped = compare(request, tmp_path / "run", press)
    assert not stopped.finished
    assert [row.name for row in stopped.rows] == ["majority", "bag"]
    learned: list[tuple[str, int]] = []

    def note(event: Any) -> None:
        if isinstance(event, RowTrained):
            learned.append((event.row.title, event.seed))

    whole = compare(request, tmp_path / "run", note)
    assert whole.finished
    assert learned[0] == ("averaged embeddings", 1)
    assert len(learned) == 4
    assert whole.rows[1].results[0] == stopped.rows[1].results[0]
    assert [row.seeds for row in whole.rows] == [2, 2, 2]
    again = compare(request, tmp_path / "run", note)
    assert len(learned) == 4
    assert again == whole
    with Path(labeled.data[0]).open("a") as file:
        file.write("one more\tgood\n")
    with pytest.raises(DataError, match=r"the data has changed since .*run.*--out"):
        compare(request, tmp_path / "run")
    other = CompareRequest(labeled, minutes=0.3, only=QUICK, seeds=2)
    with pytest.raises(DataError, match="nanolm compare` can resume with these settings"):
        compare(other, tmp_path / "run")


def test_a_run_within_it_goes_on(labeled: FinetuneSettings, tmp_path: Path) -> None:
    request = CompareRequest(labeled, minutes=0.1, only=("transformer",), seeds=1)

    def press(event: Any) -> None:
        if isinstance(event, Progressed):
            os.kill(os.getpid(), signal.SIGINT)

    stopped = compare(request, tmp_path / "run", press)
    assert (stopped.finished, stopped.rows) == (False, [])
    whole = compare(request, tmp_path / "run")
    assert whole.finished
    assert "resuming" in (tmp_path / "run" / "transformer" / "seed-1" / "log.txt").read_text()
    file = tmp_path / "run" / "compare.json"  # as if killed before this was written
    file.write_text(json.dumps({**json.loads(file.read_text()), "found": {}, "finished": False}))
    again = compare(request, tmp_path / "run")
    assert again.rows[0].means["accuracy"] == whole.rows[0].means["accuracy"]


def test_seeds_end_with_the_time(labeled: FinetuneSettings, tmp_path: Path) -> None:
    asked = CompareRequest(labeled, minutes=0.003, only=QUICK)
    notes: list[str] = []
    outcome = compare(asked, tmp_path / "run", lambda event: notes.append(str(event)))
    assert outcome.finished
    assert outcome.rows[0].seeds == 1
    assert "there is only time for 1 of 5 seeds" in notes


@pytest.fixture
def short_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "SEQUENCE_LENGTHS", (8, 32))
    monkeypatch.setattr(step_times, "MIN_SECONDS", 0.01)
    monkeypatch.setattr(step_times, "GROWTH", 0.0)  # both, even on a busy machine


def test_measuring_leaves_time_for_the_models(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine, where measuring steps at all lengths would take longer than the budget."""

    def slow(trial: Any) -> float:
        time.sleep(0.1)
        return 0.1

    monkeypatch.setattr(step_times, "SpeedTrial", lambda *how, **more: SimpleNamespace(close=int))
    monkeypatch.setattr(step_times, "median_step", slow)
    request = CompareRequest(TrainSettings((str(corpus),), device="cpu"), 0.02, only=("ngram",))
    begin = time.monotonic()
    outcome = compare(request, tmp_path / "run")
    assert time.monotonic() - begin < 60 * request.minutes
    assert outcome.finished and set(outcome.lengths) == {"rnn", "lstm", "modern"}
    assert all([length for length, _ in each] == [64] for each in outcome.lengths.values())


@pytest.mark.usefixtures("short_lengths")
def test_a_plain_text(corpus: Path, tmp_path: Path) -> None:
    settings = TrainSettings((str(corpus),), device="cpu", threads=1)
    outcome = compare(CompareRequest(settings, minutes=0.15), tmp_path / "run")
    assert outcome.finished
    assert [row.name for row in outcome.rows] == [
        "ngram",
        "convolution",
        "rnn",
        "lstm",
        "transformer",
    ]
    for row in outcome.rows:
        assert 0 < row.means["bits_per_byte"] < 8
        assert row.results[0]["curve"]
    assert list(outcome.lengths) == ["rnn", "lstm", "modern"]
    assert all([length for length, _ in each] == [8, 32] for each in outcome.lengths.values())
    kept = json.loads((tmp_path / "run" / "compare.json").read_text())
    assert kept["lengths"]["rnn"][0][0] == 8
    assert "milliseconds per step" in (tmp_path / "run" / "lengths.svg").read_text()
    assert "LSTM" in (tmp_path / "run" / "compare.svg").read_text()
    page = compare_page(tmp_path / "run")
    assert '<p class="result">Best of 5: ' in page and page.count("<figure>") == 2
    assert "seconds of training" in page and "tokens in the sequence" in page


def test_pairs(tmp_path: Path) -> None:
    data = journeys(tmp_path)["pairs"].text
    settings = PairSettings(pairs=(data,), device="cpu", threads=1, limit=60)
    request = CompareRequest(settings, minutes=0.15, only=("bottleneck", "modern"))

    def press(event: Any) -> None:
        if isinstance(event, RowTrained):
            os.kill(os.getpid(), signal.SIGINT)

    stopped = compare(request, tmp_path / "run", press)
    assert not stopped.finished
    assert [row.name for row in stopped.rows] == ["bottleneck"]
    outcome = compare(request, tmp_path / "run")
    assert outcome.finished
    assert outcome.measure == "exact"  # three or four words, most of them numbers
    assert outcome.rows[0] == stopped.rows[0]
    runs = [tmp_path / "run" / name / "seed-1" for name in ("bottleneck", "modern")]
    configs = [tomllib.loads((run / "config.toml").read_text()) for run in runs]
    assert configs[0]["attention"] == "none"
    assert [config["family"] for config in configs] == ["seq2seq-gru", "modern-encoder-decoder"]
    for row in outcome.rows:
        groups = row.results[0]["by_length"]
        # On a slow machine, there is too little time to translate all 12.
        assert SAMPLES <= sum(group["count"] for group in groups) <= 12
        assert row.means["long_exact"] == groups[-1]["exact"]
        assert row.means["parameters"] > 1000
    picture = (tmp_path / "run" / "compare.svg").read_text()
    assert "GRU" in picture
    assert "exact match" in picture
    assert "BLEU" not in picture
    page = compare_page(tmp_path / "run")
    assert "exact match (%)" in page and "Best of 2: " in page


def test_sentences_are_measured_by_bleu(tmp_path: Path) -> None:
    rows = [f"{a} {b} x\tthe {a}th of the {b}s is here" for a in range(20) for b in range(20, 40)]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows))
    settings = PairSettings(pairs=(str(tmp_path / "pairs.tsv"),))
    assert PairComparison(settings, print).measure == "exact"  # few words, as in phonemes
    rows = [f"{n} x\tthe {n}th of many is here" for n in range(300)]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows))
    assert PairComparison(settings, print).measure == "bleu"


def test_a_loss_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"bleu": 1.0, "exact": 0.5}
    result = {"val": scores, "by_length": [scores], "seconds": 9.0, "steps": 30}
    monkeypatch.setattr(of_pairs, "train_in_run", lambda *how: result)
    parameters = SimpleNamespace(parameters=7)
    monkeypatch.setattr(of_pairs, "describe", lambda *how: parameters)
    task = PairComparison(PairSettings(pairs=("x.tsv",)), print)
    found = [task.train("modern", 1, 9.0, tmp_path)]
    result["val_loss"] = 2.0
    found = [task.train("modern", 2, 9.0, tmp_path), *found]
    row = averaged("modern", task.kinds["modern"], found, "exact")
    assert row.means["exact"] == 0.5 and "val_loss" not in row.means


def test_an_unfinished_run_keeps_the_settings_it_began_with(tmp_path: Path) -> None:
    """Those that the comparison chooses may differ in another version."""
    began = {"minutes": 2.0, "epochs": 3.0}  # no n-grams, as in version 0.1
    (tmp_path / "run.json").write_text(json.dumps({"request": began, "fingerprints": {}}))
    asked: list[Any] = []

    def train(settings: Any, folder: Path) -> Any:
        asked.append(settings)
        facts = {"request": began, "fingerprints": {}, "result": {"steps": 5}}
        (folder / "run.json").write_text(json.dumps(facts))
        return SimpleNamespace(stopped="minutes")

    settings = FinetuneSettings(("x",), minutes=1.5, epochs=2.0, ngrams=False)
    assert train_in_run(settings, tmp_path, train) == {"steps": 5}
    assert (asked[0].minutes, asked[0].epochs, asked[0].ngrams) == (2.0, 3.0, None)


def test_a_pipe_cannot_be_read_for_every_model() -> None:
    for settings in (PairSettings(pairs=("-",)), TrainSettings(corpus=("-",))):
        with pytest.raises(UsageError, match=r"a comparison reads .*save it to a file first"):
            CompareRequest(settings).check()


def test_what_cannot_be_compared(labeled: FinetuneSettings) -> None:
    with pytest.raises(UsageError) as raised:
        CompareRequest(labeled, minutes=0, only=("lstn", "pretrained"), seeds=0).check()
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("--only lstn: choose from majority, bag, ")
    assert lines[0].endswith("did you mean lstm?")
    assert lines[1].startswith("--only pretrained needs --from RUN")
    assert lines[2].startswith("--budget 0: must be above 0")
    assert lines[3] == "--seeds 0: must be from 1 to 100"
    with pytest.raises(UsageError, match=r"--budget 200000: .*at most 100,000 minutes"):
        CompareRequest(labeled, minutes=200_000).check()
