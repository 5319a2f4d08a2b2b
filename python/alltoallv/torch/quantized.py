"""Quantized collectives on torch tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from alltoallv import quantized
from alltoallv.counts import Counts, as_counts, even_split
from alltoallv.errors import InvalidParamError
from alltoallv.guard import guard
from alltoallv.quantization import FLOATS, Gather, Overflow, SumOp
from alltoallv.torch import functional, quantized_calls
from alltoallv.torch import group as groups
from alltoallv.torch import quantized_ops as quantized_ops
from alltoallv.torch.group import Group, device_of
from alltoallv.torch.quantized_calls import ErrorFeedback
from alltoallv.torch.quantized_rows import RowExchange
from alltoallv.torch.tensors import as_input, core_name, needs_grad, row_size

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
    allow_unquantized: bool = False,
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
    differentiates = out is None and not async_op and error_feedback is None
    if torch.compiler.is_compiling() or (differentiates and needs_grad(input)):
        if not differentiates:
            raise InvalidParamError("out, async_op and error_feedback have no place in a compiled graph")
        if not torch.compiler.is_compiling() and groups.resolve(group, device_of(input)) is None:
            return None
        scales = [_as_tensor(s) for s in (scale, comm_quant_scale_1, comm_quant_scale_2)]
        return torch.ops.alltoallv.quantized_all_reduce(
            input, scales[0], offset, scales[1], scales[2], bits, group_size, gather, op, out_dtype, overflow,
            groups.name_of(group),
        )  # fmt: skip
    comm = groups.resolve(group, device_of(input))
    if comm is None:
        return (None, None) if async_op else None
    with guard(comm, "quantized_all_reduce"):
        if needs_grad(input):
            raise InvalidParamError("input requires grad, which out, async_op and error_feedback exclude")
        x = as_input("input", input)
        skips = allow_unquantized and differentiates and scale is None and comm_quant_scale_1 is None
        if skips and out_dtype in (None, x.dtype) and quantized.is_slower(comm.backend, comm.size, x.numel()):
            skips = core_name(x.dtype) in FLOATS
        else:
            skips = False
        if not skips:
            call = quantized_calls.all_reduce(
                comm,
                x,
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
    if skips:
        total = functional.all_reduce(x, comm)
        return total / comm.size if op == "avg" else total
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
    differentiates = out is None and not async_op and error_feedback is None
    traced = torch.compiler.is_compiling() or (differentiates and needs_grad(input))
    with guard(comm, operator):
        if (traced and not differentiates) or (needs_grad(input) and not traced):
            raise InvalidParamError("out, async_op and error_feedback are not for compiled graphs nor with gradients")
        if input.dim() == 0:
            row_size(input)
        rows = (
            even_split("input", input.shape[0], comm.size)
            if recv_counts is None
            else as_counts("recv_counts", recv_counts, comm.size)
        )
        if min(rows) < 0 or sum(rows) != input.shape[0]:
            raise InvalidParamError(
                f"recv_counts is {rows}, expected entries >= 0 whose sum is {input.shape[0]}, dimension 0 of input"
            )
    if traced:
        return torch.ops.alltoallv.quantized_reduce_scatter(
            input, rows, comm.rank, bits, group_size, op, out_dtype, overflow, groups.name_of(group)
        )
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
    if torch.compiler.is_compiling() or (needs_grad(input) and not async_op):
        if not torch.compiler.is_compiling() and groups.resolve(group, device_of(input)) is None:
            return None
        sends, recvs = torch.as_tensor(send_counts), None if recv_counts is None else torch.as_tensor(recv_counts)
        rows, _ = torch.ops.alltoallv.quantized_all_to_all(
            input, sends, recvs, bits, group_size, out_dtype, overflow, groups.name_of(group)
        )
        return rows
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


def _as_tensor(scale: Scale) -> Tensor | None:
    return scale if scale is None or isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32)
