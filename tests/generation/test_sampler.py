import pytest
import torch

from nanolm.generation.knobs import Knobs
from nanolm.generation.sampler import Sampler, distribution

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])


def test_temperature_scales() -> None:
    torch.testing.assert_close(
        distribution(LOGITS, Knobs(temperature=2)), (LOGITS.double() / 2).softmax(-1)
    )


def test_top_k_keeps_the_likeliest() -> None:
    kept = distribution(LOGITS, Knobs(top_k=2)) > 0
    assert kept.tolist() == [[True, True, False, False, False]]
    assert (distribution(LOGITS, Knobs(top_k=99)) > 0).sum() == 4


@pytest.mark.parametrize(("top_p", "count"), [(0.01, 1), (0.64, 1), (0.65, 2), (0.9, 3), (1, 4)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, count: int) -> None:
    # softmax of LOGITS: 0.644, 0.237, 0.087, 0.032, 0
    kept = distribution(LOGITS, Knobs(temperature=1, top_p=top_p))
    assert (kept > 0).sum() == count
    assert kept.sum().item() == pytest.approx(1)


def test_draws_follow_the_distribution() -> None:
    knobs = Knobs(temperature=1, top_k=3, seed=5)
    rows = 20_000
    drawn = Sampler(knobs, rows).draw(LOGITS.expand(rows, -1))
    counts = torch.bincount(drawn, minlength=5).double()
    expected = distribution(LOGITS, knobs)[0] * rows
    chi_squared = ((counts - expected) ** 2 / expected.clamp(min=1)).sum().item()
    assert chi_squared < 13.8  # two degrees of freedom: once in a thousand seeds
    assert counts[3:].sum() == 0


def test_rows_draw_the_same_whatever_is_beside_them() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    together = Sampler(Knobs(seed=3), 4)
    first = Sampler(Knobs(seed=3), 1)
    for _ in range(20):
        assert together.draw(logits)[0] == first.draw(logits[:1])[0]


@pytest.mark.parametrize(
    "knobs", [Knobs(greedy=True), Knobs(temperature=0), Knobs(temperature=1e-310)]
)
def test_greedy(knobs: Knobs) -> None:
    assert Sampler(knobs, 1).draw(LOGITS).tolist() == [0]


def test_all_wrong_knobs_are_named_at_once() -> None:
    problems = Knobs(tokens=0, temperature=-1, top_k=0, top_p=1.5).problems()
    assert [problem.split()[0] for problem in problems] == [
        "--tokens",
        "--temperature",
        "--top-k",
        "--top-p",
    ]
    assert Knobs(temperature=float("nan")).problems()
    assert Knobs().problems() == []


def test_a_model_that_has_diverged_still_gives_tokens() -> None:
    drawn = Sampler(Knobs(), 1).draw(torch.full((1, 5), torch.nan))
    assert 0 <= drawn.item() < 5
