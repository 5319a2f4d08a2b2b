"""Moves rows to their experts and back over host memory, as `alltoallv._calls.routing` says.

The dispatchers of NumPy and MindSpore use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alltoallv import _core, memory
from alltoallv._calls import headers
from alltoallv._calls.counts import packed, scaled, split_layout
from alltoallv._calls.dispatching import OPERATOR, DispatchState
from alltoallv._calls.guard import guard
from alltoallv._calls.handle import Handle
from alltoallv._calls.headers import Headers
from alltoallv._calls.pieces import Piece, arrivals, follow, pieces
from alltoallv._calls.routing import PAYLOADS, Numbers, Routing
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.errors import InvalidTensorError

Array = npt.NDArray[Any]
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(eq=False)
class Route:
    """Says which row goes where. `spread` sends rows along it and `collect` brings them back."""

    communicator: Communicator
    tokens: int
    k: int
    order: Numbers
    source: Numbers
    ranks: list[list[int]]
    token: Numbers


class Arrived(NamedTuple):
    """Holds what has arrived: rows ``[rows, ...]`` and weights ``[rows]``, or codes and their scales."""

    rows: Array
    weights: Array | None
    state: DispatchState[Array]


def dispatch(
    comm: Communicator, routing: Routing, tokens: Array, ids: Numbers, weights: Array | None, begins: bool
) -> Callable[[], Arrived]:
    """Sends tokens ``[n, ...]`` with choices and weights ``[n, k]`` to their experts; the result receives rows."""
    with guard(comm, OPERATOR):
        routing.check_ids(ids)
        about = f"{tokens.dtype} {tokens.shape[1:]} {None if weights is None else weights.dtype}"
        sending = routing.send(ids, weights, comm.size, about)
        order, tail, k = sending.order, tokens.shape[1:], ids.shape[1]
        columns = [_bytes(sending.tags)]
        if weights is not None:
            columns.append(_bytes(weights.reshape(-1))[order])
        coded = encode(tokens, routing.payload)
    going = _send(comm, coded, order, sending.sends, k, columns, sending.signature, begins)

    def finish() -> Arrived:
        parsed = going.parse()
        experts, token = parsed.columns[0].view(np.int32).astype(np.int64).T
        arrival = routing.receive(experts, comm.size, comm.rank)
        ranks = [sending.sends, parsed.pairs, parsed.tokens, parsed.choices]
        route = Route(comm, len(ids), k, order, arrival.source, ranks, token)
        state, count = state_of(route, arrival, routing, ids), len(arrival.source)
        made = None if weights is None else _weights(parsed.columns[1], weights, route)
        rows = memory.empty((count, *tail), np.dtype(np.int8) if routing.codes else tokens.dtype)
        if routing.codes:
            state.scales = np.empty(count, np.float32)
        for values, index, where in going.arrivals(parsed, route):
            if state.scales is None:
                decode(values[:, : coded.shape[1]], routing.payload, index, rows, where)
            else:
                _gather(_as_rows(values[:, :4], np.dtype(np.float32), ()), index, state.scales, where)
                _gather(_as_rows(values[:, 4 : 4 + _length(tail)], rows.dtype, tail), index, rows, where)
        return Arrived(rows, made, state)

    return finish


class _Going(NamedTuple):
    """Holds tokens under way as rows of bytes, each once to every rank that has an expert of it."""

    comm: Communicator
    rows: Array
    which: list[Numbers]
    signature: int
    widths: list[int]  # of the columns of the headers
    stride: int
    exchange: Callable[[], tuple[Array, list[int]]]

    def parse(self) -> Headers:
        """Returns what the headers say that arrive."""
        received, recvs = self.exchange()
        with guard(self.comm, OPERATOR):
            return headers.decode(received.__getitem__, recvs, self.widths, self.signature, self.comm.rank)

    def arrivals(self, parsed: Headers, route: Route) -> Iterator[tuple[Array, Numbers, Numbers | None]]:
        """Yields what `alltoallv._calls.pieces.arrivals` says."""
        about = route.token, route.source, self.comm.rank, self.which, self.stride, self.comm.backend == "tcp"
        return arrivals(self.exchange()[0], parsed, *about, self._begin)

    def _begin(self, which: list[Numbers], recvs: list[int]) -> Callable[[], Array]:
        with guard(self.comm, OPERATOR):
            buffer = memory.empty((sum(map(len, which)), self.stride), np.uint8)
            _gather(self.rows, np.concatenate(which), buffer[:, : self.rows.shape[1]])
        exchange = _exchange(self.comm, buffer, [*map(len, which)], recvs, True)
        return lambda: exchange()[0]


def _send(
    comm: Communicator,
    rows: Array,
    order: Numbers,
    sends: list[int],
    k: int,
    columns: list[Array],
    signature: int,
    begins: bool,
) -> _Going:
    """Sends tokens as rows of bytes, with headers of their pairs or behind them."""
    with guard(comm, OPERATOR):
        stride, width = headers.row_bytes(rows.shape[1]), rows.shape[1]
        made = headers.encode(columns, sends, (signature, len(rows), k), stride)
        which = headers.distinct(order // k, sends)
        now = [these[:0] for these in which] if follow(comm.backend == "tcp", len(rows), stride) else which
        counts = [len(header) + len(these) for header, these in zip(made, now, strict=True)]
        buffer = memory.empty((sum(counts), stride), np.uint8)
        for part, header, these in zip(np.split(buffer, packed(counts)[1:]), made, now, strict=True):
            part[: len(header)] = header
            _gather(rows, these, part[len(header) :, :width])
    exchange = _exchange(comm, buffer, counts, None, begins)
    return _Going(comm, rows, which, signature, [column.shape[1] for column in columns], stride, cache(exchange))


def _weights(column: Array, like: Array, route: Route) -> Array:
    """Returns the gate weight of every row of the experts."""
    return _placed(_as_rows(column, like.dtype, ()), route.source)


def state_of(route: Any, arrival: Any, routing: Routing, ids: Numbers) -> DispatchState[Any]:
    """Returns the state without its weights; its arrays are NumPy's."""
    counts, source = arrival.counts, arrival.source
    recvs = route.ranks[1]
    sources = np.repeat(np.arange(len(recvs)), recvs)
    flat = ids.reshape(-1)
    return DispatchState(
        counts.tolist(), arrival.received.tolist(), None, np.repeat(np.arange(len(counts)), counts),
        np.where(source < 0, -1, sources[source]) if len(sources) else source,
        np.bincount(flat, minlength=routing.num_experts),
        np.bincount(flat[np.asarray(route.order)], minlength=routing.num_experts), route,
    )  # fmt: skip


