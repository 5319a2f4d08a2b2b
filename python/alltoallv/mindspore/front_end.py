"""MindSpore's groups, tensors, gradients and handles; `alltoallv.mindspore` describes what all its functions share.

The gradient of a linear collective is its transpose. All of it runs on the thread that calls it: forward when Python
calls the function, backward inside the gradient function, in the reverse order. Derivatives of every order exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function
from mindspore.graph import jit_trace

from alltoallv import _core
from alltoallv._calls.adapters import Adapter, Region, as_bytes
from alltoallv._calls.collectives import LeafReduction, Linear, Map, Reduction, Transfer, all_reduction
from alltoallv._calls.counts import even_parts
from alltoallv._calls.exchanges import ExpertRows, Order, Swapped
from alltoallv._calls.experts import exchange_counts
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError
from alltoallv.mindspore import device_op, device_quantized
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import (
    CommHandle,
    Done,
    Place,
    Received,
    as_input,
    check_tensor,
    core_name,
    empty,
    executor,
    from_block,
    in_queue,
    region,
    settle,
    tracks,
    wants_gradient,
)
from alltoallv.quantization.requests import ErrorFeedback
from alltoallv.quantization.spec import QuantizedReduction


def refuse_timeout(timeout: float | None) -> None:
    """Refuses a timeout for a call in MindSpore's queue."""
    if timeout is not None:
        raise InvalidParamError(f"timeout is {timeout}, expected None on Ascend: the group's counts", id=1315)


def learnt(comm: Communicator, sends: Sequence[int]) -> list[int]:
    """Returns the receive counts that follow from all ranks' send counts, after the calls in MindSpore's queue."""
    executor.sync()  # the ranks agree about those over the same communicator
    return exchange_counts(on_host(comm), sends).tolist()


