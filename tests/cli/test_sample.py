import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Cli, on_a_terminal, program

import nanolm


def test_json(cli: Cli, trained: Path) -> None:
    shown = cli(
        "sample", trained, "--prompt", "the cat", "-n", 2, "--tokens", 5, "--json", "--greedy"
    )
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert set(line) == {
            "prompt",
            "text",
            "tokens",
            "logprobs",
            "stopped",
            "tokens_per_second",
        }
        assert line["prompt"] == "the cat"
        assert len(line["tokens"]) == len(line["logprobs"]) == 5
        assert nanolm.load_tokenizer(trained).decode(line["tokens"]) == line["text"]
        assert line["stopped"] == "length"


def test_text_is_the_prompt_and_what_follows(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, "--prompt", "the cat", "--greedy", "--tokens", 6)
    expected = nanolm.load(trained).generate("the cat", greedy=True, tokens=6)
    assert shown.stdout == f"the cat{expected}\n"
    again = cli("sample", trained, "--greedy", "--tokens", 6, stdin="the cat\n")
    assert again.stdout == shown.stdout


def test_a_seed_repeats_and_is_told_when_chosen(cli: Cli, trained: Path) -> None:
    first = cli("sample", trained, "--tokens", 20)
    seed = first.stderr.split("seed ")[1].split()[0]
    assert cli("sample", trained, "--tokens", 20, "--seed", seed).stdout == first.stdout


def test_characters_never_seen(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, "--prompt", "Ünsëen 日本 👍\x1b", "--tokens", 3)
    assert shown.returncode == 0
    assert shown.stdout.startswith("Ünsëen 日本 👍\x1b")  # a pipe gets the text as it is


def test_bytes_that_are_no_text(trained: Path) -> None:
    shown = subprocess.run(
        [*program("sample", trained, "--prompt"), b"\xff"], capture_output=True, check=False
    )
    assert shown.returncode == 3
    assert b"not valid Unicode" in shown.stderr


def test_a_closed_pipe_ends_quietly(trained: Path) -> None:
    command = subprocess.list2cmdline(program("sample", trained, "--tokens", 3000))
    shown = subprocess.run(
        ["bash", "-c", f"{command} </dev/null | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        encoding="utf-8",
    )
    assert shown.returncode == 0, shown.stderr
    assert "Traceback" not in shown.stderr
    assert "Broken" not in shown.stderr
    assert shown.stdout.count("\n") == 1


def test_stdin_that_is_no_text(trained: Path) -> None:
    shown = subprocess.run(program("sample", trained), input=b"a\xff", capture_output=True)
    assert shown.returncode == 3
    assert b"stdin is not UTF-8: byte at offset 1" in shown.stderr


def test_the_newest_run_that_can_be_used(cli: Cli, trained: Path, tmp_path: Path) -> None:
    for name in ("good", "broken"):
        run = shutil.copytree(trained, tmp_path / "runs" / name, symlinks=True)
        for folder in (run / "checkpoints").iterdir():
            os.utime(folder, (1000 if name == "good" else 2000,) * 2)
    for file in (tmp_path / "runs/broken/checkpoints").glob("*/model.safetensors"):
        file.write_bytes(b"rot")
    shown = cli("sample", "--tokens", 3)
    assert shown.returncode == 0
    assert "runs/broken holds no model" in shown.stderr
    assert "using runs/good" in shown.stderr


def test_the_newest_run_is_found_and_named(cli: Cli, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").symlink_to(trained)
    shown = cli("sample", "--tokens", 3)
    assert shown.returncode == 0
    assert "using runs/x, the newest run" in shown.stderr


@pytest.mark.parametrize("prompt", ["a\x1b[31mred", "\x07\x9b0m", "plain"])
def test_no_escape_code_reaches_a_terminal(prompt: str, trained: Path) -> None:
    command = program("sample", trained, "--prompt", prompt, "--tokens", 3, "--greedy")
    text = on_a_terminal(command, "stdout", trained)
    for own in ("\x1b[1m", "\x1b[0m"):  # the prompt in bold is ours
        text = text.replace(own, "")
    assert not set(text) & {chr(code) for code in [*range(32), *range(127, 160)]} - set("\r\n\t")
