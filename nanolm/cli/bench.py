"""`nanolm bench`: how fast this machine trains and writes."""

import os
import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from nanolm.bench.settings import PEERS, BenchSettings
from nanolm.cli.columns import fitted
from nanolm.cli.console import note, print_json
from nanolm.cli.options import Command, Table, json_option, options_of
from nanolm.errors import refuse
from nanolm.formats import counted, printable, readable

if TYPE_CHECKING:
    from nanolm.bench.costs import Profile
    from nanolm.bench.measure import BenchReport

LINE_WIDTH = 80
OPERATOR_WIDTH = 36  # letters of an operator's name
SHOWN_COSTS = 10  # of an update
ESTIMATE = (  # a row of the table for --scale
    "{preset:<7} {processes:>9,} {rows:>9,} {compute:>8.1f} {exchange:>8.2f} {shown:>8.2f} "
    "{speed:>11,.0f} {efficiency:>6.1%} {grown:>6.1%}"
)
SCALES = {"bytes": (1e6, "MB"), "FLOP/s": (1e9, "GFLOP/s")}  # units as people read them
TABLE: Table = {
    "Options": {
        "preset": "A size; give it again for more.  [default: those that fit the device]",
        "family": "The kind of model.",
        "device": "What to measure.",
        "seconds": "Time for each number; more of it smooths out what else the machine does.",
        "against": ("|".join(PEERS), "Train the same shapes with this too, in turn."),
        "profile": f"Show the {SHOWN_COSTS} largest costs of an update beside their limits.",
        "scale": ("1,8,64", "Instead, estimate how training scales to these numbers of processes."),
        "bandwidth": ("GB/S", "What --scale takes for granted between any two of them."),
    }
}


@click.command("bench", cls=Command)
@options_of(BenchSettings, TABLE)
@json_option(help="Print one JSON object.")
def command(as_json: bool, **options: Any) -> None:
    """Measure this machine: how fast it trains and writes, and how much of it that uses.

    \b
    nanolm bench
    nanolm bench --preset micro --against transformers
    nanolm bench --preset mini --profile
    nanolm bench --preset gpt2 --scale 1,8,64 --bandwidth 50
    """
    settings = BenchSettings(**options)
    refuse(settings.problems())

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of itself on stderr
    if settings.scale is not None:
        show_scale(settings, as_json)
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
        f"Estimated, not measured: a ring of processes, {settings.bandwidth:g} GB/s between two, "
        "4-byte gradients exchanged during the backward pass (half a step); no waiting otherwise."
    )
    click.echo("\npreset  processes rows each  step ms  comm ms  exposed    tokens/s   of n  grown")
    for row in rows:
        times = {name: 1000 * row[name] for name in ("compute", "exchange", "shown")}
        click.echo(ESTIMATE.format_map(row | times))
    click.echo()
    print_wrapped(
        "step: measured here with the rows of each. comm: communication in ms; exposed: the part "
        "not overlapped with computing. of n: strong-scaling efficiency; grown: weak scaling."
    )


def show_results(report: "BenchReport") -> None:
    machine = report.machine
    on_cpu = machine["device"] == "cpu"
    threads = f", {counted(machine['threads'], 'thread')}" if on_cpu else ""
    versions = f"torch {machine['torch']}, nanolm {machine['nanolm']}"
    print_wrapped(f"{machine['name']}{threads}, {machine['dtype']}, {versions}")
    if on_cpu:
        print_wrapped("of peak: of the measured matrix product rate, on as many threads")
    click.echo(f"\n{'preset':<12} {'what':<24} {'value':>14} {'unit':<10} {'of peak':>8}")
    before = None
    for result in report.results:
        preset = result.shape if result.shape != before else ""
        before = result.shape
        scale, unit = SCALES.get(result.unit, (1, result.unit))
        value = "n/a" if result.value is None else readable(result.value / scale)
        unit = "" if result.value is None else unit
        of_peak = ""
        if result.what.startswith("training"):
            of_peak = "n/a" if result.of_peak is None else f"{result.of_peak:.1%}"
        click.echo(f"{preset:<12} {result.what:<24} {value:>14} {unit:<10} {of_peak:>8}".rstrip())


def show_profile(preset: str, profile: "Profile") -> None:
    print_wrapped(
        f"one profiled update of {preset}, uncompiled, one thread: {profile.milliseconds:,.1f} ms; "
        f"limits: {readable(profile.products / 1e9)} GFLOP/s of products, "
        f"{readable(profile.copies / 1e9)} GB/s of copies, as measured (caches can be faster)"
    )
    heads = f"{'calls':>6} {'ms':>9} {'share':>6} {'limit':>9} {'x limit':>8}"
    click.echo(f"\n{'operator':<{OPERATOR_WIDTH}} {heads}")
    for cost in profile.costs[:SHOWN_COSTS]:
        name = fitted(cost.operator.removeprefix("_scaled_dot_product_"), OPERATOR_WIDTH)
        limit = "-" if cost.limit is None else f"{cost.limit:.3f}"
        times = "-" if cost.times_limit is None else f"{cost.times_limit:.1f}"
        figures = f"{cost.calls:>6} {cost.milliseconds:>9.3f} {cost.share:>6.1%}"
        click.echo(f"{name} {figures} {limit:>9} {times:>8}")
    rest = 1 - sum(cost.share for cost in profile.costs[:SHOWN_COSTS])
    figures = f"{rest * profile.milliseconds:>9.3f} {rest:>6.1%}"
    click.echo(f"{'all else':<{OPERATOR_WIDTH + 7}} {figures}")


def print_wrapped(text: str) -> None:
    click.echo(textwrap.fill(printable(text), min(LINE_WIDTH, shutil.get_terminal_size().columns)))
