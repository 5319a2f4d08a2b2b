"""Quantized collectives in MindSpore's queue: its operators quantize and add, and the codes travel over HCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops

from alltoallv import _core
from alltoallv._calls.counts import packed
from alltoallv.communicator import Communicator
from alltoallv.errors import ValueOverflowError
from alltoallv.mindspore import device_op
from alltoallv.mindspore.device_codes import Codes, added, filled, narrowed, saturated, scaled
from alltoallv.mindspore.tensors import core_name, executor
from alltoallv.quantization import requests
from alltoallv.quantization.spec import QuantizedReduction

Array = npt.NDArray[np.float32]


class Moves:
    """Moves tensors between the ranks in MindSpore's queue; the first move is preceded by ``agree``."""

    def __init__(self, comm: Communicator, agree: Callable[[], Any], digest: int = 0) -> None:
        self.comm, self._agree, self._digest = comm, agree, digest

    def exchange(self, x: Tensor, sends: Sequence[int], recvs: Sequence[int], operator: str = "all_to_all_v") -> Tensor:
        """Sends the elements of ``x`` in the order of ranks, and returns those that arrive, flat."""
        sdispls = [0] * len(sends) if operator == "all_gather" else packed(sends)
        layout = list(sends), sdispls, list(recvs), packed(recvs)
        plan = _core.Plan(self.comm.core, operator, core_name(x.dtype), *layout, self._digest)
        agree, self._agree = self._agree, _agreed
        source = x.reshape(-1) if x.size else ops.zeros(1, x.dtype)
        arrived = device_op.exchange(_Agreed(agree, plan), source, [max(sum(recvs), 1)])
        return arrived if any(recvs) else arrived[:0]

    def gather(self, x: Tensor) -> Tensor:
        """Returns the tensors of all ranks, which have one shape, as ``[W, x.size]``."""
        size = self.comm.size
        return self.exchange(x, [x.size] * size, [x.size] * size, "all_gather").reshape(size, -1)

    def parts(self, x: Tensor) -> Tensor:
        """Sends row j of ``[W, n]`` to rank j; returns the rows that arrive, ``[W, n]``."""
        counts = [x.shape[1]] * x.shape[0]
        return self.exchange(x, counts, counts).reshape(x.shape)


class _Agreed:
    """A plan that runs after the ranks have agreed."""

    def __init__(self, agree: Callable[[], Any], plan: _core.Plan) -> None:
        self._agree, self._plan = agree, plan

    def run(self, input: int, output: int, timeout: float = -1.0, stream: int = 0) -> None:
        self._agree()
        self._plan.run(input, output, timeout, stream)


def _agreed() -> None:
    pass


def reduce(
    comm: Communicator,
    request: QuantizedReduction,
    input: Tensor,
    error: Array | None = None,
    gather_error: Array | None = None,
) -> Tensor:
    """Runs a quantized reduction and returns its flat result, a new tensor; error feedback is updated in place.

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
    moves, x = Moves(comm, agree), input.reshape(-1)
    if request.operator == "quantized_reduce_scatter":
        values, allowed = _reduced_part(moves, request, x, error), None
    elif request.scale is None:
        values, allowed = _reduced(moves, request, x, error, gather_error), None
    else:
        values, allowed = _reduced_by_scales(moves, request, x)
    how, dtype = request.quantization, getattr(mindspore, request.out_dtype)
    full = request.operator == "quantized_all_reduce" and how.gather == "full" and request.scale_2 is None
    result, exceeded = narrowed(values, dtype, how.overflow, allowed)
    if full:
        result = moves.gather(result).reshape(-1)
        if result.size > request.count:
            result = result[: request.count].copy()  # MindSpore cannot copy from a part of a tensor on CPU
    if how.overflow == "raise":
        mine = Tensor([0], mindspore.int8) if not exceeded.size else exceeded.astype(mindspore.int8).max().reshape(1)
        if moves.gather(mine).asnumpy().any():
            raise ValueOverflowError(
                f"{request.operator}: a value does not fit into {request.out_dtype}, and overflow is 'raise'"
            )
    return result


def _reduced(
    moves: Moves, request: QuantizedReduction, x: Tensor, error: Array | None, gather_error: Array | None
) -> Tensor:
    """Returns this rank's part of the sum, or all of it where the sum is gathered as codes.

    Parts are equal shares of groups; the last ranks' may begin behind the last element.
    """
    how, size, count = request.quantization, moves.comm.size, request.count
    share = -(-how.groups(count) // size) * how.group_size
    codes = Codes(how, share)
    made = codes.encode(filled(_with(x, error).reshape(1, -1), size * share).reshape(size, share))
    _keep(error, made[2])
    mine = added(codes.decode(*map(moves.parts, made[:2])), how.op == "avg")
    if how.gather == "full":
        return mine
    own = 0 if gather_error is None else gather_error.size
    state = None if gather_error is None else np.append(gather_error, np.zeros(share - own, np.float32))
    again = codes.encode(_with(mine, state).reshape(1, -1))
    _keep(gather_error, again[2])
    return added(codes.decode(*map(moves.gather, again[:2])).reshape(1, -1))[:count]


def _reduced_part(moves: Moves, request: QuantizedReduction, x: Tensor, error: Array | None) -> Tensor:
    """Returns this rank's part of the sum; every part is quantized by itself."""
    how, counts, comm = request.quantization, request.counts, moves.comm
    codes, x = [Codes(how, count) for count in counts], _with(x, error)
    begins = packed(counts)
    made = [
        code.encode(x[begin : begin + count].reshape(1, count))
        for code, begin, count in zip(codes, begins, counts, strict=True)
        if count
    ]
    _keep(error, ops.cat([lost.reshape(-1) for _, _, lost in made]))
    mine = codes[comm.rank]
    numbers, scales = (ops.cat([each[k].reshape(-1) for each in made]) for k in (0, 1))
    numbers = moves.exchange(numbers, [code.size for code in codes], [mine.size] * comm.size)
    scales = moves.exchange(scales, [code.groups for code in codes], [mine.groups] * comm.size)
    if not counts[comm.rank]:
        return ops.zeros(0, mindspore.float32)
    return added(mine.decode(numbers.reshape(comm.size, -1), scales.reshape(comm.size, -1)), how.op == "avg")