def spread(route: Route, tokens: Array, weights: Array | None) -> tuple[Array, Array | None]:
    """Sends tokens ``[n, ...]`` and weights ``[n, k]`` along a known route; returns rows and weights ``[rows]``.

    The rows travel as values, never as codes.
    """
    columns = [] if weights is None else [_bytes(weights.reshape(-1))[route.order]]
    width = sum(column.shape[1] for column in columns)
    rows = _bytes(tokens)
    going = _send(route.communicator, rows, route.order, route.ranks[0], route.k, columns, width, False)
    parsed, out = going.parse(), memory.empty((len(route.source), *tokens.shape[1:]), tokens.dtype)
    for values, index, where in going.arrivals(parsed, route):
        decode(values[:, : rows.shape[1]], None, index, out, where)
    return out, None if weights is None else _weights(parsed.columns[0], weights, route)


def collect(
    route: Route,
    rows: Array,
    weights: Array | None,
    payload: str | None = None,
    begins: bool = False,
    gates: Array | None = None,
) -> Callable[[], tuple[Array, Array | None]]:
    """Brings rows back and sums them over each token's choices, in their order: ``[n, ...]``.

    Weights ``[rows]`` come back as ``[n, k]``. ``gates`` ``[rows]`` multiply the rows before they travel.
    """
    comm, tail, dtype = route.communicator, rows.shape[1:], rows.dtype
    with guard(comm, OPERATOR):
        row = _length(tail) * rows.itemsize
        way = pieces(route.order, route.source, route.ranks, route.token, route.tokens, route.k, row)

    def send(piece: Piece) -> Callable[[], tuple[Array, Array | None]]:
        with guard(comm, OPERATOR):
            parts = [encode(rows, payload, piece.rows, gates)]
            if weights is not None:
                parts.append(_bytes(weights[piece.rows]))
            buffer, columns = _side_by_side(parts)
        exchange = _exchange(comm, buffer, piece.sends, piece.recvs, begins)

        def received() -> tuple[Array, Array | None]:
            came, _ = exchange()
            return came[:, columns[0]], None if weights is None else _as_rows(came[:, columns[1]], weights.dtype, ())

        return received

    sent = [send(piece) for piece in way] if begins else None

    def finish() -> tuple[Array, Array | None]:
        total = memory.empty((route.tokens, *tail), dtype)
        flat = None if weights is None else np.empty((route.tokens, route.k), weights.dtype)
        for number, piece in enumerate(way):
            values, others = sent[number]() if sent else send(piece)()
            _sum(values, payload, piece.places, total[piece.tokens])
            if flat is not None and others is not None:
                flat[piece.tokens] = _placed(others, piece.places.reshape(-1)).reshape(-1, route.k)
        return total, flat

    return finish


