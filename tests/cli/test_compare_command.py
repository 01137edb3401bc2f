"""`nanolm compare` on the command line."""

import json
import re
from pathlib import Path

import pytest
from conftest import Cli
from journeys import journeys

from nanolm.cli.compare import UNUSED, guess_kind, show
from nanolm.comparison.compare import ComparedRow, CompareResult


def test_the_table_and_its_lessons(cli: Cli, tmp_path: Path) -> None:
    data = journeys(tmp_path)["fine-tuning"].text
    asked = ["compare", data, "--only", "majority, bag,averaging", "--budget", "0.1"]
    shown = cli(*asked, "--seeds", "2", "--threads", "1")
    assert shown.returncode == 0, shown.stderr
    head, first, second, third, _, *below = shown.stdout.splitlines()
    assert head.split() == ["accuracy", "parameters", "training", "1,000", "words"]
    assert re.fullmatch(r"\S.* 50\.0% ±0\.0 +0 +0\.0 s +\d\.\d ms", first)
    assert re.fullmatch(r"bag of words.* 100\.0% ±0\.0 +\d+ +\d\.\d s +\d\.\d ms", second)
    assert third.startswith("averaged ")
    assert below[0].startswith(first.partition("  ")[0] + ": ") and below[0].endswith(".")
    assert "± standard deviation over 2 seeds" in shown.stdout
    assert re.search(r"seed 1, bag of words.*: accuracy 100\.0% after \d", shown.stderr)
    assert "runs/labeled-compare/compare.svg" in shown.stderr
    assert "--from RUN" in shown.stderr
    printed = cli(*asked, "--seeds", "2", "--threads", "1", "--json")
    outcome = json.loads(printed.stdout)
    assert [row["name"] for row in outcome["rows"]] == ["majority", "bag", "averaging"]
    assert len(outcome["rows"][1]["results"]) == 2


def test_a_table_of_pairs(cli: Cli, tmp_path: Path) -> None:
    data = journeys(tmp_path)["pairs"].text
    shown = cli("compare", data, "--only", "modern", "--budget", "0.05", "--threads", "1")
    assert shown.returncode == 0, shown.stderr
    head, row, _, lesson, *_ = shown.stdout.splitlines()
    assert head.split() == ["exact", "longest", "parameters", "training"]
    assert re.fullmatch(r"modern Transformer +\d+\.\d% +\d+\.\d% +[\d,]+ +[\d.]+ s", row)
    assert lesson.startswith("modern Transformer: ")
    assert re.search(r"on the \d+% with the longest sources", shown.stdout)
    assert re.search(r"seed 1, modern .*: BLEU [\d.]+, exact match [\d.]+% after", shown.stderr)


def test_the_share_of_long_sources(capsys: pytest.CaptureFixture[str]) -> None:
    """Sources of equal length are in one group, so it is not always a fifth."""
    means = {"exact": 0.5, "long_exact": 0.25, "seconds": 1.0}
    results = [{"by_length": [{"count": 60}, {"count": 40}]}]
    row = ComparedRow("modern", "modern", "it learns", 1, means, {}, results)
    show(CompareResult("x", True, "exact", [row], {}))
    assert "and on the 40% with the longest sources." in capsys.readouterr().out


def test_pairs_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journeys(tmp_path)
    sides = {"de": "Ein Hund rennt.\nEs schneit.\n", "en": "A dog runs.\nIt snows.\n"}
    for language, text in sides.items():
        (tmp_path / f"train.{language}").write_text(text)
        (tmp_path / f"{language}.txt").write_text(text)
    unset = dict.fromkeys([*UNUSED["labels"], *UNUSED["pairs"]])

    def guess(*names: str, **given: str) -> str:
        return guess_kind(names, {**unset, **given})

    pairs = [("train.de", "train.en"), ("pairs.tsv",), ("embedded:dates",), ("embedded:veltish",)]
    assert {guess(*names) for names in pairs} == {"pairs"}
    assert guess("de.txt", "en.txt", source_column="1") == "pairs"
    assert guess("pairs.tsv", label_column="target") == "labels"
    assert guess("labeled.tsv") == guess("embedded:reviews") == "labels"
    assert guess("de.txt", "en.txt") == guess("embedded:tiny") == guess("-") == "text"


def test_the_kind_of_data(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("good\tIt was a bright day.\nbad\tThe clocks struck.\n" * 9)
    shown = cli("compare", "novel.txt", "--label-column", "1", "--test", "x.tsv")
    assert shown.returncode == 2
    assert re.search("--label-column, --test .*novel.txt .*--as labels", shown.stderr)
    shown = cli("compare", "embedded:dates", "--from", "x", "--as", "pairs")
    assert re.search("--from .*embedded:dates .*--as labels", shown.stderr)
    twice = ["--val", "novel.txt", "--val", "other.txt"]
    shown = cli("compare", "novel.txt", *twice)
    assert shown.returncode == 2 and "--val: two files are for pairs" in shown.stderr
    shown = cli("compare", "embedded:dates", *twice)
    assert shown.returncode == 2 and re.search(
        "--val .*novel.txt .*other.txt does not", shown.stderr
    )
    shown = cli("compare", "novel.txt", "--only", "bag")
    assert re.search("--only bag: .*ngram, convolution, rnn, lstm, transformer", shown.stderr)
    shown = cli("compare", "--from", "none")
    assert "--from none: omit it" in shown.stderr
    shown = cli("compare", "nothing.tsv")
    assert shown.returncode == 2
    assert "nothing.tsv" in shown.stderr
