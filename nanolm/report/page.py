"""A run as a page to hand in: curves, the plan and how it turned out, samples, how to repeat it.

    >>> write_report(Run(Path("runs/novel")))

It only reads the run folder. Several runs give one page that compares them.
"""

import math
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nanolm import files, webpage
from nanolm.formats import readable
from nanolm.report.curves import Chart, Panel, Series, curves_svg
from nanolm.report.run_data import RunData, read_run
from nanolm.runs.folder import Run, ending
from nanolm.text.page import marked

MAX_SAMPLES = 6  # that are shown: the first, the last, and some between
MAX_LETTERS = 600  # of a sample, or of a misclassified text
MAX_MISTAKES = 10
KEPT_SPACE = " \n\t"  # white space that is shown as it is
STYLE_SHEET = webpage.beside(__file__, "page.css")
SPLITS = {"val": "validation", "test": "test"}
EPOCH_COLUMNS = {
    "train_loss": ("training loss", "{:.3f}"),
    "val_loss": ("validation loss", "{:.3f}"),
    "train_accuracy": ("training accuracy", "{:.1%}"),
    "val_accuracy": ("validation accuracy", "{:.1%}"),
    "val_bits_per_byte": ("validation bits per byte", "{:.3f}"),
}


def write_report(run: Run, png: bool = False) -> list[Path]:
    """The page and the curves in the run folder; with `png` the curves as PNG too."""
    data = read_run(run)
    charts = {run.path / name: chart for name, chart in run_charts(data).items()}
    written = {run.path / "report.html": report_page(data)}
    written |= {file.with_suffix(".svg"): curves_svg(chart) for file, chart in charts.items()}
    for file, text in written.items():
        files.write_atomically(file, text)
    if not png:
        return list(written)
    from nanolm.report.png import chart_png

    for file, chart in charts.items():
        chart_png(chart, file.with_suffix(".png"))
    return [*written, *(file.with_suffix(".png") for file in charts)]


def report_page(data: RunData) -> str:
    command = f"nanolm {'finetune' if data.is_classifier else 'train'} --config "
    command += shlex.quote(str(data.run.config_file))
    settings = [(name, setting_text(value)) for name, value in data.settings.items()]
    sections = {
        "Curves": curves(data),
        "By epoch": epoch_table(data),
        "Planned vs. actual": planned(data),
        "Confusion matrix": confusion(data),
        "Calibration": calibration(data),
        "Most confident mistakes": mistakes(data),
        "Samples during training": samples(data),
        "Settings": text_table([], settings),
        "Machine and versions": text_table([], machine(data)),
        "Reproduce this run": f"<pre>{escape(command)}</pre>",
    }
    body = "\n".join(f"<h2>{title}</h2>\n{part}" for title, part in sections.items() if part)
    return webpage.page(f"{data.name}: report", summary(data), body, STYLE_SHEET)


def summary(data: RunData) -> dict[str, str]:
    """The row below the heading."""
    result = data.result
    facts = {"text": ", ".join(data.settings.get("corpus") or data.settings.get("data") or ())}
    if count := data.facts.get("parameters"):
        facts["parameters"] = f"{count:,}"
    last = {key: value for row in data.metrics for key, value in row.items()}
    steps = result.get("steps") or last.get("step", 0)
    facts["steps"] = f"{steps:,}"
    if data.steps_per_epoch:
        facts["epochs"] = f"{steps / data.steps_per_epoch:,.1f}"
    facts["time"] = f"{(result.get('seconds') or last.get('seconds', 0)) / 60:.1f} minutes"
    if (bits := result.get("val_bits_per_byte")) is not None:
        facts["held-out text"] = f"{bits:.3f} bits per byte"
    for key, name in SPLITS.items():
        if key in result:
            facts[name] = f"{result[key]['accuracy']:.1%} of {result[key]['count']:,} right"
    return facts | {"state": ending(result)}


def run_charts(data: RunData) -> dict[str, Chart]:
    """The curves that are files of their own, by their names without a suffix: by step, and for a
    classifier by epoch too, where training values are means over the epoch."""
    keys = ("loss", "accuracy" if data.is_classifier else "bits_per_byte")
    panels = progress_panels(data, data.metrics, "step", "", keys)
    charts = {"loss": Chart(data.name, panels, steps_per_epoch=data.steps_per_epoch)}
    if data.is_classifier and (epochs := by_epoch(data)):
        panels = progress_panels(data, epochs, "epoch", "train_", keys)
        charts["epochs"] = Chart(f"{data.name}: by epoch", panels, "epoch")
    return charts


