"""Rows to their experts and back over host memory, as `alltoallv._calls.routing` says: for NumPy and MindSpore.

What belongs to a row travels with it as bytes, side by side: its values, its gate weight, its tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls.counts import packed, scaled, split_layout
from alltoallv._calls.dispatching import OPERATOR, DispatchState
from alltoallv._calls.guard import guard
from alltoallv._calls.handle import Handle
from alltoallv._calls.routing import PAYLOADS, Numbers, Routing, places, positions
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.errors import InvalidTensorError

Array = npt.NDArray[Any]
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(eq=False)
class Route:
    """Which row goes where; `spread` and `collect` go along it and back."""

    communicator: Communicator
    tokens: int
    k: int
    order: Numbers
    sends: list[int]
    recvs: list[int]
    source: Numbers


class Arrived(NamedTuple):
    """What has come: rows ``[rows, ...]`` and weights ``[rows]``, or codes and their scales."""

    rows: Array
    weights: Array | None
    state: DispatchState[Array]


def dispatch(
    comm: Communicator, routing: Routing, tokens: Array, ids: Numbers, weights: Array | None, begins: bool
) -> Callable[[], Arrived]:
    """Tokens ``[n, ...]`` with choices and weights ``[n, k]`` to their experts."""
    with guard(comm, OPERATOR):
        routing.check_ids(ids)
        about = f"{tokens.dtype} {tokens.shape[1:]} {None if weights is None else weights.dtype}"
        sending = routing.send(ids, weights, comm.size, about)
        order, tail, dtype = sending.order, tokens.shape[1:], tokens.dtype
        parts = [(encode(tokens, routing.payload), order // ids.shape[1]), (_bytes(sending.tags), None)]
        if weights is not None:
            parts.append((_bytes(weights.reshape(-1)), order))
        buffer, columns = _side_by_side(parts)
    exchange = _exchange(comm, buffer, sending.sends, None, begins)

    def finish() -> Arrived:
        received, recvs = exchange()
        with guard(comm, OPERATOR):
            tags = _as_rows(received[:, columns[1]], np.dtype(np.int32), (2,))
            arrival = routing.receive(tags, recvs, comm.rank, sending.signature)
        route = Route(comm, len(ids), ids.shape[1], order, sending.sends, recvs, arrival.source)
        rows, scales = received[:, columns[0]], None
        if routing.codes:
            scales = _placed(_as_rows(rows[:, :4], np.dtype(np.float32), ()), arrival.source)
            rows = _as_rows(rows[:, 4 : 4 + _length(tail)], np.dtype(np.int8), tail)
        else:
            rows = decode(rows, routing.payload, dtype, tail)
        made = None
        if weights is not None:
            made = _placed(_as_rows(received[:, columns[2]], weights.dtype, ()), arrival.source)
        state = state_of(route, arrival, routing, ids)
        state.scales = scales
        return Arrived(_placed(rows, arrival.source), made, state)

    return finish


def state_of(route: Any, arrival: Any, routing: Routing, ids: Numbers) -> DispatchState[Any]:
    """All but the weights; arrays of NumPy."""
    counts, source = arrival.counts, arrival.source
    sources = np.repeat(np.arange(len(route.recvs)), route.recvs)
    flat = ids.reshape(-1)
    return DispatchState(
        counts.tolist(), arrival.received.tolist(), None, np.repeat(np.arange(len(counts)), counts),
        np.where(source < 0, -1, sources[source]) if len(sources) else source,
        np.bincount(flat, minlength=routing.num_experts),
        np.bincount(flat[np.asarray(route.order)], minlength=routing.num_experts), route,
    )  # fmt: skip


def spread(route: Route, tokens: Array, weights: Array | None) -> tuple[Array, Array | None]:
    """Tokens ``[n, ...]`` and weights ``[n, k]`` by a way that is known, to rows and ``[rows]``; not as codes."""
    parts = [(_bytes(tokens), route.order // route.k)]
    if weights is not None:
        parts.append((_bytes(weights.reshape(-1)), route.order))
    buffer, columns = _side_by_side(parts)
    received, _ = _exchange(route.communicator, buffer, route.sends, route.recvs, False)()
    rows = _placed(_as_rows(received[:, columns[0]], tokens.dtype, tokens.shape[1:]), route.source)
    if weights is None:
        return rows, None
    return rows, _placed(_as_rows(received[:, columns[1]], weights.dtype, ()), route.source)


def collect(
    route: Route, rows: Array, weights: Array | None, payload: str | None = None, begins: bool = False
) -> Callable[[], tuple[Array, Array | None]]:
    """Rows to the sums ``[n, ...]`` over a token's choices in their order, weights ``[rows]`` to ``[n, k]``."""
    with guard(route.communicator, OPERATOR):
        back = places(route.source, sum(route.recvs))
        tail, dtype = rows.shape[1:], rows.dtype
        parts = [(encode(rows, payload), back)]
        if weights is not None:
            parts.append((_bytes(weights), back))
        buffer, columns = _side_by_side(parts)
    exchange = _exchange(route.communicator, buffer, route.recvs, route.sends, begins)

    def finish() -> tuple[Array, Array | None]:
        received, _ = exchange()
        position = positions(route.order, route.tokens, route.k)
        values = decode(received[:, columns[0]], payload, dtype, tail)
        total = _placed(values, position[:, 0])
        if route.k > 1:
            wide = total.astype(sum_dtype(dtype))
            for choice in range(1, route.k):
                wide += _placed(values, position[:, choice]).astype(wide.dtype)
            total = wide.astype(dtype)
        if weights is None:
            return total, None
        flat = _placed(_as_rows(received[:, columns[1]], weights.dtype, ()), position.reshape(-1))
        return total, flat.reshape(position.shape)

    return finish


