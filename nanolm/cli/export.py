"""`nanolm export`: write a model for other programs, as a folder for the Hub or as a GGUF file."""

from pathlib import Path

import click

from nanolm.cli.console import note, note_written
from nanolm.cli.options import Command, unknown
from nanolm.errors import refuse

FOLDER_TYPES = ("f32", "f16", "bf16")
GGUF_TYPES = (*FOLDER_TYPES, "q8_0", "q4_0")


@click.command("export", cls=Command)
@click.argument("run")
@click.option("--to", required=True, metavar="FOLDER|FILE.gguf", help="Where to write the model.")
@click.option("--type", "dtype", metavar="|".join(GGUF_TYPES), help="Precision of the weights.")
def command(run: str, to: str, dtype: str | None) -> None:
    """Write a model for other programs.

    RUN is a run folder, a checkpoint, or a model folder. FILE.gguf is for llama.cpp, Ollama and LM
    Studio. FOLDER is for Hugging Face `transformers` and can be uploaded to the Hub: the model, its
    tokenizer and a model card, without the state of training.

    \b
    nanolm export runs/novel --to novel.gguf
    nanolm export runs/novel --to novel-model --type bf16
    """
    gguf = Path(to).suffix.lower() == ".gguf"
    refuse(unknown("--type", dtype, GGUF_TYPES if gguf else FOLDER_TYPES) if dtype else [])
    if gguf:
        from nanolm.cli.progress import TrainingView
        from nanolm.runs.export_gguf import export_gguf

        with TrainingView() as view:
            made = export_gguf(run, Path(to), dtype, note, view.report)
        note_written(made.file)
        note(f"for Ollama, type: {made.command}")
    else:
        from nanolm.runs.export import export_folder

        export_folder(run, Path(to), dtype, note)
