import pytest
import torch
import torch.nn.functional as F

from nanolm.model.cache import Cache
from nanolm.model.config import FAMILIES, PRESETS, ModelConfig, configure
from nanolm.model.gpt import GPT


def small(family: str, **changes: int | float) -> GPT:
    shape = {"vocab_size": 50, "layers": 2, "heads": 3, "dim": 24, "context": 16, **changes}
    torch.manual_seed(0)
    model = GPT(configure(family, **shape))  # type: ignore[arg-type]
    for parameter in model.parameters():  # fresh output projections are zero: nothing to see
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_no_position_sees_what_comes_after_it(family: str) -> None:
    model = small(family)
    ids = torch.randint(50, (1, 16))
    embedded = model.token_embedding(ids).detach().requires_grad_()
    model.token_embedding.register_forward_hook(lambda *_: embedded)
    logits = model(ids)
    for time in range(16):
        (gradient,) = torch.autograd.grad(logits[0, time].sum(), embedded, retain_graph=True)
        reached = gradient[0].abs().sum(dim=-1) > 0
        assert reached.tolist() == [True] * (time + 1) + [False] * (15 - time)


@families
def test_the_cache_changes_nothing(family: str) -> None:
    model = small(family)
    ids = torch.randint(50, (2, 16))
    cache = Cache(model.config, batch=2, like=model.head.weight)
    pieces = [model(part, cache) for part in ids.split([5, 1, 3, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids), atol=1e-5, rtol=1e-5)


@families
def test_positions_matter(family: str) -> None:
    model = small(family)
    same = torch.full((1, 16), 7)
    turned = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(model(turned[0])[0, -1], model(turned[1])[0, -1], atol=1e-4)
    assert model(same).shape == (1, 16, 50)


@families
def test_one_batch_can_be_learned_by_heart(family: str) -> None:
    torch.manual_seed(1)
    model = GPT(configure(family, vocab_size=50, layers=2, heads=2, dim=32, context=16))
    ids = torch.randint(50, (2, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05


@families
def test_a_fresh_model_knows_nothing(family: str) -> None:
    model = GPT(configure(family, vocab_size=50, layers=2, heads=2, dim=32, context=16))
    chances = model(torch.randint(50, (4, 16))).softmax(dim=-1)
    assert chances.max() < 0.05


def test_the_published_size_of_gpt2() -> None:
    with torch.device("meta"):
        preset = PRESETS["gpt2"]
        model = GPT(
            configure(
                "gpt2",
                vocab_size=50_257,
                layers=preset.layers,
                heads=preset.heads,
                dim=preset.dim,
                context=preset.context,
            )
        )
    assert model.parameter_count() == 124_439_808


def test_the_course_model() -> None:
    preset = PRESETS["nano"]
    assert (preset.layers, preset.heads, preset.dim) == (3, 3, 48)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"heads": 5}, "try --dim 50"),
        ({"heads": 48}, "try --dim 96"),
        ({"layers": 0}, "--layers 0: must be at least 1"),
        ({"dropout": 1.0}, "--dropout 1.0"),
    ],
)
def test_a_config_that_does_not_add_up_is_explained(changes: dict[str, int], problem: str) -> None:
    shape = {"layers": 3, "heads": 3, "dim": 48, "context": 64, **changes}
    config = configure("modern", vocab_size=300, **shape)
    (found,) = config.problems()
    assert problem in found


def test_a_sound_config_has_no_problems() -> None:
    config: ModelConfig = configure("modern", vocab_size=300, layers=3, heads=3, dim=48, context=64)
    assert config.problems() == []
    assert config.hidden == 128
