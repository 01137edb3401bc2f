import pytest

from nanolm.model.config import FAMILIES, PRESETS, configure
from nanolm.model.size import preset_sizes, training_bytes

# Peak memory of training steps in bfloat16 on an H200 (docs/benchmarks.md), in GB.
MEASURED = [
    ("modern", "mini", 64, 1.600),
    ("modern", "gpt2", 16, 9.187),
    ("llama", "mini", 16, 0.507),
    ("llama", "small", 16, 2.020),
    ("gpt2", "mini", 64, 1.442),
    ("gpt2", "small", 16, 1.779),
    ("gpt2", "gpt2", 16, 8.127),
    ("lstm", "gpt2", 16, 7.997),
]


@pytest.mark.parametrize(("family", "preset", "batch", "measured"), MEASURED)
def test_the_estimate_of_memory_is_close(
    family: str, preset: str, batch: int, measured: float
) -> None:
    (size,) = [size for size in preset_sizes(family) if size.preset == preset]
    shape = {name: getattr(size, name) for name in ("layers", "heads", "dim", "context")}
    config = configure(family, vocab_size=size.vocab_size, **shape)
    estimate = training_bytes(config, size.parameters, batch * size.context)
    assert estimate / 1e9 == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_preset_in_every_family(family: str) -> None:
    sizes = preset_sizes(family)
    assert [size.preset for size in sizes] == list(PRESETS)
    assert sorted(sizes, key=lambda size: size.parameters) == sizes
