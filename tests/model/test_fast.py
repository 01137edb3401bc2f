"""Speedups for training and decoding: added, removed, and only for supported switches."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import SHAPE, gpt_config, lively
from torch import Tensor

from nanolm.model import gpt
from nanolm.model.base import Model
from nanolm.model.config import GPTConfig, configure, unsupported
from nanolm.model.fast import training
from nanolm.model.fast.training import plain, speed_up, speedups_of
from nanolm.training.loss import next_token_loss

IDS = torch.randint(SHAPE["vocab_size"], (2, SHAPE["context"]))


def gradients(model: Model) -> dict[str, Tensor]:
    model.train().zero_grad()
    loss = next_token_loss(model.head, model.hidden_states(IDS), IDS)
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **named}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("speedups", [{}, {"math_attention": True}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("family", ["modern", "gpt2"])
def test_it_learns_the_same_and_can_be_taken_off(family: str, speedups: dict[str, Any]) -> None:
    model = lively(configure(family, **SHAPE))
    wanted, names = gradients(model), list(model.state_dict())
    modules = [(name, type(module)) for name, module in model.named_modules()]
    inside = [set(module.__dict__) for module in model.modules()]
    assert speed_up(model, **speedups) is model
    same(gradients(model), wanted)
    assert list(model.state_dict()) == names
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    other = copy.deepcopy(model)
    other.zero_grad()
    same(gradients(other), wanted)
    assert speedups_of(other) == speedups_of(model)
    plain(model)
    assert [set(module.__dict__) for module in model.modules()] == inside
    same(gradients(model), wanted)


def test_what_is_not_named_stays() -> None:
    model = speed_up(lively(gpt_config()), math_attention=True)
    speed_up(model, recompute=True)
    assert speedups_of(model) == training.Speedups(math_attention=True, recompute=True)


INVENTED = ("positions", "norm", "norm_place", "feed_forward")


@pytest.mark.parametrize("switch", INVENTED)
def test_the_plain_model_refuses_what_it_does_not_know(switch: str) -> None:
    config = replace(gpt_config(), **{switch: "invented"})  # type: ignore[arg-type]
    with pytest.raises((ValueError, KeyError), match="invented"):
        gpt.GPT(config)(IDS)


@pytest.mark.parametrize("switch", INVENTED)
def test_no_kernel_is_for_what_it_does_not_know(switch: str) -> None:
    config = replace(gpt_config(), **{switch: "invented"})  # type: ignore[arg-type]
    assert isinstance(config, GPTConfig)
    known: dict[str, Any] = {**training.FUSED_BLOCKS, **training.FUSED_ATTENTION}
    assert switch in unsupported(config, known) or switch == "feed_forward"
    decoding = pytest.importorskip("nanolm.model.fast.decoding")
    assert unsupported(config, decoding.KNOWN) == [switch]
    assert not unsupported(gpt_config(), decoding.KNOWN)


def test_a_new_nonlinearity_goes_by_the_plain_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpt.NONLINEARITIES, "invented", torch.sin)
    model = lively(replace(gpt_config(), feed_forward="invented"))  # type: ignore[arg-type]
    wanted = gradients(model)
    same(gradients(speed_up(model)), wanted)
