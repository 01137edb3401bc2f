"""Classifier metrics, compared with scikit-learn, and how they are shown."""

import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_recall_fscore_support,
)

from nanolm.classification.classifier import TrueLabels
from nanolm.classification.metrics import (
    ClassifierScores,
    Mistake,
    fit_temperature,
    majority,
    score,
    softmax,
    worst_mistakes,
)
from nanolm.cli.scores import show_mistakes, show_scores
from nanolm.errors import DataError

Case = tuple[Any, Any]  # logits (n, classes), truth (n,)


def random_cases() -> Iterator[Case]:
    generator = np.random.default_rng(1)
    for _ in range(300):
        count, classes = generator.integers(1, 60), generator.integers(2, 8)
        logits = generator.normal(0, generator.uniform(0.1, 8), (count, classes))
        truth = generator.integers(0, generator.integers(1, classes + 1), count)
        width = generator.choice(["float32", "float64"])
        yield logits.astype(width), truth.astype(generator.choice(["uint8", "int64"]))


def degenerate_cases() -> Iterator[Case]:
    one = np.eye(3)[[0, 1, 2, 1]]
    yield one * 5, np.array([0, 1, 2, 1])  # perfect
    yield one * 5, np.array([1, 2, 0, 0])  # all wrong
    yield one * 5, np.array([0, 0, 0, 0])  # classes never true
    yield np.eye(3)[[0, 0, 0]], np.array([0, 1, 2])  # classes never predicted
    yield np.eye(4)[[0, 1, 0]], np.array([1, 0, 0])  # classes with neither
    yield np.zeros((5, 2)), np.array([0, 1, 1, 0, 1])  # uninformative
    yield np.array([[0.5, 2.0]]), np.array([1])  # one row


def test_the_figures_are_those_of_scikit_learn() -> None:
    for logits, truth in (*random_cases(), *degenerate_cases()):
        classes = logits.shape[1]
        numbers = range(classes)
        found = score(logits, truth, [f"label {number}" for number in numbers], temperature=1.5)
        predicted = logits.argmax(axis=1)
        probabilities = softmax(logits, 1.5)
        same = {"labels": list(numbers), "zero_division": 0}
        expected = precision_recall_fscore_support(truth, predicted, **same)
        columns = [[each.precision, each.recall, each.f1, each.support] for each in found.classes]
        np.testing.assert_allclose(np.transpose(columns), expected, rtol=1e-12)
        assert found.macro_f1 == pytest.approx(f1_score(truth, predicted, average="macro", **same))
        assert found.accuracy == pytest.approx(accuracy_score(truth, predicted))
        assert found.loss == pytest.approx(log_loss(truth, probabilities, labels=list(numbers)))
        matrix = confusion_matrix(truth, predicted, labels=list(numbers))
        assert [list(row) for row in found.confusion] == matrix.tolist()
        assert found.count == len(truth) == matrix.sum()


def test_calibration_by_hand() -> None:
    for logits, truth in (*random_cases(), *degenerate_cases()):
        found = score(logits, truth, [""] * logits.shape[1])
        rows = [
            (max(row), int(np.argmax(row)) == right)
            for row, right in zip(softmax(logits).tolist(), truth, strict=True)
        ]
        error = 0.0
        for number, each in enumerate(found.bins):
            assert (each.low, each.high) == (number / 10, (number + 1) / 10)
            inside = [row for row in rows if each.low < row[0] <= each.high]
            assert each.count == len(inside)
            if inside:
                confidence = sum(sure for sure, _ in inside) / len(inside)
                accuracy = sum(right for _, right in inside) / len(inside)
                assert each.confidence == pytest.approx(confidence)
                assert each.accuracy == pytest.approx(accuracy)
                error += abs(confidence - accuracy) * len(inside) / len(rows)
        assert len(found.bins) == 10 and sum(each.count for each in found.bins) == len(rows)
        assert found.calibration_error == pytest.approx(error)


