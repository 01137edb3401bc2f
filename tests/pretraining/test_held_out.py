"""The validation split, the messages about it, and the weights that are kept."""

import json
import random
from pathlib import Path

import pytest
import torch
from conftest import TINY_MODEL, Cli

import nanolm
from nanolm.runs.folder import Run

WORDS = ("a", "cat", "sees", "the", "dog", "and", "sings")


def sentences(count: int, seed: int = 1) -> str:
    draw = random.Random(seed)
    return " ".join(" ".join(draw.choices(WORDS, k=6)) + "." for _ in range(count))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(sentences(600))
    return file


def trained(cli: Cli, file: Path, *more: object) -> tuple[dict[str, object], str]:
    sizes = [f"--{name}={value}" for name, value in TINY_MODEL.items()]
    result = cli("train", file, *sizes, "--out", "run", "--json", *more)
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found, result.stderr


def test_the_validation_split_is_reported(cli: Cli, text: Path) -> None:
    _, said = trained(cli, text, "--steps", 4)
    assert "validation set: 1," in said
    assert "passages spread over the text, cut between sentences" in said


def test_nothing_held_out_keeps_the_last_weights(cli: Cli, text: Path, tmp_path: Path) -> None:
    result, said = trained(cli, text, "--steps", 6, "--val-fraction", 0)
    assert "validation set: none (the final weights are kept)" in said
    assert result["val_loss"] is None and result["best_step"] == 6
    run = Run(tmp_path / "run")
    assert (run.path / "best").resolve() == (run.path / "last").resolve()
    assert run.samples.read_text().startswith("## Step ")
    plain = cli("train", text, "--steps", 2, "--val-fraction", 0, "--preset", "nano")
    assert "no validation set" in plain.stdout and "at step 2" in plain.stdout
    assert cli("report", "run").returncode == cli("runs").returncode == 0


def test_two_runs_of_a_text_have_the_same_split(cli: Cli, text: Path, tmp_path: Path) -> None:
    trained(cli, text, "--steps", 1, "--seed", 1)
    first = Run(tmp_path / "run").facts()["fingerprints"]
    cli("train", text, "--preset", "nano", "--steps", 1, "--seed", 2, "--out", "other")
    other = Run(tmp_path / "other").facts()["fingerprints"]
    assert first["validation"] == other["validation"]


def test_validation_of_another_kind_of_text_is_not_called_overfitting(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "sorted.txt"
    file.write_text(sentences(400) + " " + sentences(60).upper())
    options = ("--steps", 60, "--lr", 0.05, "--evaluations", 12, "--tokenizer", "char")
    _, said = trained(cli, file, *options, "--val-split", "end")
    assert "the validation text differs from the training text" in said
    assert "--val-split spread" in said


def test_tokens_that_never_occur_are_not_generated(cli: Cli, text: Path, tmp_path: Path) -> None:
    trained(cli, text, "--steps", 2)  # the model hardly learns
    model = nanolm.load(tmp_path / "run")
    never = model.tokenizer.unseen
    seen = set(model.tokenizer.encode(text.read_text()))
    assert never and not never & seen
    written = model.generate("the", tokens=300, temperature=1.0, seed=1)
    assert set(written) <= set(text.read_text())
    saved = json.loads((tmp_path / "run" / "best" / "generation_config.json").read_text())
    assert saved["suppress_tokens"] == sorted(never)


def test_the_first_word_of_a_prompt_is_that_of_the_text(
    cli: Cli, text: Path, tmp_path: Path
) -> None:
    """In a text of one line every word but the first has a space before it."""
    trained(cli, text, "--steps", 1)
    tokenizer = nanolm.load(tmp_path / "run").tokenizer
    assert tokenizer.encode_prompt("sings and") == tokenizer.encode(" sings and")
    assert tokenizer.encode("sings and") != tokenizer.encode(" sings and")


def test_transformers_suppresses_them_too(cli: Cli, text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained(cli, text, "--steps", 1)
    folder = tmp_path / "run" / "best"
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("the", return_tensors="pt").input_ids
    torch.manual_seed(1)
    written = model.generate(ids, max_new_tokens=60, do_sample=True)[0, ids.shape[1] :]
    assert not set(written.tolist()) & nanolm.load(tmp_path / "run").tokenizer.unseen
