"""Packed numbers and scales."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from operator_case import Case

Array = np.ndarray[Any, Any]


def packed(values: Array) -> Array:
    """Eight numbers of four bits in a word, the first in the lowest bits."""
    words = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.uint32)
    for place in range(8):
        words |= (values[..., place::8].astype(np.int64) & 15).astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def quant_param(scale: Array, offset: Array | None = None) -> Array:
    def one(number: float, shift: float | None) -> int:
        bits = struct.unpack("<I", struct.pack("<f", number))[0] & 0xFFFFE000
        return bits | 1 << 46 | (0 if shift is None else (round(shift) & 0x1FF) << 37)

    shifts = [None] * len(scale) if offset is None else list(offset)
    return np.array([one(a, b) for a, b in zip(scale, shifts, strict=True)], np.int64)


CASES = [
    Case(
        "npu_trans_quant_param",
        lambda r: {"scale": np.float32(r.normal(size=5)), "offset": np.float32(r.normal(size=5) * 50)},
        quant_param,
        dtypes=("float32",),
        exact=True,
    ),
    Case(
        "npu_trans_quant_param",
        lambda r: {"scale": np.float32(r.normal(size=5))},
        quant_param,
        dtypes=("float32",),
        exact=True,
    ),
    Case(
        "npu_convert_weight_to_int4pack",
        lambda r: {"weight": r.integers(-8, 8, (3, 16)).astype(np.int32)},
        lambda weight: packed(weight),
        dtypes=("int32",),
        exact=True,
    ),
]
