"""Quantized collectives on torch tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv._calls.counts import Counts, shares
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.spec import Gather, Overflow, Quantization, SumOp
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.group import Group, device_of, repeats_of
from alltoallv.torch.api.ready import remember
from alltoallv.torch.api.tensors import as_input, needs_grad, row_size
from alltoallv.torch.api.work import Done
from alltoallv.torch.graph import quantized_ops as quantized_ops
from alltoallv.torch.graph.graphs import makes_graph
from alltoallv.torch.graph.recorded import outcome
from alltoallv.torch.quantized import calls as quantized_calls
from alltoallv.torch.quantized.calls import ErrorFeedback
from alltoallv.torch.quantized.rows import RowExchange

Scale: TypeAlias = Tensor | float | None


def quantized_all_reduce(
    input: Tensor,
    *,
    scale: Scale = None,
    offset: float | None = None,
    bits: int = 8,
    group_size: int = 128,
    gather: Gather = "full",
    op: SumOp = "sum",
    out_dtype: torch.dtype | None = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    comm_quant_scale_1: Scale = None,
    comm_quant_scale_2: Scale = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """The sum of the ``input`` of all ranks, whose terms travel as codes; the same bits on every rank.

    Arguments and errors are those of `alltoallv.numpy.quantized_all_reduce`, with tensors; scales may be tensors or
    numbers, ``error_feedback`` is an `alltoallv.torch.ErrorFeedback`.

    Returns:
        The result in the input's shape, or ``(result, work)`` with ``async_op=True``. Differentiable where neither
        ``out``, ``async_op`` nor ``error_feedback`` is given: the gradient passes straight through the rounding, it is
        the sum (or average) of all ranks' gradients, not quantized.
    """
    scales = (scale, comm_quant_scale_1, comm_quant_scale_2)
    comm = what = None
    if offset is None and error_feedback is None and not async_op and all(each is None for each in scales):
        what = "quantized_all_reduce", bits, group_size, gather, op, out_dtype, overflow
        if not is_dynamo_compiling() and (result := repeats_of(group).run(what, input, out)) is not None:
            return result
    if not torch.compiler.is_compiling():
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return (None, None) if async_op else None
    recorded = makes_graph()
    if recorded:
        _check_recorded(input, out, async_op, error_feedback)
    else:
        assert comm is not None
        with guard(comm, "quantized_all_reduce"):
            if needs_grad(input):
                quantized.exclude("input requires grad", out, async_op, error_feedback)
                how = Quantization.checked(bits, group_size, gather, op, overflow)
                bits, group_size = how.bits, how.group_size
                for name, value in zip(("scale", "comm_quant_scale_1", "comm_quant_scale_2"), scales, strict=True):
                    quantized_calls.as_scale(name, value)
            else:
                call = quantized_calls.all_reduce(
                    comm,
                    as_input("input", input),
                    out,
                    scale=scale,
                    offset=offset,
                    comm_quant_scale_1=comm_quant_scale_1,
                    comm_quant_scale_2=comm_quant_scale_2,
                    bits=bits,
                    group_size=group_size,
                    gather=gather,
                    op=op,
                    out_dtype=out_dtype,
                    overflow=overflow,
                    feedback=error_feedback,
                )
                if what:
                    remember(call, what, input, out)
    if recorded or needs_grad(input):
        first, second, third = map(_as_tensor, scales)
        made = quantized_ops.quantized_all_reduce(
            input, first, offset, second, third, bits, group_size, gather, op, out_dtype, overflow,
            group,
        )  # fmt: skip
        return outcome(made, out, async_op)
    if async_op:
        return call.output, call.submit()
    call.run()
    return call.output


def quantized_reduce_scatter(
    input: Tensor,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    group_size: int = 128,
    op: SumOp = "sum",
    out_dtype: torch.dtype | None = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """The sum of the ``input`` of all ranks, of which rank j gets its part of the rows of dimension 0.

    Arguments and errors are those of `alltoallv.numpy.quantized_reduce_scatter`, with tensors. Differentiable as
    `quantized_all_reduce`: every rank gets the gradients of all parts.
    """
    comm = groups.resolve(group, device_of(input))
    if comm is None:
        return (None, None) if async_op else None
    operator = "quantized_reduce_scatter"
    recorded = makes_graph()
    with guard(comm, operator):
        if recorded:
            _check_recorded(input, out, async_op, error_feedback)
        elif needs_grad(input):
            quantized.exclude("input requires grad", out, async_op, error_feedback)
        if input.dim() == 0:
            row_size(input)
        rows = shares("recv_counts", recv_counts, "input", input.shape[0], comm.size)
    if recorded or needs_grad(input):
        made = quantized_ops.quantized_reduce_scatter(
            input, rows, comm.rank, bits, group_size, op, out_dtype, overflow, group
        )
        return outcome(made, out, async_op)
    with guard(comm, operator):
        call = quantized_calls.reduce_scatter(
            comm,
            as_input("input", input),
            rows,
            out,
            bits=bits,
            group_size=group_size,
            op=op,
            out_dtype=out_dtype,
            overflow=overflow,
            feedback=error_feedback,
        )
    if async_op:
        return call.output, call.submit()
    call.run()
    return call.output


def quantized_all_to_all(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    group_size: int | None = None,
    out_dtype: torch.dtype | None = None,
    overflow: Overflow = "saturate",
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends rows to every rank as codes with their float32 scales, in one exchange; a MoE dispatch.

    Arguments and errors are those of `alltoallv.numpy.quantized_all_to_all`, with tensors. With ``async_op=True`` and
    learnt counts ``work.result()`` is the output. Differentiable without ``async_op``: gradients
    go back as they are, not quantized.
    """
    recorded = makes_graph()
    if recorded or (needs_grad(input) and not async_op):
        if not recorded and groups.resolve(group, device_of(input)) is None:
            return None
        sends = torch.as_tensor(send_counts, device="cpu")
        recvs = None if recv_counts is None else torch.as_tensor(recv_counts, device="cpu")
        rows, _ = quantized_ops.quantized_all_to_all(input, sends, recvs, bits, group_size, out_dtype, overflow, group)
        if async_op and recvs is None:
            return None, Done(rows)
        return outcome(rows, None, async_op)
    comm = groups.resolve(group, device_of(input))
    if comm is None:
        return (None, None) if async_op else None
    with guard(comm, RowExchange.operator):
        if needs_grad(input):
            raise InvalidParamError("input requires grad, which async_op excludes")
        x = as_input("input", input)
        exchange = RowExchange(comm, x, send_counts, recv_counts, bits, group_size, out_dtype, overflow)
    if async_op:
        return exchange.output, exchange.submit()
    return exchange.run()[0]


def _check_recorded(input: Tensor, out: Tensor | None, async_op: bool, error_feedback: ErrorFeedback | None) -> None:
    quantized.exclude("this is recorded for a graph", None, False, error_feedback)
    if needs_grad(input):
        quantized.exclude("input requires grad", out, async_op, None)


def _as_tensor(scale: Scale) -> Tensor | None:
    return (
        scale if scale is None or isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32, device="cpu")
    )
