"""The report page of a run: curves, planned vs. actual, samples, how to reproduce it.

    >>> write_report(Run(Path("runs/novel")))

It needs only the run folder. `comparison_page` compares several runs.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from nanolm import files, webpage
from nanolm.formats import readable
from nanolm.report.curves import Chart, Panel, Series, mean_series
from nanolm.report.figure import figures, figures_page
from nanolm.report.matrix import draw_matrix
from nanolm.report.png import chart_png
from nanolm.report.run_data import RunData, read_run
from nanolm.runs.folder import Run, distilled_from, ending
from nanolm.text.mix import BITS_OF_PART
from nanolm.text.page import marked

MAX_SAMPLES = 6  # the first, the last, and some in between
MAX_LETTERS = 600  # shown of a sample or a misclassified text
MAX_MISTAKES = 10
SPLITS = {"val": "validation", "test": "test"}
EPOCH_COLUMNS = {
    "train_loss": ("training loss", "{:.3f}"),
    "val_loss": ("validation loss", "{:.3f}"),
    "train_accuracy": ("training accuracy", "{:.1%}"),
    "val_accuracy": ("validation accuracy", "{:.1%}"),
    "val_bits_per_byte": ("validation bits per byte", "{:.3f}"),
    "val_bleu": ("validation BLEU", "{:.1f}"),
    "val_exact": ("exact translations", "{:.1%}"),
}
MEASURES = {"train": "bits_per_byte", "finetune": "accuracy", "train-pairs": "bleu"}
CLASS_SCORES = {"precision": "precision", "recall": "recall", "f1": "F1"}
LOSSES = {verb: f"loss (nats per {'text' if verb == 'finetune' else 'token'})" for verb in MEASURES}
DURING_TRAINING = (
    "<p>The curves and the table by epoch show evaluations during training, which use only part of "
    "a large validation set. The result at the top is that of the saved model on the whole set.</p>"
)
NOT_COMPARABLE = "The runs have different validation sets, so their scores cannot be compared."
NOT_COMPARED = ("seed", "threads", "workers", "attention")  # the last three depend on the machine
as_html = partial(marked, keep=" \n\t")  # makes only unusual white space visible


def write_report(run: Run, png: bool = False, result: dict[str, Any] | None = None) -> list[Path]:
    """Write the page and the curves to the run folder, with `png` also as PNG. Pass a `result` that
    is not in run.json yet."""
    data = read_run(run)
    if result:
        data.facts["result"] = result
    charts = run_charts(data)
    texts = {f"{name}.svg": chart.svg for name, chart in charts.items()}
    texts = {"report.html": report_page(data), **texts}
    for name, text in texts.items():
        files.write_atomically(run.path / name, text)
    pictures = {f"{name}.png": chart for name, chart in charts.items() if png}
    for name, chart in pictures.items():
        with files.replacing(run.path / name) as temporary:
            chart_png(chart, temporary)
    return [run.path / name for name in (*texts, *pictures)]


def report_page(data: RunData) -> str:
    command = f"nanolm {data.verb} --config {shlex.quote(str(data.run.config_file))}"
    settings = [(name, setting_text(value)) for name, value in data.settings.items()]
    averaged = [(path,) for path in data.facts.get("averaged", [])]
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
        "Average of the weights of": text_table([], averaged) if averaged else "",
        "Reproduce this run": "" if averaged else f"<pre tabindex=0>{escape(command)}</pre>",
    }
    measure = MEASURES[data.verb]
    sentence = best_sentence(measure, {data.run.path.name: [final_score(data)]})
    if chance := majority(data):
        sentence += f" Always predicting the majority class: {shown(measure, chance[0])}."
    return figures_page(f"{data.run.path.name}: report", summary(data), sentence, sections)


def majority(data: RunData) -> tuple[float, str] | None:
    """The accuracy of always predicting the most common label."""
    if not data.is_classifier or not (scores := data.result.get("val")):
        return None
    return max(map(sum, scores["confusion"])) / scores["count"], "majority class"


def summary(data: RunData) -> dict[str, str]:
    """The facts below the heading."""
    result = data.result
    last = {key: value for row in data.metrics for key, value in row.items()}
    steps = result.get("steps") or last.get("step", 0)
    facts = {"text": ", ".join(data.texts)}
    if count := data.facts.get("parameters"):
        facts["parameters"] = f"{count:,}"
    facts["steps"] = f"{steps:,}"
    if data.steps_per_epoch:
        facts["epochs"] = f"{steps / data.steps_per_epoch:,.1f}"
    facts["time"] = f"{(result.get('seconds') or last.get('seconds', 0)) / 60:.1f} minutes"
    if (bits := result.get("val_bits_per_byte")) is not None:
        facts["validation bits per byte"] = f"{bits:.3f}"
    for name, bits in result.get("val_bits_per_byte_by_part", {}).items():
        facts[f"bits per byte of {name}"] = f"{bits:.3f}"
    for key, name in SPLITS.items():
        if key in result:
            scores = result[key]
            if data.verb == "train-pairs":
                facts[name] = f"BLEU {scores['bleu']:.1f}, {scores['exact']:.1%} exact"
            else:
                facts[name] = f"{scores['accuracy']:.1%} accuracy on {scores['count']:,} texts"
    return facts | {"state": ending(result)}


def run_charts(data: RunData) -> dict[str, Chart]:
    """The charts that are saved as files, by name without suffix: by step, and for classifiers also
    by epoch, with training values averaged over the epoch."""
    panels = progress_panels(data, "step", "")
    charts = {"loss": Chart(data.run.path.name, panels, steps_per_epoch=data.steps_per_epoch)}
    if data.is_classifier and (epochs := by_epoch(data)):
        panels = progress_panels(replace(data, metrics=epochs), "epoch", "train_")
        charts["epochs"] = Chart(f"{data.run.path.name}: by epoch", panels, "epoch")
    return charts


def progress_panels(data: RunData, x: str, train: str) -> list[Panel]:
    """Two metrics of training (keys with the prefix `train`) and of validation."""
    best = (row for row in data.metrics if row["step"] == data.result.get("best_step"))
    mark = next(((float(row[x]), "best") for row in best), None)
    names = {train: "training", "val_": "validation"}
    panels = []
    for key in ("loss", MEASURES[data.verb]):
        series = [data.series(prefix + key, name, x) for prefix, name in names.items()]
        if key == "bits_per_byte":
            series += [data.series(BITS_OF_PART + name, name, x) for name in data.parts]
        baseline = majority(data) if key == "accuracy" else None
        title = LOSSES[data.verb] if key == "loss" else measure_name(key)
        panels.append(Panel(title, series, mark, baseline))
    return panels


def measure_name(key: str) -> str:
    return {"bleu": "BLEU", "accuracy": "accuracy (fraction)"}.get(key, key.replace("_", " "))


def by_epoch(data: RunData) -> list[dict[str, Any]]:
    """The last evaluation of each epoch, with training values averaged over the epoch; or every
    evaluation, if they are more than an epoch apart."""
    per_epoch = data.steps_per_epoch or math.inf  # without epochs, there are no rows
    epochs: dict[int, list[tuple[int, dict[str, Any]]]] = {}  # (steps since the last row, row)
    evaluations = [row for row in data.metrics if "val_loss" in row and row.get("epoch")]
    for before, row in pairwise([{"step": 0}, *evaluations]):
        # An evaluation follows the first step that reaches its position.
        number = max(1, math.ceil((row["step"] - 1) / per_epoch))
        epochs.setdefault(number, []).append((row["step"] - before["step"], row))
    rows = []
    for number, weighted in epochs.items():
        last = dict(weighted[-1][1])
        if abs(last["step"] - number * per_epoch) <= 1:  # it covers the whole epoch
            last["epoch"] = number
        for key in [key for key in last if key.startswith("train_")]:
            known = [(steps, row[key]) for steps, row in weighted if row.get(key) is not None]
            total = sum(steps for steps, _ in known)
            last[key] = sum(steps * value for steps, value in known) / total if total else None
        rows.append(last)
    return rows


def epoch_table(data: RunData) -> str:
    if not (epochs := by_epoch(data)):
        return ""
    of_parts = {BITS_OF_PART + name: (f"bits per byte of {name}", "{:.3f}") for name in data.parts}
    columns = EPOCH_COLUMNS | of_parts
    keys = [key for key in columns if any(key in row for row in epochs)]
    rows = []
    for row in epochs:
        epoch, step = row["epoch"], row["step"]
        cells = [f"{epoch:,.0f}" if epoch == int(epoch) else f"{epoch:,.2f}"]
        cells.append(f"{step:,}" + " (best)" * (step == data.result.get("best_step")))
        for key in keys:
            cells.append("" if row.get(key) is None else columns[key][1].format(row[key]))
        rows.append(cells)
    header = ["epoch", "step", *(columns[key][0] for key in keys)]
    note = "Training values are averages over all steps since the previous row"
    teachers = data.facts.get("teachers")
    note += ", with dropout on." if data.settings.get("dropout") and not teachers else "."
    if teachers:
        note += " The training loss is the cross-entropy with the mean prediction of the teachers."
    return f"{text_table(header, rows)}\n<p>{note}</p>"


def curves(data: RunData) -> str:
    names = {"lr": "learning rate", "tokens_per_second": "tokens per second"}
    panels = [Panel(name, [data.series(key, name)]) for key, name in names.items()]
    speed = Chart("Learning rate and speed", panels, steps_per_epoch=data.steps_per_epoch)
    return figures([*reversed(run_charts(data).values()), speed]) + DURING_TRAINING


def final_score(data: RunData) -> float | None:
    """The result on the validation set; None if the run has none yet."""
    measure, result = MEASURES[data.verb], data.result
    score: float | None = result.get(f"val_{measure}", result.get("val", {}).get(measure))
    return score


def shown(measure: str, value: Any) -> str:
    return EPOCH_COLUMNS[f"val_{measure}"][1].format(value)


def planned(data: RunData) -> str:
    result, rows, parts = data.result, [], []
    measured = bool(result) and result.get("val_bits_per_byte") is not None
    if measured and (forecast := data.facts.get("forecast")):
        actual = f"{result['val_bits_per_byte']:.3f}"
        rows.append(("bits per byte", f"{forecast['bits_per_byte']:.3f}", actual))
        if corrected := forecast.get("corrected"):
            rows.append(("corrected during training", f"{corrected:.3f}", actual))
    if result and (minutes := data.settings.get("minutes")):
        rows.append(("total seconds", f"{60 * minutes:,.0f}", f"{result['seconds']:,.1f}"))
    if rows:
        parts.append(text_table(["", "planned", "actual"], rows))
    if distilled := distilled_from(data.facts):
        parts.append(f"<p>The model was {distilled}.</p>")
    if choices := data.facts.get("choices"):
        cells = [(each["what"], setting_text(each["value"]), each["reason"]) for each in choices]
        parts += ["<h3>Choices and reasons</h3>", text_table(["setting", "value", "reason"], cells)]
    return "\n".join(parts)


def samples(data: RunData) -> str:
    last = len(data.samples) - 1
    shown = min(len(data.samples), MAX_SAMPLES)
    numbers = sorted({round(place * last / max(1, shown - 1)) for place in range(shown)})
    return "\n".join(
        f"<h3>{escape(heading)}</h3><blockquote>{as_html(text[:MAX_LETTERS])}</blockquote>"
        for heading, text in (data.samples[number] for number in numbers)
    )


def confusion(data: RunData) -> str:
    parts = []
    for key, name in SPLITS.items():
        if (scores := data.result.get(key)) and data.is_classifier:
            counts, classes = scores["confusion"], scores["classes"]
            title = f"{data.run.path.name}: confusion matrix ({name})"
            parts.append(figures([draw_matrix([each["label"] for each in classes], counts, title)]))
            rows = [
                [each["label"], f"{sum(own):,}", *(f"{each[key]:.3f}" for key in CLASS_SCORES)]
                for each, own in zip(classes, counts, strict=True)
            ]
            parts.append(text_table([f"{name} set", "texts", *CLASS_SCORES.values()], rows))
    return "\n".join(parts)


def calibration(data: RunData) -> str:
    """Accuracy by confidence, before and after calibration."""
    series = []
    for key, name in (("uncalibrated", "uncalibrated"), ("val", "calibrated (as saved)")):
        bins = (data.result.get(key) or {}).get("bins") or []
        bins = [each for each in bins if each["count"]]
        points = [(each["confidence"], each["accuracy"]) for each in bins]
        counts = {each["confidence"]: each["count"] for each in bins}
        series.append(Series(name, points, counts=counts))
    if not (ends := [x for each in series for x, _ in each.finite]):
        return ""
    perfect = Series("perfect", [(end, end) for end in (min(ends), max(ends))])
    panel = Panel("accuracy (fraction)", [*series, perfect])
    name = "confidence (probability of the predicted label)"
    text = "<p>The number beside each dot is the number of validation texts in that bin.</p>"
    return figures([Chart(f"{data.run.path.name}: reliability diagram", [panel], name)]) + text


def mistakes(data: RunData) -> str:
    header, columns = ["probability", "predicted", "true", "text"], ("predicted", "label", "text")
    parts = []
    for key, name in (("mistakes", "validation"), ("test_mistakes", "test")):
        rows = [
            [f"{each['probability']:.3f}", *(each[column][:MAX_LETTERS] for column in columns)]
            for each in (data.result.get(key) or [])[:MAX_MISTAKES]
        ]
        if rows:
            parts += [f"<h3>{name}</h3>", text_table(header, rows)]
        if (data.run.path / f"{key}.csv").exists():
            parts.append(f"<p>All misclassified {name} texts are in <code>{key}.csv</code>.</p>")
    return "\n".join(parts)


def machine(data: RunData) -> list[tuple[str, str]]:
    names = ("machine", "nanolm", "torch", "numpy", "python", "started")
    rows = [(name, str(data.facts[name])) for name in names if name in data.facts]
    fingerprints = data.facts["fingerprints"]
    # A validation set held out of the corpus has none of its own, but "CORPUS FRACTION SPLIT".
    own = {name: value for name, value in fingerprints.items() if value and " " not in value}
    return rows + [(f"{name} fingerprint", value) for name, value in own.items()]


def setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return readable(value, 6) if isinstance(value, int | float) else str(value)


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are text, not HTML. The first cell of each row is its heading."""
    lines = (
        f"<th>{escape(first)}</th>" + "".join(f"<td>{as_html(cell)}</td>" for cell in rest)
        for first, *rest in rows
    )
    return webpage.table(map(escape, header), lines)


