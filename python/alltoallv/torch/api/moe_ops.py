"""The operators under `alltoallv.torch.nn.MoEDispatcher`: rows go to the ranks of their experts and back.

`moe_dispatch` finds a way, `moe_spread` goes along it and `moe_collect` back. A way is four tensors: ``order``, the
pairs in the order in which they go (see op_host/moe/routing.h); ``source``, for every row of the experts the index of
the pair that came, -1 for zeros; ``ranks``, int64 ``[4, W]`` on the CPU, pairs for and from every rank, its
tokens and choices of each; ``token``, every pair's number of its token on the rank it came from. Collecting takes the
rows back and adds the rows of one token: each is the other's gradient, so derivatives of every order exist. Codes are
straight through: gradients travel as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.dispatching import OPERATOR, Route, added
from alltoallv._calls.dispatching import begin_dispatch as begin_in_core
from alltoallv._calls.experts import Routing, check_coded, group_of
from alltoallv._calls.guard import guard
from alltoallv.quantization.spec import Quantization
from alltoallv.torch.eager import calls
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.tensors import as_input, core_name
from alltoallv.torch.graph.ops import Operator, communicator_of, known_size
from alltoallv.torch.quantized.adapter import ADAPTER
from alltoallv.torch.quantized.ops import DeviceRows

# Moves tokens that lie on a device to their experts and back; in host memory the core does it all.


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


_WAY = ("order", "source", "ranks", "token")


class _Tensors(type(ADAPTER)):  # type: ignore[misc]
    direct = True  # calls are made where nobody records or watches what is done with tensors, or the core finds it


TENSORS = _Tensors()  # by which the core reads tensors in host memory


def as_text(routing: Routing) -> str:
    """Returns a routing as a text that a graph can hold."""
    return json.dumps(asdict(routing))


@lru_cache(maxsize=256)
def as_routing(text: str) -> Routing:
    """Returns the routing of a text that `as_text` made."""
    fields = json.loads(text)
    if fields["placement"] is not None:
        fields["placement"] = tuple(map(tuple, fields["placement"]))
    if fields["active_ranks"] is not None:
        fields["active_ranks"] = tuple(fields["active_ranks"])
    return Routing(**fields)


def begin_dispatch(
    tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: Routing, group: Any, begins: bool
) -> Callable[[], list[Tensor]]:
    """Sends tokens ``[n, d]`` with choices and weights ``[n, k]``; the result returns `moe_dispatch`'s results."""
    comm: Any = communicator_of(group, tokens) if isinstance(group, str) else group
    if not tokens.is_cpu:
        arriving = dispatch(comm, routing, tokens, weights, ids, begins)
        return lambda: [_or_nothing(each, tokens) for each in arriving()]
    likes, wide = None, torch.float32
    if routing.codes:
        likes = [torch.empty(0, dtype=each, device="cpu") for each in (getattr(torch, str(routing.code_dtype)), wide)]
    arguments = tokens, ids.cpu(), None if weights is None else weights.cpu()
    in_core = begin_in_core(TENSORS, comm, routing, *arguments, _wide, likes, begins)

    def finish() -> list[Tensor]:
        rows, *others, order, source, ranks, token, experts = in_core()
        route = map(torch.from_numpy, (order, source, ranks, token, experts))
        of_rows, scales = others
        of_rows = tokens.new_empty(0) if of_rows is None else of_rows
        return [rows, of_rows, tokens.new_empty(0, dtype=wide) if scales is None else scales, *route]

    return finish


def _wide(weights: Tensor) -> Any:
    return weights.detach().double().numpy()


