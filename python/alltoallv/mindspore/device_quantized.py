"""Quantized collectives of tensors on a device: MindSpore's operators quantize and add, and the codes travel over HCCL.

The operators follow the rules of docs/quantization.md, one float32 operation at a time, and give the bits of the CPU's
kernels. A pipeline runs in MindSpore's queue and in graphs, which read its source; its `Moves` explain how tensors
travel there.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, jit_class, mint, ops

from alltoallv import _core
from alltoallv._calls.adapters import Region
from alltoallv._calls.counts import packed
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, ValueOverflowError
from alltoallv.mindspore import device_op
from alltoallv.mindspore.tensors import Place, core_name, executor
from alltoallv.quantization import requests
from alltoallv.quantization.spec import Quantization, QuantizedReduction

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


def bounds_of_sum(seen: list[tuple[Tensor, Tensor]], rank: int, spec: Quantization, dtype: str) -> Tensor:
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


def bounds_of_rows(seen: tuple[Tensor, Tensor], spec: Quantization, dtype: str) -> Tensor:
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


Array = npt.NDArray[np.float32]


def plan_of(
    comm: Communicator, operator: str, dtype: Any, sends: Sequence[int], recvs: Sequence[int], digest: int
) -> _core.Plan:
    """Returns the plan of a move: an exchange in the order of ranks, or a gather of one tensor."""
    sdispls = [0] * len(sends) if operator == "all_gather" else packed(sends)
    layout = list(sends), sdispls, list(recvs), packed(recvs)
    return _core.Plan(comm.core, operator, core_name(dtype), *layout, terms=digest)


_asked: weakref.WeakSet[_core.Communicator] = weakref.WeakSet()  # whether kernels serve them


@jit_class
class Moves:
    """Moves tensors between the ranks in MindSpore's queue; the first move is preceded by ``agree``."""

    def __init__(self, comm: Communicator, agree: Callable[[], Any] | None = None, digest: int = 0) -> None:
        self.comm, self.agree, self.digest, self.size = comm, agree, digest, comm.size

    def begin(self, scale: Tensor | None, offset: Tensor | None) -> None:
        """Begins a reduction by these scales, where they are tensors of the graph."""

    def run(self, x: Tensor, sends: Sequence[int], recvs: Sequence[int], operator: str, count: int) -> Tensor:
        """Sends the elements of ``x`` in the order of ranks, and returns ``count`` elements that arrive."""
        plan = plan_of(self.comm, operator, x.dtype, sends, recvs, self.digest)
        agree, self.agree = self.agree, None
        source, target = x.contiguous(), mint.empty((count,), dtype=x.dtype)

        def launch(locate: Place, stream: int) -> None:
            if agree is not None:
                agree()
            plan.run(locate(source)[0], locate(target)[0], -1.0, stream)

        device_op.enqueue(launch, [target], [source])
        return target

    def refuse(self, flags: Tensor, text: str) -> None:
        """Raises ValueOverflowError if a flag is not 0; waits for them."""
        if flags.asnumpy().any():
            raise ValueOverflowError(text, id=6003)

    def exchange(self, x: Tensor, sends: Sequence[int], recvs: Sequence[int], operator: str = "all_to_all_v") -> Tensor:
        """Sends the elements of ``x`` in the order of ranks, and returns those that arrive, flat."""
        source = x.reshape(-1) if x.size else ops.zeros(1, x.dtype)
        arrived = self.run(source, sends, recvs, operator, max(sum(recvs), 1))
        return arrived if sum(recvs) else arrived[:0]

    def gather(self, x: Tensor) -> Tensor:
        """Returns the tensors of all ranks, which have one shape, as ``[W, x.size]``."""
        counts = [x.size] * self.size
        return self.exchange(x, counts, counts, "all_gather").reshape(self.size, -1)

    def parts(self, x: Tensor) -> Tensor:
        """Sends row j of ``[W, n]`` to rank j; returns the rows that arrive, ``[W, n]``."""
        counts = [x.shape[1]] * x.shape[0]
        return self.exchange(x, counts, counts).reshape(x.shape)