def _reduced_by_scales(moves: Moves, request: QuantizedReduction, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of the sum by one shared scale, or all of it by two, and where `scaled` allows it."""
    first, second = request.scale, request.scale_2
    assert first is not None
    size, channels = moves.comm.size, first.size
    share = -(-request.count // (channels * size)) * channels
    scale = Tensor(first)
    if second is not None:
        rows = filled(x.astype(mindspore.float32).reshape(1, -1), request.count).reshape(-1, channels)
        x = saturated(rows * (1.0 / scale)).reshape(-1)
    arrived = moves.parts(filled(x.reshape(1, -1), size * share).reshape(size, share))
    total = arrived.astype(mindspore.int32).sum(axis=0).reshape(-1, channels)
    if second is None:
        offset = Tensor(np.float32(request.offset) * np.float32(size))
        return scaled(total, scale, offset)
    codes = saturated(total.astype(mindspore.float32) * Tensor(first / second))
    everything = moves.gather(codes).reshape(-1)[: request.count].astype(mindspore.int32).reshape(-1, channels)
    return scaled(everything, Tensor(second), Tensor(np.float32(0)))


def _with(x: Tensor, error: Array | None) -> Tensor:
    values = x.astype(mindspore.float32)
    return values if error is None else values + Tensor(error)


def _keep(error: Array | None, lost: Tensor) -> None:
    """Waits for what was lost, if it is kept."""
    if error is not None:
        error[...] = lost.asnumpy().reshape(-1)[: error.size]


def rows_overflow(codes: Codes, made: tuple[Tensor, Tensor], dtype: Any) -> bool:
    """Returns whether a value of the coded rows does not fit into ``dtype``; waits for them."""
    exceeded = narrowed(codes.decode(*made).reshape(-1), dtype, "raise")[1]
    return bool(exceeded.asnumpy().any())


def exchange_rows(
    comm: Communicator, made: requests.Rows[Tensor], coded: tuple[Tensor, Tensor], recvs: Sequence[int], codes: Codes
) -> Tensor:
    """Sends coded rows to the ranks of ``made.sends``; returns ``[sum(recvs), length]`` in the output's dtype."""
    moves, rows = Moves(comm, _agreed, made.digest()), sum(recvs)
    arrived = [
        moves.exchange(x, [n * width for n in made.sends], [n * width for n in recvs], "quantized_all_to_all")
        for x, width in zip(coded, (codes.size, codes.groups), strict=True)
    ]
    dtype = getattr(mindspore, made.out_dtype)
    if not rows * made.length:
        return ops.zeros((rows, made.length), dtype)
    values = codes.decode(arrived[0].reshape(rows, -1), arrived[1].reshape(rows, -1))
    return narrowed(values.reshape(-1), dtype, made.received().overflow)[0].reshape(rows, made.length)
