"""One training step: whole, in micro-batches, with workers, out of memory, in float16."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import of_family
from torch import Tensor, nn

from nanolm.model.fast.training import speed_up
from nanolm.model.gpt import GPT
from nanolm.training import loss as losses
from nanolm.training.loss import SoftTargets, distillation_loss, next_token_loss, smoothing_loss
from nanolm.training.optim import Optimizers, split_evenly
from nanolm.training.step import LossScale, Step

Made = tuple[Step, nn.Module]


def made(workers: int = 1, dtype: str = "float32", muon: bool = False, **rest: Any) -> Made:
    torch.manual_seed(3)
    model = of_family("modern", dim=32).train()

    def loss(ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = model.hidden_states(ids[:, :-1])
        return next_token_loss(model.head, x, ids[:, 1:]), {"size": x.detach().norm()}

    parameters, name = dict(model.named_parameters()), "muon" if muon else "adamw"
    optimizers = Optimizers(parameters, name, 0.1, model.muon_parameters(), workers=workers)
    return Step(loss, optimizers, dtype, **rest), model


def batch(number: int, rows: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(number)
    return (torch.randint(30, (rows, 9)),)


def trained(step: Step, count: int = 10) -> list[float]:
    return [step(batch(number), 1e-2).tolist()[1] for number in range(count)]


def same(one: nn.Module, two: nn.Module, allowed: float) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=allowed, rtol=allowed, msg=name)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_gradients_of_micro_batches_accumulate_to_the_same(parts: int) -> None:
    (whole, one), (divided, two) = made(), made()
    divided.grad_accum_steps = parts
    assert trained(whole) == pytest.approx(trained(divided), abs=1e-5)
    same(one, two, 1e-4)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("muon", [False, True])
def test_side_by_side_is_the_same_and_the_same_bits_again(workers: int, muon: bool) -> None:
    (alone, one), (together, two), (again, three) = (
        made(count, muon=muon) for count in (1, workers, workers)
    )
    assert trained(alone) == pytest.approx(trained(together), abs=1e-5)
    same(one, two, 1e-4)
    trained(again)
    same(two, three, 0)


def test_torch_has_the_same_adamw() -> None:
    (step, ours), (_, theirs) = made(), made()
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-10)
    assert isinstance(theirs, GPT)
    for number in range(10):
        (ids,) = batch(number)
        F.cross_entropy(theirs(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found, *_ = step((ids,), 1e-2).tolist()
        assert found == pytest.approx(norm.item(), rel=1e-5)
    same(ours, theirs, 1e-5)


def short_of_memory(step: Step, most: int) -> None:
    """Run out of memory with more than `most` rows at a time."""
    learn = step.loss

    def loss(ids: Tensor) -> Any:
        if len(ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return learn(ids)

    step.loss = loss


@pytest.mark.parametrize("most", [1, 2, 4, 8])
def test_out_of_memory_halves_the_micro_batches(most: int) -> None:
    (whole, one), (short, two) = made(), made()
    short_of_memory(short, most)
    assert trained(whole) == pytest.approx(trained(short), abs=1e-3)
    assert short.grad_accum_steps == 8 // most
    same(one, two, 1e-3)


def test_where_no_row_fits_something_else_is_tried() -> None:
    asked: list[int] = []

    def save_memory() -> bool:
        asked.append(step.grad_accum_steps)
        if len(asked) == 1:
            short_of_memory(step, 8)  # which helps
            step.loss = plain
            return True
        return False

    step, _ = made(save_memory=save_memory)
    plain = step.loss
    short_of_memory(step, 0)
    trained(step, 2)
    assert asked == [8]
    short_of_memory(step, 0)
    with pytest.raises(torch.OutOfMemoryError):
        trained(step, 1)


def test_recomputing_layers_changes_nothing() -> None:
    (whole, one), (twice, two) = made(), made()
    assert isinstance(one, GPT) and isinstance(two, GPT)
    speed_up(one)
    speed_up(two, recompute=True)
    assert trained(whole) == trained(twice)
    same(one, two, 0)


def test_explicit_attention_is_the_same() -> None:
    (whole, one), (written, two) = made(), made()
    assert isinstance(two, GPT)
    speed_up(two, math_attention=True)
    assert trained(whole) == pytest.approx(trained(written), abs=1e-4)
    same(one, two, 1e-3)


def test_the_scale_of_float16_follows_overflows() -> None:
    scale = LossScale(torch.device("cpu"))
    scale.adapt(torch.tensor(1.0))
    assert scale.factor == 32_768
    for _ in range(1_999):
        scale.adapt(torch.tensor(0.0))
    assert scale.factor == 32_768
    scale.adapt(torch.tensor(0.0))
    assert scale.factor == 65_536
    other = LossScale(torch.device("cpu"))
    scale.adapt(torch.tensor(1.0))
    other.load_state_tensors(scale.state_tensors())
    assert other.factor == 32_768
    assert other.good_steps == 0


def test_float16_learns_and_an_overflow_costs_one_step() -> None:
    step, model = made(dtype="float16")
    assert step.scale is not None
    step.scale.factor.fill_(1e30)
    before = [p.detach().clone() for p in model.parameters()]
    norm, *_ = step(batch(0), 1e-2).tolist()
    assert not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step.scale.factor.fill_(1024.0)
    found = trained(step, 30)
    assert found[-1] < found[0] - 0.2


def test_shares_are_fair_and_whole() -> None:
    sizes = {str(n): n for n in range(1, 40)}
    shares = split_evenly(sizes, 3)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    totals = [sum(sizes[name] for name in share) for share in shares]
    assert max(totals) - min(totals) < 40


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_loss_in_pieces(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = nn.Linear(16, 77, bias=False)
    x = torch.randn(3, 5, 16, requires_grad=True)
    targets = torch.randint(77, (3, 5))
    plain = next_token_loss(head, x, targets)
    wanted = torch.autograd.grad(3 * plain, [x, head.weight])
    monkeypatch.setattr(losses, "MAX_KEPT_LOGITS", 1)
    monkeypatch.setattr(losses, "CPU_CHUNK_LOGITS", 77 * 15 // pieces)
    found = next_token_loss(head, x, targets)
    assert found.item() == pytest.approx(plain.item(), abs=1e-6)
    for a, b in zip(torch.autograd.grad(3 * found, [x, head.weight]), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("most_kept", [1, 1 << 19])
def test_weights_and_label_smoothing(most_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch has it, with a weight for each position; 0 for padding."""
    monkeypatch.setattr(losses, "MAX_KEPT_LOGITS", most_kept)
    monkeypatch.setattr(losses, "CPU_CHUNK_LOGITS", 77 * 4)
    head = nn.Linear(16, 77, bias=False)
    x = torch.randn(3, 5, 16, requires_grad=True)
    targets, weights = torch.randint(77, (3, 5)), torch.rand(3, 5) * (torch.arange(5) < 4)
    logits = head(x).flatten(0, 1)
    each = F.cross_entropy(logits, targets.flatten(), reduction="none", label_smoothing=0.1)
    wanted = each @ weights.flatten()
    what = (head, x, targets, weights)
    found = next_token_loss(*what) + 0.1 * smoothing_loss(*what)
    assert found.item() == pytest.approx(wanted.item(), abs=1e-5)
    ours, theirs = (torch.autograd.grad(2 * loss, [x, head.weight]) for loss in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("k", [77, 5])
@pytest.mark.parametrize("pieces", [1, 3])
def test_soft_targets(k: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd has it, for all probabilities, or for the most likely tokens and a rest."""
    monkeypatch.setattr(losses, "CPU_CHUNK_LOGITS", 77 * 15 // pieces)
    monkeypatch.setattr(losses, "FLOAT32_LOGITS", 77 * 4)
    head = nn.Linear(16, 77, bias=False)
    x = torch.randn(3, 5, 16, requires_grad=True)
    places = torch.randint(40, (3, 5))
    probabilities = torch.randn(40, 77).mul(2).softmax(dim=1)
    top = probabilities.topk(k)
    rest = 1 - top.values.sum(dim=1, keepdim=True)
    targets = SoftTargets(torch.cat([top.values, rest], dim=1), top.indices.short())
    logs = head(x).log_softmax(dim=2)  # (batch, time, vocabulary)
    known = logs.gather(2, top.indices[places])  # (batch, time, k)
    plain = -(known * top.values[places]).sum(dim=2)
    if k == 77:
        targets = SoftTargets(probabilities.half())
    else:
        plain -= rest[places][..., 0] * (1 - known.exp().sum(dim=2)).log()
    found, wanted = distillation_loss(head, x, targets, places), plain.mean()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-3 if k == 77 else 1e-5)
    ours, theirs = (torch.autograd.grad(3 * loss, [x, head.weight]) for loss in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 if k == 77 else 1e-6, rtol=1e-3)


def test_soft_targets_that_are_certain() -> None:
    """The same as labels, however unlikely the model finds the rest."""
    head = nn.Linear(16, 77, bias=False)
    x = torch.randn(3, 5, 16, requires_grad=True)
    tokens = torch.randint(77, (3, 5))
    certain = torch.tensor([[1.0, 0.0]]).expand(77, 2)
    for scale in (1.0, 1e4):
        targets = SoftTargets(certain, torch.arange(77)[:, None])
        found = distillation_loss(head, scale * x, targets, tokens)
        plain = next_token_loss(head, scale * x, tokens)
        assert found.item() == pytest.approx(plain.item(), rel=1e-5)
        ours, theirs = (torch.autograd.grad(loss, [x, head.weight]) for loss in (found, plain))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
