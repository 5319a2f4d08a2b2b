"""Moves tokens that lie on a device to their experts and back, for `moe_ops`; in host memory the core does it all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.dispatching import OPERATOR, Route
from alltoallv._calls.guard import guard
from alltoallv._calls.routing import Routing, check_coded, group_of
from alltoallv.quantization.spec import Quantization
from alltoallv.torch.eager import calls
from alltoallv.torch.eager.calls import AnyCommunicator
from alltoallv.torch.eager.tensors import as_input, core_name
from alltoallv.torch.quantized.rows import DeviceRows

Received = Callable[[], tuple[Tensor, list[int]]]  # waits for rows of bytes; returns them, and how many of each rank


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of these dtypes are added and multiplied: at least float32."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype if dtype.itemsize >= 4 else torch.float32)
    return wide


def dispatch(
    comm: AnyCommunicator, routing: Routing, tokens: Tensor, weights: Tensor | None, ids: Tensor, begins: bool
) -> Callable[[], list[Tensor | None]]:
    """Sends tokens ``[n, d]`` with choices and weights ``[n, k]``; the result returns `moe_dispatch`'s results."""
    with guard(comm, OPERATOR):
        x, options = as_input("tokens", tokens), routing.core(comm.size)
        shapes = x.shape, ids.shape, None if weights is None else weights.shape
        n, k = _core.moe_check_shapes(*shapes)
        heavy = weights.detach().cpu().double().numpy() if weights is not None and routing.uses_weights else None
        rows = as_bytes(x) if routing.payload is None else _codes(x, routing.payload)
        text = f"{tuple(x.shape[1:])} {None if weights is None else weights.dtype} {routing}"
        terms, numbers = _core.moe_terms(core_name(x.dtype), x.shape[1], text), ids.detach().cpu().contiguous().numpy()
        packed = _core.moe_pack(options, numbers, None, heavy, _column(weights), n, k, rows.shape[1], terms)
        order, sends, *layout = packed
        going = _send(comm, rows, layout, terms, begins)

    def finish() -> list[Tensor | None]:
        came, recvs = going()
        width = None if weights is None else weights.itemsize
        stride, fetch = came.shape[1], _fetch(came)
        with guard(comm, OPERATOR):
            unpacked = _core.moe_unpack(options, fetch, recvs, width, stride, terms, comm.rank)
        source, token, *of_ranks, experts, column, index = unpacked
        values, scales = came[:, : rows.shape[1]], None
        if routing.code_dtype is not None:
            scales = _chosen(values[:, :4], index, torch.float32).reshape(-1)
            values = values[:, 16 : 16 + x.shape[1]]
        elif routing.payload is not None:
            values = as_bytes(_decoded(values, routing.payload, x))
        out = _chosen(values, index, x.dtype if routing.code_dtype is None else getattr(torch, routing.code_dtype))
        ranks = torch.tensor([sends, *of_ranks], dtype=torch.int64, device="cpu")
        route = *(_there(x, each) for each in (order, source)), ranks, _there(x, token)
        return [out, _weights(x, column, weights, source), scales, *route, torch.from_numpy(experts)]

    return finish