def _sum(coded: Array, payload: str | None, places: Numbers, out: Array) -> None:
    """Sets row t of ``out`` to the sum of rows ``places[t]``, in float32 or wider, rounded once; -1 adds zeros."""
    length = _length(out.shape[1:])
    if payload is not None:
        chosen = coded.ctypes.data, coded.strides[0], places.ctypes.data, places.shape[1], len(places)
        _core.sum_quantized_rows(*_format(payload, length, out.dtype), *chosen, length, out.ctypes.data)
        return
    rows = _as_rows(coded, out.dtype, out.shape[1:])
    known = _core.dtypes.get(name := core_name(rows.dtype))
    if known and known.arithmetic != "none":
        about = rows.strides[0], places.ctypes.data, places.shape[1], len(places), length
        _core.sum_rows(name, out.ctypes.data, rows.ctypes.data, *about)
        return
    wide = sum_dtype(rows.dtype)  # of float8 and long doubles
    total, *others = (_placed(rows, np.ascontiguousarray(choice)).astype(wide) for choice in places.T)
    for each in others:
        total += each
    out[...] = total.astype(out.dtype)


def _weighed(rows: Array, source: Numbers, weights: Array | None) -> Array:
    """Returns `weighted` of the rows ``source``."""
    if weights is None:
        return _placed(rows, source)
    name, wide = core_name(rows.dtype), sum_dtype(rows.dtype, weights.dtype)
    if name not in _FLOATS or wide != np.float32:
        return weighted(rows[source], weights[source])
    out, each = memory.empty((len(source), *rows.shape[1:]), rows.dtype), weights[source].astype(np.float32)
    about = source.ctypes.data, each.ctypes.data, len(source), _length(rows.shape[1:])
    _core.weigh_rows(name, out.ctypes.data, rows.ctypes.data, *about)
    return out


def weighted(rows: Array, weights: Array | None) -> Array:
    """Multiplies each row by its weight in float32 or the wider dtype; the product has the dtype of the rows."""
    if weights is None:
        return rows
    wide = sum_dtype(rows.dtype, weights.dtype)
    each = weights.astype(wide).reshape(-1, *[1] * (rows.ndim - 1))
    product: Array = rows.astype(wide, copy=False) * each
    return product.astype(rows.dtype, copy=False)


