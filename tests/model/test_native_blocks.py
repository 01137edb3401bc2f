"""All blocks of a model in one call of a C function, against the plain model."""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import gpt_config, lively
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from nanolm.model.base import Model
from nanolm.model.config import GPTConfig
from nanolm.model.fast import native
from nanolm.model.fast.native import blocks
from nanolm.model.fast.training import speed_up

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="there is no C compiler"),
    pytest.mark.skipif(not blocks.sgemm(), reason="torch does not export its matrix product"),
]
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int)
ONE_OPENMP = blocks.one_openmp
SHAPE: dict[str, Any] = {"vocab_size": 50, "layers": 3, "heads": 2, "dim": 32, "context": 24}
KINDS: dict[str, dict[str, Any]] = {
    "modern": {},
    "grouped queries": {"heads": 4, "kv_heads": 2, "dim": 64},
    "wide heads": {"heads": 1, "dim": 48},
    "without query norms": {"qk_norm": False},
    "some layers not rotated": {"qk_norm": False, "unrotated_layers": (1,)},
    "no positions": {"positions": "none", "qk_norm": False},
    "gpt2": {"norm": "layer", "bias": True, "positions": "learned", "qk_norm": False},
    "gelu": {"feed_forward": "gelu", "norm": "layer", "qk_norm": False},
    "narrow": {"hidden": 20},
}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "narrow heads": {"heads": 4},
    "another nonlinearity": {"feed_forward": "relu2"},
    "layer norms of queries": {"norm": "layer"},
    "parallel": {"parallel_residual": True},
    "alibi": {"positions": "alibi", "qk_norm": False},
}


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def shared_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, the results are the same, only slower."""
    monkeypatch.setattr(blocks, "one_openmp", lambda: True)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the C functions that are called."""
    names: list[str] = []

    def call(name: str, *arguments: Any) -> None:
        names.append(name)
        original(name, *arguments)

    original = native.call
    monkeypatch.setattr(native, "call", call)
    return names


def config_of(**changes: Any) -> GPTConfig:
    return gpt_config(**{**SHAPE, **changes})


def results(model: Model, ids: Tensor) -> dict[str, Tensor]:
    """Of training and of evaluation."""
    model.train().zero_grad()
    x = model.hidden_states(ids)
    x.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        evaluated = model.eval().hidden_states(ids[:4, :7])
    return {"x": x.detach(), "evaluated": evaluated, **found}


def alike(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert found.keys() == exact.keys()
    for name, wanted in exact.items():
        assert (found[name] - wanted).norm() <= 1e-5 * wanted.norm() + 1e-7, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [4, 5])
def test_like_the_plain_model(kind: str, batch: int, called: list[str]) -> None:
    model, ids = lively(config_of(**KINDS[kind])).double(), torch.randint(50, (batch, 24))
    exact = results(model, ids)
    alike(results(speed_up(model.float(), kernels=native), ids), exact)
    assert [name for name in called if "transform" in name][:2] == [
        "transform",
        "transform_backward",
    ]
    assert "attention" not in called
    # The last layers, from the output of the others.
    states = model.frozen_states(ids, 1)
    assert states is not None
    torch.testing.assert_close(
        model.hidden_states_from(states, 1), model.hidden_states(ids), rtol=1e-4, atol=1e-4
    )
    assert model.hidden_states_from(states, 3).shape == states.shape


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_other_models(kind: str, called: list[str]) -> None:
    model = speed_up(lively(config_of(**UNSUPPORTED[kind])).train(), kernels=native)
    model.hidden_states(torch.randint(50, (4, 24))).sum().backward()
    assert "transform" not in called


