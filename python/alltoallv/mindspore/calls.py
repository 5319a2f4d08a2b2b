"""Runs collectives that write into the caller's tensors, at the call or when MindSpore's queue reaches them."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops

from alltoallv import _core
from alltoallv._calls.counts import even_parts
from alltoallv.communicator import Communicator
from alltoallv.mindspore import device_op, device_reduction
from alltoallv.mindspore.adapter import SETTLED, Tensors
from alltoallv.mindspore.tensors import Place, in_queue, settle
from alltoallv.mindspore.work import CommHandle, Done


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
        result = device_reduction.reduce_in_order(self._comm, self._operator, x, self._op, counts, tuple(x.shape))
        out.copy_(result.reshape(out.shape))


def _apart() -> Place:
    places: dict[int, int] = {}
    return lambda x: (places.setdefault(id(x), len(places) + 1) << 40, x.nbytes) if x.size else (0, 0)
