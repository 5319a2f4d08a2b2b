"""Collectives that write into tensors of the caller: run at the call, or where MindSpore's queue has come to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from alltoallv._calls.collectives import Ready
from alltoallv._calls.regions import Region
from alltoallv.communicator import Communicator
from alltoallv.mindspore.tensors import in_queue, region, settle
from alltoallv.mindspore.work import CommHandle, Done

Place = Callable[[Tensor], Region]  # where a tensor lies


class Call:
    """A collective whose arguments have passed this rank's checks; to be made under the guard.

    ``prepare`` makes it of the places of its tensors. In MindSpore's queue they are known only later: it is then called
    with others, apart from each other, for its checks, and again when the queue has come to the call.
    """

    def __init__(self, prepare: Callable[[Place], Ready]) -> None:
        self._prepare = prepare
        if not in_queue():
            settle()
        self._ready = prepare(_apart() if in_queue() else region)

    def start(
        self,
        comm: Communicator,
        outputs: Sequence[Tensor],
        async_op: bool = False,
        inputs: Sequence[Tensor] = (),
        result: Any = None,
    ) -> CommHandle | None:
        """Runs it, or submits it. ``outputs`` and ``inputs`` are the tensors that it uses.

        ``result`` is what the handle gives, by default the outputs.
        """
        if result is None:
            result = outputs[0] if len(outputs) == 1 else outputs
        if in_queue():
            from alltoallv.mindspore import device_op  # compiles

            device_op.enqueue(self._prepare, outputs, inputs)
            return Done(result) if async_op else None
        if async_op:
            return CommHandle(comm, self._ready.submit(), (self._ready, outputs, inputs), lambda: result)
        self._ready.run()
        return None


def _apart() -> Place:
    places: dict[int, int] = {}
    return lambda x: (places.setdefault(id(x), len(places) + 1) << 40, x.nbytes) if x.size else (0, 0)
