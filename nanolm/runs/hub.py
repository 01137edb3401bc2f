"""A model from the Hugging Face Hub, as a local folder.

    >>> hub_model("gpt2", report)  # or "hf://gpt2", "owner/name", "hf://owner/name"

If the Hugging Face cache already has the model, that copy is used. Otherwise the files that a model
needs are downloaded once (`nanolm.download`). After that, no network is needed.
"""

import json
import os
import re
from functools import partial
from pathlib import Path

from nanolm.choice import Report
from nanolm.download import Repository
from nanolm.errors import ModelError, UsageError
from nanolm.machine import cache_folder
from nanolm.model.stored import NGRAMS
from nanolm.text import HUB

PLAIN_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"  # never a name that points outside a folder
REPOSITORY_NAME = re.compile(rf"(?:{HUB})?((?:{PLAIN_NAME}/)?{PLAIN_NAME})/?")
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_NAME = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
MODEL_FILES = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json"),
    *("merges.txt", "source_tokenizer.json", NGRAMS),
)
WITHOUT_JSON = ("tokenizer.model", "spiece.model", "qwen.tiktoken")  # instead of a tokenizer.json
SUFFIXES = "safetensors|bin|pt|pth|ckpt|pkl|h5|msgpack|gguf|onnx|ot"
OTHER_WEIGHTS = re.compile(rf"{PLAIN_NAME}\.({SUFFIXES})")


def hub_model(name: str, report: Report) -> Path:
    """The folder of the model `name`, downloaded unless it is cached."""
    match = REPOSITORY_NAME.fullmatch(name)
    if match is None:
        how = f"type OWNER/NAME or {HUB}OWNER/NAME, with nothing after it"
        raise UsageError(f"{name} is not a valid name on the Hugging Face Hub; {how}")
    name = match[1]
    if folder := _cached_by_huggingface(name):
        return folder
    repository = Repository("models", name, f"model {name}", cache_folder() / "models")
    folder = repository.fetch(partial(_choose, name), report, together=True)[0].parent
    if _is_model(folder):
        return folder
    problem = f"{name}: its {INDEX} lists files that are missing"
    raise ModelError(f"{problem}; if this has been fixed on the Hub, delete {folder} and try again")


def _choose(name: str, paths: list[str]) -> list[str]:
    """The files of a repository that a model needs, the weights last."""
    shards = sorted({path for path in paths if SHARD_NAME.fullmatch(path)})
    if WEIGHTS in paths:
        weights = [WEIGHTS]
    elif INDEX in paths and shards:
        weights = [INDEX, *shards]
    else:
        others = [path for path in sorted(paths) if OTHER_WEIGHTS.fullmatch(path)]
        if not others:
            raise ModelError(
                f"{name} has no weights: neither {WEIGHTS} nor {INDEX} with its shards"
            )
        instead = f"instead of {WEIGHTS} (or {INDEX} with its shards)"
        raise ModelError(
            f"{name} has {', '.join(others[:5])} {instead}; nanolm reads only .safetensors, "
            "because other formats can run code when loaded"
        )
    if CONFIG not in paths:
        raise ModelError(f"{name} has no {CONFIG}, which describes the model")
    wanted = MODEL_FILES if "tokenizer.json" in paths else (*MODEL_FILES, *WITHOUT_JSON)
    return [path for path in wanted if path in paths] + weights


def _cached_by_huggingface(name: str) -> Path | None:
    """The copy in the Hugging Face cache, if it is complete."""
    try:
        users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        home = Path(os.environ.get("HF_HOME") or users / "huggingface")
        cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        repository = cache / "--".join(("models", *name.split("/")))
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError, RuntimeError):  # missing, not text, or no home folder
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if re.fullmatch(PLAIN_NAME, revision) and _is_model(snapshot) else None


def _is_model(folder: Path) -> bool:
    weights = {WEIGHTS}
    try:
        if not (folder / WEIGHTS).is_file():
            weights = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        if not weights or not all(re.fullmatch(PLAIN_NAME, name) for name in weights):
            return False
        ngrams = [NGRAMS] if b'"ngrams": true' in (folder / CONFIG).read_bytes() else []
        return all((folder / name).is_file() for name in (*weights, *ngrams))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
