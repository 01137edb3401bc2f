import json
import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import Cli, Terminal
from models import small_vocabulary

import nanolm


@pytest.fixture
def made(cli: Cli, tmp_path: Path) -> Path:
    shown = cli("tokenizer", "train", "embedded:tiny", "--vocab-size", 300, "--out", "made")
    assert shown.returncode == 0, shown.stderr
    return tmp_path / "made"


def test_train(cli: Cli, made: Path) -> None:
    assert nanolm.load_tokenizer(made).vocab_size == 300
    again = cli("tokenizer", "train", "embedded:tiny", "--out", "made")
    assert (again.returncode, "already exists" in again.stderr) == (3, True)
    shown = cli(
        "tokenizer", "train", "embedded:tiny", "--out", "c", "--tokenizer", "char", "--json"
    )
    result = json.loads(shown.stdout)
    assert (result["kind"], result["tokenizer"]) == ("char", "c/tokenizer.json")
    assert result["bytes"] > 4000
    refused = cli("tokenizer", "train", "embedded:tiny", "--out", "d", "--tokenizer", "gpt2")
    assert (refused.returncode, "already trained" in refused.stderr) == (2, True)


def test_automatic_choices_are_reported(cli: Cli) -> None:
    shown = cli("tokenizer", "train", "embedded:tiny", "--out", "made")
    assert re.search(r"vocabulary: .*50 kB", shown.stderr)


def test_encode_and_decode(cli: Cli, made: Path) -> None:
    text = "the cat → sleeps\n"
    for arguments, stdin in [((text,), ""), ((), text), (("--file", "t.txt"), "")]:
        (made.parent / "t.txt").write_text(text)
        coded = cli("tokenizer", "encode", "--tokenizer", made, *arguments, stdin=stdin)
        assert coded.returncode == 0, coded.stderr
        ids = [int(id) for id in coded.stdout.split()]
        assert ids == nanolm.load_tokenizer(made).encode(text)
        assert cli("tokenizer", "decode", "--tokenizer", made, *ids).stdout == text
        assert cli("tokenizer", "decode", "--tokenizer", made, stdin=coded.stdout).stdout == text
    coded = cli("tokenizer", "encode", "--tokenizer", made, "--json", "the é")
    row = json.loads(coded.stdout)
    assert row["tokens"][-2:] == ["\\xc3", "\\xa9"]
    assert len(row["ids"]) == len(row["tokens"])
    back = cli("tokenizer", "decode", "--tokenizer", made, "--json", stdin=coded.stdout)
    assert json.loads(back.stdout) == {"text": "the é", "ids": row["ids"]}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["decode", "--tokenizer", "made", "999"], 2, "id 999: must be from 0 to 299"),
        (["decode", "--tokenizer", "made", "cat"], 2, "decode 15496 995"),
        (["encode", "--tokenizer", "none", "a"], 2, "--tokenizer none: "),
        (["encode", "--tokenizer", "bpe", "a"], 2, "--tokenizer bpe is not trained yet"),
        (["encode", "--tokenizer", "made", "--file", "none"], 2, "none does not exist"),
        (["encode", "--tokenizer", "made", "--file", "a", "text"], 2, "not both"),
        (["train", "x.txt"], 2, "Missing option '--out'"),
        (["compare", "embedded:tiny", "--tokenizer", "bpe:3"], 2, "bpe:SIZE"),
        (["compare", "embedded:tiny", "--encoding", "utf-9"], 2, "--encoding utf-9"),
        (["show", "--tokenizer", "made/tokenizer.txt", "a"], 2, "--tokenizer made/tokenizer.txt: "),
        (["shwo"], 2, "did you mean show?"),
        (["encode", "--tokenizer", "made", "a\udcff"], 3, "lone surrogate"),
    ],
)
def test_mistakes(arguments: list[str], code: int, message: str, cli: Cli, made: Path) -> None:
    shown = cli("tokenizer", *arguments)
    assert shown.returncode == code, shown.stderr
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_show(cli: Cli, terminal: Terminal, made: Path) -> None:
    shown = cli("tokenizer", "show", "--tokenizer", made, "the cat\n")
    rows = [line.split("\t") for line in shown.stdout.splitlines()]
    assert "".join(json.loads(token) for _, token in rows) == "the cat\n"
    words = ("tokenizer", "show", "--tokenizer", made, "the cat \x1b[31m sleeps 日本 " * 5)
    for width in (24, 100):
        seen = terminal(*words, COLUMNS=str(width))
        assert "\x1b[31m" not in seen
        assert "␛" in seen
        assert "\x1b[48;5;24m" in seen


