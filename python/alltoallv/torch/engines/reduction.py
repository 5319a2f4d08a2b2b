"""Reduces over an engine that only moves bytes: parts go to their owners, which add them in the order of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Layout, packed

if TYPE_CHECKING:
    from alltoallv.torch.engines.device import DeviceMember

_SMALL = 16384  # bytes; smaller inputs go to every rank in one step
_BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
_STEPS = {"sum": torch.add, "avg": torch.add, "prod": torch.mul, **_BITS}
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

    def gather(self, output: Tensor, input: Tensor, counts: Sequence[int] = ()) -> None:
        """Concatenates every rank's input; rank j's has ``counts[j]`` bytes, by default all have one length."""
        if len(set(counts)) > 1:
            own = [counts[self.rank]] * self.size
            layout = own, [0] * self.size, list(counts), packed(counts)
            self._member.exchange("all_gather", "uint8", output, input, layout).run()
            return
        layout = _core.Request.all_gather(self.size, input.shape).layout
        self._member.exchange("all_gather_into_tensor", "uint8", output, input, layout).run()


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as bytes: engines that lack its dtype can move these."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)  # strides of an empty tensor may forbid a view
    return tensor.detach().reshape(-1).view(torch.uint8)


def in_bytes(layout: Layout, itemsize: int) -> Layout:
    """Converts a layout of elements to one of bytes, or of other units of which ``itemsize`` make an element."""
    sends, sdispls, recvs, rdispls = ([value * itemsize for value in values] for values in layout)
    return sends, sdispls, recvs, rdispls


def reduce_in_order(
    steps: Steps, output: Tensor, input: Tensor, op: str, counts: Sequence[int], leaves: int = 0
) -> None:
    """Does all_reduce or reduce_scatter of flat tensors; ``counts[j]`` elements of the result belong to rank j.

    Every rank gets the same bits, and shared memory also gives these: 16-bit floats are added in float32 and rounded
    once, integers wrap, and a resulting NaN is the quiet one. For ``leaves`` see `ReductionPlan`.
    """
    size, total, own = steps.size, sum(counts), counts[steps.rank]
    output, input = output.detach(), input.detach()
    begins = packed(counts)
    own_slice = slice(begins[steps.rank], begins[steps.rank] + own)
    gathers, tree = steps.operator == "all_reduce", leaves > 0
    each = leaves // size if tree else 1  # vectors of every rank
    vectors = input.view(each, total)
    if input.nbytes <= _SMALL:
        everything = input.new_empty(size * input.numel())
        steps.gather(as_bytes(everything), as_bytes(input))
        parts = everything.view(size * each, total)
        combine((parts if gathers else parts[:, own_slice]).unbind(), op, tree, output)
        return
    others = [0 if j == steps.rank else own * each for j in range(size)]  # this rank's own part is read where it lies
    sends = [0 if j == steps.rank else count * each for j, count in enumerate(counts)]
    came = input.new_empty(sum(others))
    if each > 1:  # what goes to a rank lies together
        input = torch.cat([part.reshape(-1) for part in vectors.split(list(counts), 1)])
    layout = (sends, [begin * each for begin in begins], others, packed(others))
    steps.exchange(as_bytes(came), as_bytes(input), in_bytes(layout, input.itemsize))
    terms = list(came.view(-1, own).unbind()) if own else []
    terms[steps.rank * each : steps.rank * each] = vectors[:, own_slice].unbind()
    result = combine(terms, op, tree)
    if not gathers:
        output.copy_(result)
        return
    steps.gather(as_bytes(output), as_bytes(result), [count * input.itemsize for count in counts])


def combine(terms: Sequence[Tensor], op: str, tree: bool = False, out: Tensor | None = None) -> Tensor:
    """Returns ``terms[0] op terms[1] op ...`` in this order, or in a tree; they are flat and of one dtype.

    The tree combines neighbours in pairs, then the results in pairs, and so on. ``out``: where the result goes, apart
    from the terms.
    """
    dtype = terms[0].dtype
    if dtype is torch.bool and op not in _BITS:
        op = "bor" if op in ("sum", "max") else "band"
    if len(terms) == 1 or op in ("min", "max"):
        result = terms[0] if len(terms) == 1 else _extreme(terms, op)
        return result if out is None else out.copy_(result)
    if dtype in _UNSIGNED and op not in _BITS:  # the signed dtype gives the same bits, and torch can add it
        signed = _UNSIGNED[dtype]
        into = None if out is None else out.view(signed)
        return combine([term.view(signed) for term in terms], op, tree, into).view(dtype)
    halves = dtype in (torch.float16, torch.bfloat16)
    nodes = [term.float() if halves else term for term in terms] if tree else list(terms)
    while tree and len(nodes) > 2:
        pairs = [_STEPS[op](a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = pairs + nodes[2 * len(pairs) :]
    first = reduce(_STEPS[op], nodes[1:-1], nodes[0].float() if halves else nodes[0])
    total = _STEPS[op](first, nodes[-1], out=None if halves else out)
    if op == "avg":
        total /= len(terms)
    if halves:
        total = total.to(dtype) if out is None else out.copy_(total)
    return _quieten(total) if dtype.is_floating_point else total


def _extreme(terms: Sequence[Tensor], op: str) -> Tensor:
    """Returns the minimum or maximum; the earlier of equal values stays, and any NaN gives NaN."""
    dtype = terms[0].dtype
    if dtype in _UNSIGNED:
        signed = _UNSIGNED[dtype]
        lowest = torch.iinfo(signed).min  # flips the sign bit: the order of unsigned numbers
        return (_extreme([term.view(signed) ^ lowest for term in terms], op) ^ lowest).view(dtype)
    result = terms[0]
    for term in terms[1:]:
        better = term < result if op == "min" else term > result
        if dtype.is_floating_point:
            better = better.logical_or_(term.isnan())  # and stays: nothing is better than NaN
        result = torch.where(better, term, result)
    return _quieten(result) if dtype.is_floating_point else result


def _quieten(values: Tensor) -> Tensor:
    return values.masked_fill_(values.isnan(), math.nan)
