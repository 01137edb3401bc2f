"""The model card of an exported model: Markdown with the YAML header that the Hub reads.

Names and labels may come from anywhere, so they are escaped in both.
"""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

from nanolm.formats import abridged, counted, listed
from nanolm.model.config import ClassifierConfig, Seq2SeqConfig
from nanolm.model.config_json import model_type
from nanolm.model.shapes import Config, parameters_by_part
from nanolm.model.stored import NGRAMS
from nanolm.runs.folder import Run
from nanolm.runs.hub import REPOSITORY_NAME
from nanolm.runs.info import History
from nanolm.text import HUB, mix

TODO = "**TODO**: choose a license"  # a card without this line was edited by the user
MARKUP = re.compile(r"([\\`*_{}\[\]<>()#|!&~$])")
TASKS = {  # the Hub's name: what the model is, and the command that uses it
    "text-generation": ("language model", "sample {} --prompt 'Once upon a time'"),
    "text-classification": ("text classifier", "classify {} 'some text'"),
    "translation": ("sequence-to-sequence model", "translate {} 'some text'"),
}
RESULTS = {
    "val_loss": "loss",
    "loss": "loss",
    "perplexity": "perplexity",
    "val_bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact": "exact match",
}
PIPELINE = """\
from transformers import pipeline

model = pipeline("{task}", model={name})
print(model("some text"))"""
SEQ2SEQ = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name})
model = AutoModelForSeq2SeqLM.from_pretrained({name})
ids = model.generate(**tokenizer("some text", return_tensors="pt"))
print(tokenizer.decode(ids[0], skip_special_tokens=True))"""


def model_card(name: str, run: str, config: Config, history: History | None, dtype: str) -> str:
    """The card of the model `run`, exported as `name` with weights of this precision."""
    family, why_only = model_type(config)
    base = config.base if isinstance(config, ClassifierConfig) else config
    labels = config.labels if isinstance(config, ClassifierConfig) else ()
    task = "text-classification" if labels else "text-generation"
    task = "translation" if isinstance(config, Seq2SeqConfig) else task
    what, command = TASKS[task]
    data = [hub_name(each) for each in mix.sources(history.corpus)] if history else []
    start = (history.start_from or "") if history else run
    if history and start and not Path(start).is_absolute():
        start = HUB + start.removeprefix(HUB)  # paths are stored as absolute ones
    header = {
        "library_name": "nanolm" if why_only else "transformers",
        "pipeline_tag": task,
        "base_model": hub_name(start),
        "datasets": [each for each in data if each],
        "tags": ["nanolm"] if why_only else ["nanolm", family],
    }
    facts = {
        "architecture": f"{family}, {counted(base.layers, 'layer')}, width {base.dim:,}",
        "parameters": f"{sum(parameters_by_part(config).values()):,}",
        "context": counted(base.context, "token"),
        "vocabulary": counted(base.vocab_size, "token"),
        "weights": dtype,
        "labels": listed(labels, 50),
    }
    run_facts = Run(Path(history.run)).facts() if history and history.run else {}
    if history:
        facts |= {
            "trained on": listed([Path(each).name for each in mix.sources(history.corpus)], 20),
            "fingerprint of the data": fingerprint_of(run_facts),
            "started from": Path(start).name,
            "step": f"{history.step:,}",
        }
    shown = [f"{key}: {json.dumps(value)}" for key, value in header.items() if value]
    lines = ["---", *shown, "# license: mit", "# language: en", "---", "", f"# {escaped(name)}", ""]
    todo = "and a language in the header of this file, then delete this line."
    how = "trained" if history else "exported"
    lines += [f"> {TODO} {todo}", "", f"A {what} {how} with nanolm.", ""]
    lines += table(["model", ""], facts)
    result = run_facts.get("result", {})
    if history and history.step == history.best_step:
        lines += table(["validation set", ""], measured(result) | measured(result.get("val")))
        lines += table(["test set", ""], measured(result.get("test")))
    lines += ["## How to use it", ""]
    if why_only:
        lines += [f"Only nanolm can read this model: {escaped(why_only)}.", ""]
    else:
        example = SEQ2SEQ if task == "translation" else PIPELINE
        lines += fenced("python", example.format(task=task, name=json.dumps(plain(name))))
        if isinstance(config, ClassifierConfig) and config.ngrams:
            only = f"Results include the n-gram model in `{NGRAMS}`, which only nanolm uses."
            lines += [only, ""]
    place = shlex.quote(plain(name))
    lines += fenced("sh", f"nanolm {command.format(place)}")
    if task == "text-generation" and not why_only:
        lines += ["For llama.cpp, Ollama and LM Studio, convert it to a GGUF file:", ""]
        lines += fenced("sh", f"nanolm export {place} --to model.gguf")
    return "\n".join(lines)


def fingerprint_of(facts: dict[str, Any]) -> str:
    prints = facts.get("fingerprints", {})
    names = ("corpus", "data", "pairs")
    return str(next((f"SHA-256 {prints[name]}" for name in names if name in prints), ""))


def measured(values: Any) -> dict[str, str]:
    """The results among `values`, which may be anything: the file can be edited."""
    if not isinstance(values, dict):
        return {}
    loss = values.get("val_loss")
    if isinstance(loss, float) and "val_bits_per_byte" in values:
        values = {**values, "perplexity": math.exp(min(loss, 700.0))}
    return {
        name: f"{values[key]:,.4f}"
        for key, name in RESULTS.items()
        if isinstance(values.get(key), int | float)
    }


def hub_name(name: str) -> str:
    """The repository on the Hub that hf://NAME refers to; empty for any other name."""
    repository = "/".join(name.split("/")[:4]).removesuffix("/")
    return repository.removeprefix(HUB) * bool(
        name.startswith(HUB) and REPOSITORY_NAME.fullmatch(repository)
    )


def plain(text: str) -> str:
    """`text` on one line, without unprintable characters, and not too long."""
    return abridged("".join(char if char.isprintable() else " " for char in text), 300)


def escaped(text: str) -> str:
    """`text` as plain text in Markdown."""
    return MARKUP.sub(r"\\\1", plain(text))


def table(header: list[str], rows: dict[str, str]) -> list[str]:
    rows = {key: value for key, value in rows.items() if value}
    if not rows:
        return []
    lines = [f"| {key} | {escaped(value)} |" for key, value in rows.items()]
    return [f"| {' | '.join(header)} |", "| --- | --- |", *lines, ""]


def fenced(language: str, code: str) -> list[str]:
    return [f"```{language}", code, "```", ""]
