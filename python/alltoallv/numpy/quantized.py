"""Quantized collectives on NumPy arrays; docs/quantization.md has the rules."""

from __future__ import annotations

import numpy.typing as npt

from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import guard
from alltoallv._calls.repeats import arrays_of
from alltoallv.communicator import Communicator
from alltoallv.numpy.adapter import ADAPTER
from alltoallv.numpy.arrays import Array, resolve
from alltoallv.numpy.work import Work
from alltoallv.quantization import requests, texts
from alltoallv.quantization.feedback import ErrorFeedback as ErrorFeedback
from alltoallv.quantization.host import ReductionCall, RowsCall
from alltoallv.quantization.spec import Gather, Options, Overflow, SumOp

_WORDS = {
    "tensor": "array",
    "work": "Work",
    "group": "A `Communicator`, or None for all ranks of the job",
    "gradient": "",
}


@texts.of(texts.ALL_REDUCE, **_WORDS)
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
    options = Options(
        scale, comm_quant_scale_1, comm_quant_scale_2, offset, bits, group_size, gather, op, overflow, out_dtype
    )
    comm = resolve(group)
    what = None
    if options.dynamic() and error_feedback is None and timeout is None and not async_op:
        what = "quantized_all_reduce", *options[4:]
    result: Array | None = comm.repeats.run(what, input, out) if what else None
    if result is not None:
        return result
    with guard(comm, "quantized_all_reduce"):
        made = requests.all_reduce(ADAPTER, comm, input, options, out, error_feedback)
        call = ReductionCall(ADAPTER, comm, made, timeout)
        if what:
            arrays = arrays_of(made.input, made.input.size, made.output, made.input.shape)
            comm.repeats.keep(what, input, out, call.plan.on_arrays(arrays))
    return call.submit() if async_op else call.run()


@texts.of(texts.REDUCE_SCATTER, **_WORDS)
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
    options = Options(bits=bits, group_size=group_size, op=op, overflow=overflow, out_dtype=out_dtype)
    comm = resolve(group)
    with guard(comm, "quantized_reduce_scatter"):
        made = requests.reduce_scatter(ADAPTER, comm, input, recv_counts, options, out, error_feedback)
        call = ReductionCall(ADAPTER, comm, made, timeout)
    return call.submit() if async_op else call.run()


@texts.of(texts.ALL_TO_ALL, **_WORDS)
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
    options = Options(bits=bits, group_size=group_size, overflow=overflow, out_dtype=out_dtype)
    comm = resolve(group)
    with guard(comm, "quantized_all_to_all"):
        call = RowsCall(ADAPTER, comm, input, send_counts, recv_counts, options, timeout)
    return call.submit() if async_op else call.run()
