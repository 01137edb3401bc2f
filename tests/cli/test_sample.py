import csv
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Commands
from conftest import Cli, Terminal, program
from models import small_vocabulary

import nanolm

NOT_UNICODE = "\udcff"  # the byte 0xff, in arguments as Python gives them


def test_json(cli: Cli, trained: Path) -> None:
    shown = cli(
        "sample", trained, "--prompt", "the cat", "-n", 2, "--tokens", 5, "--json", "--greedy"
    )
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert set(line) == {"prompt", "text", "tokens", "logprobs", "stopped", "tokens_per_second"}
        assert line["prompt"] == "the cat"
        assert len(line["tokens"]) == len(line["logprobs"]) == 5
        assert nanolm.load_tokenizer(trained).decode(line["tokens"]) == line["text"]
        assert line["stopped"] == "length"


def test_special_tokens_in_a_prompt(cli: Cli, trained: Path) -> None:
    prompt, asked = "<|endoftext|>the", ("--greedy", "--tokens", 8, "--json")
    model = nanolm.load(trained)
    logprobs = []
    for flags in ((), ("--special-tokens",)):
        model.tokenizer.parse_special = bool(flags)
        ids = model.tokenizer.encode_prompt(prompt)
        assert (ids[0] == model.tokenizer.end_of_text) == bool(flags)
        shown = cli("sample", trained, "--prompt", prompt, *flags, *asked)
        line = json.loads(shown.stdout)
        logprobs.append(line["logprobs"])
        assert line["text"] == model.generate(prompt, greedy=True, tokens=8)
    assert logprobs[0] != logprobs[1]


def test_text_is_the_prompt_and_its_completion(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, "--prompt", "the cat", "--greedy", "--tokens", 6)
    expected = nanolm.load(trained).generate("the cat", greedy=True, tokens=6)
    assert shown.stdout == f"the cat{expected}\n"
    again = cli("sample", trained, "--greedy", "--tokens", 6, stdin="the cat\n")
    assert again.stdout == shown.stdout


def test_a_random_seed_is_reported_and_repeats(cli: Cli, trained: Path) -> None:
    first = cli("sample", trained, "--tokens", 20)
    seed = first.stderr.split("seed ")[1].split()[0]
    assert cli("sample", trained, "--tokens", 20, "--seed", seed).stdout == first.stdout


def test_unseen_characters(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, "--prompt", "Ünsëen 日本 👍\x1b", "--tokens", 3)
    assert shown.returncode == 0
    assert shown.stdout.startswith("Ünsëen 日本 👍\x1b")  # unchanged in a pipe


def test_a_prompt_that_is_not_unicode(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, "--prompt", NOT_UNICODE)
    assert shown.returncode == 3
    assert "not valid Unicode" in shown.stderr


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


def test_stdin_that_is_not_text(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, stdin=b"a\xff")
    assert shown.returncode == 3
    assert "stdin is not UTF-8" in shown.stderr and "offset 1" in shown.stderr


def test_the_newest_usable_run(cli: Cli, trained: Path, tmp_path: Path) -> None:
    for name in ("good", "broken"):
        run = shutil.copytree(trained, tmp_path / "runs" / name, symlinks=True)
        for folder in (run / "checkpoints").iterdir():
            os.utime(folder, (1000 if name == "good" else 2000,) * 2)
    for file in (tmp_path / "runs/broken/checkpoints").glob("*/model.safetensors"):
        file.write_bytes(b"rot")
    shown = cli("sample", "--tokens", 3)
    assert shown.returncode == 0
    assert "runs/broken" in shown.stderr
    assert "using runs/good" in shown.stderr


