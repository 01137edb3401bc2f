"""The report of a run: contents, size, and time to write it."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from journeys import Journey

from nanolm.report.curves import Series
from nanolm.report.matrix import draw_matrix
from nanolm.report.page import by_epoch, calibration, comparison_page, report_page, write_report
from nanolm.report.run_data import list_runs, read_run
from nanolm.report.terminal import plot
from nanolm.runs.folder import Run


def test_training_leaves_a_report(ended: tuple[Journey, Path]) -> None:
    journey, path = ended
    page = (path / "report.html").read_text(encoding="utf-8")
    assert (path / "loss.svg").read_text(encoding="utf-8").startswith("<svg")
    wanted = ["Curves", "Settings", "Machine and versions", "Reproduce this run", "finished"]
    if journey.verb == "finetune":
        wanted += ["Confusion matrix", "Calibration", "validation"]
    else:
        what = "bits per byte" if journey.verb == "train" else "BLEU"
        wanted += [what, "Samples during training"]
    for heading in wanted:
        assert heading in page, heading
    assert "default-src 'none'" in page
    assert page.count("<script>") == 1  # the others are data
    results = {"train": "bits per byte: ", "finetune": "accuracy: ", "train-pairs": "BLEU: "}
    assert f'<p class="result">Validation {results[journey.verb]}' in page
    unit = "text" if journey.verb == "finetune" else "token"
    columns = [figure["columns"] for figure in figures_of(page)]
    assert ["series", "step", f"loss (nats per {unit})"] in columns
    assert ["series", "step", "learning rate"] in columns
    assert page.count("<figure>") == page.count("<svg") == len(columns)
    machine = page.partition("Machine and versions</h2>")[2].partition("<h2")[0]
    assert "fingerprint" in machine and "None" not in machine
    assert f"nanolm {journey.verb} --config" in page
    assert write_report(Run(path))  # again, from the folder alone
    assert (path / "report.html").read_text(encoding="utf-8") == page


def test_of_ten_thousand_steps(tmp_path: Path, trained: Path) -> None:
    run = Run(tmp_path / "long")
    run.path.mkdir()
    facts = Run(trained).facts()
    run.begin(Run(trained).settings(), facts)
    rows = []
    for step in range(1, 10_001):
        row = {"step": step, "tokens": 64 * step, "seconds": step / 10, "loss": 8 / step**0.3}
        row |= {"lr": 1e-3 * (1 - step / 10_000), "tokens_per_second": 640.0 + step % 7}
        rows.append(row)
        if step % 100 == 0:
            look = {"val_loss": 8.1 / step**0.29, "val_bits_per_byte": 3 / step**0.1}
            rows.append({"step": step, "seconds": step / 10, **look})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = "> It was a dark and stormy night. " * 40
    heads = (f"## Step {100 * n:,}: 1.{n:03} bits per byte\n\n{sample}\n\n" for n in range(1, 101))
    run.samples.write_text("".join(heads))
    begin = time.process_time()
    write_report(run)
    assert time.process_time() - begin < 2
    assert 20_000 < (run.path / "report.html").stat().st_size < 300_000


def test_of_a_run_that_has_hardly_begun(tmp_path: Path, trained: Path) -> None:
    run = Run(tmp_path / "new")
    run.path.mkdir()
    facts = Run(trained).facts()
    del facts["result"]
    run.begin(Run(trained).settings(), facts)
    page = report_page(read_run(run))
    assert "not finished" in page
    assert "no data yet" in page


def test_several_runs_on_one_page(trained: Path, ended: tuple[Journey, Path]) -> None:
    page = comparison_page([Run(trained), Run(ended[1])])
    assert "2 runs compared" in page
    assert "Settings that differ" in page
    assert ">steps<" in page
    assert f">{trained.name}<" in page


def test_runs_of_different_kinds_have_a_panel_each(trained: Path, tmp_path: Path) -> None:
    labels = Run(tmp_path / "labels")
    labels.path.mkdir()
    settings = Run(trained).settings()
    del settings["corpus"]
    labels.begin(settings | {"data": ["reviews.tsv"]}, Run(trained).facts())
    labels.metrics.write_text('{"step": 1, "seconds": 1.0, "val_accuracy": 0.5}\n' * 2)
    page = comparison_page([Run(trained), labels])
    by_step = [each for each in figures_of(page) if each["columns"][1] == "step"]
    assert [(each["columns"][2], each["series"][0][0]) for each in by_step] == [
        ("validation bits per byte", trained.name),
        ("validation accuracy (fraction)", "labels"),
    ]


def test_scores_on_different_texts_are_not_compared(trained: Path, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    other.path.mkdir()
    other.begin({**Run(trained).settings(), "corpus": ["other.txt"]}, Run(trained).facts())
    assert "different validation sets" in comparison_page([Run(trained), other])
    assert "different validation sets" not in comparison_page([Run(trained), Run(trained)])


def test_runs_that_differ_in_their_seed_become_a_mean(trained: Path, tmp_path: Path) -> None:
    runs = []
    for seed, name in enumerate("abcd"):
        run = Run(tmp_path / name)
        run.path.mkdir()
        other = {"seed": seed, "lr": 0.5 if name == "d" else 0.1}
        result = {**Run(trained).facts()["result"], "val_bits_per_byte": 2.0 + 0.1 * seed}
        run.begin({**Run(trained).settings(), **other}, {**Run(trained).facts(), "result": result})
        row = {"step": 7, "seconds": 1.0 + seed, "val_bits_per_byte": 3.0 + seed}
        run.metrics.write_text(json.dumps(row) + "\n")
        runs.append(run)
    page = comparison_page(runs)
    name = "a, mean ± std of 3 seeds"
    best = f"Best of 2: {name}. Validation bits per byte: 2.100 ± 0.100 over 3 seeds."
    assert f'<p class="result">{best}</p>' in page
    by_step, by_time = figures_of(page)
    assert by_step["columns"][3] == "standard deviation"
    values = {each: marks[0][2:] for each, marks in by_step["series"]}
    assert values == {name: [7, 4, 1], "d": [7, 6]}
    assert by_time["series"][0][1][0][2:] == [2, 4, 1]
    assert "mean ± std" not in comparison_page([runs[0], runs[0]])  # the same seed
    runs[1].configure(runs[1].settings() | {"threads": 7, "workers": 3})  # as the machine was
    runs[2].update(runs[2].facts() | {"averaged": ["a", "b"]})
    page = comparison_page(runs[:3])
    assert "a, mean ± std of 2 seeds" in page
    average = report_page(read_run(runs[2]))
    assert "Average of the weights of" in average
    assert "Reproduce this run" not in average


def figures_of(page: str) -> list[dict[str, Any]]:
    """The numbers of each figure."""
    parts = re.findall(r'<script type="application/json">(.*?)</script>', page)
    return [json.loads(part) for part in parts]


def test_a_confusion_matrix_is_shaded_by_row() -> None:
    image = draw_matrix(["<bad>", "good", "rare"], [[30, 10, 0], [0, 8, 2], [0, 0, 0]], "films")
    cells = re.findall(r'class="(right|wrong)".*fill-opacity="([\d.]+)"', image.svg)
    assert [float(opacity) for _, opacity in cells] == [0.38, 0.12, 0, 0, 0.4, 0.1, 0, 0, 0]
    assert [kind for kind, _ in cells] == ["right", "wrong", "wrong", "wrong"] * 2 + ["right"]
    assert image.marks["<bad>"][1][2:] == ("good", 10, "25.0%")
    assert "<bad>" not in image.svg and "&lt;bad&gt;" in image.svg


def test_calibration_has_bin_counts(trained: Path) -> None:
    run = read_run(Run(trained))
    bins = [{"confidence": 0.9, "accuracy": 0.75, "count": 4321}, {"confidence": 1, "count": 0}]
    scores = {
        "bins": bins,
        "confusion": [[9, 1], [2, 4]],
        "count": 16,
        "accuracy": 0.8,
        "classes": [{"label": each, "precision": 0, "recall": 0, "f1": 0} for each in "ab"],
    }
    run.settings["data"] = ["films.tsv"]
    run.facts["result"] = {"val": scores}
    (figure,) = figures_of(calibration(run))
    assert figure["columns"][3] == "count" and figure["series"][0][1][0][2:] == [0.9, 0.75, 4321]
    assert ">4,321<" in calibration(run)
    assert "Always predicting the majority class: 62.5%." in report_page(run)


def test_the_list_of_runs(tmp_path: Path, trained: Path) -> None:
    stopped, broken = Run(tmp_path / "b-stopped"), tmp_path / "c-broken"
    facts = Run(trained).facts()
    del facts["result"]
    stopped.path.mkdir()
    stopped.begin(Run(trained).settings(), facts)
    stopped.metrics.write_text(
        '{"step": 7, "seconds": 90.0}\n{"step": 7, "val_bits_per_byte": 2.5}\n'
    )
    broken.mkdir()
    (broken / "run.json").write_text("{}")
    (tmp_path / "no-run").mkdir()
    notes: list[str] = []
    (row,) = list_runs(tmp_path, notes.append)
    assert (row.steps, row.minutes, row.bits_per_byte, row.state) == (7, 1.5, 2.5, "stopped")
    assert len(notes) == 1
    assert "c-broken skipped" in notes[0]
    with stopped.locked():
        assert list_runs(tmp_path, notes.append)[0].state == "training"
    (row,) = list_runs(trained.parent, notes.append)
    assert (row.state, row.steps, row.corpus) == ("finished", 60, "embedded:tiny")
    assert list_runs(tmp_path / "nowhere", notes.append) == []


POINTS = [(float(step), 5 - step / 50) for step in range(0, 101)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("width", [40, 100])
def test_a_curve_in_the_terminal(plain: bool, width: int) -> None:
    looks = Series("validation", POINTS[::20])
    rows = plot([Series("training", POINTS), looks], width, 12, plain)
    assert len(rows) == 15
    assert all(len(row) <= width for row in rows)
    assert rows[0].startswith("5.0 ")
    text = "\n".join(rows)
    assert text.isascii() == plain
    curve, mark = rows[:12], "o" if plain else "●"
    # Evaluations, from the upper left to the lower right.
    places = [(n, row.index(mark)) for n, row in enumerate(curve) if mark in row]
    assert len(places) == 6
    assert places == sorted(places)
    assert (places[0], places[-1]) == ((0, 5), (11, width - 1))
    assert rows[13].split() == ["0", "20", "40", "60", "80", "100"]
    assert rows[14].split() == ["*" if plain else "⠒", "training", mark, "validation"]


@pytest.mark.parametrize("height", [7, 12, 16])
def test_equal_values_are_at_the_same_height(height: int) -> None:
    curve = plot([Series("training", POINTS)], 60, height)
    both = plot([Series("training", POINTS), Series("validation", POINTS[::3])], 60, height)
    marks = [(n, mark.start()) for n, row in enumerate(both) for mark in re.finditer("●", row)]
    assert len(marks) > height and all(curve[n][column] > "⠀" for n, column in marks[:-1])


def test_nothing_to_draw() -> None:
    assert plot([Series("training", [])], 40, 10) == ["no data yet"]


@pytest.mark.parametrize("values", [(1.0, 1000.0), (2.2, 4.4), (3.0, 3.0)])
def test_a_logarithmic_plot(values: tuple[float, float]) -> None:
    lines = plot([Series("time", [(32, values[0]), (64, values[1])])], 40, 8, logarithmic=True)
    assert max(map(len, lines)) <= 40
    assert any(line.strip().startswith(f"{values[0]:g}") for line in lines) or len({*values}) == 1


def test_a_row_and_a_point_for_each_epoch(tmp_path: Path, trained: Path) -> None:
    run = Run(tmp_path / "labels")
    run.path.mkdir()
    settings = Run(trained).settings()
    facts = {**Run(trained).facts(), "result": {"steps": 14, "best_step": 7}}
    run.begin({**settings, "data": ["x.tsv"]}, facts)
    rows = []
    for step, accuracy in ((4, 0.5), (7, 0.8), (11, 0.9), (14, 1.0)):  # two evaluations per epoch
        scores = {"val_loss": 1 / step, "val_accuracy": step / 14}
        training = {"train_loss": 2 / step, "train_accuracy": accuracy}
        rows.append({"step": step, "epoch": step / 7, "seconds": 1.0, **training, **scores})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = by_epoch(read_run(run))
    assert (first["epoch"], first["step"], first["val_accuracy"]) == (1, 7, 0.5)
    assert first["train_accuracy"] == pytest.approx((4 * 0.5 + 3 * 0.8) / 7)
    assert second["train_accuracy"] == pytest.approx((4 * 0.9 + 3 * 1.0) / 7)
    page = report_page(read_run(run))
    assert "<th>1</th><td>7 (best)</td>" in page
    assert "training accuracy" in page
    written = write_report(run, png=True)
    assert [file.name for file in written] == [
        "report.html", "loss.svg", "epochs.svg", "loss.png", "epochs.png",
    ]  # fmt: skip
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in written[3:])
    # Without `epoch`, as 0.1.0 wrote it: only curves by step.
    for row in rows:
        del row["epoch"]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert by_epoch(read_run(run)) == []
    assert "By epoch" not in report_page(read_run(run))
    assert ">epoch<" not in report_page(read_run(run))
