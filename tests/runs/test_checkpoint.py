import errno
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nanolm.errors import DiskFull, ModelError
from nanolm.runs import checkpoint
from nanolm.runs.checkpoint import MANIFEST, commit, follow, newest_valid, point, prune, verify


def write(folder: Path) -> None:
    (folder / "weights").write_bytes(random.Random(1).randbytes(5000))
    (folder / "state.json").write_text('{"step": 3}')


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    return commit(tmp_path, "step-00000003", write)


def test_a_commit_verifies_and_leaves_nothing_else(committed: Path, tmp_path: Path) -> None:
    verify(committed)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]
    mode = stat.S_IMODE((committed / "weights").stat().st_mode)
    assert mode == stat.S_IMODE((committed / MANIFEST).stat().st_mode)


def test_every_flipped_bit_is_found(committed: Path) -> None:
    dice = random.Random(7)
    files = sorted(committed.iterdir())
    for _ in range(150):
        file = dice.choice(files)
        data = bytearray(file.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        whole = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(ModelError, match=file.name):
            verify(committed)
        file.write_bytes(whole)
    verify(committed)


def test_every_truncation_is_found(committed: Path) -> None:
    dice = random.Random(8)
    for file in sorted(committed.iterdir()) * 10:
        whole = file.read_bytes()
        file.write_bytes(whole[: dice.randrange(len(whole))])
        with pytest.raises(ModelError, match=file.name):
            verify(committed)
        file.write_bytes(whole)
    (committed / "weights").unlink()
    with pytest.raises(ModelError, match="weights is missing"):
        verify(committed)


def interrupt_at(
    monkeypatch: pytest.MonkeyPatch, count: int, error: Callable[[], BaseException]
) -> None:
    """Make the `count`-th call that touches the disk for good fail."""
    calls = iter(range(1, 1000))

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **rest: object) -> object:
            if next(calls) == count:
                raise error()
            return function(*arguments, **rest)

        return wrapped

    for name in ("fsync", "rename", "replace", "open"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))


@pytest.mark.parametrize("count", range(1, 12))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(
    count: int, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, count, KeyboardInterrupt)  # unlike an error, it cleans up nothing
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, "step-00000004", write)
    newest = newest_valid(tmp_path, pytest.fail)
    assert newest is not None
    assert newest.name in ("step-00000003", "step-00000004")
    checkpoint.sweep(tmp_path)
    assert all(entry.name.startswith("step-") for entry in tmp_path.iterdir())


def test_the_kills_above_reach_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 12, KeyboardInterrupt)
    commit(tmp_path, "step-00000004", write)


@pytest.mark.parametrize("count", range(1, 12))
def test_a_full_disk_leaves_the_old_one_and_no_rubbish(
    count: int, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, count, lambda: OSError(errno.ENOSPC, "no space"))
        with pytest.raises(DiskFull, match="disk is full"):
            commit(tmp_path, "step-00000004", write)
    verify(committed)
    assert not list(tmp_path.glob(".*"))


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
    prune(tmp_path, keep={"step-00000002"})
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
