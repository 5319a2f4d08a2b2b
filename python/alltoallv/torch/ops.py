"""The operators of torch.library: what autograd, torch.compile and effects see.

``layout`` is an int64 CPU tensor of shape ``[4, W]``: send_counts, sdispls, recv_counts, rdispls, in elements. As a
tensor it may change from call to call without a recompilation. An exchange is linear; `all_to_all_v_transpose` is its
transpose and each is the gradient of the other, so derivatives of every order exist:

* elements of the input that no region sends get gradient zero, those that several regions send get the sum,
  in the order of ranks;
* elements of the output that no region covers pass nothing back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv.counts import Layout, even_parts, gather_layout, overlap
from alltoallv.guard import guard
from alltoallv.torch import calls, inductor
from alltoallv.torch import group as groups
from alltoallv.torch.calls import AnyCommunicator
from alltoallv.torch.tensors import as_input


def carrier(group: str, tensor: Tensor) -> AnyCommunicator:
    """The communicator that a graph names, for a tensor."""
    return groups.by_name(group, groups.device_of(tensor))


def _exchange(comm: AnyCommunicator, operator: str, x: Tensor, layout: Layout, numel_out: int, row: int) -> Tensor:
    """A checked exchange into a new flat tensor; gaps are zero."""
    with guard(comm, operator):
        x = as_input("input", x)
        needed = _core.check_exchange(x.numel(), numel_out, *layout, comm.size)
        if numel_out < 0:
            numel_out = needed
        out = calls.new_output(comm, numel_out, x)
        if sum(layout[2]) < numel_out:
            out.zero_()
        call = calls.exchange(comm, operator, out, x, layout, max(row, 1))
    call.run()
    return out


def fake(operator: Any) -> Callable[[Callable[..., Any]], Any]:
    """Registers a fake implementation. Its first call, when a graph first has the operator, tells Inductor of it."""

    def register(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def fake(*args: Any) -> Any:
            inductor.teach(operator._opoverload)
            return function(*args)

        return operator.register_fake(fake)

    return register


@torch.library.custom_op("alltoallv::all_to_all_v", mutates_args=())
def all_to_all_v(input: Tensor, layout: Tensor, numel_out: int, row: int, operator: str, group: str) -> Tensor:
    """Exchange into a new tensor of shape ``[numel_out]``; -1 sizes it by the layout."""
    return _exchange(carrier(group, input), operator, input, cast(Layout, tuple(layout.tolist())), numel_out, row)


@fake(all_to_all_v)
def _(input: Tensor, layout: Tensor, numel_out: int, row: int, operator: str, group: str) -> Tensor:
    if isinstance(numel_out, int) and numel_out < 0:
        numel_out = torch.library.get_ctx().new_dynamic_size()
    return input.new_empty((numel_out,))


@torch.library.custom_op("alltoallv::all_to_all_v_transpose", mutates_args=())
def all_to_all_v_transpose(grad: Tensor, layout: Tensor, numel_in: int, row: int, operator: str, group: str) -> Tensor:
    """From the gradient of the output to that of the input, of shape ``[numel_in]``."""
    comm = carrier(group, grad)
    sends, sdispls, recvs, rdispls = layout.tolist()
    if not overlap(sends, sdispls):
        return _exchange(comm, operator, grad, (recvs, rdispls, sends, sdispls), numel_in, row)
    packed = [sum(sends[:j]) for j in range(len(sends))]
    parts = _exchange(comm, operator, grad, (recvs, rdispls, sends, packed), -1, row)
    total = grad.new_zeros(numel_in)
    for count, begin, at in zip(sends, sdispls, packed, strict=True):
        total[begin : begin + count] += parts[at : at + count]
    return total


@fake(all_to_all_v_transpose)
def _(grad: Tensor, layout: Tensor, numel_in: int, row: int, operator: str, group: str) -> Tensor:
    return grad.new_empty((numel_in,))


@torch.library.custom_op("alltoallv::all_to_all_v_learn", mutates_args=())
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
    layout = torch.tensor([counts, displs, recv_counts, packed], dtype=torch.int64)
    return [out, layout]


@fake(all_to_all_v_learn)
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
    back = torch.ops.alltoallv.all_to_all_v_transpose(grad, layout, ctx.numel, ctx.row, ctx.operator, ctx.group)
    return back.view(ctx.shape), None, None, None, None, None


def _setup_transpose(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, layout, _, row, operator, group = inputs
    _save(ctx, layout, grad.numel(), row, operator, group)
    ctx.shape = grad.shape


def _transpose_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (layout,) = ctx.saved_tensors
    forth = torch.ops.alltoallv.all_to_all_v(grad, layout, ctx.numel, ctx.row, ctx.operator, ctx.group)
    return forth.view(ctx.shape), None, None, None, None, None


def _setup_learn(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, _, row, operator, group = inputs
    _save(ctx, output[1], x.numel(), row, operator, group)
    ctx.shape = x.shape
    ctx.mark_non_differentiable(output[1])


def _learn_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (layout,) = ctx.saved_tensors
    back = torch.ops.alltoallv.all_to_all_v_transpose(grads[0], layout, ctx.numel, ctx.row, ctx.operator, ctx.group)
    return back.view(ctx.shape), None, None, None, None


all_to_all_v.register_autograd(_exchange_backward, setup_context=_setup_exchange)
all_to_all_v_transpose.register_autograd(_transpose_backward, setup_context=_setup_transpose)
all_to_all_v_learn.register_autograd(_learn_backward, setup_context=_setup_learn)


@torch.library.custom_op("alltoallv::all_gather", mutates_args=())
def all_gather(input: Tensor, size: int, group: str) -> Tensor:
    """The inputs of all ``size`` ranks concatenated along dimension 0."""
    comm = carrier(group, input)
    n = input.numel()
    out = _exchange(comm, "all_gather_into_tensor", input, gather_layout(comm.size, n), n * comm.size, 1)
    return out.view(size * input.shape[0], *input.shape[1:])


@fake(all_gather)
def _(input: Tensor, size: int, group: str) -> Tensor:
    return input.new_empty((size * input.shape[0], *input.shape[1:]))


@torch.library.custom_op("alltoallv::reduce_scatter", mutates_args=())
def reduce_scatter(input: Tensor, size: int, group: str) -> Tensor:
    """The sum of all ranks' inputs; rank j keeps the j-th of ``size`` equal parts of dimension 0."""
    comm = carrier(group, input)
    with guard(comm, "reduce_scatter"):
        x = as_input("input", input)
        out = calls.new_output(comm, (x.shape[0] // size, *x.shape[1:]), x)
        counts = [out.numel()] * comm.size
    calls.reduce(comm, "reduce_scatter", out, x, "sum", counts)
    return out


@fake(reduce_scatter)
def _(input: Tensor, size: int, group: str) -> Tensor:
    return input.new_empty((input.shape[0] // size, *input.shape[1:]))


@torch.library.custom_op("alltoallv::all_reduce", mutates_args=())
def all_reduce(input: Tensor, group: str) -> Tensor:
    """The sum of all ranks' inputs, in the order of ranks; over NCCL in the engine's order."""
    comm = carrier(group, input)
    with guard(comm, "all_reduce"):
        x = as_input("input", input)
        out = calls.new_output(comm, x.shape, x)
        counts = even_parts(x.numel(), comm.size)
    calls.reduce(comm, "all_reduce", out, x, "sum", counts)
    return out


@fake(all_reduce)
def _(input: Tensor, group: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


all_gather.register_autograd(
    lambda ctx, grad: (torch.ops.alltoallv.reduce_scatter(grad, *ctx.rest), None, None), setup_context=_keep
)
reduce_scatter.register_autograd(
    lambda ctx, grad: (torch.ops.alltoallv.all_gather(grad, *ctx.rest), None, None), setup_context=_keep
)
all_reduce.register_autograd(
    lambda ctx, grad: (torch.ops.alltoallv.all_reduce(grad, *ctx.rest), None), setup_context=_keep
)

# Every rank must issue the same collectives in the same order: a compiler may neither drop nor reorder them.
for _op in (all_to_all_v, all_to_all_v_transpose, all_to_all_v_learn, all_gather, reduce_scatter, all_reduce):
    torch.library._register_effectful_op(_op._qualname, torch.library.EffectType.ORDERED)
