"""Quantized collectives on NumPy arrays; docs/quantization.md has the rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls.counts import Counts, scaled, shares
from alltoallv._calls.guard import guard
from alltoallv._calls.repeats import arrays_of
from alltoallv._calls.request import seconds
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name, numpy_dtype
from alltoallv.errors import InvalidTensorError, ValueOverflowError
from alltoallv.numpy.arrays import Array, address, as_input, check_apart, check_output, resolve, row_size
from alltoallv.numpy.reduce import check_same_or_apart
from alltoallv.numpy.work import Work
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.feedback import Feedback, HostFeedback
from alltoallv.quantization.spec import Gather, Overflow, Quantization, QuantizedReduction, SumOp


class ErrorFeedback(HostFeedback):
    __doc__ = Feedback.__doc__
    _title = "alltoallv.numpy.ErrorFeedback"


def quantized_all_reduce(
    input: npt.ArrayLike,
    *,
    scale: npt.ArrayLike | None = None,
    offset: float | None = None,
    bits: int = 8,
    group_size: int = 128,
    gather: Gather = "full",
    op: SumOp = "sum",
    out_dtype: npt.DTypeLike | None = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    comm_quant_scale_1: npt.ArrayLike | None = None,
    comm_quant_scale_2: npt.ArrayLike | None = None,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array | tuple[Array, Work]:
    """The sum of the ``input`` of all ranks, whose terms travel as codes; the same bits on every rank.

    Without a scale every group of elements has its own (dynamic). With ``scale`` the input is int8 and the result
    ``(sum of all inputs + W * offset) * scale``, exact up to one rounding. With ``comm_quant_scale_1`` and ``_2`` the
    input becomes codes by the first, and their sum by the second.

    Args:
        input: One shape and dtype on all ranks: float32, float16, bfloat16; int8 with ``scale``.
        scale: One value or one per entry of the last axis: float16, bfloat16, float32; equal on all ranks.
        offset: Added to the codes of every rank, with ``scale``.
        bits: Of a code: 8, or 4. Dynamic only, as the next three.
        group_size: Elements per scale; groups begin at the first element of the flat array.
        gather: ``"full"`` gathers the sum in the output's dtype, ``"quantized"`` quantizes it again: fewer bytes, about
            1.4 times the error.
        op: ``"sum"`` or ``"avg"``.
        out_dtype: float32, float16 or bfloat16; default: the input's, float16 for int8.
        error_feedback: State of this vector, kept by the caller from call to call; on all ranks or none.
        overflow: What a finite value becomes that the output's dtype cannot hold: ``"saturate"``: its largest;
            ``"raise"``: ValueOverflowError on every rank; ``"infinity"``.
        comm_quant_scale_1, comm_quant_scale_2: As ``scale``, both or neither.
        out: Where the result goes; may be the input itself if the dtypes agree. Left out, it is allocated.
        group, async_op, timeout: As for `alltoallv.numpy.all_to_all_v`.

    Returns:
        The result in the input's shape, or ``(result, work)`` with ``async_op=True``.

    Raises:
        ValueOverflowError: see ``overflow``; the output is undefined.
        PeerMismatchError: the ranks differ in any argument above, scales and offset included.
        And as `alltoallv.numpy.all_to_all_v`.
    """
    comm = resolve(group)
    what = None
    dynamic = scale is None and offset is None and comm_quant_scale_1 is None and comm_quant_scale_2 is None
    if dynamic and error_feedback is None and timeout is None and not async_op:
        what = "quantized_all_reduce", bits, group_size, gather, op, out_dtype, overflow
    result: Array | None = comm.repeats.run(what, input, out) if what else None
    if result is not None:
        return result
    given = out
    with guard(comm, "quantized_all_reduce"):
        x = as_input("input", input)
        request = quantized.all_reduce_request(
            x.shape,
            core_name(x.dtype),
            scale=quantized.as_scale("scale", scale),
            offset=offset,
            comm_quant_scale_1=quantized.as_scale("comm_quant_scale_1", comm_quant_scale_1),
            comm_quant_scale_2=quantized.as_scale("comm_quant_scale_2", comm_quant_scale_2),
            bits=bits,
            group_size=group_size,
            gather=gather,
            op=op,
            out_dtype=None if out_dtype is None else numpy_dtype(out_dtype).name,
            overflow=overflow,
            has_feedback=error_feedback is not None,
        )
        dtype = numpy_dtype(request.out_dtype)
        if out is None:
            out = memory.empty(x.shape, dtype)
        _check_output(out, dtype, x.shape)
        check_same_or_apart(out, x)
        if out.dtype.itemsize != x.dtype.itemsize:
            check_apart(out, x)
        plan = quantized.plan(comm, request)
        if what:
            arrays = arrays_of(x, x.size, out, x.shape)
            comm.repeats.keep(what, input, given, plan.on_arrays(arrays))
    return _reduce(comm, request, plan, x, out, error_feedback, async_op, timeout)


def quantized_reduce_scatter(
    input: npt.ArrayLike,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    group_size: int = 128,
    op: SumOp = "sum",
    out_dtype: npt.DTypeLike | None = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array | tuple[Array, Work]:
    """The sum of the ``input`` of all ranks, of which rank j gets its part of the rows of dimension 0.

    Every part is quantized by itself: groups begin at its first element.

    Args:
        recv_counts: Rows that each rank gets, equal on all ranks; their sum is dimension 0. Default: equal shares.
        out: Shape ``[recv_counts[rank], *input.shape[1:]]``, apart from the input. Left out, it is allocated.
        input, bits, group_size, op, out_dtype, error_feedback, overflow: As for `quantized_all_reduce`, dynamic.

    Returns:
        This rank's part, or ``(part, work)`` with ``async_op=True``. Raises as `quantized_all_reduce`.
    """
    comm = resolve(group)
    with guard(comm, "quantized_reduce_scatter"):
        x = as_input("input", input)
        row = row_size(x)
        rows = shares("recv_counts", recv_counts, "input", x.shape[0], comm.size)
        request = quantized.reduce_scatter_request(
            scaled(rows, row),
            core_name(x.dtype),
            bits=bits,
            group_size=group_size,
            op=op,
            out_dtype=None if out_dtype is None else numpy_dtype(out_dtype).name,
            overflow=overflow,
        )
        shape = (rows[comm.rank], *x.shape[1:])
        dtype = numpy_dtype(request.out_dtype)
        if out is None:
            out = memory.empty(shape, dtype)
        _check_output(out, dtype, shape)
        check_apart(out, x)
        plan = quantized.plan(comm, request)
    return _reduce(comm, request, plan, x, out, error_feedback, async_op, timeout)


def quantized_all_to_all(
    input: npt.ArrayLike,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    group_size: int | None = None,
    out_dtype: npt.DTypeLike | None = None,
    overflow: Overflow = "saturate",
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Array | tuple[Array | None, Work]:
    """Sends rows to every rank as codes with their float32 scales, in one exchange; a MoE dispatch.

    Args:
        input: Rows ``[T, ...]`` of float32, float16 or bfloat16, sorted by the rank they go to.
        send_counts: Rows for every rank; their sum is T.
        recv_counts: Rows from every rank; left out, the peers tell.
        bits: Of a code: 8, or 4.
        group_size: Elements per scale; groups begin anew with every row. Default: one scale per row.
        out_dtype: Of the rows received: float32, float16 or bfloat16; default: the input's.
        overflow: As for `quantized_all_reduce`; "raise" looks at the rows sent, by this rank's ``out_dtype``.
        async_op: Return ``(output, work)`` at once; the output is filled by ``work.wait()``. With learnt counts
            ``(None, work)``.

    Returns:
        The rows received, dequantized, in the order of ranks: ``[sum(recv_counts), ...]``.

    Raises:
        PeerMismatchError: two ranks differ in counts, length of rows, bits or group size; otherwise as
            `quantized_all_reduce`.
    """
    comm = resolve(group)
    operator = "quantized_all_to_all"
    with guard(comm, operator):
        x = as_input("input", input)
        length = row_size(x)
        how = quantized.row_quantization(bits, group_size, overflow, length, core_name(x.dtype))
        dtype = x.dtype if out_dtype is None else numpy_dtype(out_dtype)
        quantized.check_output_dtype(core_name(dtype))
        limit = seconds(timeout)
        sends, recvs = quantized.row_counts(send_counts, recv_counts, x.shape[0], comm.size)
        stride = max(_core.quantized_row_bytes(length, how.bits, how.group_size), 4)
        coded = memory.empty((x.shape[0], stride), np.uint8)
        quantized.encode_rows(how, core_name(x.dtype), address(x), x.shape[0], length, address(coded))
        if overflow == "raise" and dtype != np.float32:
            _decode(how, coded, length, dtype, np.empty(x.shape, dtype))
        plan = quantized.row_exchange(comm, how, stride, sends, recvs)
        arrived = None if recvs is None else memory.empty((sum(recvs), stride), np.uint8)
        result = None if recvs is None else memory.empty((sum(recvs), *x.shape[1:]), dtype)

    def finish(rows: Array) -> Array:
        decoded = memory.empty((len(rows), *x.shape[1:]), dtype) if result is None else result
        return _decode(replace(how, overflow="saturate") if overflow == "raise" else how, rows, length, dtype, decoded)

    if arrived is None:
        if async_op:
            learning = plan.submit_learning(address(coded), limit)
            return None, Work(comm, learning.work, (x, coded), lambda: finish(_rows(stride, *learning.take())))
        return finish(_rows(stride, *plan.run_learning(address(coded), limit)))
    if async_op:
        pending = plan.submit(address(coded), address(arrived), limit)
        return result, Work(comm, pending, (coded, arrived, result), lambda: finish(arrived))
    plan.run(address(coded), address(arrived), limit)
    return finish(arrived)


def _reduce(
    comm: Communicator,
    request: QuantizedReduction,
    plan: _core.QuantPlan,
    x: Array,
    out: Array,
    feedback: ErrorFeedback | None,
    async_op: bool,
    timeout: float | None,
) -> Array | tuple[Array, Work]:
    with guard(comm, request.operator):
        error, gather_error = ErrorFeedback.arrays_of(feedback, request, comm.size, comm.rank, x)
        errors = [None if array is None else address(array) for array in (error, gather_error)]
        limit = seconds(timeout)
    if async_op:
        return out, Work(
            comm,
            plan.submit(address(x), address(out), errors[0], errors[1], limit),
            (x, out, error, gather_error),
            lambda: out,
        )
    plan.run(address(x), address(out), errors[0], errors[1], limit)
    return out


def _check_output(out: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    check_output("out", out, dtype)
    if out.shape != shape:
        raise InvalidTensorError(f"out has shape {out.shape}, expected {shape}")


def _rows(stride: int, block: _core.Block, counts: list[int]) -> Array:
    return memory.from_block(block, (sum(counts) // stride, stride), np.dtype(np.uint8))


def _decode(how: Quantization, rows: Array, length: int, dtype: np.dtype[Any], out: Array) -> Array:
    fits = quantized.decode_rows(how, core_name(dtype), address(rows), len(rows), length, address(out))
    if not fits:
        raise ValueOverflowError(f"a row of the input holds a value that {dtype.name} cannot")
    return out
