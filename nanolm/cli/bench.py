"""`nanolm bench`: how fast this machine trains and writes."""

import json
import os
import shutil
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from nanolm.bench.request import PEERS, Request
from nanolm.cli.columns import fitted
from nanolm.cli.console import note, printable
from nanolm.cli.options import Command
from nanolm.errors import UsageError
from nanolm.formats import counted
from nanolm.training.settings import CHOICES, DEFAULT_FAMILY

if TYPE_CHECKING:
    from nanolm.bench.costs import Cost, Profile
    from nanolm.bench.measure import Report, Result

WIDTH = 80  # columns of the widest line
OPERATOR = 36  # letters of an operator's name
SHOWN = 10  # costs of an update
SCALES = {"bytes": (1e6, "MB"), "FLOP/s": (1e9, "GFLOP/s")}  # units as people read them


@click.command("bench", cls=Command)
@click.option(
    "--preset",
    "presets",
    multiple=True,
    metavar="|".join(CHOICES["preset"]),
    help="A size to measure; give it again for more.  [default: those that fit the device]",
)
@click.option(
    "--family",
    metavar="|".join(CHOICES["family"]),
    default=DEFAULT_FAMILY,
    show_default=True,
    help="The kind of model.",
)
@click.option(
    "--device", metavar="|".join(CHOICES["device"]), default="auto", help="What to measure."
)
@click.option(
    "--seconds",
    type=float,
    default=3.0,
    show_default=True,
    help="Time for each number; more of it smooths out what else the machine does.",
)
@click.option(
    "--against",
    metavar="|".join(PEERS),
    help="Train the same shapes with this too, in turn.",
)
@click.option(
    "--profile",
    is_flag=True,
    help=f"Show the {SHOWN} largest costs of an update, and how far each is from its limit.",
)
@click.option(
    "--scale",
    metavar="1,8,64",
    callback=lambda context, parameter, text: counts(text),
    help="Instead, how well so many processes would share a batch, reckoned from a step here.",
)
@click.option(
    "--bandwidth",
    metavar="GB/S",
    type=float,
    default=50.0,
    show_default=True,
    help="What --scale takes for granted between any two of them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool, **asked: Any) -> None:
    """Measure this machine: how fast it trains and writes, and how much of it that uses.

    \b
    nanolm bench
    nanolm bench --preset micro --against transformers
    nanolm bench --preset mini --profile
    nanolm bench --preset gpt2 --scale 1,8,64 --bandwidth 50
    """
    request = Request(**asked)
    if problems := request.problems():
        raise UsageError("\n".join(problems))

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of itself on stderr
    if request.scale:
        show_scale(request, as_json)
        return
    from nanolm.bench.measure import measured

    report = measured(request, note)
    if as_json:
        click.echo(json.dumps(as_object(report), ensure_ascii=False))
        return
    show_results(report)
    for preset, profile in report.profiles.items():
        click.echo()
        show_profile(preset, profile)


def counts(text: str | None) -> tuple[int, ...]:
    """Numbers of processes; what is none is refused with the rest of the request."""
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    return tuple(int(part) if part.isdecimal() and len(part) < 9 else 0 for part in parts)


def show_scale(request: Request, as_json: bool) -> None:
    from nanolm.bench.scale import estimates

    found = estimates(request, note)
    if as_json:
        rows = [asdict(each) for each in found]
        click.echo(json.dumps({"bandwidth": request.bandwidth, "estimates": rows}))
        return
    say(
        f"Reckoned, not measured: a ring of processes with {request.bandwidth:g} GB/s from each to "
        "the next, gradients of 4 bytes, exchanged while the way back (half a step) goes on; "
        "nothing for waiting on the slowest, or on the disk."
    )
    click.echo()
    heads = f"{'rows each':>9} {'step ms':>8} {'told ms':>8} {'shown ms':>8} {'tokens/s':>11}"
    click.echo(f"{'preset':<8} {'processes':>9} {heads} {'of n':>6} {'grown':>6}")
    for each in found:
        times = [1000 * value for value in (each.compute, each.exchange, each.shown)]
        click.echo(
            f"{each.preset:<8} {each.processes:>9,} {each.rows:>9,} {times[0]:>8.1f} "
            f"{times[1]:>8.2f} {times[2]:>8.2f} {each.speed:>11,.0f} {each.efficiency:>6.1%} "
            f"{each.grown:>6.1%}"
        )
    click.echo()
    say(
        "step: measured here with the rows that each would have. told: all that is exchanged; "
        "shown: what of it nothing hides. of n: of so many times the speed of one, the batch being "
        "the same, but at least a row each; grown: if the batch grew with them."
    )


def as_object(report: "Report") -> dict[str, Any]:
    """For programs, with the profiles only where they were asked for."""
    found: dict[str, Any] = {
        "machine": report.machine,
        "results": [asdict(result) for result in report.results],
    }
    if report.profiles:
        found["profiles"] = {
            preset: {
                **asdict(profile),
                "costs": [
                    {**asdict(cost), "times_limit": cost.times_limit} for cost in profile.costs
                ],
            }
            for preset, profile in report.profiles.items()
        }
    return found


def show_results(report: "Report") -> None:
    machine = report.machine
    on_cpu = machine["device"] == "cpu"
    name = (
        f"{machine['name']}, {counted(machine['threads'], 'thread')}" if on_cpu else machine["name"]
    )
    versions = f"torch {machine['torch']}, nanolm {machine['nanolm']}"
    say(f"{name}, {machine['dtype']}, {versions}")
    if on_cpu:
        say("of peak: of the measured matrix product rate, on as many threads")
    click.echo()
    click.echo(f"{'preset':<12} {'what':<24} {'value':>14} {'unit':<10} {'of peak':>8}")
    before = None
    for result in report.results:
        shown = result.shape if result.shape != before else ""
        before = result.shape
        click.echo(f"{shown:<12} {row(result)}".rstrip())


def row(result: "Result") -> str:
    scale, unit = SCALES.get(result.unit, (1, result.unit))
    if result.value is None:
        value, unit = "n/a", ""
    else:
        value = number(result.value / scale)
    of_peak = ""
    if result.what.startswith("training"):
        of_peak = "n/a" if result.of_peak is None else f"{result.of_peak:.1%}"
    return f"{result.what:<24} {value:>14} {unit:<10} {of_peak:>8}"


def show_profile(preset: str, profile: "Profile") -> None:
    say(
        f"one update of {preset}, not compiled, on one thread, watched: "
        f"{profile.milliseconds:,.1f} ms; limits by {number(profile.products / 1e9)} GFLOP/s of "
        f"products and {number(profile.copies / 1e9)} GB/s of copies, as measured; what a cache "
        "holds can go below"
    )
    click.echo()
    heads = f"{'calls':>6} {'ms':>9} {'share':>6} {'limit':>9} {'x limit':>8}"
    click.echo(f"{'operator':<{OPERATOR}} {heads}")
    for cost in profile.costs[:SHOWN]:
        click.echo(f"{fitted(short(cost), OPERATOR)} {figures(cost)}")
    rest = 1 - sum(cost.share for cost in profile.costs[:SHOWN])
    click.echo(f"{'all else':<{OPERATOR + 7}} {rest * profile.milliseconds:>9.3f} {rest:>6.1%}")


def figures(cost: "Cost") -> str:
    limit = "-" if cost.limit is None else f"{cost.limit:.3f}"
    times = "-" if cost.times_limit is None else f"{cost.times_limit:.1f}"
    share = f"{cost.share:.1%}"
    return f"{cost.calls:>6} {cost.milliseconds:>9.3f} {share:>6} {limit:>9} {times:>8}"


def short(cost: "Cost") -> str:
    return cost.operator.removeprefix("_scaled_dot_product_")


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def say(text: str) -> None:
    click.echo(textwrap.fill(printable(text), min(WIDTH, shutil.get_terminal_size().columns)))
