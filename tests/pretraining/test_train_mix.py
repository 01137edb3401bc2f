"""Training on a mix: the figures of each part, the plan, and resuming."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, Cli, lines
from faults import before_step, press
from journeys import same

import nanolm
from nanolm.pretraining.begin import run_name
from nanolm.runs.folder import Run
from nanolm.training.settings import TrainSettings

SMALL = [f"--{name}={value}" for name, value in TINY_MODEL.items()]
SMALL += ["--device=cpu", "--threads=1", "--tokenizer=byte", "--no-compile"]


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    cats, dogs = tmp_path / "cats.txt", tmp_path / "dogs.txt"
    cats.write_text("".join(f"The {n} cats sat on {n + 1} mats.\n" for n in range(400)))
    dogs.write_text("".join(f"{n * 7 % 13} dogs ran to the {n}th house\n" for n in range(100)))
    return cats, dogs


def test_each_part_is_planned_measured_and_reported(cli: Cli, texts: tuple[Path, Path]) -> None:
    words = ["train", "cats.txt:0.6", "dogs.txt:0.4", *SMALL, "--steps", 8, "--evaluations", 1]
    shown = cli(*words, "--json")
    assert shown.returncode == 0, shown.stderr
    result = json.loads(shown.stdout)
    bits = result["val_bits_per_byte_by_part"]
    assert result["run"] == "runs/cats" and list(bits) == ["cats.txt", "dogs.txt"]
    mean = 0.6 * bits["cats.txt"] + 0.4 * bits["dogs.txt"]
    assert result["val_bits_per_byte"] == pytest.approx(mean)
    run = Run(texts[0].parent / "runs/cats")
    last = lines(run.path)[-1]
    assert {"val_bits_per_byte/cats.txt", "val_bits_per_byte/dogs.txt"} <= set(last)
    assert "part: cats.txt (weight 0.6, 1" in shown.stderr
    assert "part: dogs.txt (weight 0.4, 2" in shown.stderr and " epochs)" in shown.stderr
    assert "bits/byte  cats.txt " in shown.stderr
    page = (run.path / "report.html").read_text()
    assert "<dt>bits per byte of dogs.txt</dt>" in page and "bits per byte of dogs.txt</th>" in page
    assert run.settings()["corpus"] == [f"{texts[0]}:0.6", f"{texts[1]}:0.4"]
    shown = cli("train", "--config", run.config_file, "--out", "again")
    again = json.loads((texts[0].parent / "again/run.json").read_text())["result"]
    assert again["val_bits_per_byte_by_part"] == bits
    assert f"(cats.txt {bits['cats.txt']:.3f}, dogs.txt {bits['dogs.txt']:.3f}, " in shown.stdout


def test_a_part_that_is_repeated_too_often(cli: Cli, texts: tuple[Path, Path]) -> None:
    words = ["train", "cats.txt:0.2", "dogs.txt:0.8", *SMALL, "--plan"]
    shown = cli(*words, "--steps", 1500, "--json")
    assert shown.returncode == 0, shown.stderr
    repeated = next(each for each in choices(shown) if each["what"] == "repeated")
    advice, _, better = repeated["reason"].partition("; try ")
    assert (repeated["value"], advice) == ("dogs.txt", "more than 20 epochs of it do not help")
    names = better.split()
    assert [name.rpartition(":")[0] for name in names] == [str(text) for text in texts]
    again = cli("train", *names, *SMALL, "--plan", "--steps", 1500, "--json")
    assert "repeated" not in {each["what"] for each in choices(again)}


def choices(shown: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shown.stdout)["choices"]
    return found


def test_resumed_to_the_bit(
    texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = [f"{texts[0]}:2", f"{texts[1]}:1"]
    how: dict[str, Any] = {**TINY_MODEL, "steps": 30, "device": "cpu", "threads": 1}
    nanolm.train(corpus, out=tmp_path / "whole", **how)
    with monkeypatch.context() as patch:
        before_step(patch, 17, press)
        assert nanolm.train(corpus, out=tmp_path / "run", **how).stopped == "interrupted"
    nanolm.train(corpus, out=tmp_path / "run", **how)
    assert same(tmp_path / "run", tmp_path / "whole")
    other = [f"{texts[0]}:1", f"{texts[1]}:1"]
    with pytest.raises(nanolm.errors.DataError, match="is finished"):
        nanolm.train(other, out=tmp_path / "run", **how)


def test_stdin_can_have_a_weight(cli: Cli, texts: tuple[Path, Path]) -> None:
    words = ["train", "-:0.5", "dogs.txt:0.5", *SMALL, "--steps", 2, "--out", "run", "--json"]
    shown = cli(*words, stdin=texts[0].read_text())
    assert shown.returncode == 0, shown.stderr
    assert set(json.loads(shown.stdout)["val_bits_per_byte_by_part"]) == {"stdin", "dogs.txt"}


def test_one_validation_file_for_all_parts(cli: Cli, texts: tuple[Path, Path]) -> None:
    (texts[0].parent / "other.txt").write_text(texts[0].read_text()[:3000])
    words = ["train", "cats.txt:1", "dogs.txt:1", *SMALL, "--val", "other.txt", "--steps", 2]
    shown = cli(*words, "--json")
    assert shown.returncode == 0, shown.stderr
    result = json.loads(shown.stdout)
    assert result["val_bits_per_byte"] > 0 and result["val_bits_per_byte_by_part"] == {}


def test_a_small_part_limits_the_context(cli: Cli, texts: tuple[Path, Path]) -> None:
    texts[1].write_text("A dog ran home.")
    shown = cli("train", "cats.txt:9", "dogs.txt:1", *SMALL, "--steps", 2, "--out", "run")
    assert shown.returncode == 0, shown.stderr
    assert "context: 15 (the smallest part of the mix has only 16 training tokens)" in shown.stderr
    assert "(cats.txt " in shown.stdout and "dogs.txt " not in shown.stdout


def test_mistakes_are_reported_at_once(cli: Cli, texts: tuple[Path, Path]) -> None:
    shown = cli("train", "cats.txt:0", "dogs.txt")
    assert shown.returncode == 2
    assert "cats.txt:0: a weight must be a positive number" in shown.stderr
    assert "dogs.txt has no weight, but other sources have one; try dogs.txt:1" in shown.stderr
    shown = cli("train", "cat.txt:1", "dog.txt:1")
    assert shown.returncode == 2
    assert "cat.txt does not exist" in shown.stderr and "dog.txt does not exist" in shown.stderr
    shown = cli("compare", "cats.txt:0", "dogs.txt:0")
    assert shown.returncode == 2
    assert "compare takes no weights; try cats.txt dogs.txt" in shown.stderr


def test_a_mix_has_the_name_of_its_first_part() -> None:
    assert run_name("letters:0.7") == run_name("letters/:1") == "letters"
    assert run_name("-:0.5") == "stdin"
    problem = TrainSettings(("a.txt:1", "b.txt:1"), val="b.txt").problems()[0]
    assert problem == "--val b.txt is also part of the corpus; give another file"
