"""The operators of torch.library: what autograd, torch.compile and effects see.

``layout`` is an int64 CPU tensor of shape ``[4, W]``: send_counts, sdispls, recv_counts, rdispls, in elements. As a
tensor it may change from call to call without a recompilation. An exchange is linear; `all_to_all_v_transpose` is its
transpose and each is the gradient of the other, so derivatives of every order exist:

* elements of the input that no region sends get gradient zero, those that several regions send get the sum,
  in the order of ranks;
* elements of the output that no region covers pass nothing back.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.counts import Layout, even_parts, overlap
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.torch.api import calls
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.calls import AnyCommunicator
from alltoallv.torch.api.group import Group
from alltoallv.torch.api.tensors import as_input, shaped
from alltoallv.torch.graph.library import Operator


def carrier(group: Group, tensor: Tensor) -> AnyCommunicator:
    """The communicator that a call gives or a graph names, for a tensor."""
    device = groups.device_of(tensor)
    found = groups.by_name(group, device) if isinstance(group, str) else groups.resolve(group, device)
    if found is None:
        raise InvalidParamError("group is one that this rank is not a member of, expected a group with this rank")
    return found


def _exchange(comm: AnyCommunicator, operator: str, input: Tensor, layout: Layout, numel_out: int, row: int) -> Tensor:
    """A checked exchange into a new flat tensor, whose gaps are zero."""
    with guard(comm, operator):
        x = as_input("input", input)
        needed = _core.check_exchange(x.numel(), numel_out, *layout, comm.size)
        if numel_out < 0:
            numel_out = needed
        out = calls.new_output(comm, numel_out, x)
        if sum(layout[2]) < numel_out:
            out.zero_()
        call = calls.exchange(comm, operator, out, x, layout, max(row, 1))
    call.run()
    return out


@Operator
def all_to_all_v(input: Tensor, layout: Tensor, numel_out: int, row: int, operator: str, group: str) -> Tensor:
    """Exchange into a new tensor of shape ``[numel_out]``; -1 sizes it by the layout."""
    comm = carrier(group, input)
    if (made := _plain_exchange(comm, operator, input, layout, numel_out, row)) is not None:
        return made
    return _exchange(comm, operator, input, cast(Layout, tuple(layout.tolist())), numel_out, row)


def _plain_exchange(comm: AnyCommunicator, *args: Any) -> Tensor | None:
    """In the core, of tensors that nobody has to look at before; None for others."""
    made: Tensor | None = None if comm.host_core is None else _core.exchange(comm.host_core, *args)
    return made


@all_to_all_v.fake
def _(input: Tensor, layout: Tensor, numel_out: int, row: int, operator: str, group: str) -> Tensor:
    if isinstance(numel_out, int) and numel_out < 0:
        numel_out = torch.library.get_ctx().new_dynamic_size()
    return input.new_empty((numel_out,))


@Operator
def all_to_all_v_transpose(grad: Tensor, layout: Tensor, numel_in: int, row: int, operator: str, group: str) -> Tensor:
    """From the gradient of the output to that of the input, of shape ``[numel_in]``."""
    comm = carrier(group, grad)
    if (made := _plain_exchange(comm, operator, grad, layout, numel_in, row, True)) is not None:
        return made
    sends, sdispls, recvs, rdispls = layout.tolist()
    if not overlap(sends, sdispls):
        return _exchange(comm, operator, grad, (recvs, rdispls, sends, sdispls), numel_in, row)
    packed = [sum(sends[:j]) for j in range(len(sends))]
    parts = _exchange(comm, operator, grad, (recvs, rdispls, sends, packed), -1, row)
    total = grad.new_zeros(numel_in)
    for count, begin, at in zip(sends, sdispls, packed, strict=True):
        total[begin : begin + count] += parts[at : at + count]
    return total


@all_to_all_v_transpose.fake
def _(grad: Tensor, layout: Tensor, numel_in: int, row: int, operator: str, group: str) -> Tensor:
    return grad.new_empty((numel_in,))


@Operator
def all_to_all_v_learn(input: Tensor, sends: Tensor, row: int, operator: str, group: str) -> list[Tensor]:
    """Exchange whose receive counts the peers tell. ``sends`` is ``[2, W]``; returns output and full layout.

    They are a list since Inductor (torch 2.13) does not find sizes that only the run tells in a tuple.
    """
    comm = carrier(group, input)
    with guard(comm, operator):
        x = as_input("input", input)
        counts, displs = sends.tolist()
        _core.check_send(x.numel(), counts, displs, comm.size)
        learning = calls.learn(comm, operator, x, counts, displs, max(row, 1))
    out, recv_counts = learning.run()
    packed = [sum(recv_counts[:j]) for j in range(comm.size)]
    layout = torch.tensor([counts, displs, recv_counts, packed], dtype=torch.int64, device="cpu")
    return [out, layout]


@all_to_all_v_learn.fake
def _(input: Tensor, sends: Tensor, row: int, operator: str, group: str) -> list[Tensor]:
    numel_out = torch.library.get_ctx().new_dynamic_size()
    return [input.new_empty((numel_out,)), sends.new_empty((4, sends.shape[1]))]


def _save(ctx: Any, layout: Tensor, numel: int, row: int, operator: str, group: str) -> None:
    ctx.save_for_backward(layout)
    ctx.numel, ctx.row, ctx.operator, ctx.group = numel, row, operator, group


def _setup_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, layout, _, row, operator, group = inputs
    _save(ctx, layout, x.numel(), row, operator, group)
    ctx.shape = x.shape


def _exchange_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (layout,) = ctx.saved_tensors
    back = all_to_all_v_transpose(grad, layout, ctx.numel, ctx.row, ctx.operator, ctx.group)
    return back.view(ctx.shape), None, None, None, None, None


def _setup_transpose(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, layout, _, row, operator, group = inputs
    _save(ctx, layout, grad.numel(), row, operator, group)
    ctx.shape = grad.shape


def _transpose_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (layout,) = ctx.saved_tensors
    forth = all_to_all_v(grad, layout, ctx.numel, ctx.row, ctx.operator, ctx.group)
    return forth.view(ctx.shape), None, None, None, None, None


def _setup_learn(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, _, row, operator, group = inputs
    _save(ctx, output[1], x.numel(), row, operator, group)
    ctx.shape = x.shape
    ctx.mark_non_differentiable(output[1])


def _learn_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (layout,) = ctx.saved_tensors
    back = all_to_all_v_transpose(grads[0], layout, ctx.numel, ctx.row, ctx.operator, ctx.group)
    return back.view(ctx.shape), None, None, None, None


all_to_all_v.differentiate(_exchange_backward, _setup_exchange)
all_to_all_v_transpose.differentiate(_transpose_backward, _setup_transpose)
all_to_all_v_learn.differentiate(_learn_backward, _setup_learn)


def _reduce(comm: AnyCommunicator, operator: str, input: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The sum of all ranks' inputs, or an equal part of it, in a new tensor."""
    if comm.host_core is not None and (made := _core.reduce(comm.host_core, operator, input, None, "sum")) is not None:
        return cast(Tensor, made)
    with guard(comm, operator):
        x = as_input("input", input)
        out = calls.new_output(comm, shape, x)
        n = out.numel()
        counts = even_parts(n, comm.size) if operator == "all_reduce" else [n] * comm.size
        call = calls.reduce(comm, operator, out, x, "sum", counts)
    call.run()
    return out


