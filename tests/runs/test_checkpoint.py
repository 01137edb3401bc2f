import os
from pathlib import Path

import pytest
from conftest import write

from nanolm.files import MANIFEST, commit
from nanolm.runs.checkpoint import follow, newest_valid, point, prune


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, f"step-{step:08}", write)
    (tmp_path / "step-00000003" / "weights").write_bytes(b"short")
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    reports: list[str] = []
    newest = newest_valid(tmp_path, reports.append)
    assert newest == tmp_path / "step-00000001"
    assert "step-00000003/weights is damaged" in reports[0]
    assert "step-00000002/MANIFEST.json is missing" in reports[1]


def test_pruning_keeps_two_and_what_it_is_told(tmp_path: Path) -> None:
    for step in range(1, 7):
        commit(tmp_path, f"step-{step:08}", write)
    prune(tmp_path, {"step-00000002"}, pytest.fail)
    left = [entry.name[-1] for entry in sorted(tmp_path.iterdir())]
    assert left == ["2", "5", "6"]


def test_a_link_is_swapped_in_one_step(committed: Path, tmp_path: Path) -> None:
    link = tmp_path / "best"
    other = commit(tmp_path, "step-00000004", write)
    point(link, committed)
    assert follow(link) == committed.resolve()
    point(link, other)
    assert follow(link) == other.resolve()
    assert not Path(os.readlink(link)).is_absolute()


def test_a_pointer_file_where_links_cannot_be_made(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **rest: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    point(tmp_path / "best", committed)
    assert (tmp_path / "best").read_text() == "step-00000003"
    assert follow(tmp_path / "best") == committed


def test_a_link_into_nothing_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to("gone")
    assert follow(tmp_path / "best") is None
    assert follow(tmp_path / "never") is None
    (tmp_path / "loop").symlink_to("loop")
    assert follow(tmp_path / "loop") is None
    (tmp_path / "last").write_bytes(b"\xff")
    assert follow(tmp_path / "last") is None
