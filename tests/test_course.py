"""`make course` does what docs/course.md says, and the code and commands of that page exist."""

import ast
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from models import gpt_config

from nanolm.cli.main import VERBS, cli
from nanolm.comparison.pairs import PAIR_MODELS
from nanolm.model.build import build_model
from nanolm.model.huggingface import save_model
from nanolm.runs.folder import Run
from nanolm.text.tokenizer import ByteLevel

CHECKOUT = Path(__file__).parents[1]
PAGE = (CHECKOUT / "docs" / "course.md").read_text(encoding="utf-8")
LECTURES = PAGE.partition("# The lectures, idea by idea")[2]
TABLES = re.findall(r"^\| (.+?) \| (.*) \| (.*) \|$", LECTURES, re.MULTILINE)
# Records its arguments and creates the files of a finished run.
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

    def make(
        self, recipe: str = "course", fails: str = "", **given: str
    ) -> tuple[subprocess.CompletedProcess[str], str]:
        """The completed process, and the nanolm commands it ran."""
        self.asked.write_text("")
        ready = self.folder.parent / "ready"  # skips the installation
        given |= {"COURSE": str(self.folder), "NANOLM": str(self.nanolm), "READY": str(ready)}
        paths = {"ASKED": str(self.asked), "FACTS": str(self.finished.facts_file), "FAILS": fails}
        done = subprocess.run(
            ["make", recipe, *(f"{name}={value}" for name, value in given.items())],
            cwd=CHECKOUT,
            env={"PATH": os.environ["PATH"], **paths},
            capture_output=True,
            text=True,
        )
        return done, self.asked.read_text().replace(str(self.folder), "COURSE")

    def commands(self, recipe: str = "course", **given: str) -> list[list[str]]:
        done, asked = self.make(recipe, **given)
        assert done.returncode == 0, done.stderr
        commands = [part.splitlines() for part in asked.split("--\n") if part]
        return [words for words in commands if words[0] not in ("report", "runs")]


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def test_recipe_asks_for_the_assignment(course: Course) -> None:
    small, words, top, large, _, _, sentiment, _, scratch = course.commands()
    assert small == ["train", "embedded:tiny", "--preset", "nano", "--out", "COURSE/small"]
    assert words[-2:] == ["--show", "words"]
    assert top[-6:-4] == ["--show", "words=6"]
    assert top[-4:] == ["--html", "COURSE/words.html", "--csv", "COURSE/words.csv"]
    assert large[:2] == ["train", "embedded:stories"]
    assert large[-2:] == ["--out", "COURSE/large"]
    limited = ["finetune-sentiment", "embedded:reviews", "--limit", "1200", "--from"]
    assert sentiment == [*limited, "COURSE/large", "--out", "COURSE/sentiment"]
    assert scratch == [*limited, "none", "--out", "COURSE/scratch"]


def test_curves_of_every_run_and_a_test_set(course: Course) -> None:
    done, asked = course.make(SST="train.tsv", SST_TEST="my dev.tsv", GPT2="model")
    assert done.returncode == 0, done.stderr
    for name in ("small", "large", "sentiment", "scratch", "gpt2"):
        assert f"report\nCOURSE/{name}\n--png\n" in asked
    assert asked.count("--test\nmy dev.tsv\n") == 3
    assert asked.endswith("runs\n--folder\nCOURSE\n--\n")
    for part in asked.split("--\n"):
        if part:
            verb, *words = part.splitlines()
            command = cli.get_command(click.Context(cli), verb)
            assert command
            context = command.make_context(verb, words)
            assert verb != "runs" or context.params["folder"] == "COURSE"
            assert not context.args  # no folder is parsed as a command


def test_from_the_bottleneck_to_attention(course: Course) -> None:
    compared, *translated = course.commands("course-pairs", PAIR_MINUTES="2")
    asked = ["compare", "embedded:veltish", "--budget", "2", "--out", "COURSE/veltish-compare"]
    assert compared == asked
    rows = {words[1].removeprefix("COURSE/veltish-compare/") for words in translated}
    assert rows == {f"{name}/seed-1" for name in PAIR_MODELS}
    for verb, *words in (compared, *translated):
        command = cli.get_command(click.Context(cli), verb)
        assert command
        assert command.make_context(verb, words)  # raises for unknown options


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


