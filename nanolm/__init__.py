"""nanolm: from a text file to your own language model.

    import nanolm

    nanolm.train("corpus.txt", minutes=3, out="runs/mine")
    nanolm.load("runs/mine").generate("Once upon a time")

Importing this is cheap: torch is loaded when a function first needs it.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanolm.generation.language_model import LanguageModel
    from nanolm.text.tokenizer import Tokenizer
    from nanolm.training.language import Result

__version__ = "0.1.0"
__all__ = ["load", "load_tokenizer", "train"]


def train(
    corpus: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    resume: bool = False,
    notify: Callable[[Any], None] = lambda event: None,
    **settings: Any,
) -> "Result":
    """What `nanolm train` does; `settings` are its options, with underscores.

    `notify` is called with each event of the run (see nanolm.training.events); nothing is printed.
    """
    from nanolm.training import language
    from nanolm.training.settings import TrainSettings

    paths = [corpus] if isinstance(corpus, str | Path) else corpus
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}
    values = {"corpus": [str(path) for path in paths], **settings}
    return language.train(TrainSettings.from_dict(values), out, resume, notify)


def load(path: str | Path) -> "LanguageModel":
    """The model in a run folder or model folder, with `.model`, `.tokenizer`, `.generate()`.

    A damaged checkpoint is warned of, and another one taken.
    """
    from nanolm.generation import language_model

    return language_model.load(path, warnings.warn)


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer of a run folder or model folder, a tokenizer.json itself, or one by name."""
    from nanolm.runs.folder import find_tokenizer

    return find_tokenizer(str(path), warnings.warn)