def weighted(rows: Array, weights: Array | None) -> Array:
    """Each row times its weight, in float32 or the wider of the dtypes, rounded to that of the rows."""
    if weights is None:
        return rows
    wide = sum_dtype(rows.dtype, weights.dtype)
    each = weights.astype(wide).reshape(-1, *[1] * (rows.ndim - 1))
    product: Array = rows.astype(wide) * each
    return product.astype(rows.dtype)


def sum_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """What values of these dtypes are added and multiplied in: at least float32."""
    return np.result_type(np.float32, *dtypes)


def encode(rows: Array, payload: str | None) -> Array:
    """As bytes, a row for each: the values, or a scale and the codes."""
    if payload is None:
        return _bytes(rows)
    if core_name(rows.dtype) not in _FLOATS:
        raise InvalidTensorError(f"rows have dtype {rows.dtype}, expected one of {', '.join(_FLOATS)} for codes", 13)
    rows = np.ascontiguousarray(rows)
    bits, (count, length) = PAYLOADS[payload], (len(rows), _length(rows.shape[1:]))
    coded = memory.empty((count, _core.quantized_row_bytes(length, bits, max(length, 1))), np.uint8)
    about = bits, max(length, 1), core_name(rows.dtype)
    _core.quantize_rows(*about, rows.ctypes.data, count, length, coded.ctypes.data)
    return coded


def decode(coded: Array, payload: str | None, dtype: np.dtype[Any], tail: Sequence[int]) -> Array:
    """The rows ``[rows, *tail]`` again."""
    if payload is None:
        return _as_rows(coded, dtype, tail)
    coded, length = np.ascontiguousarray(coded), _length(tail)
    out = memory.empty((len(coded), *tail), dtype)
    about = PAYLOADS[payload], max(length, 1), core_name(dtype)
    _core.dequantize_rows(*about, coded.ctypes.data, len(coded), length, "saturate", out.ctypes.data)
    return out


def _length(tail: Sequence[int]) -> int:
    return int(np.prod(tail, dtype=np.int64))


def _bytes(rows: Array) -> Array:
    flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return flat.reshape(len(rows), _length(rows.shape[1:]) * rows.itemsize)


def _as_rows(rows: Array, dtype: np.dtype[Any], tail: Sequence[int]) -> Array:
    return np.ascontiguousarray(rows).reshape(-1).view(dtype).reshape(len(rows), *tail)


def _placed(rows: Array, source: Numbers) -> Array:
    """Row i of the result is row ``source[i]``, or zeros where that is -1."""
    if not len(rows):
        return np.zeros((len(source), *rows.shape[1:]), rows.dtype)
    result = rows[source]
    if source.min(initial=0) < 0:
        result[source < 0] = 0
    return result


def _side_by_side(parts: Sequence[tuple[Array, Numbers | None]]) -> tuple[Array, list[slice]]:
    """The rows ``part[index]`` of all parts in one buffer, and the columns of each."""
    columns, begin = [], 0
    for part, _ in parts:
        columns.append(slice(begin, begin + part.shape[1]))
        begin = -(-columns[-1].stop // 16) * 16  # so that columns can be viewed as any dtype
    first, index = parts[0]
    buffer = memory.empty((len(first) if index is None else len(index), max(begin, 16)), np.uint8)
    for (part, index), place in zip(parts, columns, strict=True):
        buffer[:, place] = part if index is None else part[index]
    return buffer, columns


def _exchange(
    comm: Communicator, buffer: Array, sends: list[int], recvs: list[int] | None, begins: bool
) -> Callable[[], tuple[Array, list[int]]]:
    """Rows of bytes to the ranks; what it returns gives those received and how many from each."""
    stride, place = buffer.shape[1], buffer.ctypes.data
    if recvs is None:
        send = scaled(sends, stride)
        plan = _core.Plan(comm.core, OPERATOR, "uint8", send, packed(send), [], [], 0, stride)

        def made(block: _core.Block, told: Sequence[int]) -> tuple[Array, list[int]]:
            rows = [count // stride for count in told]
            return memory.from_block(block, (sum(rows), stride), np.dtype(np.uint8)), rows

        if begins:
            learning = plan.submit_learning(place)
            return Handle(comm, learning.work, (buffer,), lambda: made(*learning.take())).result
        learnt = made(*plan.run_learning(place))
        return lambda: learnt
    received = memory.empty((sum(recvs), stride), np.uint8)
    plan = _core.Plan(comm.core, OPERATOR, "uint8", *split_layout(sends, recvs, stride), 0, stride)
    known = received, recvs
    if begins:
        work = plan.submit(place, received.ctypes.data)
        return Handle(comm, work, (buffer, received), lambda: known).result
    plan.run(place, received.ctypes.data)
    return lambda: known
