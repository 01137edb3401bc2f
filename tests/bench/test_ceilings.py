"""The peak performance of known GPUs."""

import pytest
import torch

from nanolm.bench import machine

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla T4": 65e12,
    # A similar name is a different GPU.
    "NVIDIA L40": None,
    "NVIDIA H100 NVL": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
}


@pytest.mark.parametrize(("name", "peak"), PEAKS.items())
def test_a_peak_is_known_or_not_given(name: str, peak: float | None) -> None:
    assert machine.peak_of(name) == peak


def test_a_gpu_is_called_what_the_driver_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Made Up")
    assert machine.facts("cuda", "bfloat16")["name"] == "NVIDIA Made Up"
    assert machine.facts("cpu", "float32")["name"] == machine.processor()


def test_what_is_timed_is_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATRIX_SIDE, "cpu", 8)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 100)
    assert machine.product("cpu", "float32").amount == 2 * 8 * 8 * 8
    assert machine.copy("cpu").amount == 200
    products, copies = machine.ceilings("cpu", "float32", 0.01)
    assert products > 0
    assert copies > 0