def sum_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which values of these dtypes are added and multiplied: at least float32."""
    return np.result_type(np.float32, *dtypes)


def encode(rows: Array, payload: str | None, source: Numbers | None = None, gates: Array | None = None) -> Array:
    """Returns one row of bytes per row, or per row ``source`` times its gate: the values, or a scale and the codes."""
    name, length = core_name(rows.dtype), _length(rows.shape[1:])
    if payload is None or (gates is not None and sum_dtype(rows.dtype, gates.dtype) != np.float32):
        rows, source, gates = rows if source is None else _weighed(rows, source, gates), None, None
    if payload is None:
        return _bytes(rows)
    if name not in _FLOATS:
        raise InvalidTensorError(f"rows have dtype {rows.dtype}, expected one of {', '.join(_FLOATS)} for codes", 13)
    rows, about = np.ascontiguousarray(rows), _format(payload, length, rows.dtype)
    each = None if gates is None else gates[source].astype(np.float32)
    count = len(rows) if source is None else len(source)
    coded = memory.empty((count, _core.quantized_row_bytes(length, *about[:2])), np.uint8)
    chosen = [0 if these is None else these.ctypes.data for these in (source, each)]
    _core.quantize_rows(*about, rows.ctypes.data, count, length, coded.ctypes.data, *chosen)
    return coded


def decode(coded: Array, payload: str | None, index: Numbers, out: Array, where: Numbers | None) -> None:
    """Sets row ``where[i]`` of ``out``, row i without ``where``, to what `encode` made row ``index[i]`` of.

    -1 stands for zeros.
    """
    if payload is None:
        return _gather(coded, index, out, where)
    length = _length(out.shape[1:])
    place = out.ctypes.data, coded.strides[0], index.ctypes.data, 0 if where is None else where.ctypes.data
    about = _format(payload, length, out.dtype)
    _core.dequantize_rows(*about, coded.ctypes.data, len(index), length, "saturate", *place)


def _format(payload: str, length: int, dtype: np.dtype[Any]) -> tuple[int, int, str]:
    return PAYLOADS[payload], max(length, 1), core_name(dtype)


def _length(tail: Sequence[int]) -> int:
    return int(np.prod(tail, dtype=np.int64))


def _bytes(rows: Array) -> Array:
    flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return flat.reshape(len(rows), _length(rows.shape[1:]) * rows.itemsize)


def _as_rows(rows: Array, dtype: np.dtype[Any], tail: Sequence[int]) -> Array:
    return np.ascontiguousarray(rows).reshape(-1).view(dtype).reshape(len(rows), *tail)


def _placed(rows: Array, source: Numbers) -> Array:
    """Returns an array whose row i is row ``source[i]``, or zeros where that is -1."""
    result = memory.empty((len(source), *rows.shape[1:]), rows.dtype)
    _gather(rows, source, result)
    return result


def _gather(rows: Array, source: Numbers, out: Array, where: Numbers | None = None) -> None:
    size = _length(rows.shape[1:]) * rows.itemsize
    about = rows.ctypes.data, rows.strides[0], source.ctypes.data, len(source), size
    _core.gather_rows(out.ctypes.data, out.strides[0], *about, 0 if where is None else where.ctypes.data)


def _side_by_side(parts: Sequence[Array]) -> tuple[Array, list[slice]]:
    """Copies the rows of all parts into one buffer; returns it with the columns of each part."""
    columns, begin = [], 0
    for part in parts:
        columns.append(slice(begin, begin + part.shape[1]))
        begin += headers.row_bytes(part.shape[1])
    if len(parts) == 1 and parts[0].shape[1] == begin:
        return parts[0], columns
    buffer = memory.empty((len(parts[0]), begin), np.uint8)
    for part, place in zip(parts, columns, strict=True):
        buffer[:, place] = part
    return buffer, columns


def _exchange(
    comm: Communicator, buffer: Array, sends: list[int], recvs: list[int] | None, begins: bool
) -> Callable[[], tuple[Array, list[int]]]:
    """Sends rows of bytes to the ranks; the result returns those received and how many came from each rank."""
    stride, place = buffer.shape[1], buffer.ctypes.data
    if recvs is None:
        send = scaled(sends, stride)
        plan = _core.Plan(comm.core, OPERATOR, "uint8", send, packed(send), [], [], 0, stride)

        def made(block: _core.Block, received: Sequence[int]) -> tuple[Array, list[int]]:
            rows = [count // stride for count in received]
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
