"""Write a model as a GGUF file, for llama.cpp and programs built on it such as Ollama.

    >>> export_gguf("runs/novel", Path("novel.gguf"), "q8_0", print)

Tensors are converted one at a time, so this takes little memory.
"""

import json
import math
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanolm import files
from nanolm.choice import Report
from nanolm.errors import ModelError, UsageError
from nanolm.gguf.blocks import FORMATS, Bytes, Floats, quantize
from nanolm.gguf.file import has_magic, write_gguf
from nanolm.model.config import GPTConfig
from nanolm.model.finite import root_mean_square
from nanolm.model.gguf import FREQUENCIES, frequency_factors, gguf_values, stored_as, why_not
from nanolm.model.huggingface import suppressed_tokens
from nanolm.model.shapes import Shape
from nanolm.model.stored import (
    StoredTensor,
    checked_tensors,
    is_partial,
    load_config,
    tensor_mappings,
)
from nanolm.runs.export import Export
from nanolm.runs.folder import find_named, model_tokenizer
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.tokenizer_files.gguf import chat_template, tokenizer_values
from nanolm.text.tokenizer_files.tokenizer_json import CLOSE_TURN, OPEN_TURN

# Half the size of float32, and hardly any loss: bits per byte change by less than 0.01 %.
DEFAULT = "f16"
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}  # numbers of llama.cpp
LARGEST_HALF = 65_504  # float16, also that of scales
# Parts of models that take little room, or that 4 bits would harm most.
NEVER_ROUNDED, EIGHT_BITS = ("position_embd.weight",), ("token_embd.weight", "output.weight")
CHATML = (
    "{{{{ range .Messages }}}}{open}{{{{ .Role }}}}\n{{{{ .Content }}}}{close}\n"
    "{{{{ end }}}}{open}assistant\n"
)


class Written(NamedTuple):
    """A tensor to write."""

    name: str
    shape: Shape
    format: str
    read: Callable[[], Floats]


def export_gguf(
    run: str,
    to: Path,
    dtype: str | None,
    note: Callable[[str], None],
    report: Report = lambda *how_far: None,
) -> Export:
    """Write the model of RUN to `to`, and a Modelfile for Ollama next to it."""
    folder = find_named(run, note, report)
    config, dtype = load_config(folder), dtype or DEFAULT
    if is_partial(folder):
        cure = f"merge it with `nanolm export {run} --to FOLDER`, then export FOLDER"
        raise ModelError(f"{folder} is a LoRA adapter whose base model is elsewhere; {cure}")
    if why := why_not(config):
        raise ModelError(f"{folder} cannot be written as GGUF, which llama.cpp runs: {why}")
    assert isinstance(config, GPTConfig)
    to = to.resolve()
    wrong = {
        "is the model itself": to == folder.resolve(),
        "is in a folder that does not exist": not to.parent.is_dir(),
        "exists and is not a GGUF file": to.is_dir() or (to.exists() and not has_magic(to)),
    }
    for where in (where for where, is_wrong in wrong.items() if is_wrong):
        raise UsageError(f"--to {to} {where}; choose another place")
    tokenizer = model_tokenizer(folder)
    try:
        own_values, notes = tokenizer_values(tokenizer, config.vocab_size)
    except ModelError as error:
        raise ModelError(f"{folder} cannot be written as GGUF: {error}") from None
    if never := suppressed_tokens(folder, tokenizer.vocab_size):
        seen = f"nanolm never generates the {len(never):,} tokens that were not seen in training"
        seen += ", and adds a space before a prompt if that avoids them"
        notes.append(f"{seen}; GGUF cannot say so, and llama.cpp does neither")
    values = {**gguf_values(config), "general.name": to.stem, "general.type": "model"}
    values |= {"general.file_type": FILE_TYPES[dtype], "general.quantization_version": 2}
    values |= own_values
    with checked_tensors(folder, config, "pt") as stored, files.replacing(to) as temporary:
        tensors = list(tensors_of(stored, config, dtype))
        if whole := [each.name for each in tensors if each.format == "F16" and dtype[0] == "q"]:
            width = f"{len(whole)} tensors have rows that are no multiple of 32"
            notes.append(f"{width}, which {dtype} needs; they are written as f16")
        total = sum(math.prod(each.shape) for each in tensors)

        def data() -> Iterator[Bytes]:
            done = 0
            for each in tensors:
                yield converted(each, dtype)
                done += math.prod(each.shape)
                report("writing", done, total)

        with temporary.open("wb") as stream:
            write_gguf(stream, values, [each[:3] for each in tensors], data())
    modelfile = to.with_name(f"{to.stem}.Modelfile")
    lines = ollama_modelfile(to.name, config, tokenizer)
    if modelfile.exists() and modelfile.read_bytes() != lines.encode():
        notes.append(f"{modelfile.name} is kept, since it was edited or is of another model")
    else:
        files.write_atomically(modelfile, lines)
    for text in notes:
        note(text)
    size = to.stat().st_size
    note(f"wrote {to} ({size / 1000:,.0f} kB)")
    note(f"for Ollama: {shlex.join(['ollama', 'create', to.stem, '-f', str(modelfile)])}")
    family = str(values["general.architecture"])
    return Export(to, size, family, tokenizer.kind)


