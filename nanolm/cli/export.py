"""`nanolm export`: write a model for other programs, as a folder for the Hub or as a GGUF file."""

from dataclasses import asdict
from pathlib import Path

import click

from nanolm.cli.console import note, print_json
from nanolm.cli.options import Command, json_option, unknown
from nanolm.errors import refuse

FOLDER_TYPES = ("f32", "f16", "bf16")
GGUF_TYPES = (*FOLDER_TYPES, "q8_0", "q4_0")


@click.command("export", cls=Command)
@click.argument("run")
@click.option("--to", required=True, metavar="FOLDER|FILE.gguf", help="Where to write the model.")
@click.option("--type", "dtype", metavar="|".join(GGUF_TYPES), help="Precision of the weights.")
@json_option(help="Print one JSON object.")
def command(run: str, to: str, dtype: str | None, as_json: bool) -> None:
    """Write a model for other programs.

    RUN is a run folder, a checkpoint, a model folder, a GGUF file, or hf://NAME. FILE.gguf is for
    llama.cpp, Ollama and LM Studio. FOLDER is for Hugging Face `transformers` and can be uploaded
    to the Hub: the model, its tokenizer and a model card, without the state of training.

    \b
    nanolm export runs/novel --to novel.gguf
    nanolm export runs/novel --to novel-model --type bf16
    """
    gguf = Path(to).suffix.lower() == ".gguf"
    refuse(unknown("--type", dtype, GGUF_TYPES if gguf else FOLDER_TYPES) if dtype else [])
    from nanolm.cli.progress import TrainingView
    from nanolm.runs.export import export_folder
    from nanolm.runs.export_gguf import export_gguf

    with TrainingView() as view:
        write = export_gguf if gguf else export_folder
        made = write(run, Path(to), dtype, note, view.report)
    if as_json:
        print_json({**asdict(made), "file": str(made.file)})