def comparison_page(runs: Sequence[Run]) -> str:
    data = [read_run(run) for run in runs]
    names = distinct([str(run.path) for run in runs])
    measures: dict[str, dict[str, list[RunData]]] = {}  # each kind of run has its own
    for name, group in over_seeds(data, names).items():
        measures.setdefault(MEASURES[group[0].verb], {})[name] = group
    charts, sentences = [], []
    for measure, groups in measures.items():
        scores = {name: [final_score(each) for each in group] for name, group in groups.items()}
        comparable = len({validated_on(each) for group in groups.values() for each in group}) == 1
        sentences.append(best_sentence(measure, scores) if comparable else NOT_COMPARABLE)
        for x in ("step", "epoch", "seconds"):
            if x != "epoch" or all(each.steps_per_epoch for each in data):
                series = [
                    mean_series(name, [each.series(f"val_{measure}", name, x) for each in group])
                    for name, group in groups.items()
                ]
                panel = Panel(f"validation {measure_name(measure)}", series)
                charts.append(Chart(f"Validation by {x}", [panel], x))
    columns = side_by_side([summary(each) for each in data])
    settings = [(setting, *values) for setting, values in differing(data).items()]
    sections = {
        "Runs": text_table(["", *columns], zip(names, *columns.values(), strict=True)),
        "Curves": figures(charts),
        "Settings that differ": text_table(["", *names], settings) if settings else "<p>None.</p>",
    }
    return figures_page(f"{len(data)} runs compared", {}, " ".join(sentences), sections)


