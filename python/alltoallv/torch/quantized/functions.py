"""Quantized collectives on torch tensors; docs/quantization.md has the rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls.counts import Counts, as_counts, shares
from alltoallv._calls.guard import guard
from alltoallv._calls.signature import described
from alltoallv.errors import InvalidParamError
from alltoallv.quantization import requests, signature
from alltoallv.quantization.linear import check_shapes
from alltoallv.quantization.spec import (
    Format,
    Gather,
    GroupSize,
    Options,
    Overflow,
    Quantization,
    SumOp,
    coding,
    grouping,
)
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.graphs import is_tracing
from alltoallv.torch.eager.group import Group, device_of
from alltoallv.torch.eager.tensors import needs_grad, row_size
from alltoallv.torch.eager.work import Done
from alltoallv.torch.graph import gradients, watched
from alltoallv.torch.graph.library import Operator
from alltoallv.torch.graph.traced import outcome
from alltoallv.torch.graph.watched import is_watched
from alltoallv.torch.quantized import ops as quantized_ops
from alltoallv.torch.quantized.adapter import ADAPTER
from alltoallv.torch.quantized.feedback import ErrorFeedback
from alltoallv.torch.quantized.rows import RowExchange

Scale: TypeAlias = Tensor | float | None


@described(signature.quantized_all_reduce)
def quantized_all_reduce(
    input: Tensor,
    *,
    scale: Scale = None,
    offset: float | None = None,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
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
    timeout: float | None = None,
) -> Any:
    coded, elements = coding(bits, format), grouping(group_size, input)
    dynamic = scale is comm_quant_scale_1 is comm_quant_scale_2 is offset is out_dtype is timeout is None
    if dynamic and not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        how = coded, elements, gather, op, overflow
        states = None if error_feedback is None else ADAPTER.feedback.states_of(error_feedback)
        made = _core.quantized_all_reduce(shared.core, input, out, *how, states, bool(async_op))
        if made is NotImplemented and out is error_feedback is None and not async_op:
            made = gradients.quantized_sum(shared, input, how)
        if made is not None and made is not NotImplemented:
            return calls.started(shared, made, input) if async_op else made
    options = Options(
        scale, comm_quant_scale_1, comm_quant_scale_2, offset, coded, elements, gather, op, overflow, out_dtype
    )
    row = quantized_ops.quantized_all_reduce, requests.all_reduce
    return _reduced(*row, input, (), options, group, out=out, feedback=error_feedback, async_op=async_op, limit=timeout)


@described(signature.quantized_reduce_scatter)
def quantized_reduce_scatter(
    input: Tensor,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    op: SumOp = "sum",
    out_dtype: torch.dtype | None = None,
    error_feedback: ErrorFeedback | None = None,
    overflow: Overflow = "saturate",
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    coded, elements = coding(bits, format), grouping(group_size, input)
    options = Options(format=coded, group_size=elements, op=op, overflow=overflow, out_dtype=out_dtype)
    row, counts = (quantized_ops.quantized_reduce_scatter, requests.reduce_scatter), (recv_counts,)
    return _reduced(
        *row, input, counts, options, group, out=out, feedback=error_feedback, async_op=async_op, limit=timeout
    )


def _reduced(
    operator: Operator,
    request: Callable[..., Any],
    input: Tensor,
    counts: tuple[Counts | None, ...],
    options: Options,
    group: Group,
    *,
    out: Tensor | None,
    feedback: ErrorFeedback | None,
    async_op: bool,
    limit: float | None,
) -> Any:
    """Runs a quantized reduction: by its operator with gradients and in a graph, else at once.

    ``request`` checks the arguments; ``counts`` are the rows of a reduce-scatter, whose group a graph must know.
    """
    comm: Any = None
    if counts or not torch.compiler.is_compiling():
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return (None, None) if async_op else None
    traced, wants_grad = is_tracing(input), needs_grad(input)
    watches = is_watched() and not (traced or wants_grad)
    seen = watches and feedback is None and limit is None and not async_op
    with guard(comm, f"quantized_{request.__name__}"):
        if traced:
            requests.exclude("this is recorded for a graph", error_feedback=feedback, timeout=limit)
        if wants_grad:
            given = {"out": out, "async_op": async_op, "error_feedback": feedback, "timeout": limit}
            requests.exclude("input requires grad", **given)
        if traced or wants_grad or seen:
            place: tuple[Any, ...] = ()
            if counts:
                row_size(input)  # raises for a tensor without rows
                place = shares("recv_counts", counts[0], "input", input.shape[0], comm.size), comm.rank
            options = options if traced else _checked(options)
        else:
            made = request(ADAPTER, comm, input, *counts, options, out, feedback)
            call, states = (
                calls.quantized_reduce(comm, made),
                [x for x in (made.error, made.gather_error) if x is not None],
            )
            seconds = calls.limit(comm, limit)
    if traced or wants_grad or seen:
        scales = map(_as_tensor, options[:3])
        return outcome(operator(input, *place, *scales, *options[3:], group), out, async_op)
    run = functools.partial(call.submit if async_op else call.run, seconds)
    work = run() if not watches else watched.call(call.name, comm, [call.result, *states], [call.like], run)
    return (call.result, work) if async_op else call.result


def _checked(options: Options) -> Options:
    """Raises here, under the guard, for options that torch would refuse in the arguments of an operator."""
    how = Quantization.checked(*options[4:9])
    for name, value in zip(requests.SCALES, options, strict=False):
        requests.as_scale(ADAPTER, name, value)
    requests.output_dtype(ADAPTER, options, "float32")
    # An all-to-all's groups are its rows where nothing is said.
    return options._replace(format=how.format, group_size=None if options.group_size is None else how.group_size)


def _as_tensor(scale: Scale) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.tensor(scale, dtype=torch.float32, device="cpu")


@described(signature.quantized_all_to_all)
def quantized_all_to_all(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    out_dtype: torch.dtype | None = None,
    overflow: Overflow = "saturate",
    quantize_gradient: bool = False,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    options = Options(
        format=coding(bits, format),
        group_size=grouping(group_size, input),
        overflow=overflow,
        out_dtype=out_dtype,
        quantize_gradient=quantize_gradient,
    )
    comm: Any = None
    if not torch.compiler.is_compiling():
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return (None, None) if async_op else None
    traced = is_tracing(input)
    seen = timeout is None and is_watched()
    if traced or ((needs_grad(input) or seen) and not async_op):
        with guard(None if traced else comm, RowExchange.operator):
            requests.exclude("input requires grad, or is recorded for a graph", timeout=timeout)
            if not traced:
                options, send_counts = _checked(options), as_counts("send_counts", send_counts, comm.size)
                recv_counts = None if recv_counts is None else as_counts("recv_counts", recv_counts, comm.size)
            sends = torch.as_tensor(send_counts, device="cpu")
            recvs = None if recv_counts is None else torch.as_tensor(recv_counts, device="cpu")
            known = traced and recv_counts is not None and not isinstance(recv_counts, Tensor)
            length = sum(cast("list[int]", recv_counts)) if known else -1
        rows, _ = quantized_ops.quantized_all_to_all(input, sends, recvs, length, *options, group)
        if async_op and recvs is None:
            return None, Done(rows)
        return outcome(rows, None, async_op)
    with guard(comm, RowExchange.operator):
        if needs_grad(input):
            raise InvalidParamError("input requires grad, which async_op excludes")
        limit = calls.limit(comm, timeout)
        exchange = RowExchange(comm, input, send_counts, recv_counts, options)

    def run() -> Any:
        return (exchange.output, exchange.submit(limit)) if async_op else exchange.run(limit)[0]

    if not is_watched():
        return run()
    outputs = [] if exchange.output is None else [exchange.output]
    return watched.call(RowExchange.operator, comm, outputs, [input], run)


@described(signature.quantized_linear_all_reduce)
def quantized_linear_all_reduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int | None = None,
    bits: int = 8,
    format: Format | None = None,
    group_size: GroupSize | None = None,
    gather: Gather = "full",
    op: SumOp = "sum",
    overflow: Overflow = "saturate",
    group: Group = None,
) -> Tensor | None:
    comm: Any = None
    if not is_tracing(input):
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return None
    with guard(comm, "quantized_all_reduce"):
        if comm is not None:
            check_shapes(input.shape, weight.shape, None if bias is None else bias.shape)
        elements: Any = group_size
        if group_size == "token":
            elements = max(weight.shape[0], 1)
        elif group_size == "tensor":
            elements, chunks = max(grouping("tensor", input[..., :1]) * weight.shape[0], 1), 1
        options = Options(
            format=str(coding(bits, format)), group_size=elements, gather=gather, op=op, overflow=overflow
        )
    result: Tensor = quantized_ops.quantized_linear(input, weight, chunks, *options, group)
    return result if bias is None else result + bias