def spread(comm: AnyCommunicator, tokens: Tensor, weights: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
    """Sends tokens ``[n, d]`` and weights ``[n, k]`` along a known way; returns rows and weights ``[rows]``."""
    order, source, token = (route[i].cpu().numpy() for i in (0, 1, 3))
    with guard(comm, OPERATOR):
        n, k = route[2][2:, comm.rank].tolist()
        _core.moe_check_again(tokens.shape, None if weights is None else weights.shape, n, k)
        x = as_input("tokens", tokens)
        rows = as_bytes(x)
        text = str(None if weights is None else weights.dtype)
        terms = _core.moe_terms(core_name(x.dtype), x.shape[1], text)
        sends = route[2][0].tolist()
        packed = _core.moe_pack(None, order, sends, None, _column(weights), n, k, rows.shape[1], terms)
        going = _send(comm, rows, packed[2:], terms, False)
    came, recvs = going()
    width = None if weights is None else weights.itemsize
    with guard(comm, OPERATOR):
        unpacked = _core.moe_unpack(None, _fetch(came), recvs, width, came.shape[1], terms, comm.rank, source, token)
    *_, column, index = unpacked
    return _chosen(came[:, : rows.shape[1]], index, x.dtype), _weights(x, column, weights, source)


def collect(
    comm: AnyCommunicator,
    rows: Tensor,
    weights: Tensor | None,
    route: Route,
    n: int,
    k: int,
    payload: str,
    begins: bool,
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """Brings rows ``[r, d]`` back; the result returns sums ``[n, d]`` over each token's choices, weights ``[n, k]``."""
    order, source, ranks, _ = route
    with guard(comm, OPERATOR):
        _core.moe_check_outputs(rows.shape, source.shape[0])
        x = as_input("rows", rows)
        sends, recvs = ranks[1].tolist(), ranks[0].tolist()
        there = source.new_empty(sum(sends))
        filled = (source >= 0).nonzero().reshape(-1)
        there[source[filled]] = filled
        parts = [as_bytes(x) if payload == "" else _codes(x, payload)]
        if weights is not None:
            parts.append(as_bytes(as_input("weights", weights).reshape(-1, 1)))
        buffer, columns = side_by_side([(part, there) for part in parts])
        text = f"{payload} {None if weights is None else weights.dtype}"
        going = exchange(comm, buffer, sends, recvs, _core.moe_terms(core_name(x.dtype), x.shape[1], text), begins)
        places = order.new_full((n * k,), -1)
        places[order] = torch.arange(len(order), device=order.device)

    def finish() -> tuple[Tensor, Tensor | None]:
        came = going()[0]
        values = came[:, columns[0]]
        values = values if payload == "" else as_bytes(_decoded(values, payload, x))
        first, *others = places.reshape(n, k).t()
        total = _chosen(values, first, x.dtype)
        if others:
            total = total.to(sum_dtype(x.dtype))
            for each in others:
                total += _chosen(values, each, x.dtype).to(total.dtype)
        of_tokens = None if weights is None else _chosen(came[:, columns[1]], places, weights.dtype).reshape(n, k)
        return total.to(x.dtype), of_tokens

    return finish


def side_by_side(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, list[slice]]:
    """Copies rows of bytes, or chosen ones, of all parts into one buffer; returns it with the parts' columns."""
    columns, begin = [], 0
    for part, _ in parts:
        columns.append(slice(begin, begin + part.shape[1]))
        begin += max(-(-part.shape[1] // 16) * 16, 16)
    first, index = parts[0]
    rows = len(first if index is None else index)
    buffer = torch.empty((rows, begin), dtype=torch.uint8, device=first.device)
    for (part, index), span in zip(parts, columns, strict=True):
        buffer[:, span] = part if index is None else part[index]
    return buffer, columns


def exchange(
    comm: AnyCommunicator, buffer: Tensor, sends: list[int], recvs: list[int] | None, terms: int, begins: bool
) -> Received:
    """Sends rows of bytes to ranks with equal terms; without ``recvs``, learns them. ``begins``: in background."""
    stride = buffer.shape[1]

    def exchanged(output: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        return output.view(-1, stride), [count // stride for count in counts]

    call = calls.exchange_rows(comm, OPERATOR, buffer, sends, recvs, terms)
    if begins:
        return call.submit(exchanged).result
    received = exchanged(*call.run())
    return lambda: received


def as_bytes(rows: Tensor) -> Tensor:
    """Returns rows as contiguous rows of bytes."""
    return _viewed(as_input("rows", rows), torch.uint8)


def _viewed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    flat = rows.as_strided((rows.numel(),), (1,))  # one or no element may have any stride
    return flat.view(dtype).view(len(rows), rows.shape[1] * rows.itemsize // dtype.itemsize)


def _send(comm: AnyCommunicator, rows: Tensor, layout: Sequence[Any], terms: int, begins: bool) -> Received:
    """Sends headers and the tokens behind them, as `_core.moe_pack` laid them out."""
    counts, header, header_at, token, token_at = layout
    buffer = torch.empty((sum(counts), header.shape[1]), dtype=torch.uint8, device=rows.device)
    buffer[_there(rows, header_at)] = _there(rows, header)
    buffer[_there(rows, token_at), : rows.shape[1]] = rows[_there(rows, token)]
    return exchange(comm, buffer, list(counts), None, terms, begins)


def _fetch(came: Tensor) -> Callable[[Any], Any]:
    return lambda which: came[_there(came, which)].cpu().numpy()


def _there(like: Tensor, numbers: Any) -> Tensor:
    return torch.from_numpy(numbers).to(like.device)


def _chosen(rows: Tensor, index: Any, dtype: torch.dtype) -> Tensor:
    """Returns a matrix whose row i is row ``index[i]`` of rows of bytes, or zeros where that is -1."""
    which = index if isinstance(index, Tensor) else _there(rows, index)
    if not len(rows):
        matrix = rows.new_zeros((len(which), rows.shape[1]))
    else:
        matrix = rows[which.clamp(min=0)]
        matrix[which < 0] = 0
    return _viewed(matrix.contiguous(), dtype)


def _column(weights: Tensor | None) -> Any:
    """Returns the weights of all pairs as rows of bytes in host memory."""
    return None if weights is None else as_bytes(weights.reshape(-1, 1)).cpu().numpy()


def _weights(like: Tensor, column: Any, weights: Tensor | None, source: Any) -> Tensor | None:
    """Returns the weight of every row of the experts."""
    return None if weights is None else _chosen(_there(like, column), source, weights.dtype).reshape(-1)


def _codec(payload: str, rows: Tensor) -> DeviceRows:
    return DeviceRows(Quantization(payload, group_of(payload, rows.shape[1])), rows.shape[1], rows.device)


def _codes(x: Tensor, payload: str) -> Tensor:
    check_coded(core_name(x.dtype), x.dtype)
    codec = _codec(payload, x)
    out = torch.empty((len(x), codec.stride), dtype=torch.uint8, device=x.device)
    codec.encode(x, out)
    return out


def _decoded(coded: Tensor, payload: str, like: Tensor) -> Tensor:
    out = torch.empty((len(coded), like.shape[1]), dtype=like.dtype, device=like.device)
    _codec(payload, out).decode(coded.contiguous(), out, "saturate")
    return out
