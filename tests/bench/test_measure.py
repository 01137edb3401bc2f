"""The measurements and their units."""

import sys

import pytest
from models import of_family

from nanolm.bench.measure import flops_per_token, measure, shape
from nanolm.bench.peers import Transformers, transformers_model
from nanolm.bench.settings import BenchSettings
from nanolm.errors import UsageError
from nanolm.model.config import configure

# Models with 40 tokens, 2 layers, 4 heads, width 16, context 8 and 64 hidden units:
# attention, feed-forward layer, norms (times two), the last norm and the output layer.
WEIGHTS = {
    "modern": 2 * (768 + 256 + 3 * 1024 + 2 * 16 + 2 * 4) + 16 + 640,
    "llama": 2 * (768 + 256 + 3 * 1024 + 2 * 16) + 16 + 640,
    "gpt2": 2 * (768 + 48 + 256 + 16 + 2 * 1024 + 64 + 16 + 4 * 16) + 32 + 640,
}


@pytest.mark.parametrize("family", WEIGHTS)
def test_operations_by_hand(family: str) -> None:
    assert flops_per_token(of_family(family)) == 6 * WEIGHTS[family] + 12 * 2 * 16 * 8


def test_operations_without_attention() -> None:
    model = of_family("lstm")
    assert flops_per_token(model) == 6 * (model.parameter_count() - 40 * 16)


def test_steps_fit_the_device() -> None:
    _, rows = shape("nano", BenchSettings(), "cpu")
    assert rows == 16
    config, rows = shape("gpt2", BenchSettings(), "cpu")
    assert rows * config.context == 2048


def test_a_peer_has_the_same_shape() -> None:
    for family in WEIGHTS:
        theirs = transformers_model(configure(family, **SMALL))
        ours = of_family(family, **SMALL)
        assert sum(part.numel() for part in theirs.parameters()) == ours.parameter_count()


SMALL = {"vocab_size": 300, "layers": 2, "heads": 2, "dim": 16, "context": 8}


def test_a_peer_learns() -> None:
    peer = Transformers(configure("modern", **SMALL), 2, "cpu", "float32", note=print)
    before = [part.detach().clone() for part in peer.parameters]
    peer.step()
    peer.wait()
    changed = [not old.equal(new) for old, new in zip(before, peer.parameters, strict=True)]
    assert sum(changed) > len(changed) / 2


def test_no_such_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"it is recurrent.*--family modern"):
        measure(BenchSettings(("nano",), family="lstm", against="transformers"), note=print)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="pip install transformers"):
        transformers_model(configure("modern", **SMALL))
