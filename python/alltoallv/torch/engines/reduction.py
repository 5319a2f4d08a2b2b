"""Reduces over an engine that only moves bytes: parts go to their owners, which add them in the order of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Layout, packed
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization.spec import Overflow, Quantization, QuantizedReduction
from alltoallv.torch.engines import torch_kernels
from alltoallv.torch.engines.kernels import check_format, kernels_for, record_bytes, record_views
from alltoallv.torch.engines.torch_kernels import in_parts, narrow

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


# Quantized reductions, in two shots: exchange, sum, gather.
#
# Each step launches one kernel, in the order of the device's stream. Elements become messages, sums become messages
# again, then results. A message is a row of bytes. Its layout follows from the number of elements of a part, so that
# the messages of one exchange have one length; the last part may have fewer elements.


Pair: TypeAlias = tuple[Tensor, Tensor]  # codes and scales, one row per vector


class Codec:
    """Turns one rank's flat tensors into messages and back. This base class gathers the sum in the output's dtype.

    Attributes:
        unit: Parts and chunks begin at multiples of this number of elements.
        result: The output as bytes, where a sum is gathered in place; None where it must be decoded.
        overflows: int32 tensors, 1 where a value did not fit and that is an error.
        bounds: float32, what the sums of this rank's part can be wrong by, one per group, where that is asked for.
    """

    unit: int
    result: Tensor | None

    def __init__(self, request: QuantizedReduction, output: Tensor, input: Tensor) -> None:
        self._kernels = kernels_for(input.device.type)
        self._output, self._input = output, input
        self.result = output.view(torch.uint8)
        self.overflows: list[Tensor] = []
        self.bounds = input.new_empty(0, dtype=torch.float32)

    def sent_bytes(self, part: int) -> int:
        """Returns the bytes of a message of ``part`` elements."""
        raise NotImplementedError

    def gathered_bytes(self, part: int) -> int:
        """Returns the bytes of the sum of a part, as it is gathered."""
        return part * self._output.itemsize

    def encode(self, messages: Tensor, first: int, count: int, part: int) -> None:
        """Makes a message of every part of ``count`` elements of the input from ``first`` on."""
        raise NotImplementedError

    def combine(self, messages: Tensor, first: int, count: int, part: int, gathered: Tensor, held: int) -> None:
        """Sums all ranks' messages. ``held``: elements of this rank's part before ``first``."""
        raise NotImplementedError

    def decode(self, gathered: Tensor, first: int, count: int, part: int) -> None:
        """Writes ``count`` elements of the output, from ``first`` on, from what has been gathered."""
        for row, piece in _paired(gathered.view(self._output.dtype), self._output[first : first + count], part):
            piece.copy_(row)

    def _note(self, overflows: Tensor | None) -> None:
        if overflows is not None:
            self.overflows.append(overflows)


class Dynamic(Codec):
    """Sends scales and codes, and gathers the sum as such, or in the output's dtype."""

    def __init__(
        self,
        request: QuantizedReduction,
        output: Tensor,
        input: Tensor,
        error: Tensor | None,
        gather_error: Tensor | None,
    ) -> None:
        super().__init__(request, output, input)
        self.spec = request.quantization
        check_format(self.spec, self._kernels, pieces=True)
        self.unit = self.spec.group_size
        self._error, self._gather_error = error, gather_error
        self._average, self._in_tree = self.spec.op == "avg", request.leaves > 0
        self._tells_bound = request.bound
        if self.spec.gather == "quantized":
            self.result = None

    def sent_bytes(self, part: int) -> int:
        return record_bytes(self.spec, part)

    def gathered_bytes(self, part: int) -> int:
        return self.sent_bytes(part) if self.result is None else super().gathered_bytes(part)

    def _views(self, messages: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """Returns codes and scales, one row per message."""
        return record_views(messages, self.spec, part)

    def encode(self, messages: Tensor, first: int, count: int, part: int) -> None:
        its = slice(first, first + count)
        error = None if self._error is None else self._error[its]
        self._kernels.quantize(self._input[its], self.spec, *self._views(messages, part), error, part)

    def combine(self, messages: Tensor, first: int, count: int, part: int, gathered: Tensor, held: int) -> None:
        codes = self._views(messages, part)
        total = self._tree(*codes, count) if self._in_tree else None
        if self.result is not None:
            out = gathered[0, : self.gathered_bytes(count)].view(self._output.dtype)
            if total is not None:
                self._note(narrow(total, out, self.spec.overflow))
            else:
                self._note(self._kernels.dequantize_sum(*codes, self.spec, out, average=self._average))
            if self._tells_bound:
                if total is None:
                    total = torch.empty(count, dtype=torch.float32, device=out.device)
                    self._kernels.dequantize_sum(*codes, self._plain, total, average=self._average)
                self._find_bounds(codes, total)
            return
        error = None if self._gather_error is None else self._gather_error[held : held + count]
        pair = self._views(gathered, part)
        if total is not None:
            self._kernels.quantize(total, self.spec, *pair)
        else:
            self._kernels.requantize(*codes, self.spec, count, *pair, average=self._average, error=error)
        if self._tells_bound:
            sums = torch.empty(count, dtype=torch.float32, device=gathered.device)
            self._kernels.dequantize(*pair, self._plain, sums, part)
            self._find_bounds(codes, sums, pair)

    def _tree(self, codes: Tensor, scales: Tensor, count: int) -> Tensor:
        """Returns the sum, or average, of all messages in a tree, as float32."""
        terms = torch.empty(len(codes), count, dtype=torch.float32, device=codes.device)
        for row, term in enumerate(terms):
            self._kernels.dequantize(codes[row : row + 1], scales[row : row + 1], self._plain, term)
        return combine(terms.unbind(), self.spec.op, tree=True)

    @property
    def _plain(self) -> Quantization:
        """How sums become float32."""
        return replace(self.spec, overflow="infinity")

    def _find_bounds(self, codes: Pair, sums: Tensor, again: Pair | None = None) -> None:
        """Computes the bounds of sums of the ranks' codes; ``again``: the codes of the sums, if they travel as such."""
        count, size = sums.numel(), len(codes[0])
        total = torch_kernels.summed(torch_kernels.errors(*codes, self.spec, count, size), self._average)
        if again is not None:
            total = total + torch_kernels.errors(*again, self.spec, count, size)
        terms = self.spec, size, self._output.dtype, self.spec.overflow
        self.bounds = torch_kernels.bounds(total, sums.view(1, -1), *terms).view(-1)

    def decode(self, gathered: Tensor, first: int, count: int, part: int) -> None:
        if self.result is not None:
            super().decode(gathered, first, count, part)
            return
        target = self._output[first : first + count]
        self._note(self._kernels.dequantize(*self._views(gathered, part), self.spec, target, part))


class Scales:
    """Holds one scale, or one per entry of the last axis of the flat vector.

    Kernels take scales for whole rows, so a part that begins or ends within a row gets its own copy.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._channels = values, values.numel()

    def unit(self, count: int, size: int) -> int:
        """Returns the length of parts that consist of whole rows, where there are enough rows."""
        return self._channels if count // max(self._channels, 1) >= 4 * size else 1

    def of(self, first: int, count: int) -> Tensor:
        """Returns the scales of ``count`` elements from ``first`` on."""
        at = first % self._channels
        if self._channels == 1 or (at == 0 and count % self._channels == 0):
            return self._values
        if at + count <= self._channels:
            return self._values[at : at + count]
        return self._values[torch.arange(first, first + count, device=self._values.device) % self._channels]


class SharedScale(Codec):
    """Sends the caller's int8 numbers unchanged; the sum, times one scale, is gathered in the output's dtype."""

    def __init__(self, request: QuantizedReduction, size: int, output: Tensor, input: Tensor) -> None:
        super().__init__(request, output, input)
        device = input.device
        self._scales = Scales(torch.from_numpy(request.scale).to(device))
        self._offset = torch.tensor([request.offset], dtype=torch.float32, device=device)
        self._overflow: Overflow = request.quantization.overflow
        self.unit = self._scales.unit(request.count, size)

    def sent_bytes(self, part: int) -> int:
        return part

    def encode(self, messages: Tensor, first: int, count: int, part: int) -> None:
        source = self._input[first : first + count].view(torch.uint8)
        for row, piece in _paired(messages, source, part):
            row.copy_(piece)

    def combine(self, messages: Tensor, first: int, count: int, part: int, gathered: Tensor, held: int) -> None:
        out = gathered[0, : self.gathered_bytes(count)].view(self._output.dtype)
        self._scaled(messages, self._scales, self._offset, first, count, out)

    def _scaled(self, messages: Tensor, scales: Scales, offset: Tensor, first: int, count: int, out: Tensor) -> None:
        integers = messages[:, :count].view(torch.int8)
        values = scales.of(first, count)
        self._note(self._kernels.sum_shared_scale(integers, values, offset, out, self._overflow))


class TwoScales(SharedScale):
    """Sends codes by the first scale, and their sum as codes by the second."""

    def __init__(self, request: QuantizedReduction, size: int, output: Tensor, input: Tensor) -> None:
        super().__init__(request, size, output, input)
        self.result = None
        device = input.device
        first, second = torch.from_numpy(request.scale), torch.from_numpy(request.scale_2)
        self._ratios = Scales((first / second).to(device))
        self._seconds = Scales(second.to(device))
        self._offset.zero_()

    def gathered_bytes(self, part: int) -> int:
        return part

    def encode(self, messages: Tensor, first: int, count: int, part: int) -> None:
        for row, begin in enumerate(range(first, first + count, part)):
            n = min(part, first + count - begin)
            codes = messages[row, :n].view(torch.int8)
            self._kernels.quantize_scaled(self._input[begin : begin + n], self._scales.of(begin, n), codes)

    def combine(self, messages: Tensor, first: int, count: int, part: int, gathered: Tensor, held: int) -> None:
        codes = gathered[0, :count].view(torch.int8)
        self._kernels.requantize_sum(messages[:, :count].view(torch.int8), self._ratios.of(first, count), codes)

    def decode(self, gathered: Tensor, first: int, count: int, part: int) -> None:
        for row, begin in enumerate(range(first, first + count, part)):
            n = min(part, first + count - begin)
            out = self._output[begin : begin + n]
            self._scaled(gathered[row : row + 1], self._seconds, self._offset, begin, n, out)


def _paired(rows: Tensor, flat: Tensor, part: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields rows with the parts of a flat tensor: all whole ones at once, then a shorter last one."""
    for places, elements, length in in_parts(flat.numel(), part):
        yield rows[places, :length], flat[elements].view(-1, length)


def reduce_quantized(
    steps: Steps,
    request: QuantizedReduction,
    output: Tensor,
    input: Tensor,
    error: Tensor | None,
    gather_error: Tensor | None,
    bounds: Tensor | None = None,
) -> None:
    """Runs a reduction on flat tensors.

    Raises:
        ValueOverflowError: on every rank, if a value did not fit on any and ``overflow`` is "raise".
    """
    codec: Codec
    if request.scale is None:
        codec = Dynamic(request, output, input, error, gather_error)
    else:
        codec = (SharedScale if request.scale_2 is None else TwoScales)(request, steps.size, output, input)
    if request.operator == "quantized_reduce_scatter":
        _reduce_scatter(steps, request.counts, codec, input.device)
        if bounds is not None and bounds.numel():
            bounds.copy_(codec.bounds)
    elif request.count:
        _all_reduce(steps, request.count, codec, input.device, max(request.leaves // steps.size, 1))
        if bounds is not None:
            _gather_bounds(steps, codec, bounds)
    if request.quantization.overflow == "raise":
        _share_overflows(steps, codec, request, input.device)


def _all_reduce(steps: Steps, count: int, codec: Codec, device: torch.device, vectors: int) -> None:
    """Runs an all-reduce of ``vectors`` of every rank. Parts are equal shares of units; the last ranks have fewer."""
    size, units = steps.size, -(-count // codec.unit)
    share = -(-units // size) * codec.unit
    sent = codec.sent_bytes(share)
    outbox, inbox = (_bytes(size, vectors * sent, device) for _ in range(2))
    for number, messages in enumerate(outbox.split(sent, 1)):
        codec.encode(messages, number * count, count, share)
    _exchange(steps, inbox, outbox, [vectors * sent] * size, [vectors * sent] * size)
    gathered = codec.gathered_bytes(share)
    own_row = _bytes(1, gathered, device)
    first = min(steps.rank * share, count)
    if own := min(share, count - first):
        codec.combine(inbox.view(-1, sent), first, own, share, own_row, 0)
    # Equal parts are gathered in their final place.
    result = codec.result if size * share == count else None
    everything = _bytes(size, gathered, device) if result is None else result.view(size, gathered)
    steps.gather(everything.view(-1), own_row.view(-1))
    if result is None:
        codec.decode(everything, 0, count, share)


def _gather_bounds(steps: Steps, codec: Codec, bounds: Tensor) -> None:
    """Fills ``bounds`` with the bounds of all parts, of which each rank has its own."""
    share = -(-bounds.numel() // steps.size)  # a group is a unit
    own_row, everything = bounds.new_zeros(share), bounds.new_empty(steps.size * share)
    own_row[: codec.bounds.numel()] = codec.bounds
    steps.gather(everything.view(torch.uint8), own_row.view(torch.uint8))
    bounds.copy_(everything[: bounds.numel()])


def _reduce_scatter(steps: Steps, counts: Sequence[int], codec: Codec, device: torch.device) -> None:
    """Runs a reduce-scatter; rank j's part has ``counts[j]`` elements."""
    rank, sizes = steps.rank, [codec.sent_bytes(count) for count in counts]
    outbox = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    for part, first, count in zip(outbox.split(sizes), packed(counts), counts, strict=True):
        if count:
            codec.encode(part.view(1, -1), first, count, count)
    inbox = _bytes(len(counts), sizes[rank], device)
    if any(counts):
        _exchange(steps, inbox, outbox, [sizes[rank]] * len(counts), sizes)
    if own := counts[rank]:
        assert codec.result is not None
        codec.combine(inbox, 0, own, own, codec.result.view(1, -1), 0)


def _share_overflows(steps: Steps, codec: Codec, request: QuantizedReduction, device: torch.device) -> None:
    own_report = torch.zeros(4, dtype=torch.uint8, device=device)
    if codec.overflows:
        own_report[0] = torch.cat(codec.overflows).amax()
    overflow_reports = _bytes(steps.size, 4, device)
    steps.gather(overflow_reports.view(-1), own_report)
    if overflow_reports[:, 0].any():
        raise ValueOverflowError(
            f"{request.operator}: a value does not fit into {request.out_dtype}, and overflow is 'raise'", id=6002
        )


def _exchange(steps: Steps, output: Tensor, input: Tensor, recvs: list[int], sends: list[int]) -> None:
    steps.exchange(output.view(-1), input.view(-1), (sends, packed(sends), recvs, packed(recvs)))


def _bytes(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty((rows, columns), dtype=torch.uint8, device=device)
