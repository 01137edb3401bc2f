"""How the cost of a step grows."""

import json
import math

import pytest
import torch
from conftest import Cli

from nanolm.bench import grow
from nanolm.bench.grow import growth, peak_memory, variants
from nanolm.bench.settings import SMALLEST, BenchSettings
from nanolm.model.config import configure

NANO = {"vocab_size": 64, "layers": 1, "heads": 1, "dim": 16, "context": 8}


@pytest.mark.parametrize("name", SMALLEST)
def test_one_dimension_doubles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grow, "MOST_POINTS", 3)
    base = configure("gpt2", **NANO)
    sizes: dict[str, list[int]] = {"context": [], "layers": [], "vocab": [], "batch": []}
    for config, rows, size in variants(base, 2, name):
        assert not config.problems()
        values = (config.context, config.layers, config.vocab_size, rows)
        for key, value in zip(sizes, values, strict=True):
            sizes[key].append(value)
        assert sizes[name][-1] == size
    first = SMALLEST[name]
    assert sizes.pop(name) == [first, 2 * first, 4 * first]
    assert all(len(set(others)) == 1 for others in sizes.values())


def test_expected_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the batch is twice the arithmetic; attention grows with the square of the context."""
    monkeypatch.setattr(grow, "MOST_POINTS", 4)
    for name, low, high in (("batch", 1.0, 1.0), ("context", 1.0, 2.0), ("layers", 0.0, 1.0)):
        settings = BenchSettings(("nano",), device="cpu", seconds=1.0, grow=name)
        first, *points = growth(settings, note=lambda text: None).points
        assert (first.power, first.expected) == (None, None)
        expected = [point.expected for point in points if point.expected]
        assert len(expected) == 3
        assert all(low - 1e-9 <= each <= high + 1e-9 for each in expected)
        assert expected == sorted(expected)  # the part that grows dominates more and more
        assert all(point.power is not None and math.isfinite(point.power) for point in points)


def test_it_ends_before_a_step_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grow, "FEWEST_STEPS", 1_000_000)
    settings = BenchSettings(("nano",), device="cpu", seconds=0.01, grow="batch")
    assert len(growth(settings, note=lambda text: None).points) == 1


def test_peak_memory() -> None:
    with peak_memory("cpu") as peak:
        large = torch.ones(20_000_000)  # 80 MB
        del large
        found = peak()
    assert found is None or 70e6 < found < 300e6


def test_the_table_and_its_json(cli: Cli) -> None:
    arguments = ("bench", "--preset", "nano", "--device", "cpu", "--seconds", 1)
    shown = cli(*arguments, "--grow", "layers")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    begin = next(number for number, row in enumerate(rows) if row[:1] == ["layers"])
    assert [row[0] for row in rows[begin + 1 : begin + 4]] == ["1", "2", "4"]
    assert "ms per step, by layers" in shown.stdout
    found = json.loads(cli(*arguments, "--grow", "batch", "--json").stdout)
    assert (found["grow"], found["preset"]) == ("batch", "nano") and found["machine"]["threads"]
    keys = {"size", "tokens", "seconds", "bytes", "power", "expected"}
    assert all(set(point) == keys for point in found["points"])


def test_mistakes(cli: Cli) -> None:
    arguments = ("--grow", "depth", "--scale", "1,8", "--preset", "nano", "--preset", "micro")
    wrong = cli("bench", *arguments, "--profile")
    assert wrong.returncode == 2
    for text in ("--grow depth: choose from context, layers", "--profile", "one --preset"):
        assert text in wrong.stderr
