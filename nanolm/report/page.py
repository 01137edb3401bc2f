"""A run as a page to hand in: curves, the plan and what came of it, samples, how to repeat it.

    >>> write_report(Run(Path("runs/novel")))

It only reads the run folder. Several runs give one page that compares them.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from nanolm import files
from nanolm.formats import readable
from nanolm.report.curves import Line, Panel, Picture, curves_svg, read_metrics
from nanolm.runs.folder import Run, ending
from nanolm.text.page import marked, page

SAMPLES = 6  # that are shown: the first, the last, and some between
LETTERS = 600  # of each
MISTAKES = 10
KEPT = " \n\t"  # white space that is shown as it is
HEADING = re.compile(r"^## Step ([0-9,]+): ([0-9.]+) bits per byte$", re.MULTILINE)
STYLE = """
h2 { margin: 2.5rem 0 0.75rem; font-size: 1.15rem; }
h3 { margin: 1.25rem 0 0.25rem; font-size: 1rem; font-weight: 600; }
svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.75rem 0.2rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; }
tbody tr { border-top: 1px solid light-dark(#ddd, #444); }
td.number, th.number { text-align: right; }
td.reason { opacity: 0.75; }
td.right { background: light-dark(#d6f2cd, #265a1c); }
blockquote { margin: 0; padding: 0 0 0 0.75rem; border-left: 3px solid light-dark(#ccc, #555);
  white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-serif, serif; }
pre { padding: 0.75rem; background: light-dark(#f3f4f6, #1c2128); overflow-x: auto; }
@media print { h2, h3 { break-after: avoid; } svg, tr, blockquote { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Told:
    """What a run folder says of itself."""

    run: Run
    settings: dict[str, Any]
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    samples: list[tuple[str, str]] = field(default_factory=list)  # heading and text

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = self.facts.get("result", {})
        return found

    @property
    def labels(self) -> bool:
        """Whether it made a classifier."""
        return "data" in self.settings

    @property
    def steps_per_epoch(self) -> float | None:
        """None for a run of a version that did not record epochs."""
        rows = (row for row in reversed(self.metrics) if row.get("epoch"))
        return next((row["step"] / row["epoch"] for row in rows), None)

    def line(self, key: str, name: str, x: str = "step") -> Line:
        rows = [row for row in self.metrics if key in row]
        return Line(name, [(row.get(x), row[key]) for row in rows])


def told(run: Run) -> Told:
    """All of it, read."""
    metrics = read_metrics(run.metrics) if run.metrics.exists() else []
    samples = read_samples(run.samples.read_text(encoding="utf-8")) if run.samples.exists() else []
    return Told(run, run.settings(), run.facts(), metrics, samples)


def read_samples(text: str) -> list[tuple[str, str]]:
    """What the model wrote as it learned: where, and what."""
    parts = HEADING.split(text)[1:]
    return [
        (f"step {step}, {bits} bits per byte", unquoted(written))
        for step, bits, written in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def unquoted(text: str) -> str:
    lines = (line.removeprefix(">").removeprefix(" ") for line in text.strip().splitlines())
    return "\n".join(lines)[:LETTERS]


def write_report(run: Run, png: bool = False) -> list[Path]:
    """The page and the curves in the run folder; with `png` the curves as PNG too."""
    one = told(run)
    written = {run.path / "report.html": report_page(one)}
    for picture in pictures(one):
        written[run.path / f"{picture.name}.svg"] = picture.svg()
    for file, text in written.items():
        files.write_atomically(file, text)
    if not png:
        return list(written)
    from nanolm.report.png import picture_png

    return [*written, *(picture_png(run.path, picture) for picture in pictures(one))]


def report_page(one: Told) -> str:
    parts = [
        f"<h2>Curves</h2>{curves(one)}",
        *(f"<h2>{title}</h2>\n" + "\n".join(body) for title, body in sections(one) if body),
    ]
    return page(f"{one.name}: report", summary(one), "\n".join(parts), STYLE)


def sections(one: Told) -> Iterator[tuple[str, list[str]]]:
    yield "By epoch", list(epoch_table(one))
    yield "Planned vs. actual", list(planned(one))
    if one.labels:
        yield "Confusion matrix", list(confusion(one))
        yield "Calibration", list(calibration(one))
        yield "Most confident mistakes", list(mistakes(one))
    yield "Samples during training", list(samples(one))
    yield "Settings", list(configuration(one))
    yield "Machine and versions", [table([], machine(one))]
    yield "Reproduce this run", [f"<pre>{escape(again(one))}</pre>"]


def summary(one: Told) -> dict[str, str]:
    """The row below the heading."""
    result = one.result
    facts = {"text": ", ".join(one.settings.get("corpus") or one.settings.get("data") or ())}
    if count := one.facts.get("parameters"):
        facts["parameters"] = f"{count:,}"
    steps = result.get("steps") or max((row.get("step", 0) for row in one.metrics), default=0)
    facts["steps"] = f"{steps:,}"
    if one.steps_per_epoch:
        facts["epochs"] = f"{steps / one.steps_per_epoch:,.1f}"
    seconds = result.get("seconds") or max(
        (row.get("seconds", 0) for row in one.metrics), default=0
    )
    facts["time"] = f"{seconds / 60:.1f} minutes"
    if (bits := result.get("val_bits_per_byte")) is not None:
        facts["held-out text"] = f"{bits:.3f} bits per byte"
    for part in ("val", "test"):
        if part in result:
            name = "validation" if part == "val" else part
            facts[name] = f"{result[part]['accuracy']:.1%} of {result[part]['count']:,} right"
    return facts | {"state": ending(result)}


def pictures(one: Told) -> list[Picture]:
    """The curves that are files of their own: by step, and for a classifier by epoch."""
    return [loss_picture(one), *([epochs_picture(one)] if one.labels and by_epoch(one) else [])]


def loss_picture(one: Told) -> Picture:
    """Loss and accuracy in training and in validation, by step."""
    best = one.result.get("best_step")
    mark = (float(best), "best") if best is not None else None
    losses = [one.line("loss", "training"), one.line("val_loss", "validation")]
    panels = [Panel("loss", losses, mark)]
    if one.labels:
        right = [one.line("accuracy", "training"), one.line("val_accuracy", "validation")]
        panels.append(Panel("accuracy", right, mark))
    else:
        panels.append(Panel("bits per byte", [one.line("val_bits_per_byte", "validation")], mark))
    return Picture("loss", one.name, panels, "step", one.steps_per_epoch)


def epochs_picture(one: Told) -> Picture:
    """Loss and accuracy at the end of each epoch; those in training are means over the epoch."""
    epochs = by_epoch(one)
    best = next(
        (row["epoch"] for row in epochs if row["step"] == one.result.get("best_step")), None
    )
    panels = []
    for key in ("loss", "accuracy"):
        lines = [
            Line(name, [(row["epoch"], row.get(f"{part}_{key}")) for row in epochs])
            for part, name in (("train", "training"), ("val", "validation"))
        ]
        panels.append(Panel(key, lines, None if best is None else (best, "best")))
    return Picture("epochs", f"{one.name}: by epoch", panels, "epoch")


def by_epoch(one: Told) -> list[dict[str, Any]]:
    """The last evaluation of each epoch, with training values averaged over the whole epoch.

    Where evaluations are further apart than epochs, a row for each evaluation.
    """
    per_epoch = one.steps_per_epoch
    rows = [row for row in one.metrics if "val_loss" in row and row.get("epoch")]
    if per_epoch is None:
        return []
    epochs: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    before = 0
    for row in rows:
        # An evaluation comes after the first step that reaches its place.
        number = max(1, math.ceil((row["step"] - 1) / per_epoch))
        epochs.setdefault(number, []).append((row["step"] - before, row))
        before = row["step"]
    found = []
    for number, parts in epochs.items():
        last = dict(parts[-1][1])
        whole = abs(last["step"] - number * per_epoch) <= 1
        last["epoch"] = number if whole else last["epoch"]
        for key in [key for key in last if key.startswith("train_")]:
            seen = [(steps, row[key]) for steps, row in parts if row.get(key) is not None]
            total = sum(steps for steps, _ in seen)
            last[key] = sum(steps * value for steps, value in seen) / total if total else None
        found.append(last)
    return found


def epoch_table(one: Told) -> Iterator[str]:
    columns = {
        "train_loss": ("training loss", "{:.3f}"),
        "val_loss": ("validation loss", "{:.3f}"),
        "train_accuracy": ("training accuracy", "{:.1%}"),
        "val_accuracy": ("validation accuracy", "{:.1%}"),
        "val_bits_per_byte": ("validation bits per byte", "{:.3f}"),
    }
    epochs = by_epoch(one)
    shown = {key: how for key, how in columns.items() if any(key in row for row in epochs)}
    if not epochs:
        return
    rows = [
        (
            shown_epoch(row["epoch"]),
            f"{row['step']:,}" + " (best)" * (row["step"] == one.result.get("best_step")),
            *(
                "" if row.get(key) is None else how.format(row[key])
                for key, (_, how) in shown.items()
            ),
        )
        for row in epochs
    ]
    yield table(["epoch", "step", *(name for name, _ in shown.values())], rows)
    yield "<p>Training values are means over all steps since the row above, with dropout on.</p>"


def shown_epoch(epoch: float) -> str:
    return f"{epoch:,.0f}" if epoch == int(epoch) else f"{epoch:,.2f}"


def curves(one: Told) -> str:
    panels = [
        Panel("learning rate", [one.line("lr", "learning rate")]),
        Panel("tokens per second", [one.line("tokens_per_second", "tokens per second")]),
    ]
    both = curves_svg(panels, "Learning rate and speed", steps_per_epoch=one.steps_per_epoch)
    return "".join(picture.svg() for picture in reversed(pictures(one))) + both


def planned(one: Told) -> Iterator[str]:
    forecast, result = one.facts.get("forecast"), one.result
    rows = []
    if forecast and result:
        bits = result.get("val_bits_per_byte")
        rows.append(("bits per byte", f"{forecast['bits_per_byte']:.3f}", f"{bits:.3f}"))
    minutes = one.settings.get("minutes")
    if minutes and result:
        rows.append(("seconds in all", f"{60 * minutes:,.0f}", f"{result['seconds']:,.1f}"))
    if rows:
        yield table(["", "planned", "actual"], rows)
    choices = one.facts.get("choices") or []
    if choices:
        yield "<h3>Choices and reasons</h3>"
        yield table(
            ["", "chosen", "because"],
            [(each["what"], shown(each["value"]), each["reason"]) for each in choices],
        )


def samples(one: Told) -> Iterator[str]:
    count = len(one.samples)
    some = min(count, SAMPLES)
    wanted = sorted({round(number * (count - 1) / max(1, some - 1)) for number in range(some)})
    for heading, text in (one.samples[number] for number in wanted):
        yield f"<h3>{escape(heading)}</h3><blockquote>{marked(text, keep=KEPT)}</blockquote>"


def confusion(one: Told) -> Iterator[str]:
    for part in ("val", "test"):
        scores = one.result.get(part)
        if not scores:
            continue
        labels = [each["label"] for each in scores["classes"]]
        yield f"<h3>{'validation' if part == 'val' else part}</h3>"
        head = "".join(f'<th class="number">{escape(label)}</th>' for label in labels)
        rows = ""
        for number, (label, counts) in enumerate(zip(labels, scores["confusion"], strict=True)):
            cells = "".join(
                f'<td class="number{" right" * (at == number)}">{value:,}</td>'
                for at, value in enumerate(counts)
            )
            each = scores["classes"][number]
            told = "".join(
                f'<td class="number">{each[key]:.3f}</td>' for key in ("precision", "recall", "f1")
            )
            rows += f"<tr><th>{escape(label)}</th>{cells}{told}</tr>"
        more = "".join(f'<th class="number">{name}</th>' for name in ("precision", "recall", "F1"))
        yield (
            '<div class="scroll"><table><thead><tr><th>true \\ predicted</th>'
            f"{head}{more}</tr></thead><tbody>{rows}</tbody></table></div>"
        )


def calibration(one: Told) -> Iterator[str]:
    """How often it is right where it is so sure."""
    lines = []
    for key, name in (("uncalibrated", "uncalibrated"), ("val", "calibrated (as saved)")):
        bins = (one.result.get(key) or {}).get("bins") or []
        points = [(each["confidence"], each["accuracy"]) for each in bins if each["count"]]
        if points:
            lines.append(Line(name, points))
    if lines:
        ends = [x for line in lines for x, _ in line.points if x is not None]
        perfect = Line("perfect", [(min(ends), min(ends)), (max(ends), max(ends))])
        panel = Panel("accuracy", [*lines, perfect])
        yield curves_svg([panel], "Confidence and accuracy (reliability diagram)", "confidence")


def mistakes(one: Told) -> Iterator[str]:
    for key, name in (("mistakes", "validation"), ("test_mistakes", "test")):
        rows = [
            (f"{each['probability']:.3f}", each["predicted"], each["label"], each["text"][:LETTERS])
            for each in (one.result.get(key) or [])[:MISTAKES]
        ]
        if rows:
            yield f"<h3>{name}</h3>"
            yield table(["probability", "predicted", "true", "text"], rows)
        file = "test_mistakes.csv" if name == "test" else "mistakes.csv"
        if (one.run.path / file).exists():
            yield f"<p>All misclassified {name} texts are in <code>{file}</code>.</p>"


def configuration(one: Told) -> Iterator[str]:
    yield table([], [(name, shown(value)) for name, value in one.settings.items()])


def machine(one: Told) -> list[tuple[str, str]]:
    names = ("machine", "nanolm", "torch", "numpy", "python", "started")
    rows = [(name, str(one.facts[name])) for name in names if name in one.facts]
    return rows + [
        (f"fingerprint of {name}", str(value)) for name, value in one.facts["fingerprints"].items()
    ]


def again(one: Told) -> str:
    verb = "finetune" if one.labels else "train"
    return f"nanolm {verb} --config {shlex.quote(str(one.run.config_file))}"


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float) and math.isfinite(value):
        return readable(value, 6)
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are text, not HTML; the last of three is a reason."""
    above = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{marked(cell, keep=KEPT)}</td>" for cell in rest)
        body += f"<tr><th>{escape(first)}</th>{cells}</tr>"
    thead = f"<thead><tr>{above}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{thead}<tbody>{body}</tbody></table></div>'


def comparison_page(runs: Sequence[Run]) -> str:
    """Several runs on one page."""
    found = [told(run) for run in runs]
    names = distinct([str(one.run.path) for one in found])
    key, what = (
        ("val_accuracy", "accuracy") if found[0].labels else ("val_bits_per_byte", "bits per byte")
    )
    pictures = [
        curves_svg(
            [
                Panel(
                    f"{what} (validation)",
                    [one.line(key, name, x) for one, name in zip(found, names, strict=True)],
                )
            ],
            f"{what}, by {label}",
            label,
        )
        for x, label in (("step", "step"), ("epoch", "epoch"), ("seconds", "seconds"))
        if x != "epoch" or all(one.steps_per_epoch for one in found)
    ]
    rows = [
        (name, *(summary(one).get(column, "") for column in columns(found)))
        for one, name in zip(found, names, strict=True)
    ]
    others = [(setting, *values) for setting, values in differing(found)]
    parts = [
        "<h2>Runs</h2>", table(["", *columns(found)], rows),
        "<h2>Curves</h2>", *pictures,
        "<h2>Settings that differ</h2>",
        table(["", *names], others) if others else "<p>None.</p>",
    ]  # fmt: skip
    return page(f"{len(found)} runs compared", {}, "\n".join(parts), STYLE)


def differing(found: list[Told]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all."""
    names = dict.fromkeys(key for one in found for key in one.settings)
    values = {
        name: [shown(one.settings[name]) if name in one.settings else "" for one in found]
        for name in names
    }
    return [(name, row) for name, row in values.items() if len(set(row)) > 1]


def columns(found: list[Told]) -> list[str]:
    return list(dict.fromkeys(name for one in found for name in summary(one)))


def distinct(names: list[str]) -> list[str]:
    """The last part of each path, or all of it where that is not enough to tell them apart."""
    short = [name.rstrip("/").rpartition("/")[2] for name in names]
    return short if len(set(short)) == len(short) else names
