"""`nanolm compare` as it is typed."""

import json
import re
from pathlib import Path

from conftest import Cli
from journeys import journeys


def test_a_table_and_what_it_teaches(cli: Cli, tmp_path: Path) -> None:
    data = journeys(tmp_path)["fine-tuning"].text
    asked = ["compare", data, "--only", "majority, bag,averaging", "--budget", "0.1"]
    shown = cli(*asked, "--seeds", "2", "--threads", "1")
    assert shown.returncode == 0, shown.stderr
    head, first, second, third, _, *below = shown.stdout.splitlines()
    assert head.split() == ["right", "parameters", "trained", "1,000", "words"]
    assert re.fullmatch(r"majority class +50\.0% ±0\.0 +0 +0\.0 s +\d\.\d ms", first)
    assert re.fullmatch(r"bag of words, linear +100\.0% ±0\.0 +\d+ +\d\.\d s +\d\.\d ms", second)
    assert third.startswith("averaged embeddings ")
    assert re.fullmatch(r"majority class: .*most frequent label\.", below[0])
    assert "Means over 2 seeds" in shown.stdout
    assert "seed 1, bag of words, linear: 100.0% right after " in shown.stderr
    assert "picture: runs/labelled-compare/compare.svg" in shown.stderr
    assert "--from that run" in shown.stderr
    printed = cli(*asked, "--seeds", "2", "--threads", "1", "--json")
    outcome = json.loads(printed.stdout)
    assert [row["name"] for row in outcome["rows"]] == ["majority", "bag", "averaging"]
    assert len(outcome["rows"][1]["results"]) == 2


def test_what_data_is(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("good\tIt was a bright day.\nbad\tThe clocks struck.\n" * 9)
    shown = cli("compare", "novel.txt", "--label-column", "1", "--test", "x.tsv")
    assert shown.returncode == 2
    assert "--label-column, --test: for labelled texts; if novel.txt has labels" in shown.stderr
    shown = cli("compare", "novel.txt", "--only", "bag")
    assert "--only bag: choose from ngram, rnn, lstm, transformer" in shown.stderr
    shown = cli("compare", "--from", "none")
    assert "--from none: leave it out" in shown.stderr
    shown = cli("compare", "nothing.tsv")
    assert shown.returncode == 2
    assert "nothing.tsv" in shown.stderr
