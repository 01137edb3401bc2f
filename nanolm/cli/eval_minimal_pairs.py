"""`nanolm eval --minimal-pairs`: how often a model prefers the acceptable sentence."""

from collections.abc import Sequence
from dataclasses import asdict

import click

from nanolm.cli.console import note, print_json
from nanolm.cli.progress import TrainingView
from nanolm.cli.tables import one_line, show_table
from nanolm.formats import counted
from nanolm.generation.language_model import load
from nanolm.generation.minimal_pairs import evaluate_pairs, read_minimal_pairs


def evaluate_minimal_pairs(
    runs: Sequence[str], names: Sequence[str], device: str, as_json: bool
) -> None:
    with TrainingView() as view:
        pairs, scores = read_minimal_pairs(names, view.report), []
        for run in runs:
            writer = load(run, note, view.report)
            writer.model.to(device)
            scores.append(evaluate_pairs(writer, pairs, view.report))
            writer.model.cpu()  # free memory for the next model
    if as_json:
        for run, each in zip(runs, scores, strict=True):
            print_json({"run": run, **asdict(each)})
        return
    for kind in ("phenomenon", "file"):
        tables = [getattr(each, f"by_{kind}") for each in scores]
        if len(tables[0]) > 1:
            rows = [[kind, *(runs if len(runs) > 1 else ["accuracy"]), "pairs"]]
            for name, first in tables[0].items():
                values = (f"{table[name].accuracy:.1%}" for table in tables)
                rows.append([one_line(name), *values, f"{first.pairs:,}"])
            show_table(rows)
            click.echo()
    for run, each in zip(runs, scores, strict=True):
        click.echo(f"{run}: accuracy {each.accuracy:.1%} over {counted(each.pairs, 'pair')}")
