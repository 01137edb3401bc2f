"""`nanolm bench` on the command line."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import Cli
from documents import blocks

import nanolm
from nanolm.bench.measure import BenchReport, Measurement
from nanolm.cli.bench import show_results

CHECKOUT = Path(__file__).parents[2]
DOCUMENTED = {
    line.partition("#")[0].strip()
    for page in [CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md")]
    for block in blocks(page)
    if block.language == "bash"
    for line in block.text.splitlines()
    if line.startswith("nanolm bench ")
}


def test_a_table_of_results_and_costs(cli: Cli) -> None:
    shown = cli("bench", "--preset", "nano", "--seconds", "0.1", "--device", "cpu", "--profile")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("of peak: ") for line in lines)
    begin = next(number for number, line in enumerate(lines) if line.startswith("preset"))
    first = lines[begin + 1].split()
    assert first[:2] == ["nano", "training"]
    assert first[3] == "tokens/s"
    assert first[4].endswith("%")
    notes = shown.stderr.splitlines()
    assert notes[0].startswith("nano: training, 16 x 64 tokens")
    assert all(note.startswith("nano: ") for note in notes) and "profiling" in notes[-1]
    begin = next(number for number, line in enumerate(lines) if line.startswith("operator"))
    costs = [line.split() for line in lines[begin + 1 :]]
    assert len(costs) == 11
    assert costs[-1][0] == "other"
    assert 0 < sum(float(row[3].rstrip("%")) for row in costs[:10]) <= 100


def test_json_output(cli: Cli) -> None:
    arguments = ("--preset", "nano", "--seconds", "0.1", "--device", "cpu", "--family", "gpt2")
    shown = cli("bench", *arguments, "--against", "transformers", "--profile", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert list(found) == ["machine", "results", "profiles"]
    assert found["machine"]["nanolm"] == nanolm.__version__
    assert found["machine"]["threads"] == 1
    assert {tuple(row) for row in found["results"]} == {
        ("what", "shape", "value", "unit", "of_peak")
    }
    assert {row["shape"] for row in found["results"]} == {"nano"}
    values = {row["what"]: row["value"] for row in found["results"]}
    ours, theirs = values["training"], values["training, transformers"]
    assert values["nanolm / transformers"] == pytest.approx(ours / theirs)
    assert values["step"] == pytest.approx(1000 * 16 * 64 / ours)
    assert values["sampling"] > 0
    assert values["memory"] is None
    for row in found["results"]:
        if row["what"].startswith("training"):
            # The weights of nano, its 512 token embeddings included, and its attention.
            weights = 3 * (12 * 48 * 48 + 13 * 48) + 2 * 48 + 512 * 48
            flops = 6 * weights + 12 * 3 * 48 * 64
            of_peak = row["value"] * flops / values["matrix products"]
            assert row["of_peak"] == pytest.approx(of_peak)
        else:
            assert row["of_peak"] is None
    profile = found["profiles"]["nano"]
    assert len(profile["costs"]) >= 10
    assert sum(cost["share"] for cost in profile["costs"]) <= 1


def test_against_other_programs(cli: Cli) -> None:
    arguments = ("--preset", "nano", "--seconds", "0.1", "--device", "cpu")
    shown = cli("bench", *arguments, "--against", "nanogpt", "--json")
    assert shown.returncode == 0, shown.stderr
    found = {row["what"]: row["value"] for row in json.loads(shown.stdout)["results"]}
    ours, theirs = found["training"], found["training, nanogpt"]
    assert found["nanolm / nanogpt"] == pytest.approx(ours / theirs)
    pytest.importorskip("xllamacpp")
    shown = cli("bench", *arguments, "--against", "llama.cpp")
    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for row in ("sampling, int8", "llama.cpp, Q8_0", "int4 / llama.cpp"):
        assert row in shown.stdout
    wrong = cli("bench", *arguments, "--family", "lstm", "--against", "llama.cpp")
    assert wrong.returncode == 2 and "try --family modern" in wrong.stderr
    wrong = cli("bench", *arguments, "--family", "lstm", "--against", "nanogpt")
    assert wrong.returncode == 2 and "try --family gpt2" in wrong.stderr


def test_all_mistakes_are_reported_together(cli: Cli) -> None:
    shown = cli("bench", "--preset", "nanno", "--against", "torch", "--seconds", "-1")
    assert shown.returncode == 2
    assert "--preset nanno: " in shown.stderr and " nano, micro, mini" in shown.stderr
    assert "did you mean nano?" in shown.stderr
    assert re.search("--against torch: .*transformers", shown.stderr)
    assert re.search(r"--seconds -1: .*0\.01 to 3,600", shown.stderr)


def test_scaling_estimates(cli: Cli) -> None:
    arguments = ("--preset", "nano", "--seconds", "0.05", "--device", "cpu", "--bandwidth", "0.5")
    shown = cli("bench", *arguments, "--scale", "4,1,16", "--json")
    assert shown.returncode == 0, shown.stderr
    one, four, many = json.loads(shown.stdout)["estimates"]
    assert [each["processes"] for each in (one, four, many)] == [1, 4, 16]
    assert (one["exchange"], one["efficiency"], one["grown"]) == (0, 1, 1)
    # Ring all-reduce sends each gradient twice, at half a gigabyte per second; Muon's updates
    # once, if it is Muon.
    with_muon = four["exchange"] / (4 * 0.75 / 5e8)
    assert with_muon == pytest.approx(many["exchange"] / (4 * 15 / 16 / 5e8))
    hidden = max(0, four["exchange"] - four["compute"] / 2)
    assert four["shown"] >= hidden - 1e-9
    assert 0 < four["efficiency"] < 2
    assert four["rows"] == 4 and many["rows"] == 1
    table = cli("bench", *arguments, "--scale", "1,4")
    assert table.returncode == 0
    assert "0.5 GB/s" in table.stdout
    wrong = cli("bench", "--scale", "1,x", "--bandwidth", "0", "--profile")
    assert wrong.returncode == 2
    assert "such as 1,8,64" in wrong.stderr and "--bandwidth 0" in wrong.stderr


def test_an_unknown_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"device": "cuda", "name": "NVIDIA \x1b[31m" + "Very " * 20, "dtype": "bfloat16"}
    machine |= {"torch": "2.13.0+cu130", "nanolm": nanolm.__version__}
    results = [
        Measurement("training, transformers", "gpt2-medium", 123_456_789.0, "tokens/s", None),
        Measurement("memory, transformers", "gpt2-medium", 141_000_000_000, "bytes"),
        Measurement("nanolm / transformers", "gpt2-medium", 12.34, "times"),
    ]
    show_results(BenchReport(machine, results))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    rows = [line.split() for line in shown.splitlines()[-3:]]
    assert rows[0] == ["gpt2-medium", "training,", "transformers", "123,456,789", "tokens/s", "n/a"]
    assert rows[1] == ["memory,", "transformers", "141,000", "MB"]
    assert rows[2] == ["nanolm", "/", "transformers", "12.3", "times"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(cli: Cli) -> None:
    arguments = ("--preset", "mini", "--seconds", "0.5", "--against", "transformers", "--profile")
    shown = cli("bench", *arguments, "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    values = {row["what"]: row["value"] for row in found["results"]}
    assert values["memory"] > 1e6
    assert values["memory, transformers"] > 1e6
    assert values["sampling, 64 rows"] > values["sampling"] > 0
    assert values["training"] > 0
    shares = [cost["share"] for cost in found["profiles"]["mini"]["costs"]]
    assert len(shares) >= 10
    assert 0.1 < sum(shares) <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("line", sorted(DOCUMENTED))
def test_documented_commands_on_a_gpu(line: str, cli: Cli) -> None:
    if "llama.cpp" in line:
        pytest.importorskip("xllamacpp")
    shown = cli(*line.split()[1:], "--seconds", "0.5")
    assert shown.returncode == 0, shown.stderr
    preset = line.partition("--preset ")[2].split()[0]
    assert preset in shown.stdout and " ms" in shown.stdout
