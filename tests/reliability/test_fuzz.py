"""Whatever is typed, configured or given to learn from: an answer in time, never a traceback."""

import contextlib
import io
import os
import signal
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanolm.cli.main import VERBS, cli, run
from nanolm.errors import NanolmError
from nanolm.runs.toml import dump_toml
from nanolm.text.store import TextRequest, prepare_tokens
from nanolm.training.settings import TrainSettings

PATIENCE = 20  # seconds
A_BUG = 1  # the exit code
OFTEN = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class TooLong(BaseException):
    """What no handler of errors takes for one."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Or an error."""

    def hang(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def options(verb: str) -> list[str]:
    command = cli.get_command(click.Context(cli), verb)
    assert command
    names = [name for option in command.params for name in option.opts if name.startswith("-")]
    return sorted({*names, "--no", "-x", "--", "--help"} - {"--html", "--out", "--json-file"})


OPTIONS = {verb: options(verb) for verb in VERBS}
ODD = [
    "",
    "-1",
    "0",
    "1e400",
    "nan",
    "9" * 400,
    "\0",
    "\x1b[2J",
    "..",
    "/",
    "~",
    "no.txt",
    "{}",
    "--",
    "é",
]
WORDS = st.sampled_from(ODD) | st.text(max_size=6) | st.integers().map(str) | st.floats().map(str)


@OFTEN
@given(data=st.data())
def test_any_command_line_is_answered(data: st.DataObject, tmp_path: Path) -> None:
    """With words that name no text and no model, so that nothing long begins."""
    verb = data.draw(st.sampled_from([*VERBS, "trian"]))
    word = WORDS | st.sampled_from(OPTIONS.get(verb, ["-h"]))
    words = [*data.draw(st.lists(word, max_size=6)), "there-is-no-such-thing"]
    with in_folder(tmp_path), in_time(), silence() as patch:
        patch.setattr(sys, "argv", ["nanolm", verb, *words])
        assert run() != A_BUG


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def silence() -> Iterator[pytest.MonkeyPatch]:
    """Nothing to read, and nobody to listen."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdin", "stdout", "stderr"):
            patch.setattr(sys, name, io.TextIOWrapper(io.BytesIO()))
        yield patch


FIELDS = sorted(TrainSettings(corpus=("a.txt",)).__dataclass_fields__)
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@OFTEN
@given(values=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
def test_any_settings_are_sound_or_refused(values: dict[str, Any]) -> None:
    with in_time(), contextlib.suppress(NanolmError):
        TrainSettings.from_dict({"corpus": "a.txt", **values}).check()


LINES = st.sampled_from([f"{name} = " for name in FIELDS]) | st.text(string.printable, max_size=20)


@OFTEN
@given(parts=st.lists(st.tuples(LINES, st.text(string.printable, max_size=12)), max_size=5))
def test_any_config_file_is_read_or_refused(parts: list[tuple[str, str]], tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("\n".join(name + value for name, value in parts), encoding="utf-8")
    with in_time(), silence(), contextlib.suppress(NanolmError, click.ClickException):
        cli.main(
            ["train", "no.txt", "--config", str(file)], prog_name="nanolm", standalone_mode=False
        )
        pytest.fail("there is no such text")


@OFTEN
@given(text=st.text() | st.text("ab \n", min_size=20, max_size=400), data=st.binary(max_size=40))
def test_any_text_becomes_tokens_or_is_refused(text: str, data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(text.encode("utf-8", "surrogatepass") + data)
    with in_time(), contextlib.suppress(NanolmError):
        prepared = prepare_tokens(TextRequest((str(file),)), cache=tmp_path / "cache")
        assert len(prepared.train)


def test_what_is_drawn_is_what_settings_take() -> None:
    assert TrainSettings.from_dict({"corpus": "a.txt", "steps": 3}).steps == 3
    assert "steps = 3" in dump_toml({"steps": 3})
