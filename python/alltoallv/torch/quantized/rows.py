"""Quantized rows that have passed this rank's checks, and what a row of codes looks like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Counts, packed, scaled
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization import requests as quantized
from alltoallv.quantization.spec import Overflow, Quantization
from alltoallv.torch.api import calls
from alltoallv.torch.api.calls import AnyCommunicator
from alltoallv.torch.api.tensors import core_name, row_size
from alltoallv.torch.api.work import Work
from alltoallv.torch.quantized.kernels import kernels_for
from alltoallv.torch.quantized.records import record_bytes, record_views


class Rows(Protocol):
    """Rows of ``length`` elements, each in ``stride`` bytes: scales and codes."""

    stride: int

    def encode(self, x: Tensor, coded: Tensor) -> None: ...
    def decode(self, coded: Tensor, out: Tensor, overflow: Overflow) -> bool:
        """False: a value does not fit and ``overflow`` is "raise"."""


class HostRows:
    """By the C++ kernels."""

    def __init__(self, how: Quantization, length: int) -> None:
        self._how, self._length = how, length
        self.stride = max(_core.quantized_row_bytes(length, how.bits, how.group_size), 4)

    def encode(self, x: Tensor, coded: Tensor) -> None:
        quantized.encode_rows(self._how, core_name(x.dtype), x.data_ptr(), len(coded), self._length, coded.data_ptr())

    def decode(self, coded: Tensor, out: Tensor, overflow: Overflow) -> bool:
        how = Quantization(self._how.bits, self._how.group_size, overflow=overflow)
        return quantized.decode_rows(
            how, core_name(out.dtype), coded.data_ptr(), len(coded), self._length, out.data_ptr()
        )


class DeviceRows:
    """By the device's kernels, one launch for all rows; the host waits only where ``overflow`` is "raise"."""

    def __init__(self, how: Quantization, length: int, device: torch.device) -> None:
        self._how, self._length = how, length
        self._kernels = kernels_for(device.type)
        self.stride = max(record_bytes(how, length), 16)

    def encode(self, x: Tensor, coded: Tensor) -> None:
        if x.numel():
            views = record_views(coded, self._how, self._length)
            self._kernels.quantize(x.view(-1), self._how, *views, part=self._length)

    def decode(self, coded: Tensor, out: Tensor, overflow: Overflow) -> bool:
        if not out.numel():
            return True
        how = Quantization(self._how.bits, self._how.group_size, overflow=overflow)
        views = record_views(coded, self._how, self._length)
        misfits = self._kernels.dequantize(*views, how, out.view(-1), part=self._length)
        return misfits is None or not misfits.any()


def rows_for(device: torch.device, how: Quantization, length: int) -> Rows:
    return HostRows(how, length) if device.type == "cpu" else DeviceRows(how, length, device)


class RowExchange:
    """A quantized_all_to_all of a contiguous tensor; made under the guard, which quantizes it."""

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
        calls.check_place(comm, x)
        length = row_size(x)
        self._comm, self._tail, self._like = comm, x.shape[1:], x.new_empty(0, dtype=out_dtype or x.dtype)
        how = quantized.row_quantization(bits, group_size, overflow, length, core_name(x.dtype))
        quantized.check_output_dtype(core_name(self._like.dtype))
        sends, self._recvs = quantized.row_counts(send_counts, recv_counts, x.shape[0], comm.size)
        self._rows = rows_for(x.device, how, length)
        self._stride = stride = self._rows.stride
        bytes_like = x.new_empty(0, dtype=torch.uint8)
        coded = calls.new_output(comm, (x.shape[0], stride), bytes_like)
        self._rows.encode(x, coded)
        if overflow == "raise" and self._like.dtype is not torch.float32:
            fits = self._rows.decode(coded, torch.empty_like(x, dtype=self._like.dtype), overflow)
            if not fits:
                raise ValueOverflowError(f"a row of the input holds a value that {core_name(self._like.dtype)} cannot")
        terms = _core.quantized_row_terms(how.bits, how.group_size)
        send = scaled(sends, stride)
        self._arrived: Tensor | None = None
        self.output: Tensor | None = None
        if self._recvs is None:
            self._learning = calls.learn(comm, self.operator, coded.view(-1), send, packed(send), stride, terms)
            return
        recv = scaled(self._recvs, stride)
        self._arrived = calls.new_output(comm, (sum(self._recvs), stride), bytes_like)
        self.output = self._new_rows(sum(self._recvs))
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

    def _new_rows(self, rows: int) -> Tensor:
        return calls.new_output(self._comm, (rows, *self._tail), self._like)

    def _learnt(self, flat: Tensor, counts: Sequence[int]) -> Tensor:
        rows = flat.view(sum(counts) // self._stride, self._stride)
        return self._decoded(rows, self._new_rows(len(rows)))

    def _filled(self) -> Tensor:
        assert self._arrived is not None
        assert self.output is not None
        return self._decoded(self._arrived, self.output)

    def _decoded(self, rows: Tensor, out: Tensor) -> Tensor:
        self._rows.decode(rows, out, "saturate")  # what does not fit has been found where it was sent
        return out