def test_show_as_a_page(cli: Cli, made: Path) -> None:
    shown = cli("tokenizer", "show", "--tokenizer", made, "--html", "page.html", "the <cat>")
    assert shown.stdout == "page.html\n"
    assert "&lt;" in (made.parent / "page.html").read_text()


def test_compare(cli: Cli, made: Path) -> None:
    shown = cli("tokenizer", "compare", "embedded:tiny")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        "tokenizer",
        "byte",
        "char",
        "bpe:512",
        "bpe:4096",
    ]
    shown = cli(
        "tokenizer", "compare", "embedded:tiny", "--tokenizer", made, "--tokenizer", "bpe:300",
        "--json",
    )  # fmt: skip
    mine, same = [json.loads(line) for line in shown.stdout.splitlines()]
    assert mine["bytes_per_token"] == pytest.approx(same["bytes_per_token"], rel=0.02)
    assert mine["bytes"] == same["bytes"]


def test_train_with_an_existing_tokenizer(cli: Cli, made: Path) -> None:
    shown = cli("train", "embedded:tiny", "--tokenizer", made, "--steps", 2, "--out", "run")
    assert shown.returncode == 0, shown.stderr
    run = made.parent / "run"
    assert nanolm.load_tokenizer(run).tokens == nanolm.load_tokenizer(made).tokens
    assert f'tokenizer = "{made}"' in (run / "config.toml").read_text()
    assert os.path.isabs(made)


def test_the_default_is_the_tokenizer_of_the_newest_run(
    cli: Cli, trained: Path, tmp_path: Path
) -> None:
    shown = cli("tokenizer", "show", "Some words.")
    assert shown.returncode == 0, shown.stderr
    assert "2,048 tokens trained on embedded:stories" in shown.stderr
    ids = [line.split("\t")[0] for line in shown.stdout.splitlines()]
    assert cli("tokenizer", "decode", *ids).stdout == "Some words."
    shutil.copytree(trained, tmp_path / "runs/mine", symlinks=True)
    shown = cli("tokenizer", "show", "Some words.")
    assert shown.stderr.startswith("using the tokenizer of runs/mine, the newest run")
    assert shown.stderr.count("\n") == 1
    expected = nanolm.load_tokenizer(trained).encode("Some words.")
    assert [int(line.split("\t")[0]) for line in shown.stdout.splitlines()] == expected


def test_special_tokens_are_recognized_on_request(cli: Cli, made: Path) -> None:
    end = nanolm.load_tokenizer(made).end_of_text
    for flags, count in (((), 0), (("--special-tokens",), 2)):
        text = "<|endoftext|>the cat<|endoftext|>"
        shown = cli("tokenizer", "encode", "--tokenizer", made, "--json", *flags, text)
        assert json.loads(shown.stdout)["ids"].count(end) == count


def test_characters_without_a_token_are_reported(cli: Cli, tmp_path: Path) -> None:
    few = small_vocabulary(tmp_path / "few", 9)
    note = "2 of 104 characters have no token in this tokenizer and are dropped, for example '日'"
    (tmp_path / "text.txt").write_text("w1 w2 w3 " * 11 + "w4 日日", encoding="utf-8")
    (tmp_path / "plain.txt").write_text("w1 w2 w3 " * 11, encoding="utf-8")
    commands = [
        ["tokenizer", "encode", "--tokenizer", few, "--file"],
        ["tokenizer", "show", "--tokenizer", few, "--file"],
        ["eval", few],
        ["train", "--from", few, "--steps", 2, "--val-fraction", 0, "--out", "one"],
        ["train", "--from", few, "--steps", 2, "--val-fraction", 0, "--out", "two"],
    ]
    for command in commands:
        shown = cli(*command, "text.txt")
        assert (shown.returncode, shown.stderr.count(note)) == (0, 1), shown.stderr
    for command in commands[:3]:
        assert "no token" not in cli(*command, "plain.txt").stderr
