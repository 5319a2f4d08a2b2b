"""Implements the tensor interface of the shared calls for MindSpore tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mindspore
from mindspore import Tensor, mint, ops

from alltoallv import _core
from alltoallv._calls.adapters import Adapter, Region
from alltoallv._calls.collectives import LeafReduction, Linear, Reduction, Transfer
from alltoallv._calls.counts import even_parts
from alltoallv._calls.exchanges import Swapped
from alltoallv._calls.experts import exchange_counts
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import device_op, device_quantized
from alltoallv.mindspore.group import on_host
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
