"""`nanolm sample`: text from a trained model, as it is written."""

import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import click

from nanolm.cli.console import note, show_text
from nanolm.cli.options import Command, Table, options_of
from nanolm.errors import UsageError
from nanolm.generation.knobs import Knobs

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
@click.option(
    "--device", metavar="auto|cpu|cuda|mps", default="auto", help="Where to run the model."
)
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

    RUN is a run folder, a checkpoint or a model folder; without it, the newest run under runs/.

    \b
    nanolm sample --prompt "Once upon a time"
    nanolm sample runs/novel -n 3 --temperature 1
    echo "It was" | nanolm sample
    """
    if count < 1:
        raise UsageError(f"-n {count}: must be at least 1")
    if seed is None:
        seed = secrets.randbelow(1_000_000)

    from nanolm.generation.language_model import Sample, load
    from nanolm.runs.folder import newest_run
    from nanolm.training.planner import choose_device

    settled = Knobs(seed=seed, **knobs).check()
    if run is None:
        run = str(newest_run(Path("runs")))
        note(f"using {run}, the newest run")
    writer = load(run, note)
    writer.model.to(choose_device(device)[0])
    if prompt is None:
        prompt = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
        prompt = prompt.removesuffix("\n")
    if not (settled.greedy or settled.temperature == 0):
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
