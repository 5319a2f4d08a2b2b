"""The operators under `alltoallv.torch.nn.MoEDispatcher`: rows go to the ranks of their experts and back.

`moe_dispatch` finds a way, `moe_spread` goes along it and `moe_collect` back. A way is four tensors: ``order``, the
pairs in the order in which they go (see `alltoallv._calls.routing`); ``source``, for every row of the experts the
index of the pair that came, -1 for zeros; ``ranks``, int64 ``[4, W]`` on the CPU, pairs for and from every rank, its
tokens and choices of each; ``token``, every pair's number of its token on the rank it came from. Tokens travel once to
every rank, behind headers (see `alltoallv._calls.headers`). Collecting takes the rows back and adds those of one token:
each is the other's gradient, so derivatives of every order exist. Codes are straight through: gradients travel as they
are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alltoallv._calls import headers
from alltoallv._calls.dispatching import OPERATOR
from alltoallv._calls.guard import guard
from alltoallv._calls.pieces import Piece, arrivals, follow, pieces
from alltoallv._calls.routing import Numbers, Routing
from alltoallv.torch.api import rows as row_bytes
from alltoallv.torch.eager.calls import AnyCommunicator
from alltoallv.torch.eager.tensors import as_input
from alltoallv.torch.graph.library import Operator, known
from alltoallv.torch.graph.ops import communicator_of

_WAY = ("order", "source", "ranks", "token")


def as_text(routing: Routing) -> str:
    """Returns a routing as a text that a graph can hold."""
    return json.dumps(asdict(routing))


@lru_cache(maxsize=256)
def as_routing(text: str) -> Routing:
    """Returns the routing of a text that `as_text` made."""
    fields = json.loads(text)
    if fields["placement"] is not None:
        fields["placement"] = tuple(map(tuple, fields["placement"]))
    return Routing(**fields)


class _Going(NamedTuple):
    """Holds tokens under way as rows of bytes, each once to every rank that has an expert of it."""

    comm: AnyCommunicator
    rows: Tensor
    which: list[Numbers]
    signature: int
    widths: list[int]  # of the columns of the headers
    stride: int
    apart: bool
    exchange: Callable[[], tuple[Tensor, list[int]]]

    def parse(self) -> headers.Headers:
        """Returns what the headers say that arrive."""
        received, recvs = self.exchange()

        def fetch(which: Numbers) -> headers.Bytes:
            rows: headers.Bytes = received[torch.from_numpy(which).to(received.device)].cpu().numpy()
            return rows

        with guard(self.comm, OPERATOR):
            return headers.decode(fetch, recvs, self.widths, self.signature, self.comm.rank)

    def arrivals(
        self, parsed: headers.Headers, token: Numbers, source: Numbers
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yields what `alltoallv._calls.pieces.arrivals` says."""
        about = token, source, self.comm.rank, self.which, self.stride, self.apart
        for received, index, where in arrivals(self.exchange()[0], parsed, *about, self._begin):
            device = received.device
            placed = None if where is None else torch.from_numpy(where).to(device)
            yield received[:, : self.rows.shape[1]], torch.from_numpy(index).to(device), placed

    def _begin(self, which: list[Numbers], recvs: list[int]) -> Callable[[], Tensor]:
        with guard(self.comm, OPERATOR):
            buffer, sends = row_bytes.behind_headers(self.rows, [_no_rows(self.stride)] * len(which), which)
        exchange = row_bytes.exchange(self.comm, buffer, sends, recvs, True)
        return lambda: exchange()[0]


def _no_rows(stride: int) -> headers.Bytes:
    return np.zeros((0, stride), np.uint8)


