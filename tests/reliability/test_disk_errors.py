"""A disk that does not take what is written, and an output that nobody can write to."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Commands
from conftest import TINY_MODEL, Tally, program
from journeys import Journey, counts, same
from safetensors import SafetensorError

import nanolm
from nanolm import files
from nanolm.errors import DiskFull
from nanolm.files import disk_problem, verify
from nanolm.runs.folder import Run

Ended = tuple[Journey, Path]
NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
TEXT = "".join(f"The {n} cats sat on {n + 1} mats.\n" for n in range(400))


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize("words", [False, True])
def test_every_error_of_a_disk_is_one(
    number: int, words: bool, committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system gives it, and in words alone, as safetensors does."""
    parent, file = committed.parent, committed.parent / "run.json"
    files.write_atomically(file, "as it was")
    text = os.strerror(number)
    error = SafetensorError(f"{text} (os error {number})") if words else OSError(number, text)

    def fails(*arguments: object) -> None:
        raise error

    with pytest.raises(DiskFull, match=r"cannot write .*saved earlier is intact"):
        files.commit(parent, "step-00000004", fails)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(DiskFull, match=r"cannot write .*, which is unchanged"):
        files.write_atomically(file, "more")
    verify(committed)
    assert file.read_text() == "as it was"
    assert sorted(entry.name for entry in parent.iterdir()) == ["run.json", committed.name]


def test_other_errors_are_not_the_disks() -> None:
    for error in (OSError(errno.ENOENT, "missing"), ValueError("none (os error 2)"), OSError("?")):
        assert disk_problem(error) is None


@pytest.mark.parametrize("size", counts(40_000, 20_000))
def test_a_limit_on_file_size(size: int, ended: Ended, commands: Commands, tmp_path: Path) -> None:
    """Of the optimizer's state, or of the weights too."""
    journey, whole = ended
    command = commands.start(*journey.words("run"), file_bytes=size)
    assert command.wait() == 7, command.said()
    assert "file size limit" in command.said()
    assert "ulimit -f" in command.said()
    assert "Traceback" not in command.said()
    assert not list(tmp_path.rglob(".tmp-*"))
    code, said = commands.run(*journey.words("run"))
    assert code == 0, said
    assert same(tmp_path / "run", whole)


PAGES = {
    "sample": ["sample", "RUN", "--tokens", 5, "--html", "FILE"],
    "csv": ["sample", "RUN", "--tokens", 60, "--show", "probs", "--csv", "FILE"],
    "eval": ["eval", "RUN", "text.txt", "--html", "FILE"],
    "inspect": ["inspect", "RUN", "The cats", "--out", "FILE"],
    "report": ["report", "RUN", "--out", "FILE"],
    "tokens": ["tokenizer", "show", "The cats", "--html", "FILE"],
}


