"""The kernels of quantization as torch operators, for accelerators without Triton.

They follow the rules of docs/quantization.md, one float32 operation at a time. Tensors are flat; codes and scales have
one row per part or source. Where ``overflow`` is "raise" a function returns an int32 tensor, 1 if a value did not fit;
else None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from alltoallv.quantization.spec import Overflow, Quantization

_INF = 0x7F800000
_NAN = 0x7FC00000
_MOST = {8: 127, 4: 7}
_LARGEST_SCALE = {8: float.fromhex("0x1.020406p+121"), 4: float.fromhex("0x1.249248p+125")}
_LARGEST = {torch.float16: 0x477FE000, torch.bfloat16: 0x7F7F0000, torch.float32: 0x7F7FFFFF}
_TOO_LARGE = {torch.float16: 0x477FF000, torch.bfloat16: 0x7F7F8000, torch.float32: _INF}


def quantize(
    x: Tensor, how: Quantization, codes: Tensor, scales: Tensor, error: Tensor | None = None, part: int | None = None
) -> None:
    for rows, elements, length in in_parts(x.numel(), part):
        state = None if error is None else error[elements].view(-1, length)
        _quantize(x[elements].view(-1, length), how, codes[rows], scales[rows], state)


def in_parts(count: int, part: int | None) -> Iterator[tuple[slice, slice, int]]:
    """Yields the rows, the elements and the elements per row: of all whole parts, then of a shorter last one."""
    part = part or max(count, 1)
    whole = count // part
    if whole:
        yield slice(0, whole), slice(0, whole * part), part
    if rest := count % part:
        yield slice(whole, whole + 1), slice(whole * part, count), rest


def _quantize(x: Tensor, how: Quantization, codes: Tensor, scales: Tensor, error: Tensor | None) -> None:
    """Quantizes every row of ``x`` as a vector of its own."""
    length = x.shape[1]
    groups, size = how.groups(length), how.code_bytes(length)
    how = _fitted(how, length)
    values = x.float()
    if error is not None:
        values = values + error
    table = _grouped(values, how.group_size)
    bits = table.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    largest = magnitudes.amax(2, keepdim=True)
    usual = (largest >= 0x00800000) & (largest < _INF)
    scale = torch.where(usual, largest, 0).view(torch.float32) / _MOST[how.bits]
    scale = scale.clamp(2.0**-125, _LARGEST_SCALE[how.bits])
    inverse = torch.where(usual, 1.0 / scale, 0.0)
    special = torch.where(largest < _INF, 0, torch.where(largest > _INF, _NAN, _INF)).int()
    scale = torch.where(usual, scale.view(torch.int32), special).view(torch.float32)
    extreme = (magnitudes == _INF) * torch.where(bits < 0, -_MOST[how.bits], _MOST[how.bits])
    finite = torch.where(largest < _INF, torch.round(table * inverse), 0.0).to(torch.int32)
    quotients = torch.where(largest == _INF, extreme, finite).to(torch.int8)
    scales[:, :groups] = scale.view(-1, groups)
    codes[:, :size] = _packed(quotients, how)[:, :size].view(codes.dtype)
    if error is not None:
        lost = torch.where(largest < _INF, table - quotients * scale, 0.0)
        error.copy_(lost.flatten(1)[:, :length])


def dequantize_sum(
    codes: Tensor, scales: Tensor, how: Quantization, out: Tensor, *, average: bool = False
) -> Tensor | None:
    return _narrow(_sum(codes, scales, how, out.numel(), average), out, how.overflow)


def dequantize(codes: Tensor, scales: Tensor, how: Quantization, out: Tensor, part: int | None = None) -> Tensor | None:
    overflows = None
    for rows, elements, length in in_parts(out.numel(), part):
        values = _one_nan(_values(codes[rows], scales[rows], how, length)).view(-1)
        found = _narrow(values, out[elements], how.overflow)
        overflows = found if overflows is None or found is None else overflows | found
    return overflows


def requantize(
    codes: Tensor,
    scales: Tensor,
    how: Quantization,
    count: int,
    new_codes: Tensor,
    new_scales: Tensor,
    *,
    average: bool = False,
    error: Tensor | None = None,
) -> None:
    quantize(_sum(codes, scales, how, count, average), how, new_codes, new_scales, error)


def sum_shared_scale(
    inputs: Tensor, scales: Tensor, offset: Tensor, out: Tensor, overflow: Overflow = "saturate"
) -> Tensor | None:
    offsets = offset * len(inputs)
    total = inputs.sum(0, dtype=torch.int32).float()
    values = (total.view(-1, scales.numel()) + offsets) * scales
    return _narrow(
        values.view(-1), out, overflow, (scales.isfinite() & offsets.isfinite()).expand_as(values).reshape(-1)
    )


def quantize_scaled(x: Tensor, scales: Tensor, codes: Tensor) -> None:
    codes.copy_(_saturated(x.float().view(-1, scales.numel()) * (1.0 / scales)).view(-1))


def requantize_sum(inputs: Tensor, ratios: Tensor, codes: Tensor) -> None:
    total = inputs.sum(0, dtype=torch.int32).float()
    codes.copy_(_saturated(total.view(-1, ratios.numel()) * ratios).view(-1))


def _fitted(how: Quantization, count: int) -> Quantization:
    """Returns ``how`` without padding to a group that is longer than the vector."""
    return how if how.group_size <= count else replace(how, group_size=max(count, 1))


def _grouped(values: Tensor, group_size: int) -> Tensor:
    """Reshapes [rows, elements] to [rows, groups, elements], with zeros after the last element."""
    short = -values.shape[1] % group_size
    return torch.nn.functional.pad(values, (0, short)).view(len(values), -1, group_size)


def _packed(codes: Tensor, how: Quantization) -> Tensor:
    """Returns one row of bytes with the codes of each row's groups."""
    if how.bits == 8:
        return codes.flatten(1)
    pairs = torch.nn.functional.pad(codes, (0, codes.shape[2] % 2)).view(len(codes), -1, 2).to(torch.int32)
    return (pairs[..., 0] & 15 | (pairs[..., 1] & 15) << 4).to(torch.uint8)


def _sum(codes: Tensor, scales: Tensor, how: Quantization, count: int, average: bool) -> Tensor:
    total = _values(codes[:1], scales[:1], how, count)
    for row in range(1, len(codes)):
        total = total + _values(codes[row : row + 1], scales[row : row + 1], how, count)
    if average:
        total = total / len(codes)
    return _one_nan(total).view(-1)


def _values(codes: Tensor, scales: Tensor, how: Quantization, length: int) -> Tensor:
    """Returns code times scale: [rows, length]."""
    groups, size = how.groups(length), how.code_bytes(length)
    how = _fitted(how, length)
    terms = _unpacked(codes[:, :size], how) * scales[:, :groups, None]
    return terms.flatten(1)[:, :length].contiguous()


def _one_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), float("nan"), values)


def _unpacked(codes: Tensor, how: Quantization) -> Tensor:
    """Returns the codes of every row's groups."""
    if how.bits == 8:
        return _grouped(codes.view(torch.int8).float(), how.group_size)
    pairs = _grouped(codes.view(torch.uint8), (how.group_size + 1) // 2).to(torch.int32)
    nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(2)[..., : how.group_size]
    return ((nibbles ^ 8) - 8).float()


def _narrow(values: Tensor, out: Tensor, overflow: Overflow, allowed: Tensor | None = None) -> Tensor | None:
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
