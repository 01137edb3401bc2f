import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import write
from faults import FULL, Killed, disk_fails

from nanolm.cli.console import write_file
from nanolm.errors import DiskFull, ModelError
from nanolm.files import MANIFEST, InUse, commit, locked, sweep, verify, write_atomically
from nanolm.runs.checkpoint import newest_valid, point


def test_a_commit_verifies_and_leaves_nothing_else(committed: Path, tmp_path: Path) -> None:
    verify(committed)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]
    mode = stat.S_IMODE((committed / "weights").stat().st_mode)
    assert mode == stat.S_IMODE((committed / MANIFEST).stat().st_mode)


@pytest.mark.parametrize("count", range(1, 12))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(
    count: int, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disk_fails(patch, count, Killed)
        with pytest.raises(Killed):
            commit(tmp_path, "step-00000004", write)
    newest = newest_valid(tmp_path, pytest.fail)
    assert newest is not None
    assert newest.name in ("step-00000003", "step-00000004")
    sweep(tmp_path)
    assert all(entry.name.startswith("step-") for entry in tmp_path.iterdir())


def test_the_kills_above_reach_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_fails(monkeypatch, 12, Killed)
    commit(tmp_path, "step-00000004", write)


@pytest.mark.parametrize("count", range(1, 12))
def test_a_full_disk_leaves_the_old_one_and_no_rubbish(
    count: int, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disk_fails(patch, count, lambda: FULL, lasting=False)
        with pytest.raises(DiskFull, match="disk is full"):
            commit(tmp_path, "step-00000004", write)
    verify(committed)
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_is_missing_is_named(committed: Path) -> None:
    (committed / "weights").unlink()
    with pytest.raises(ModelError, match="weights is missing"):
        verify(committed)


def test_a_lock_is_held_by_one_process_and_let_go_by_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from nanolm.files import locked\n"
        "with locked(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE
    )
    assert other.stdout and other.stdout.readline() == b"mine\n"
    with pytest.raises(InUse, match=str(other.pid)), locked(tmp_path / "lock"):
        pytest.fail("two hold it")
    waited: list[bool] = []

    def wait() -> None:
        waited.append(True)
        other.kill()

    with locked(tmp_path / "lock", wait):
        assert waited
    other.wait()
    other.stdout.close()


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(
    tmp_path: Path,
) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    dead, alive = int(ended.stdout), os.getppid()
    for process in (dead, alive, os.getpid()):
        (tmp_path / f".tmp-run.json-{process}").write_text("half")
        (tmp_path / f".tmp-best-{process}").symlink_to("nowhere")
    write_atomically(tmp_path / "run.json", "{}")
    point(tmp_path / "best", committed := commit(tmp_path, "step-00000003", write))
    names = {f".tmp-run.json-{alive}", f".tmp-best-{alive}", "run.json", "best", committed.name}
    assert {entry.name for entry in tmp_path.iterdir()} == names


def test_an_output_goes_through_links_and_into_pipes(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to("page.html")
    write_file(tmp_path / "link.html", "new\r\n")
    assert (tmp_path / "page.html").read_bytes() == b"new\r\n"
    assert (tmp_path / "link.html").is_symlink()
    os.mkfifo(pipe := tmp_path / "pipe")
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "text")
    reader.join()
    assert received == ["text"]
    assert pipe.is_fifo()
    write_file(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
