"""`nanolm info`: describe a run or model folder."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.console import note, print_json, show_rows
from nanolm.cli.options import Command, adapter_option, json_option
from nanolm.formats import counted
from nanolm.model.config import PUBLISHED

if TYPE_CHECKING:
    from nanolm.runs.info import History, Info


@click.command("info", cls=Command)
@click.argument("run")
@adapter_option(help="Describe a LoRA adapter for RUN, in the format of PEFT, as well.")
@json_option(help="Print one JSON object.")
def command(run: str, adapter: str | None, as_json: bool) -> None:
    """Describe the architecture, size and files of a model.

    RUN is a run folder, a checkpoint, a Hugging Face model folder, or a GGUF file.

    \b
    nanolm info runs/novel
    nanolm info runs/novel/last --json
    """
    from nanolm.runs.info import describe

    info = describe(run, note, adapter)
    if as_json:
        print_json(asdict(info))
    else:
        show_rows(rows(info), indent=22)


def rows(info: "Info") -> list[tuple[str, str]]:
    usual = {name: (None, *PUBLISHED.get(name, ())) for name in info.architecture}  # not shown
    switches = {name: v for name, v in info.architecture.items() if v not in usual[name]}
    if switches.get("positions") != "rope":
        switches.pop("rope_base", None)
    readers = f"readable by {' and '.join(info.readers)}"
    readers += f" only: {info.why_only}" if info.why_only else ""
    shown = [
        ("model", info.folder),
        ("type", f"{info.model_type}, {readers}"),
        ("architecture", ", ".join(f"{name} {word(value)}" for name, value in switches.items())),
        ("parameters", f"{info.parameters:,}, stored as {info.numbers}"),
    ]
    for part, count in info.parts.items():
        shown.append((f"  {part}", f"{count:,} ({count / info.parameters:.1%})"))
    files = ", ".join(f"{name} {megabytes(count)}" for name, count in info.bytes.items())
    tokenizer = tokenizer_row(info.tokenizer)
    if info.source_tokenizer:
        source = tokenizer_row(info.source_tokenizer)
        tokenizer = f"source {source}; target {tokenizer}"
    shown.append(("tokenizer", tokenizer))
    shown.append(("on disk", f"{megabytes(sum(info.bytes.values()))}: {files}"))
    if info.adapter:
        shown.append(("adapter", ", ".join(f"{key} {word(v)}" for key, v in info.adapter.items())))
    if info.history:
        shown.append(("trained", training(info.history)))
    return shown


def tokenizer_row(facts: dict[str, Any]) -> str:
    kind = "external" if facts["kind"] == "foreign" else facts["kind"]
    return f"{kind}, {facts['vocab_size']:,} tokens"


def training(past: "History") -> str:
    each = "texts" if past.context is None else f"x {past.context} tokens"
    batch = "" if past.batch is None else f" of {past.batch} {each}"
    text = f"{counted(past.step, 'step')}{batch} in {past.seconds:,.0f} s"
    if past.corpus:
        text += f" on {', '.join(past.corpus)}"
    if past.start_from is not None:
        text += f", from {past.start_from}"
    text += f", {past.distilled}" if past.distilled else ""
    if past.best_step is not None:
        text += f"; finished, best at step {past.best_step:,}"
    if past.val_bits_per_byte is not None:
        text += f" with {past.val_bits_per_byte:.3f} bits per byte on the validation set"
    if past.val_accuracy is not None:
        text += f" with a validation accuracy of {past.val_accuracy:.1%}"
    if past.val_bleu is not None:
        text += f" with a validation BLEU of {past.val_bleu:.1f}"
    return text


def word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count:,} bytes"
