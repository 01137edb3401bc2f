"""The kernels in C for training on a CPU, against the plain functions."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import PUBLISHED_FAMILIES, every_gpt, gpt_config, lively
from torch import Tensor, nn

from nanolm.model.config import GPTConfig
from nanolm.model.fast import native
from nanolm.model.fast.native import build
from nanolm.model.fast.training import speed_up, training_kernels
from nanolm.model.gpt import NONLINEARITIES
from nanolm.model.positions import rotate, rotation_table
from nanolm.training.loss import next_token_loss

needs_compiler = pytest.mark.skipif(not native.available(), reason="there is no C compiler")
EPSILON = 1e-5


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def alike(
    ours: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor, atol: float = 2e-5
) -> None:
    """The same results and the same gradients."""
    found, wanted = ours(*inputs), plain(*inputs)
    if isinstance(found, Tensor):
        found, wanted = (found,), (wanted,)
    # Gradients that are not contiguous, as those of attention may be.
    grads = [torch.randn_like(each.mT).mT for each in found]
    ours_back = torch.autograd.grad(found, inputs, grads)
    plain_back = torch.autograd.grad(wanted, inputs, grads)
    for a, b in zip([*found, *ours_back], [*wanted, *plain_back], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=atol)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 41])
@pytest.mark.parametrize("dim", [7, 48, 256])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
@pytest.mark.parametrize("add", [True, False])
def test_norms(add: bool, kind: str, dim: int, rows: int) -> None:
    xs, weights = [some(rows, 1, dim) for _ in range(1 + add)], [some(dim)]
    weights += [some(dim)] if kind == "layer with bias" else []

    def parts(inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        given: tuple[Any, ...] = inputs if add else (inputs[0], None, *inputs[1:])
        return given if len(given) == 4 else (*given, None)

    def plain(*inputs: Tensor) -> Any:
        x, y, weight, bias = parts(inputs)
        x = x if y is None else x + y
        if kind == "rms":
            return x, F.rms_norm(x, (dim,), weight, EPSILON)
        return x, F.layer_norm(x, (dim,), weight, bias, EPSILON)

    alike(lambda *all_: native.add_norm(*parts(all_), EPSILON, kind != "rms"), plain, *xs, *weights)


@needs_compiler
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 96), (96, 24)])
def test_linear(inputs: int, outputs: int, bias: bool) -> None:
    layer = nn.Linear(inputs, outputs, bias=bias)

    def both(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, *_: function(x)

    ours, x = both(lambda x: native.linear(layer, x)), some(3, 5, inputs)
    alike(ours, both(layer), x, *layer.parameters())
    (gradient,) = torch.autograd.grad(ours(x).sum(), [layer.weight])
    assert gradient.is_contiguous()


@needs_compiler
@pytest.mark.parametrize("columns", [64, 1500])
def test_logits_with_gaps_between_rows(columns: int) -> None:
    logits, targets = torch.randn(9, columns + 16)[:, :columns], torch.arange(9)
    wanted = logits.softmax(dim=1) - F.one_hot(targets, columns)
    losses = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(native.cross_entropy_(logits, targets, columns), losses)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 3, 10), (3, 1, 64)])
def test_qk_norm_rope(heads: int, kv_heads: int, head_dim: int, norm: bool) -> None:
    config = gpt_config(heads=heads, kv_heads=kv_heads, dim=heads * head_dim)
    cosines, sines = (table[:5] for table in rotation_table(9, config))

    def ours(qkv: Tensor, *weights: Tensor) -> Any:
        some_weights = weights or (None, None)
        return native.qk_norm_rope(qkv, cosines, sines, heads, kv_heads, *some_weights, EPSILON)

    def plain(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        parts = [heads, kv_heads, kv_heads]
        q, k, v = qkv.unflatten(2, (sum(parts), head_dim)).split(parts, dim=2)
        if weights:
            q = F.rms_norm(q, (head_dim,), weights[0], EPSILON)
            k = F.rms_norm(k, (head_dim,), weights[1], EPSILON)
        q, k = (rotate(t.transpose(1, 2), (cosines, sines)).transpose(1, 2) for t in (q, k))
        return q, k, v

    weights = [some(head_dim), some(head_dim)] if norm else []
    alike(ours, plain, some(2, 5, (heads + 2 * kv_heads) * head_dim), *weights)


@needs_compiler
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 16), (6, 3, 48), (4, 1, 64)])
@pytest.mark.parametrize("time", [1, 7, 16, 133])
def test_attention(time: int, heads: int, kv_heads: int, head_dim: int, strided: bool) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if strided:  # as `qk_norm_rope` returns the values
            v = torch.cat([torch.zeros_like(v), v], dim=2)[:, :, kv_heads:]
        return native.attention(q, k, v)

    def plain(*inputs: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).double() for t in inputs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).float()

    q, k, v = (some(3, time, count, head_dim) for count in (heads, kv_heads, kv_heads))
    alike(ours, plain, q, k, v)
    sharp = (20 * q).detach().requires_grad_()  # some weights are 0, some 1
    alike(ours, plain, sharp, k, v, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("width", [1, 48, 1100])
@pytest.mark.parametrize("kind", ["swiglu", "gelu_tanh", "gelu"])
def test_nonlinearities(kind: str, width: int) -> None:
    inputs = (3 * torch.randn(3, 2, 2 * width)).requires_grad_()
    alike(getattr(native, kind), NONLINEARITIES[kind], inputs)


@needs_compiler
@pytest.mark.parametrize(("rows", "columns"), [(3, 65), (5, 128), (2, 5000)])
def test_cross_entropy(rows: int, columns: int) -> None:
    logits = 10 * torch.randn(rows, columns)
    logits[0, :40] = -torch.inf
    targets = torch.randint(40, columns, (rows,))
    plain = logits.clone().requires_grad_()
    wanted = F.cross_entropy(plain, targets, reduction="none")
    wanted.sum().backward()
    losses = native.cross_entropy_(logits, targets, columns)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, plain.grad, rtol=1e-5, atol=1e-6)


@needs_compiler
def test_what_went_wrong_shows() -> None:
    logits = torch.randn(4, 30)
    logits[0, 7], logits[1, 0] = torch.nan, torch.inf
    losses = native.cross_entropy_(logits, torch.tensor([3, 3, 30, -100]), 30)
    assert not losses.isfinite().any()  # the last two targets do not exist
    x = torch.full((1, 16), torch.nan)
    for kind in ("swiglu", "gelu_tanh", "gelu"):
        assert getattr(native, kind)(x).isnan().all()
    assert native.add_norm(x, None, torch.ones(16), None, EPSILON, False)[1].isnan().all()
    q, k, v = torch.randn(3, 1, 20, 1, 16).unbind()
    q[0, 9] = torch.nan
    broken = native.attention(q, k, v).isnan().all(dim=3).flatten()
    assert broken.nonzero().tolist() == [[9]]  # the other queries do not see it


PUBLISHED = [gpt_config(**changes) for changes in PUBLISHED_FAMILIES.values()]


@needs_compiler
@pytest.mark.parametrize("config", [*random.Random(0).sample(every_gpt(), 40), *PUBLISHED], ids=str)
def test_whole_models(config: GPTConfig) -> None:
    """Loss, all gradients and logits in eval mode, with and without the kernels."""
    model = lively(config).double().train()
    ids = torch.randint(config.vocab_size, (3, config.context))

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        loss = next_token_loss(model.head, model.hidden_states(ids), ids)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        with model.eval_mode(), torch.inference_mode():
            grads["logits"] = model(ids)
        return {"loss": loss.detach(), **grads}

    exact = run()
    speed_up(model.float(), kernels=native)
    ours = run()
    assert set(ours) == set(exact)
    for name, wanted in exact.items():
        assert (ours[name] - wanted).norm() <= 1e-4 * wanted.norm() + 3e-5, name


def test_only_float32_on_a_cpu() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert training_kernels(cpu, torch.float32) is (native if native.available() else None)
    assert training_kernels(cpu, torch.float64) is None
    assert training_kernels(meta, torch.float32) is None


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_use_the_plain_functions(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "call", lambda *_: pytest.fail("a kernel was called"))
    model = speed_up(lively(gpt_config(vocab_size=2_000)).train(), kernels=native)
    ids = torch.randint(2_000, (3, model.config.context))
    model = model.double() if dtype == torch.float64 else model
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float64):
        loss = next_token_loss(model.head, model.hidden_states(ids), ids)
    loss.backward()
    assert loss.isfinite()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NANOLM_CACHE", str(tmp_path))
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


@needs_compiler
def test_compiles_once_and_leaves_one_file(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.library() is not None
    (file,) = own_cache.iterdir()
    build.library.cache_clear()
    monkeypatch.setattr(build, "compile_to", lambda *_: pytest.fail("compiled again"))
    assert build.library() is not None
    monkeypatch.setattr(build, "cpu_features", lambda: "another processor")
    assert build.fingerprint(str(shutil.which("cc"))) not in file.name


def test_a_damaged_file_is_replaced(own_cache: Path) -> None:
    if build.library() is None:
        pytest.skip("there is no C compiler")
    (file,) = own_cache.iterdir()
    build.library.cache_clear()
    file.unlink()  # the loaded file stays mapped, so it must not be overwritten
    file.write_bytes(b"\x7fELF cut off")
    assert build.library() is not None


@pytest.mark.parametrize("script", [None, "exit 1", "echo nothing"])
def test_without_a_working_compiler(
    script: str | None, own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    compiler = tmp_path_factory.mktemp("bin") / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "which", lambda: str(compiler) if script else None)
    assert build.library() is None
    assert not native.available()
    assert not list(own_cache.iterdir())
