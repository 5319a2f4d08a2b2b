"""The kernels of quantization as MindSpore operators, for tensors on a device, in PyNative and in graphs.

They follow the rules of docs/quantization.md, one float32 operation at a time, and give the bits of the CPU's kernels.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore
from mindspore import Tensor, jit_class, mint, ops

from alltoallv import _core
from alltoallv.errors import InvalidParamError
from alltoallv.quantization.spec import Quantization

_SMALLEST = 2.0**-126  # below it a group has no scale
_LARGEST_SCALE = {127: float.fromhex("0x1.020406p+121"), 7: float.fromhex("0x1.249248p+125")}
#: By the core's name: the dtype, its largest finite value, and the smallest that would be rounded to infinity.
_LIMITS = {
    "float16": (mindspore.float16, 65504.0, 65520.0),
    "bfloat16": (mindspore.bfloat16, float.fromhex("0x1.fep+127"), float.fromhex("0x1.ffp+127")),
    "float32": (mindspore.float32, float.fromhex("0x1.fffffep+127"), math.inf),
}


@jit_class
class Codes:
    """Turns vectors of one length into int8 or int4 codes with float32 scales, and back; a table has one per row.

    Attributes:
        size: Bytes of codes of a vector; its last group is filled up with zeros.
        groups: Scales of a vector.
    """

    def __init__(self, quantization: Quantization, length: int) -> None:
        if quantization.format not in ("int8", "int4"):
            raise InvalidParamError(
                f"format is {quantization.format}, which MindSpore on Ascend does not offer, expected int8 or int4",
                id=1327,
            )
        self._length, self._group = length, min(quantization.group_size, max(length, 1))
        self._pairs, self._most = quantization.bits == 4, 2 ** (quantization.bits - 1) - 1
        self.groups = -(-length // self._group)
        self.size = self.groups * (-(-self._group // 2) if self._pairs else self._group)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantizes float32 ``[n, length]``; returns int8 ``[n, size]``, float32 ``[n, groups]`` and what was lost."""
        n = x.shape[0]
        table = filled(x, self.groups * self._group).reshape(n, self.groups, self._group)
        magnitudes = ops.abs(table)
        infinite, undefined = magnitudes == math.inf, table != table
        has_infinite, has_undefined = _any(infinite), _any(undefined)
        finite = ops.logical_not(ops.logical_or(has_infinite, has_undefined))
        largest = ops.where(magnitudes < math.inf, magnitudes, 0.0).max(axis=2, keepdims=True)
        usual = ops.logical_and(largest >= _SMALLEST, finite)
        scale = ops.where(usual, largest, 1.0) / self._most
        scale = ops.minimum(ops.maximum(scale, 2.0**-125), _LARGEST_SCALE[self._most])
        inverse = ops.where(usual, 1.0 / scale, 0.0)
        special = ops.where(has_infinite, math.inf, 0.0)
        scale = ops.where(usual, scale, ops.where(has_undefined, math.nan, special))
        ends = infinite.astype(mindspore.float32) * ops.where(table < 0, -1.0, 1.0)
        codes = ops.where(finite, mint.round(table * inverse), ops.where(has_undefined, 0.0, ends * self._most))
        lost = ops.where(finite, table - codes * scale, 0.0)
        packed = self._packed(codes).astype(mindspore.int8).reshape(n, self.size)
        return packed, scale.reshape(n, self.groups), lost.reshape(n, -1)[:, : self._length]

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Returns float32 ``[n, length]``: each code times its scale."""
        n = codes.shape[0]
        numbers = self._unpacked(codes.astype(mindspore.float32).reshape(n, self.groups, -1))
        return (numbers * scales.reshape(n, self.groups, 1)).reshape(n, -1)[:, : self._length]

    def _packed(self, codes: Tensor) -> Tensor:
        """Puts two codes of 4 bits into a byte, the first into the low half."""
        if not self._pairs:
            return codes
        pairs = filled(codes.reshape(-1, self._group), self._group + self._group % 2).reshape(-1, 2)
        low, high = pairs[:, 0], pairs[:, 1]
        return high * 16 + ops.where(low < 0, low + 16, low)

    def _unpacked(self, bytes_: Tensor) -> Tensor:
        if not self._pairs:
            return bytes_
        high = ops.floor(bytes_ / 16)
        low = bytes_ - high * 16
        halves = ops.stack((ops.where(low > 7, low - 16, low), high), axis=3)
        return halves.reshape(*bytes_.shape[:2], -1)[:, :, : self._group]


def added(terms: Tensor, average: bool = False, tree: bool = False) -> Tensor:
    """Adds the rows of float32 ``[W, n]`` in their order, or in a tree, and divides by W for an average."""
    total = in_tree(terms) if tree else terms[0]
    if not tree:
        for row in range(1, terms.shape[0]):
            total = total + terms[row]
    return canonical_nan(total / terms.shape[0] if average else total)


def in_tree(terms: Tensor) -> Tensor:
    """Adds the rows of ``[n, m]``: neighbours in pairs, then the results in pairs, and so on."""
    while terms.shape[0] > 1:
        pairs = terms.shape[0] // 2
        both = terms[: 2 * pairs].reshape(pairs, 2, -1)
        added = both[:, 0] + both[:, 1]
        terms = added if 2 * pairs == terms.shape[0] else ops.cat((added, terms[2 * pairs :]))
    return terms[0]


def scaled(total: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``(total + offset) * scale``, and where both are finite: there even an infinity is one that did not fit.

    ``total`` is int32 ``[rows, channels]``.
    """
    values = (total.astype(mindspore.float32) + offset) * scale
    sound = ops.logical_and(ops.abs(scale) < math.inf, ops.abs(offset) < math.inf)
    return values.reshape(-1), ops.logical_and(ops.abs(values) >= 0, sound).reshape(-1)


