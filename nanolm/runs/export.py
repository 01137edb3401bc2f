"""Export a model to a folder that can be published: weights, tokenizer and model card.

    >>> export_folder("runs/novel", Path("novel-model"), "bf16", print)

The folder has no optimizer state and refers to no other folder. It is written aside and renamed.
"""

import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nanolm import files
from nanolm.choice import Report
from nanolm.errors import DataError, ModelError, NanolmError
from nanolm.formats import counted
from nanolm.model import stored
from nanolm.model.base import Model
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, Seq2SeqConfig
from nanolm.model.config_json import model_type
from nanolm.model.huggingface import (
    SHARD,
    load_classifier,
    load_model,
    load_seq2seq,
    save_config,
    save_weights,
)
from nanolm.model.seq2seq import Seq2Seq
from nanolm.model.shapes import Config
from nanolm.runs.folder import find_named, find_or_download, model_tokenizer, model_tokenizers
from nanolm.runs.hub import CONFIG, MODEL_FILES, WITHOUT_JSON
from nanolm.runs.info import History, read_history
from nanolm.runs.model_card import TODO, model_card

CARD = "README.md"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
COPIED = (*(name for name in MODEL_FILES if name != CONFIG), *WITHOUT_JSON)


@dataclass(frozen=True)
class Export:
    """What was written."""

    file: Path  # or the folder
    bytes: int
    architecture: str
    tokenizer: str


def export_folder(
    run: str,
    to: Path,
    dtype: str | None,
    note: Callable[[str], None],
    report: Report = lambda *how_far: None,
) -> Export:
    shown, to = to, Path(os.path.abspath(to))
    if os.path.lexists(to) and (why := why_not_replace(to)):
        raise DataError(f"{why}; choose another --to")
    folder = find_named(run, note, report)
    config, history = stored.load_any_config(folder), read_history(Path(run), folder)
    reason = "--type"
    if dtype is None:
        dtype, reason = stored_precision(folder, history)
    model = load_any(folder, config).to(DTYPES[dtype])
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise ModelError(f"some weights of {run} are too large for {dtype}; use --type bf16 or f32")
    card, todo = model_card(to.name, run, config, history, dtype).encode(), TODO.encode()
    if (to / CARD).exists() and todo not in (edited := (to / CARD).read_bytes()):
        note(f"{CARD} is kept, since it was edited")
        card = edited

    def write(temporary: Path) -> None:
        if folder.is_file():  # GGUF
            assert isinstance(model, Model)
            save_config(model, temporary, model_tokenizer(folder))
        values = stored.read_json((temporary if folder.is_file() else folder) / CONFIG)
        if values["model_type"] != "nanolm":
            values.pop("torch_dtype", None)  # the old name
            values["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        stored.write_json(temporary / CONFIG, values)
        for name in COPIED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, temporary / name)
        save_weights(model, temporary, SHARD)
        (temporary / CARD).write_bytes(card)

    to.parent.mkdir(parents=True, exist_ok=True)
    files.aside(to)  # removes what a killed export left
    files.commit(to.parent, to.name, write, unlisted={CARD})
    note(f"wrote {shown}: {counted(model.parameter_count(), 'parameter')}, {dtype} ({reason})")
    if todo in card:
        note(f"before you publish it, choose a license in {shown / CARD}")
    note(f"to publish it: hf upload NAME {shlex.quote(str(shown))}")
    size = sum(file.stat().st_size for file in to.iterdir())
    return Export(to, size, model_type(config)[0], model_tokenizer(to).kind)


def load_any(folder: Path, config: Config) -> Model | Classifier | Seq2Seq:
    """Load the model, of whichever kind, and check that its tokenizer can be read."""
    if isinstance(config, Seq2SeqConfig):
        model_tokenizers(folder)
        return load_seq2seq(folder)
    model_tokenizer(folder)
    return load_classifier(folder) if isinstance(config, ClassifierConfig) else load_model(folder)


def why_not_replace(to: Path) -> str:
    """Why `to` is not an earlier export, which may be replaced; empty if it is one."""
    if to.is_symlink() or not (to / CARD).is_file() or (to / "state.json").exists():
        return f"{to} already exists and is not an earlier export"
    return files.why_keep(to, {CARD})


def stored_precision(folder: Path, history: History | None) -> tuple[str, str]:
    """The precision that the weights, or those of the base model, are stored in."""
    whose = "as stored"
    if history and history.start_from:
        try:
            folder = find_or_download(history.start_from, lambda text: None, no_download)
            whose = "as its base model is stored"
        except NanolmError:
            return "f32", "the base model is not available"
    return {"float16": "f16", "bfloat16": "bf16"}.get(stored.stored_dtype(folder), "f32"), whose


def no_download(*progress: object) -> None:
    raise ModelError("the model is not in the cache")
