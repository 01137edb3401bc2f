"""Tables on stdout."""

import sys

import pytest
from rich.cells import cell_len

from nanolm.cli.tables import show_table

ROWS = [["name", "loss", "state"], ["字字", "1.5", ""], ["a long name", "10.25", "finished"]]
RUNS = [
    ["run", "corpus", "size", "bits/byte", "state"],
    ["runs/shakespeare-long", "zh_quantangshi_9000.txt", "1,112,176", "0.405", "stopped early"],
    ["runs/長い名前の実行結果", "tiny", "112", "", "finished"],
]


def test_columns_align_for_wide_characters(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(ROWS, left=(0, 2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "a long name  10.25  finished"
    assert lines[1] == "字字           1.5"  # two columns per character, no trailing spaces
    assert cell_len(lines[1]) == cell_len("a long name  10.25")


def test_a_column_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    show_table([["tokens", ""], ["64", ""]])
    assert capsys.readouterr().out.splitlines() == ["tokens", "64"]


def test_cells_are_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(ROWS, first_limit=6, limit=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "a lon…  10.…  fin…"
    assert max(map(cell_len, lines)) == 6 + 2 + 4 + 2 + 4


def test_numbers_are_styled_and_names_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(ROWS[:1], style=lambda row, column, text: f"<{row}.{column} {text}>")
    assert capsys.readouterr().out == "name  <0.1 loss>  <0.2 state>\n"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, {"  size       1,112,176", "  bits/byte  0.405"}),  # a list for each row
        (60, {"shakespeare-", "quantangshi_", "9000.txt", "bits/"}),
        (80, {"zh_quantangshi_ ", "0.405  stopped early"}),
        (120, {"zh_quantangshi_9000.txt  1,112,176      0.405  stopped early"}),
    ],
)
def test_a_table_fits_the_terminal(
    width: int, shown: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines end after words, and numbers are never split."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    show_table(RUNS, left=(0, 1, 4))
    text = capsys.readouterr().out
    assert max(map(cell_len, text.splitlines())) <= width
    assert all(part in text for part in {"1,112,176", "0.405", "stopped", *shown})


def test_a_table_in_a_pipe_is_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    show_table(RUNS)
    assert len(capsys.readouterr().out.splitlines()) == len(RUNS)
