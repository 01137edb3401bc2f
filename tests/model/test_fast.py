"""Speedups for training and decoding: added, removed, and only for supported switches."""

import copy
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import PUBLISHED, PUBLISHED_FAMILIES, SHAPE, gpt_config, lively
from torch import Tensor

from nanolm.model import gpt
from nanolm.model.base import Model
from nanolm.model.config import GPTConfig, configure, unsupported
from nanolm.model.fast import training
from nanolm.model.fast.training import plain, speed_up, speedups_of
from nanolm.model.positions import rotate
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
@pytest.mark.parametrize("family", ["modern", "gpt2", *PUBLISHED_FAMILIES])
def test_it_learns_the_same_and_can_be_taken_off(family: str, speedups: dict[str, Any]) -> None:
    changes = PUBLISHED_FAMILIES.get(family)
    model = lively(configure(family, **SHAPE) if changes is None else gpt_config(**changes))
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


SUPPORTED = {"attention_bias", "unrotated_layers"}  # by all kernels


@pytest.mark.parametrize("switch", PUBLISHED)
def test_kernels_stand_aside_for_switches_of_published_models(switch: str) -> None:
    """Each is supported, or in the list of one kind of kernel."""
    config = replace(gpt_config(), **{switch: PUBLISHED[switch][-1]})
    assert isinstance(config, GPTConfig)
    blocks = unsupported(config, training.FUSED_BLOCKS)
    attention = unsupported(config, training.FUSED_ATTENTION)
    assert blocks + attention == ([] if switch in SUPPORTED else [switch])
    decoding = pytest.importorskip("nanolm.model.fast.decoding")
    assert unsupported(config, decoding.KNOWN) == blocks + attention


def test_every_field_is_a_size_or_known_to_the_kernels() -> None:
    """A new switch must be added to a list above, or here if all kernels support it."""
    sizes = {"vocab_size", "layers", "dim", "context", "heads", "kv_heads", "head_width", "hidden"}
    values = {"dropout", "norm_epsilon", "rope_base", "rope_scaling", "qk_norm", "bias", "tied"}
    lists = {*training.FUSED_BLOCKS, *training.FUSED_ATTENTION, "feed_forward"}
    known = lists | sizes | values | SUPPORTED
    assert {field.name for field in fields(GPTConfig)} == known


class RecordingKernels:
    """Plain functions instead of kernels, which count their calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def linear(self, layer: torch.nn.Linear, x: Tensor) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    def split(self, qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        self.calls["split"] += 1
        parts = [heads, kv_heads, kv_heads]
        return tuple(qkv.unflatten(2, (sum(parts), -1)).split(parts, dim=2))

    def qk_norm_rope(
        self, qkv: Tensor, cosines: Tensor, sines: Tensor, heads: int, kv_heads: int, *norms: Any
    ) -> tuple[Tensor, ...]:
        self.calls["qk_norm_rope"] += 1
        q, k, v = self.split(qkv, heads, kv_heads)
        if norms[0] is not None:
            q, k = (F.rms_norm(t, w.shape, w, norms[2]) for t, w in ((q, norms[0]), (k, norms[1])))
        return *(rotate(t.transpose(1, 2), (cosines, sines)).transpose(1, 2) for t in (q, k)), v

    def add_norm(
        self,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        layer: bool,
    ) -> tuple[Tensor, Tensor]:
        self.calls["add_norm"] += 1
        x = x if y is None else x + y
        if layer:
            return x, F.layer_norm(x, weight.shape, weight, bias, eps)
        return x, F.rms_norm(x, weight.shape, weight, eps)

    def embedding(self, layer: torch.nn.Embedding, x: Tensor) -> Tensor:
        return F.embedding(x, layer.weight)

    swiglu = staticmethod(gpt.NONLINEARITIES["swiglu"])


USED = {  # which kernels each family may use; with two layers, there are five norms
    "modern": {"qk_norm_rope": 2, "split": 2, "add_norm": 5},
    "qwen2": {"qk_norm_rope": 2, "split": 2, "add_norm": 5},
    "smollm3": {"qk_norm_rope": 1, "split": 2, "add_norm": 5},
    "mistral": {"add_norm": 5},
    "olmo2": {},
    "gpt_neox": {},
}


@pytest.mark.parametrize("family", USED)
def test_kernels_are_used_only_where_they_are_right(family: str) -> None:
    model = lively(gpt_config(**PUBLISHED_FAMILIES.get(family, {})))
    wanted = gradients(model)
    kernels = RecordingKernels()
    speed_up(model, kernels=kernels)
    same(gradients(model), wanted)
    assert kernels.calls == USED[family]


def test_a_new_nonlinearity_goes_by_the_plain_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpt.NONLINEARITIES, "invented", torch.sin)
    model = lively(replace(gpt_config(), feed_forward="invented"))  # type: ignore[arg-type]
    wanted = gradients(model)
    same(gradients(speed_up(model)), wanted)