def test_the_newest_run_is_found_and_named(cli: Cli, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").symlink_to(trained)
    shown = cli("sample", "--tokens", 3)
    assert shown.returncode == 0
    assert "using runs/x, the newest run" in shown.stderr


@pytest.mark.parametrize("prompt", ["a\x1b[31mred", "\x07\x9b0m", "plain"])
def test_no_escape_code_reaches_a_terminal(prompt: str, trained: Path, terminal: Terminal) -> None:
    text = terminal("sample", trained, "--prompt", prompt, "--tokens", 3, "--greedy")
    for own in ("\x1b[1m", "\x1b[0m"):  # the prompt in bold is ours
        text = text.replace(own, "")
    assert not set(text) & {chr(code) for code in [*range(32), *range(127, 160)]} - set("\r\n\t")


def test_prompts_from_options_files_and_stdin(cli: Cli, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("the cat\na dog\n")
    writer = nanolm.load(trained)

    def expected(*prompts: str) -> list[tuple[str, str]]:
        return [(prompt, writer.generate(prompt, greedy=True, tokens=4)) for prompt in prompts]

    def found(*arguments: object, stdin: str = "") -> list[tuple[str, str]]:
        shown = cli("sample", trained, "--greedy", "--tokens", 4, "--json", *arguments, stdin=stdin)
        assert shown.returncode == 0, shown.stderr
        lines = [json.loads(line) for line in shown.stdout.splitlines()]
        return [(line["prompt"], line["text"]) for line in lines]

    both = ["--prompt", "a", "--prompt", "the small"]
    assert found(*both) == expected("a", "the small")
    assert found("--prompt-file", "two.txt") == expected("the cat\na dog")
    assert found("--prompt-file", "two.txt", "--each-line") == expected("the cat", "a dog")
    assert found("--each-line", stdin="the cat\na dog\n") == expected("the cat", "a dog")
    assert found("--prompt", "a", "--prompt-file", "two.txt") == expected("a", "the cat\na dog")
    assert found() == expected("")


def test_several_prompts(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, "--prompt", "a", "--prompt", "the", "--greedy", "--tokens", 3)
    writer = nanolm.load(trained)
    texts = [prompt + writer.generate(prompt, greedy=True, tokens=3) for prompt in ("a", "the")]
    assert shown.stdout == f"{texts[0]}\n---\n{texts[1]}\n"


def test_a_truncated_prompt_is_reported(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, "--prompt", "cat " * 40, "--tokens", 3)
    assert re.search(r"prompt truncated.* 16 tokens.* first \d+", shown.stderr)
    assert "truncated" not in cli("sample", trained, "--prompt", "cat", "--tokens", 50).stderr


def test_top_tokens_as_json_table_csv_and_page(cli: Cli, trained: Path, tmp_path: Path) -> None:
    words = ["sample", trained, "--prompt", "the cat", "--seed", 4, "--tokens", 9]
    shown = cli(*words, "--show", "top=6", "--json", "--csv", "top.csv", "--html", "top.html")
    assert shown.returncode == 0, shown.stderr
    line = json.loads(shown.stdout)
    assert len(line["top"]) == len(line["tokens"]) == 9
    for id, logprob, place in zip(line["tokens"], line["logprobs"], line["top"], strict=True):
        assert [set(each) for each in place] == [{"token", "id", "probability"}] * 6
        chances = [each["probability"] for each in place]
        assert chances == sorted(chances, reverse=True)
        assert 0 < sum(chances) <= 1.0001
        same = [each["probability"] for each in place if each["id"] == id]
        assert not same or same[0] == pytest.approx(math.exp(logprob), abs=1e-5)

    with (tmp_path / "top.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["id"]) for row in rows] == line["tokens"]
    assert [int(row["position"]) for row in rows] == list(range(1, 10))
    for row, place in zip(rows, line["top"], strict=True):
        for number, each in enumerate(place, start=1):
            assert row[f"token_{number}"] == each["token"]
            assert float(row[f"probability_{number}"]) == pytest.approx(
                each["probability"], abs=1e-6
            )

    page = (tmp_path / "top.html").read_text()
    assert page.count("<tr>") == 10
    assert "default-src 'none'" in page

    table = cli(*words, "--show", "top=6").stdout.splitlines()
    assert len(table) == 9
    for text, place in zip(table, line["top"], strict=True):
        for each in place:
            assert each["token"].replace(" ", "·").replace("\n", "⏎") in text
    listed = cli(*words, "--show", "probs").stdout.splitlines()
    assert [json.loads(row.split("\t")[1]) for row in listed] == [row["token"] for row in rows]
    chances = [float(row.split("\t")[0]) for row in listed]
    assert chances == pytest.approx([math.exp(each) for each in line["logprobs"]], abs=1e-6)


def test_words_as_json_table_csv_and_page(cli: Cli, trained: Path, tmp_path: Path) -> None:
    words = ["sample", trained, "--prompt", "the cat", "--seed", 4, "--tokens", 9]
    shown = cli(*words, "--show", "words=6", "--json", "--csv", "w.csv", "--html", "w.html")
    assert shown.returncode == 0, shown.stderr
    line = json.loads(shown.stdout)
    assert [id for word in line["words"] for id in word["tokens"]] == line["tokens"]
    assert "".join(word["word"] for word in line["words"]) == line["text"]
    for word in line["words"]:
        chances = [each["probability"] for each in word["top"]]
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == 6
        assert sum(chances) <= 1.0001
    with (tmp_path / "w.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["word"] for row in rows] == [word["word"] for word in line["words"]]
    assert [row["word_6"] for row in rows] == [word["top"][5]["word"] for word in line["words"]]
    page = (tmp_path / "w.html").read_text()
    assert page.count("<tr>") == len(rows) + 1
    table = cli(*words, "--show", "words=6").stdout.splitlines()
    assert len(table) == len(rows)
    assert all(row["word"].strip() in text for row, text in zip(rows, table, strict=True))
    listed = cli(*words, "--show", "words").stdout.splitlines()
    assert [json.loads(row.split("\t")[1]) for row in listed] == [row["word"] for row in rows]


@pytest.mark.parametrize("columns", [30, 80])
@pytest.mark.parametrize("show", ["probs", "top=6", "words", "words=6"])
def test_output_fits_the_terminal(
    show: str, columns: int, trained: Path, terminal: Terminal
) -> None:
    words = ("sample", trained, "--prompt", "the", "--tokens", 12, "--seed", 1, "--show", show)
    text = terminal(*words, COLUMNS=str(columns))
    assert "\x1b[48;5;" in text
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r", "").splitlines():
        assert len(line.rstrip()) <= columns


def test_hostile_tokens_are_harmless(tmp_path: Path, cli: Cli, terminal: Terminal) -> None:
    text = "<script>alert(1)</script>\x1b[31m&amp;\x07" * 30
    (tmp_path / "evil.txt").write_text(text)
    shape: dict[str, Any] = {"layers": 1, "heads": 1, "dim": 8, "context": 16, "batch": 2}
    nanolm.train(tmp_path / "evil.txt", out=tmp_path / "run", steps=2, tokenizer="char", **shape)
    shown = cli(
        "sample", "run", "--prompt", "<script>\x1b", "--tokens", 60, "--html", "page.html",
        "--show", "top=3", "--csv", "a.csv",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    for show in ("probs", "words=3"):
        words = ("sample", "run", "--prompt", "\x1b]0;x\x07", "--tokens", 60)
        seen = terminal(*words, "--show", show)
        seen = re.sub(r"\x1b\[[0-9;]*m", "", seen)  # our own colors
        assert not set(seen) & {chr(code) for code in [*range(32), *range(127, 160)]} - set("\r\n")


def test_stop_and_ban(cli: Cli, trained: Path) -> None:
    words = ["sample", trained, "--prompt", "the cat", "--seed", 2, "--tokens", 60, "--json"]
    line = json.loads(cli(*words, "--stop", ".", "--stop", "and").stdout)
    assert line["stopped"] == "stop"
    assert "." not in line["text"]
    assert "and" not in line["text"]
    line = json.loads(cli(*words, "--ban", "cat", "--ban", "a d").stdout)
    assert "cat" not in line["text"]
    assert "a d" not in line["text"]


def test_beams(cli: Cli, trained: Path) -> None:
    shown = cli(
        "sample", trained, "--prompt", "the", "--beams", 3, "-n", 3, "--tokens", 6, "--json"
    )
    texts = [json.loads(line)["text"] for line in shown.stdout.splitlines()]
    assert len(set(texts)) == 3
    assert "seed" not in shown.stderr


def test_all_mistakes_are_reported_at_once(cli: Cli, trained: Path) -> None:
    shown = cli(
        "sample", trained, "--top-k", 0, "--show", "all", "-n", 0, "--dtype", "int4",
        "--html", "no/such/folder.html", "--interactive",
    )  # fmt: skip
    assert shown.returncode == 2
    parts = ("--top-k 0", "--show all", "-n 0", "--dtype int4", "--html no/such", "--interactive")
    for part in parts:
        assert part in shown.stderr
    shown = cli("sample", trained, "--beams", 2, "-n", 3)
    assert "-n 3: must be at most --beams 2" in shown.stderr
    shown = cli("sample", trained, "--prompt-file", "nothing.txt")
    assert (shown.returncode, "nothing.txt does not exist" in shown.stderr) == (2, True)


def test_interactive(trained: Path, tmp_path: Path) -> None:
    """Two prompts, the first one again from the history, Ctrl-C, and the end."""
    master, slave = os.openpty()
    command = program("sample", trained, "--interactive", "--tokens", 4, "--greedy")
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "INPUTRC": "/dev/null"},
    )  # fmt: skip
    os.close(slave)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        while text not in seen:
            assert select.select([master], [], [], 30)[0], seen
            seen += os.read(master, 65536).decode()
        seen = seen.partition(text)[2]

    writer = nanolm.load(trained)
    answer = {each: writer.generate(each, greedy=True, tokens=4) for each in ("the cat", "a")}
    flat = {each: text.replace("\n", "\r\n") for each, text in answer.items()}
    wait_for("> ")
    for typed, prompt in ((b"the cat\r", "the cat"), (b"a\r", "a"), (b"\x1b[A\x1b[A\r", "the cat")):
        os.write(master, typed)
        wait_for(flat[prompt])
        wait_for("> ")
    while not select.select([master], [], [], 1)[0]:  # the first signal may come too early
        os.kill(process.pid, signal.SIGINT)
    wait_for("> ")
    os.write(master, b"\x04")
    assert process.wait(timeout=30) == 0
    os.close(master)


def test_int8_weights(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"layers": 1, "heads": 2, "dim": 32, "context": 16, "batch": 4}
    nanolm.train(corpus, out=tmp_path / "run", steps=30, **shape)
    words = ["sample", "run", "--prompt", "The 7 cats", "--greedy", "--tokens", 5]
    assert cli(*words, "--int8").stdout == cli(*words).stdout
    for dtype in ("float32", "bfloat16"):
        shown = cli(*words, "--int4", "--dtype", dtype)
        assert shown.returncode == 0 and shown.stdout.startswith("The 7 cats")
    both = cli(*words, "--int8", "--int4")
    assert both.returncode == 2 and "--int8 and --int4: choose one" in both.stderr
    scored = cli("eval", "run", corpus, "--int4", "--against", "run", "--json")
    quick, exact = map(json.loads, scored.stdout.splitlines())
    assert quick["bits_per_weight"] == 4 and "bits_per_weight" not in exact
    assert 0 < abs(quick["bits_per_byte"] - exact["bits_per_byte"]) < 0.1
    table = cli("eval", "run", corpus, "--int8", "--against", "run", "--stride", 3)
    assert "run, 8-bit" in table.stdout


def test_the_environment_names_options_as_the_command_line(cli: Cli, trained: Path) -> None:
    names = {"NANOLM_SAMPLE_JSON": "1", "NANOLM_SAMPLE_N": "2", "NANOLM_SAMPLE_PROMPT": "cat"}
    shown = cli("sample", trained, "--tokens", 2, environment=names)
    assert [json.loads(line)["prompt"] for line in shown.stdout.splitlines()] == ["cat", "cat"]


def test_line_ends_and_byte_order_marks_are_not_part_of_a_prompt(
    cli: Cli, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfthe cat\r\na dog\r\n")
    words = ["sample", trained, "--prompt-file", "windows.txt", "--each-line", "--json"]
    shown = cli(*words, "--tokens", 2)
    assert [json.loads(line)["prompt"] for line in shown.stdout.splitlines()] == [
        "the cat",
        "a dog",
    ]


def test_ctrl_c_shows_the_text_so_far(commands: Commands, trained: Path, tmp_path: Path) -> None:
    words = ["--json", "--html", "page.html", "--tokens", 1_000_000, "--min-tokens", 1_000_000]
    command = commands.start("sample", trained, "--prompt", "the", *words)
    deadline = time.monotonic() + 60
    while "seed" not in command.stream("stderr"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1)  # some tokens are generated
    command.send(signal.SIGINT)
    assert command.wait() == 130
    line = json.loads(command.stream("stdout"))
    assert line["stopped"] == "interrupt"
    assert len(line["tokens"]) == len(line["logprobs"]) > 0
    assert (tmp_path / "page.html").exists()


def test_invalid_values(cli: Cli, trained: Path) -> None:
    shown = cli("sample", trained, "--prompt", "a", "--ban", NOT_UNICODE)
    assert (shown.returncode, "not valid Unicode" in shown.stderr) == (2, True)
    for words in (
        ["--show", "top=\u00b2"],
        ["--show", "words=0"],
        ["--csv", "a", "--html", "a"],
        ["--each-line"],
    ):
        assert cli("sample", trained, "--prompt", "a", *words).returncode == 2


def test_no_colors_if_not_wanted(trained: Path, terminal: Terminal) -> None:
    words = ("sample", trained, "--prompt", "a", "--tokens", 3, "--show", "probs")
    for names in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in terminal(*words, **names)


@pytest.mark.parametrize("size", [1, 7])
def test_a_vocabulary_smaller_than_top_n(cli: Cli, tmp_path: Path, size: int) -> None:
    folder = small_vocabulary(tmp_path / "few", size)
    (tmp_path / "text.txt").write_text("w1 w2 w3 w1\n" * 5)
    for command in (
        ("sample", folder, "--tokens", 5, "--show", "top=20"),
        ("sample", folder, "--tokens", 5, "--show", "words=20", "--top-k", 50),
        ("sample", folder, "--tokens", 5, "--beams", 8, "--show", "top=20"),
        ("eval", folder, tmp_path / "text.txt"),
        ("inspect", folder, "w1 w2", "--top", 20, "--json"),
    ):
        result = cli(*command)
        assert result.returncode == 0, result.stderr
