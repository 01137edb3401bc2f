"""nanolm: train language models on text files and classifiers on labeled text.

    import nanolm

    nanolm.train("corpus.txt", minutes=3, out="runs/mine")
    nanolm.load("runs/mine").generate("Once upon a time")
    nanolm.finetune("reviews.tsv", start_from="runs/mine", out="runs/reviews")
    nanolm.load_classifier("runs/reviews").classify("A lovely film.")

Importing nanolm is cheap: torch is imported when a function first needs it.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanolm.classification.classifier import TextClassifier
    from nanolm.classification.finetune import FinetuneResult
    from nanolm.pairs.train import PairResult
    from nanolm.pretraining.train import TrainResult
    from nanolm.text.tokenizer import Tokenizer

# On ARM, torch allocates with mimalloc, which returns freed memory to the system after 10 ms, only
# to request it again in the next training step. It reads this when torch is imported.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # ms

__version__ = "0.2.0.dev0"
__all__ = ["finetune", "load", "load_classifier", "load_tokenizer", "train", "train_pairs"]


def train(
    corpus: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    notify: Callable[[Any], None] = lambda event: None,
    **settings: Any,
) -> "TrainResult":
    """Train as `nanolm train` does; `settings` are its options, with underscores.

    Calls `notify` with each event of the run (see nanolm.training.events) and prints nothing.
    """
    from nanolm.pretraining import train as pretraining
    from nanolm.training.settings import TrainSettings

    values = {"corpus": _listed(corpus), **_plain(settings)}
    return pretraining.train(TrainSettings.from_dict(values), out, notify)


def finetune(
    data: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    notify: Callable[[Any], None] = lambda event: None,
    **settings: Any,
) -> "FinetuneResult":
    """Fine-tune as `nanolm finetune` does; `settings` are its options, with underscores.

    `--from` is `start_from` here. `notify` works as in `train`.
    """
    from nanolm.classification.finetune import finetune
    from nanolm.classification.settings import FinetuneSettings

    values = {"data": _listed(data), **_plain(settings)}
    return finetune(FinetuneSettings.from_dict(values), out, notify)


def train_pairs(
    pairs: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    notify: Callable[[Any], None] = lambda event: None,
    **settings: Any,
) -> "PairResult":
    """Train as `nanolm train-pairs` does; `settings` are its options, with underscores.

    `val` and `test` are one table, or a list of two files. `notify` works as in `train`.
    """
    from nanolm.pairs import train
    from nanolm.pairs.settings import PairSettings

    values = {"pairs": _listed(pairs), **_plain(settings)}
    return train.train_pairs(PairSettings.from_dict(values), out, notify)


def _listed(paths: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    settings.pop("resume", None)  # a parameter of 0.1.0; runs resume anyway
    return {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}


def load(path: str | Path) -> Any:
    """Load the model of a run or model folder: a `LanguageModel` with `.model`, `.tokenizer` and
    `.generate()`, or, if it was trained on pairs, a `Translator` with `.translate()`.

    Warns about a damaged checkpoint and loads another one.
    """
    from nanolm.generation import language_model
    from nanolm.model.config import Seq2SeqConfig
    from nanolm.model.stored import load_any_config
    from nanolm.pairs.translator import Translator
    from nanolm.runs.folder import find_named

    folder = find_named(path, warnings.warn, lambda *how_far: None)
    if isinstance(load_any_config(folder), Seq2SeqConfig):
        return Translator.load_folder(folder)
    return language_model.load_folder(folder)


def load_classifier(path: str | Path) -> "TextClassifier":
    """Load the classifier of a run or model folder, with `.model`, `.labels`, `.classify()`."""
    from nanolm.classification import classifier

    return classifier.load(path, warnings.warn)


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Load a tokenizer from a run or model folder, from a tokenizer.json, or by name."""
    from nanolm.runs.folder import find_tokenizer

    return find_tokenizer(str(path), warnings.warn)