def reduce(
    comm: Communicator,
    request: QuantizedReduction,
    input: Tensor,
    error: Array | None = None,
    gather_error: Array | None = None,
    bounds: Tensor | None = None,
) -> Tensor:
    """Runs a quantized reduction and returns its flat result, a new tensor; error feedback is updated in place.

    ``bounds``: float32, one per group of the output, filled where ``request.bound`` is true.

    Raises:
        InvalidParamError: the format is neither int8 nor int4.
        ValueOverflowError: on every rank, if a value did not fit on any and ``overflow`` is "raise".
    """
    plan = requests.plan(comm, request)

    def agree() -> None:
        plan.compare(error is not None, gather_error is not None)

    if not request.count:
        executor.sync()
        agree()
        return ops.zeros(0, getattr(mindspore, request.out_dtype))
    if kernel_serves(comm, plan, error is not None, gather_error is not None):
        return _by_kernel(plan, request, input)
    reduction = Reduction(Moves(comm, agree), request, comm.rank)
    result = reduction.run(input, error, gather_error)
    if bounds is not None and bounds.size:
        worst = reduction.bounds(request)
        bounds.copy_(worst if worst.size == bounds.size else worst[: bounds.size].copy())  # see `Reduction.run`
    return result


def kernel_serves(comm: Communicator, plan: _core.QuantPlan, feeds: bool = False, gather_feeds: bool = False) -> bool:
    """Returns whether the kernel in Ascend C serves a reduction; collective when a communicator is first asked."""
    if comm.core not in _asked:  # the first time the ranks decide it, after what is queued and compares calls
        executor.sync()
        _asked.add(comm.core)
    return plan.kernel_serves(feeds, gather_feeds)


def launch_kernel(plan: _core.QuantPlan, regions: Sequence[Region], stream: int) -> None:
    """Enqueues the kernel in Ascend C: regions of output and input, and with a shared scale also of scale, offset."""
    out, x, *shared = [address for address, _ in regions]
    scale, offset = shared or (0, 0)
    if not plan.launch(x, out, scale, offset, False, False, stream):
        raise InvalidParamError(
            "the kernel does not serve this reduction, expected one that kernel_serves() accepts", id=1328
        )


def _by_kernel(plan: _core.QuantPlan, request: QuantizedReduction, input: Tensor) -> Tensor:
    """Runs the whole reduction as one kernel in MindSpore's queue."""
    x, out = input.contiguous(), mint.empty((request.count,), dtype=getattr(mindspore, request.out_dtype))
    shared = [] if request.scale is None else [Tensor(request.scale), Tensor(np.array([request.offset], np.float32))]

    def launch(locate: Place, stream: int) -> None:
        launch_kernel(plan, [locate(each) for each in (out, x, *shared)], stream)

    device_op.enqueue(launch, [out], [x, *shared])
    return out