def progress_panels(
    data: RunData, rows: list[dict[str, Any]], x: str, train: str, keys: Iterable[str]
) -> list[Panel]:
    """A panel for each key, in training (with `train` before it) and in validation."""
    best_step = data.result.get("best_step")
    best = next((row[x] for row in rows if row["step"] == best_step), None)
    mark = None if best is None else (float(best), "best")
    return [
        Panel(
            key.replace("_", " "),
            [
                Series(name, [(row.get(x), row.get(prefix + key)) for row in rows])
                for prefix, name in ((train, "training"), ("val_", "validation"))
            ],
            mark,
        )
        for key in keys
    ]


def by_epoch(data: RunData) -> list[dict[str, Any]]:
    """The last evaluation of each epoch, with training values averaged over the whole epoch.

    Where evaluations are further apart than epochs, a row for each evaluation.
    """
    per_epoch = data.steps_per_epoch
    if per_epoch is None:
        return []
    epochs: dict[int, list[tuple[int, dict[str, Any]]]] = {}  # steps since the one before, and it
    previous = 0
    for row in data.metrics:
        if "val_loss" in row and row.get("epoch"):
            # An evaluation comes after the first step that reaches its place.
            number = max(1, math.ceil((row["step"] - 1) / per_epoch))
            epochs.setdefault(number, []).append((row["step"] - previous, row))
            previous = row["step"]
    rows = []
    for number, evaluations in epochs.items():
        last = dict(evaluations[-1][1])
        whole = abs(last["step"] - number * per_epoch) <= 1
        last["epoch"] = number if whole else last["epoch"]
        for key in [key for key in last if key.startswith("train_")]:
            known = [(steps, row[key]) for steps, row in evaluations if row.get(key) is not None]
            total = sum(steps for steps, _ in known)
            last[key] = sum(steps * value for steps, value in known) / total if total else None
        rows.append(last)
    return rows


def epoch_table(data: RunData) -> str:
    epochs = by_epoch(data)
    if not epochs:
        return ""
    columns = {
        key: EPOCH_COLUMNS[key] for key in EPOCH_COLUMNS if any(key in row for row in epochs)
    }
    rows = []
    for row in epochs:
        epoch, step = row["epoch"], row["step"]
        cells = [f"{epoch:,.0f}" if epoch == int(epoch) else f"{epoch:,.2f}"]
        cells.append(f"{step:,}" + " (best)" * (step == data.result.get("best_step")))
        for key, (_, form) in columns.items():
            cells.append("" if row.get(key) is None else form.format(row[key]))
        rows.append(cells)
    header = ["epoch", "step", *(name for name, _ in columns.values())]
    note = "Training values are means over all steps since the row above, with dropout on."
    return f"{text_table(header, rows)}\n<p>{note}</p>"


def curves(data: RunData) -> str:
    panels = [
        Panel(name, [data.series(key, name)])
        for key, name in (("lr", "learning rate"), ("tokens_per_second", "tokens per second"))
    ]
    speed = Chart("Learning rate and speed", panels, steps_per_epoch=data.steps_per_epoch)
    return "".join(map(curves_svg, [*reversed(run_charts(data).values()), speed]))


def planned(data: RunData) -> str:
    forecast, result = data.facts.get("forecast"), data.result
    rows, parts = [], []
    if forecast and result:
        bits = result.get("val_bits_per_byte")
        rows.append(("bits per byte", f"{forecast['bits_per_byte']:.3f}", f"{bits:.3f}"))
    minutes = data.settings.get("minutes")
    if minutes and result:
        rows.append(("seconds in all", f"{60 * minutes:,.0f}", f"{result['seconds']:,.1f}"))
    if rows:
        parts.append(text_table(["", "planned", "actual"], rows))
    if choices := data.facts.get("choices"):
        cells = [(each["what"], setting_text(each["value"]), each["reason"]) for each in choices]
        table = text_table(["", "chosen", "because"], cells)
        parts.append(f"<h3>Choices and reasons</h3>\n{table}")
    return "\n".join(parts)


def samples(data: RunData) -> str:
    count = len(data.samples)
    shown = min(count, MAX_SAMPLES)
    numbers = sorted({round(place * (count - 1) / max(1, shown - 1)) for place in range(shown)})
    return "\n".join(
        f"<h3>{escape(heading)}</h3>"
        f"<blockquote>{marked(text[:MAX_LETTERS], keep=KEPT_SPACE)}</blockquote>"
        for heading, text in (data.samples[number] for number in numbers)
    )


