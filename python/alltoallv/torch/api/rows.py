"""Moves rows of tensors: the operators of `moe_ops` are built on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.dispatch import Received, RowMover
from alltoallv._calls.dispatching import OPERATOR
from alltoallv._calls.guard import guard
from alltoallv._calls.headers import Bytes
from alltoallv._calls.routing import check_coded, group_of
from alltoallv.quantization.spec import Quantization
from alltoallv.torch.eager import calls
from alltoallv.torch.eager.calls import AnyCommunicator
from alltoallv.torch.eager.tensors import as_input, core_name, empty
from alltoallv.torch.quantized.rows import DeviceRows, HostRows

_CODED = (torch.float32, torch.float16, torch.bfloat16)


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of these dtypes are added and multiplied: at least float32."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype if dtype.itemsize >= 4 else torch.float32)
    return wide


class TensorMover(RowMover[Tensor]):
    """Moves rows of tensors on the device of one that is given."""

    def __init__(self, comm: AnyCommunicator, like: Tensor, beside: object = None) -> None:
        super().__init__(comm, like.is_cpu and comm.backend == "tcp", beside)
        self._device, self._cpu = like.device, like.is_cpu

    def room(self, rows: int, columns: int, dtype: Any) -> Tensor:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if self._cpu:
            return empty((rows, columns), dtype)  # its pages have been touched before
        return torch.empty((rows, columns), dtype=dtype, device=self._device)

    def as_bytes(self, rows: Tensor) -> Tensor:
        return _viewed(as_input("rows", rows), torch.uint8)

    def as_values(self, rows: Tensor, dtype: Any) -> Tensor:
        return _viewed(rows.contiguous(), dtype)

    def on_device(self, numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def on_host(self, rows: Tensor) -> Bytes:
        return rows.cpu().numpy()

    def floats(self, weights: Tensor) -> npt.NDArray[Any]:
        return weights.detach().to("cpu", torch.float64).numpy()

    def gather(self, rows: Tensor, source: Tensor, out: Tensor, where: Tensor | None = None) -> None:
        if self._cpu:
            about = rows.data_ptr(), _stride(rows), source.data_ptr(), len(source), out.shape[1] * out.itemsize
            _core.gather_rows(out.data_ptr(), _stride(out), *about, 0 if where is None else where.data_ptr())
        elif not len(rows):
            out.zero_()
        else:
            torch.index_select(rows, 0, source.clamp(min=0), out=out)
            out.view(torch.uint8)[source < 0] = 0

    def fuses(self, rows: Tensor, gates: Tensor | None) -> bool:
        return self._cpu and (gates is None or sum_dtype(rows.dtype, gates.dtype) == torch.float32)

    def weighed(self, rows: Tensor, source: Tensor, gates: Tensor | None) -> Tensor:
        if gates is None:
            return self.placed(rows, source)
        wide, each = sum_dtype(rows.dtype, gates.dtype), gates[source]
        if not self._cpu or rows.dtype not in _CODED or wide != torch.float32:
            return self.placed(rows, source).to(wide).mul_(each.to(wide)[:, None]).to(rows.dtype)
        result, each = self.room(len(source), rows.shape[1], rows.dtype), each.to(wide)
        about = rows.data_ptr(), source.data_ptr(), each.data_ptr(), len(source), rows.shape[1]
        _core.weigh_rows(core_name(rows.dtype), result.data_ptr(), *about)
        return result

    def code_bytes(self, rows: Tensor, payload: str) -> int:
        check_coded(core_name(rows.dtype), rows.dtype)
        return self._codec(payload, rows).stride

    def encode(
        self, rows: Tensor, payload: str, out: Tensor, source: Tensor | None = None, gates: Tensor | None = None
    ) -> None:
        each = None if gates is None else gates[source].float()
        self._codec(payload, rows).encode(rows, out, source, each)

    def decode(self, coded: Tensor, payload: str | None, source: Tensor, out: Tensor, where: Tensor | None) -> None:
        if payload is None:
            self.gather(coded, source, self.as_bytes(out), where)
        elif self._cpu:
            self._codec(payload, out).decode_placed(coded, source, out, where)
        else:
            self.gather(self._values(coded, payload, out), source, out, where)

    def _values(self, coded: Tensor, payload: str, like: Tensor) -> Tensor:
        made = self.room(len(coded), like.shape[1], like.dtype)
        self._codec(payload, made).decode(coded.contiguous(), made, "saturate")
        return made

    def _codec(self, payload: str, values: Tensor) -> HostRows:
        length = values.shape[1]
        how = Quantization(payload, group_of(payload, length))
        return HostRows(how, length) if self._cpu else DeviceRows(how, length, self._device)

    def split(self, coded: Tensor, length: int) -> tuple[Tensor, Tensor]:
        begin = 4 if self._cpu else 16
        return coded[:, begin : begin + length], coded[:, :4]

    def add(self, coded: Tensor, payload: str | None, places: Tensor, out: Tensor) -> None:
        if payload is not None and self._cpu:
            return self._codec(payload, out).add_placed(coded, places, out)
        if payload is None and self._cpu and _core.dtypes[core_name(out.dtype)].arithmetic != "none":
            about = coded.data_ptr(), _stride(coded), places.data_ptr(), places.shape[1], *out.shape
            return _core.sum_rows(core_name(out.dtype), out.data_ptr(), *about)
        rows = self.as_values(coded, out.dtype) if payload is None else self._values(coded, payload, out)
        first, *others = places.t()
        total = self.placed(rows, first).to(sum_dtype(out.dtype) if others else out.dtype)
        for each in others:
            total += self.placed(rows, each).to(total.dtype)
        out.copy_(total)

    def exchange(
        self, buffer: Tensor, sends: list[int], recvs: list[int] | None, terms: int, begins: bool
    ) -> Received[Tensor]:
        stride = buffer.shape[1]

        def made(output: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
            return output.view(-1, stride), [count // stride for count in counts]

        with guard(self.comm, OPERATOR):
            call = calls.exchange_rows(self.comm, OPERATOR, buffer, sends, recvs, terms)
        if begins:
            return call.submit(made).result
        received = made(*call.run())
        return lambda: received


def _viewed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns contiguous rows as rows of a dtype."""
    flat = rows.as_strided((rows.numel(),), (1,))  # one or no element may have any stride
    return flat.view(dtype).view(len(rows), rows.shape[1] * rows.itemsize // dtype.itemsize)


def _stride(rows: Tensor) -> int:
    return rows.stride(0) * rows.itemsize
