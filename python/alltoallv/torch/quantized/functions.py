"""Quantized collectives on torch tensors; docs/quantization.md has the rules."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls.counts import Counts, shares
from alltoallv._calls.guard import guard
from alltoallv._calls.signature import described
from alltoallv.errors import InvalidParamError
from alltoallv.quantization import requests
from alltoallv.quantization.functions import Quantized
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
from alltoallv.torch.api import calls
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.group import Group, device_of
from alltoallv.torch.api.tensors import needs_grad, row_size
from alltoallv.torch.api.work import Done
from alltoallv.torch.graph import quantized_ops as quantized_ops
from alltoallv.torch.graph.graphs import is_tracing
from alltoallv.torch.graph.traced import outcome
from alltoallv.torch.quantized.adapter import ADAPTER
from alltoallv.torch.quantized.feedback import ErrorFeedback
from alltoallv.torch.quantized.rows import RowExchange

Scale: TypeAlias = Tensor | float | None


@described(Quantized.quantized_all_reduce)
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
    options = Options(
        scale, comm_quant_scale_1, comm_quant_scale_2, offset, coded, elements, gather, op, overflow, out_dtype
    )
    comm = None
    plain = options.dynamic() and out_dtype is None and error_feedback is None and timeout is None and not async_op
    if plain and not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        result = _core.quantized_all_reduce(shared.core, input, out, *options[4:9])
        if result is not None:
            return result
    if not torch.compiler.is_compiling():
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return (None, None) if async_op else None
    given = {"out": out, "async_op": async_op, "error_feedback": error_feedback, "timeout": timeout}
    traced = is_tracing()
    if traced:
        _check_recorded(input, given)
    else:
        assert comm is not None
        with guard(comm, "quantized_all_reduce"):
            if needs_grad(input):
                requests.exclude("input requires grad", **given)
                how = Quantization.checked(coded, elements, gather, op, overflow)
                options = options._replace(format=how.format, group_size=how.group_size)
                for name, value in zip(requests.SCALES, options, strict=False):
                    requests.as_scale(ADAPTER, name, value)
            else:
                made = requests.all_reduce(ADAPTER, comm, input, options, out, error_feedback)
                call = calls.quantized_reduce(comm, made)
            limit = calls.limit(comm, timeout)
    if traced or needs_grad(input):
        scales = map(_as_tensor, options[:3])
        return outcome(quantized_ops.quantized_all_reduce(input, *scales, *options[3:], group), out, async_op)
    return _started(call, async_op, limit)


@described(Quantized.quantized_reduce_scatter)
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
    comm = groups.resolve(group, device_of(input))
    if comm is None:
        return (None, None) if async_op else None
    given = {"out": out, "async_op": async_op, "error_feedback": error_feedback, "timeout": timeout}
    traced = is_tracing()
    with guard(comm, "quantized_reduce_scatter"):
        if traced:
            _check_recorded(input, given)
        elif needs_grad(input):
            requests.exclude("input requires grad", **given)
        else:
            made = requests.reduce_scatter(ADAPTER, comm, input, recv_counts, options, out, error_feedback)
            call = calls.quantized_reduce(comm, made)
        if input.dim() == 0:
            row_size(input)
        rows = shares("recv_counts", recv_counts, "input", input.shape[0], comm.size)
        limit = calls.limit(comm, timeout)
    if traced or needs_grad(input):
        result = quantized_ops.quantized_reduce_scatter(input, rows, comm.rank, *options, group)
        return outcome(result, out, async_op)
    return _started(call, async_op, limit)


@described(Quantized.quantized_all_to_all)
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
    coded, elements = coding(bits, format), grouping(group_size, input)
    options = Options(
        format=coded,
        group_size=elements,
        overflow=overflow,
        out_dtype=out_dtype,
        quantize_gradient=quantize_gradient,
    )
    traced = is_tracing()
    if traced or (needs_grad(input) and not async_op):
        requests.exclude("input requires grad, or is recorded for a graph", timeout=timeout)
        if not traced and groups.resolve(group, device_of(input)) is None:
            return None
        sends = torch.as_tensor(send_counts, device="cpu")
        recvs = None if recv_counts is None else torch.as_tensor(recv_counts, device="cpu")
        rows, _ = quantized_ops.quantized_all_to_all(input, sends, recvs, -1, *options, group)
        if async_op and recvs is None:
            return None, Done(rows)
        return outcome(rows, None, async_op)
    comm = groups.resolve(group, device_of(input))
    if comm is None:
        return (None, None) if async_op else None
    with guard(comm, RowExchange.operator):
        if needs_grad(input):
            raise InvalidParamError("input requires grad, which async_op excludes")
        limit = calls.limit(comm, timeout)
        exchange = RowExchange(comm, input, send_counts, recv_counts, options)
    if async_op:
        return exchange.output, exchange.submit(limit)
    return exchange.run(limit)[0]


def _started(call: calls.Operation, async_op: bool, limit: float) -> Any:
    if async_op:
        return call.result, call.submit(limit)
    call.run(limit)
    return call.result


def _check_recorded(input: Tensor, given: dict[str, Any]) -> None:
    kept = {name: given[name] for name in ("error_feedback", "timeout")}
    requests.exclude("this is recorded for a graph", **kept)
    if needs_grad(input):
        requests.exclude("input requires grad", **given)


def _as_tensor(scale: Scale) -> Tensor | None:
    return (
        scale if scale is None or isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32, device="cpu")
    )