def tensors_of(stored: dict[str, StoredTensor], config: GPTConfig, dtype: str) -> Iterator[Written]:
    """All tensors as they are to be written, in order."""
    for mapping in tensor_mappings(config):
        for name in mapping.stored_names:
            source, place = stored[name], stored_as(name, config)

            def read(source: StoredTensor = source, place: Any = place) -> Floats:
                tensor = torch.as_tensor(source.file.get_tensor(source.name)).to(torch.float32)
                root_mean_square(tensor, f"{source.path}: {source.name}")  # refuses NaN
                return np.ascontiguousarray(place.store(tensor.numpy()))

            shape = place.shape(source.shape)
            yield Written(place.name, shape, format_of(place.name, shape, dtype), read)
    if (scaling := config.rope_scaling) and scaling.kind == "llama3":
        factors = frequency_factors(config.head_dim, config.rope_base, scaling)
        yield Written(FREQUENCIES, factors.shape, "F32", lambda: factors)


def format_of(name: str, shape: Shape, dtype: str) -> str:
    if len(shape) < 2 or name in NEVER_ROUNDED:
        return "F32"
    if dtype == "q4_0" and name in EIGHT_BITS:
        dtype = "q8_0"
    return dtype.upper() if shape[-1] % FORMATS[dtype.upper()].numbers == 0 else "F16"


def converted(tensor: Written, dtype: str) -> Bytes:
    numbers = tensor.read()
    if tensor.format not in ("F32", "BF16"):
        largest = float(np.abs(numbers).max(initial=0))
        scales = {"Q8_0": 127, "Q4_0": 8}.get(tensor.format, 1)
        if largest / scales > LARGEST_HALF:
            wrong = f"{tensor.name} has values up to {largest:,.0f}, too large for {dtype}"
            raise ModelError(f"{wrong}; try --type bf16")
    return quantize(numbers, tensor.format)


def ollama_modelfile(name: str, config: GPTConfig, tokenizer: Tokenizer) -> str:
    """What `ollama create` needs. Without a template, Ollama takes the one in the GGUF file, or
    guesses one for conversations."""
    template, stops = "{{ .Prompt }}", [tokenizer.special[tokenizer.end_of_text]]
    if tokenizer.turn:
        template = CHATML.format(open=OPEN_TURN, close=CLOSE_TURN)
        stops = [OPEN_TURN, CLOSE_TURN]
    lines = [f"FROM ./{name}", f'TEMPLATE """{template}"""', f"PARAMETER num_ctx {config.context}"]
    if chat_template(tokenizer) and not tokenizer.turn:
        del lines[1]
    return "\n".join([*lines, *(f"PARAMETER stop {json.dumps(text)}" for text in stops)]) + "\n"
