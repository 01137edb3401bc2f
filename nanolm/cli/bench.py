"""`nanolm bench`: the speed of training and generation on this machine."""

import os
import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from nanolm.bench.settings import PEERS, SMALLEST, BenchSettings
from nanolm.cli.console import draw, note, print_json
from nanolm.cli.options import Command, Table, json_option, options_of
from nanolm.cli.tables import show_table
from nanolm.errors import refuse
from nanolm.formats import counted, printable, readable

if TYPE_CHECKING:
    from nanolm.bench.costs import Profile
    from nanolm.bench.measure import BenchReport

LINE_WIDTH = 80
OPERATOR_WIDTH = 36  # characters of an operator's name
SHOWN_COSTS = 10  # of a step
HEIGHT = 10  # of a plot, in lines
ESTIMATE = {  # heading and format of each column of the table for --scale
    "preset": "{preset}",
    "processes": "{processes:,}",
    "batch": "{rows:,}",
    "step ms": "{compute:.1f}",
    "comm ms": "{exchange:.2f}",
    "exposed": "{shown:.2f}",
    "tokens/s": "{speed:,.0f}",
    "strong": "{efficiency:.1%}",
    "weak": "{grown:.1%}",
}
SCALES = {"bytes": (1e6, "MB"), "FLOP/s": (1e9, "GFLOP/s")}  # readable units
TABLE: Table = {
    "Options": {
        "preset": "Model size; can be repeated.  [default: those that fit the device]",
        "family": "Architecture.",
        "device": "Device to measure.",
        "seconds": "Time per measurement; longer is less noisy.",
        "against": (
            "|".join(PEERS),
            "Also measure models of the same shape with this library, alternating with nanolm: "
            "training with transformers or nanoGPT's recipe, generation on a CPU with llama.cpp.",
        ),
        "profile": f"Show the {SHOWN_COSTS} most expensive operators in a step, and how close each "
        "comes to the hardware limit.",
        "grow": (
            "|".join(SMALLEST),
            "Instead of benchmarking, double this until a step takes a third of --seconds. Shows "
            "how time and memory grow.",
        ),
        "scale": (
            "1,8,64",
            "Instead of benchmarking, estimate how training scales to these process counts.",
        ),
        "bandwidth": ("GB/S", "Bandwidth between two processes, for --scale."),
    }
}


@click.command("bench", cls=Command)
@options_of(BenchSettings, TABLE)
@json_option(help="Print one JSON object.")
def command(as_json: bool, **options: Any) -> None:
    """Benchmark training and generation on this machine.

    \b
    nanolm bench
    nanolm bench --preset micro --against transformers
    nanolm bench --preset mini --profile
    nanolm bench --preset nano --grow context
    nanolm bench --preset gpt2 --scale 1,8,64 --bandwidth 50
    """
    settings = BenchSettings(**options)
    refuse(settings.problems())

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler's messages on stderr
    if settings.scale is not None:
        show_scale(settings, as_json)
        return
    if settings.grow is not None:
        show_growth(settings, as_json)
        return
    from nanolm.bench.measure import measure

    report = measure(settings, note)
    if as_json:
        values = asdict(report)
        if not report.profiles:
            del values["profiles"]
        print_json(values)
        return
    show_results(report)
    for preset, profile in report.profiles.items():
        click.echo()
        show_profile(preset, profile)


def show_scale(settings: BenchSettings, as_json: bool) -> None:
    from nanolm.bench.scale import estimates

    rows = estimates(settings, note)
    if as_json:
        print_json({"bandwidth": settings.bandwidth, "estimates": rows})
        return
    print_wrapped(
        f"Estimated, not measured: ring all-reduce at {settings.bandwidth:g} GB/s between two "
        "processes, 4-byte gradients exchanged during the backward pass (half a step), no other "
        "delays."
    )
    click.echo()
    table = [[*ESTIMATE]]
    for row in rows:
        times = {name: 1000 * row[name] for name in ("compute", "exchange", "shown")}
        table.append([cell.format_map(row | times) for cell in ESTIMATE.values()])
    show_table(table)
    click.echo()
    print_wrapped(
        "batch: sequences per process. step: measured here with that batch. comm: communication. "
        "exposed: the part not overlapped with compute. strong, weak: scaling efficiency."
    )


