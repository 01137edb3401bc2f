"""`nanolm report`: an HTML report about a run."""

from pathlib import Path

import click

from nanolm.cli.console import draw, note_written, write_page
from nanolm.cli.options import Command, unwritable
from nanolm.cli.runs import existing
from nanolm.errors import DataError, refuse

PAGE = "report.html"


@click.command("report", cls=Command)
@click.argument("run", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--out", metavar="FILE", help=f"HTML page.  [default: RUN/{PAGE}; for several runs, {PAGE}]"
)
@click.option("--png", is_flag=True, help="Also write the curves as PNG; needs nanolm[plot].")
@click.option("--terminal", is_flag=True, help="Plot the loss in the terminal instead.")
def command(run: tuple[str, ...], out: str | None, png: bool, terminal: bool) -> None:
    """Write an HTML report about a run.

    The report shows curves, planned and actual results, samples, settings and mistakes. It works
    offline and can be printed. The curves are also in RUN/loss.svg (by step) and, for a classifier,
    RUN/epochs.svg (by epoch). Training writes all of these when it finishes. Given several runs,
    the report compares them, and shows runs that differ only in their seed as a mean with its
    standard deviation. RUN can also be the folder of a sweep or comparison.

    \b
    nanolm report runs/novel --png
    nanolm report runs/novel runs/novel-2 --out compared.html
    nanolm report runs/novel --terminal
    """
    problems = unwritable("--out", out)
    if terminal and out is not None:
        problems.append("use only one of --terminal and --out")
    if png and (terminal or out is not None or len(run) > 1):
        problems.append("--png needs a single run; omit --out and --terminal")
    refuse(problems)

    if len(run) == 1 and not (png or terminal) and (page := page_of_jobs(Path(run[0]))):
        write_page(Path(out or Path(run[0]) / PAGE), page)
        return

    from nanolm.report.page import comparison_page, report_page, write_report
    from nanolm.report.run_data import UNREADABLE, read_run

    runs = [existing(name) for name in run]
    try:
        if terminal:
            for data in map(read_run, runs):
                series = [data.series("loss", "training"), data.series("val_loss", "validation")]
                click.echo(f"{data.run.path}: loss by step")
                draw(series, 16)
        elif len(runs) == 1 and out is None:
            for file in write_report(runs[0], png):
                note_written(file)
        else:
            page = comparison_page(runs) if len(runs) > 1 else report_page(read_run(runs[0]))
            write_page(Path(out or PAGE), page)
    except UNREADABLE as error:
        raise DataError(f"run.json or metrics.jsonl is not in nanolm's format: {error!r}") from None


def page_of_jobs(folder: Path) -> str | None:
    """The report of a sweep or comparison; None for other folders."""
    if (folder / "sweep.json").is_file():
        from nanolm.sweep.page import sweep_page as page
    elif (folder / "compare.json").is_file():
        from nanolm.comparison.page import compare_page as page
    else:
        return None
    return page(folder)
