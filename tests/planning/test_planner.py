import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from nanolm.errors import UsageError
from nanolm.machine import available_threads, is_busy
from nanolm.model.config import GPTConfig, configure
from nanolm.model.device import choose_device, choose_dtype
from nanolm.model.size import non_embedding_parameters
from nanolm.planning import recipe, sizes
from nanolm.planning.planner import make_plan
from nanolm.planning.scaling_law import Forecast, Law, ngram_bits_per_byte
from nanolm.planning.sizes import TextStats, model_config
from nanolm.text.tokenizer import ByteLevel
from nanolm.text.vocabulary import counted_bits
from nanolm.training.settings import TrainSettings

OPEN = TrainSettings(corpus=("a.txt",), device="cpu")


def a_text(size: int, tokens: int | None = None) -> TextStats:
    return TextStats(vocab_size=512, size=size, tokens=tokens or size // 3, ngram_bits=lambda: 2.3)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace timings by the amount of arithmetic; returns the widths that were tried."""
    tried: list[int] = []

    def step_seconds(config: GPTConfig, batch: int, *rest: object) -> float:
        tried.append(config.dim)
        return 1e-9 * batch * config.context * sizes.arithmetic(config) / 16

    monkeypatch.setattr(sizes, "step_seconds", step_seconds)
    monkeypatch.setattr(
        sizes,
        "fit_to_machine",
        lambda settings, *rest: (replace(settings, workers=settings.workers or 2), []),
    )
    return tried


def test_given_settings_are_kept() -> None:
    asked = TrainSettings(
        corpus=("a.txt",), tokenizer="char", preset="mini", dim=60, lr=1e-4, steps=5, threads=3
    )
    settings = make_plan(asked, a_text(10**6)).settings
    assert (settings.dim, settings.lr, settings.steps, settings.threads) == (60, 1e-4, 5, 3)
    assert (settings.layers, settings.vocab_size) == (6, None)


@pytest.mark.parametrize("size", [4_000, 2_000_000])
@pytest.mark.parametrize("budget", [{}, {"steps": 50}, {"epochs": 0.5}, {"tokens": 10_000}])
def test_a_plan_is_complete_and_stable(size: int, budget: dict[str, Any], timed: list[int]) -> None:
    plan = make_plan(replace(OPEN, **budget), a_text(size))
    settings = plan.settings
    assert all(choice.reason for choice in plan.choices)
    assert settings.minutes is not None or settings.steps is not None
    again = make_plan(settings, a_text(size))
    assert again.settings == settings
    assert {choice.what for choice in again.choices} <= {"text"}
    assert model_config(settings, 400).problems() == []
    settings.check()


def test_more_time_is_for_a_larger_model(timed: list[int]) -> None:
    found = []
    for minutes in (1.0, 10.0, 100.0):
        plan = make_plan(replace(OPEN, minutes=minutes), a_text(20_000_000))
        assert plan.forecast and plan.settings.dim
        assert plan.forecast.seconds == pytest.approx(60 * minutes, rel=0.06)
        found.append((plan.settings.dim, -plan.forecast.bits_per_byte))
        shown = next(choice for choice in plan.choices if choice.what == "model")
        assert f"{plan.settings.layers} x {plan.settings.dim}: " in shown.reason
    assert found == sorted(found)
    assert found[0][0] < found[-1][0]
    assert 1 < len(timed) <= 3 * (sizes.MOST_TIMED + 1 + sizes.TIMED_AGAIN)


def test_a_trial_that_other_work_slowed_down(
    timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, text = replace(OPEN, minutes=10.0), a_text(20_000_000)
    quiet = make_plan(asked, text)
    seconds = sizes.step_seconds

    def disturbed(config: GPTConfig, *rest: Any) -> float:
        slow = config.dim == quiet.settings.dim and config.dim not in timed
        return seconds(config, *rest) * (1.1 if slow else 1.0)

    timed.clear()
    monkeypatch.setattr(sizes, "step_seconds", disturbed)
    plan = make_plan(asked, text)
    assert timed.count(quiet.settings.dim or 0) > 1
    assert plan.settings == quiet.settings and plan.forecast == quiet.forecast


def test_the_reason_for_not_taking_the_best_forecast(
    timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "AS_GOOD", 9.0)  # all count as equal, so the smallest is chosen
    plan = make_plan(replace(OPEN, minutes=10.0), a_text(20_000_000))
    shown = next(choice for choice in plan.choices if choice.what == "model")
    assert re.search(r"; the smallest within .*% of the best, because it is faster$", shown.reason)
    once = make_plan(replace(OPEN, minutes=10.0), a_text(200_000_000))  # hardly repeated
    monkeypatch.setattr(sizes, "AS_GOOD", 1.0)
    for plan in (once, make_plan(replace(OPEN, minutes=10.0), a_text(20_000_000))):
        shown = next(choice for choice in plan.choices if choice.what == "model")
        assert "the smallest" not in shown.reason


def test_given_settings_are_planned_around(timed: list[int]) -> None:
    asked = replace(OPEN, minutes=10.0, layers=5, context=64, batch=4)
    settings = make_plan(asked, a_text(20_000_000)).settings
    assert (settings.layers, settings.context, settings.batch) == (5, 64, 4)
    assert settings.dim and settings.heads
    timed.clear()
    settings = make_plan(replace(OPEN, minutes=10.0, preset="nano"), a_text(10**7)).settings
    assert (settings.layers, settings.dim, timed) == (3, 48, [48, 48])


@pytest.mark.parametrize(("layers", "heads", "dim", "context"), sizes.LADDER[:8])
def test_a_given_size_gets_the_same_context_as_a_chosen_one(
    layers: int, heads: int, dim: int, context: int, timed: list[int]
) -> None:
    by_hand = replace(OPEN, minutes=10.0, layers=layers, heads=heads, dim=dim)
    settings = make_plan(by_hand, a_text(20_000_000)).settings
    assert (settings.early_context or settings.context) == context


def test_a_small_text_is_not_seen_too_often(timed: list[int]) -> None:
    plan = make_plan(replace(OPEN, minutes=300.0), a_text(200_000))
    settings, config = plan.settings, model_config(plan.settings, 512)
    assert settings.steps and settings.batch and settings.context and settings.minutes == 300
    passes = settings.steps * settings.batch * settings.context / (200_000 // 3)
    assert passes == pytest.approx(recipe.MOST_PASSES, rel=0.05)
    assert isinstance(config, GPTConfig)
    assert non_embedding_parameters(config) <= sizes.PARAMETERS_PER_TOKEN * 200_000 / 3
    assert settings.weight_decay and settings.weight_decay > 1
    little = make_plan(replace(OPEN, preset="mini", steps=5), a_text(200_000))
    assert any("overfit" in choice.reason for choice in little.choices)


def test_the_remaining_time_is_for_teachers(
    timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, asked = a_text(200_000), replace(OPEN, minutes=300.0)
    alone = make_plan(replace(asked, teachers=0), text)
    plan = make_plan(asked, text)
    steps = plan.settings.steps
    assert plan.settings == replace(alone.settings, teachers=recipe.MOST_TEACHERS, steps=steps)
    assert steps and alone.settings.steps  # a single model may use the rest of the time
    few, more = recipe.MOST_PASSES, recipe.SPARE_PASSES
    assert alone.settings.steps == pytest.approx(steps * more / few, rel=0.01)
    assert make_plan(plan.settings, text).settings == plan.settings
    shown = next(choice for choice in plan.choices if choice.what == "teachers")
    assert f"{recipe.MOST_PASSES} epochs take " in shown.reason and "%" in shown.reason
    assert plan.forecast and alone.forecast and alone.forecast.seconds
    assert plan.forecast.bits_per_byte < alone.forecast.bits_per_byte
    # With less time there are fewer teachers, or none.
    each = (1 + recipe.TEACHER_OVERHEAD) * alone.forecast.seconds + recipe.TEACHER_SECONDS
    each /= 1 - recipe.STUDENT_SHARE
    size = {name: getattr(plan.settings, name) for name in ("layers", "heads", "dim", "batch")}
    for teachers, wanted in ((3, 3), (1, 0)):
        short = replace(OPEN, minutes=(teachers + 0.5) * each / 60, **size)
        assert make_plan(short, text).settings.teachers == wanted
    monkeypatch.setattr(sizes, "available_memory", lambda: 1_000)
    assert make_plan(asked, text).settings.teachers == 0


def test_a_smaller_model_leaves_time_for_teachers(timed: list[int]) -> None:
    text, asked = a_text(1_000_000), replace(OPEN, minutes=60.0)
    alone, plan = make_plan(replace(asked, teachers=0), text), make_plan(asked, text)
    assert plan.settings.teachers and not alone.settings.teachers
    assert (plan.settings.dim or 0) < (alone.settings.dim or 0)
    shown = next(choice for choice in plan.choices if choice.what == "model")
    assert shown.reason.endswith("; small enough to train several and distill them")
    assert plan.forecast and alone.forecast
    assert plan.forecast.bits_per_byte < alone.forecast.bits_per_byte
    # With more time, the larger model leaves enough for teachers, and is better than more of them.
    longer = make_plan(replace(asked, minutes=200.0), text)
    assert longer.settings.teachers and longer.settings.dim == alone.settings.dim


def test_windows_grow_on_a_cpu_when_the_learning_rate_decays(timed: list[int]) -> None:
    asked = replace(OPEN, minutes=3.0)
    plain = make_plan(replace(asked, context=128, batch=24), a_text(2_000_000)).settings
    grown = make_plan(asked, a_text(2_000_000)).settings
    assert (plain.early_context, plain.context, plain.batch) == (None, 128, 24)
    assert (grown.early_context, grown.context, grown.batch) == (128, 256, 12)
    assert (grown.weight_decay, grown.average) == (plain.weight_decay, plain.average)
    for workers, batch in ((4, 24), (8, 16)):  # 24 rows cannot be halved among 8 workers
        shared = make_plan(replace(asked, workers=workers), a_text(2_000_000)).settings
        assert (shared.batch, shared.context) == (batch // 2, 256)
    short = TextStats(512, 2_000_000, 600_000, lambda: 2.3, shortest=200)
    for settings, text in (
        (replace(asked, positions="learned"), a_text(2_000_000)),
        (replace(asked, teachers=2), a_text(2_000_000)),
        (replace(asked, compile=True), a_text(2_000_000)),
        (replace(asked, minutes=300.0), a_text(60_000)),  # with teachers
        (asked, short),  # the smallest part of a mix
    ):
        other = make_plan(settings, text).settings
        assert other.early_context is None, settings
        assert other.context
        assert other.context <= 128 or settings.minutes == 300


def test_a_text_that_took_long_leaves_time_to_plan(timed: list[int]) -> None:
    make_plan(replace(OPEN, minutes=1.0), a_text(20_000_000), elapsed=lambda: 40.0)
    assert len(set(timed)) > 1  # more than one size was tried


def test_a_given_number_of_teachers_shares_the_time(timed: list[int]) -> None:
    text, asked = a_text(20_000_000), replace(OPEN, minutes=10.0, layers=2, dim=64, teachers=3)
    plan = make_plan(asked, text)
    assert plan.settings.teachers == 3 and plan.settings.steps and plan.forecast
    share = (1 - recipe.STUDENT_SHARE) / 3
    assert plan.forecast.seconds == pytest.approx(600 * share, rel=0.06)
    assert make_plan(replace(asked, teachers=None), text).settings.teachers == 0
    with pytest.raises(UsageError, match="torchrun"):
        make_plan(asked, text, processes=2)
    small = make_plan(replace(OPEN, minutes=300.0), a_text(200_000), processes=2)
    assert small.settings.teachers == 0


def test_muon_only_where_it_pays() -> None:
    config = configure("modern", vocab_size=512, layers=4, heads=4, dim=128, context=64)
    assert recipe.optimizer(config, batch=32)[0] == "muon"
    assert recipe.optimizer(config, batch=2)[0] == "adamw"
    lstm = configure("lstm", vocab_size=512, layers=4, dim=128, context=64)
    assert recipe.optimizer(lstm, batch=32)[0] == "adamw"


def test_a_family_fills_in_its_switches() -> None:
    asked = TrainSettings(
        corpus=("a.txt",), family="gpt2", preset="nano", tied=False, kv_heads=1, steps=3
    )
    settings = make_plan(asked, a_text(10**5)).settings
    assert (settings.positions, settings.norm, settings.bias) == ("learned", "layer", True)
    assert (settings.hidden, settings.rope_base) == (192, None)
    assert (settings.tied, settings.kv_heads) == (False, 1)
    settings = make_plan(replace(OPEN, family="lstm"), a_text(10**5)).settings
    assert (settings.layers, settings.dim, settings.tied) == (4, 128, False)
    assert (settings.heads, settings.positions, settings.hidden) == (None, None, None)
    settings.check()


def test_a_model_to_start_from_decides_its_own_shape() -> None:
    base = configure("gpt2", vocab_size=50_257, layers=12, heads=12, dim=768, context=1024)
    plan = make_plan(replace(OPEN, start_from="gpt2"), a_text(10**6), base)
    settings = plan.settings
    assert (settings.layers, settings.family, settings.tokenizer) == (None, None, None)
    assert (settings.context, settings.batch, settings.optimizer) == (256, 4, "adamw")
    assert settings.lr and 0.8e-4 < settings.lr < 1.5e-4
    assert all(choice.reason for choice in plan.choices)
    settings.check()


def test_a_text_shorter_than_the_context() -> None:
    plan = make_plan(OPEN, a_text(20, tokens=12))
    assert plan.settings.context == 11
    assert any("only 12 training tokens" in choice.reason for choice in plan.choices)
    early = replace(OPEN, context=64, early_context=8, steps=3)
    assert make_plan(early, a_text(2_000_000)).settings.early_context == 8
    assert make_plan(early, a_text(20, tokens=12)).settings.early_context is None


def test_the_ngram_bits_are_those_of_the_whole_text() -> None:
    dice = np.random.default_rng(5)
    train, val = (
        np.concatenate([dice.integers(32, 34, size), dice.integers(32, 96, size)]).astype(np.uint16)
        for size in (100_000, 60_000)
    )
    assert 3 < ngram_bits_per_byte(train, val, ByteLevel([])) < 5  # 1 and 6 for the halves alone


def test_long_contexts_that_help_lower_the_prediction() -> None:
    """Sentences of a grammar, whose next byte depends on the beginning of the sentence."""
    dice = np.random.default_rng(5)
    starts = dice.integers(65, 91, (8_000, 1))
    sentences = np.hstack([starts, np.full((8_000, 7), 32), starts, np.full((8_000, 1), 10)])
    ids = sentences.ravel().astype(np.uint16)
    counted = list(islice(counted_bits(ids, ids[:20_000], 258), 9))
    bits = ngram_bits_per_byte(ids, ids[:20_000], ByteLevel([]))
    assert bits < 0.8 * counted[-1] / 20_000 < 0.8 * counted[6] / 20_000


def test_a_forecast_is_corrected_by_the_trend() -> None:
    forecast = Forecast(2.0, 60.0, 3.0)

    def corrected(progress: float, bits: float, slope: float, **how: float) -> float:
        return forecast.correct(progress, bits, **{"loss": 4.0, **how}, slope=slope)

    falling, flat = (corrected(0.4, 2.1, slope) for slope in (-0.3, 0.0))
    assert falling < flat < 2.1 == pytest.approx(corrected(0.9999, 2.1, 0.0), rel=1e-4)
    assert corrected(0.4, 2.1, 0.5) == flat  # a rising loss does not go on rising
    assert flat < corrected(0.4, 2.1, 0.0, averaged=0.1)  # an EMA has had most of the decay's gain,
    assert flat > corrected(0.4, 2.1, 0.0, loss=3.0)  # which is the same number of nats per token
    assert corrected(0.4, 4.0, 0.0) == 2.0  # text made by rules
    assert corrected(0.4, 9.0, 0.0) > 7.0  # the plan was wrong
    assert corrected(0.05, 2.1, 0.0) == corrected(0.2, 9.0, 0.0) == 2.0  # too early
    assert 2.0 > corrected(0.2, 2.1, 0.0) > corrected(0.3, 2.1, 0.0) > corrected(0.4, 2.1, 0.0)
    assert corrected(0.4, 1e-9, 0.0, loss=0.0) > 0  # a loss of zero


@pytest.mark.parametrize("budget", [{"epochs": 2.0}, {"tokens": 66_666}])
def test_epochs_and_tokens_become_steps(budget: dict[str, Any]) -> None:
    asked = TrainSettings(corpus=("a.txt",), preset="nano", **budget)
    settings = make_plan(asked, a_text(10**5)).settings
    assert (settings.steps, settings.epochs, settings.tokens) == (round(66_666 / 1024), None, None)


def test_the_law_knows_size_text_and_passes() -> None:
    law = Law(ngram_bits=2.3, size=1_000_000)
    base = law.bits_per_byte(1e6, 5e6, 1000)
    assert law.bits_per_byte(4e6, 5e6, 1000) < base < law.bits_per_byte(1e6, 1e6, 1000)
    assert law.bits_per_byte(1e6, 5e6, 100) > base
    assert Law(2.3, 10_000_000).bits_per_byte(1e6, 5e6, 1000) < base  # a single pass
    assert law.effective_bytes(1e6) == 1e6
    assert law.effective_bytes(1e9) == pytest.approx(law.effective_bytes(1e8), rel=1e-6)


@pytest.mark.parametrize("bits", [0.2, 2.0])
def test_the_predicted_curve_falls_to_the_prediction(bits: float) -> None:
    forecast = Forecast(bits, 60.0, 3.0)
    curve = [forecast.expected(learned / 100) for learned in range(101)]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] > 1.5 + bits
    assert curve[-1] == bits


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="try --device cpu"):
        choose_device("cuda")
    with pytest.raises(UsageError, match="auto, cpu"):
        choose_device("tpu")
    assert choose_device("cpu")[0] == "cpu"
    with pytest.raises(UsageError, match=r"--dtype float8: needs .* GPU"):
        choose_dtype("float8", "cpu")


def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert available_threads() == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert available_threads() >= 1


def test_a_busy_machine_is_recognized() -> None:
    spinning = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spinning) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        deadline = time.monotonic() + 20  # processes take a while to start
        while not is_busy():
            assert time.monotonic() < deadline
    finally:
        for other in others:
            other.kill()
            other.wait()
