"""`nanolm translate`: where texts come from, what is printed, and when."""

import gzip
import json
import os
import select
import subprocess
from pathlib import Path

import pytest
from conftest import Cli, Terminal, program
from models import copyist

import nanolm
from nanolm.model.huggingface import save_seq2seq
from nanolm.pairs.translator import Translator

TEXTS = ["abc", "", "gfedcba", "a strange 日本 text 👍", "h"]


def saved(folder: Path, translator: Translator) -> Path:
    save_seq2seq(translator.model, folder, translator.tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("copyist"), copyist("encoder-decoder", norm_place="post"))


def expected(model: Path, **options: int) -> list[str]:
    return [each.text for each in nanolm.load(model).translate(TEXTS, **options)]


def test_arguments_files_and_stdin_give_the_same(cli: Cli, model: Path, tmp_path: Path) -> None:
    lines = "".join(f"{text}\n" for text in TEXTS)
    (tmp_path / "plain.txt").write_text(lines.removesuffix("\n"))
    with gzip.open(tmp_path / "packed.txt.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    shown = cli("translate", model, *TEXTS)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split("\n") == [*expected(model), ""]
    for other in (
        cli("translate", model, "--file", "plain.txt"),
        cli("translate", model, "--file", "packed.txt.gz"),
        cli("translate", model, stdin=lines),
    ):
        assert (other.returncode, other.stdout) == (0, shown.stdout)


def test_json(cli: Cli, model: Path) -> None:
    shown = cli("translate", model, *TEXTS, "--json", "--max-tokens", 3, "--beams", 2)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["source"] for line in lines] == TEXTS
    assert [line["translation"] for line in lines] == expected(model, max_tokens=3, beams=2)
    assert all(set(line) == {"source", "translation", "score", "notes"} for line in lines)
    assert lines[0]["score"] < 0 == lines[1]["score"]
    (note,) = lines[2]["notes"]
    assert f"text 3: {note}" in shown.stderr
    (line,) = cli("translate", model, "ab", "--json", "--show", "attention").stdout.splitlines()
    (attention,) = json.loads(line)["attention"]
    assert attention["source"] == ["a", "b", "<|endoftext|>"]
    assert len(attention["weights"]) == len(attention["target"])
    assert sum(attention["weights"][0]) == pytest.approx(1, abs=1e-3)


def test_ways_to_search(cli: Cli, model: Path) -> None:
    def shown(*options: object) -> list[str]:
        run = cli("translate", model, *TEXTS, *options)
        assert run.returncode == 0, run.stderr
        return run.stdout.split("\n")[:-1]

    assert shown("--greedy", "--batch", 1) == expected(model, beams=1)
    assert shown("--length-penalty", 3) == expected(model, length_penalty=3)
    assert shown("--temperature", 1.5, "--seed", 4) == shown("--temperature", 1.5, "--seed", 4)
    first = cli("translate", model, *TEXTS, "--top-p", 0.9, "--top-k", 20)
    seed = first.stderr.split("seed ")[1].split()[0]
    again = cli("translate", model, *TEXTS, "--top-p", 0.9, "--top-k", 20, "--seed", seed)
    assert again.stdout == first.stdout


def test_what_is_refused(cli: Cli, model: Path, trained: Path) -> None:
    for options, code, message in (
        (["a", "--file", "x"], 2, "not both"),
        (["a", "--greedy", "--temperature", 1], 2, "only one of --temperature and --greedy"),
        (["a", "--greedy", "--top-k", 5, "--beams", 3], 2, "--top-k, --greedy and --beams"),
        (["a", "--beams", 3, "--top-k", 5], 2, "only one of --top-k and --beams"),
        (["a", "--beams", 0], 2, "--beams 0"),
        (["a", "--max-tokens", 0], 2, "--max-tokens 0"),
        (["a", "--show", "probs"], 2, "--show probs: choose from attention"),
        (["--file", "missing.txt"], 2, "missing.txt does not exist"),
    ):
        shown = cli("translate", model, *options)
        assert (shown.returncode, message in shown.stderr) == (code, True), shown.stderr
    assert cli("translate", "nowhere", "a").returncode == 2
    shown = cli("translate", trained, "a")  # a language model
    assert shown.returncode == 4, shown.stderr
    assert "Traceback" not in shown.stderr


def test_invalid_bytes_become_a_replacement_character(model: Path) -> None:
    for rest in ([b"a\xff"], []):
        shown = subprocess.run(
            [*program("translate", model), *rest], input=b"a\xff\n", capture_output=True
        )
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.count(b"\n") == 1


def test_a_pipe_is_answered_line_by_line(model: Path) -> None:
    with subprocess.Popen(
        program("translate", model, "--greedy"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        for text in ("abc", "", "fed"):
            process.stdin.write(f"{text}\n".encode())
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60)[0]  # though stdin stays open
            assert os.read(process.stdout.fileno(), 1000).endswith(b"\n")
        process.stdin.close()
        assert process.wait() == 0


def test_a_closed_pipe_ends_quietly(model: Path, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("abcdefgh\n" * 3000)
    command = subprocess.list2cmdline(
        program("translate", model, "--greedy", "--file", tmp_path / "many.txt")
    )
    shown = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        encoding="utf-8",
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.count("\n") == 1


def test_attention_fits_the_terminal(cli: Cli, terminal: Terminal, model: Path) -> None:
    wide = cli("translate", model, "abcdefgh", "--show", "attention").stdout.splitlines()
    attention = nanolm.load(model).alignment("abcdefgh", wide[0])
    assert wide[1].split() == [*"abcdefgh", "<|endoftext…"]
    assert len(wide) == len(attention.target_tokens) + 3  # with the text, a header, a blank line
    asked = ("translate", model, "abcdefgh", "--show", "attention")
    narrow = terminal(*asked, COLUMNS="24", NO_COLOR="1").splitlines()
    assert max(map(len, narrow)) <= 24
    headers = [line for line in narrow if line.startswith("    ") and set("abcdefgh") & set(line)]
    assert "".join(headers).split() == [*"abcdefgh", "<|end…"]


def test_each_part_of_a_long_text_has_its_own_attention(cli: Cli, model: Path) -> None:
    text = "abc de. fgh. " * 12
    asked = ("translate", model, text, "--greedy", "--max-tokens", 5, "--show", "attention")
    translator = nanolm.load(model)
    parts = translator.translate(text, beams=1, max_tokens=5).parts
    assert len(parts) == 3
    found = json.loads(cli(*asked, "--json").stdout)["attention"]
    for each, part in zip(found, parts, strict=True):
        expected = translator.alignment(*part)
        assert (each["source"], each["target"]) == (expected.source_tokens, expected.target_tokens)
    assert cli(*asked).stdout.count("\n\n") == 3  # a table for each


def test_a_model_without_attention_says_so(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "bottleneck"
    folder.mkdir()
    saved(folder, copyist("seq2seq-lstm", attention="none"))
    shown = cli("translate", folder, "abc", "fed", "--show", "attention")
    assert shown.returncode == 0
    assert shown.stdout.count("\n") == 2
    assert shown.stderr.count("no attention") == 1
