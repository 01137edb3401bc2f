"""`nanolm serve`: a playground in the browser, and an API that OpenAI's clients speak."""

import importlib.util
import os
import secrets
import sys
import time
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from nanolm.cli.console import note
from nanolm.cli.notes import RateLimitedNotes
from nanolm.cli.options import Command, device_option, dtype_option, unknown
from nanolm.errors import UsageError
from nanolm.training.settings import DEVICES, DTYPES

if TYPE_CHECKING:
    from nanolm.serve.models import ServedModel

NEEDED = ("pydantic", "starlette", "uvicorn")
option = partial(click.option, show_default=True)


@click.command("serve", cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="Where to listen; at any other address than this machine's own a key is needed.",
)
@option("--port", type=click.IntRange(0, 65_535), default=8000)
@click.option(
    "--key",
    metavar="KEY",
    help="What clients must know; NANOLM_SERVE_KEY hides it.  [default: made, if needed]",
)
@click.option("--allow-host", multiple=True, metavar="NAME", help="A name clients may call it by.")
@click.option("--allow-origin", multiple=True, metavar="URL", help="Whose pages may ask (CORS).")
@option("--batch", type=click.IntRange(1, 1024), default=64, help="Texts written at once.")
@option("--queue", type=click.IntRange(0, 100_000), default=256, help="May wait; others get 429.")
@option(
    "--max-tokens", type=click.IntRange(1, 1_000_000), default=4096, help="Of one text, at most."
)
@option(
    "--timeout",
    type=click.FloatRange(1, 86_400),
    default=300,
    metavar="SECONDS",
    help="A text that takes longer ends where it stands.",
)
@device_option(help="Where to run models.")
@dtype_option(help="Of the weights.")
@click.option("--int8", is_flag=True, help="Round weights to 8 bits: faster on a CPU, if large.")
def command(
    runs: tuple[str, ...],
    host: str,
    port: int,
    key: str | None,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    batch: int,
    queue: int,
    max_tokens: int,
    timeout: float,
    device: str,
    dtype: str,
    int8: bool,
) -> None:
    """A playground in the browser, and an API that OpenAI's clients speak.

    Each RUN is as for `nanolm sample` or `nanolm classify`. The page is at the address that is
    printed; the API below it, at /v1, and described at /openapi.json. Only this machine can ask,
    unless --host says otherwise. Ctrl-C stops it, after what is being written.

    \b
    nanolm serve runs/novel
    nanolm serve runs/novel runs/reviews hf://gpt2 --port 8080
    nanolm serve runs/novel --host 0.0.0.0                  for others too; prints a key
    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
      -d '{"prompt": "Once upon a time", "max_tokens": 50}'
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    problems = [f"{' and '.join(missing)} needed: pip install 'nanolm[serve]'"] if missing else []
    problems += unknown("--device", device, DEVICES) + unknown("--dtype", dtype, DTYPES)
    if key is not None and not (key.isascii() and key.isprintable() and len(key.strip()) >= 8):
        problems.append("--key: at least 8 letters, digits and signs of ASCII")
    key = key.strip() if key else key
    for origin in allow_origin:
        if not origin.lower().startswith(("http://", "https://")):
            problems.append(f"--allow-origin {origin}: must be like https://example.org")
    if problems:
        raise UsageError("\n".join(problems))

    # Before torch is imported: oneDNN keeps a kernel for each shape that it has met, of prompts of
    # every length: an LSTM's take 0.3 MB each. It would keep 1,024, for as long as the server runs.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")

    from nanolm.serve.app import application
    from nanolm.serve.engine import Limits
    from nanolm.serve.guard import is_loopback
    from nanolm.serve.server import bound, listen

    listening = bound(host, port)  # first: a port in use is told before models are loaded
    port = listening.getsockname()[1]
    if key is None and not is_loopback(host):
        key = secrets.token_urlsafe(24)
    limits = Limits(rows=batch, queue=queue, tokens=max_tokens, seconds=timeout)
    models = load(runs, device, dtype, int8)
    notes = RateLimitedNotes(note)
    notes.handle_asyncio()
    app = application(models, limits, host, key, notes, allow_host, allow_origin)
    for worker in app.app.state.server.workers.values():  # type: ignore[attr-defined]
        worker.warm()
    sys.setswitchinterval(0.0001)  # the thread that computes must not wait for the one that sends

    def ready() -> None:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}/"
        click.echo(address + (f"#key={quote(key, safe='')}" if key else ""))
        note(f"{', '.join(models)}; the API is at {address}v1, Ctrl-C stops it")
        if key:
            note(f"key: {key} (Authorization: Bearer KEY; without TLS, anyone on the way sees it)")

    listen(app, listening, ready)
    note("stopped")


def load(runs: tuple[str, ...], device: str, dtype: str, int8: bool) -> "dict[str, ServedModel]":
    from nanolm.classification.classifier import load as load_classifier
    from nanolm.cli.progress import TrainingView
    from nanolm.cli.sample import ready
    from nanolm.runs.folder import find_named, is_classifier
    from nanolm.serve.models import ServedClassifier, ServedLanguageModel, ServedModel, names_of

    models: dict[str, ServedModel] = {}
    for run, name in zip(runs, names_of(runs), strict=True):
        with TrainingView() as view:
            folder = find_named(run, note, view.report)
        made = int(min((folder / "config.json").stat().st_mtime, time.time()))
        if is_classifier(folder):
            found = load_classifier(folder, note).on(device, dtype)
            models[name] = ServedClassifier(name, made, found)
        else:
            _, writer = ready(str(folder), device, dtype, int8)
            models[name] = ServedLanguageModel(name, made, writer)
    return models