def validated_on(data: RunData) -> str:
    """What decides which texts a run is validated on, besides its seed."""
    settings = data.settings
    held_out = [data.texts, settings.get("val_fraction"), settings.get("val_split")]
    return str(settings.get("val") or held_out)


def over_seeds(data: Sequence[RunData], names: Sequence[str]) -> dict[str, list[RunData]]:
    """Runs by name; those that differ only in their seed are together."""
    groups: dict[str, dict[str, RunData]] = {}
    for name, each in zip(names, data, strict=True):
        settings = {key: value for key, value in each.settings.items() if key not in NOT_COMPARED}
        averaged = "averaged" in each.facts  # the average of several has the seed of the first
        groups.setdefault(repr((averaged, sorted(settings.items()))), {})[name] = each
    found: dict[str, list[RunData]] = {}
    for group in groups.values():
        if 1 < len(group) == len({each.settings.get("seed") for each in group.values()}):
            found[f"{next(iter(group))}, mean ± std of {len(group)} seeds"] = list(group.values())
        else:
            found |= {name: [each] for name, each in group.items()}
    return found


def best_sentence(measure: str, scores: Mapping[str, Sequence[float | None]]) -> str:
    """Which is best, with the mean and the standard deviation over seeds."""
    known = {name: [v for v in values if v is not None] for name, values in scores.items()}
    means = {name: fmean(values) for name, values in known.items() if values}
    if not means:
        return "There is no validation result yet."
    best = (min if measure == "bits_per_byte" else max)(means, key=means.__getitem__)
    text = f"Best of {len(means)}: {best}. " if len(scores) > 1 else ""
    name = EPOCH_COLUMNS[f"val_{measure}"][0]
    text += f"{name[0].upper()}{name[1:]}: {mean_text(measure, known[best])}"
    return text + (f" over {count} seeds." if (count := len(known[best])) > 1 else ".")


def mean_text(measure: str, values: Sequence[float]) -> str:
    """A score with its standard deviation over seeds."""
    text = shown(measure, fmean(values))
    return text + (f" ± {shown(measure, stdev(values))}" if len(values) > 1 else "")


def side_by_side(rows: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Each key with its values in all rows."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key, "") for row in rows] for key in keys}


def differing(data: Sequence[RunData]) -> dict[str, list[str]]:
    settings = [{name: setting_text(v) for name, v in each.settings.items()} for each in data]
    return {name: row for name, row in side_by_side(settings).items() if len(set(row)) > 1}


def distinct(names: list[str]) -> list[str]:
    """The last part of each path, or the full paths if those are not unique."""
    short = [name.rstrip("/").rpartition("/")[2] for name in names]
    return short if len(set(short)) == len(short) else names
