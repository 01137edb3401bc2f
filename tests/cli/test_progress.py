"""The progress line, evaluations and samples during training, on a terminal."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from nanolm.choice import Choice
from nanolm.cli.progress import TrainingView
from nanolm.training.events import Planned, Progressed, Started, Wrote

SAMPLE = Wrote(10, "床前", "明月光 疑\ufffd是地\ufffd\ufffd霜 " * 19 + "\ufffd")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def evaluated(step: int, bits: float, **more: Any) -> Progressed:
    record = {"step": step, "seconds": 4200.0, "loss": 4.25, "val_loss": bits, **more}
    record |= {"val_bits_per_byte": bits, "tokens_per_second": 123_456}
    return Progressed(record, step / 100, 4000.0, 2.5)


def shown(monkeypatch: pytest.MonkeyPatch, width: int = 80, **environment: str) -> str:
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(width), **environment}.items():
        monkeypatch.setenv(name, value)
    with TrainingView() as view:
        view.show(Planned((Choice("part", "poems\x1b]0;title\x07.txt", "half of the text"),)))
        view.show(Started(Path("runs/x"), 7, "9 training tokens", 0))
        for step, bits in ((10, 3.0), (40, 2.0), (70, 2.5), (100, 1.75)):
            view.show(SAMPLE)
            view.show(evaluated(step, bits))
    return screen.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_everything_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.split(r"[\r\n]+", ESCAPES.sub("", shown(monkeypatch, width)))
    assert max(map(cell_len, lines)) <= width
    live = [line for line in lines if "━" in line or "─" in line]
    assert live and all(re.match(r"[━─]{8,40}  ?\d+%  .*remaining$", line) for line in live)
    assert ("tokens/s" in live[-1], "val 1.750" in live[-1]) == (width == 120, width > 40)
    assert "step 70: loss 4.250 val 2.500 bits/byte (plan 2.50)" in " ".join(
        " ".join(lines).split()
    )


def test_samples_are_dim_and_have_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch)
    lines = [line for line in text.splitlines() if "│" in line]
    assert len(lines) == 8 and all("\x1b[2m│ " in line for line in lines)
    assert "床前明月光 疑是地霜" in lines[0] and "…" in lines[1]
    assert "\ufffd" not in text


def test_color_where_validation_improves(monkeypatch: pytest.MonkeyPatch) -> None:
    green = re.compile(r"\x1b\[32m +val (\d\.\d+) bits")
    assert green.findall(shown(monkeypatch)) == ["2.000", "1.750"]  # better than one before
    assert not re.search(r"\x1b\[3\dm", shown(monkeypatch, NO_COLOR="1"))


def test_the_plan_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch)
    assert "half of the text" in text
    assert "\x1b]0;" not in text and "\x07" not in text
