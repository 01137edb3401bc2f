"""What README.md and the docs tell people to type exists; the README's commands run."""

import re
import shlex
from pathlib import Path

import click
import pytest
from conftest import TINY_MODEL, Cli

from nanolm.cli.main import VERBS, cli

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
LONG = ("sweep", "compare", "bench")  # commands that run in the slow test


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_commands_options_and_recipes_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    recipes = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)\b(?=`|  |\s+ARGS)", text)) <= recipes
    lines = re.findall(r"nanolm ([a-z-]+) ([^`\n]*)", text)
    for verb, rest in lines:
        if verb in VERBS:
            command = cli.get_command(click.Context(cli), verb)
            assert command
            if isinstance(command, click.Group):  # then the next word is the command
                word, _, others = rest.partition(" ")
                found = command.get_command(click.Context(command), word.strip("`,"))
                assert found or command.invoke_without_command, f"{verb} {word}"
                command, rest = (found, others) if found else (command, rest)
            options = [[*one.opts, *one.secondary_opts] for one in command.params]
            known = {name for names in options for name in names}
            used = set(re.findall(r"(?<!\S)--?[a-z][a-z0-9-]*", rest.split("  ")[0])) - {"--help"}
            assert used <= known, f"nanolm {verb} {rest}"
    if document.name == "README.md":
        assert {verb for verb, _ in lines} >= set(VERBS)


def commands(slow: bool) -> list[list[str]]:
    """Those of the README's code blocks, made small."""
    small = [word for name, value in TINY_MODEL.items() for word in (f"--{name}", str(value))]
    short = {"sweep": ["--minutes", "0.1"], "compare": ["--budget", "0.1", "--only", "bag,lstm"]}
    short |= {"bench": ["--seconds", "0.05"], "train": ["--steps", "2", *small]}
    pairs = ["64" if word == str(TINY_MODEL["batch"]) else word for word in small]
    short |= {"train-pairs": ["--steps", "2", *pairs], "translate": ["--max-tokens", "5"]}
    short |= {"finetune": ["--steps", "2"], "finetune-sentiment": ["--steps", "2"]}
    found = []
    for block in re.findall(r"^```(?:bash|console)$(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^(?:\$ )?nanolm (.*)$", block, re.MULTILINE):
            words = shlex.split(re.sub(r"--(minutes|budget) \d+", "", line), comments=True)
            words += ["--steps", "2"] if "--extend" in words else short.get(words[0], [])
            found += [words] if slow or words[0] not in LONG else []
    return found


def fill(folder: Path) -> None:
    """The files that the README's commands name."""
    text = "the small cat sleeps.\na dog sees the bird and sings.\n" * 40
    names = ["corpus.txt", "shakespeare.txt", "other.txt", "notes/a.txt", "letters/b.md"]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for language in ("de", "en"):
        (folder / f"train.{language}").write_text("".join(f"{language} {n}.\n" for n in range(40)))
    rows = [f"a {word} film {row}\t{word}" for row in range(20) for word in ("good", "bad")]
    (folder / "reviews.tsv").write_text("\n".join(["text\tlabel", *rows]))
    rows = [row.replace("\t", ",") for row in rows]
    (folder / "tweets.csv").write_text("\n".join(["text,mood", *rows]))


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_commands_of_the_readme_run(cli: Cli, tmp_path: Path, slow: bool) -> None:
    fill(tmp_path)
    typed = commands(slow)
    assert {words[0] for words in typed} >= set(VERBS) - {"serve"} - set(() if slow else LONG)
    for words in typed:
        if words[0] == "report" and not (tmp_path / "runs" / "corpus-2").exists():
            small = next(other for other in typed if other[:2] == ["train", "corpus.txt"])
            assert cli(*small, "--out", "runs/corpus-2").returncode == 0
        result = cli(*words)
        assert result.returncode == 0, (words, result.stderr)


def test_the_readme_fits_and_shows_what_it_is_on_the_first_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 220
    assert all(len(line) <= 160 for line in lines if line.startswith("|"))
    screen = "\n".join(lines[:40])
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', screen)
    assert len(pictures) == 4  # terminal and playground, light and dark
    assert sum((CHECKOUT / name).stat().st_size for name in pictures) < 600_000
    for command in ("pip install", "nanolm train corpus.txt", "nanolm sample --prompt"):
        assert command in screen


def test_the_core_can_be_read_in_an_afternoon() -> None:
    core = re.findall(r"\]\((nanolm/[a-z_/]+\.py)\)", README)
    assert {"model/gpt.py", "training/trainer.py"} <= {
        name.removeprefix("nanolm/") for name in core
    }
    assert len(core) == 8
    lines = {name: len((CHECKOUT / name).read_text("utf-8").splitlines()) for name in core}
    assert sum(lines.values()) <= 1_510, lines
    assert lines["nanolm/model/gpt.py"] <= 290 and lines["nanolm/training/trainer.py"] <= 280


def test_every_package_is_described() -> None:
    """What the page names beside packages is checked with its picture (test_architecture.py)."""
    text = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[*`]([a-z]+)[*`/]", text))
    packages = {file.parent.name for file in (CHECKOUT / "nanolm").glob("*/__init__.py")}
    assert named >= packages
