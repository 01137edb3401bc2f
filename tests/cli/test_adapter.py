"""`--adapter` of the commands that load a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

import nanolm
from nanolm.model import peft


@pytest.fixture
def adapted(trained: Path, tmp_path: Path) -> Path:
    how: dict[str, Any] = {"train": "lora", "batch": 4, "lr": 1e-2, "threads": 1, "device": "cpu"}
    nanolm.train("embedded:tiny", start_from=trained, out=tmp_path / "lora", steps=20, **how)
    return tmp_path / "lora"


def test_a_base_and_its_adapter_are_the_run(
    cli: Cli, trained: Path, adapted: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 20)
    together = (trained, "--adapter", adapted / "best/adapter")

    def most_likely(*words: object) -> float:
        """The probability of the next token."""
        asked = ("--prompt", "The", "--tokens", 1, "--show", "top=1", "--json")
        return float(json.loads(cli("sample", *words, *asked).stdout)["top"][0][0]["probability"])

    assert most_likely(adapted) == pytest.approx(most_likely(*together), abs=1e-5)
    assert most_likely(adapted) != pytest.approx(most_likely(trained), abs=1e-3)
    first = cli("eval", trained, "text.txt").stdout
    assert cli("eval", *together, "text.txt").stdout == cli("eval", adapted, "text.txt").stdout
    assert first != cli("eval", adapted, "text.txt").stdout
    found = json.loads(cli("info", *together, "--json").stdout)["adapter"]
    assert (found["r"], found["lora_alpha"]) == (8, 16)
    partial = json.loads(cli("info", adapted / "last", "--json").stdout)
    assert partial["readers"] == ["nanolm", "peft (adapter)"]
    assert partial["numbers"] == "a LoRA adapter"


def test_problems_in_one_line(cli: Cli, trained: Path, adapted: Path, tmp_path: Path) -> None:
    shown = cli("sample", "--adapter", adapted, "--prompt", "a")
    assert shown.returncode == 2 and "name RUN" in shown.stderr
    shown = cli("sample", trained, "--adapter", "nowhere", "--prompt", "a")
    assert shown.returncode == 2 and peft.CONFIG in shown.stderr
    shown = cli("classify", trained, "--adapter", adapted, "a text")
    assert shown.returncode == 4 and "not an adapter of a classifier" in shown.stderr
    shown = cli("serve", trained, trained, "--adapter", adapted)
    assert shown.returncode == 2 and "serve one RUN" in shown.stderr
