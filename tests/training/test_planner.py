from dataclasses import replace

import pytest
import torch

from nanolm.errors import UsageError
from nanolm.machine import available_threads
from nanolm.model.config import configure
from nanolm.model.device import choose_device, choose_dtype
from nanolm.text.tokenizer import ByteLevel, Characters
from nanolm.training.planner import choose_settings, model_config
from nanolm.training.settings import TrainSettings

OPEN = TrainSettings(corpus=("a.txt",))
BPE = ByteLevel([(97, 98), (256, 99)])


def test_what_is_asked_for_is_kept() -> None:
    asked = TrainSettings(
        corpus=("a.txt",), tokenizer="char", preset="mini", dim=60, lr=1e-4, steps=5, threads=3
    )
    settings, _ = choose_settings(asked, Characters(["a"]), 10**6, 10**6)
    assert (settings.dim, settings.lr, settings.steps, settings.threads) == (60, 1e-4, 5, 3)
    assert (settings.layers, settings.vocab_size) == (6, None)


@pytest.mark.parametrize("size", [4_000, 2_000_000])
def test_nothing_is_left_open_and_a_second_look_changes_nothing(size: int) -> None:
    settings, choices = choose_settings(OPEN, BPE, size, size // 3)
    assert all(choice.reason for choice in choices)
    assert (settings.tokenizer, settings.vocab_size) == ("bpe", BPE.vocab_size)
    assert (settings.minutes is None) != (settings.steps is None)
    assert choose_settings(settings, BPE, size, size // 3) == (settings, [])
    assert model_config(settings, 400).problems() == []


def test_a_family_fills_in_its_switches() -> None:
    asked = TrainSettings(corpus=("a.txt",), family="gpt2", preset="nano", tied=False, kv_heads=1)
    settings, _ = choose_settings(asked, BPE, 10**5, 50_000)
    assert (settings.positions, settings.norm, settings.bias) == ("learned", "layer", True)
    assert (settings.hidden, settings.rope_base) == (192, None)
    assert (settings.tied, settings.kv_heads) == (False, 1)
    settings, _ = choose_settings(replace(OPEN, family="lstm"), BPE, 10**5, 50_000)
    assert (settings.layers, settings.dim, settings.tied) == (4, 128, False)
    assert (settings.heads, settings.positions, settings.hidden) == (None, None, None)
    settings.check()


def test_a_model_to_start_from_decides_its_own_shape() -> None:
    base = configure("gpt2", vocab_size=50_257, layers=12, heads=12, dim=768, context=1024)
    settings, choices = choose_settings(
        replace(OPEN, start_from="gpt2", device="cpu"), BPE, 10**6, 10**5, base
    )
    assert (settings.layers, settings.family, settings.tokenizer) == (None, None, None)
    assert (settings.context, settings.batch) == (256, 4)
    assert settings.lr == pytest.approx(3e-4 * (128 / 768) ** 0.5, rel=1e-3)
    assert all(choice.reason for choice in choices)
    settings.check()


def test_a_text_shorter_than_the_context() -> None:
    settings, choices = choose_settings(OPEN, BPE, 20, 12)
    assert settings.context == 11
    assert any("only 12 training tokens" in choice.reason for choice in choices)


def test_epochs_become_steps() -> None:
    asked = TrainSettings(corpus=("a.txt",), preset="nano", epochs=2)
    settings, _ = choose_settings(asked, BPE, 10**5, 50_000)
    assert (settings.steps, settings.epochs) == (round(2 * 50_000 / 1024), None)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="try --device cpu"):
        choose_device("cuda")
    with pytest.raises(UsageError, match="there is auto"):
        choose_device("tpu")
    assert choose_device("cpu")[0] == "cpu"
    with pytest.raises(UsageError, match="--dtype float8: needs a GPU"):
        choose_dtype("float8", "cpu")


def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert available_threads() == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert available_threads() >= 1
