"""`nanolm doctor`: facts for a bug report, and the integrity of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanolm.cli.console import print_json, show_rows
from nanolm.cli.options import Command, json_option
from nanolm.errors import ModelError

if TYPE_CHECKING:
    from nanolm.runs.doctor import Diagnosis


@click.command("doctor", cls=Command)
@click.argument("run", required=False)
@json_option(help="Print one JSON object.")
@click.pass_context
def command(context: click.Context, run: str | None, as_json: bool) -> None:
    """Describe this machine or verify a run's checkpoints.

    Without RUN, the command prints versions, devices, memory and free disk space for a bug report.
    With RUN, it verifies the checksum of every file and names the checkpoint that would be loaded.
    The exit code is 4 if anything is damaged.

    \b
    nanolm doctor
    nanolm doctor runs/novel
    """
    if run is None:
        from nanolm.bench.health import health

        facts = health()
        if as_json:
            print_json(facts)
        else:
            show_rows(facts.items())
        return
    from nanolm.runs.doctor import examine

    diagnosis = examine(Path(run))
    if as_json:
        print_json(asdict(diagnosis))
    else:
        show_rows(rows(diagnosis))
    if not diagnosis.sound():
        context.exit(ModelError.exit_code)


def rows(diagnosis: "Diagnosis") -> list[tuple[str, str]]:
    title = "model" if diagnosis.state == "a model folder" else "run"
    shown = [(title, f"{diagnosis.folder}: {diagnosis.state}")]
    shown += [("problem", problem) for problem in diagnosis.problems]
    for each in diagnosis.checkpoints:
        links = f", {' and '.join(each.links)}" if each.links else ""
        shown.append((each.name, f"{each.problem or 'intact'}, {each.bytes / 1e6:,.1f} MB{links}"))
    if diagnosis.state == "unfinished":
        shown.append(("resumes from", diagnosis.to_go_on or "none"))
    shown.append(("loads", diagnosis.to_use or "none"))
    if diagnosis.set_aside:
        names = ", ".join(diagnosis.set_aside)
        shown.append(("set aside", f"{names}: damaged; delete those you do not need"))
    if diagnosis.left_behind:
        why = "left by a killed process; removed when training resumes"
        shown.append(("left over", f"{', '.join(diagnosis.left_behind)}: {why}"))
    return shown