def test_extreme_logits_are_safe() -> None:
    found = score(np.array([[1e4, -1e4], [1e4, -1e4]]), np.array([0, 1]), ["a", "b"])
    assert found.loss == 1e4  # scikit-learn would stop at 36, where float64 rounds to 0
    half = np.array([[6e4, -6e4]], dtype="float16")
    assert score(half, np.array([1]), ["a", "b"]).loss == pytest.approx(12e4, rel=1e-3)
    assert found.calibration_error == 0.5
    assert softmax(half, 1e-3).tolist() == [[1.0, 0.0]]


def test_a_broken_model_and_no_text_at_all() -> None:
    broken = score(np.array([[math.nan, 1.0], [0.0, 1.0]]), np.array([0, 1]), ["a", "b"])
    values = json.loads(json.dumps(broken.to_json(), allow_nan=False))
    assert values["loss"] is None and values["calibration_error"] is None
    nothing = score(np.empty((0, 2)), np.empty(0, dtype=int), ["a", "b"])
    assert (nothing.count, nothing.accuracy, nothing.loss) == (0, 0, 0)


def test_json_has_every_name() -> None:
    values = score(np.eye(2), np.array([0, 1]), ["a", "b"]).to_json()
    assert json.loads(json.dumps(values)) == values
    assert list(values) == [
        *("accuracy", "macro_f1", "loss", "count", "classes", "confusion"),
        *("calibration_error", "bins"),
    ]
    first = {"label": "a", "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1}
    assert values["classes"][0] == first
    assert values["confusion"] == [[1, 0], [0, 1]]


@pytest.mark.parametrize("true_temperature", [0.3, 1.0, 4.0])
def test_the_temperature_is_found(true_temperature: float) -> None:
    generator = np.random.default_rng(2)
    logits = generator.normal(0, 2, (4000, 3))
    chances = softmax(logits)
    truth = (chances.cumsum(axis=1) < generator.random((4000, 1))).sum(axis=1)
    logits *= true_temperature
    found = fit_temperature(logits, truth)
    assert found == pytest.approx(true_temperature, rel=0.1)

    def loss(temperature: float) -> float:
        return score(logits, truth, "abc", temperature).loss

    best = min(loss(temperature) for temperature in np.geomspace(0.1, 10, 100))
    assert loss(found) < best + 0.002  # except for the prior
    warm = score(logits, truth, "abc", found)
    assert warm.calibration_error < 0.03
    assert warm.confusion == score(logits, truth, "abc").confusion


def test_the_temperature_of_odd_data_is_bounded() -> None:
    perfect, truth = np.eye(3) * 4, np.array([0, 1, 2])
    # No mistakes in a few texts is not certainty; in many texts it may be.
    assert 0.9 < fit_temperature(perfect, truth) < 1
    assert fit_temperature(np.tile(perfect, (9999, 1)), np.tile(truth, 9999)) < 0.6
    wrong = np.tile([1, 2, 0], 9999)
    assert fit_temperature(np.tile(perfect, (9999, 1)), wrong) == pytest.approx(20)
    assert fit_temperature(perfect * 1e6, truth) == 1.0  # nothing to gain
    assert fit_temperature(np.zeros((4, 2)), np.array([0, 1, 0, 0])) == 1.0
    assert fit_temperature(np.empty((0, 2)), np.empty(0, dtype=int)) == 1.0
    assert fit_temperature(perfect * math.nan, truth) == 1.0


def test_majority() -> None:
    assert majority(np.array([0, 2, 2, 1]), 3) == 0.5
    assert majority(np.array([1, 1]), 3) == 1.0
    assert majority(np.empty(0, dtype=int), 2) == 0.0


def test_the_most_confident_mistakes_come_first() -> None:
    logits = np.array([[0.0, 1.0], [0.0, 5.0], [3.0, 0.0], [9.0, 0.0]])
    truth = np.array([0, 0, 1, 0])
    texts, labels = ["a", "b", "c", "d"], ("bad", "good")
    found = worst_mistakes(texts, logits, truth, labels, temperature=2.0)
    assert [mistake.text for mistake in found] == ["b", "c", "a"]
    assert (found[0].label, found[0].predicted) == ("bad", "good")
    assert found[0].probability == pytest.approx(1 / (1 + math.exp(-2.5)))
    assert worst_mistakes(texts[3:], logits[3:], truth[3:], labels) == ()


def scores_of(*labels: str) -> ClassifierScores:
    """Logits of a classifier that is right about most of 500 texts."""
    generator = np.random.default_rng(3)
    truth = generator.integers(0, len(labels), 500)
    logits = generator.normal(0, 1, (500, len(labels))) + 3 * np.eye(len(labels))[truth]
    return score(logits, truth, labels)


def a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shutil.get_terminal_size().columns == width


WIDE = "世界のニュースと政治の話題とその他の長い名前"


def test_scores_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    scores = scores_of("negative", WIDE)
    show_scores("runs/x", scores)
    shown = capsys.readouterr()
    summary, _, *table = shown.out.splitlines()
    assert summary == (
        f"runs/x: accuracy {scores.accuracy:.1%}, macro F1 {scores.macro_f1:.3f}, log-loss "
        f"{scores.loss:.3f}, calibration error {scores.calibration_error:.3f}, 500 texts"
    )
    first = scores.classes[0]
    figures = [f"{value:.3f}" for value in (first.precision, first.recall, first.f1)]
    assert table[0].split() == ["class", "precision", "recall", "F1", "texts"]
    assert table[1].split() == ["negative", *figures, str(first.support)]
    assert table[4].split() == ["true", "\\", "predicted", "negative", WIDE]
    assert table[6].split() == [WIDE, *map(str, scores.confusion[1])]
    assert len({cell_len(line) for line in table[:3]}) == 1  # columns are aligned
    assert len({cell_len(line) for line in table[4:]}) == 1
    assert "\x1b" not in shown.out and shown.err == ""


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize("last", ["positive", WIDE, "\x1b[2Jred", "of\ntwo lines"])
def test_scores_and_mistakes_fit_a_terminal(
    width: int, last: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_terminal(monkeypatch, width)
    show_scores("runs/x on test.tsv", scores_of("negative", "neither", last))
    text = "A film\nI would not \x1b]0;wish on my enemies. " * 9
    show_mistakes(
        [Mistake(text, "neither", last, 0.987), Mistake("short 字", "negative", "neither", 0.5)]
    )
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "\x1b" not in shown
    assert max(map(cell_len, shown.splitlines())) <= width
    assert "0.987" in shown and "A film I would not ␛]0;w" in shown and "short 字" in shown
    assert "true \\ predicted" in shown


def test_what_is_right_is_bold_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_terminal(monkeypatch, 80)
    scores = scores_of("a", "b")
    show_scores("x", scores)
    bold = re.findall(r"\x1b\[1m *([0-9]+)\x1b", capsys.readouterr().out)
    assert bold == [str(scores.confusion[0][0]), str(scores.confusion[1][1])]


@pytest.mark.parametrize(("classes", "width"), [(13, None), (12, 60)])
def test_a_matrix_without_room_is_left_out(
    classes: int,
    width: int | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if width:
        a_terminal(monkeypatch, width)
    show_scores("x", scores_of(*(f"class {number}" for number in range(classes))))
    shown = capsys.readouterr()
    assert "predicted" not in shown.out and f"class {classes - 1}" in shown.out
    assert f"{classes} classes" in shown.err and "--json" in shown.err


def test_mistakes_on_a_pipe_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    show_mistakes([Mistake("long " * 100, "bad", WIDE, 0.91)])
    assert (
        capsys.readouterr().out.splitlines()[1].split() == ["0.910", WIDE, "bad"] + ["long"] * 100
    )


def test_true_labels_are_taken_together() -> None:
    labels = TrueLabels(("negative", "neutral", "positive"), "x.csv")
    assert not labels.are_known({"blue"})
    assert not labels.are_known({"0"})  # neutral, or with 1 and 2 negative
    assert labels.are_known({"-1", "0", "1"})
    assert [labels[value] for value in ("0", "-1", "", "1")] == [
        "neutral",
        "negative",
        "",
        "positive",
    ]
    with pytest.raises(DataError, match=r"does not know: .*blue"):
        labels["blue"]
