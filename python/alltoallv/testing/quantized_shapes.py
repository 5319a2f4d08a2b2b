"""Groups that are rotated, and spikes that are kept apart, in NumPy, by the definitions of docs/quantization.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv.testing.golden import dtype_of
from alltoallv.testing.quantized_formats import Format

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Spikes = tuple[npt.NDArray[np.uint16], Array]  # index in the group, bfloat16; two per group

NO_SPIKE = np.uint16(0xFFFF)
_F32 = np.float32


def shaped(groups: Floats, count: int, form: Format) -> tuple[Floats, npt.NDArray[np.bool_], Spikes]:
    """Returns what is encoded of ``count`` elements in rows, which rows are rotated, and their spikes.

    The last row may be filled up.
    """
    result = groups.copy()
    turned = np.zeros(len(groups), bool)
    index, value = np.full((len(groups), 2), NO_SPIKE), np.zeros((len(groups), 2), dtype_of("bfloat16"))
    for rows, length in _lengths(groups, count):
        part = result[rows, :length]
        if form.spikes:
            part, index[rows], value[rows] = _without_spikes(part)
        if form.rotated:
            part, turned[rows] = _rotated(part)
        result[rows, :length] = part
    return result, turned, (index, value)


def restored(products: Floats, count: int, scales: Floats, spikes: Spikes, form: Format) -> Floats:
    """Returns the values of rows of products of codes and scales."""
    result = products.copy()
    for rows, length in _lengths(products, count):
        part = result[rows, :length]
        if form.rotated:
            back = ((scales[rows] < 0) & np.isfinite(scales[rows]))[:, None]
            part = np.where(back, rotation(part), part)
        if form.spikes:
            for index, value in zip(spikes[0][rows].T, spikes[1][rows].T, strict=True):
                part = np.where(np.arange(length) == index[:, None], value.astype(_F32)[:, None], part)
        result[rows, :length] = part
    return result


def rotation(rows: Floats) -> Floats:
    """Multiplies every row by Hadamard matrices over the root of their size, one per binary digit of the length."""
    parts, begin, length = [], 0, rows.shape[1]
    for digit in range(length.bit_length() - 1, -1, -1):
        size = 1 << digit
        if not length & size:
            continue
        block = rows[:, begin : begin + size]
        step = 1
        while step < size:
            pairs = block.reshape(len(rows), size // (2 * step), 2, step)
            block = np.concatenate([pairs[:, :, :1] + pairs[:, :, 1:], pairs[:, :, :1] - pairs[:, :, 1:]], axis=2)
            block = block.reshape(len(rows), size)
            step *= 2
        parts.append(block * _F32(size**-0.5))
        begin += size
    return np.concatenate(parts, axis=1)


def _lengths(groups: Floats, count: int) -> list[tuple[slice, int]]:
    """Returns rows and their length: of whole groups, then of a shorter last one."""
    full, rest = divmod(count, groups.shape[1])
    return [(slice(0, full), groups.shape[1])] * bool(full) + [(slice(full, full + 1), rest)] * bool(rest)


def _without_spikes(rows: Floats) -> tuple[Floats, npt.NDArray[np.uint16], Array]:
    finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(rows).all(axis=1))
    order = np.argsort(-np.where(finite[:, None], np.abs(rows), 0), axis=1, kind="stable")[:, :2]
    largest = np.take_along_axis(rows, order, axis=1)
    value = np.clip(largest, -float.fromhex("0x1.fep127"), float.fromhex("0x1.fep127")).astype(_F32)
    value = np.where(np.abs(largest) < 2.0**-126, np.copysign(_F32(0), largest), value)
    rest = rows.copy()
    np.put_along_axis(rest, order, _F32(0), axis=1)
    index, values = np.full((len(rows), 2), NO_SPIKE), np.zeros((len(rows), 2), dtype_of("bfloat16"))
    index[finite, : order.shape[1]] = order[finite]
    values[finite, : order.shape[1]] = value[finite].astype(dtype_of("bfloat16"))
    return np.where(finite[:, None], rest, rows), index, values


def _rotated(rows: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    largest = np.max(np.abs(rows), axis=1)
    may: npt.NDArray[np.bool_] = np.asarray(
        (largest >= 2.0**-60) & (largest < 2.0**117)
    )  # no sum is subnormal or infinite
    rotated = rotation(np.where((np.abs(rows) < 2.0**-100) | ~may[:, None], _F32(0), rows))
    turned: npt.NDArray[np.bool_] = np.asarray(may & (np.max(np.abs(rotated), axis=1) < largest))
    return np.where(turned[:, None], rotated, rows), turned