@pytest.mark.parametrize("words", PAGES.values(), ids=PAGES)
def test_a_page_is_whole_or_as_it_was(
    words: list[object], trained: Path, commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    written = tmp_path / "page.html"
    names: dict[object, object] = {"RUN": trained, "FILE": "page.html"}
    given = [names.get(word, word) for word in words]
    assert commands.run(*given)[0] == 0  # what it prepares is kept
    whole = written.read_bytes()
    command = commands.start(*given, file_bytes=900)
    assert command.wait() == 7, command.said()
    assert "file size limit" in command.said()
    assert "Traceback" not in command.said()
    assert written.read_bytes() == whole
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_tokenizer_is_whole_or_not_there(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ("tokenizer", "train", "text.txt", "--vocab-size", 300, "--out", "made")
    command = commands.start(*words, file_bytes=900)
    assert command.wait() == 7, command.said()
    assert "Traceback" not in command.said()
    assert not list(tmp_path.rglob("*.json"))
    assert commands.run(*words)[0] == 0


def test_an_output_that_cannot_be_written(trained: Path, commands: Commands) -> None:
    full = {"stdout": "/dev/full"}
    for words in ["sample", trained, "--tokens", 5], ["info", trained], ["--help"]:
        command = commands.start(*words, streams=full)
        assert command.wait() == 7, command.said()
        assert command.stream("stderr").endswith(
            "the disk is full: the output. Free some space, then run the same command again.\n"
        )
        assert "Traceback" not in command.said()
        assert "Exception" not in command.said()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_training_ends_well_whatever_can_be_shown(
    stream: str, ended: Ended, commands: Commands, tmp_path: Path
) -> None:
    journey, whole = ended
    command = commands.start(*journey.words("run"), streams={stream: "/dev/full"})
    assert command.wait() == (7 if stream == "stdout" else 0), command.said()
    assert same(tmp_path / "run", whole)
    assert Run(tmp_path / "run").finished()


@pytest.mark.parametrize(
    ("words", "code"),
    [(["train"], 2), (["sample", "."], 4), (["train", "empty.txt"], 3), (["runs"], 0)],
)
def test_the_exit_code_needs_no_stderr(words: list[str], code: int, commands: Commands) -> None:
    (commands.folder / "empty.txt").write_bytes(b"")
    assert commands.start(*words, streams={"stderr": "/dev/full"}).wait() == code


def test_a_log_that_cannot_be_written(tmp_path: Path, corpus: Path) -> None:
    """The run is whole without it, and says so."""
    notes: list[str] = []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").symlink_to("/dev/full")
    nanolm.train(
        corpus,
        out=tmp_path / "run",
        steps=20,
        notify=lambda event: notes.append(str(event)),
        **TINY_MODEL,
    )
    assert Run(tmp_path / "run").finished()
    assert any("log.txt: No space left" in note for note in notes)


READ_ONLY = """
mount -t tmpfs tmpfs "$1" && cp -a "$2" "$1/run" && mount -o remount,ro "$1" || exit 42
"$3" "$4" read-only "$1"
"""


@pytest.mark.slow
def test_a_disk_that_is_read_only(trained: Path, tmp_path: Path, tally: Tally) -> None:
    """Whatever only reads works there; whatever writes says what is wrong."""
    if sys.platform != "linux":
        pytest.skip("needs a file system of its own")
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh"]
    places = [str(disk), str(trained), sys.executable, __file__]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*shell, *places], capture_output=True, encoding="utf-8", env=path)
    if done.returncode == 42 or "unshare" in done.stderr:
        pytest.skip(f"no file system can be made here: {done.stderr}")
    found = json.loads(done.stdout)
    tally("commands on a read-only disk", len(found), sum(found))


def on_a_read_only_disk(disk: Path) -> list[bool]:
    (disk.parent / "text.txt").write_text(TEXT)
    text, run = str(disk.parent / "text.txt"), str(disk / "run")
    small = ["--steps", 3, "--dim", 16, "--layers", 1, "--heads", 2]
    writing: list[list[object]] = [
        ["train", text, "--out", disk / "new", *small],
        ["train", "--extend", run, "--steps", 90],
        ["report", run],
        ["sample", run, "--tokens", 5, "--html", disk / "page.html"],
        ["tokenizer", "train", text, "--out", disk / "new"],
        ["runs", "rm", run, "--yes"],
    ]
    reading: list[list[object]] = [
        ["sample", run, "--tokens", 5],
        ["info", run],
        ["doctor", run],
        ["eval", run, text],
    ]
    found = []
    for words, code in [(each, 7) for each in writing] + [(each, 0) for each in reading]:
        done = subprocess.run(program(*words), capture_output=True, encoding="utf-8")
        told = "the file system is read-only" in done.stderr or code == 0
        found.append(done.returncode == code and told and "Traceback" not in done.stderr)
        if not found[-1]:
            print(words, done, file=sys.stderr)  # noqa: T201
    return found


if __name__ == "__main__":
    print(json.dumps(on_a_read_only_disk(Path(sys.argv[2]))))  # noqa: T201
