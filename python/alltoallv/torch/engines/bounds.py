"""What sums of codes can be wrong by, as torch operators: one value per group; docs/quantization.md defines it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv.quantization.spec import Overflow, Quantization

#: Half a unit in the last place, relative; the least error; the largest value; the least that becomes inf.
_ROUNDING = {
    torch.float16: (2.0**-11, 2.0**-25, 65504.0, 65520.0),
    torch.bfloat16: (2.0**-8, 2.0**-126, float.fromhex("0x1.fep127"), float.fromhex("0x1.ffp127")),
}


def errors(codes: Tensor, scales: Tensor, spec: Quantization, length: int, ranks: int) -> Tensor:
    """Returns what codes can be wrong by in a sum over ``ranks``: [rows, groups, elements of a group or 1 for all].

    Args:
        codes: One row of codes per vector of ``length`` elements.
        scales: One row per vector: float32, or bytes, after the tensor's scale in NVFP4, before a group's spikes.
    """
    form, groups = spec.row, spec.groups(length)
    table = torch.tensor(_core.code_errors(spec.format, ranks), dtype=torch.float32, device=codes.device)
    if form.scale == "float32" and form.mantissa >= 0:
        factors = scales[:, :groups]
    elif form.mantissa >= 0:
        by_byte = torch.tensor(_core.scale_errors(spec.format), dtype=torch.float32, device=codes.device)
        first = 4 if form.scale == "e4m3" else 0
        factors = by_byte[scales[:, first : first + groups].view(torch.uint8).long()]
        if first:
            factors = factors * scales[:, :first].contiguous().view(torch.float32)
    else:
        return _of_groups(scales, spec, length, ranks)[:, :, None]
    group = min(spec.group_size, max(length, 1))
    numbers = codes[:, : spec.code_bytes(length)].view(torch.uint8).long()
    if spec.bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)
    numbers = torch.nn.functional.pad(numbers, (0, groups * group - numbers.shape[1]))  # code 0 has the least error
    return table[numbers.view(len(codes), groups, group)] * factors[:, :, None]


def _of_groups(scales: Tensor, spec: Quantization, length: int, ranks: int) -> Tensor:
    """Returns the same, [rows, groups], in a format whose codes all have one error."""
    form, groups = _core.code_formats[spec.format], spec.groups(length)
    words = scales.view(torch.int32).reshape(len(scales), -1, 3 if form.spikes else 1)[:, :groups]
    signed = words[..., 0].contiguous().view(torch.float32)
    factors = torch.where(signed < 0, -signed, signed)
    if spec.bits < 4:  # by the largest scale codes may have been saturated
        factors = torch.where(factors == 2.0**126, math.inf, factors)
    table = torch.full((groups,), _core.code_errors(spec.format, ranks)[0], dtype=torch.float32, device=scales.device)
    bound = table * factors
    if form.rotated:
        turned, last = _core.turned_errors(spec.format, ranks), length - (groups - 1) * spec.group_size
        sizes = [min(spec.group_size, length)] * (groups - 1) + [last] * (groups > 0)
        table = torch.tensor([turned[size.bit_length() - 1] for size in sizes], device=scales.device)
        bound = torch.where(signed < 0, table.float() * factors, bound)
    for word in words[..., 1:].unbind(2):
        magnitude = (word & 0x7FFF0000).view(torch.float32)
        unit = (word & 0x7F800000).view(torch.float32) * 2.0**-8
        unit = torch.where(magnitude == float.fromhex("0x1.fep127"), 2 * unit, unit)
        relative = torch.tensor((ranks + 8) * 2.0**-24, dtype=torch.float32, device=scales.device)
        bound = torch.where(word & 0xFFFF == 0xFFFF, bound, torch.maximum(bound, unit + magnitude * relative))
    return bound


def summed(terms: Tensor, average: bool) -> Tensor:
    """Adds the errors of the ranks' codes, in their order: [1, groups, elements]."""
    total = terms[:1]
    for row in range(1, len(terms)):
        total = total + terms[row : row + 1]
    return total / torch.full_like(total, len(terms)) if average else total


def bounds(
    total: Tensor, values: Tensor, spec: Quantization, ranks: int, dtype: torch.dtype, overflow: Overflow
) -> Tensor:
    """Returns the bounds of results, [rows, groups].

    Args:
        total: What every element can be wrong by before it is rounded to ``dtype``.
        values: float32 ``[rows, length]``: what is rounded.
        overflow: What becomes of values that do not fit.
    """
    groups, length = total.shape[1], values.shape[1]
    group = min(spec.group_size, max(length, 1))
    padded = torch.nn.functional.pad(values.abs(), (0, groups * group - length))
    most = padded.view(len(values), groups, group).amax(2)
    error = total.amax(2)
    if dtype in _ROUNDING:
        unit, least, largest, too_large = _ROUNDING[dtype]
        rounding = most * unit + least + (most - largest).clamp(min=0.0)
        error = error + (torch.where(most >= too_large, math.inf, rounding) if overflow == "infinity" else rounding)
    bound = error * (1 + (ranks + 16) * 2.0**-23) + (ranks + 2) * 2.0**-123
    return torch.where(most.isfinite(), bound, math.inf)
