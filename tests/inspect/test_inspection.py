"""Inspection agrees with `transformers` and with the model itself."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import of_family

from nanolm.errors import UsageError
from nanolm.inspect.attribution import attribute
from nanolm.inspect.heads import describe_heads, pattern_masks
from nanolm.inspect.inspection import Inspection, inspect_text
from nanolm.inspect.page import alignment_page, inspection_page
from nanolm.inspect.vectors import (
    mean_similarities,
    neighbours,
    occurrences,
    pca,
    position_vectors,
    similarities,
    token_of,
)
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig
from nanolm.model.huggingface import load_model, save_model
from nanolm.text.tokenizer import train_tokenizer

FAMILIES = ("gpt2", "llama", "modern")  # the last is what transformers calls qwen3
IDS = [7, 3, 250, 3, 3, 99, 7, 3, 12, 255, 7, 4]
SHAPE: dict[str, Any] = {"vocab_size": 258, "context": 32}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(of_family(family, **SHAPE), tmp_path, train_tokenizer([], "byte"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        found = theirs(torch.tensor([IDS]), output_attentions=True, output_hidden_states=True)
    seen = inspect_text(load_model(tmp_path), IDS)
    expected = torch.cat(found.attentions).numpy()  # (layers, heads, time, time)
    assert seen.attention.shape == expected.shape
    assert np.abs(seen.attention - expected).max() < 1e-5
    assert np.abs(seen.attention.sum(axis=-1) - 1).max() < 1e-5
    assert not np.triu(seen.attention, 1).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_of_the_lens_is_the_model(family: str) -> None:
    model = of_family(family, **SHAPE)
    with torch.inference_mode():
        chances = model(torch.tensor([IDS]))[0].softmax(dim=-1)
    seen = inspect_text(model, IDS, top=5)
    assert len(seen.layers) == 3  # the embedding and two layers
    best = chances.topk(5)
    assert np.array_equal(seen.layers[-1].ids, best.indices)
    assert np.allclose(seen.layers[-1].probabilities, best.values, atol=1e-6)
    came = [float(chances[place, id]) for place, id in enumerate(IDS[1:])]
    assert np.allclose(seen.layers[-1].actual, came, atol=1e-6)
    rank = [
        1 + int((chances[place] > chances[place, id]).sum()) for place, id in enumerate(IDS[1:])
    ]
    assert seen.layers[-1].rank.tolist() == rank
    assert not np.allclose(seen.layers[0].probabilities, seen.layers[-1].probabilities, atol=1e-3)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="no attention"):
        inspect_text(of_family("lstm"), [1, 2, 3])


def attention(mask: Any) -> Any:
    """Heads that attend where `mask` says, or else to the first token."""
    weights = np.tril(np.asarray(mask, dtype=np.float32))
    weights[weights.sum(axis=1) == 0, 0] = 1
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["previous", "itself", "first", "same", "induction"])
def test_heads_are_named_after_what_they_do(kind: str) -> None:
    ids = [5, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]
    mask = pattern_masks(ids)[kind]
    ((head,),) = describe_heads(attention(mask)[None, None], ids)
    assert head.kind == kind
    assert head.shares[kind] > 0.99
    assert f"{head.shares[kind]:.0%}" in head.words


def test_heads_that_do_nothing_in_particular() -> None:
    ids = list(range(30))
    even = attention(np.ones((30, 30)))
    mixed = attention(np.random.default_rng(1).random((30, 30)) ** 8)
    ((head, other),) = describe_heads(np.stack([even, mixed])[None], ids)
    assert (head.kind, other.kind) == ("spread", "mixed")
    assert head.spread == pytest.approx(1)
    assert other.spread < 0.9


def test_a_page_without_habits_has_no_empty_table() -> None:
    mixed = np.random.default_rng(1).random((1, 1, 30, 30)).astype(np.float32) ** 8
    weights = attention(mixed[0, 0])[None, None]
    seen = Inspection(list(range(30)), weights, [])
    heads = describe_heads(weights, seen.ids)
    assert [[head.kind for head in row] for row in heads] == [["mixed"]]
    page = inspection_page(train_tokenizer([], "byte"), seen, heads, {})
    assert "Heads without a clear pattern: 1" in page and 'class="habits"' not in page
    assert "darker" not in page  # in dark mode, it is the other way round


def test_a_text_of_one_token_has_heads_too() -> None:
    ((head,),) = describe_heads(np.ones((1, 1, 1, 1), dtype=np.float32), [3])
    assert head.kind == "spread"


def test_a_word_is_the_same_until_the_first_layer() -> None:
    tokenizer = train_tokenizer([], "byte")
    model = of_family("modern", **SHAPE)  # rotary positions, so the embedding has none
    texts = ["a bank, a Bank", "the bank", "embankment"]
    found = occurrences(model, tokenizer, "bank", texts)
    assert found.contexts == ["a [bank], a Bank", "a bank, a [Bank]", "the [bank]"]
    cosines = similarities(found.vectors)
    assert cosines.shape == (3, 3, 3)
    assert np.allclose(cosines[0], 1, atol=1e-6)  # its last letter
    assert cosines[1:, 0, 2].max() < 0.9999
    means = mean_similarities(cosines)
    assert means[0] == pytest.approx(1)
    assert means[2] == pytest.approx((cosines[2].sum() - 3) / 6)
    with pytest.raises(UsageError, match="--word river"):
        occurrences(model, tokenizer, "river", texts)
    with pytest.raises(UsageError, match="context length is 32"):
        occurrences(model, tokenizer, "bank", ["bank " * 9])


def test_the_legend_of_attention_is_a_square_root() -> None:
    ones = np.ones((1, 1, 1, 1), np.float32)
    page = alignment_page(ones, ["a"], ["b"], {})
    swatches = re.findall(r'class="swatch" data-value="([\d.]+)"></canvas>(\d+)%<', page)
    assert len(swatches) == 6 and "square root" in page
    for value, share in swatches:
        assert float(value) == pytest.approx((int(share) / 100) ** 0.5, abs=0.005)


def test_principal_components_keep_distances() -> None:
    """Of vectors in a plane; lengths do not matter, and no layer is mirrored."""
    rng = np.random.default_rng(1)
    angles = rng.random((1, 7)) * np.pi / 2
    plane, _ = np.linalg.qr(rng.normal(size=(6, 2)))
    unit = np.stack([np.cos(angles), np.sin(angles)], axis=-1) @ plane.T  # (1, 7, 6)
    lengths = 1 + rng.random((1, 7, 1))
    points, shares = pca(np.concatenate([unit * lengths, unit, np.ones((1, 7, 6))]))
    expected = np.linalg.norm(unit[0, :, None] - unit[0], axis=-1)
    assert np.allclose(np.linalg.norm(points[0][:, None] - points[0], axis=-1), expected)
    assert np.allclose(points[0], points[1])
    assert shares[0].sum() == pytest.approx(1) and shares[0, 0] > shares[0, 1]
    assert np.allclose(points[2], 0) and np.allclose(shares[2], 0)  # all are equal


def test_long_tables_are_folded_and_the_actual_token_is_marked() -> None:
    tokenizer = train_tokenizer([], "byte")
    model = of_family("gpt2", **SHAPE)
    for ids, folded in ((IDS, False), (IDS + IDS + IDS[:4], True)):
        seen = inspect_text(model, ids, top=258)  # all tokens, so that the actual one is among them
        heads = describe_heads(seen.attention, ids)
        page = inspection_page(tokenizer, seen, heads, {})
        table = page.partition("<h2>Predictions by token</h2>")[2]
        assert table.count("<details open>") == (not folded)
        assert f"<summary>{len(ids)} tokens</summary>" in table
        first = table.partition("<tbody>")[2].partition("</tr>")[0]
        assert first.count(" came") == 2 and table.count(" came") == 2 * (len(ids) - 1)


def test_neighbours_are_those_of_all_pairs() -> None:
    model = of_family("gpt2", **SHAPE)
    tokenizer = train_tokenizer([], "byte")
    id = token_of(tokenizer, "q")
    table = model.token_embedding.weight.detach()
    cosines = torch.nn.functional.cosine_similarity(table[id][None], table)
    order = cosines.argsort(descending=True).tolist()
    assert order[0] == id
    found = neighbours(model, id, 7)
    assert [other for other, _ in found] == order[1:8]
    assert [value for _, value in found] == pytest.approx([float(cosines[n]) for n in order[1:8]])
    with pytest.raises(UsageError, match="not a single token, but 'n', 'o'"):
        token_of(tokenizer, "no")


def test_positions_of_every_kind() -> None:
    kind, vectors = position_vectors(of_family("gpt2", **SHAPE))
    assert kind == "learned"
    assert vectors.shape == (32, 16)
    kind, vectors = position_vectors(of_family("gpt2", positions="sinusoidal", **SHAPE))
    assert kind == "sinusoidal"
    assert np.allclose(similarities(vectors).diagonal(), 1, atol=1e-6)
    kind, vectors = position_vectors(of_family("modern", **SHAPE))
    assert kind.startswith("rotary")
    assert np.allclose((vectors**2).sum(axis=1), 2, atol=1e-5)  # of two angles, sines and cosines
    with pytest.raises(UsageError, match="--positions"):
        position_vectors(of_family("lstm"))


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
def test_what_decided(pool: Any) -> None:
    base = of_family("gpt2", **SHAPE)
    config = ClassifierConfig(base=base.config, labels=("bad", "good", "so"), window=32, pool=pool)
    classifier = Classifier(config, base).eval()
    torch.nn.init.normal_(classifier.score.weight)
    found = attribute(classifier, IDS)
    logits = classifier(torch.tensor([IDS]), torch.tensor([len(IDS)]))[0]
    assert found.label == int(logits.argmax())
    assert np.allclose(found.probabilities, logits.softmax(dim=0).detach(), atol=1e-6)
    assert found.rollout.sum() == pytest.approx(1, abs=1e-5)
    assert len(found.rollout) == len(found.gradient) == len(IDS)

    def margin(changed: int, factor: float) -> float:
        """The margin of the label, with one token's vector made longer."""
        factors = torch.ones(1, len(IDS), 1)
        factors[0, changed] = factor
        handle = base.token_embedding.register_forward_hook(lambda _, x, y: y * factors)
        scores = classifier(torch.tensor([IDS]), torch.tensor([len(IDS)]))[0].detach().double()
        handle.remove()
        others = (scores.sum() - scores[found.label]) / 2
        return float(scores[found.label] - others)

    for place in (0, 5, len(IDS) - 1):
        slope = (margin(place, 1.002) - margin(place, 0.998)) / 0.004
        assert found.gradient[place] == pytest.approx(slope, abs=2e-2, rel=2e-2)


def test_a_page_of_two_hundred_tokens_is_small() -> None:
    """With as many heads as GPT-2, all of them random: the worst case."""
    model = of_family("gpt2", **SHAPE | {"layers": 12, "heads": 12, "dim": 96, "context": 200})
    ids = torch.randint(256, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    seen = inspect_text(model, ids)
    heads = describe_heads(seen.attention, ids)
    page = inspection_page(train_tokenizer([], "byte"), seen, heads, {})
    assert 100_000 < len(page.encode()) < 1_000_000
