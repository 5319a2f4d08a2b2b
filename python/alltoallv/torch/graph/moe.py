"""Rows to the ranks of their experts and back: the operators under `alltoallv.torch.nn.MoEDispatcher`.

`moe_dispatch` finds a way, `moe_spread` goes along it and `moe_collect` back. A way is three tensors: ``order``, the
pair of every row sent (see `alltoallv._calls.routing`); ``source``, of every row of the experts which one of those
received it is, -1 for zeros; ``ranks``, int64 ``[2, W]`` on the CPU, rows for and from every rank. Collecting takes the
rows back and adds those of one token: each is the other's gradient, so derivatives of every order exist. Codes are
straight through: gradients travel as they are. What belongs to a row travels with it as bytes:
its values, its gate weight, its tag.
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
from alltoallv._calls.routing import Routing
from alltoallv.torch.api import rows as row_bytes
from alltoallv.torch.api.tensors import as_input
from alltoallv.torch.graph.library import Operator
from alltoallv.torch.graph.ops import carrier


def as_text(routing: Routing) -> str:
    """What a graph can hold."""
    return json.dumps(asdict(routing))


@lru_cache(maxsize=256)
def as_routing(text: str) -> Routing:
    """The inverse of `as_text`."""
    fields = json.loads(text)
    if fields["placement"] is not None:
        fields["placement"] = tuple(map(tuple, fields["placement"]))
    return Routing(**fields)


def begin_dispatch(
    tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: Routing, group: str, begins: bool
) -> Callable[[], list[Tensor]]:
    """Sends tokens ``[n, d]`` with choices and weights ``[n, k]``; what it returns gives `moe_dispatch`'s results."""
    comm = carrier(group, tokens)
    with guard(comm, OPERATOR):
        numbers = ids.detach().to("cpu", torch.int64).numpy()
        routing.check_ids(numbers)
        by_weight = (
            weights.detach().to("cpu", torch.float64).numpy() if _weighs(routing) and weights is not None else None
        )
        about = f"{tokens.dtype} {tokens.shape[1]} {None if weights is None else weights.dtype}"
        sending = routing.send(numbers, by_weight, comm.size, about)
        order = torch.from_numpy(sending.order).to(tokens.device)
        x, length = as_input("tokens", tokens), tokens.shape[1]
        tags = torch.from_numpy(sending.tags).to(tokens.device)
        parts: list[row_bytes.Part] = [
            (row_bytes.encode(x, routing.payload), order // ids.shape[1]),
            (row_bytes.as_bytes(tags), None),
        ]
        if weights is not None:
            parts.append((row_bytes.as_bytes(weights.reshape(-1, 1)), order))
        buffer, columns = row_bytes.side_by_side(parts)
    exchange = row_bytes.exchange(comm, buffer, sending.sends, None, begins)

    def finish() -> list[Tensor]:
        received, recvs = exchange()
        with guard(comm, OPERATOR):
            told = received[:, columns[1]].cpu().contiguous().view(torch.int32).numpy()
            arrival = routing.receive(told, recvs, comm.rank, sending.signature)
        source = torch.from_numpy(arrival.source).to(tokens.device)
        coded, scales = received[:, columns[0]], _nothing(x, torch.float32)
        if routing.codes:
            codes, scales = row_bytes.split_codes(coded, length)
            rows, scales = row_bytes.placed(codes, source), row_bytes.placed(scales, source).view(-1)
        else:
            rows = row_bytes.placed(row_bytes.decode(coded, routing.payload, length, x.dtype), source)
        made = _nothing(x, x.dtype)
        if weights is not None:
            made = row_bytes.placed(received[:, columns[2]].view(weights.dtype), source).view(-1)
        ranks = torch.tensor([sending.sends, recvs], dtype=torch.int64, device="cpu")
        experts = torch.from_numpy(np.stack([arrival.counts, arrival.received]))
        return [rows, made, scales, order, source, ranks, experts]

    return finish


def _weighs(routing: Routing) -> bool:
    return routing.capacity is not None and routing.drop == "lightest"


def _nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(0, dtype=dtype)


@partial(
    Operator, schema="(Tensor tokens, Tensor? weights, Tensor ids, str routing, str group) -> Tensor[]", followed=2
)
def moe_dispatch(tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: str, group: str) -> list[Tensor]:
    """Rows ``[r, d]``, their weights and scales, ``[r]`` or ``[0]``, the way, and rows of every local expert.

    Those are int64 ``[2, experts]`` on the CPU: with rows of zeros, and without.
    """
    return begin_dispatch(tokens, weights, ids, as_routing(routing), group, False)()


@moe_dispatch.fake
def _(tokens: Tensor, weights: Tensor | None, ids: Tensor, routing: str, group: str) -> list[Tensor]:
    about, comm, context = as_routing(routing), carrier(group, tokens), torch.library.get_ctx()
    rows = context.new_dynamic_size()
    all_go = about.capacity is None and about.placement is None
    sent = ids.shape[0] * ids.shape[1] if all_go else context.new_dynamic_size()
    local = len(about.placed(comm.size)[comm.rank])
    return [
        tokens.new_empty((rows, tokens.shape[1]), dtype=torch.int8 if about.codes else tokens.dtype),
        tokens.new_empty(0) if weights is None else weights.new_empty(rows),
        tokens.new_empty(rows if about.codes else 0, dtype=torch.float32),
        tokens.new_empty(sent, dtype=torch.int64),
        tokens.new_empty(rows, dtype=torch.int64),
        torch.empty((2, comm.size), dtype=torch.int64, device="cpu"),
        torch.empty((2, local), dtype=torch.int64, device="cpu"),
    ]


@partial(
    Operator,
    schema="(Tensor tokens, Tensor? weights, Tensor order, Tensor source, Tensor ranks, SymInt k, str group)"
    " -> Tensor[]",
    followed=2,
)
def moe_spread(
    tokens: Tensor, weights: Tensor | None, order: Tensor, source: Tensor, ranks: Tensor, k: int, group: str
) -> list[Tensor]:
    """Tokens ``[n, d]`` and weights ``[n, k]`` to rows ``[r, d]`` and ``[r]``, or ``[0]``, by a way that is known."""
    parts: list[row_bytes.Part] = [(row_bytes.as_bytes(as_input("tokens", tokens)), order // k)]
    if weights is not None:
        parts.append((row_bytes.as_bytes(as_input("weights", weights).view(-1, 1)), order))
    buffer, columns = row_bytes.side_by_side(parts)
    sends, recvs = ranks.tolist()
    received, _ = row_bytes.exchange(carrier(group, tokens), buffer, sends, recvs, False)()
    rows = row_bytes.placed(received[:, columns[0]].view(tokens.dtype), source)
    if weights is None:
        return [rows, _nothing(tokens, tokens.dtype)]
    return [rows, row_bytes.placed(received[:, columns[1]].view(weights.dtype), source).view(-1)]


@moe_spread.fake
def _(
    tokens: Tensor, weights: Tensor | None, order: Tensor, source: Tensor, ranks: Tensor, k: int, group: str
) -> list[Tensor]:
    rows = source.shape[0]
    return [
        tokens.new_empty((rows, tokens.shape[1])),
        tokens.new_empty(0) if weights is None else weights.new_empty(rows),
    ]


def begin_collect(
    rows: Tensor,
    weights: Tensor | None,
    order: Tensor,
    source: Tensor,
    ranks: Tensor,
    tokens: int,
    k: int,
    payload: str,
    group: str,
    *,
    begins: bool = False,
) -> Callable[[], list[Tensor]]:
    """Sends the rows back; what it returns gives `moe_collect`'s results."""
    comm = carrier(group, rows)
    with guard(comm, OPERATOR):
        sends, recvs = ranks.tolist()
        there = source if len(source) == sum(recvs) else source[source >= 0]
        places = torch.empty_like(there)
        places[there] = torch.arange(len(source), device=rows.device)[source >= 0]
        x = as_input("rows", rows)
        parts: list[row_bytes.Part] = [(row_bytes.encode(x, payload or None), places)]
        if weights is not None:
            parts.append((row_bytes.as_bytes(as_input("weights", weights).view(-1, 1)), places))
        buffer, columns = row_bytes.side_by_side(parts)
    exchange = row_bytes.exchange(comm, buffer, recvs, sends, begins)

    def finish() -> list[Tensor]:
        received, _ = exchange()
        position = torch.full((tokens * k,), -1, device=rows.device)
        position[order] = torch.arange(len(order), device=rows.device)
        by_token, complete = position.view(tokens, k), len(order) == tokens * k
        values = row_bytes.decode(received[:, columns[0]], payload or None, rows.shape[1], rows.dtype)
        total = row_bytes.placed(values, by_token[:, 0], complete)
        if k > 1:
            total = total.to(row_bytes.sum_dtype(rows.dtype))
            for choice in range(1, k):
                total += row_bytes.placed(values, by_token[:, choice], complete).to(total.dtype)
            total = total.to(rows.dtype)
        if weights is None:
            return [total, _nothing(rows, rows.dtype)]
        flat = row_bytes.placed(received[:, columns[1]].view(weights.dtype), position, complete)
        return [total, flat.view(tokens, k)]

    return finish


@partial(
    Operator,
    schema="(Tensor rows, Tensor? weights, Tensor order, Tensor source, Tensor ranks, SymInt tokens, SymInt k, "
    "str payload, str group) -> Tensor[]",
    followed=2,
)
def moe_collect(rows: Tensor, weights: Tensor | None, *way: Any) -> list[Tensor]:
    """Rows ``[r, d]`` to sums ``[n, d]`` over the k choices in order, weights ``[r]`` to ``[n, k]``, or ``[0]``."""
    return begin_collect(rows, weights, *way)()


@moe_collect.fake
def _(
    rows: Tensor, weights: Tensor | None, order: Tensor, source: Tensor, ranks: Tensor, tokens: int, k: int, *rest: str
) -> list[Tensor]:
    made = rows.new_empty(0) if weights is None else weights.new_empty((tokens, k))
    return [rows.new_empty((tokens, rows.shape[1])), made]


def _setup(ctx: Any, inputs: tuple[Any, ...], way: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(*way)
    ctx.wants = [x is not None and x.requires_grad for x in inputs[:2]]
    ctx.mark_non_differentiable(*output[2:], *(x for x, wants in zip(output, ctx.wants, strict=False) if not wants))
    ctx.group = inputs[-1]


def _setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _setup(ctx, inputs, output[3:6], output)
    ctx.tokens, ctx.k = inputs[2].shape


def _setup_spread(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _setup(ctx, inputs, inputs[2:5], output)
    ctx.tokens, ctx.k = inputs[0].shape[0], inputs[5]


def _setup_collect(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _setup(ctx, inputs, inputs[2:5], output)
    ctx.k = inputs[6]


def _back(ctx: Any, operator: Operator, grads: Sequence[Tensor], *rest: Any) -> tuple[Any, Any]:
    """Of what has a gradient; a part without one does not travel."""
    first, second = (grad if wants else None for grad, wants in zip(grads, ctx.wants, strict=False))
    made = operator(grads[0][:, :0] if first is None else first, second, *ctx.saved_tensors, *rest, ctx.group)
    return (None if first is None else made[0]), (None if second is None else made[1])


def _collect_back(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, Any]:
    return _back(ctx, moe_collect, grads, ctx.tokens, ctx.k, "")


moe_dispatch.differentiate(lambda ctx, grads: (*_collect_back(ctx, grads), None, None, None), _setup_dispatch)
moe_spread.differentiate(lambda ctx, grads: (*_collect_back(ctx, grads), *[None] * 5), _setup_spread)
moe_collect.differentiate(lambda ctx, grads: (*_back(ctx, moe_spread, grads, ctx.k), *[None] * 7), _setup_collect)
