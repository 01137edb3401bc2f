"""`nanolm doctor`: what a bug report needs, and whether a run is whole."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanolm.cli.console import show_rows
from nanolm.cli.options import Command

if TYPE_CHECKING:
    from nanolm.runs.doctor import Checked, Examined

DAMAGED = 4  # the exit code


@click.command("doctor", cls=Command)
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(context: click.Context, run: str | None, as_json: bool) -> None:
    """Look at this machine, or verify every checkpoint of RUN.

    Without RUN: versions, device, memory, room on the disk, to be pasted into a bug report. With
    it: is every file what it was when it was written, and which checkpoint would be used? The exit
    code is 4 where something is damaged.

    \b
    nanolm doctor
    nanolm doctor runs/novel
    """
    if run is None:
        from nanolm.bench.health import health

        found = health()
        if as_json:
            click.echo(json.dumps(found, ensure_ascii=False))
        else:
            show_rows(found.items())
        return
    from nanolm.runs.doctor import examine

    examined = examine(Path(run))
    if as_json:
        click.echo(json.dumps(asdict(examined), ensure_ascii=False))
    else:
        show_rows(rows(examined))
    if not examined.sound():
        context.exit(DAMAGED)


def rows(found: "Examined") -> list[tuple[str, str]]:
    """A title and a text each."""
    shown = [
        ("run" if found.state != "a model folder" else "model", f"{found.folder}: {found.state}")
    ]
    shown += [("problem", problem) for problem in found.problems]
    shown += [(each.name, described(each)) for each in found.checkpoints]
    if found.state == "unfinished":
        shown.append(("to go on from", found.to_go_on or "none: training would start at step 0"))
    shown.append(("to use", found.to_use or "none"))
    if found.left_behind:
        names = ", ".join(found.left_behind)
        shown.append(("left behind", f"{names}: by what was killed; the next start removes it"))
    return shown


def described(each: "Checked") -> str:
    links = f", {' and '.join(each.links)}" if each.links else ""
    return f"{each.problem or 'whole'}, {each.bytes / 1e6:,.1f} MB{links}"
