"""Quantization of one vector, in NumPy: the rules of docs/quantization.md, a row of a matrix for each group.

Values are float32, float16 or bfloat16 (ml_dtypes); arithmetic is float32, one operation at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from alltoallv.testing.golden import dtype_of

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
Overflow = Literal["saturate", "raise", "infinity"]

_F32 = np.float32
_LEAST_NORMAL = _F32(2.0**-126)
_LEAST_SCALE = _F32(2.0**-125)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A vector in codes.

    Attributes:
        codes: one byte per element (bits 8) or per two (bits 4); uint8.
        scales: one per group; float32.
        count: elements.
        group_size: elements per group; the last may be shorter.
        bits: 8 or 4.
    """

    codes: npt.NDArray[np.uint8]
    scales: Floats
    count: int
    group_size: int
    bits: int


def code_bytes(count: int, group_size: int = 128, bits: int = 8) -> int:
    """Bytes of the codes: groups begin at a byte."""
    whole, rest = divmod(count, group_size)
    return count if bits == 8 else whole * ((group_size + 1) // 2) + (rest + 1) // 2


def scale_of(largest: npt.ArrayLike, bits: int = 8) -> Floats:
    """The scales of groups whose largest magnitudes are ``largest``: float32 that may be NaN, of any shape."""
    most, magnitudes = _F32(_largest_code(bits)), np.asarray(largest, _F32)
    with np.errstate(all="ignore"):
        scale = np.maximum(magnitudes / most, _LEAST_SCALE)
        while (too_large := np.isfinite(scale) & np.isinf(scale * most)).any():
            scale = np.where(too_large, np.nextafter(scale, _F32(0)), scale)
        return one_nan(np.where(magnitudes < _LEAST_NORMAL, _F32(0), scale))


def quantize(x: Array, group_size: int = 128, bits: int = 8, error: Floats | None = None) -> Quantized:
    """Codes and scales of ``x`` (flattened).

    Args:
        x: float32, float16 or bfloat16.
        group_size: elements per scale.
        bits: 8 or 4.
        error: float32, as many elements as x: added first, then replaced by what the codes do not hold.
    """
    _check(group_size, bits)
    values = widened(x).reshape(-1)
    with np.errstate(all="ignore"):
        if error is not None:
            values = values + error.reshape(-1)
        groups = _rows(values, group_size)
        scales = scale_of(np.max(np.abs(groups), axis=1), bits)
        codes = _codes(groups, scales[:, None], bits)
        if error is not None:
            lost = np.where(np.isfinite(scales)[:, None], groups - codes.astype(_F32) * scales[:, None], _F32(0))
            error.reshape(-1)[:] = lost.reshape(-1)[: values.size]
    packed = _pack(codes, bits)[: code_bytes(values.size, group_size, bits)]
    return Quantized(packed, scales, values.size, group_size, bits)


def codes_of(quantized: Quantized) -> Codes:
    """One int8 per element."""
    if quantized.bits == 8:
        return quantized.codes.view(np.int8)
    longest = min(quantized.group_size, max(quantized.count, 1))
    data = _rows(quantized.codes, (longest + 1) // 2)
    nibbles = np.stack([data & 15, data >> 4], axis=2).astype(np.int8)
    codes: Codes = np.where(nibbles < 8, nibbles, nibbles - 16).astype(np.int8)
    return codes.reshape(len(data), 2 * data.shape[1])[:, :longest].reshape(-1)[: quantized.count]


def dequantize(quantized: Quantized, dtype: str | npt.DTypeLike = "float32", overflow: Overflow = "saturate") -> Array:
    """The product code * scale for every element, rounded to ``dtype``."""
    scales = np.repeat(quantized.scales, min(quantized.group_size, max(quantized.count, 1)))[: quantized.count]
    with np.errstate(all="ignore"):
        return cast(codes_of(quantized).astype(_F32) * scales, dtype, overflow)


def dequantize_sum(sources: Sequence[Quantized], average: bool = False) -> Floats:
    """The sum of the dequantized sources in float32, in their order; ``average`` divides it by their number."""
    with np.errstate(all="ignore"):
        total: Floats = dequantize(sources[0])
        for source in sources[1:]:
            total = total + dequantize(source)
        return one_nan(total / _F32(len(sources)) if average else total)


def cast(values: Floats, dtype: str | npt.DTypeLike, overflow: Overflow = "saturate") -> Array:
    """Rounds float32 half to even.

    Raises:
        OverflowError: a finite value does not fit, and ``overflow`` is "raise".
    """
    target = dtype_of(dtype)
    with np.errstate(all="ignore"):
        result = values.astype(target)
    exceeded = np.isinf(result) & np.isfinite(values)
    return one_nan(handle_overflow(result, values, exceeded, overflow))


def handle_overflow(result: Array, values: Floats, exceeded: npt.NDArray[np.bool_], overflow: Overflow) -> Array:
    """``result`` where ``exceeded`` values become what ``overflow`` says."""
    if overflow not in ("saturate", "raise", "infinity"):
        raise ValueError(f"overflow is {overflow!r}, expected saturate, raise or infinity")
    if overflow == "infinity" or not exceeded.any():
        return result
    if overflow == "raise":
        index = tuple(map(int, np.argwhere(exceeded)[0]))
        raise OverflowError(f"{values[index]} at {index} does not fit into {result.dtype.name}")
    largest = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}
    most = largest.get(result.dtype.name, float(np.finfo(_F32).max))
    return np.where(exceeded, np.copysign(most, values).astype(result.dtype), result)


def one_nan(values: Array) -> Array:
    """Every NaN becomes the positive quiet one without payload."""
    bits = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000}[values.dtype.name]
    nan = np.array([bits], f"u{values.dtype.itemsize}").view(values.dtype)[0]
    return np.where(np.isnan(values), nan, values)


def widened(x: Array) -> Floats:
    """Exact conversion to float32."""
    if x.dtype.name not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype is {x.dtype.name}, expected float32, float16 or bfloat16")
    with np.errstate(all="ignore"):
        return x.astype(_F32)


def _rows(values: Array, length: int) -> Array:
    """Rows of ``length``, or as many as there are, the last filled up with zeros."""
    length = min(length, max(values.size, 1))
    return np.append(values, np.zeros(-values.size % length, values.dtype)).reshape(-1, length)


def _codes(groups: Floats, scales: Floats, bits: int) -> Codes:
    quotients = np.rint(groups * (_F32(1) / scales))
    signs = np.isinf(groups) * np.sign(groups)
    wanted = np.where(np.isinf(scales), signs * _F32(_largest_code(bits)), quotients)
    return np.where(np.isnan(scales) | (scales == 0), _F32(0), wanted).astype(np.int8)


def _pack(codes: Codes, bits: int) -> npt.NDArray[np.uint8]:
    if bits == 4:
        nibbles = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2))).view(np.uint8) & 15
        return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8).reshape(-1)
    return codes.view(np.uint8).reshape(-1)


def _largest_code(bits: int) -> int:
    return {8: 127, 4: 7}[bits]


def _check(group_size: int, bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}, expected 4 or 8")
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, expected at least 1")
