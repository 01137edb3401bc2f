"""`nanolm sample`: text from a trained model, as it is written."""

import json
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.console import note, show_text
from nanolm.cli.options import Command, Table, options_of
from nanolm.errors import DataError, ModelError, UsageError
from nanolm.generation.knobs import Knobs
from nanolm.training.settings import DEVICES

if TYPE_CHECKING:
    from nanolm.generation.language_model import LanguageModel

TABLE: Table = {
    "How": {
        "tokens": ("", "At most so many new tokens."),
        "temperature": ("", "Lower is safer, higher is wilder, 0 is greedy."),
        "top_k": ("", "Choose among the k likeliest tokens only."),
        "top_p": ("", "Choose among the likeliest that together reach p only."),
        "greedy": ("", "Always the likeliest token."),
    },
}


@click.command("sample", cls=Command)
@click.argument("run", required=False)
@click.option("--prompt", metavar="TEXT", help="What to continue.  [default: stdin if piped]")
@click.option("-n", "count", type=int, default=1, show_default=True, help="Number of samples.")
@click.option("--seed", type=int, help="The same seed, the same text.  [default: random]")
@click.option("--device", metavar="|".join(DEVICES), default="auto", help="Where to run the model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a sample.")
@options_of(Knobs, TABLE)
def command(
    run: str | None,
    prompt: str | None,
    count: int,
    device: str,
    seed: int | None,
    as_json: bool,
    **knobs: Any,
) -> None:
    """Write with a trained model.

    RUN is a run folder, a checkpoint, any Hugging Face folder of a GPT-2, llama or Qwen3 model, or
    hf://NAME, which is downloaded; without it, the newest run under runs/.

    \b
    nanolm sample --prompt "Once upon a time"
    nanolm sample runs/novel -n 3 --temperature 1
    nanolm sample hf://gpt2 --prompt "The meaning of life"
    echo "It was" | nanolm sample
    """
    problems = Knobs(**knobs).problems()
    if not 1 <= count <= 1000:
        problems.append(f"-n {count}: must be from 1 to 1000")
    if device not in DEVICES:
        problems.append(f"--device {device}: there is {', '.join(DEVICES)}")
    if problems:
        raise UsageError("\n".join(problems))
    if seed is None:
        seed = secrets.randbelow(1_000_000)

    from nanolm.cli.progress import TrainingView
    from nanolm.generation.language_model import Sample, load
    from nanolm.model.device import choose_device

    settled = Knobs(seed=seed, **knobs)
    where, _ = choose_device(device)
    if run is None:
        writer = load_newest()
    else:
        with TrainingView() as view:
            writer = load(run, note, view.report)
    writer.model.to(where)
    if prompt is None:
        prompt = piped_text()
    if not settled.likeliest_only():
        note(f"seed {seed}")

    samples = [Sample() for _ in range(count)]
    started = time.monotonic()
    pieces = writer.stream(prompt, settled, samples)
    if as_json:
        for _ in pieces:
            pass
        speed = sum(len(sample.tokens) for sample in samples) / (time.monotonic() - started)
        for sample in samples:
            line = {"prompt": prompt, **vars(sample), "tokens_per_second": round(speed, 1)}
            click.echo(json.dumps(line, ensure_ascii=False))
        return
    # The first sample is shown as it comes, the others when it is complete.
    show_text(prompt, bold=True)
    for row, piece in pieces:
        if row == 0:
            show_text(piece)
    for sample in samples[1:]:
        show_text("\n---\n")
        show_text(prompt, bold=True)
        show_text(sample.text)
    show_text("\n")


def load_newest() -> "LanguageModel":
    """The newest run that can be used."""
    from nanolm.generation.language_model import load
    from nanolm.runs.folder import runs_by_age

    for run in runs_by_age(Path("runs")):
        try:
            writer = load(run, note)
        except ModelError as error:
            note(f"{error}; trying the run before it")
            continue
        note(f"using {run}, the newest run")
        return writer
    raise ModelError(
        "there is no trained model under runs/ yet; train one first: nanolm train CORPUS, "
        "or name a model folder"
    )


def piped_text() -> str:
    """What stands on stdin, if it is not a person's keyboard; the last line end is not meant."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"stdin is not UTF-8: byte at offset {error.start:,}") from None