def test_resumes_after_an_interruption(course: Course) -> None:
    large = str(course.folder / "large")
    done, asked = course.make(fails=large)
    assert done.returncode
    assert "finetune" not in asked  # it stopped at the failing step
    done, asked = course.make()
    assert done.returncode == 0
    assert done.stdout.count("is finished: skipped") == 1
    assert "nano\n" not in asked
    assert "embedded:stories\n" in asked
    assert not any(words[0] in ("train", "finetune-sentiment") for words in course.commands())


def test_other_files_need_another_folder(course: Course) -> None:
    course.commands()
    done, asked = course.make(LARGE="other.txt")
    assert done.returncode
    assert "  nanolm train embedded:stories" in done.stderr
    assert "COURSE=" in done.stderr
    assert "other.txt" not in asked


def test_code_named_on_the_page_exists() -> None:
    assert len(TABLES) > 60
    for idea, code, _ in TABLES:
        words = re.findall(r"`([^`]+)`", code)
        files = [word for word in words if word.endswith(".py")]
        trees = [ast.parse((CHECKOUT / file).read_text(encoding="utf-8")) for file in files]
        for name in set(words) - set(files):
            assert any(holds(tree, name.split(".")) for tree in trees), f"{idea}: {name}"


def holds(tree: ast.AST, names: list[str]) -> bool:
    """Whether a class, function, constant or attribute has this name (`a.b`: b inside a)."""
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
        if isinstance(found, click.Group) and not words[0].startswith("-"):
            found = found.get_command(click.Context(found), words.pop(0))
            assert found, command
        assert found.make_context(verb, words), command  # raises for unknown options


def test_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    tokenizer = ByteLevel([])
    model = build_model(gpt_config(vocab_size=tokenizer.vocab_size, context=32))
    (folder := tmp_path / "runs/course/large").mkdir(parents=True)
    save_model(model, folder, tokenizer)
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(script, encoding="utf-8")
    runpy.run_path("script.py")
    size = len(tokenizer.encode("The cat was hungry"))
    shapes = [(1, 1, size, model.config.dim)] * 2 + [(1, 1, size, size)]
    assert capsys.readouterr().out.endswith(" ".join(f"torch.Size({[*s]})" for s in shapes) + "\n")


LOG = """
=== 1. A step ===
$ nanolm train x --out runs/x
the plan
  validation set: some
  threads: 1 (so)
  dtype: float32 (so)
 10%  reading  0:10 remaining
{progress}
runs/x: done
wrote runs/x/report.html (1 kB)

=== Results ===
$ nanolm runs
"""


def test_output_is_put_into_the_page() -> None:
    specification = importlib.util.spec_from_file_location("page", CHECKOUT / "data/course_page.py")
    assert specification
    assert specification.loader
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    progress = "\n".join(f"{n:3}%  step {n}  loss 1.0" for n in range(1, 101))
    page = "<!-- a 1 -->\n```\nold\n```\nwords\n<!-- b 1 -->\n```\nkept\n```\n"
    lines = script.updated(page, {"a": LOG.format(progress=progress)}).splitlines()
    assert lines[2:7] == [
        "$ nanolm train x --out runs/x", "the plan", "  validation set: some", "  ...",
        "  1%  step 1  loss 1.0",
    ]  # fmt: skip
    assert lines[-8:] == [
        "100%  step 100  loss 1.0", "runs/x: done", "```", "words",
        "<!-- b 1 -->", "```", "kept", "```",
    ]  # fmt: skip
    assert len(lines) < 30
    blocks = script.BLOCK.findall(PAGE)
    assert len(blocks) == 17
    assert all(body.strip() for *_, body, _ in blocks)