@Operator
def all_gather(input: Tensor, size: int, group: str) -> Tensor:
    """The inputs of all ``size`` ranks concatenated along dimension 0."""
    comm = carrier(group, input)
    out = None
    if comm.host_core is not None:
        out = _core.all_gather_into_tensor(comm.host_core, None, input, False, None)
    if out is None:
        n, operator = input.numel(), "all_gather_into_tensor"
        layout = _core.Request.all_gather(comm.size, [n]).layout
        out = _exchange(comm, operator, input, layout, n * comm.size, 1)
    return shaped(out, (size * input.shape[0], *input.shape[1:]))


@all_gather.fake
def _(input: Tensor, size: int, group: str) -> Tensor:
    return input.new_empty((size * input.shape[0], *input.shape[1:]))


@Operator
def reduce_scatter(input: Tensor, size: int, group: str) -> Tensor:
    """The sum of all ranks' inputs; rank j keeps the j-th of ``size`` equal parts of dimension 0."""
    return _reduce(carrier(group, input), "reduce_scatter", input, (input.shape[0] // size, *input.shape[1:]))


@reduce_scatter.fake
def _(input: Tensor, size: int, group: str) -> Tensor:
    return input.new_empty((input.shape[0] // size, *input.shape[1:]))


@Operator
def all_reduce(input: Tensor, group: str) -> Tensor:
    """The sum of all ranks' inputs, in the order of ranks; over NCCL in the engine's order."""
    return _reduce(carrier(group, input), "all_reduce", input, input.shape)


@all_reduce.fake
def _(input: Tensor, group: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


all_gather.differentiate(lambda ctx, grad: (reduce_scatter(grad, *ctx.rest), None, None), _keep)
reduce_scatter.differentiate(lambda ctx, grad: (all_gather(grad, *ctx.rest), None, None), _keep)
all_reduce.differentiate(lambda ctx, grad: (all_reduce(grad, *ctx.rest), None), _keep)
