"""Quantized collectives that have passed this rank's checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core, quantized
from alltoallv.counts import Counts, as_counts, packed, scaled
from alltoallv.errors import InvalidParamError, InvalidTensorError, ValueOverflowError
from alltoallv.feedback import Feedback
from alltoallv.quantization import Gather, Overflow, Quantization, QuantizedReduction, SumOp
from alltoallv.torch import calls
from alltoallv.torch.calls import AnyCommunicator, Call
from alltoallv.torch.tensors import check_apart, check_output, core_name, empty, row_size
from alltoallv.torch.work import Work


class ErrorFeedback(Feedback[Tensor]):
    __doc__ = Feedback.__doc__

    def _zeros(self, count: int, like: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float32, device=like.device)

    def _copy(self, value: Any) -> Tensor:
        return torch.as_tensor(value).detach().to(torch.float32, copy=True).reshape(-1)

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
        scale=_scale("scale", scale),
        offset=offset,
        comm_quant_scale_1=_scale("comm_quant_scale_1", comm_quant_scale_1),
        comm_quant_scale_2=_scale("comm_quant_scale_2", comm_quant_scale_2),
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


class RowExchange:
    """A quantized_all_to_all of a contiguous tensor in host memory; made under the guard, which quantizes it."""

    operator = "quantized_all_to_all"

    def __init__(
        self,
        comm: AnyCommunicator,
        x: Tensor,
        send_counts: Counts,
        recv_counts: Counts | None,
        bits: int,
        group_size: int | None,
        out_dtype: torch.dtype | None,
        overflow: Overflow,
    ) -> None:
        if not x.is_cpu:
            raise InvalidTensorError(f"the tensors lie on {x.device}, expected cpu for quantized rows")
        self._length = row_size(x)
        self._tail = x.shape[1:]
        self._dtype = out_dtype or x.dtype
        self._how = quantized.row_quantization(bits, group_size, overflow, self._length, core_name(x.dtype))
        quantized.check_output_dtype(core_name(self._dtype))
        sends = as_counts("send_counts", send_counts, comm.size)
        self._recvs = None if recv_counts is None else as_counts("recv_counts", recv_counts, comm.size)
        if min(sends) < 0 or sum(sends) != x.shape[0]:
            raise InvalidParamError(
                f"send_counts is {sends}, expected entries >= 0 whose sum is {x.shape[0]}, dimension 0 of input"
            )
        if self._recvs is not None and min(self._recvs) < 0:
            raise InvalidParamError(f"recv_counts is {self._recvs}, expected entries >= 0")
        how, rows = self._how, x.shape[0]
        self._stride = stride = max(_core.quantized_row_bytes(self._length, how.bits, how.group_size), 4)
        coded = empty((rows, stride), torch.uint8)
        quantized.encode_rows(how, core_name(x.dtype), x.data_ptr(), rows, self._length, coded.data_ptr())
        if overflow == "raise" and self._dtype is not torch.float32:
            self._decode(how, coded, torch.empty(x.shape, dtype=self._dtype))
        terms = _core.quantized_row_terms(how.bits, how.group_size)
        send = scaled(sends, stride)
        self._arrived: Tensor | None = None
        self.output: Tensor | None = None
        if self._recvs is None:
            self._learning = calls.learn(comm, self.operator, coded.view(-1), send, packed(send), stride, terms)
            return
        recv = scaled(self._recvs, stride)
        self._arrived = empty((sum(self._recvs), stride), torch.uint8)
        self.output = empty((sum(self._recvs), *self._tail), self._dtype)
        layout = (send, packed(send), recv, packed(recv))
        self._call = calls.exchange(comm, self.operator, self._arrived, coded, layout, stride, terms)

    def run(self) -> tuple[Tensor, list[int]]:
        """The rows received, and how many from each rank."""
        if self._recvs is None:
            flat, counts = self._learning.run()
            return self._learnt(flat, counts), [count // self._stride for count in counts]
        self._call.run()
        return self._filled(), self._recvs

    def submit(self) -> Work:
        """The rows are dequantized by the wait."""
        if self._recvs is None:
            return self._learning.submit(self._learnt)
        work = self._call.submit()
        work.then(self._filled)
        return work

    def _learnt(self, flat: Tensor, counts: Sequence[int]) -> Tensor:
        rows = flat.view(sum(counts) // self._stride, self._stride)
        return self._decode(self._lenient(), rows, empty((len(rows), *self._tail), self._dtype))

    def _filled(self) -> Tensor:
        assert self._arrived is not None
        assert self.output is not None
        return self._decode(self._lenient(), self._arrived, self.output)

    def _lenient(self) -> Quantization:
        """What does not fit has been found where it was sent."""
        return Quantization(self._how.bits, self._how.group_size)

    def _decode(self, how: Quantization, rows: Tensor, out: Tensor) -> Tensor:
        name = core_name(self._dtype)
        if not quantized.decode_rows(how, name, rows.data_ptr(), len(rows), self._length, out.data_ptr()):
            raise ValueOverflowError(f"a row of the input holds a value that {name} cannot")
        return out


def _scale(name: str, value: Tensor | float | None) -> quantized.Floats | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return quantized.as_scale(name, value)
    if value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidTensorError(f"{name} has dtype {value.dtype}, expected float32, float16, bfloat16", 13)
    return quantized.as_scale(name, value.detach().to("cpu", torch.float32).numpy())


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
    comm: AnyCommunicator, request: QuantizedReduction, out: Tensor, x: Tensor, feedback: ErrorFeedback | None
) -> Call:
    if feedback is None:
        return calls.quantized_reduce(comm, request, out, x)
    if not isinstance(feedback, ErrorFeedback):
        raise InvalidParamError(
            f"error_feedback is a {type(feedback).__name__}, expected alltoallv.torch.ErrorFeedback"
        )
    return calls.quantized_reduce(comm, request, out, x, *feedback.arrays(request, comm.size, comm.rank, x))
