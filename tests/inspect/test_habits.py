"""Attention patterns of the smallest preset."""

from pathlib import Path

import pytest
from conftest import Cli

import nanolm
from nanolm.text.sources import embedded_file


@pytest.mark.slow
def test_a_head_of_the_tiny_model_is_named(cli: Cli, tmp_path: Path) -> None:
    """The page reports a previous-token or an induction head."""
    nanolm.train(
        "embedded:tiny",
        out=tmp_path / "run",
        preset="nano",
        context=64,
        steps=240,
        dropout=0.6,
        val_split="end",
    )
    sentences = embedded_file("tiny.txt").read_text().splitlines()[100:108]
    shown = cli("inspect", "run", "\n".join(sentences))
    assert shown.returncode == 0, shown.stderr
    page = (tmp_path / "inspect.html").read_text(encoding="utf-8")
    habits = page.partition('<table class="habits">')[2].partition("</table>")[0]
    wanted = ("the previous token (", "induction head (")
    assert any(words in habits for words in wanted), habits
