"""Every model that the switches can make, small enough to try them all."""

import itertools
from typing import Any, get_args

import torch
from hypothesis import strategies as st

from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.config import (
    RECURRENT,
    FeedForwardKind,
    GPTConfig,
    ModelConfig,
    Norm,
    NormPlace,
    Positions,
    RecurrentConfig,
    RopeScaling,
    configure,
)

SHAPE = {"vocab_size": 40, "layers": 2, "heads": 4, "dim": 16, "context": 8}
SWITCHES: dict[str, tuple[Any, ...]] = {
    "positions": get_args(Positions),
    "norm": get_args(Norm),
    "norm_place": get_args(NormPlace),
    "feed_forward": get_args(FeedForwardKind),
    "qk_norm": (True, False),
    "bias": (True, False),
    "tied": (True, False),
    "kv_heads": (1, 2, 4),
}
SCALINGS = (
    None,
    RopeScaling("linear", 4.0),
    RopeScaling("llama3", 8.0, 8, 1.0, 4.0),
    RopeScaling("yarn", 4.0, 8, 1.0, 32.0, 1.13),
)


def gpt_config(**changes: Any) -> GPTConfig:
    config = configure("modern", **SHAPE | changes)
    assert isinstance(config, GPTConfig)
    return config


def every_gpt(**fixed: Any) -> list[GPTConfig]:
    """All combinations of the switches that are not fixed."""
    open_switches = {name: values for name, values in SWITCHES.items() if name not in fixed}
    return [
        gpt_config(**fixed, **dict(zip(open_switches, values, strict=True)))
        for values in itertools.product(*open_switches.values())
    ]


def configs() -> st.SearchStrategy[ModelConfig]:
    """Any model there is: a Transformer nine times of ten."""
    switches = {name: st.sampled_from(values) for name, values in SWITCHES.items()}
    more = {
        "head_width": st.sampled_from([None, 6]),
        "rope_scaling": st.sampled_from(SCALINGS),
        "layers": st.integers(1, 2),
        "hidden": st.integers(8, 40),
        "dropout": st.sampled_from([0.0, 0.1]),
    }
    transformers = st.builds(gpt_config, **switches, **more)
    recurrent = st.builds(
        RecurrentConfig,
        cell=st.sampled_from(RECURRENT),
        tied=st.booleans(),
        layers=st.integers(1, 3),
        vocab_size=st.just(SHAPE["vocab_size"]),
        dim=st.just(SHAPE["dim"]),
        context=st.just(SHAPE["context"]),
    )
    return st.integers(0, 9).flatmap(lambda n: recurrent if n == 0 else transformers)


def lively(config: ModelConfig, std: float = 0.3) -> Model:
    """A model whose every weight is random: fresh ones are zero in places, with nothing to see."""
    torch.manual_seed(0)
    model = build_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def of_family(family: str, **changes: Any) -> Model:
    return lively(configure(family, **SHAPE | changes))
