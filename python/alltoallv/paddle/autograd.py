"""The exchange as Paddle's autograd sees it: linear, followed by its transpose, so derivatives of every order exist.

A layer's context keeps nothing before the exchange has gone well: Paddle never frees that of a forward that has raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from paddle import Tensor
from paddle.autograd import PyLayer

from alltoallv._calls.counts import even_parts, packed
from alltoallv._calls.guard import guard
from alltoallv._calls.regions import as_bytes
from alltoallv._calls.transfer import Transfer
from alltoallv.communicator import Communicator
from alltoallv.paddle.tensors import allocate, as_input, core_name, from_block, region
from alltoallv.paddle.work import Task


class Exchange(PyLayer):
    """Into a new tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, transfer: Transfer) -> Tensor:
        output = run(input, transfer)
        ctx.transfer = transfer
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Exchange.apply(grad, ctx.transfer.transposed())


class LearningExchange(PyLayer):
    """Receive counts come from the peers; ``transfer`` lacks them and the output's shape."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, transfer: Transfer, tail: tuple[int, ...]) -> Tensor:
        with guard(transfer.communicator, transfer.operator):
            x = as_input("input", input)
            plan = transfer.plan(core_name(x.dtype))
        block, recvs = plan.run_learning(x.data_ptr(), transfer.timeout)
        shape = (sum(recvs) // transfer.row, *tail)
        ctx.transfer = transfer.received(recvs, shape)
        return from_block(block, shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Exchange.apply(grad, ctx.transfer.transposed())


class AsyncExchange(PyLayer):
    """Launches in forward; the output may be used after the wait."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, transfer: Transfer, holder: list[Task]) -> Tensor:
        out, task = submit(input, transfer)
        ctx.transfer = transfer
        holder.append(task)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Exchange.apply(grad, ctx.transfer.transposed())


class AllReduce(PyLayer):
    """The sum or average of all ranks' inputs, into a new tensor; it is its own transpose."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, op: str) -> Tensor:
        output = _reduced(input, comm, "all_reduce", op, even_parts(input.size, comm.size), input.shape)
        ctx.arguments = comm, op
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return AllReduce.apply(grad, *ctx.arguments)


class Gather(PyLayer):
    """All ranks' inputs, one after the other in that shape; rank j's has ``counts[j]`` elements."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, counts: Sequence[int], shape: Sequence[int]) -> Tensor:
        layout = ([input.size] * comm.size, [0] * comm.size, list(counts), packed(counts))
        output = run(input, Transfer(comm, "all_gather", layout, tuple(input.shape), tuple(shape), 1))
        ctx.arguments = comm, counts, input.shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ReduceScatter.apply(grad, *ctx.arguments)


class ReduceScatter(PyLayer):
    """The sum of all ranks' inputs, of which rank j keeps a part of ``counts[j]`` elements, here in that shape."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, counts: Sequence[int], shape: Sequence[int]) -> Tensor:
        output = _reduced(input, comm, "reduce_scatter", "sum", counts, shape)
        ctx.arguments = comm, counts, input.shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Gather.apply(grad, *ctx.arguments)


def _reduced(
    input: Tensor, comm: Communicator, operator: str, op: str, counts: Sequence[int], shape: Sequence[int]
) -> Tensor:
    with guard(comm, operator):
        x = as_input("input", input)
        out, dtype = allocate(shape, x.dtype), core_name(x.dtype)
    comm.core.reduce(operator, dtype, op, region(x)[0], region(out)[0], list(counts))
    return out


class Permute(PyLayer):
    """Row n of the output is row ``order[n]`` of the input. Paddle's own gather has no float16 on CPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: npt.NDArray[np.int64]) -> Tensor:
        ctx.order = order
        x = as_input("x", rows)
        out = allocate(x.shape, x.dtype)
        source, target = (as_bytes(region(tensor)).reshape(len(order), -1) for tensor in (x, out))
        np.take(source, order, axis=0, out=target)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Permute.apply(grad, np.argsort(ctx.order))


def run(input: Tensor, transfer: Transfer, out: Tensor | None = None) -> Tensor:
    """Without a gradient; the output is ``out``, or a new tensor whose gaps are zero."""
    x, out, plan = _prepare(input, transfer, out)
    plan.run(x.data_ptr(), out.data_ptr(), transfer.timeout)
    return out


def submit(input: Tensor, transfer: Transfer, out: Tensor | None = None) -> tuple[Tensor, Task]:
    """The same, under way."""
    x, out, plan = _prepare(input, transfer, out)
    work = plan.submit(x.data_ptr(), out.data_ptr(), transfer.timeout)
    return out, Task(transfer.communicator, work, (x, out), lambda: out)


def _prepare(input: Tensor, transfer: Transfer, out: Tensor | None) -> tuple[Tensor, Tensor, Any]:
    with guard(transfer.communicator, transfer.operator):
        x = as_input("input", input)
        if out is None:
            out = allocate(transfer.shape_out, x.dtype, zero=transfer.has_gaps())
        else:
            out._bump_inplace_version()  # a backward that needs the old values shall say so
        return x, out, transfer.plan(core_name(x.dtype))
