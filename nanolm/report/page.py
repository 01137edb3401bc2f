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
from nanolm.report.curves import Line, Panel, curves_svg, read_metrics
from nanolm.runs.folder import Run
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


def write_report(run: Run) -> tuple[Path, Path]:
    """The page and the curves, beside what they tell of."""
    one = told(run)
    page_file, picture = run.path / "report.html", run.path / "loss.svg"
    files.write_atomically(picture, loss_svg(one))
    files.write_atomically(page_file, report_page(one))
    return page_file, picture


def report_page(one: Told) -> str:
    parts = [
        f"<h2>Curves</h2>{curves(one)}",
        *(f"<h2>{title}</h2>\n" + "\n".join(body) for title, body in sections(one) if body),
    ]
    return page(f"{one.name}: report", summary(one), "\n".join(parts), STYLE)


def sections(one: Told) -> Iterator[tuple[str, list[str]]]:
    yield "Planned and found", list(planned(one))
    if one.labels:
        yield "What was taken for what", list(confusion(one))
        yield "Calibration", list(calibration(one))
        yield "The most confident mistakes", list(mistakes(one))
    yield "What it wrote as it learned", list(samples(one))
    yield "Settings", list(configuration(one))
    yield "Machine and versions", [table([], machine(one))]
    yield "The same again", [f"<pre>{escape(again(one))}</pre>"]


def summary(one: Told) -> dict[str, str]:
    """The row below the heading."""
    result = one.result
    facts = {"text": ", ".join(one.settings.get("corpus") or one.settings.get("data") or ())}
    if count := one.facts.get("parameters"):
        facts["parameters"] = f"{count:,}"
    state = "finished" if result else "not finished"
    steps = result.get("steps") or max((row.get("step", 0) for row in one.metrics), default=0)
    facts["steps"] = f"{steps:,}"
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
    return facts | {"state": state}


def loss_svg(one: Told) -> str:
    """What is learned, in training and in validation."""
    best = one.result.get("best_step")
    mark = (float(best), "best") if best is not None else None
    losses = [one.line("loss", "training"), one.line("val_loss", "validation")]
    panels = [Panel("loss", losses, mark)]
    if one.labels:
        right = [one.line("accuracy", "training"), one.line("val_accuracy", "validation")]
        panels.append(Panel("accuracy", right, mark))
    else:
        panels.append(Panel("bits per byte", [one.line("val_bits_per_byte", "validation")], mark))
    return curves_svg(panels, one.name)


def curves(one: Told) -> str:
    panels = [
        Panel("learning rate", [one.line("lr", "learning rate")]),
        Panel("tokens a second", [one.line("tokens_per_second", "tokens a second")]),
    ]
    return loss_svg(one) + curves_svg(panels, "Learning rate and speed")


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
        yield table(["", "planned", "found"], rows)
    choices = one.facts.get("choices") or []
    if choices:
        yield "<h3>What was chosen, and why</h3>"
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
    for key, name in (("uncalibrated", "before"), ("val", "as saved")):
        bins = (one.result.get(key) or {}).get("bins") or []
        points = [(each["confidence"], each["accuracy"]) for each in bins if each["count"]]
        if points:
            lines.append(Line(name, points))
    if lines:
        ends = [x for line in lines for x, _ in line.points if x is not None]
        perfect = Line("perfect", [(min(ends), min(ends)), (max(ends), max(ends))])
        panel = Panel("how often it was right", [*lines, perfect])
        yield curves_svg([panel], "Where it is so sure, how often is it right?", "confidence")


def mistakes(one: Told) -> Iterator[str]:
    rows = [
        (f"{each['probability']:.3f}", each["predicted"], each["label"], each["text"][:LETTERS])
        for each in (one.result.get("mistakes") or [])[:MISTAKES]
    ]
    if rows:
        yield table(["chance", "predicted", "true", "text"], rows)


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
        return f"{value:.6g}"
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
        for x, label in (("step", "step"), ("seconds", "seconds"))
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
