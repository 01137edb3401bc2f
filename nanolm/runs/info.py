"""What a run or model folder is: architecture, parameters, files, history, who can read it.

>>> describe("runs/novel", note=print).parameters
1317632
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanolm.errors import DataError
from nanolm.model.config_json import model_type
from nanolm.model.huggingface import checked, load_config
from nanolm.model.size import parameters_by_part
from nanolm.runs.folder import Run, find_model
from nanolm.text.loading import load_tokenizer

TRIED = "transformers 5.22 (AutoModelForCausalLM, AutoTokenizer)"  # the tests load each family


@dataclass(frozen=True)
class Info:
    """What `nanolm info` shows."""

    folder: str
    model_type: str
    architecture: dict[str, Any]
    parameters: int
    parts: dict[str, int]
    numbers: str  # how the weights are stored
    tokenizer: dict[str, Any]
    bytes: dict[str, int]  # on disk, by file
    history: dict[str, Any]  # of its training, where that is known
    readers: list[str]
    why_only: str  # where nanolm alone reads it


def describe(name: str, note: Callable[[str], None]) -> Info:
    """Look at everything but the weights themselves."""
    folder = find_model(name, note)
    config = load_config(folder)
    with checked(folder, config) as (model, tensors):
        parts = parameters_by_part(model)
        numbers = ", ".join(sorted({stored.dtype for stored in tensors.values()}))
    tokenizer = load_tokenizer(folder)
    kind, why = model_type(config)
    return Info(
        folder=str(folder),
        model_type=kind,
        architecture=asdict(config),
        parameters=sum(parts.values()),
        parts=parts,
        numbers=numbers,
        tokenizer={"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size},
        bytes={file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        history=history(Path(name), folder),
        readers=["nanolm"] if kind == "nanolm" else ["nanolm", TRIED],
        why_only=why,
    )


def history(path: Path, folder: Path) -> dict[str, Any]:
    """What is known of how the model in `folder` was trained."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        step = int(state["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    known: dict[str, Any] = {"step": step, "seconds": state.get("seconds")}
    for place in (path, *folder.resolve().parents[:2]):  # a run, or a checkpoint within one
        run = Run(place)
        if not run.exists():
            continue
        try:
            facts, settings = run.facts(), run.settings()
        except DataError:
            return known
        keys = ("corpus", "start_from", "batch", "context", "lr", "seed")
        known |= {"run": str(place), "started": facts.get("started")}
        known |= {key: settings[key] for key in keys if key in settings}
        if "result" in facts:
            known["result"] = facts["result"]
        break
    return known
