"""`nanolm eval` of a sequence-to-sequence model on pairs."""

from pathlib import Path

import click

from nanolm.cli.console import note, print_json, write_file, write_page
from nanolm.cli.progress import TrainingView
from nanolm.cli.tables import show_sentence, show_table
from nanolm.errors import refuse
from nanolm.formats import counted
from nanolm.pairs import evaluation
from nanolm.pairs.translator import TranslateParams, Translator
from nanolm.text.pairs import PairReading, read_pairs


def evaluate_translator(
    run: str,
    folder: Path,
    names: tuple[str, ...],
    reading: PairReading,
    beams: int | None,
    device: str,
    as_json: bool,
    html: str | None,
    mistakes_file: str | None,
) -> None:
    params = TranslateParams(beams=TranslateParams.beams if beams is None else beams)
    refuse(params.problems())
    with TrainingView() as view:
        pairs = read_pairs(names, reading, view.report)
        translator = Translator.load_folder(folder).on(device, "auto")
        result = evaluation.evaluate_pairs(translator, pairs, params, view.report)
    scores = result.scores
    for text in result.notes:
        note(text)
    if mistakes_file is not None:
        write_file(Path(mistakes_file), evaluation.mistakes_csv(result.mistakes))
        note(f"wrote {counted(len(result.mistakes), 'mistake')} to {mistakes_file}")
    shown = {
        "BLEU": f"{scores.bleu:.2f}",
        "chrF": f"{scores.chrf:.2f}",
        "exact": f"{scores.exact:.1%}",
        "loss": f"{result.loss:.4f}",
        "edits per character": f"{scores.edit_distance:.3f}",
        "edits per word or symbol": f"{scores.symbol_edit_distance:.3f}",
        "pairs": f"{result.count:,}",
    }
    if html is not None:
        facts = {"model": run, "data": ", ".join(names), **shown}
        write_page(Path(html), evaluation.evaluation_page(result, Path(run).name, facts))
    if as_json:
        groups = [vars(group) for group in result.by_length]
        values = {"run": run, **vars(scores), "loss": result.loss, "count": result.count}
        print_json(values | {"by_length": groups})
        return
    show_sentence(", ".join(f"{name} {value}" for name, value in shown.items()))
    if len(result.by_length) > 1:
        click.echo()
        show_table([evaluation.LENGTH_COLUMNS, *evaluation.length_rows(result.by_length)])