def test_other_cases(called: list[str], monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    model: Any = speed_up(lively(config_of()).train(), kernels=native)
    ids = torch.randint(50, (4, 24))
    model.hidden_states(ids[:1])  # one text for two threads
    assert ("transform" in called) == (threads == 1)
    called.clear()
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "sgemm", lambda: None)
        model.hidden_states(ids)
        speed_up(model, math_attention=True).hidden_states(ids)
    model.hidden_states(ids)  # still with explicit products
    speed_up(model, math_attention=False)
    model.blocks[0].attention.out.weight.requires_grad_(False)
    model.hidden_states(ids)
    assert "transform" not in called
    with torch.no_grad():
        model.hidden_states(ids)
    assert called[-1] == "transform"
    model.requires_grad_(True)
    monkeypatch.setattr(blocks, "one_openmp", lambda: False)
    called.clear()
    model.hidden_states(ids)
    assert ("transform" in called) == (threads == 1)


def test_as_autograd_expects() -> None:
    """A second backward pass only if asked for, and gradients that add up."""
    model: Any = speed_up(lively(config_of()).train(), kernels=native)
    ids, weight = torch.randint(50, (4, 24)), model.blocks[1].feed_forward.up.weight
    loss = model.hidden_states(ids).square().mean()
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    # Tensors that are computed again, or kept elsewhere, until the backward pass.
    model.zero_grad()
    checkpoint(model.hidden_states, ids, use_reentrant=False).square().mean().backward()
    torch.testing.assert_close(weight.grad, once)
    model.zero_grad()
    with saved_tensors_hooks(torch.clone, torch.clone):
        again = model.hidden_states(ids).square().mean()
    again.backward()
    torch.testing.assert_close(weight.grad, once)
    assert weight.grad.untyped_storage().nbytes() <= 4 * model.parameter_count()
    # A gradient whose memory is in another order.
    x = torch.randn(4, 24, 32, requires_grad=True)
    inputs = model.attention_inputs(24)
    grad = torch.randn(4, 32, 24).mT
    y = model.transform(x.mT.contiguous().mT, inputs)
    (there,) = torch.autograd.grad(y, x, grad)
    (here,) = torch.autograd.grad(model.transform(x, inputs), x, grad.contiguous())
    torch.testing.assert_close(there, here)


def test_dropout(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same factors, as if each layer's output were multiplied by them."""
    model: Any = lively(config_of(dropout=0.25)).train()
    model.dropout.eval()  # of the embeddings
    ids, factors = torch.randint(50, (4, 24)), blocks.dropout_factors(0.25, (6, 4, 24, 32))
    assert factors.unique().tolist() == [0, pytest.approx(4 / 3)]
    assert factors.mean() == pytest.approx(1, abs=0.02)
    assert not blocks.dropout_factors(1.0, (3, 2)).any()
    rest = iter(factors)
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Dropout, "forward", lambda self, x: x * next(rest))
        patched.setattr(model.dropout, "forward", lambda x: x)
        model.hidden_states(ids).square().mean().backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    monkeypatch.setattr(blocks, "dropout_factors", lambda *_: factors)
    speed_up(model, kernels=native).hidden_states(ids).square().mean().backward()
    assert called[0] == "transform"
    alike({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, exact)


def test_the_same_every_time() -> None:
    model, ids = lively(config_of()), torch.randint(50, (4, 24))
    speed_up(model, kernels=native)
    first, again = results(model, ids), results(model, ids)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_what_is_not_a_number_shows() -> None:
    model: Any = lively(config_of())
    ids = torch.randint(50, (4, 24))
    with torch.no_grad():
        model.blocks[1].attention.out.weight[3, 4] = torch.nan
    assert results(speed_up(model, kernels=native), ids)["x"].isnan().all()


def test_threads_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (SimpleNamespace(omp_get_max_threads=FUNCTION(int)) for _ in range(2))
    for libraries, shared in [
        ((one, one), True),
        ((one, other), False),
        ((one, None), False),
        ((None, None), False),
        ((SimpleNamespace(), SimpleNamespace()), False),
    ]:
        found = iter(libraries)
        monkeypatch.setattr(blocks, "library", lambda found=found: next(found))
        monkeypatch.setattr(blocks, "torch_library", lambda found=found: next(found))
        ONE_OPENMP.cache_clear()
        assert ONE_OPENMP() == shared
    ONE_OPENMP.cache_clear()
