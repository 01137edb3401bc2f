"""Models for property-based tests."""

from hypothesis import strategies as st
from models import PUBLISHED, SCALINGS, SHAPE, SWITCHES, gpt_config

from nanolm.model.config import RECURRENT, ModelConfig, RecurrentConfig


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
    published = {name: st.sampled_from(values) for name, values in PUBLISHED.items()}
    transformers = st.builds(gpt_config, **switches, **more, **published)
    transformers = transformers.filter(lambda config: not config.problems())
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