def _send(
    comm: AnyCommunicator,
    rows: Tensor,
    pairs: tuple[Numbers, list[int], int],
    columns: list[headers.Bytes],
    signature: int,
    begins: bool,
) -> _Going:
    """Sends tokens as rows of bytes; ``pairs``: their order, how many go to every rank, choices of each token."""
    order, sends, k = pairs
    apart = rows.is_cpu and comm.backend == "tcp"
    with guard(comm, OPERATOR):
        stride, which = headers.row_bytes(rows.shape[1]), headers.distinct(order // k, sends)
        made = headers.encode(columns, sends, (signature, len(rows), k), stride)
        now = [these[:0] for these in which] if follow(apart, len(rows), stride) else which
        buffer, counts = row_bytes.behind_headers(rows, made, now)
    exchange = cache(row_bytes.exchange(comm, buffer, counts, None, begins))
    return _Going(comm, rows, which, signature, [column.shape[1] for column in columns], stride, apart, exchange)


def _of_pairs(weights: Tensor, order: Numbers) -> headers.Bytes:
    """Returns the weights as a column of the notes."""
    column: headers.Bytes = row_bytes.as_bytes(weights.reshape(-1, 1)).cpu().numpy()[order]
    return column


def _weights(column: headers.Bytes, source: Tensor, like: Tensor) -> Tensor:
    """Returns the weight of every row of the experts."""
    weights = torch.from_numpy(column.reshape(-1)).view(like.dtype).view(-1, 1).to(like.device)
    return row_bytes.placed(weights, source, False).view(-1)


def begin_dispatch(
    tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: Routing, group: str, begins: bool
) -> Callable[[], list[Tensor]]:
    """Sends tokens ``[n, d]`` with choices and weights ``[n, k]``; the result returns `moe_dispatch`'s results."""
    comm = communicator_of(group, tokens)
    with guard(comm, OPERATOR):
        numbers = ids.detach().to("cpu", torch.int64).numpy()
        routing.check_ids(numbers)
        by_weight = (
            weights.detach().to("cpu", torch.float64).numpy() if _weighs(routing) and weights is not None else None
        )
        about = f"{tokens.dtype} {tokens.shape[1]} {None if weights is None else weights.dtype}"
        sending = routing.send(numbers, by_weight, comm.size, about)
        x, length, device = as_input("tokens", tokens), tokens.shape[1], tokens.device
        columns = [sending.tags.view(np.uint8)]
        if weights is not None:
            columns.append(_of_pairs(weights, sending.order))
        coded = row_bytes.encode(x, routing.payload)
    pairs = sending.order, sending.sends, ids.shape[1]
    going = _send(comm, coded, pairs, columns, sending.signature, begins)

    def finish() -> list[Tensor]:
        parsed = going.parse()
        experts, token = parsed.columns[0].view(np.int32).astype(np.int64).T
        arrival = routing.receive(experts, comm.size, comm.rank)
        source, count = torch.from_numpy(arrival.source).to(device), len(arrival.source)
        rows = row_bytes.room(x, (count, length), torch.int8 if routing.codes else x.dtype)
        scales = row_bytes.room(x, (count if routing.codes else 0, 1), torch.float32)
        for values, index, where in going.arrivals(parsed, token, arrival.source):
            if routing.codes:
                codes, each = row_bytes.split_codes(values, length)
                row_bytes.gather(each, index, scales, where)
                row_bytes.gather(codes, index, rows, where)
            else:
                row_bytes.decode_placed(values, routing.payload, index, rows, where)
        made = _nothing(x, x.dtype) if weights is None else _weights(parsed.columns[1], source, weights)
        ranks = torch.tensor(
            [sending.sends, parsed.pairs, parsed.tokens, parsed.choices], dtype=torch.int64, device="cpu"
        )
        way = torch.from_numpy(sending.order).to(device), source, ranks, torch.from_numpy(token.copy()).to(device)
        return [rows, made, scales.view(-1), *way, torch.from_numpy(np.stack([arrival.counts, arrival.received]))]

    return finish


def _weighs(routing: Routing) -> bool:
    return routing.capacity is not None and routing.drop == "lightest"


def _nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(0, dtype=dtype)


def _back(call: Any, grads: Sequence[Any], way: Sequence[Tensor], n: int, k: int) -> Any:
    return _gradients(moe_collect(*_traveling(grads), *way, None, n, k, "", call.group), grads)


def _forth(call: Any, grads: Sequence[Any], *way: Tensor) -> Any:
    return _gradients(moe_spread(*_traveling(grads), *way, call.k, call.group), grads)


def _traveling(grads: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of rows and weights as they travel; a tensor without a gradient does not travel."""
    first, second = grads
    return second.new_empty((second.shape[0], 0)) if first is None else first, second


def _gradients(made: Sequence[Tensor], grads: Sequence[Any]) -> Any:
    return tuple(None if grad is None else each for each, grad in zip(made, grads, strict=True))


def _as_given(rows: Tensor, weights: Tensor | None, length: int, *shape: int) -> list[Tensor]:
    """Returns the fake of ``length`` rows, and of weights of a shape."""
    made = rows.new_empty(0) if weights is None else weights.new_empty(shape)
    return [rows.new_empty((length, rows.shape[1])), made]


def _dispatched(tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: str, group: str) -> list[Tensor]:
    """Returns the fake of a dispatch."""
    about, comm, rows = as_routing(routing), communicator_of(group, tokens), known(-1)
    all_go = about.capacity is None and about.placement is None
    sent = ids.shape[0] * ids.shape[1] if all_go else known(-1)
    local = len(about.placed(comm.size)[comm.rank])
    return [
        tokens.new_empty((rows, tokens.shape[1]), dtype=torch.int8 if about.codes else tokens.dtype),
        tokens.new_empty(0) if weights is None else weights.new_empty(rows),
        tokens.new_empty(rows if about.codes else 0, dtype=torch.float32),
        tokens.new_empty(sent, dtype=torch.int64),
        tokens.new_empty(rows, dtype=torch.int64),
        torch.empty((4, comm.size), dtype=torch.int64, device="cpu"),
        tokens.new_empty(rows if about.alignment == 1 else known(-1), dtype=torch.int64),
        torch.empty((2, local), dtype=torch.int64, device="cpu"),
    ]


@partial(
    Operator,
    schema="(Tensor tokens, Tensor? weights, Tensor ids, str routing, str group) -> Tensor[]",
    followed=2,
    fake=_dispatched,
    gradient=lambda call, grads, *way: _back(call, grads, way, *call.ids.shape),
    saves=(3, 4, 5, 6),
)
def moe_dispatch(tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: str, group: str) -> list[Tensor]:
    """Returns rows ``[r, d]``, their weights and scales, ``[r]`` or ``[0]``, the way, and rows of every local expert.

    The last are int64 ``[2, experts]`` on the CPU: with rows of zeros, and without.
    """
    return begin_dispatch(tokens, weights, ids, as_routing(routing), group, False)()


@partial(
    Operator,
    schema="(Tensor tokens, Tensor? weights, Tensor order, Tensor source, Tensor ranks, Tensor token, SymInt k, "
    "str group) -> Tensor[]",
    followed=2,
    fake=lambda tokens, weights, order, source, *given: _as_given(tokens, weights, source.shape[0], source.shape[0]),
    gradient=lambda call, grads, *way: _back(call, grads, way, call.tokens.shape[0], call.k),
    saves=_WAY,
)
def moe_spread(
    tokens: Tensor,
    weights: Tensor | None,
    order: Tensor,
    source: Tensor,
    ranks: Tensor,
    token: Tensor,
    k: int,
    group: str,
) -> list[Tensor]:
    """Sends tokens ``[n, d]``, weights ``[n, k]`` along a way; returns rows ``[r, d]``, weights ``[r]`` or ``[0]``."""
    comm = communicator_of(group, tokens)
    with guard(comm, OPERATOR):
        x, pairs = row_bytes.as_bytes(as_input("tokens", tokens)), order.cpu().numpy()
        columns = [] if weights is None else [_of_pairs(weights, pairs)]
    width = sum(column.shape[1] for column in columns)
    going = _send(comm, x, (pairs, ranks[0].tolist(), k), columns, width, False)
    parsed, rows = going.parse(), row_bytes.room(tokens, (len(source), tokens.shape[1]), tokens.dtype)
    for values, index, where in going.arrivals(parsed, token.cpu().numpy(), source.cpu().numpy()):
        row_bytes.gather(values, index, row_bytes.as_bytes(rows), where)
    return [rows, _nothing(tokens, tokens.dtype) if weights is None else _weights(parsed.columns[0], source, weights)]


def begin_collect(
    rows: Tensor,
    weights: Tensor | None,
    order: Tensor,
    source: Tensor,
    ranks: Tensor,
    token: Tensor,
    gates: Tensor | None,
    tokens: int,
    k: int,
    payload: str,
    group: str,
    *,
    begins: bool = False,
) -> Callable[[], list[Tensor]]:
    """Sends the rows back; the result returns `moe_collect`'s results."""
    comm, coded = communicator_of(group, rows), payload or None
    with guard(comm, OPERATOR):
        x, complete = as_input("rows", rows), len(order) == tokens * k
        beside = None if weights is None else row_bytes.as_bytes(as_input("weights", weights).view(-1, 1))
        sent = ranks if rows.is_cpu else ranks[:2]
        known = order.cpu().numpy(), source.cpu().numpy(), sent.tolist(), token.cpu().numpy()
        way = pieces(*known, tokens, k, x.shape[1] * x.itemsize)

    def send(piece: Piece) -> Callable[[], tuple[Tensor, Tensor | None]]:
        with guard(comm, OPERATOR):
            which = torch.from_numpy(piece.rows).to(rows.device)
            parts: list[row_bytes.Part] = [(row_bytes.encode_weighed(x, which, gates, coded), None)]
            if beside is not None:
                parts.append((beside, which))
            buffer, columns = row_bytes.side_by_side(parts)
        exchange = row_bytes.exchange(comm, buffer, piece.sends, piece.recvs, begins)

        def received() -> tuple[Tensor, Tensor | None]:
            came, _ = exchange()
            return came[:, columns[0]], None if weights is None else came[:, columns[1]].view(weights.dtype)

        return received

    sent = [send(piece) for piece in way] if begins else None

    def finish() -> list[Tensor]:
        total = row_bytes.room(x, (tokens, x.shape[1]), x.dtype)
        flat = _nothing(x, x.dtype) if weights is None else weights.new_empty((tokens, k))
        for number, piece in enumerate(way):
            values, others = sent[number]() if sent else send(piece)()
            places = torch.from_numpy(piece.places).to(rows.device)
            row_bytes.add_decoded(values, coded, places, complete, total[piece.tokens])
            if others is not None:
                flat[piece.tokens] = row_bytes.placed(others, places.view(-1), complete).view(-1, k)
        return [total, flat]

    return finish


@partial(
    Operator,
    schema="(Tensor rows, Tensor? weights, Tensor order, Tensor source, Tensor ranks, Tensor token, Tensor? gates, "
    "SymInt tokens, SymInt k, str payload, str group) -> Tensor[]",
    followed=2,
    fake=lambda rows, weights, order, source, ranks, token, gates, n, k, *given: _as_given(rows, weights, n, n, k),
    gradient=_forth,
    saves=_WAY,
)
def moe_collect(rows: Tensor, weights: Tensor | None, *way: Any) -> list[Tensor]:
    """Sends rows ``[r, d]``, weights ``[r]`` back; returns sums ``[n, d]`` over the choices, ``[n, k]`` or ``[0]``.

    ``gates`` ``[r]`` multiply the rows; neither they nor these rows have a gradient here.
    """
    return begin_collect(rows, weights, *way)()