def _or_nothing(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _back(call: Any, grads: Sequence[Any], route: Sequence[Tensor], n: int, k: int) -> Any:
    return _gradients(moe_collect(*_traveling(grads), *route, None, n, k, "", call.group), grads)


def _forth(call: Any, grads: Sequence[Any], *route: Tensor) -> Any:
    return _gradients(moe_spread(*_traveling(grads), *route, call.k, call.group), grads)


def _traveling(grads: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of rows and weights as they travel; a tensor without a gradient does not travel."""
    first, second = grads
    return second.new_empty((second.shape[0], 0)) if first is None else first, second


def _gradients(results: Sequence[Tensor], grads: Sequence[Any]) -> Any:
    return tuple(None if grad is None else each for each, grad in zip(results, grads, strict=True))


def _as_given(rows: Tensor, weights: Tensor | None, length: int, *shape: int) -> list[Tensor]:
    """Returns the fake of ``length`` rows, and of weights of a shape."""
    fake_weights = rows.new_empty(0) if weights is None else weights.new_empty(shape)
    return [rows.new_empty((length, rows.shape[1])), fake_weights]


def _dispatched(
    tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: str, active_ranks: Tensor | None, group: str
) -> list[Tensor]:
    """Returns the fake of a dispatch."""
    checked, comm, rows = as_routing(routing), communicator_of(group, tokens), known_size(-1)
    drop_some = checked.capacity, checked.placement, checked.active_ranks, active_ranks
    all_go = all(each is None for each in drop_some)
    sent = ids.shape[0] * ids.shape[1] if all_go else known_size(-1)
    local = len(checked.placed(comm.size)[comm.rank])
    return [
        tokens.new_empty((rows, tokens.shape[1]), dtype=getattr(torch, checked.code_dtype or "", tokens.dtype)),
        tokens.new_empty(0) if weights is None else weights.new_empty(rows),
        tokens.new_empty(rows if checked.codes else 0, dtype=torch.float32),
        tokens.new_empty(sent, dtype=torch.int64),
        tokens.new_empty(rows, dtype=torch.int64),
        torch.empty((4, comm.size), dtype=torch.int64, device="cpu"),
        tokens.new_empty(rows if checked.alignment == 1 else known_size(-1), dtype=torch.int64),
        torch.empty((2, local), dtype=torch.int64, device="cpu"),
    ]


@partial(
    Operator,
    schema="(Tensor tokens, Tensor? weights, Tensor ids, str routing, Tensor? active_ranks, str group) -> Tensor[]",
    followed=2,
    fake=_dispatched,
    gradient=lambda call, grads, *route: _back(call, grads, route, *call.ids.shape),
    saves=(3, 4, 5, 6),
    sized_by_values=lambda args: True,
)
def moe_dispatch(
    tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: str, active_ranks: Tensor | None, group: str
) -> list[Tensor]:
    """Returns rows ``[r, d]``, their weights and scales, ``[r]`` or ``[0]``, the way, and rows of every local expert.

    The last are int64 ``[2, experts]`` on the CPU: with rows of zeros, and without. ``active_ranks``: the
    routing's, if they are read as a graph runs.
    """
    comm: Any = communicator_of(group, tokens) if isinstance(group, str) else group
    options = as_routing(routing)
    if active_ranks is not None:
        with guard(comm, OPERATOR):
            options = options.serving(active_ranks)
    return begin_dispatch(tokens, weights, ids, options, comm, False)()


@partial(
    Operator,
    schema="(Tensor tokens, Tensor? weights, Tensor order, Tensor source, Tensor ranks, Tensor token, SymInt k, "
    "str group) -> Tensor[]",
    followed=2,
    fake=lambda tokens, weights, order, source, *others: _as_given(tokens, weights, source.shape[0], source.shape[0]),
    gradient=lambda call, grads, *route: _back(call, grads, route, call.tokens.shape[0], call.k),
    saves=_WAY,
)
def moe_spread(tokens: Tensor, weights: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Sends tokens ``[n, d]``, weights ``[n, k]`` along a way; returns rows ``[r, d]``, weights ``[r]`` or ``[0]``."""
    *route, _, group = arguments
    comm: Any = communicator_of(group, tokens) if isinstance(group, str) else group
    if tokens.is_cpu:
        rows, of_rows = _core.moe_spread(TENSORS, comm.core, tokens, weights, route)
    else:
        rows, of_rows = spread(comm, tokens, weights, cast("Route", route))
    return [rows, _or_nothing(of_rows, tokens)]


def begin_collect(
    rows: Tensor, weights: Tensor | None, *arguments: Any, begins: bool = False, single: bool = False, agreed: str = ""
) -> Callable[[], list[Tensor]]:
    """Sends the rows back; the result returns `moe_collect`'s results. ``agreed``: what else all ranks agree on."""
    *route, gates, tokens, k, payload, group = arguments
    comm: Any = communicator_of(group, rows) if isinstance(group, str) else group
    if not rows.is_cpu:
        arriving = collect(comm, rows, weights, cast("Route", route), tokens, k, payload, begins)
        return lambda: [_or_nothing(each, rows) for each in arriving()]
    terms = rows, weights, gates, route, tokens, k, payload, single, agreed, begins
    call = _core.moe_collect(TENSORS, comm.core, *terms)

    def finish() -> list[Tensor]:
        total, flat, sums = call.finish() if begins else call
        if not sums:
            total = added(total, sum_dtype(total.dtype), Tensor.to)
        return [total, rows.new_empty(0) if flat is None else flat]

    return finish


@partial(
    Operator,
    schema="(Tensor rows, Tensor? weights, Tensor order, Tensor source, Tensor ranks, Tensor token, Tensor? gates, "
    "SymInt tokens, SymInt k, str payload, str group) -> Tensor[]",
    followed=2,
    fake=lambda rows, weights, order, source, ranks, token, gates, n, k, *others: _as_given(rows, weights, n, n, k),
    gradient=_forth,
    saves=_WAY,
)
def moe_collect(rows: Tensor, weights: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Sends rows ``[r, d]``, weights ``[r]`` back; returns sums ``[n, d]`` over the choices, ``[n, k]`` or ``[0]``.

    ``gates`` ``[r]`` multiply the rows; neither they nor these rows have a gradient here.
    """
    return begin_collect(rows, weights, *arguments)()
