"""Runs collectives that write into the caller's tensors, at the call or when MindSpore's queue reaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from alltoallv._calls.declared import Made
from alltoallv.communicator import Communicator
from alltoallv.mindspore import device_op
from alltoallv.mindspore.adapter import SETTLED, Tensors
from alltoallv.mindspore.tensors import Place, in_queue, settle
from alltoallv.mindspore.work import CommHandle, Done


class Call:
    """A collective of `alltoallv._calls.declared`, checked with its own arguments.

    In MindSpore's queue, addresses of tensors are known only later. So the call is declared twice: for its checks with
    substitute addresses that do not overlap, and with the real ones when the queue reaches the call.
    """

    def __init__(
        self, declared: Callable[..., Made], comm: Communicator, arguments: tuple[Any, ...], more: dict[str, Any]
    ) -> None:
        self._comm, self._queued = comm, in_queue()
        if self._queued:
            copies: dict[int, tuple[Tensor, Tensor]] = {}

            def declare(place: Place) -> Made:
                return declared(Tensors(place, copies), comm, *arguments, **more)

            self._declare, self.made = declare, declare(_apart())
        else:
            settle()
            self.made = declared(SETTLED, comm, *arguments, **more)

    def start(self, async_op: bool = False, timeout: float = -1.0) -> CommHandle | None:
        """Runs the call, or submits it."""
        made = self.made
        if self._queued:
            tensors = made.outputs or made.inputs, made.inputs
            device_op.enqueue(lambda place, stream: self._declare(place).call.run(stream=stream), *tensors)
            return Done(made.result) if async_op else None
        if async_op:
            return CommHandle(self._comm, made.call.submit(timeout), (made,), lambda: made.result)
        made.call.run(timeout)
        return None


def _apart() -> Place:
    places: dict[int, int] = {}
    return lambda x: (places.setdefault(id(x), len(places) + 1) << 40, x.nbytes) if x.size else (0, 0)