def saturated(values: Tensor) -> Tensor:
    """Rounds to int8 codes from -127 to 127; NaN becomes 0."""
    rounded = ops.where(values != values, 0.0, mint.round(values))
    bounded = ops.minimum(ops.maximum(rounded, -127.0), 127.0)
    return bounded.astype(mindspore.int8)


def narrowed(values: Tensor, name: str, overflow: str, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rounds float32 values to a dtype; also returns where one did not fit. ``allowed``: see `scaled`."""
    dtype, largest, too_large = _LIMITS[name]
    magnitudes = ops.abs(values)
    exceeded = ops.logical_and(magnitudes >= too_large, magnitudes < math.inf if allowed is None else allowed)
    if overflow != "infinity":
        ends = ops.where(values < 0, -largest, largest)
        values = ops.where(exceeded, ends, values)
    return canonical_nan(values).astype(dtype), exceeded


def filled(table: Tensor, length: int) -> Tensor:
    """Returns ``[n, m]`` as ``[n, length]``, with zeros after the last element of each row."""
    n, m = table.shape
    return table if m == length else ops.cat((table, ops.zeros((n, length - m), table.dtype)), axis=1)


def _any(where: Tensor) -> Tensor:
    return where.astype(mindspore.float32).max(axis=2, keepdims=True) > 0


def canonical_nan(values: Tensor) -> Tensor:
    return ops.where(values != values, math.nan, values)


# What quantized sums can be wrong by, of tensors on a device, for codes of integers, by the definition in
# docs/quantization.md. The bits are the same as from the CPU's kernels.


#: By the core's name: half a unit in the last place, relative; the least error; the largest value; the least that
#: becomes infinity.
_ROUNDING = {
    "float16": (2.0**-11, 2.0**-25, 65504.0, 65520.0),
    "bfloat16": (2.0**-8, 2.0**-126, float.fromhex("0x1.fep+127"), float.fromhex("0x1.ffp+127")),
}


class SeenCodes(Codes):
    """Codes that keep what they decode: scales and values, one row per vector."""

    def __init__(self, quantization: Quantization, length: int) -> None:
        super().__init__(quantization, length)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        values = super().decode(codes, scales)
        self.seen.append((scales.reshape(-1, self.groups), values))
        return values


def of_sum(seen: list[tuple[Tensor, Tensor]], rank: int, spec: Quantization, dtype: str) -> Tensor:
    """Returns the bounds of this rank's part, one per group, from what a reduction has decoded: the ranks' codes, then
    the codes of every part's sum if it travels as codes.
    """
    scales, values = seen[0]
    size, average = len(scales), spec.op == "avg"
    error = _of_codes(scales, spec, size)
    total = error[0]
    for row in range(1, size):
        total = total + error[row]
    total, sums = total / size if average else total, added(values, average)
    if len(seen) > 1:
        total, sums = total + _of_codes(seen[1][0][rank : rank + 1], spec, size)[0], seen[1][1][rank]
    return _bounds(total.reshape(1, -1), sums.reshape(1, -1), spec, size, dtype).reshape(-1)


def of_rows(seen: tuple[Tensor, Tensor], spec: Quantization, dtype: str) -> Tensor:
    """Returns the bounds of rows, ``[rows, groups]``."""
    scales, values = seen
    return _bounds(_of_codes(scales, spec, 1), values, spec, 1, dtype)


def largest_magnitude(x: Tensor) -> int:
    """Returns the bits, without sign, of the largest magnitude; inf's if there is inf or NaN."""
    if not x.size:
        return 0
    magnitudes = ops.abs(x.astype(mindspore.float32)).reshape(-1)
    finite = magnitudes < math.inf
    if not bool(finite.astype(mindspore.int8).min().asnumpy()):
        return 0x7F800000
    return int(magnitudes.max().asnumpy().view("uint32"))


def _of_codes(scales: Tensor, spec: Quantization, ranks: int) -> Tensor:
    return scales * _core.code_errors(spec.format, ranks)[0]  # one error for all codes


def _bounds(error: Tensor, values: Tensor, spec: Quantization, ranks: int, dtype: str) -> Tensor:
    """Returns ``[rows, groups]`` of errors before the last rounding, and of the values that are rounded."""
    rows, groups = error.shape
    group = min(spec.group_size, max(values.shape[1], 1))
    magnitudes = filled(ops.abs(values), groups * group).reshape(rows, groups, group)
    finite = magnitudes < math.inf
    most = ops.where(finite, magnitudes, 0.0).max(axis=2)
    bounded: Any = finite.astype(mindspore.float32).min(axis=2) > 0
    if dtype in _ROUNDING:
        unit, least, largest, too_large = _ROUNDING[dtype]
        error = error + (most * unit + least + ops.maximum(most - largest, 0.0))
        if spec.overflow == "infinity":
            bounded = ops.logical_and(bounded, most < too_large)
    bounds = error * (1 + (ranks + 16) * 2.0**-23) + (ranks + 2) * 2.0**-123
    return ops.where(bounded, bounds, math.inf)
