"""Calls over a group's own engine: ready to run, or under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from alltoallv.errors import AllToAllVError
from alltoallv.torch.engines.agreement import Descriptor
from alltoallv.torch.engines.call_queue import QueuedCall

# What moves the data of one call: told the receive counts if they are learnt, and whether to wait; returns the result
# and, if it has not waited, the engine's work.
Move = Callable[[list[int] | None, bool], tuple[Any, Any]]


class Runner(Protocol):
    """The communicator, as its calls see it."""

    def run(self, descriptor: Descriptor, move: Move) -> Any: ...
    def submit(self, descriptor: Descriptor, move: Move, tensors: Sequence[Tensor]) -> PendingResult: ...


class GroupCall:
    """A collective whose arguments have passed this rank's checks."""

    def __init__(self, communicator: Runner, descriptor: Descriptor, move: Move, *tensors: Tensor) -> None:
        self._communicator, self._descriptor, self._move, self._tensors = communicator, descriptor, move, tensors

    def run(self) -> Any:
        """Returns when the data have arrived; on a GPU, when the current stream will wait for them."""
        return self._communicator.run(self._descriptor, self._move)

    def submit(self) -> PendingResult:
        return self._communicator.submit(self._descriptor, self._move, self._tensors)


class DeviceWork:
    """A work of the engine whose result is known, but not yet complete."""

    def __init__(self, work: Any, result: Any) -> None:
        self._work, self.result = work, result

    def wait(self, seconds: float = -1.0) -> bool:
        """Makes the current stream wait; with a time, the host waits."""
        if self._work is None:
            return True
        if seconds < 0:
            self._work.wait()
            return True
        end = time.monotonic() + seconds
        while not self._work.is_completed():
            if time.monotonic() >= end:
                return False
            time.sleep(0.0005)
        self._work.wait()
        return True

    def done(self) -> bool:
        """True, too, once it has failed: the next wait raises that."""
        try:
            return self._work is None or bool(self._work.is_completed())
        except AllToAllVError:
            return True


PendingResult = QueuedCall | DeviceWork
