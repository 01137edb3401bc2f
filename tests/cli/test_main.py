"""The program from outside: help, errors, exit codes."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import click
import pytest
from conftest import Cli, program

import nanolm
from nanolm.cli import main
from nanolm.formats import printable
from nanolm.training.interrupt import StopRequest


def test_help_is_fast() -> None:
    def taken(*command: str) -> float:
        """CPU time, which does not depend on other processes."""
        before = os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        user = after.children_user - before.children_user
        return user + after.children_system - before.children_system

    pairs = [
        (taken(*program("--help")), taken(sys.executable, "-c", "import click")) for _ in range(5)
    ]
    ours, least = map(statistics.median, zip(*pairs, strict=True))
    assert ours < max(0.3, 5 * least), pairs  # or relative to importing click, on a slow machine


HELP = """
import contextlib, io, json, sys
from nanolm.cli.main import VERBS, cli
shown = {}
for verb in ["", *VERBS]:
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        cli.main([*verb.split(), "-h"], "nanolm")
    shown[verb] = text.getvalue(), sorted({"torch", "numpy", "rich"} & {*sys.modules})
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def helped() -> dict[str, tuple[str, list[str]]]:
    """The help of each command in turn, and which large packages were imported by then."""
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, encoding="utf-8")
    assert shown.returncode == 0, shown.stderr
    found: dict[str, tuple[str, list[str]]] = json.loads(shown.stdout)
    return found


@pytest.mark.parametrize("verb", ["", *main.VERBS])
def test_help_needs_no_torch(verb: str, helped: dict[str, tuple[str, list[str]]]) -> None:
    text, imported = helped[verb]
    assert not imported
    assert "Usage: nanolm" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_version(cli: Cli) -> None:
    assert cli("--version").stdout == f"nanolm, version {nanolm.__version__}\n"


ERRORS = {
    "a command misspelt": (["trian"], 2, "'trian'; did you mean train?"),
    "an unknown option": (["train", "x.txt", "--stepz", "3"], 2, "--steps"),
    "one of many options": (["train", "x.txt", "--drpout", "0"], 2, "--dropout"),
    "an option with a long help": (["train", "x.txt", "--x"], 2, "see `nanolm train --help-all`"),
    "not a number": (["train", "x.txt", "--steps", "many"], 2, "--steps"),
    "no corpus": (["train"], 2, "nanolm train embedded:stories"),
    "no such file": (["train", "none.txt"], 2, "none.txt does not exist"),
    "a misspelt preset": (["train", "x.txt", "--preset", "nanno"], 2, "did you mean nano?"),
    "an unknown encoding": (["train-pairs", "x.tsv", "--encoding", "no"], 2, "--encoding no: unk"),
    "the same, of pairs to compare": (
        ["compare", "embedded:dates", "--encoding", "utf8-8"],
        2,
        "--encoding utf8-8: unknown encoding; did you mean utf-8?",
    ),
    "a misspelt tokenizer": (["train", "x.txt", "--tokenizer", "chr"], 2, "did you mean char?"),
    "an empty file": (["train", "empty.txt"], 3, "empty.txt"),
    "not UTF-8": (["train", "latin.txt"], 3, "byte 0xe9 at offset 3"),
    "a folder without text": (["train", "nothing"], 3, "nothing"),
    "no config": (["train", "x.txt", "--config", "no.toml"], 2, "no.toml does not exist"),
    "a broken config": (["train", "x.txt", "--config", "empty.txt"], 2, None),
    "no run": (["sample", "runs/none"], 2, "runs/none does not exist"),
    "no runs at all": (["sample"], 4, "train one first: nanolm train CORPUS"),
    "no model there": (["sample", "."], 4, "model"),
    "a value out of range": (["sample", "--top-p", "7"], 2, "--top-p 7.0: must be above 0"),
    "no samples": (["sample", "-n", "0"], 2, "-n 0"),
    "no device": (["sample", "--device", "tpu"], 2, "auto, cpu, cuda, mps"),
    "no folder": (["train", "latin-1.txt", "--out", "empty.txt/x"], 3, "empty.txt/x"),
}


@pytest.mark.parametrize(("arguments", "code", "message"), ERRORS.values(), ids=ERRORS)
def test_a_mistake_gets_one_clear_message(
    arguments: list[str], code: int, message: str | None, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "latin-1.txt").write_text("lorem ipsum dolor sit amet. " * 9)
    shown = cli(*arguments)
    if message is None:  # an empty file is valid TOML, so the next mistake is reported
        message = "x.txt does not exist"
    assert (shown.returncode, shown.stdout) == (code, "")
    assert message in shown.stderr
    assert shown.stderr.startswith("error: ")
    assert "Traceback" not in shown.stderr


def test_all_mistakes_at_once(cli: Cli) -> None:
    shown = cli("train", "x.txt", "--steps", "0", "--preset", "huge", "--val-fraction", "2")
    assert shown.returncode == 2
    for option in ("--steps", "--preset", "--val-fraction"):
        assert option in shown.stderr
    shown = cli("sample", "-n", 0, "--top-p", 2, "--temperature", -1, "--device", "tpu")
    for option in ("-n", "--top-p", "--temperature", "--device"):
        assert option in shown.stderr


TRAIN = "train embedded:tiny --steps 1 --evaluations 1 --layers 1 --heads 2 --dim 12 --batch 2"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
@pytest.mark.parametrize("verb", ["--help", TRAIN])
def test_closed_streams(closed: str, verb: str, tmp_path: Path) -> None:
    command = f"{subprocess.list2cmdline(program())} {verb} {closed}"
    shown = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True)
    assert (shown.returncode, shown.stderr) == (0, shown.stderr)
    assert b"Traceback" not in shown.stderr


def test_a_bug_is_reported_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**rest: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(main.cli, "main", broken)
    assert main.run() == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert "this is a bug" in shown
    monkeypatch.setattr(StopRequest, "missed", True)  # unless it comes from Ctrl-C
    assert main.run() == 130
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (OSError(28, "full"), 7),
        (OSError(13, "forbidden"), 3),
        (MemoryError(), 6),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 6),
    ],
)
def test_exit_codes_of_other_errors(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**rest: object) -> None:
        raise error

    monkeypatch.setattr(main.cli, "main", broken)
    assert main.run() == code


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("train", "--batch, --context, --dim or --preset"),
        ("train-pairs", "--batch, --context or --dim"),
        ("translate", "--batch or --beams"),
    ],
)
def test_out_of_memory_names_options_of_the_command(
    verb: str, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**rest: object) -> None:
        raise MemoryError

    command = main.cli.get_command(click.Context(main.cli), verb)
    monkeypatch.setattr(command, "callback", broken)
    monkeypatch.setattr(sys, "argv", ["nanolm", verb, "x"])
    assert main.run() == 6
    assert capsys.readouterr().err == f"error: out of memory; try a smaller {options}\n"


def test_control_characters_are_escaped() -> None:
    everything = "".join(map(chr, range(0x200)))
    shown = printable(everything)
    assert [char for char in shown if not char.isprintable() and char not in "\n\t\xa0\xad"] == []
    assert printable("a\x1b[31mb\n\tc") == "a␛[31mb\n\tc"
