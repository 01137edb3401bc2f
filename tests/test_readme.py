"""What README.md tells people to type exists."""

import re
from pathlib import Path

import click
import pytest

from nanolm.cli.main import VERBS, cli

CHECKOUT = Path(__file__).parents[1]
DOCUMENTS = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]


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


def layout() -> str:
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    return text.split("## How the code is laid out")[1]


def test_the_core_can_be_read_in_an_afternoon() -> None:
    core = re.findall(r"\]\((nanolm/[a-z_/]+\.py)\)", layout())
    assert {"model/gpt.py", "training/trainer.py"} <= {
        name.removeprefix("nanolm/") for name in core
    }
    lines = {name: len((CHECKOUT / name).read_text("utf-8").splitlines()) for name in core}
    assert sum(lines.values()) <= 1_500, lines
    assert lines["nanolm/model/gpt.py"] <= 280 and lines["nanolm/training/trainer.py"] <= 280


def test_every_package_is_in_the_layout() -> None:
    rows = [line.split("|")[1] for line in layout().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z]+)`", row)}
    packages = {file.parent.name for file in (CHECKOUT / "nanolm").glob("*/__init__.py")}
    assert named == packages
