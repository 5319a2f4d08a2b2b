"""Implements the tensor interface of the shared calls for MindSpore tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import Tensor, ops

from alltoallv import _core
from alltoallv._calls.adapters import Adapter
from alltoallv._calls.collectives import Ready
from alltoallv._calls.experts import exchange_counts
from alltoallv._calls.guard import guard
from alltoallv._calls.linear import Linear, Transfer
from alltoallv._calls.regions import Region
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import device_op
from alltoallv.mindspore.group import on_host
from alltoallv.mindspore.tensors import (
    Place,
    as_input,
    check_tensor,
    core_name,
    empty,
    from_block,
    in_queue,
    region,
    settle,
)
from alltoallv.mindspore.work import CommHandle, Done
from alltoallv.quantization.feedback import ErrorFeedback


class Tensors(Adapter[Tensor]):
    """Accesses tensors through ``place``; if it ``settles``, its checks first wait until MindSpore has computed them.

    ``copies`` keeps contiguous copies, to be used again for the same tensors.
    """

    kind, tensor, feedback, handle = "a MindSpore tensor", Tensor, ErrorFeedback, CommHandle
    done = Done

    def __init__(
        self, place: Place = region, copies: dict[int, tuple[Tensor, Tensor]] | None = None, settles: bool = False
    ) -> None:
        self._place, self._copies, self._settles = place, copies, settles

    def check(self, name: str, x: Tensor) -> None:
        check_tensor(name, x)
        core_name(x.dtype)
        if self._settles:
            settle()

    def listed(self, name: str, tensors: Any) -> Sequence[Tensor]:
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"Expected list or tuple, but got {type(tensors)}.")
        return tensors

    def contiguous(self, x: Tensor) -> Tensor:
        if self._copies is None or x.is_contiguous():
            return as_input(x)
        return self._copies.setdefault(id(x), (as_input(x), x))[0]

    def writable(self, x: Tensor) -> bool:
        return bool(x.is_contiguous())

    def region(self, x: Tensor) -> Region:
        return self._place(x)

    def address(self, x: Tensor) -> int:
        address: int = x.data_ptr()
        return address

    def from_block(self, block: _core.Block, shape: Sequence[int], like: Tensor) -> Tensor:
        return from_block(block, shape, like.dtype)

    def queues(self) -> bool:
        return in_queue()

    def enqueue(self, linear: Linear[Tensor], input: Tensor, output: Tensor | None) -> Tensor:
        """Adds the exchange to MindSpore's queue: it runs after earlier operators and before later ones."""
        with guard(linear.communicator, linear.operator):
            if linear.timeout >= 0:
                raise InvalidParamError(f"timeout is {linear.timeout}, expected None on Ascend: the group's counts")
            plan, x = linear.plan(core_name(input.dtype)), as_input(input)
            if output is None and linear.has_gaps():
                output = ops.zeros(linear.shape_out, input.dtype)
            if output is None:
                return device_op.exchange(plan, x, linear.shape_out)
            out = output
        device_op.enqueue(lambda place: Ready(plan, (place(x)[0], place(out)[0])), [out], [x])
        return out

    def learn(self, transfer: Transfer[Tensor], input: Tensor) -> Sequence[int]:
        recv_counts: list[int] = exchange_counts(on_host(transfer.communicator), transfer.layout[0]).tolist()
        return recv_counts

    name = staticmethod(core_name)

    def allocate(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        return empty(shape, getattr(mindspore, dtype))

    def values(self, x: Tensor) -> Any:
        return x.astype(mindspore.float32).asnumpy()


class _Settled(Tensors):
    """Accesses tensors that MindSpore has already computed."""

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.is_contiguous() else as_input(x)


ADAPTER = Tensors(settles=True)
SETTLED = _Settled()
LATE = Tensors()  # for calls that, after their checks, wait for MindSpore or join its queue
