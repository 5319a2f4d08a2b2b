"""What quantized sums can be wrong by, of tensors on a device: MindSpore operators for codes of integers.

docs/quantization.md has the definition; the bits are the same as from the CPU's kernels.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore
from mindspore import Tensor, ops

from alltoallv import _core
from alltoallv.mindspore.device_codes import Codes, added, filled
from alltoallv.quantization.spec import Quantization

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