@jit_class
class Reduction:
    """The steps of a quantized reduction of at least one element. ``shape`` is the output's, for graphs."""

    def __init__(self, moves: Moves, request: QuantizedReduction, rank: int, shape: Sequence[int] = ()) -> None:
        quantization = request.quantization
        self.moves, self.size, self.rank, self.count = moves, moves.size, rank, request.count
        self.shape = tuple(shape)
        self.counts, self.begins = list(request.counts), packed(request.counts)
        self.vectors, self.tree = max(request.leaves // self.size, 1), request.leaves > 0  # of every rank
        self.overflow, self.dtype, self.average = quantization.overflow, request.out_dtype, quantization.op == "avg"
        self.partial = request.operator == "quantized_reduce_scatter"
        self.full = not self.partial and quantization.gather == "full" and request.scale_2 is None
        self.text = f"{request.operator}: a value does not fit into {request.out_dtype}, and overflow is 'raise'"
        self.channels, self.scale, self.second, self.quotient = 0, None, None, None
        if request.scale is not None:
            self.channels, self.scale = request.scale.size, Tensor(request.scale)
            self.offset = Tensor(np.float32(request.offset))
            if request.scale_2 is not None:
                self.second, self.quotient = Tensor(request.scale_2), Tensor(request.scale / request.scale_2)
        unit = self.channels or quantization.group_size
        units = -(-self.count // unit)
        #: Elements of a rank's part: equal shares of groups, or of rows with a scale for each channel; the last ranks'
        #: may begin behind the last element.
        self.share = -(-units // self.size) * unit
        if not self.channels:
            kind = SeenCodes if request.bound else Codes
            self.codes = [kind(quantization, count) for count in (self.counts if self.partial else [self.share])]

    def run(
        self,
        x: Tensor,
        error: Array | None = None,
        gather_error: Array | None = None,
        scale: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Tensor:
        """Returns the flat result; scale and offset are the request's, or tensors of a graph."""
        self.moves.begin(scale, offset)
        x, allowed = x.reshape(-1), None
        if self.partial:
            values = self._part(x, error)
        elif self.channels == 0:
            values = self._sum(x, error, gather_error)
        elif scale is None:
            values, allowed = self._by_scales(x, self.scale, self.offset)
        else:
            values, allowed = self._by_scales(x, scale, offset)
        result, exceeded = narrowed(values, self.dtype, self.overflow, allowed)
        if self.full:
            result = self.moves.gather(result).reshape(-1)
            if result.size > self.count:
                result = result[: self.count].copy()  # MindSpore cannot copy from a part of a tensor on CPU
        if self.overflow == "raise":
            self.moves.refuse(self.moves.gather(any_of(exceeded)), self.text)
        return result

    def bounds(self, request: QuantizedReduction) -> Tensor:
        """Returns what the output can be wrong by, one value per group, after `run`, outside of graphs."""
        codes: Any = self.codes[self.rank if self.partial else 0]
        own = bounds_of_sum(codes.seen, self.rank, request.quantization, self.dtype)
        return own if self.partial else self.moves.gather(own).reshape(-1)

    def _sum(self, x: Tensor, error: Array | None, gather_error: Array | None) -> Tensor:
        """Returns this rank's part of the sum, or all of it where the sum is gathered as codes."""
        codes, moves, share, size = self.codes[0], self.moves, self.share, self.size
        table = filled(_with(x, error).reshape(self.vectors, -1), size * share)
        if self.tree:  # what goes to a rank lies together
            table = table.reshape(self.vectors, size, share).swapaxes(0, 1)
        numbers, scales, lost = codes.encode(table.reshape(size * self.vectors, share))
        _keep(error, lost)
        came = [moves.parts(each.reshape(size, -1)).reshape(each.shape) for each in (numbers, scales)]
        own = added(codes.decode(came[0], came[1]), self.average, self.tree)
        if self.full:
            return own
        if gather_error is not None:
            own = own + Tensor(np.append(gather_error, np.zeros(share - gather_error.size, np.float32)))
        numbers, scales, lost = codes.encode(own.reshape(1, -1))
        _keep(gather_error, lost)
        everything = codes.decode(moves.gather(numbers), moves.gather(scales))
        return added(everything.reshape(1, -1))[: self.count]

    def _part(self, x: Tensor, error: Array | None) -> Tensor:
        """Returns this rank's part of the sum; every part is quantized by itself."""
        x = _with(x, error)
        numbers, scales, lost = [], [], []
        for j in range(self.size):
            if self.counts[j]:
                part = x[self.begins[j] : self.begins[j] + self.counts[j]].reshape(1, self.counts[j])
                encoded = self.codes[j].encode(part)
                numbers.append(encoded[0].reshape(-1))
                scales.append(encoded[1].reshape(-1))
                lost.append(encoded[2].reshape(-1))
        _keep(error, ops.cat(lost))
        own, size = self.codes[self.rank], self.size
        sizes, groups = [code.size for code in self.codes], [code.groups for code in self.codes]
        arrived = self.moves.exchange(ops.cat(numbers), sizes, [own.size] * size)
        factors = self.moves.exchange(ops.cat(scales), groups, [own.groups] * size)
        if self.counts[self.rank] == 0:
            return ops.zeros(0, mindspore.float32)
        return added(own.decode(arrived.reshape(size, -1), factors.reshape(size, -1)), self.average)

    def _by_scales(self, x: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the sum by one scale, or all of it by two, and where `scaled` allows it."""
        if self.second is not None:
            rows = x.astype(mindspore.float32).reshape(-1, self.channels)
            x = saturated(rows * (1.0 / scale)).reshape(-1)
        table = filled(x.reshape(1, -1), self.size * self.share).reshape(self.size, self.share)
        total = self.moves.parts(table).astype(mindspore.int32).sum(axis=0).reshape(-1, self.channels)
        if self.second is None:
            return scaled(total, scale, offset * float(self.size))
        codes = saturated(total.astype(mindspore.float32) * self.quotient)
        everything = self.moves.gather(codes).reshape(-1)[: self.count].astype(mindspore.int32)
        return scaled(everything.reshape(-1, self.channels), self.second, ops.zeros_like(offset))


def any_of(flags: Tensor) -> Tensor:
    """Returns int8 ``[1]``: 1 if a flag is set."""
    return flags.astype(mindspore.int8).max().reshape(1) if flags.size else ops.zeros(1, mindspore.int8)


def _with(x: Tensor, error: Array | None) -> Tensor:
    values = x.astype(mindspore.float32)
    return values if error is None else values + Tensor(error)


def _keep(error: Array | None, lost: Tensor) -> None:
    """Waits for what was lost, if it is kept."""
    if error is not None:
        error[...] = lost.asnumpy().reshape(-1)[: error.size]


@jit_class
class Rows:
    """The steps of a quantized_all_to_all. ``shape`` is the output's, for graphs."""

    def __init__(self, moves: Moves, rows: requests.Rows[Any], shape: Sequence[int] = ()) -> None:
        self.moves, self.shape = moves, tuple(shape)
        self.codes = (SeenCodes if rows.bound else Codes)(rows.quantization, rows.length)
        self.length, self.sends, self.recvs = rows.length, rows.sends, rows.recvs or []
        self.dtype, self.overflow, self.must_fit = rows.out_dtype, rows.received().overflow, rows.must_fit()
        self.text = rows.overflow_text()

    def run(self, x: Tensor) -> Tensor:
        """Returns the rows that arrive, ``[sum(recvs), length]``."""
        return self.exchange(self.encode(x), self.recvs)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns codes and scales of the rows; refuses values that do not fit the output, if asked."""
        numbers, scales, _ = self.codes.encode(x.astype(mindspore.float32).reshape(-1, self.length))
        if self.must_fit:
            values = self.codes.decode(numbers, scales).reshape(-1)
            self.moves.refuse(any_of(narrowed(values, self.dtype, "raise")[1]), self.text)
        return numbers, scales

    def exchange(self, coded: tuple[Tensor, Tensor], recvs: Sequence[int]) -> Tensor:
        """Sends coded rows to the ranks; returns the rows that arrive."""
        numbers, scales = self._sent(coded[0], self.codes.size, recvs), self._sent(coded[1], self.codes.groups, recvs)
        rows = sum(recvs)
        if rows * self.length == 0:
            return ops.zeros((rows, self.length), getattr(mindspore, self.dtype))
        values = self.codes.decode(numbers.reshape(rows, -1), scales.reshape(rows, -1))
        return narrowed(values.reshape(-1), self.dtype, self.overflow)[0].reshape(rows, self.length)

    def _sent(self, x: Tensor, width: int, recvs: Sequence[int]) -> Tensor:
        sends, arrivals = [n * width for n in self.sends], [n * width for n in recvs]
        return self.moves.exchange(x, sends, arrivals, "quantized_all_to_all")


# Sums in the order of ranks: MindSpore's operators add, and HCCL only moves the terms.


_SMALL = 16384  # bytes; smaller inputs go to every rank in one step
#: What MindSpore adds on every device.
_ADDED = "int8, int16, int32, int64, uint8, float16, bfloat16, float32, float64"


def reduce_in_order(
    comm: Communicator,
    operator: str,
    x: Tensor,
    op: str,
    counts: Sequence[int],
    shape: Sequence[int] | None,
    leaves: int = 0,
) -> Tensor:
    """Runs ``"all_reduce"`` or ``"reduce_scatter"`` in MindSpore's queue; returns the flat result, a new tensor.

    Bits are as in host memory: 16-bit floats are added in float32 and rounded once, integers wrap, and a resulting
    NaN is the quiet one.

    Args:
        x: All elements, of which ``counts[j]`` belong to rank j; with ``leaves``, of all ranks, as many for each.
        op: The core's name of a reduction that has passed its checks.
        shape: What ranks compare as the input's shape, if they do.

    Raises:
        InvalidTensorError: on every rank, for a dtype that MindSpore does not add on a device.
    """
    size, total, own = comm.size, sum(counts), counts[comm.rank]
    each, tree = max(leaves // size, 1), leaves > 0  # vectors of every rank
    dtype, gathers = core_name(x.dtype), operator == "all_reduce"
    with guard(comm, operator):
        check_added(dtype)

    def agree() -> None:
        terms: dict[str, Any] = {"ordered": True, "shape": shape, "leaves": leaves}
        comm.core.reduce(operator, dtype, op, 0, 0, list(counts), moves=False, **terms)

    if not total:
        executor.sync()
        agree()
    if not (total if gathers else own):
        return ops.zeros(0, x.dtype)
    moves, flat = Moves(comm, agree), x.reshape(-1)
    if x.nbytes <= _SMALL:
        begin = sum(counts[: comm.rank])
        terms = moves.gather(flat).reshape(size * each, total)
        return combine(terms if gathers else terms[:, begin : begin + own], op, tree)
    if each > 1:  # what goes to one rank lies together
        vectors, ends = flat.reshape(each, total), list(accumulate(counts))
        parts = zip(counts, ends, strict=True)
        flat = ops.cat([vectors[:, end - count : end].reshape(-1) for count, end in parts if count])
    came = moves.exchange(flat, [count * each for count in counts], [own * each] * size)
    part = combine(came.reshape(size * each, own), op, tree) if own else came
    return moves.exchange(part, [own] * size, counts, "all_gather") if gathers else part


def check_added(dtype: str) -> None:
    """Raises InvalidTensorError for a dtype that MindSpore does not add on a device, by the core's name."""
    if dtype not in _ADDED.split(", "):
        raise InvalidTensorError(f"dtype is {dtype}, expected one of {_ADDED} for a sum in a given order", 13, id=2082)


def combine(terms: Tensor, op: str, tree: bool = False) -> Tensor:
    """Returns ``terms[0] op terms[1] op ...`` in this order; shape ``[W, n]`` becomes ``[n]``.

    In a ``tree``, of a sum, neighbours are added in pairs, then the results in pairs, and so on.
    """
    dtype = terms.dtype
    if dtype in (mindspore.float16, mindspore.bfloat16):
        return combine(terms.astype(mindspore.float32), op, tree).astype(dtype)
    floating, total = dtype in (mindspore.float32, mindspore.float64), terms[0]
    if tree:
        total = in_tree(terms)
        return canonical_nan(total) if floating and len(terms) > 1 else total
    for j in range(1, terms.shape[0]):
        term = terms[j]
        if op in ("min", "max"):  # the earlier of equal values stays, and any NaN gives NaN
            better = term < total if op == "min" else term > total
            total = ops.where(ops.logical_or(better, term != term) if floating else better, term, total)
        else:
            total = total * term if op == "prod" else total + term
    if op == "avg":
        total = total / terms.shape[0]
    return canonical_nan(total) if floating else total
