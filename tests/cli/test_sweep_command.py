"""`nanolm sweep` on the command line."""

import json
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from conftest import Cli, program

from nanolm.cli.main import cli as verbs
from nanolm.errors import UsageError

main = partial(verbs.main, standalone_mode=False)
SMALL = ["--layers", "1", "--heads", "2", "--dim", "16", "--context", "16", "--batch", "4"]


@pytest.fixture
def sweep(tmp_path: Path) -> list[str]:
    """A sweep of a few seconds."""
    text = "".join(f"The {n} cats sat on {n * 7 % 13} mats.\n" for n in range(900))
    (tmp_path / "cats.txt").write_text(text)
    options = ["--over", "lr=0.0001:0.01", "--tokenizer", "char", "--minutes", "0.05"]
    return ["sweep", "cats.txt", *SMALL, *options, "--trials", "2"]


def test_it_resumes_after_ctrl_c_and_shows_a_table(
    cli: Cli, sweep: list[str], tmp_path: Path
) -> None:
    command = program(*sweep, "--json")
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stderr and process.stdout
    for line in process.stderr:
        if line.startswith("round 1 of 2, trial 1 of 2 (lr 0.0001)"):
            break
    process.send_signal(signal.SIGINT)
    printed, said = process.stdout.read(), process.stderr.read()
    assert process.wait() == 75, said
    assert said.endswith("saved; run the same command again to resume\n")
    stopped = json.loads(printed)
    assert stopped["run"] is None
    assert [trial["number"] for trial in stopped["trials"] if trial["results"]][-1] == 1

    shown = cli(*sweep)
    assert shown.returncode == 0, shown.stderr
    assert "round 1 of 2, trial 1 of 2" not in shown.stderr
    assert re.search(r"round 2 of 2, trial 1 of 1 \(lr 0.01\): \d.* bits per byte, ", shown.stderr)
    header, first, second, last = shown.stdout.splitlines()
    assert header.split() == ["lr", "round", "1", "round", "2"]
    assert re.fullmatch(r"1 +0\.01 +\d\.\d{3} +(\d\.\d{3})  best", first)
    assert re.fullmatch(r"2 +0\.0001 +\d\.\d{3}", second)
    bits = first.split()[3]
    assert last.startswith(f"runs/cats: {bits} bits per byte on the validation set")
    assert last.endswith("best of 2 trials (lr 0.01)")
    assert 'next: nanolm sample runs/cats --prompt "..."' in shown.stderr
    assert (tmp_path / "runs/cats-sweep/sweep.svg").read_text().startswith("<svg")
    assert cli("sample", "runs/cats", "--prompt", "The ", "--tokens", 5).returncode == 0


def test_seeds_are_averaged(cli: Cli, sweep: list[str]) -> None:
    place = sweep.index("--over") + 1
    sweep[place] = "lr=0.0001:0.01,seed=1:2"
    shown = cli(*sweep[:-1], "4")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"2 combinations.* 2 seeds each, 2 rounds", shown.stderr)
    header, first, second, last, chosen = shown.stdout.splitlines()
    assert header.split() == ["lr", "seeds", "round", "1", "round", "2"]
    assert re.fullmatch(r"1 +0\.01 +2 +\d\.\d{3} ± \d\.\d{3} +\d\.\d{3} ± \d\.\d{3}  best", first)
    assert re.fullmatch(r"2 +0\.0001 +2 +\d\.\d{3} ± \d\.\d{3}", second)
    assert "best of 4 trials (lr 0.01, seed " in last
    assert re.fullmatch(r".* mean over 2 seeds: \d\.\d{3} ± \d\.\d{3} bits per byte", chosen)


def test_skipped_combinations_are_named(cli: Cli, sweep: list[str]) -> None:
    sweep[sweep.index("--over") + 1] = "lr=0.0001:0.01,norm=rms:layer"
    shown = cli(*sweep[: sweep.index("--trials")])
    assert shown.returncode == 0, shown.stderr
    assert "1 of 4 combinations" in shown.stderr
    assert "skipped for lack of time: lr" in shown.stderr


def test_errors_are_reported_together() -> None:
    with pytest.raises(UsageError) as caught:
        main(["sweep", "x.txt", "--over", "lrr", "--steps", "5", "--dim", "0"])
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("--dim 0: ") and first.endswith("1 to 100,000")
    assert second.startswith("--over lrr: ") and second.endswith("did you mean lr?")
    assert third.startswith("--steps 5: ") and "--minutes" in third
    with pytest.raises(UsageError, match="nanolm sweep --over lr embedded:stories"):
        main(["sweep"])
