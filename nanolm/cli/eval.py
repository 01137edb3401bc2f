"""`nanolm eval`: how good a model is on a text."""

import json
from dataclasses import asdict
from typing import Any

import click

from nanolm.cli.console import note
from nanolm.cli.options import READING, Command, options_of
from nanolm.errors import UsageError
from nanolm.training.settings import DEVICES, TrainSettings

WINDOW = 1024  # tokens; a downloaded model may look back on a hundred times as many


@click.command("eval", cls=Command)
@click.argument("run")
@click.argument("corpus", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    help=f"Tokens in a window.  [default: what the model looks back on, at most {WINDOW:,}]",
)
@click.option("--device", metavar="|".join(DEVICES), default="auto", help="Where to run the model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options_of(TrainSettings, {"How to read the text": READING})
def command(
    run: str,
    corpus: tuple[str, ...],
    context: int | None,
    device: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Loss, perplexity and bits per byte of a model, by one pass over all of a text.

    RUN is as for `nanolm sample`, FILE as for `nanolm train`.

    \b
    nanolm eval runs/novel other.txt
    nanolm eval hf://gpt2 other.txt --json
    """
    settings = TrainSettings(corpus=corpus, **options)
    problems = settings.reading().problems()
    if device not in DEVICES:
        problems.append(f"--device {device}: there is {', '.join(DEVICES)}")
    if problems:
        raise UsageError("\n".join(problems))

    from nanolm.cli.progress import TrainingView
    from nanolm.generation.language_model import load
    from nanolm.model.device import choose_device
    from nanolm.training.metrics import evaluate_texts

    where, _ = choose_device(device)
    with TrainingView() as view:
        found = load(run, note, view.report)
        most = found.model.window()
        if context is not None and most is not None and context > most:
            raise UsageError(f"--context {context}: {run} looks back on {most:,} tokens at most")
        window = context or min(found.model.config.context, WINDOW)
        model = found.model.to(where)
        score = evaluate_texts(
            model, found.tokenizer, corpus, settings.reading(), window, view.report
        )
    if as_json:
        click.echo(json.dumps({**asdict(score), "perplexity": score.perplexity}))
        return
    click.echo(
        f"{score.bits_per_byte:.4f} bits per byte, loss {score.loss:.4f}, perplexity "
        f"{score.perplexity:,.2f}, over {score.tokens:,} tokens of {score.bytes:,} bytes"
    )
