"""Datasets on the Hugging Face Hub, as the files to read."""

import re
from collections import Counter
from functools import partial
from pathlib import Path, PurePosixPath

from nanolm.choice import Report
from nanolm.download import Repository
from nanolm.errors import DataError, UsageError
from nanolm.text import HUB
from nanolm.text.documents import TABLES
from nanolm.text.source import COMPRESSIONS

DATA_SUFFIXES = (*TABLES, ".txt", ".md")
ABOUT = re.compile(r"(readme|licen[cs]e|changelog|contributing)(?![a-z])", re.I)
TRAIN = re.compile(r"(?<![a-z])train(?![a-z])", re.I)


def dataset_files(name: str, folder: Path, report: Report) -> list[Path]:
    """The data files of a Hugging Face dataset: hf://OWNER/NAME, or hf://OWNER/NAME/PATH."""
    parts = name.removeprefix(HUB).rstrip("/").split("/")
    if not name.startswith(HUB) or {"", ".", ".."} & set(parts):
        raise UsageError(f"{name} is not a dataset; use hf://OWNER/NAME or hf://OWNER/NAME/PATH")
    repository = Repository("datasets", "/".join(parts[:2]), f"dataset {name}", folder)
    return repository.fetch(partial(_choose, name, "/".join(parts[2:])), report)


def _choose(name: str, inside: str, paths: list[str]) -> list[str]:
    """The data files at or under `inside`; only those with "train" in the path, if any."""
    under = [path for path in sorted(paths) if not inside or f"{path}/".startswith(f"{inside}/")]
    chosen = [path for path in under if _suffix(path) in DATA_SUFFIXES]
    chosen = [path for path in chosen if not ABOUT.match(PurePosixPath(path).name)] or chosen
    chosen = [path for path in chosen if TRAIN.search(path)] or chosen
    if not chosen:
        suffixes = Counter(_suffix(path) or "others" for path in paths).most_common()
        files = ", ".join(f"{suffix} ({count})" for suffix, count in suffixes) or "no files at all"
        wanted = f"{', '.join(DATA_SUFFIXES)} files {f'under {inside}' if inside else 'in it'}"
        raise DataError(f"{name}: no {wanted}; the dataset has {files}")
    return chosen


def _suffix(path: str) -> str:
    plain = PurePosixPath(path.lower())
    return plain.with_suffix("").suffix if plain.suffix in COMPRESSIONS else plain.suffix
