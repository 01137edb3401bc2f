"""`nanolm serve`: a playground in the browser and an OpenAI-compatible API."""

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
from nanolm.cli.options import (
    Command,
    adapter_option,
    device_option,
    dtype_option,
    quantization_options,
    unknown,
)
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
    help="Address to listen on; any address other than loopback requires an API key.",
)
@option("--port", type=click.IntRange(0, 65_535), default=8000, help="Port to listen on.")
@click.option(
    "--key",
    metavar="KEY",
    help="API key; safer to set as NANOLM_SERVE_KEY.  [default: generated, if required]",
)
@click.option(
    "--allow-host", multiple=True, metavar="NAME", help="Additional Host header to accept."
)
@click.option("--allow-origin", multiple=True, metavar="URL", help="Origin allowed by CORS.")
@option("--batch", type=click.IntRange(1, 1024), default=64, help="Maximum batch size.")
@option(
    "--queue",
    type=click.IntRange(0, 100_000),
    default=256,
    help="Queue size; further requests get status 429.",
)
@option(
    "--max-tokens", type=click.IntRange(1, 1_000_000), default=4096, help="Token limit per request."
)
@option(
    "--timeout",
    type=click.FloatRange(1, 86_400),
    default=300,
    metavar="SECONDS",
    help="Time limit per request; longer completions are truncated.",
)
@adapter_option()
@device_option()
@dtype_option()
@quantization_options()
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
    adapter: str | None,
    device: str,
    dtype: str,
    int8: bool,
    int4: bool,
) -> None:
    """Serve a playground and an OpenAI-compatible API.

    Each RUN can be anything that `nanolm sample`, `classify` or `translate` accepts. The command
    prints the address of the playground. The API is at /v1 under that address, and its description
    is at /openapi.json. The server is reachable only from this machine unless you change --host.
    After Ctrl-C, current requests have up to 20 s to finish.

    \b
    nanolm serve runs/novel
    nanolm serve runs/novel runs/reviews hf://gpt2 --port 8080
    nanolm serve runs/novel --host 0.0.0.0    reachable from outside; prints an API key
    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
      -d '{"prompt": "Once upon a time", "max_tokens": 50}'
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    install = f"missing {' and '.join(missing)}: run `pip install 'nanolm[serve]'`"
    problems = [install] if missing else []
    problems += unknown("--device", device, DEVICES) + unknown("--dtype", dtype, DTYPES)
    if adapter is not None and len(runs) > 1:
        problems.append(f"--adapter {adapter}: serve one RUN, the model that it is for")
    if key is not None and not (key.isascii() and key.isprintable() and len(key.strip()) >= 8):
        problems.append("--key: must be at least 8 printable ASCII characters")
    key = key.strip() if key else key
    for origin in allow_origin:
        if not origin.lower().startswith(("http://", "https://")):
            problems.append(f"--allow-origin {origin}: give an origin such as https://example.org")
    if problems:
        raise UsageError("\n".join(problems))

    # Must be set before torch is imported. oneDNN caches a kernel for every shape it has seen, that
    # is, for every prompt length; by default up to 1,024 of them, 0.3 MB each for an LSTM.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")

    from nanolm.serve.app import application
    from nanolm.serve.engine import Limits
    from nanolm.serve.guard import is_loopback
    from nanolm.serve.server import bound, listen

    listening = bound(host, port)  # first, so that a port in use is reported before models load
    port = listening.getsockname()[1]
    if key is None and not is_loopback(host):
        key = secrets.token_urlsafe(24)
    limits = Limits(rows=batch, queue=queue, tokens=max_tokens, seconds=timeout)
    models = load(runs, device, dtype, (int8, int4), adapter)
    notes = RateLimitedNotes(note)
    notes.handle_asyncio()
    app = application(models, limits, host, key, notes, allow_host, allow_origin)
    for worker in app.app.state.server.workers.values():  # type: ignore[attr-defined]
        worker.warm()
    sys.setswitchinterval(0.0001)  # the worker thread must not wait for the one that sends

    def ready() -> None:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}/"
        click.echo(address + (f"#key={quote(key, safe='')}" if key else ""))
        note(f"serving {', '.join(models)}; the API is at {address}v1. Press Ctrl-C to stop")
        if key:
            how = "send it as `Authorization: Bearer KEY`; not encrypted without TLS"
            note(f"API key: {key} ({how})")

    listen(app, listening, ready)
    note("stopped")


def load(
    runs: tuple[str, ...],
    device: str,
    dtype: str,
    quantized: tuple[bool, bool] = (False, False),
    adapter: str | None = None,
) -> "dict[str, ServedModel]":
    from nanolm.classification.classifier import load as load_classifier
    from nanolm.cli.progress import TrainingView
    from nanolm.cli.sample import ready
    from nanolm.model.stored import config_file
    from nanolm.pairs.translator import Translator
    from nanolm.runs.folder import find_named, is_classifier, is_seq2seq
    from nanolm.serve.models import (
        ServedClassifier,
        ServedLanguageModel,
        ServedModel,
        ServedTranslator,
        names_of,
        own_prompts,
    )

    models: dict[str, ServedModel] = {}
    for run, name in zip(runs, names_of(runs), strict=True):
        with TrainingView() as view:
            folder = find_named(run, note, view.report)
        if any(quantized) and (is_classifier(folder) or is_seq2seq(folder)):
            raise UsageError(f"--int8 and --int4 are for language models, which {run} is not")
        made = int(min(config_file(folder).stat().st_mtime, time.time()))
        if is_classifier(folder):
            found = load_classifier(folder, note, adapter=adapter).on(device, dtype)
            models[name] = ServedClassifier(name, made, found)
        elif is_seq2seq(folder):
            if adapter is not None:
                raise UsageError(f"--adapter {adapter}: not for {run}, a model trained on pairs")
            translator = Translator.load(folder, note).on(device, dtype)
            translator.translate("a", max_tokens=2)  # fails now rather than for the first client
            models[name] = ServedTranslator(name, made, translator)
        else:
            _, writer = ready(str(folder), device, dtype, quantized, adapter)
            models[name] = ServedLanguageModel(name, made, writer, own_prompts(folder))
    return models