class Tensors(Adapter[Tensor]):
    """Accesses tensors through ``place``; if it ``settles``, its checks first wait until MindSpore has computed them.

    ``copies`` keeps contiguous copies, to be used again for the same tensors.
    """

    kind, tensor, feedback, handle = "a MindSpore tensor", Tensor, ErrorFeedback, CommHandle
    done = Done
    with_gradient: ClassVar[Callable[..., Tensor | None]]  # runs an operation with its gradient; `cells` has it

    def __init__(
        self, locate: Place = region, copies: dict[int, tuple[Tensor, Tensor]] | None = None, settles: bool = False
    ) -> None:
        self._place, self._copies, self._settles = locate, copies, settles

    def check(self, name: str, x: Tensor) -> None:
        check_tensor(name, x)
        core_name(x.dtype)
        if self._settles and not in_queue():
            settle()

    def listed(self, name: str, tensors: Any) -> Sequence[Tensor]:
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"Expected list or tuple, but got {type(tensors)}.")
        return tensors

    def contiguous(self, x: Tensor) -> Tensor:
        if self._copies is None or x.is_contiguous():
            return as_input(x)
        return self._copies.setdefault(id(x), (as_input(x), x))[0]

    def region(self, x: Tensor) -> Region:
        return self._place(x)

    def address(self, x: Tensor) -> int:
        return x.data_ptr()

    def from_block(self, block: _core.Block, shape: Sequence[int], like: Tensor) -> Tensor:
        return from_block(block, shape, like.dtype)

    def queues(self) -> bool:
        return in_queue()

    def enqueue(self, linear: Linear[Tensor], input: Tensor, output: Tensor | None) -> Tensor:
        """Adds the exchange to MindSpore's queue: it runs after earlier operators and before later ones."""
        with guard(linear.communicator, linear.operator):
            refuse_timeout(linear.timeout if linear.timeout >= 0 else None)
            if isinstance(linear, LeafReduction):
                return self._in_tree(linear, input)
            if isinstance(linear, Reduction) and linear.communicator.order is not None:
                return self._in_order(linear, input, output)
            if isinstance(linear, Reduction) and linear.op == "avg":  # HCCL has sums
                return self.enqueue(replace(linear, op="sum"), input, output) / linear.communicator.size
            if isinstance(linear, Swapped):
                total = self._by_parts(linear, input)
                return total if output is None else output.copy_(total)
            plan, x = linear.plan(core_name(input.dtype)), as_input(input)
            fresh = ops.zeros if linear.has_gaps() else mint.empty
            out = fresh(linear.shape_out, dtype=input.dtype) if output is None else output
            device_op.enqueue(lambda locate, stream: plan.run(locate(x)[0], locate(out)[0], stream=stream), [out], [x])
        return out

    def _by_parts(self, linear: Swapped[Tensor], input: Tensor) -> Tensor:
        """HCCL moves regions in one piece: they are brought together before, and apart after."""
        swap, layout = linear.swap, linear.swap.packed()
        parts = mint.split(input, list(swap.scatter_sizes), swap.scatter)
        came = self.enqueue(linear.packed(), mint.cat([x.reshape(-1) for x in parts]), None)
        places = zip(layout[3], layout[2], swap.boxes()[1], strict=True)
        return mint.cat([came[at : at + n].reshape(box) for at, n, box in places], swap.gather)

    def _in_tree(self, linear: LeafReduction[Tensor], input: Tensor) -> Tensor:
        counts, comm = even_parts(math.prod(linear.shape_out), linear.communicator.size), linear.communicator
        terms = "sum", counts, linear.shape_in, linear.leaves
        return device_quantized.reduce_in_order(comm, linear.operator, input, *terms).reshape(linear.shape_out)

    def _in_order(self, linear: Reduction[Tensor], input: Tensor, output: Tensor | None) -> Tensor:
        terms = linear.op, linear.counts, linear.shape_in
        total = device_quantized.reduce_in_order(linear.communicator, linear.operator, input, *terms)
        total = total.reshape(linear.shape_out)
        return total if output is None else output.copy_(total)

    def learn(self, transfer: Transfer[Tensor], input: Tensor) -> Sequence[int]:
        return learnt(transfer.communicator, transfer.layout[0])

    name = staticmethod(core_name)

    def allocate(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        kind = getattr(mindspore, dtype)
        return ops.zeros(tuple(shape), kind) if in_queue() else empty(shape, kind)

    def device(self, x: Tensor) -> str:
        return device_op.device()

    def differentiated(
        self, operation: Any, x: Tensor, out: Tensor | None, feedback: Any, timeout: float | None
    ) -> Tensor | None:
        return self.with_gradient(operation, x, out, feedback, timeout) if wants_gradient(x) else None

    def launch(self, x: Tensor, out: Tensor, start: Callable[[Region, Region, int], None]) -> None:
        device_op.enqueue(lambda locate, stream: start(locate(x), locate(out), stream), [out], [x])

    def engine(self, x: Tensor, member: Any) -> Communicator:
        return member

    def check_place(self, engine: Any, *tensors: Tensor) -> None:
        """All tensors of the process lie where MindSpore computes."""

    def exchange_counted(self, engine: Communicator, x: Tensor, counts: Sequence[Any], capacity: int) -> Received:
        results = device_op.exchange_counted(engine, x, device_op.as_counts(counts, engine.size), capacity, 1)
        return Received(results[0].reshape(1, capacity), *results[1:])

    def reduce(self, engine: Communicator, request: QuantizedReduction, tensors: Sequence[Any]) -> None:
        out, x, *states = tensors
        out.copy_(device_quantized.reduce(engine, request, x, *states).reshape(out.shape))

    def values(self, x: Tensor) -> Any:
        return x.astype(mindspore.float32).asnumpy()


class _Settled(Tensors):
    """Accesses tensors that MindSpore has already computed."""

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.is_contiguous() else as_input(x)


ADAPTER = Tensors(settles=True)
SETTLED = _Settled()
LATE = Tensors()  # for calls that, after their checks, wait for MindSpore or join its queue


class Call:
    """A collective that has passed the core's checks.

    In MindSpore's queue, addresses of tensors are known only later. So the call is checked twice: with substitute
    addresses that do not overlap, and with the real ones when the queue reaches the call.
    """

    def __init__(self, comm: Communicator, operator: str, outputs: Any, inputs: Any = None, **terms: Any) -> None:
        self._comm, self._operator, self._queued = comm, operator, in_queue()
        self._op = terms.get("reduce_op", "")
        if self._queued:
            copies: dict[int, tuple[Tensor, Tensor]] = {}

            def check(locate: Place) -> _core.CheckedCall:
                return _core.CheckedCall(Tensors(locate, copies), comm.core, operator, outputs, inputs, **terms)

            self._check, self.checked_call = check, check(_apart())
        else:
            settle()
            self.checked_call = _core.CheckedCall(SETTLED, comm.core, operator, outputs, inputs, **terms)

    def start(self, async_op: bool = False, timeout: float = -1.0) -> CommHandle | None:
        """Runs the call, or submits it."""
        checked_call = self.checked_call
        if self._queued and self._op and self._comm.order is not None:
            self._reduce_in_order()
            return Done(checked_call.result) if async_op else None
        if self._queued:
            tensors = checked_call.outputs or checked_call.inputs, checked_call.inputs
            device_op.enqueue(lambda locate, stream: self._check(locate).run(stream=stream), *tensors)
            return Done(checked_call.result) if async_op else None
        if async_op:
            return CommHandle(self._comm, checked_call.submit(timeout), (checked_call,), lambda: checked_call.result)
        checked_call.run(timeout)
        return None

    def _reduce_in_order(self) -> None:
        call: Any = self.checked_call
        (out,), parts = call.outputs, call.inputs or call.outputs
        x = parts[0] if len(parts) == 1 else ops.concat([part.reshape(-1) for part in parts])
        size = self._comm.size
        counts = call.counts or (even_parts(x.size, size) if self._operator == "all_reduce" else [out.size] * size)
        result = device_quantized.reduce_in_order(self._comm, self._operator, x, self._op, counts, tuple(x.shape))
        out.copy_(result.reshape(out.shape))


def _apart() -> Place:
    places: dict[int, int] = {}
    return lambda x: (places.setdefault(id(x), len(places) + 1) << 40, x.nbytes) if x.size else (0, 0)


class _Applied(_Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, call: Map[Tensor]) -> Tensor:
        ctx.call = call
        return call.run(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.call.back(grad, apply), None


def apply(input: Tensor, call: Map[Tensor]) -> Tensor:
    """Runs the call and records its gradient."""
    return _Applied.apply(input, call)


def refuse_gradient(operator: str, *tensors: Any) -> None:
    """Raises InvalidParamError where a call without a gradient gets a tensor that wants one: it would be zero."""
    if wants_gradient(*tensors):
        raise InvalidParamError(
            f"{operator} has no gradient and got a tensor that wants one, expected ops.stop_gradient(tensor)", id=1316
        )


def summed(input: Tensor, comm: Communicator, op: str = "sum") -> Tensor:
    """Returns the sum or average of all ranks' inputs in a new tensor."""
    return apply(input, all_reduction(LATE, comm, input.shape, op))


class Broadcast(_Function):
    """Returns the values of rank ``root`` in a new tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, comm: Communicator, root: int) -> Tensor:
        ctx.comm, ctx.root = comm, root
        with guard(comm, "broadcast"):
            out = input.copy()
            call = Call(comm, "broadcast", out, root=root)
        call.start()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        total = summed(grad, ctx.comm)
        if ctx.comm.rank != ctx.root:
            # The zeros are computed from the sum, because its own gradient is also collective.
            total = ops.where(Tensor(False), total, ops.zeros_like(total))
        return total, None, None


class ListExchange(_Function):
    """Sends ``inputs[j]`` to rank j and returns what arrives in new tensors of the given shapes."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, shapes: list[tuple[int, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.shapes = comm, [tuple(x.shape) for x in inputs]
        with guard(comm, "all_to_all"):
            fresh = ops.zeros if in_queue() else empty
            outputs = [fresh(shape, inputs[0].dtype) for shape in shapes]
            call = Call(comm, "all_to_all", outputs, inputs, names=("outputs", "inputs", ""))
        call.start()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ListExchange.apply(ctx.comm, ctx.shapes, *grads)


class _Assign(_Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, values: Tensor, kept: Any) -> Tensor:
        ctx.shape, ctx.kept = values.shape, kept
        ctx.mark_dirty(output)
        if in_queue():
            fresh = values.reshape(output.shape)
            output.copy_(fresh if kept is None else ops.where(Tensor(kept.reshape(output.shape)), output, fresh))
            return output
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
    """Copies values into a caller's tensor; gradients of the tensor then flow to ``values``.

    ``kept`` is true where the tensor keeps its own value, or None if it keeps no value.
    """
    if output.untyped_storage().nbytes() != output.nbytes:
        raise InvalidTensorError(
            f"{name} is a part of a larger tensor, to which MindSpore passes no gradient on: "
            "expected a tensor of its own, or the output of all_to_all_v",
            id=2078,
        )
    _Assign.apply(output, values, kept)


# Makes a function for the outputs' values.
Gradient = Callable[[Communicator, _core.CheckedCall], Callable[[], Sequence[Tensor]]]


def enter(group: Group) -> Communicator:
    """Returns a call's communicator; refuses where MindSpore would record the call's values instead of the call."""
    if getattr(jit_trace, "_using_trace", False):
        raise BackendUnavailableError(
            "alltoallv.mindspore cannot be traced: use capture_mode='bytecode', "
            "or 'ast' with alltoallv.mindspore.AllToAllV",
            id=5069,
        )
    return groups.resolve(group)


def check_async(async_op: Any) -> None:
    """Refuses values that are not bool, with MindSpore's error text."""
    if not isinstance(async_op, bool):
        raise TypeError(f"The argument 'async_op' must be a bool, but got {type(async_op)}.")


class _FrontEnd(ExpertRows[Tensor, Group, CommHandle]):
    adapter, messenger, quick = LATE, ADAPTER, Tensor
    local = TypeError  # as MindSpore's checks of argument types
    enter, host, rank_in = staticmethod(enter), staticmethod(on_host), staticmethod(groups.rank_in)
    check_async, tracks, numbers = staticmethod(check_async), staticmethod(tracks), staticmethod(Tensor.from_numpy)
    apply, assign = staticmethod(apply), staticmethod(assign)

    def taken(self, x: Tensor, index: npt.NDArray[np.int64]) -> Tensor:
        return ops.gather(x.reshape(-1), Tensor(index), 0)

    def permuted(self, x: Tensor, order: Order) -> Tensor:
        # MindSpore's own works on a device, but on CPU not for all dtypes.
        return ops.gather(x, Tensor(order), 0) if in_queue() else super().permuted(x, order)

    def prepare(
        self,
        comm: Communicator,
        operator: str,
        outputs: Any,
        inputs: Any,
        terms: dict[str, Any],
        gradient: Gradient | None,
    ) -> tuple[Call, Callable[[], Sequence[Tensor]] | None]:
        call = Call(comm, operator, outputs, inputs, **terms)
        tensors = *call.checked_call.outputs, *call.checked_call.inputs
        if gradient is None:
            refuse_gradient(operator, *tensors)
            return call, None
        if not tracks(*tensors):
            return call, None
        return call, gradient(comm, call.checked_call)

    def start(self, comm: Communicator, call: Any, async_op: bool, timeout: float) -> CommHandle | None:
        checked, values = call
        if values is None:
            return checked.start(async_op, timeout)  # type: ignore[no-any-return]
        # Gradients must reach the outputs, so the values are needed now; the handle is done.
        checked_call = checked.checked_call
        for j, (output, value) in enumerate(zip(checked_call.outputs, values(), strict=True)):
            name = f"{checked_call.name}[{j}]" if isinstance(checked_call.result, list) else checked_call.name
            assign(name, output, value.reshape(output.shape))
        return Done(checked_call.result) if async_op else None


front_end = _FrontEnd()
