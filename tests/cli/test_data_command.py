import json
import re
from pathlib import Path

import pytest
from conftest import Cli


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text("The same sentence, and a \x1b[31m code.\n" * 30)
    (folder / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    return folder


def test_check(cli: Cli, texts: Path) -> None:
    shown = cli("data", "check", texts)
    assert shown.returncode == 0, shown.stderr
    for line in [
        "files:          2 (skipped files: 1 binary)",
        "documents:      2, the longest 1,110 bytes",
        "duplicates:     1\n",
        "60 control characters",
        "tokenizer:      bpe",
        "example:        The same sentence, and a ␛[31m code.",
    ]:
        assert line in shown.stdout
    found = json.loads(cli("data", "check", texts, "--json").stdout)
    assert (found["documents"], found["duplicates"], found["problems"]) == (2, 1, [])


def test_unreadable_files_are_reported_last(cli: Cli, texts: Path) -> None:
    (texts / "c.txt").write_bytes(b"caf\xe9")
    shown = cli("data", "check", texts)
    assert shown.returncode == 3
    assert "documents:      2" in shown.stdout
    assert re.search(r"c\.txt .*0xe9 at offset 3 \(line 1\).*--encoding cp1252", shown.stderr)
    assert cli("data", "check", texts, "--encoding", "cp1252").returncode == 0


def test_mistakes(cli: Cli, texts: Path) -> None:
    assert "--encoding utf9" in cli("data", "check", texts, "--encoding", "utf9").stderr
    assert "does not exist" in cli("data", "check", "none.txt").stderr
    assert "did you mean check?" in cli("data", "chek").stderr
    assert "Missing argument" in cli("data", "check").stderr
