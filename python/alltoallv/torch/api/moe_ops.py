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
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alltoallv._calls.dispatching import OPERATOR
from alltoallv._calls.guard import guard
from alltoallv._calls.pieces import pieces
from alltoallv._calls.routing import Routing, check_again, check_outputs
from alltoallv.torch.api.rows import TensorMover
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


def begin_dispatch(
    tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: Routing, group: str, begins: bool
) -> Callable[[], list[Tensor]]:
    """Sends tokens ``[n, d]`` with choices and weights ``[n, k]``; the result returns `moe_dispatch`'s results."""
    comm = communicator_of(group, tokens)
    with guard(comm, OPERATOR):
        numbers, x = ids.detach().to("cpu", torch.int64).numpy(), as_input("tokens", tokens)
        about = f"{x.dtype} ({x.shape[1]},), gate_weights {None if weights is None else weights.dtype}"
        about = about.replace("torch.", "")
        mover = TensorMover(comm, x)
    arriving = mover.dispatch(routing, x, numbers, weights, about, begins)

    def finish() -> list[Tensor]:
        made = arriving()
        told, arrival = made.headers, made.arrival
        beside = [_nothing(x, x.dtype) if made.weights is None else made.weights]
        beside.append(_nothing(x, torch.float32) if made.scales is None else made.scales)
        ranks = torch.tensor(
            [made.sending.sends, told.pairs, told.tokens, told.choices], dtype=torch.int64, device="cpu"
        )
        way = *map(mover.on_device, (made.sending.order, arrival.source)), ranks, mover.on_device(made.token)
        return [made.rows, *beside, *way, torch.from_numpy(np.stack([arrival.counts, arrival.received]))]

    return finish


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
        tokens.new_empty((rows, tokens.shape[1]), dtype=getattr(torch, about.code_dtype or "", tokens.dtype)),
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
    sized_by_values=lambda args: True,
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
def moe_spread(tokens: Tensor, weights: Tensor | None, *about: Any) -> list[Tensor]:
    """Sends tokens ``[n, d]``, weights ``[n, k]`` along a way; returns rows ``[r, d]``, weights ``[r]`` or ``[0]``."""
    order, source, ranks, token, k, group = about
    comm = communicator_of(group, tokens)
    with guard(comm, OPERATOR):
        check_again(tokens.shape, None if weights is None else weights.shape, *ranks[2:, comm.rank].tolist())
        x, mover = as_input("tokens", tokens), TensorMover(comm, tokens)
        way = order.cpu().numpy(), source.cpu().numpy(), token.cpu().numpy(), ranks[0].tolist(), k
    rows, made = mover.spread(x, weights, *way)
    return [rows, _nothing(x, x.dtype) if made is None else made]


def begin_collect(
    rows: Tensor, weights: Tensor | None, *about: Any, begins: bool = False, whole: bool = False, beside: object = None
) -> Callable[[], list[Tensor]]:
    """Sends the rows back; the result returns `moe_collect`'s results. ``beside``: what else all ranks agree on."""
    order, source, ranks, token, gates, tokens, k, payload, group = about
    comm = communicator_of(group, rows)
    with guard(comm, OPERATOR):
        check_outputs(rows.shape, source.shape[0])
        x, column = as_input("rows", rows), None if weights is None else as_input("weights", weights)
        known = ranks if rows.is_cpu and not whole else ranks[:2]
        way = order.cpu().numpy(), source.cpu().numpy(), known.tolist(), token.cpu().numpy()
        made = pieces(*way, tokens, k, x.shape[1] * x.itemsize)
    arriving = TensorMover(comm, x, beside).collect(made, x, column, gates, payload or None, begins)

    def finish() -> list[Tensor]:
        total, flat = arriving()
        return [total, _nothing(x, x.dtype) if flat is None else flat]

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
def moe_collect(rows: Tensor, weights: Tensor | None, *about: Any) -> list[Tensor]:
    """Sends rows ``[r, d]``, weights ``[r]`` back; returns sums ``[n, d]`` over the choices, ``[n, k]`` or ``[0]``.

    ``gates`` ``[r]`` multiply the rows; neither they nor these rows have a gradient here.
    """
    return begin_collect(rows, weights, *about)()
