"""`nanolm compare` on the command line."""

import json
import re
from pathlib import Path

from conftest import Cli
from journeys import journeys


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


def test_the_kind_of_data(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("good\tIt was a bright day.\nbad\tThe clocks struck.\n" * 9)
    shown = cli("compare", "novel.txt", "--label-column", "1", "--test", "x.tsv")
    assert shown.returncode == 2
    assert re.search("--label-column, --test: .*novel.txt .*--as labels", shown.stderr)
    shown = cli("compare", "novel.txt", "--only", "bag")
    assert re.search("--only bag: .*ngram, convolution, rnn, lstm, transformer", shown.stderr)
    shown = cli("compare", "--from", "none")
    assert "--from none: omit it" in shown.stderr
    shown = cli("compare", "nothing.tsv")
    assert shown.returncode == 2
    assert "nothing.tsv" in shown.stderr
