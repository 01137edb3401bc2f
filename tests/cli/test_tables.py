"""Tables on stdout."""

import pytest
from rich.cells import cell_len

from nanolm.cli.tables import show_table

ROWS = [["name", "loss", "state"], ["字字", "1.5", ""], ["a long name", "10.25", "finished"]]


def test_columns_align_for_wide_characters(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(ROWS, left=(0, 2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "a long name  10.25  finished"
    assert lines[1] == "字字           1.5"  # two columns per character, no trailing spaces
    assert cell_len(lines[1]) == cell_len("a long name  10.25")


def test_cells_are_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(ROWS, first_limit=6, limit=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "a lon…  10.…  fin…"
    assert max(map(cell_len, lines)) == 6 + 2 + 4 + 2 + 4


def test_numbers_are_styled_and_names_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(ROWS[:1], style=lambda row, column, text: f"<{row}.{column} {text}>")
    assert capsys.readouterr().out == "name  <0.1 loss>  <0.2 state>\n"
