"""What `nanolm train-pairs` chooses by itself."""

from typing import Any

import pytest

from nanolm.pairs import recipe
from nanolm.pairs.settings import PairSettings


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "available_threads", lambda: 2)


def choose(tokens: int, **given: Any) -> PairSettings:
    asked = PairSettings(pairs=("x.tsv",), device="cpu", **given)
    return recipe.choose_settings(asked, None, tokens, longest=40)[0]


def test_the_width_follows_from_time_and_tokens() -> None:
    widths = [choose(340_000, minutes=minutes).dim for minutes in (1, 5, 20, 60)]
    assert widths == [64, 96, 192, 192]
    assert choose(3_000_000, minutes=30).dim == 96  # five epochs have to fit in
    assert choose(3_000, minutes=1).dim == 64  # and, of few pairs, a thousand steps
    assert choose(3_000, minutes=1, dim=256).dim == 256


def test_recurrent_models_are_wide_and_have_one_layer() -> None:
    modern = choose(340_000, minutes=5)
    gru = choose(340_000, minutes=5, family="seq2seq-gru")
    assert (gru.layers, gru.encoder_layers, gru.dim, gru.heads) == (1, 1, 128, None)
    assert (modern.layers, modern.encoder_layers, modern.heads) == (3, 3, 3)
    assert gru.optimizer == "adamw"
    assert choose(340_000, minutes=5, family="seq2seq-gru", layers=2).layers == 2


def test_narrow_models_on_a_cpu_use_adamw() -> None:
    shapes = {choose(340_000, minutes=n) for n in (1, 5, 60)}
    found = {(each.dim, each.layers, each.optimizer) for each in shapes}
    assert found == {(64, 2, "adamw"), (96, 3, "adamw"), (192, 3, "muon")}


def test_post_norm_needs_a_lower_learning_rate() -> None:
    post, pre = (
        choose(340_000, minutes=5, family="encoder-decoder", norm_place=place).lr or 0
        for place in ("post", "pre")
    )
    assert post == pytest.approx(pre / 2, rel=0.05)  # both are rounded
