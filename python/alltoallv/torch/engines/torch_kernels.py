"""The kernels of quantization as torch operators, for accelerators without Triton.

They follow the rules of docs/quantization.md, one float32 operation at a time. Tensors are flat; codes and scales have
one row per part or source. Where ``overflow`` is "raise" a function returns an int32 tensor, 1 if a value did not fit;
else None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv.quantization.spec import Overflow, Quantization

_INF = 0x7F800000
_NAN = 0x7FC00000
_LARGEST_SCALE = {8: 0x1020406 * 2.0**97, 6: 0x108420E * 2.0**99, 5: 0x1111110 * 2.0**100, 4: 0x1249248 * 2.0**101}
_LARGEST_SCALE |= {3: 2.0**126, 2: 2.0**126}
_NO_SPIKE = 0xFFFF
_RUN = 2048  # elements of a group whose codes lie together
_LARGEST = {torch.float16: 0x477FE000, torch.bfloat16: 0x7F7F0000, torch.float32: 0x7F7FFFFF}
_TOO_LARGE = {torch.float16: 0x477FF000, torch.bfloat16: 0x7F7F8000, torch.float32: _INF}


def quantize(
    x: Tensor, spec: Quantization, codes: Tensor, scales: Tensor, error: Tensor | None = None, part: int | None = None
) -> None:
    for rows, elements, length in in_parts(x.numel(), part):
        state = None if error is None else error[elements].view(-1, length)
        _quantize(x[elements].view(-1, length), spec, codes[rows], scales[rows], state)


def in_parts(count: int, part: int | None) -> Iterator[tuple[slice, slice, int]]:
    """Yields the rows, the elements and the elements per row: of all whole parts, then of a shorter last one."""
    part = part or max(count, 1)
    full_rows = count // part
    if full_rows:
        yield slice(0, full_rows), slice(0, full_rows * part), part
    if rest := count % part:
        yield slice(full_rows, full_rows + 1), slice(full_rows * part, count), rest


def _quantize(x: Tensor, spec: Quantization, codes: Tensor, scales: Tensor, error: Tensor | None) -> None:
    """Quantizes every row of ``x`` as a vector of its own."""
    length = x.shape[1]
    groups, row, most = spec.groups(length), spec.row, 2 ** (spec.bits - 1) - 1
    spec = _fitted(spec, length)
    values = x.float()
    if error is not None:
        values = values + error
    table = unshaped = _grouped(values, spec.group_size)
    turned = torch.zeros((), dtype=torch.bool, device=x.device)
    apart = torch.empty(0, dtype=torch.int32, device=x.device)
    if row.spikes:
        table, apart = _without_spikes(table, length)
    if row.rotated:
        table, turned = _rotated(table, length)
    bits = table.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    largest = magnitudes.amax(2, keepdim=True)
    usual = (largest >= 0x00800000) & (largest < _INF)
    scale = torch.where(usual, largest, 0).view(torch.float32) / most
    scale = scale.clamp(2.0**-125, _LARGEST_SCALE[spec.bits])
    scale = torch.where(turned, -scale, scale)
    inverse = torch.where(usual, 1.0 / scale, 0.0)
    special = torch.where(largest < _INF, 0, torch.where(largest > _INF, _NAN, _INF)).int()
    scale = torch.where(usual, scale.view(torch.int32), special).view(torch.float32)
    extreme = (magnitudes == _INF) * torch.where(bits < 0, -most, most)
    finite = torch.where(largest < _INF, torch.round(table * inverse), 0.0).clamp(-most, most).to(torch.int32)
    quotients = torch.where(largest == _INF, extreme, finite).to(torch.int8)
    if row.spikes:
        words = torch.cat([scale.view(torch.int32), apart], 2)
        scales[:, : 12 * groups] = words.flatten(1).view(torch.uint8)
    else:
        scales[:, :groups] = scale.view(-1, groups)
    size = spec.code_bytes(length)
    codes[:, :size] = _packed(quotients, spec, length).view(codes.dtype)
    if error is not None:
        restored = _restored(quotients * scale, scale, apart, spec, length)
        lost = torch.where(largest < _INF, unshaped - restored, 0.0)
        error.copy_(lost.flatten(1)[:, :length])


def dequantize_sum(
    codes: Tensor, scales: Tensor, spec: Quantization, out: Tensor, *, average: bool = False
) -> Tensor | None:
    return narrow(_sum(codes, scales, spec, out.numel(), average), out, spec.overflow)


def dequantize(
    codes: Tensor, scales: Tensor, spec: Quantization, out: Tensor, part: int | None = None
) -> Tensor | None:
    overflows = None
    for rows, elements, length in in_parts(out.numel(), part):
        values = _one_nan(_values(codes[rows], scales[rows], spec, length)).view(-1)
        exceeded = narrow(values, out[elements], spec.overflow)
        overflows = exceeded if overflows is None or exceeded is None else overflows | exceeded
    return overflows


def requantize(
    codes: Tensor,
    scales: Tensor,
    spec: Quantization,
    count: int,
    new_codes: Tensor,
    new_scales: Tensor,
    *,
    average: bool = False,
    error: Tensor | None = None,
) -> None:
    quantize(_sum(codes, scales, spec, count, average), spec, new_codes, new_scales, error)


def sum_shared_scale(
    inputs: Tensor, scales: Tensor, offset: Tensor, out: Tensor, overflow: Overflow = "saturate"
) -> Tensor | None:
    offsets = offset * len(inputs)
    total = inputs.sum(0, dtype=torch.int32).float()
    values = (total.view(-1, scales.numel()) + offsets) * scales
    return narrow(
        values.view(-1), out, overflow, (scales.isfinite() & offsets.isfinite()).expand_as(values).reshape(-1)
    )


def quantize_scaled(x: Tensor, scales: Tensor, codes: Tensor) -> None:
    codes.copy_(_saturated(x.float().view(-1, scales.numel()) * (1.0 / scales)).view(-1))


def requantize_sum(inputs: Tensor, ratios: Tensor, codes: Tensor) -> None:
    total = inputs.sum(0, dtype=torch.int32).float()
    codes.copy_(_saturated(total.view(-1, ratios.numel()) * ratios).view(-1))


def _fitted(spec: Quantization, count: int) -> Quantization:
    """Returns ``spec`` without padding to a group that is longer than the vector."""
    return spec if spec.group_size <= count else replace(spec, group_size=max(count, 1))


def _grouped(values: Tensor, group_size: int) -> Tensor:
    """Reshapes [rows, elements] to [rows, groups, elements], with zeros after the last element."""
    short = -values.shape[1] % group_size
    return torch.nn.functional.pad(values, (0, short)).view(len(values), -1, group_size)


def _whole_and_rest(table: Tensor, length: int) -> list[Tensor]:
    """Returns the whole groups of all rows, and the shorter last ones without what fills them up."""
    full, rest = divmod(length, table.shape[2])
    return [table[:, :full]] * bool(full) + [table[:, full:, :rest]] * bool(rest)


def _without_spikes(table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns the groups with zeros for their spikes, and these as words of index and bfloat16: [rows, groups, 2]."""
    bits = table.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    places = torch.arange(table.shape[2], device=table.device)
    elements = torch.arange(table.shape[1] * table.shape[2], device=table.device).view(table.shape[1:])
    keys = torch.where(elements < length, magnitudes.long() * 4096 + (4095 - places), -1)
    top_keys, index = keys.topk(min(2, table.shape[2]), dim=2)
    finite = magnitudes.amax(2, keepdim=True) < _INF
    taken, its_bits = finite & (top_keys >= 0), bits.gather(2, index)
    size = its_bits & 0x7FFFFFFF
    value = ((size + 0x7FFF + ((size >> 16) & 1)) >> 16).clamp(max=0x7F7F)
    value = torch.where(size < 0x00800000, 0, value) | (its_bits >> 16) & 0x8000
    words = torch.where(taken, index.int() | value << 16, _NO_SPIKE).int()
    rest = table.scatter(2, index, torch.where(taken, 0.0, table.gather(2, index)))
    return rest, torch.nn.functional.pad(words, (0, 2 - words.shape[2]), value=_NO_SPIKE)


