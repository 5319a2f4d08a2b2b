"""Moves rows of NumPy arrays over host memory. The dispatchers of NumPy and MindSpore use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls.counts import packed, scaled, split_layout
from alltoallv._calls.dispatch import Received, RowMover
from alltoallv._calls.dispatching import OPERATOR
from alltoallv._calls.handle import Handle
from alltoallv._calls.headers import Bytes
from alltoallv._calls.routing import Numbers, check_coded, group_of
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name, numpy_dtype

Array = npt.NDArray[Any]
_FLOATS = ("float32", "float16", "bfloat16")


def sum_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which values of these dtypes are added and multiplied: at least float32."""
    return np.result_type(np.float32, *dtypes)


class ArrayMover(RowMover[Array]):
    """Moves rows of arrays, which are contiguous matrices."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, comm.backend == "tcp")

    def room(self, rows: int, columns: int, dtype: Any) -> Array:
        return memory.empty((rows, columns), numpy_dtype(dtype))

    def as_bytes(self, rows: Array) -> Array:
        flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        return flat.reshape(len(rows), rows.shape[1] * rows.itemsize)

    def as_values(self, rows: Array, dtype: Any) -> Array:
        flat: Array = np.ascontiguousarray(rows).reshape(-1).view(dtype)
        return flat.reshape(len(rows), rows.shape[1] // dtype.itemsize)

    def on_device(self, numbers: Array) -> Array:
        return numbers

    def on_host(self, rows: Array) -> Bytes:
        return rows

    def floats(self, weights: Array) -> Array:
        return weights

    def gather(self, rows: Array, source: Numbers, out: Array, where: Numbers | None = None) -> None:
        about = rows.ctypes.data, rows.strides[0], source.ctypes.data, len(source), out.shape[1] * out.itemsize
        _core.gather_rows(out.ctypes.data, out.strides[0], *about, 0 if where is None else where.ctypes.data)

    def fuses(self, rows: Array, gates: Array | None) -> bool:
        return gates is None or sum_dtype(rows.dtype, gates.dtype) == np.float32

    def weighed(self, rows: Array, source: Numbers, gates: Array | None) -> Array:
        if gates is None:
            return self.placed(rows, source)
        name, wide, each = core_name(rows.dtype), sum_dtype(rows.dtype, gates.dtype), gates[source]
        if name not in _FLOATS or wide != np.float32:
            product: Array = rows[source].astype(wide, copy=False) * each.astype(wide)[:, None]
            return product.astype(rows.dtype, copy=False)
        out, each = self.room(len(source), rows.shape[1], rows.dtype), each.astype(np.float32)
        about = source.ctypes.data, each.ctypes.data, len(source), rows.shape[1]
        _core.weigh_rows(name, out.ctypes.data, rows.ctypes.data, *about)
        return out

    def code_bytes(self, rows: Array, payload: str) -> int:
        check_coded(core_name(rows.dtype), rows.dtype)
        return _core.quantized_row_bytes(rows.shape[1], *_format(payload, rows)[:2])

    def encode(
        self, rows: Array, payload: str, out: Array, source: Numbers | None = None, gates: Array | None = None
    ) -> None:
        each = None if gates is None else gates[source].astype(np.float32)
        chosen = [0 if these is None else these.ctypes.data for these in (source, each)]
        about = rows.ctypes.data, len(out), rows.shape[1], out.ctypes.data
        _core.quantize_rows(*_format(payload, rows), *about, *chosen)

    def decode(self, coded: Array, payload: str | None, source: Numbers, out: Array, where: Numbers | None) -> None:
        if payload is None:
            return self.gather(coded, source, self.as_bytes(out), where)
        place = out.ctypes.data, coded.strides[0], source.ctypes.data, 0 if where is None else where.ctypes.data
        count = len(source), out.shape[1], "saturate"
        _core.dequantize_rows(*_format(payload, out), coded.ctypes.data, *count, *place)

    def split(self, coded: Array, length: int) -> tuple[Array, Array]:
        return coded[:, 4 : 4 + length], coded[:, :4]

    def add(self, coded: Array, payload: str | None, places: Numbers, out: Array) -> None:
        chosen = coded.ctypes.data, coded.strides[0], places.ctypes.data, places.shape[1], len(places), out.shape[1]
        if payload is not None:
            return _core.sum_quantized_rows(*_format(payload, out), *chosen, out.ctypes.data)
        known = _core.dtypes.get(name := core_name(out.dtype))
        if known and known.arithmetic != "none":
            return _core.sum_rows(name, out.ctypes.data, *chosen)
        rows, wide = self.as_values(coded, out.dtype), sum_dtype(out.dtype)  # of float8 and long doubles
        total, *others = (self.placed(rows, np.ascontiguousarray(choice)).astype(wide) for choice in places.T)
        for each in others:
            total += each
        out[...] = total.astype(out.dtype)

    def exchange(
        self, buffer: Array, sends: list[int], recvs: list[int] | None, terms: int, begins: bool
    ) -> Received[Array]:
        stride, place, core = buffer.shape[1], buffer.ctypes.data, self.comm.core
        if recvs is None:
            send = scaled(sends, stride)
            plan = _core.Plan(core, OPERATOR, "uint8", send, packed(send), [], [], terms, stride)

            def made(block: _core.Block, received: Sequence[int]) -> tuple[Array, list[int]]:
                rows = [count // stride for count in received]
                return memory.from_block(block, (sum(rows), stride), np.dtype(np.uint8)), rows

            if begins:
                learning = plan.submit_learning(place)
                return Handle(self.comm, learning.work, (buffer,), lambda: made(*learning.take())).result
            learnt = made(*plan.run_learning(place))
            return lambda: learnt
        received = self.room(sum(recvs), stride, "uint8")
        plan = _core.Plan(core, OPERATOR, "uint8", *split_layout(sends, recvs, stride), terms, stride)
        known = received, recvs
        if begins:
            work = plan.submit(place, received.ctypes.data)
            return Handle(self.comm, work, (buffer, received), lambda: known).result
        plan.run(place, received.ctypes.data)
        return lambda: known


def _format(payload: str, values: Array) -> tuple[str, int, str]:
    return payload, group_of(payload, values.shape[1]), core_name(values.dtype)
