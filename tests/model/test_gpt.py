import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SHAPE, every_gpt, gpt_config, lively, of_family
from strategies import configs
from torch import Tensor, nn

from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.config import FAMILIES, PRESETS, GPTConfig, ModelConfig, RopeScaling, configure
from nanolm.model.gpt import GPT, Attention, AttentionInputs, causal_attention, naive_attention
from nanolm.model.positions import (
    alibi_mask,
    alibi_slopes,
    rotate,
    rotation_table,
    sinusoidal_table,
)

families = pytest.mark.parametrize("family", FAMILIES)
parts = pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rope", "alibi", "none"])
norms = pytest.mark.parametrize("norm", ["layer", "rms"])
# Every seventh combination has each value of each switch equally often.
strides = pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])

TIME = SHAPE["context"]


def watched(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the embedded tokens, which require a gradient."""
    embedded = model.token_embedding(ids).detach().requires_grad_()
    hook = model.token_embedding.register_forward_hook(lambda *_: embedded)
    logits = model(ids)
    hook.remove()
    return logits, embedded


def check_that_nothing_looks_ahead(model: Model) -> None:
    ids = torch.randint(SHAPE["vocab_size"], (1, TIME))
    logits, embedded = watched(model, ids)
    for time in (0, 3, TIME - 1):  # by gradient
        (gradient,) = torch.autograd.grad(logits[0, time].sum(), embedded, retain_graph=True)
        reached = gradient[0].abs().sum(dim=-1) > 0
        assert reached.tolist() == [True] * (time + 1) + [False] * (TIME - 1 - time), model.config
    changed = ids.clone()  # by value
    changed[0, 4] = (ids[0, 4] + 1) % SHAPE["vocab_size"]
    difference = (model(changed) - logits).abs().amax(dim=-1)[0]
    assert difference[:4].max() < 1e-6, model.config
    assert difference[4] > 1e-5, model.config


@parts
@norms
@strides
def test_no_position_sees_what_comes_after_it(positions: str, norm: str, stride: int) -> None:
    for config in every_gpt(positions=positions, norm=norm)[::stride]:
        check_that_nothing_looks_ahead(lively(config))


@pytest.mark.parametrize("family", ["rnn", "lstm"])
def test_no_state_knows_what_comes_after_it(family: str) -> None:
    check_that_nothing_looks_ahead(of_family(family))


@parts
@norms
@strides
def test_written_out_attention_is_the_fused_one(positions: str, norm: str, stride: int) -> None:
    ids = torch.randint(SHAPE["vocab_size"], (2, TIME))
    for config in every_gpt(positions=positions, norm=norm)[::stride]:
        model = lively(config)
        weights: list[Tensor] = []
        with torch.no_grad():
            torch.testing.assert_close(
                model(ids, attn_weights=weights), model(ids), atol=1e-5, rtol=0
            )
        assert len(weights) == config.layers
        for seen in weights:  # (batch, heads, time, time)
            assert seen.shape == (2, config.heads, TIME, TIME)
            torch.testing.assert_close(seen.sum(dim=-1), torch.ones(2, config.heads, TIME))
            assert not seen.triu(1).any()


@pytest.mark.parametrize("past", [0, 1, 5])
def test_both_forms_agree_with_a_cache(past: int) -> None:
    q, k, v = (
        torch.randn(2, 4, 3, 8),
        torch.randn(2, 2, 3 + past, 8),
        torch.randn(2, 2, 3 + past, 8),
    )
    torch.testing.assert_close(causal_attention(q, k, v), naive_attention(q, k, v)[0])


@pytest.mark.parametrize("bias", [True, False])
def test_attention_is_that_of_torch(bias: bool) -> None:
    config = gpt_config(positions="none", qk_norm=False, bias=bias)
    torch.manual_seed(0)
    ours = Attention(config, layer=0)
    theirs = nn.MultiheadAttention(config.dim, config.heads, bias=bias, batch_first=True)
    theirs.in_proj_weight.data.copy_(ours.qkv.weight)
    theirs.out_proj.weight.data.copy_(ours.out.weight)
    if bias:
        nn.init.normal_(ours.qkv.bias)
        nn.init.normal_(ours.out.bias)
        theirs.in_proj_bias.data.copy_(ours.qkv.bias)
        theirs.out_proj.bias.data.copy_(ours.out.bias)
    x = torch.randn(3, TIME, config.dim)
    mask = nn.Transformer.generate_square_subsequent_mask(TIME)
    expected, their_weights = theirs(x, x, x, attn_mask=mask, average_attn_weights=False)
    weights: list[Tensor] = []
    inputs = AttentionInputs(slice(0, TIME), TIME)
    for each in (inputs, inputs._replace(attn_weights=weights)):
        torch.testing.assert_close(ours(x, each), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(weights[0], their_weights, atol=1e-5, rtol=0)


@given(configs())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_cache_changes_nothing(config: ModelConfig) -> None:
    model = lively(config)
    ids = torch.randint(SHAPE["vocab_size"], (2, TIME))
    memory = model.init_cache(batch=2, length=TIME)
    with torch.no_grad():
        whole = model(ids)
        pieces = [model(part, memory) for part in ids.split([3, 1, 2, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)


@given(configs(), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rows_of_a_cache_may_differ_in_length(config: ModelConfig, fixed: bool) -> None:
    model = lively(config)
    ids = torch.randint(SHAPE["vocab_size"], (3, TIME))
    memory = model.init_cache(batch=3, length=TIME, fixed=fixed)
    lengths = [4, 1, 6]
    with torch.no_grad():
        whole = model(ids)
        for row, length in enumerate(lengths):
            part = model.init_cache(batch=1, length=length)
            model(ids[row : row + 1, :length], part)
            memory.put([row], part, [length])
        order = torch.tensor([2, 0, 1])
        memory.select(order)
        for step in range(2):
            places = torch.tensor([6, 4, 1]) + step
            found = model(ids[order, places][:, None], memory)
            torch.testing.assert_close(found[:, 0], whole[order, places], atol=1e-5, rtol=1e-5)


@parts
def test_positions_tell_one_order_from_another(positions: str) -> None:
    model = lively(gpt_config(positions=positions, layers=1))
    one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    # Without positions, one layer sees a bag of earlier words.
    assert torch.allclose(one[0, -1], other[0, -1], atol=1e-5) == (positions == "none")


def test_sinusoidal_positions_are_those_of_the_paper() -> None:
    for dim in (6, 7):
        table = sinusoidal_table(50, dim)
        for t in range(50):
            for i in range(dim):
                angle = t / 10_000 ** ((i - i % 2) / dim)
                wave = math.cos(angle) if i % 2 else math.sin(angle)
                assert table[t, i].item() == pytest.approx(wave, abs=1e-6)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotation = rotation_table(64, gpt_config(dim=64))
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    turned = [rotate(x.expand(1, 1, 64, 16), rotation) for x in (q, k)]
    scores = turned[0][0, 0] @ turned[1][0, 0].T  # (64, 64)
    for distance in (0, 1, 7, 40):
        row = scores.diagonal(-distance)
        torch.testing.assert_close(row, row[:1].expand_as(row), atol=1e-4, rtol=1e-4)
    assert (scores[20, 20] - scores[20, 13]).abs() > 1e-3


def test_alibi_is_that_of_the_paper() -> None:
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    # Six heads: the slopes of four heads, and the first two that eight heads would add.
    torch.testing.assert_close(
        alibi_slopes(6), torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])
    )
    mask = alibi_mask(slice(2, 4), 4, 2, torch.zeros(1))  # the last two of four tokens, two heads
    first = torch.tensor([[-2.0, -1.0, 0.0, -torch.inf], [-3.0, -2.0, -1.0, 0.0]])
    torch.testing.assert_close(mask, torch.stack([first / 16, first / 256])[None])
    rows = alibi_mask(torch.tensor([[3], [1]]), 4, 2, torch.zeros(1))  # rows of different lengths
    torch.testing.assert_close(rows[0], mask[0, :, 1:])
    assert rows[1, 0, 0].tolist() == [-1 / 16, 0.0, -torch.inf, -torch.inf]


def test_computed_positions_have_no_end_and_can_be_trained_after_sampling() -> None:
    for positions in ("rope", "sinusoidal", "alibi", "none"):
        model = lively(gpt_config(positions=positions))
        with torch.inference_mode():
            assert model(torch.zeros(1, 2000, dtype=torch.long)).shape[1] == 2000
        model(torch.zeros(1, 5, dtype=torch.long)).sum().backward()
    with pytest.raises(ValueError, match="9 tokens"):
        of_family("gpt2")(torch.zeros(1, 9, dtype=torch.long))


def check_that_it_learns(config: ModelConfig) -> None:
    """Memorize one batch."""
    torch.manual_seed(1)
    model = build_model(config).train()
    ids = torch.randint(SHAPE["vocab_size"], (2, TIME + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for _ in range(400):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        if loss.item() < 0.1:
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pytest.fail(f"loss {loss.item():.2f} of {config}")


@given(configs())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_one_batch_can_be_memorized(config: ModelConfig) -> None:
    check_that_it_learns(config)


@pytest.mark.slow
@parts
@norms
def test_every_combination_can_learn(positions: str, norm: str) -> None:
    for config in every_gpt(positions=positions, norm=norm):
        check_that_it_learns(config)


@families
def test_a_fresh_model_knows_nothing(family: str) -> None:
    for tied in (True, False):
        shape = {"vocab_size": 300, "layers": 2, "heads": 2, "dim": 32, "context": 16}
        model = build_model(configure(family, tied=tied, **shape))
        chances = model(torch.randint(300, (4, 16))).softmax(dim=-1)
        # With tied weights, a token predicts itself.
        assert chances.median() < 0.005
        assert chances.max() < (0.05 if not tied else 0.6)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_the_published_sizes_of_gpt2(preset: str, published: int) -> None:
    size = PRESETS[preset]
    shape = {name: getattr(size, name) for name in ("layers", "heads", "dim", "context")}
    with torch.device("meta"):
        model = build_model(configure("gpt2", vocab_size=50_257, **shape))
    assert model.parameter_count() == published


def test_the_course_model() -> None:
    preset = PRESETS["nano"]
    assert (preset.layers, preset.heads, preset.dim) == (3, 3, 48)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"heads": 5}, "try --dim 50"),
        ({"heads": 48}, "try --dim 96"),
        ({"layers": 0}, "--layers 0: must be at least 1"),
        ({"hidden": 0}, "--hidden 0: must be at least 1"),
        ({"kv_heads": 2}, "--heads 3 is not a multiple of --kv-heads 2; try --kv-heads 1"),
        ({"dropout": 1.0}, "--dropout 1.0"),
        ({"rope_base": 1.0}, "--rope-base 1.0"),
        ({"rope_scaling": RopeScaling("llama3", 8.0, 64, 4.0, 1.0)}, "invalid"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_add_up_is_explained(changes: dict[str, int], problem: str) -> None:
    shape = {"layers": 3, "heads": 3, "dim": 48, "context": 64, **changes}
    (found,) = configure("modern", vocab_size=300, **shape).problems()
    assert problem in found


def test_a_sound_config_has_no_problems() -> None:
    config = configure("modern", vocab_size=300, layers=3, heads=3, dim=48, context=64)
    assert isinstance(config, GPTConfig)
    assert config.problems() == []
    assert config.hidden == 128
    assert isinstance(build_model(config), GPT)
