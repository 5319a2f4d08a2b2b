"""Quantized collectives that have passed this rank's checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv._calls.counts import scaled
from alltoallv.errors import InvalidTensorError
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.feedback import Feedback
from alltoallv.quantization.spec import Gather, Overflow, QuantizedReduction, SumOp
from alltoallv.torch.api import calls
from alltoallv.torch.api.calls import AnyCommunicator, Call
from alltoallv.torch.api.tensors import check_apart, check_output, core_name, row_size


class ErrorFeedback(Feedback[Tensor]):
    __doc__ = Feedback.__doc__
    _title = "alltoallv.torch.ErrorFeedback"

    def _placed(self, array: Tensor, like: Tensor) -> Tensor:
        return array.to(like.device)

    def _zeros(self, count: int, like: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float32, device=like.device)

    def _copy(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.tensor(value, dtype=torch.float32, device="cpu").reshape(-1)
        return value.detach().to(torch.float32, copy=True).reshape(-1)

    def _count(self, array: Tensor) -> int:
        return array.numel()


def all_reduce(
    comm: AnyCommunicator,
    x: Tensor,
    out: Tensor | None,
    *,
    scale: Tensor | float | None,
    offset: float | None,
    comm_quant_scale_1: Tensor | float | None,
    comm_quant_scale_2: Tensor | float | None,
    bits: int,
    group_size: int,
    gather: Gather,
    op: SumOp,
    out_dtype: torch.dtype | None,
    overflow: Overflow,
    feedback: ErrorFeedback | None,
) -> Call:
    """A quantized_all_reduce of a contiguous tensor; to be called under the guard."""
    request = quantized.all_reduce_request(
        x.shape,
        core_name(x.dtype),
        scale=as_scale("scale", scale),
        offset=offset,
        comm_quant_scale_1=as_scale("comm_quant_scale_1", comm_quant_scale_1),
        comm_quant_scale_2=as_scale("comm_quant_scale_2", comm_quant_scale_2),
        bits=bits,
        group_size=group_size,
        gather=gather,
        op=op,
        out_dtype=None if out_dtype is None else core_name(out_dtype),
        overflow=overflow,
        has_feedback=feedback is not None,
    )
    out = _output(comm, request, x.shape, x, out)
    if out.data_ptr() != x.data_ptr() or out.itemsize != x.itemsize:
        check_apart(out, x)
    return _call(comm, request, out, x, feedback)


def reduce_scatter(
    comm: AnyCommunicator,
    x: Tensor,
    rows: Sequence[int],
    out: Tensor | None,
    *,
    bits: int,
    group_size: int,
    op: SumOp,
    out_dtype: torch.dtype | None,
    overflow: Overflow,
    feedback: ErrorFeedback | None,
) -> Call:
    """A quantized_reduce_scatter of a contiguous tensor; to be called under the guard."""
    request = quantized.reduce_scatter_request(
        scaled(rows, row_size(x)),
        core_name(x.dtype),
        bits=bits,
        group_size=group_size,
        op=op,
        out_dtype=None if out_dtype is None else core_name(out_dtype),
        overflow=overflow,
    )
    out = _output(comm, request, (rows[comm.rank], *x.shape[1:]), x, out)
    check_apart(out, x)
    return _call(comm, request, out, x, feedback)


def as_scale(name: str, value: Tensor | float | None) -> quantized.Floats | None:
    """See `alltoallv.quantization.requests.as_scale`."""
    if not isinstance(value, Tensor):
        return quantized.as_scale(name, value)
    return quantized.as_scale(name, value.detach().to("cpu", torch.float32).numpy(), core_name(value.dtype))


def _output(
    comm: AnyCommunicator, request: QuantizedReduction, shape: Sequence[int], x: Tensor, out: Tensor | None
) -> Tensor:
    dtype: torch.dtype = getattr(torch, request.out_dtype)
    if out is None:
        return calls.new_output(comm, tuple(shape), x.new_empty(0, dtype=dtype))
    check_output("out", out, dtype)
    if out.shape != torch.Size(shape):
        raise InvalidTensorError(f"out has shape {tuple(out.shape)}, expected {tuple(shape)}")
    return out


def _call(
    comm: AnyCommunicator,
    request: QuantizedReduction,
    out: Tensor,
    x: Tensor,
    feedback: ErrorFeedback | None,
) -> Call:
    errors = ErrorFeedback.arrays_of(feedback, request, comm.size, comm.rank, x)
    return calls.quantized_reduce(comm, request, out, x, *errors)
