"""Text input: from the names that the user gave to token ids, and back."""

from pathlib import Path

from nanolm.errors import did_you_mean

TRAINABLE = ("bpe", "char", "byte")  # tokenizers trained on the corpus
NAMED = ("gpt2", "cl100k", "o200k")  # published tokenizers
HUB = "hf://"  # the prefix of Hugging Face Hub paths
STDIN = "-"  # as a source


def spelled(token: bytes) -> str:
    """The bytes of a token as text; incomplete characters as \\xe2."""
    return token.decode(errors="backslashreplace")


def tokenizer_problem(name: str) -> str | None:
    """The problem with a --tokenizer value, as far as its name shows one."""
    known = [*TRAINABLE, *NAMED]
    if name in known or Path(name).exists():
        return None
    others = f"{', '.join(known)}, or the path of a tokenizer file or model folder"
    return f"--tokenizer {name}: choose {others}{did_you_mean(name, known)}"
