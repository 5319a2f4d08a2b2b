"""Quantized rows that have passed this rank's checks, and the layout of a row of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Counts
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization import requests
from alltoallv.quantization.spec import Bounded, Options, Overflow, Quantization
from alltoallv.torch.eager import calls
from alltoallv.torch.eager.calls import Work
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.tensors import core_name
from alltoallv.torch.engines import torch_kernels
from alltoallv.torch.engines.kernels import check_format, kernels_for, record_bytes, record_views
from alltoallv.torch.quantized.adapter import ADAPTER


class HostRows:
    """Lays out rows for the C++ kernels: ``length`` elements each, in ``stride`` bytes of scales and codes."""

    def __init__(self, quantization: Quantization, length: int) -> None:
        self._quantization, self._length = quantization, length
        self.stride = max(_core.quantized_row_bytes(length, quantization.format, quantization.group_size), 4)

    def encode(self, x: Tensor, coded: Tensor) -> None:
        """Encodes all rows."""
        _core.quantize_rows(*self._about(x), x.data_ptr(), len(coded), self._length, coded.data_ptr())

    def decode(self, coded: Tensor, out: Tensor, overflow: Overflow) -> bool:
        """Decodes rows; returns False if a value does not fit and ``overflow`` is "raise"."""
        count = len(coded), self._length
        return _core.dequantize_rows(*self._about(out), coded.data_ptr(), *count, overflow, out.data_ptr())

    def bound(self, coded: Tensor, out: Tensor, overflow: Overflow) -> Tensor:
        """Returns what the elements of ``out``, decoded from these rows, can be wrong by: [rows, groups]."""
        result = torch.empty((len(coded), self._quantization.groups(self._length)), dtype=torch.float32, device="cpu")
        count = len(coded), self._length
        _core.bound_rows(*self._about(out), coded.data_ptr(), *count, overflow, result.data_ptr())
        return result

    def _about(self, values: Tensor) -> tuple[int | str, int, str]:
        return self._quantization.format, self._quantization.group_size, core_name(values.dtype)


class DeviceRows(HostRows):
    """Lays out rows for the device's kernels, one launch for all; the host waits only if ``overflow`` is "raise"."""

    def __init__(self, quantization: Quantization, length: int, device: torch.device) -> None:
        self._quantization, self._length = quantization, length
        self._kernels = kernels_for(device.type)
        check_format(quantization, self._kernels)
        self.stride = max(record_bytes(quantization, length), 16)

    def encode(self, x: Tensor, coded: Tensor) -> None:
        if x.numel():
            views = record_views(coded, self._quantization, self._length)
            self._kernels.quantize(x.view(-1), self._quantization, *views, part=self._length)

    def decode(self, coded: Tensor, out: Tensor, overflow: Overflow) -> bool:
        if not out.numel():
            return True
        quantization = replace(self._quantization, overflow=overflow)
        views = record_views(coded, self._quantization, self._length)
        overflows = self._kernels.dequantize(*views, quantization, out.view(-1), part=self._length)
        return overflows is None or not overflows.any()

    def bound(self, coded: Tensor, out: Tensor, overflow: Overflow) -> Tensor:
        spec, length, rows = self._quantization, self._length, len(coded)
        if not rows * length:
            return torch.empty((rows, spec.groups(length)), dtype=torch.float32, device=coded.device)
        views = record_views(coded, spec, length)
        values = torch.empty((rows, length), dtype=torch.float32, device=coded.device)
        self._kernels.dequantize(*views, replace(spec, overflow="infinity"), values.view(-1), part=length)
        return torch_kernels.bounds(torch_kernels.errors(*views, spec, length, 1), values, spec, 1, out.dtype, overflow)


class RowExchange:
    """A quantized_all_to_all of a contiguous tensor; made under the guard, which quantizes it."""

    operator = "quantized_all_to_all"

    def __init__(
        self,
        comm: AnyCommunicator,
        input: Tensor,
        send_counts: Counts,
        recv_counts: Counts | None,
        options: Options,
        bound: bool = False,
    ) -> None:
        rows = requests.rows(ADAPTER, comm, input, send_counts, recv_counts, options, bound)
        x = rows.input
        calls.check_place(comm, x)
        self._comm, self._tail = comm, x.shape[1:]
        self._like = x.new_empty(0, dtype=getattr(torch, rows.out_dtype))
        self._rows = (
            HostRows(rows.quantization, rows.length)
            if x.is_cpu
            else DeviceRows(rows.quantization, rows.length, x.device)
        )
        self._stride = stride = self._rows.stride
        coded = calls.new_output(comm, (x.shape[0], stride), x.new_empty(0, dtype=torch.uint8))
        self._rows.encode(x, coded)
        if rows.must_fit() and not self._rows.decode(coded, torch.empty_like(x, dtype=self._like.dtype), "raise"):
            raise ValueOverflowError(rows.overflow_text(), id=6003)
        self._overflow = rows.received().overflow
        self._call = calls.exchange_rows(comm, self.operator, coded, rows.sends, rows.recvs, rows.digest())
        self._out = None if rows.recvs is None else self._new_rows(sum(rows.recvs))
        self._format, self._bounds = rows.quantization.format, None
        if bound and self._out is not None:
            shape = sum(rows.recvs or ()), rows.quantization.groups(rows.length)
            self._bounds = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._tells_bound = bound

    @property
    def output(self) -> Any:
        """The rows received, with their bound where the caller wants it; None where counts are learnt."""
        if self._out is None or self._bounds is None:
            return self._out
        return Bounded(self._out, self._bounds, self._format)

    def run(self, timeout: float = -1.0) -> tuple[Any, list[int]]:
        """Returns the rows received, with their bound where the caller wants it, and how many came from each rank."""
        flat, counts = self._call.run(timeout)
        return self._decoded(flat, counts), [count // self._stride for count in counts]

    def submit(self, timeout: float = -1.0) -> Work:
        """Begins the exchange and returns its handle, whose wait dequantizes the rows."""
        return self._call.submit(self._decoded, timeout)

    def _new_rows(self, rows: int) -> Tensor:
        return calls.new_output(self._comm, (rows, *self._tail), self._like)

    def _decoded(self, flat: Tensor, counts: Sequence[int]) -> Any:
        rows = flat.view(-1, self._stride)
        out = self._new_rows(len(rows)) if self._out is None else self._out
        self._rows.decode(rows, out, self._overflow)
        if not self._tells_bound:
            return out
        row_bounds = self._rows.bound(rows, out, self._overflow)
        kept = row_bounds if self._bounds is None else self._bounds.copy_(row_bounds)
        return Bounded(out, kept, self._format)
