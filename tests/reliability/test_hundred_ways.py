"""Run folders damaged at random: every command answers or says what is wrong, nothing is lost."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Commands, Loaded
from conftest import TINY_MODEL, Tally, unpacked
from faults import before_step, flip, press, truncate
from journeys import counts

import nanolm
from nanolm import files

GROW = (".lock", "log.txt", "metrics.jsonl", "samples.md", "run.json", "config.toml")
WRITTEN = (*GROW, "report.html", "loss.svg")  # anew, by a command that was asked to
COMMANDS: list[tuple[object, ...]] = [
    *(("runs", "--folder", ".."), ("doctor", "."), ("info", "."), ("report", ".")),
    ("sample", ".", "--tokens", 2),
    ("train", "--config", "config.toml", "--out", "."),
    ("train", "--extend", ".", "--steps", 4),
]


def delete(file: Path, dice: random.Random) -> None:
    file.unlink()


def convert_line_ends(file: Path, dice: random.Random) -> None:
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))


def fill_with_zeros(file: Path, dice: random.Random) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def swap(file: Path, dice: random.Random) -> None:
    others = [each for each in file.parent.iterdir() if each.is_file() and each != file]
    other = dice.choice(others) if others else file
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)


def repeat_a_line(file: Path, dice: random.Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    place = dice.randrange(len(lines))
    file.write_bytes(b"".join([*lines[:place], lines[place], *lines[place:]]))


def turn_links_into_folders(file: Path, dice: random.Random) -> None:
    run = next(each for each in file.parents if (each / "checkpoints").is_dir())
    for name in ("best", "last"):
        target = (run / name).resolve()
        (run / name).unlink()
        shutil.copytree(target, run / name)
    flip(file, dice)


def turn_links_into_files(file: Path, dice: random.Random) -> None:
    run = next(each for each in file.parents if (each / "checkpoints").is_dir())
    for name in ("best", "last"):
        target = os.readlink(run / name)
        (run / name).unlink()
        (run / name).write_text(target)
    truncate(file, dice)


def forbid(file: Path, dice: random.Random) -> None:
    file.chmod(0)


def make_a_folder(file: Path, dice: random.Random) -> None:
    file.rename(file.with_name("kept"))
    file.mkdir()
    file.with_name("kept").rename(file / "inside")


WAYS: list[Callable[[Path, random.Random], None]] = [
    *(flip, truncate, delete, convert_line_ends, fill_with_zeros, swap, repeat_a_line),
    *(turn_links_into_folders, turn_links_into_files, forbid, make_a_folder),
]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of version 0.1.0, and two of this one."""
    folder = tmp_path_factory.mktemp("originals")
    old = [unpacked(name, folder) for name in ("finished", "unfinished")]
    settings: dict[str, Any] = {"steps": 30, "workers": 1, **TINY_MODEL}
    nanolm.train("embedded:tiny", out=folder / "done", **settings)
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 20, press)
        nanolm.train("embedded:tiny", out=folder / "stopped", **settings)
    return [*old, folder / "done", folder / "stopped"]


@pytest.mark.parametrize("ways", counts(6, 200))
def test_a_damaged_run_is_answered_and_nothing_is_lost(
    ways: int, originals: list[Path], tmp_path: Path, loaded: Loaded, tally: Tally
) -> None:
    survived = 0
    for number in range(ways):
        dice = random.Random(number)
        original = originals[number % len(originals)]
        run = Path(shutil.copytree(original, tmp_path / str(number) / "run", symlinks=True))
        way = WAYS[number % len(WAYS)]
        damage(run, way, dice)
        before = contents(run)
        some = COMMANDS if ways > 20 else [COMMANDS[0], *dice.sample(COMMANDS[1:], 2)]
        for words in some:
            code, text = Commands(loaded, run).run(*words, privileged=False)
            what = f"{number}: {original.name}, {way.__name__}: {words}: {code}: {text}"
            assert "Traceback" not in text and code in (0, 2, 3, 4, 75), what
            assert (code == 0) or text.strip(), what
        after = all_contents(run)
        lost = {name for digest, name in before.items() if digest not in after}
        assert not lost, f"{number}: {original.name}, {way.__name__}: {lost}"
        survived += 1
        shutil.rmtree(run.parent)
    tally("a run folder damaged at random", ways, survived)


def damage(run: Path, way: Callable[[Path, random.Random], None], dice: random.Random) -> None:
    places = [run, *sorted((run / "checkpoints").iterdir())]
    entries = sorted(dice.choice(places).iterdir())
    way(dice.choice([each for each in entries if each.is_file() and not each.is_symlink()]), dice)


def contents(run: Path) -> dict[str, str]:
    """Of all that may not go: what was whole and is superseded may, and what grows has changed."""
    kept = {}
    for file in run.rglob("*"):
        links = any(path.is_symlink() for path in file.parents) or file.name in ("best", "last")
        if not file.is_file() or file.name in WRITTEN or links:
            continue
        checkpoint = next(
            (each for each in file.parents if (each / files.MANIFEST).is_file()), None
        )
        kept[files.sha256(file)] = str(file) if not is_whole(checkpoint) else ""
    return {digest: name for digest, name in kept.items() if name}


def is_whole(folder: Path | None) -> bool:
    try:
        return folder is not None and bool(files.verify(folder))
    except Exception:
        return False


def all_contents(run: Path) -> set[str]:
    return {files.sha256(file) for file in run.rglob("*") if file.is_file()}
