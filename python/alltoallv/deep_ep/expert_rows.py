"""Lays received rows out by expert, one row for each choice, and codes rows for the low-latency calls."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv.errors import InvalidParamError
from alltoallv.torch.api.rows import as_bytes, sum_dtype

_GROUP = 128  # values that have one scale
_LARGEST = 448.0  # of float8_e4m3fn


def choice_slots(chosen: Tensor, starts: Tensor) -> Tensor:
    """Returns where each choice of a local expert lies, int64 as ``chosen`` ``[r, k]``; -1 where there is no choice.

    An expert's rows begin at its start and are in the order of the received rows.
    """
    flat = chosen.reshape(-1)
    places = (flat >= 0).nonzero().squeeze(1)
    places = places[flat[places].argsort(stable=True)]
    experts = flat[places]
    counts = experts.bincount(minlength=len(starts))
    offsets = starts - (counts.cumsum(0) - counts)
    slots = torch.full_like(flat, -1)
    slots[places] = offsets[experts] + torch.arange(len(places), device=flat.device)
    return slots.view(chosen.shape)


def expand(part: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Copies each row of ``[r, …]`` to its slots in ``[rows, …]``; all other rows are zeros."""
    used, out = slots >= 0, part.new_zeros(rows, *part.shape[1:])
    as_bytes(out)[slots[used]] = as_bytes(part)[used.nonzero()[:, 0]]
    return out


def expand_weights(weights: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Copies the weight of each choice ``[r, k]`` to its slot in ``[rows]``; all others are 0."""
    used, out = slots >= 0, weights.new_zeros(rows)
    out[slots[used]] = weights[used]
    return out


def fold(rows: Tensor, slots: Tensor) -> Tensor:
    """Adds up the rows of each slot's choices, in their order, in float32 or wider; returns ``[r, …]``."""
    total = rows.new_zeros(len(slots), *rows.shape[1:], dtype=sum_dtype(rows.dtype))
    for column in slots.unbind(1):
        used = column >= 0
        total[used] += rows[column[used]]
    return total


def fold_weights(weights: Tensor, slots: Tensor) -> Tensor:
    """Returns each choice's weight of ``[rows]`` as ``[r, k]``, 0 without a choice."""
    return torch.where(slots >= 0, weights[slots.clamp(min=0)] if len(weights) else 0, 0).to(weights.dtype)


def float8_codes(x: Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Returns float8_e4m3fn codes of ``[n, hidden]``, and a scale for each 128 values.

    A scale is the largest magnitude, at least 0.0001, over 448, in float32; with ``round_scale`` the next power of two;
    with ``use_ue8m0`` four of their exponents in an int32. A code is the value times 448 over the magnitude, or over
    the power of two.
    """
    if use_ue8m0 and not round_scale:
        raise InvalidParamError("use_ue8m0 is True, expected round_scale with it", id=1242)
    multiple = _GROUP * (4 if use_ue8m0 else 1)
    if x.shape[1] % multiple:
        raise InvalidParamError(f"x has {x.shape[1]} columns, expected a multiple of {multiple} with use_fp8", id=1243)
    groups = x.float().unflatten(1, (-1, _GROUP))
    largest = groups.abs().amax(-1).clamp(min=1e-4)
    scales, factors = largest / _LARGEST, _LARGEST / largest
    if round_scale:
        fraction, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
        factors = 1 / scales
    codes = (groups * factors[..., None]).to(torch.float8_e4m3fn).flatten(1)
    if use_ue8m0:
        scales = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    return codes, scales
