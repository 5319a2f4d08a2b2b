"""Reduces over an engine that only moves bytes: parts go to their owners, which add them in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Layout, packed

if TYPE_CHECKING:
    from alltoallv.torch.engines.device import DeviceMember

_SMALL = 16384  # bytes; smaller inputs go to every rank in one step
_BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
_NUMBERS = {"sum": torch.Tensor.add_, "avg": torch.Tensor.add_, "prod": torch.Tensor.mul_}
_UNSIGNED = {
    getattr(torch, unsigned): signed
    for unsigned, signed in (("uint16", torch.int16), ("uint32", torch.int32), ("uint64", torch.int64))
    if hasattr(torch, unsigned)
}


class Steps:
    """Exchanges flat views of bytes as the steps of a reduction, under its name, on the current stream."""

    def __init__(self, member: DeviceMember, operator: str) -> None:
        self._member, self.operator = member, operator
        self.rank, self.size = member.rank, member.size

    def exchange(self, output: Tensor, input: Tensor, layout: Layout) -> None:
        self._member.exchange(self.operator, "uint8", output, input, layout).run()

    def gather(self, output: Tensor, input: Tensor) -> None:
        """Concatenates every rank's input; the inputs have one length on all ranks."""
        layout = _core.Request.all_gather(self.size, input.shape).layout
        self._member.exchange("all_gather_into_tensor", "uint8", output, input, layout).run()


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as bytes: engines that lack its dtype can move these."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)  # strides of an empty tensor may forbid a view
    return tensor.detach().reshape(-1).view(torch.uint8)


def in_bytes(layout: Layout, itemsize: int) -> Layout:
    """Converts a layout of elements to bytes."""
    sends, sdispls, recvs, rdispls = ([value * itemsize for value in values] for values in layout)
    return sends, sdispls, recvs, rdispls


def reduce_in_order(steps: Steps, output: Tensor, input: Tensor, op: str, counts: Sequence[int]) -> None:
    """Does all_reduce or reduce_scatter of flat tensors; ``counts[j]`` elements belong to rank j.

    Every rank gets the same bits, and shared memory also gives these: 16-bit floats are added in float32 and rounded
    once, integers wrap, and a resulting NaN is the quiet one.
    """
    size, total, own = steps.size, sum(counts), counts[steps.rank]
    first = packed(counts)[steps.rank]
    gathers = steps.operator == "all_reduce"
    if total * input.itemsize <= _SMALL:
        everything = input.new_empty(size * total)
        steps.gather(as_bytes(everything), as_bytes(input))
        parts = everything.view(size, total)
        output.copy_(combine(parts if gathers else parts[:, first : first + own], op))
        return
    parts = input.new_empty(size * own)
    layout = (list(counts), packed(counts), [own] * size, packed([own] * size))
    steps.exchange(as_bytes(parts), as_bytes(input), in_bytes(layout, input.itemsize))
    mine = combine(parts.view(size, own), op)
    if not gathers:
        output.copy_(mine)
        return
    longest = max(counts)
    if longest == min(counts):
        steps.gather(as_bytes(output), as_bytes(mine))
        return
    padded = input.new_zeros(longest)
    padded[:own] = mine
    everything = input.new_empty(size * longest)
    steps.gather(as_bytes(everything), as_bytes(padded))
    for part, count, end in zip(everything.view(size, longest), counts, accumulate(counts), strict=True):
        output[end - count : end] = part[:count]


def combine(parts: Tensor, op: str) -> Tensor:
    """Returns ``parts[0] op parts[1] op ...`` in this order; shape ``[W, n]`` becomes ``[n]``."""
    dtype = parts.dtype
    if dtype is torch.bool and op not in _BITS:
        return parts.any(0) if op in ("sum", "max") else parts.all(0)
    if len(parts) == 1:
        return parts[0]
    if op in _BITS:
        return reduce(_BITS[op], parts)
    if op in ("min", "max"):
        return _extreme(parts, op)
    if dtype in _UNSIGNED:  # the signed dtype gives the same bits, and torch can add it
        return combine(parts.view(_UNSIGNED[dtype]), op).view(dtype)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        _NUMBERS[op](total, part.to(wide))
    if op == "avg":
        total /= len(parts)
    return _quiet(total.to(dtype)) if dtype.is_floating_point else total


def _extreme(parts: Tensor, op: str) -> Tensor:
    """Returns the minimum or maximum; the earlier of equal values stays, and any NaN gives NaN."""
    dtype = parts.dtype
    if dtype in _UNSIGNED:
        signed = parts.view(_UNSIGNED[dtype])
        lowest = torch.iinfo(signed.dtype).min  # flips the sign bit: the order of unsigned numbers
        return (_extreme(signed ^ lowest, op) ^ lowest).view(dtype)
    result = parts[0].clone()
    for part in parts[1:]:
        result = torch.where(part < result if op == "min" else part > result, part, result)
    if dtype.is_floating_point:
        result[parts.isnan().any(0)] = float("nan")
    return result


def _quiet(values: Tensor) -> Tensor:
    return values.masked_fill_(values.isnan(), float("nan"))