def show_growth(settings: BenchSettings, as_json: bool) -> None:
    from nanolm.bench.grow import UNEXPECTED, growth
    from nanolm.report.curves import Series

    found = growth(settings, note)
    if as_json:
        print_json({"grow": settings.grow, **asdict(found)})
        return
    show_machine(found.machine)
    click.echo(f"{found.preset}, family {settings.family}\n")
    table = [[f"{settings.grow}", "tokens", "ms per step", "MB", "power", "expected", ""]]
    for point in found.points:
        memory = "n/a" if point.bytes is None else readable(point.bytes / 1e6)
        row = [f"{point.size:,}", f"{point.tokens:,}", f"{1000 * point.seconds:.2f}", memory]
        powers = ["", "", ""]
        if point.power is not None and point.expected is not None:
            powers = [f"{point.power:.2f}", f"{point.expected:.2f}", ""]
            if abs(point.power - point.expected) > UNEXPECTED:
                powers[2] = "less" if point.power < point.expected else "more"
        table.append(row + powers)
    show_table(table, left=(0, 6))
    click.echo()
    print_wrapped(
        "power: time grew as size to this power since the previous row. expected: the same for the "
        "number of FLOPs. less: fixed costs per step still dominate. more: limited by memory "
        "bandwidth or cache size."
    )
    for field, unit, scale in (("seconds", "ms per step", 1e3), ("bytes", "MB", 1e-6)):
        values = [(point.size, getattr(point, field)) for point in found.points]
        known = [(size, value * scale) for size, value in values if value]
        if len(known) > 1:
            click.echo()
            name = f"{unit}, by {settings.grow} (both axes logarithmic)"
            draw([Series(name, known)], HEIGHT, logarithmic=True)


def show_machine(machine: dict[str, Any]) -> None:
    threads = f", {counted(machine['threads'], 'thread')}" if machine["device"] == "cpu" else ""
    versions = f"torch {machine['torch']}, nanolm {machine['nanolm']}"
    print_wrapped(f"{machine['name']}{threads}, {machine['dtype']}, {versions}")


def show_results(report: "BenchReport") -> None:
    show_machine(report.machine)
    if report.machine["device"] == "cpu":
        print_wrapped(
            "of peak: fraction of the measured matmul rate with the same number of threads"
        )
    click.echo()
    table, before = [["preset", "measurement", "value", "unit", "of peak"]], ""
    for result in report.results:
        preset = result.shape if result.shape != before else ""
        before = result.shape
        scale, unit = SCALES.get(result.unit, (1, result.unit))
        value = "n/a" if result.value is None else readable(result.value / scale)
        unit = "" if result.value is None else unit
        of_peak = ""
        if result.what.startswith("training"):
            of_peak = "n/a" if result.of_peak is None else f"{result.of_peak:.1%}"
        table.append([preset, result.what, value, unit, of_peak])
    show_table(table, left=(0, 1, 3))


def show_profile(preset: str, profile: "Profile") -> None:
    print_wrapped(
        f"one profiled step of {preset}, uncompiled, one thread: {profile.milliseconds:,.1f} ms. "
        f"Measured limits: {readable(profile.products / 1e9)} GFLOP/s for matrix products, "
        f"{readable(profile.copies / 1e9)} GB/s for copies (caches can be faster)"
    )
    click.echo()
    table = [["operator", "calls", "ms", "share", "limit", "x limit"]]
    for cost in profile.costs[:SHOWN_COSTS]:
        name = cost.operator.removeprefix("_scaled_dot_product_")
        limit = "-" if cost.limit is None else f"{cost.limit:.3f}"
        times = "-" if cost.times_limit is None else f"{cost.times_limit:.1f}"
        figures = [f"{cost.calls}", f"{cost.milliseconds:.3f}", f"{cost.share:.1%}"]
        table.append([name, *figures, limit, times])
    rest = 1 - sum(cost.share for cost in profile.costs[:SHOWN_COSTS])
    table.append(["other", "", f"{rest * profile.milliseconds:.3f}", f"{rest:.1%}", "", ""])
    show_table(table, first_limit=OPERATOR_WIDTH)


def print_wrapped(text: str) -> None:
    click.echo(textwrap.fill(printable(text), min(LINE_WIDTH, shutil.get_terminal_size().columns)))
