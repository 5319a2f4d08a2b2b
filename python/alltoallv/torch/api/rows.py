"""Rows to the ranks of their experts and back: the two exchanges under `alltoallv.torch.nn.MoEDispatcher`.

`spread` is linear: row i of its result is a copy of one token. `collect` is its transpose: it takes the rows back and
adds those of one token. Each is the gradient of the other, so derivatives of every order exist. What belongs to a row
travels with it as bytes: its values, its gate weight, its tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from alltoallv._calls.counts import packed
from alltoallv.torch.api.calls import AnyCommunicator
from alltoallv.torch.api.tensors import as_input, empty
from alltoallv.torch.graph import ops


@dataclass(eq=False)
class Route:
    """Which row goes where. A pair is a token and one of its k choices: pair ``t * k + j``.

    The first `spread` learns the second half, from tags of shape ``[pairs, 2]`` whose column 0 is the local expert.
    """

    group: str
    communicator: AnyCommunicator  # kept alive with its name
    tokens: int
    k: int
    order: Tensor  # pair of every row sent, in the order of sending
    sends: list[int]  # rows for every rank
    recvs: list[int] | None = None
    tags: Tensor | None = None  # of the rows received
    by_expert: Tensor | None = None  # rows received, sorted by expert


def spread(
    tokens: Tensor | None, weights: Tensor | None, route: Route, tags: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Tokens ``[n, d]`` and weights ``[n, k]`` to rows ``[r, d]`` and ``[r]`` sorted by expert; differentiable."""
    return cast("tuple[Tensor, Tensor | None]", _Spread.apply(tokens, weights, route, tags))


def collect(rows: Tensor | None, weights: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
    """Rows ``[r, d]`` to sums ``[n, d]`` over the k choices in order, weights ``[r]`` to ``[n, k]``; differentiable."""
    return cast("tuple[Tensor, Tensor | None]", _Collect.apply(rows, weights, route))


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """What values of these dtypes are added and multiplied in: at least float32."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype if dtype.itemsize >= 4 else torch.float32)
    return wide


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor | None, weights: Tensor | None, route: Route, tags: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.route = route
        rows, row_weights = _spread(tokens, weights, route, tags)
        _mark(ctx, (rows, row_weights))
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override, unused-ignore]
        tokens, weights = _Collect.apply(*_needed(ctx, grads), ctx.route)
        return tokens, weights, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor | None, weights: Tensor | None, route: Route
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.route = route
        tokens, token_weights = _collect(rows, weights, route)
        _mark(ctx, (tokens, token_weights))
        return tokens, token_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override, unused-ignore]
        rows, weights = _Spread.apply(*_needed(ctx, grads), ctx.route, None)
        return rows, weights, None


def _mark(ctx: Any, outputs: tuple[Tensor | None, Tensor | None]) -> None:
    """An output is as differentiable as the input it comes from."""
    constant = [out for out, needs in zip(outputs, ctx.needs_input_grad, strict=False) if out is not None and not needs]
    ctx.mark_non_differentiable(*constant)


def _needed(ctx: Any, grads: Sequence[Tensor]) -> list[Tensor | None]:
    return [grad if needs else None for grad, needs in zip(grads, ctx.needs_input_grad, strict=False)]


def _spread(
    tokens: Tensor | None, weights: Tensor | None, route: Route, tags: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    parts = [tokens, None if weights is None else weights.reshape(-1, 1), tags]
    indices = [route.order // route.k, route.order, None]
    received, places = _exchange(parts, indices, route, route.sends, route.recvs)
    if tags is not None:
        route.tags = received[:, places[2]].view(torch.int32).clone()
        route.by_expert = torch.argsort(route.tags[:, 0], stable=True)
    by_expert = known(route.by_expert)
    rows = None if tokens is None else _select(received[:, places[0]], by_expert, tokens.dtype)
    if weights is None:
        return rows, None
    return rows, _select(received[:, places[1]], by_expert, weights.dtype).view(-1)


def _collect(rows: Tensor | None, weights: Tensor | None, route: Route) -> tuple[Tensor | None, Tensor | None]:
    arrived = _inverse(known(route.by_expert))
    parts = [rows, None if weights is None else weights.reshape(-1, 1)]
    received, places = _exchange(parts, [arrived, arrived], route, known(route.recvs), route.sends)
    position = _inverse(route.order).view(route.tokens, route.k)
    tokens: Tensor | None = None
    if rows is not None:
        values, wide = received[:, places[0]], sum_dtype(rows.dtype)
        tokens = _select(values, position[:, 0], rows.dtype)
        if route.k > 1:
            tokens = tokens.to(wide)
            for choice in range(1, route.k):
                tokens += _select(values, position[:, choice], rows.dtype).to(wide)
            tokens = tokens.to(rows.dtype)
    if weights is None:
        return tokens, None
    return tokens, _select(received[:, places[1]], position.reshape(-1), weights.dtype).view(route.tokens, route.k)


def _exchange(
    parts: Sequence[Tensor | None],
    indices: Sequence[Tensor | None],
    route: Route,
    sends: list[int],
    recvs: list[int] | None,
) -> tuple[Tensor, list[slice]]:
    """Sends the rows ``part[index]`` of all parts, side by side; returns bytes received, and each part's columns.

    Without ``recvs`` they are learnt.
    """
    sources = [None if part is None else _bytes(part) for part in parts]
    places, begin = [], 0
    for source in sources:
        end = begin + (0 if source is None else source.shape[1])
        places.append(slice(begin, end))
        begin = -(-end // 16) * 16  # so that columns can be viewed as any dtype
    stride = max(begin, 16)
    device = next(source.device for source in sources if source is not None)
    total = sum(sends)
    shape = (total, stride)
    buffer = empty(shape, torch.uint8) if device.type == "cpu" else torch.empty(shape, dtype=torch.uint8, device=device)
    for source, index, place in zip(sources, indices, places, strict=True):
        if source is not None and index is not None:
            torch.index_select(source, 0, index, out=buffer[:, place])
        elif source is not None:
            buffer[:, place] = source
    flat = buffer.view(-1)
    if recvs is None:
        layout = torch.tensor([sends, packed(sends)], device="cpu") * stride
        received, full = ops.all_to_all_v_learn(flat, layout, stride, "all_to_all_v", route.group)
        route.recvs = [count // stride for count in full[2].tolist()]
    else:
        layout = torch.tensor([sends, packed(sends), recvs, packed(recvs)], device="cpu") * stride
        received = ops.all_to_all_v(flat, layout, sum(recvs) * stride, stride, "all_to_all_v", route.group)
    return received.view(-1, stride), places


def _bytes(part: Tensor) -> Tensor:
    """The rows of a matrix as rows of bytes."""
    rows, columns = part.shape
    flat = as_input("rows", part).as_strided((part.numel(),), (1,))  # one or no element may have any stride
    return flat.view(torch.uint8).view(rows, columns * part.itemsize)


def _select(values: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes as rows of a dtype."""
    return torch.index_select(values, 0, index).view(dtype)


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse


def known(value: Any) -> Any:
    """What the first exchange has found out."""
    assert value is not None, "the route has not been travelled yet"
    return value
