"""Text in: from whatever the user named to token ids, and back."""

from pathlib import Path

from nanolm.errors import did_you_mean

TRAINABLE = ("bpe", "char", "byte")  # tokenizers that are made for a text
NAMED = ("gpt2", "cl100k", "o200k")  # tokenizers that everybody has
HUB = "hf://"  # what addresses of the Hugging Face Hub begin with


def spelled(token: bytes) -> str:
    """The bytes of a token as text; bytes that are no whole character as \\xe2."""
    return token.decode(errors="backslashreplace")


def tokenizer_problem(name: str) -> str | None:
    """What is wrong with a --tokenizer, if anything can be seen from its name."""
    known = [*TRAINABLE, *NAMED]
    if name in known or Path(name).exists():
        return None
    others = f"{', '.join(known)}, or the file or folder of one{did_you_mean(name, known)}"
    return f"--tokenizer {name}: there is {others}"
