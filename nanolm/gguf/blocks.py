"""The number formats of GGUF tensors, and conversion to and from float32.

    >>> dequantize(quantize(weights, "Q8_0"), "Q8_0")  # close to the weights

A quantized format stores 32 consecutive numbers as a block: a float16 scale `d`, in Q4_1 also a
minimum, and small integers. Formats and rounding are those of llama.cpp.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
SIZE = 32  # numbers in a block


class NumberFormat(NamedTuple):
    code: int  # in the file
    numbers: int  # of a block
    bytes: int  # of a block


FORMATS = {
    "F32": NumberFormat(0, 1, 4),
    "F16": NumberFormat(1, 1, 2),
    "Q4_0": NumberFormat(2, SIZE, 18),
    "Q4_1": NumberFormat(3, SIZE, 20),
    "Q8_0": NumberFormat(8, SIZE, 34),
    "BF16": NumberFormat(30, 1, 2),
}
NAMES = {each.code: name for name, each in FORMATS.items()}
UNSUPPORTED = {  # to name them in errors
    **{6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K"},
    **{14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


def quantize(numbers: Floats, name: str) -> Bytes:
    """The stored bytes of float32 numbers. The rows of quantized formats are whole blocks."""
    match name:
        case "F32":
            return numbers.astype("<f4").reshape(-1).view(np.uint8)
        case "F16":
            with np.errstate(over="ignore"):  # the caller checks the range
                return numbers.astype("<f2").reshape(-1).view(np.uint8)
        case "BF16":  # the upper half of a float32, rounded to the nearest even number
            bits = numbers.astype("<f4").reshape(-1).view(np.uint32)
            return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2").view(np.uint8)
    blocks = numbers.reshape(-1, SIZE)
    if name == "Q8_0":
        scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        scaled = blocks * inverse(scale)
        # Halves are rounded away from zero.
        whole = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
        return joined(scale, whole.view(np.uint8))
    if name != "Q4_0":
        raise ValueError(f"nanolm does not write {name}")
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)  # the largest becomes 0, the integer that has no opposite
    whole = np.minimum(blocks * inverse(scale) + np.float32(8.5), 15).astype(np.uint8)
    return joined(scale, whole[:, : SIZE // 2] | whole[:, SIZE // 2 :] << 4)


def inverse(scale: Floats) -> Floats:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def joined(scale: Floats, integers: Bytes) -> Bytes:
    return np.concatenate([scale.astype("<f2").view(np.uint8), integers], axis=1).reshape(-1)


def dequantize(stored: Bytes, name: str) -> Floats:
    """The float32 numbers of stored bytes, as one row."""
    match name:
        case "F32":
            return stored.view("<f4").astype(np.float32, copy=False)
        case "F16":
            return stored.view("<f2").astype(np.float32)
        case "BF16":
            return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = stored.reshape(-1, FORMATS[name].bytes)
    header = 4 if name == "Q4_1" else 2
    scales = blocks[:, :header].copy().view("<f2").astype(np.float32)
    integers = blocks[:, header:]
    numbers = np.empty((len(blocks), SIZE), dtype=np.float32)
    if name == "Q8_0":
        numbers[:] = integers.view(np.int8)
    else:
        numbers[:, : SIZE // 2], numbers[:, SIZE // 2 :] = integers & 15, integers >> 4
    with np.errstate(invalid="ignore", over="ignore"):  # damaged files; the caller checks
        if name == "Q4_0":
            numbers -= 8
        numbers *= scales[:, :1]
        if name == "Q4_1":
            numbers += scales[:, 1:]
    return numbers.reshape(-1)
