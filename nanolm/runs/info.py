"""Facts about a run or model folder: architecture, parameters, files, history, readers."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanolm.errors import DataError, ModelError
from nanolm.model.config import ClassifierConfig, Seq2SeqConfig
from nanolm.model.config_json import model_type
from nanolm.model.shapes import parameters_by_part
from nanolm.model.stored import (
    ADAPTER,
    base_folder,
    checked_tensors,
    has_adapter,
    is_partial,
    load_any_config,
    read_json,
    stored_dtype,
)
from nanolm.runs.folder import (
    Run,
    distilled_from,
    find_adapter,
    find_model,
    model_tokenizer,
    model_tokenizers,
)

TESTED_READER = "transformers 5.22 ({}, AutoTokenizer)"  # the tests load each family
UNREADABLE = (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
)  # raised by edited files


@dataclass(frozen=True)
class History:
    """How a model was trained. Values that are not known, or not yet, are None."""

    step: int
    seconds: float
    run: str | None = None
    started: str | None = None
    corpus: tuple[str, ...] = ()
    start_from: str | None = None
    distilled: str = ""  # from which models
    batch: int | None = None
    context: int | None = None
    best_step: int | None = None
    val_bits_per_byte: float | None = None
    val_accuracy: float | None = None  # of a classifier
    val_bleu: float | None = None  # of a sequence-to-sequence model


@dataclass(frozen=True)
class Info:
    folder: str
    model_type: str
    architecture: dict[str, Any]
    parameters: int
    parts: dict[str, int]
    numbers: str  # dtype of the stored weights
    tokenizer: dict[str, Any]
    source_tokenizer: dict[str, Any] | None  # if it is another one than the target's
    bytes: dict[str, int]  # on disk, by file
    history: History | None
    readers: list[str]
    why_only: str  # why only nanolm can read it
    adapter: dict[str, Any] | None = None  # LoRA


def describe(name: str, note: Callable[[str], None], adapter: str | None = None) -> Info:
    """Read everything except the weights, and check that the LoRA `adapter` fits."""
    folder, extra = find_model(name, note), find_adapter(adapter)
    config = load_any_config(folder)
    parts = parameters_by_part(config)
    with checked_tensors(folder, config):
        numbers = stored_dtype(folder)
    tokenizer = source = model_tokenizer(folder)
    described = None
    root, files = folder, sorted([*folder.glob("*"), *folder.glob(f"{ADAPTER}/*")])
    if folder.is_file():  # GGUF
        root, files = folder.parent, [folder]
    if has_adapter(folder):
        extra, numbers = extra or folder / ADAPTER, "a LoRA adapter"
    if extra:
        from nanolm.model.peft import describe_adapter  # imports torch

        described = describe_adapter(extra, config, folder)
    kind, why = model_type(config)
    if is_partial(folder):
        why = f"the frozen weights are in {base_folder(folder)}"
    architecture, loader = asdict(config), "AutoModelForCausalLM"
    if isinstance(config, ClassifierConfig):
        architecture["labels"], loader = list(config.labels), "AutoModelForSequenceClassification"
    elif isinstance(config, Seq2SeqConfig):
        loader, (tokenizer, source) = "AutoModelForSeq2SeqLM", model_tokenizers(folder)
    base = architecture.pop("base", {})
    others = ["llama.cpp"] if folder.is_file() else [TESTED_READER.format(loader)]
    if kind == "nanolm" or is_partial(folder):
        others = ["peft (adapter)"] if kind != "nanolm" and has_adapter(folder) else []
    return Info(
        folder=str(folder),
        model_type=kind,
        architecture=architecture | base,
        parameters=sum(parts.values()),
        parts=parts,
        numbers=numbers,
        tokenizer={"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size},
        source_tokenizer=None
        if source is tokenizer
        else {"kind": source.kind, "vocab_size": source.vocab_size},
        bytes={
            file.relative_to(root).as_posix(): file.stat().st_size
            for file in files
            if file.is_file()
        },
        history=read_history(Path(name), folder),
        readers=["nanolm", *others],
        why_only=why,
        adapter=described,
    )


def read_history(path: Path, folder: Path) -> History | None:
    """How the model in `folder`, a run or one of its checkpoints, was trained."""
    try:
        state = read_json(folder / "state.json")
        known = History(step=int(state["step"]), seconds=float(state["seconds"]))
    except (ModelError, *UNREADABLE):
        return None
    for run in map(Run, (path, *folder.resolve().parents[:2])):
        if run.exists():
            try:
                settings, facts = run.settings(), run.facts()
                result = facts.get("result", {})
                bits = result.get("val_bits_per_byte")
                val = result.get("val", {})
                accuracy, bleu = val.get("accuracy"), val.get("bleu")
                start = settings.get("start_from")
                texts = settings.get("corpus") or settings.get("pairs") or settings["data"]
                return replace(
                    known,
                    run=str(run.path),
                    started=str(facts["started"]),
                    corpus=tuple(map(str, texts)),
                    start_from=None if start in (None, "none") else str(start),
                    distilled=distilled_from(facts),
                    batch=int(settings["batch"]),
                    context=int(settings["context"]) if "corpus" in settings else None,
                    best_step=int(result["best_step"]) if result else None,
                    val_bits_per_byte=None if bits is None else float(bits),
                    val_accuracy=None if accuracy is None else float(accuracy),
                    val_bleu=None if bleu is None else float(bleu),
                )
            except (DataError, *UNREADABLE):
                break
    return known
