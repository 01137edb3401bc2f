"""`make course` does what docs/course.md says, and what that page names exists."""

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from nanolm.cli.main import VERBS, cli
from nanolm.runs.folder import Run

CHECKOUT = Path(__file__).parents[1]
PAGE = (CHECKOUT / "docs" / "course.md").read_text(encoding="utf-8")
TABLES = re.findall(r"^\| (.+?) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
# Writes down what it was asked for, and leaves behind what a finished run does.
STAND_IN = """#!/bin/sh
for word; do printf '%s\\n' "$word" >>"$ASKED"; done
echo -- >>"$ASKED"
for last; do :; done
if [ "$last" = "$FAILS" ]; then exit 75; fi
case $1 in train | finetune*) mkdir -p "$last" && cp "$FACTS" "$last" ;; esac
"""


class Course:
    """`make course` with a stand-in for nanolm, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "my course"
        self.asked, self.nanolm = folder / "asked", folder / "nanolm"
        self.nanolm.write_text(STAND_IN)
        self.nanolm.chmod(0o755)
        (folder / "ready").touch()
        self.finished = Run(folder)
        self.finished.update({"request": {}, "fingerprints": {}, "result": {}})

    def make(self, fails: str = "", **given: str) -> tuple[subprocess.CompletedProcess[str], str]:
        """What it printed, and what it asked of nanolm."""
        self.asked.write_text("")
        ready = self.folder.parent / "ready"  # so that nothing is installed
        given |= {"COURSE": str(self.folder), "NANOLM": str(self.nanolm), "READY": str(ready)}
        told = {"ASKED": str(self.asked), "FACTS": str(self.finished.facts_file), "FAILS": fails}
        done = subprocess.run(
            ["make", "course", *(f"{name}={value}" for name, value in given.items())],
            cwd=CHECKOUT,
            env={"PATH": os.environ["PATH"], **told},
            capture_output=True,
            text=True,
        )
        return done, self.asked.read_text().replace(str(self.folder), "COURSE")

    def commands(self, **given: str) -> list[list[str]]:
        done, asked = self.make(**given)
        assert done.returncode == 0, done.stderr
        return [part.splitlines() for part in asked.split("--\n") if part]


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def test_recipe_asks_for_the_assignment(course: Course) -> None:
    small, words, top, large, _, sentiment, _, scratch = course.commands()
    assert small == ["train", "embedded:tiny", "--preset", "nano", "--out", "COURSE/small"]
    assert words[-2:] == ["--show", "probs"]
    assert top[-4:-2] == ["--show", "top=6"]
    assert large[:2] == ["train", "embedded:stories"]
    assert large[-2:] == ["--out", "COURSE/large"]
    limited = ["finetune-sentiment", "embedded:reviews", "--limit", "1200", "--from"]
    assert sentiment == [*limited, "COURSE/large", "--out", "COURSE/sentiment"]
    assert scratch == [*limited, "none", "--out", "COURSE/scratch"]


def test_files_may_have_odd_names(course: Course) -> None:
    odd = {
        "SMALL": "my file.txt",
        "LARGE": "it's; 'all' \"here\".txt",
        "SST": "*.tsv",
        "GPT2": "a b",
    }
    small, *_, scratch, gpt2 = course.commands(**odd)
    assert small[1] == "my file.txt"
    assert scratch[1] == "*.tsv"
    assert gpt2[gpt2.index("--from") + 1] == "a b"
    typed = (course.folder / "large.command").read_text()
    assert shlex.split(typed)[:3] == ["nanolm", "train", odd["LARGE"]]


def test_goes_on_where_it_was(course: Course) -> None:
    large = str(course.folder / "large")
    done, asked = course.make(fails=large)
    assert done.returncode
    assert "finetune" not in asked  # it stopped there
    done, asked = course.make()
    assert done.returncode == 0
    assert done.stdout.count("is finished: passed over") == 1
    assert "nano\n" not in asked
    assert "embedded:stories\n" in asked
    assert not any(words[0] in ("train", "finetune-sentiment") for words in course.commands())


def test_other_files_are_not_taken_for_the_same(course: Course) -> None:
    course.commands()
    done, asked = course.make(LARGE="other.txt")
    assert done.returncode
    assert "made by another command:\n  nanolm train embedded:stories" in done.stderr
    assert "COURSE=" in done.stderr
    assert "other.txt" not in asked


def test_code_that_the_page_names_exists() -> None:
    assert len(TABLES) > 60
    for idea, code, _ in TABLES:
        words = re.findall(r"`([^`]+)`", code)
        files = [word for word in words if word.endswith(".py")]
        trees = [ast.parse((CHECKOUT / file).read_text(encoding="utf-8")) for file in files]
        for name in set(words) - set(files):
            assert any(holds(tree, name.split(".")) for tree in trees), f"{idea}: {name}"


def holds(tree: ast.AST, names: list[str]) -> bool:
    """Whether a class, function, constant or attribute has that name; `a.b`: b within a."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found):
                pass
            case ast.Name(id=found, ctx=ast.Store()) | ast.Attribute(attr=found, ctx=ast.Store()):
                pass
            case _:
                continue
        if found == names[0] and (len(names) == 1 or holds(node, names[1:])):
            return True
    return False


def test_commands_of_the_page_parse() -> None:
    lines = re.findall(r"^\$ (nanolm .*)$", PAGE, re.MULTILINE)
    commands = lines + re.findall(r"`(nanolm [^`]+)`", PAGE)
    assert len(commands) > 30
    for command in commands:
        _, verb, *words = shlex.split(command)
        assert verb in VERBS, command
        found = cli.get_command(click.Context(cli), verb)
        assert found
        if isinstance(found, click.Group):
            found = found.get_command(click.Context(found), words.pop(0))
            assert found, command
        assert found.make_context(verb, words), command  # tells what it does not know