def confusion(data: RunData) -> str:
    parts = []
    for key, name in SPLITS.items():
        if not (scores := data.result.get(key)):
            continue
        rows = []
        for number, (each, counts) in enumerate(
            zip(scores["classes"], scores["confusion"], strict=True)
        ):
            cells = [f"<th>{escape(each['label'])}</th>"]
            for place, count in enumerate(counts):
                kind = ' class="right"' if place == number else ""
                cells.append(f"<td{kind}>{count:,}</td>")
            cells += [f"<td>{each[score]:.3f}</td>" for score in ("precision", "recall", "f1")]
            rows.append("".join(cells))
        labels = [escape(each["label"]) for each in scores["classes"]]
        header = ["true \\ predicted", *labels, "precision", "recall", "F1"]
        parts.append(f"<h3>{name}</h3>\n{webpage.table(header, rows, 'confusion')}")
    return "\n".join(parts)


def calibration(data: RunData) -> str:
    """Accuracy by confidence, before and after calibration."""
    series = []
    for key, name in (("uncalibrated", "uncalibrated"), ("val", "calibrated (as saved)")):
        bins = (data.result.get(key) or {}).get("bins") or []
        points = [(each["confidence"], each["accuracy"]) for each in bins if each["count"]]
        series += [Series(name, points)] if points else []
    if not series:
        return ""
    ends = [x for each in series for x, _ in each.points if x is not None]
    perfect = Series("perfect", [(min(ends), min(ends)), (max(ends), max(ends))])
    title = "Confidence and accuracy (reliability diagram)"
    return curves_svg(Chart(title, [Panel("accuracy", [*series, perfect])], "confidence"))


def mistakes(data: RunData) -> str:
    parts = []
    for key, name in (("mistakes", "validation"), ("test_mistakes", "test")):
        rows = [
            [
                f"{each['probability']:.3f}",
                *(each[column][:MAX_LETTERS] for column in ("predicted", "label", "text")),
            ]
            for each in (data.result.get(key) or [])[:MAX_MISTAKES]
        ]
        if rows:
            header = ["probability", "predicted", "true", "text"]
            parts.append(f"<h3>{name}</h3>\n{text_table(header, rows)}")
        if (data.run.path / f"{key}.csv").exists():
            parts.append(f"<p>All misclassified {name} texts are in <code>{key}.csv</code>.</p>")
    return "\n".join(parts)


def machine(data: RunData) -> list[tuple[str, str]]:
    names = ("machine", "nanolm", "torch", "numpy", "python", "started")
    rows = [(name, str(data.facts[name])) for name in names if name in data.facts]
    fingerprints = data.facts["fingerprints"]
    return rows + [(f"fingerprint of {name}", str(value)) for name, value in fingerprints.items()]


def setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float) and math.isfinite(value):
        return readable(value, 6)
    return f"{value:,}" if isinstance(value, int) else str(value)


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are text, not HTML; the first of each row is its heading."""
    return webpage.table(
        map(escape, header),
        (
            f"<th>{escape(first)}</th>"
            + "".join(f"<td>{marked(cell, keep=KEPT_SPACE)}</td>" for cell in rest)
            for first, *rest in rows
        ),
    )


def comparison_page(runs: Sequence[Run]) -> str:
    """Several runs on one page."""
    data = [read_run(run) for run in runs]
    names = distinct([str(run.path) for run in runs])
    key, what = ("val_bits_per_byte", "bits per byte")
    if data[0].is_classifier:
        key, what = ("val_accuracy", "accuracy")
    charts = []
    for x in ("step", "epoch", "seconds"):
        if x != "epoch" or all(each.steps_per_epoch for each in data):
            series = [each.series(key, name, x) for each, name in zip(data, names, strict=True)]
            charts.append(Chart(f"{what}, by {x}", [Panel(f"{what} (validation)", series)], x))
    columns = summary_columns(data)
    rows = [
        (name, *(summary(each).get(column, "") for column in columns))
        for each, name in zip(data, names, strict=True)
    ]
    settings = [(setting, *values) for setting, values in differing(data)]
    parts = [
        "<h2>Runs</h2>", text_table(["", *columns], rows),
        "<h2>Curves</h2>", *map(curves_svg, charts),
        "<h2>Settings that differ</h2>",
        text_table(["", *names], settings) if settings else "<p>None.</p>",
    ]  # fmt: skip
    return webpage.page(f"{len(data)} runs compared", {}, "\n".join(parts), STYLE_SHEET)


def differing(data: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs."""
    names = dict.fromkeys(name for each in data for name in each.settings)
    values = {
        name: [setting_text(each.settings[name]) if name in each.settings else "" for each in data]
        for name in names
    }
    return [(name, row) for name, row in values.items() if len(set(row)) > 1]


def summary_columns(data: Sequence[RunData]) -> list[str]:
    return list(dict.fromkeys(name for each in data for name in summary(each)))


def distinct(names: list[str]) -> list[str]:
    """The last part of each path, or all of it where the last parts are not all different."""
    short = [name.rstrip("/").rpartition("/")[2] for name in names]
    return short if len(set(short)) == len(short) else names
