"""The exchanges as MindSpore's autograd sees them. Each is linear and is followed, as its gradient, by its transpose.

Everything here runs on the thread that calls it: forward when Python calls the function, backward inside the gradient
function, in the reverse order. Derivatives of every order exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from alltoallv import _core
from alltoallv._calls import collectives, experts
from alltoallv._calls.collectives import Ready
from alltoallv._calls.counts import even_parts, packed
from alltoallv._calls.guard import guard
from alltoallv._calls.reductions import ReductionPlan
from alltoallv._calls.regions import as_bytes
from alltoallv._calls.transfer import Transfer
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.mindspore import tensors
from alltoallv.mindspore.calls import Call, Place
from alltoallv.mindspore.group import on_host
from alltoallv.mindspore.tensors import as_input, core_name, empty, executor, from_block, region, settle, zeros
from alltoallv.mindspore.work import CommHandle, Done


@dataclass(frozen=True, slots=True)
class TensorTransfer(Transfer):
    """Of MindSpore tensors."""

    def allocate(self, dtype: Any) -> Tensor:
        """An output for it; gaps are zero."""
        return (zeros if self.has_gaps() else empty)(self.shape_out, dtype)

    def prepare(self, input: Tensor, output: Tensor | None = None) -> tuple[Tensor, Tensor, _core.Plan]:
        with guard(self.communicator, self.operator):
            x = as_input(input)
            return x, self.allocate(x.dtype) if output is None else output, self.plan(core_name(x.dtype))

    def run(self, input: Tensor, output: Tensor | None = None) -> Tensor:
        if tensors.in_queue():
            return self.enqueue(input, output)
        x, out, plan = self.prepare(input, output)
        plan.run(x.data_ptr(), out.data_ptr(), self.timeout)
        return out

    def enqueue(self, input: Tensor, output: Tensor | None = None) -> Tensor:
        """Behind what MindSpore has been asked for, and before what it will be."""
        from alltoallv.mindspore import device_op  # compiles

        with guard(self.communicator, self.operator):
            if self.timeout >= 0:
                raise InvalidParamError(f"timeout is {self.timeout}, expected None on Ascend: the group's counts")
            plan = self.plan(core_name(input.dtype))
            if output is None and self.has_gaps():
                output = ops.zeros(self.shape_out, input.dtype)
            if output is None:
                return device_op.exchange(plan, input, self.shape_out)
            x, out = as_input(input), output
        device_op.enqueue(lambda place: Ready(plan, (place(x)[0], place(out)[0])), [out], [x])
        return out

    def submit(self, input: Tensor, output: Tensor | None = None) -> tuple[Tensor, CommHandle]:
        if tensors.in_queue():
            out = self.enqueue(input, output)
            return out, Done(out)  # MindSpore orders what comes behind
        x, out, plan = self.prepare(input, output)
        work = plan.submit(x.data_ptr(), out.data_ptr(), self.timeout)
        return out, CommHandle(self.communicator, work, (x, out), lambda: out)


def tracks(*tensors: Any) -> bool:
    """Whether a gradient may be asked for with respect to one of these."""
    if not executor.enable_grad():
        return False
    if executor.grad_flag():
        return True
    return any(getattr(tensor, "_requires_grad", False) for tensor in tensors)


class Exchange(_Function):
    """Into a new tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, transfer: TensorTransfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.run(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Exchange.apply(grad, ctx.transfer.transposed()), None


class AsyncExchange(_Function):
    """Launches in forward; the output may be used after the wait."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, transfer: TensorTransfer, holder: list[CommHandle]) -> Tensor:
        ctx.transfer = transfer
        out, handle = transfer.submit(input)
        holder.append(handle)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Exchange.apply(grad, ctx.transfer.transposed()), None, None


class LearningExchange(_Function):
    """Receive counts come from the peers; ``transfer`` lacks them and the output's shape."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, transfer: TensorTransfer, tail: tuple[int, ...]) -> Tensor:
        out, ctx.transfer = run_learning(input, transfer, tail)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Exchange.apply(grad, ctx.transfer.transposed()), None, None


def run_learning(input: Tensor, transfer: TensorTransfer, tail: tuple[int, ...]) -> tuple[Tensor, TensorTransfer]:
    """The output, and the transfer with what the peers have told."""
    if tensors.in_queue():
        recvs = experts.tell_counts(on_host(transfer.communicator), transfer.layout[0]).tolist()
        told = transfer.received(recvs, (sum(recvs) // transfer.row, *tail))
        return told.enqueue(input), told
    with guard(transfer.communicator, transfer.operator):
        x = as_input(input)
        plan = transfer.plan(core_name(x.dtype))
    block, recvs = plan.run_learning(x.data_ptr(), transfer.timeout)
    shape = (sum(recvs) // transfer.row, *tail)
    return from_block(block, shape, x.dtype), transfer.received(recvs, shape)


class Gather(_Function):
    """All ranks' inputs, flat, one after the other; rank j's has ``counts[j]`` elements."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, counts: Sequence[int]) -> Tensor:
        ctx.comm, ctx.shape, ctx.counts = comm, input.shape, counts
        own = [input.size] * comm.size
        layout = (own, [0] * comm.size, list(counts), packed(counts))
        shape = (sum(counts),)
        return TensorTransfer(comm, "all_gather_into_tensor", layout, tuple(input.shape), shape, 1).run(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ReduceScatter.apply(grad, ctx.comm, ctx.counts, ctx.shape), None, None


class ReduceScatter(_Function):
    """The sum of all ranks' inputs, of which rank j keeps a part of ``counts[j]`` elements."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, counts: Sequence[int], shape: tuple[int, ...]) -> Tensor:
        ctx.comm, ctx.counts = comm, counts
        return _reduced(input, comm, "reduce_scatter", "sum", list(counts), shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return Gather.apply(grad, ctx.comm, ctx.counts), None, None, None


class AllReduce(_Function):
    """The sum or average of all ranks' inputs, into a new tensor; it is its own transpose."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, op: str) -> Tensor:
        ctx.comm, ctx.op = comm, op
        return _reduced(input, comm, "all_reduce", op, even_parts(input.size, comm.size), tuple(input.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return AllReduce.apply(grad, ctx.comm, ctx.op), None, None


def _reduced(
    input: Tensor, comm: Communicator, operator: str, op: str, counts: list[int], shape: tuple[int, ...]
) -> Tensor:
    """A reduction into a new tensor."""
    with guard(comm, operator):
        plan = ReductionPlan(comm.core, operator, core_name(input.dtype), op, counts)
        if tensors.in_queue():
            from alltoallv.mindspore import device_op  # compiles

            return device_op.exchange(plan, input, shape)
        x = as_input(input)
        out = empty(shape, x.dtype)
    plan.run(region(x)[0], region(out)[0])
    return out


class Broadcast(_Function):
    """The values of rank ``root``, in a new tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, root: int) -> Tensor:
        ctx.comm, ctx.root = comm, root
        with guard(comm, "broadcast"):
            out = input.copy()
            dtype = core_name(out.dtype)
            call = Call(lambda place: collectives.broadcast(comm, dtype, place(out), root))
        call.start(comm, [out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        total = AllReduce.apply(grad, ctx.comm, "sum")
        if ctx.comm.rank != ctx.root:
            # Zeros still made of it: its gradient too is collective.
            total = ops.where(Tensor(False), total, ops.zeros_like(total))
        return total, None, None


def gather_transfer(comm: Communicator, shape_in: Sequence[int], shape_out: Sequence[int]) -> TensorTransfer:
    """Every rank sends the same elements to all; its transpose is no exchange but a `ReduceScatter`."""
    layout = _core.Request.all_gather(comm.size, shape_in).layout
    return TensorTransfer(comm, "all_gather_into_tensor", layout, tuple(shape_in), tuple(shape_out), 1)


class ListExchange(_Function):
    """``inputs[j]`` to rank j, into new tensors of the given shapes."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, shapes: list[tuple[int, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.shapes = comm, [tuple(x.shape) for x in inputs]
        with guard(comm, "all_to_all"):
            fresh = ops.zeros if tensors.in_queue() else empty
            outputs = [fresh(shape, inputs[0].dtype) for shape in shapes]
            xs = [as_input(x) for x in inputs]
            call = Call(lists_exchange(comm, outputs, xs))
        call.start(comm, outputs, inputs=xs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ListExchange.apply(ctx.comm, ctx.shapes, *grads)


def lists_exchange(
    comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], timeout: float = -1.0
) -> Callable[[Place], Ready]:
    """What makes an all_to_all of these contiguous tensors."""
    dtype = core_name(inputs[0].dtype)
    return lambda place: collectives.all_to_all(
        comm, dtype, [place(out) for out in outputs], [place(x) for x in inputs], timeout
    )


class Assign(_Function):
    """Copies values into a caller's tensor, whose history then continues in them.

    ``kept`` is 1 where the tensor keeps its own value, or None if it keeps none.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, values: Tensor, kept: Any) -> Tensor:
        ctx.shape, ctx.kept = values.shape, kept
        ctx.mark_dirty(output)
        values = values.contiguous()
        settle()
        target, source = as_bytes(region(output)), as_bytes(region(values))
        if kept is None:
            target[...] = source
        else:
            np.copyto(target.reshape(-1, output.itemsize), source.reshape(-1, output.itemsize), where=~kept[:, None])
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        own = None
        if ctx.kept is not None:
            own = grad * Tensor(ctx.kept.reshape(grad.shape)).astype(grad.dtype)
        return own, grad.reshape(ctx.shape), None


def assign(name: str, output: Tensor, values: Tensor, kept: Any = None) -> None:
    """`Assign`, for outputs whose gradient MindSpore can follow."""
    if output.untyped_storage().nbytes() != output.nbytes:
        raise InvalidTensorError(
            f"{name} is a part of a larger tensor, to which MindSpore passes no gradient on: "
            "expected a tensor of its own, or the output of all_to_all_v"
        )
    Assign.apply(output, values, kept)
