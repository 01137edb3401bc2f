"""vocab.json and merges.txt: the two files of GPT-2 and its kin."""

from pathlib import Path

from nanolm.errors import ModelError
from nanolm.text.tokenizer import BPE_MODEL, BYTE_LEVEL, tokenizer_json
from nanolm.text.tokenizer_files.tokenizer_json import BYTE_OF_CHARACTER, parse, read


def merges_to_json(vocabulary_file: Path, merges_file: Path) -> str:
    """The tokenizer.json that the two make together."""
    vocabulary = parse(read(vocabulary_file), vocabulary_file)
    merges = []
    for number, line in enumerate(read(merges_file).split("\n"), start=1):
        pair = line.rstrip("\r").split(" ")
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2:
            raise ModelError(f"{merges_file}, line {number}: a merge is two tokens")
        merges.append(pair)
    made = {*BYTE_OF_CHARACTER, *(left + right for left, right in merges)}
    special = {id: word for word, id in vocabulary.items() if type(id) is int and word not in made}
    model = {**BPE_MODEL, "vocab": vocabulary, "merges": merges}
    parts = {"pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL, "model": model}
    return tokenizer_json(parts, special)