def _rotated(table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns the groups, rotated where that makes their largest magnitude smaller, and which are."""
    magnitudes = table.view(torch.int32) & 0x7FFFFFFF
    largest = magnitudes.amax(2, keepdim=True)
    may = (largest >= (127 - 60) << 23) & (largest < (127 + 117) << 23)
    rotated = _rotation(torch.where(may & (magnitudes >= (127 - 100) << 23), table, 0.0), length)
    turned = may & ((rotated.view(torch.int32) & 0x7FFFFFFF).amax(2, keepdim=True) < largest)
    return torch.where(turned, rotated, table), turned


def _rotation(table: Tensor, length: int) -> Tensor:
    """Multiplies every group by Hadamard matrices over the root of their size, one per binary digit of its length."""
    rotated = []
    for groups in _whole_and_rest(table, length):
        parts, begin, n = [], 0, groups.shape[2]
        for size in (1 << digit for digit in range(n.bit_length() - 1, -1, -1) if n >> digit & 1):
            block, step = groups[..., begin : begin + size], 1
            while step < size:
                first, second = block.reshape(*groups.shape[:2], -1, 2, step).unbind(3)
                block = torch.stack([first + second, first - second], 3).view(*groups.shape[:2], size)
                step *= 2
            root = torch.tensor(size**-0.5, dtype=torch.float32, device=table.device)
            parts.append(block * root)
            begin += size
        rotated.append(torch.nn.functional.pad(torch.cat(parts, 2), (0, table.shape[2] - n)))
    return torch.cat(rotated, 1)


def _restored(terms: Tensor, scale: Tensor, apart: Tensor, spec: Quantization, length: int) -> Tensor:
    """Returns values of products of codes and scales: rotated back, with spikes."""
    row = spec.row
    if row.rotated:
        back = (scale < 0) & scale.isfinite()
        terms = torch.where(back, _rotation(torch.where(back, terms, 0.0), length), terms)
    if row.spikes:
        places = torch.arange(terms.shape[2], device=terms.device)
        for word in apart.split(1, 2):
            value = (word & ~0xFFFF).view(torch.float32)
            terms = torch.where(places == (word & 0xFFFF), value, terms)
    return terms


def _planes(bits: int) -> list[int]:
    return [width for width in (8, 4, 2, 1) if bits & width]


def _packed(codes: Tensor, spec: Quantization, length: int) -> Tensor:
    """Returns one row of bytes with the codes of each row's groups."""
    if spec.bits == 8:
        return codes.flatten(1)[:, :length]
    packed = []
    for groups in _whole_and_rest(codes, length):
        planes = []
        for run in groups.to(torch.int32).split(_RUN, 2):
            shift = 0
            for width in _planes(spec.bits):
                each = torch.nn.functional.pad(run >> shift & (1 << width) - 1, (0, -run.shape[2] % (8 // width)))
                shifts = torch.arange(0, 8, width, dtype=torch.int32, device=codes.device)
                planes.append((each.view(*run.shape[:2], -1, 8 // width) << shifts).sum(3))
                shift += width
        packed.append(torch.cat(planes, 2).flatten(1))
    return torch.cat(packed, 1).to(torch.uint8)


def _sum(codes: Tensor, scales: Tensor, spec: Quantization, count: int, average: bool) -> Tensor:
    total = _values(codes[:1], scales[:1], spec, count)
    for row in range(1, len(codes)):
        total = total + _values(codes[row : row + 1], scales[row : row + 1], spec, count)
    if average:
        total = total / len(codes)
    return _one_nan(total).view(-1)


def _values(codes: Tensor, scales: Tensor, spec: Quantization, length: int) -> Tensor:
    """Returns code times scale: [rows, length]."""
    groups, size = spec.groups(length), spec.code_bytes(length)
    spikes = spec.row.spikes
    if length == 0:
        return torch.zeros(len(codes), 0, device=codes.device)
    spec = _fitted(spec, length)
    words = scales.view(torch.int32).reshape(len(scales), -1, 3 if spikes else 1)[:, :groups]
    scale = words[..., :1].contiguous().view(torch.float32)
    terms = _unpacked(codes[:, :size], spec, length) * scale
    return _restored(terms, scale, words[..., 1:], spec, length).flatten(1)[:, :length].contiguous()


def _one_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), float("nan"), values)


def _unpacked(codes: Tensor, spec: Quantization, length: int) -> Tensor:
    """Returns the codes of every row's groups."""
    group = spec.group_size
    if spec.bits == 8:
        return _grouped(codes.view(torch.int8).float(), group)
    unpacked, begin, top = [], 0, 1 << spec.bits - 1
    for count, n in ((length // group, group), (int(length % group > 0), length % group)):
        if not count:
            continue
        size = sum(-(-n * width // 8) for width in _planes(spec.bits))
        rows = codes[:, begin : begin + count * size].view(torch.uint8).reshape(len(codes), count, size).to(torch.int32)
        begin, at, runs = begin + count * size, 0, []
        for run in (min(n - first, _RUN) for first in range(0, n, _RUN)):
            total, shift = torch.zeros(len(codes), count, run, dtype=torch.int32, device=codes.device), 0
            for width in _planes(spec.bits):
                plane = rows[..., at : at + -(-run * width // 8)]
                shifts = torch.arange(0, 8, width, dtype=torch.int32, device=codes.device)
                parts = (plane[..., None] >> shifts & (1 << width) - 1).flatten(2)[..., :run]
                total, shift, at = total | parts << shift, shift + width, at + plane.shape[2]
            runs.append(total)
        unpacked.append(torch.nn.functional.pad(torch.cat(runs, 2), (0, group - n)))
    return ((torch.cat(unpacked, 1) ^ top) - top).float()


def narrow(values: Tensor, out: Tensor, overflow: Overflow, allowed: Tensor | None = None) -> Tensor | None:
    """Rounds into ``out``; where ``allowed``, even an inf counts as a value that does not fit."""
    bits = values.contiguous().view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    exceeded = magnitudes >= _TOO_LARGE[out.dtype]
    exceeded &= magnitudes < _INF if allowed is None else (magnitudes <= _INF) & allowed
    if overflow != "infinity":
        bits = torch.where(exceeded, (bits - magnitudes) | _LARGEST[out.dtype], bits)
    rounded = bits.view(torch.float32).to(out.dtype)
    out.copy_(torch.where(rounded.isnan(), float("nan"), rounded))
    return exceeded.any().int().view(1) if overflow == "raise" else None


def _saturated(values: Tensor) -> Tensor:
    return torch.nan_to_num(torch.round(values), 0.0, 127.0, -127.0).clamp(-127, 127).to(torch.int8)


# What sums of codes can be wrong by: one value per group.


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
