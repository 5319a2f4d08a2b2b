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
from alltoallv._calls.guard import guard
from alltoallv._calls.routing import Routing
from alltoallv.torch.api import rows as on_device
from alltoallv.torch.api.rows import sum_dtype
from alltoallv.torch.graph.library import Operator, known_size
from alltoallv.torch.graph.ops import communicator_of
from alltoallv.torch.quantized.adapter import ADAPTER

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
        arriving = on_device.dispatch(comm, routing, tokens, weights, ids, begins)
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
        rows, of_rows = on_device.spread(comm, tokens, weights, cast("Route", route))
    return [rows, _or_nothing(of_rows, tokens)]


def begin_collect(
    rows: Tensor, weights: Tensor | None, *arguments: Any, begins: bool = False, single: bool = False, agreed: str = ""
) -> Callable[[], list[Tensor]]:
    """Sends the rows back; the result returns `moe_collect`'s results. ``agreed``: what else all ranks agree on."""
    *route, gates, tokens, k, payload, group = arguments
    comm: Any = communicator_of(group, rows) if isinstance(group, str) else group
    if not rows.is_cpu:
        arriving = on_device.collect(comm, rows, weights, cast("Route", route), tokens, k, payload, begins)
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
