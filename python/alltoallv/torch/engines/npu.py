"""Chooses torch_npu's streams: which one a call uses, what it waits for, and what must outlive it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from alltoallv import _core
from alltoallv.errors import AllToAllVError, BackendUnavailableError, HcclError

_POOL = 32
_left_out = frozenset(os.environ.get("ALLTOALLV_TEST_WITHOUT", "").split(","))


def synchronizes(name: str) -> bool:
    """Returns False for a synchronization that a test leaves out, to show that it is needed.

    Every one has a name of its own, and a scene in tests/npu/test_npu_synchronization.py that goes wrong without it.
    """
    return name not in _left_out


def leave_out_synchronizations(names: str) -> None:
    """Sets the synchronizations to leave out: names, separated by commas.

    A process begins with the names in ALLTOALLV_TEST_WITHOUT.
    """
    global _left_out
    _left_out = frozenset(names.split(","))
    _core.leave_out_synchronizations(names)


def npu() -> Any:
    """Returns the module ``torch.npu``, which torch_npu adds; raises BackendUnavailableError without it."""
    module = getattr(torch, "npu", None)
    if module is None:
        raise BackendUnavailableError("torch has no npu: pip install torch_npu, and import it before", id=5058)
    return module


class Streams:
    """Launches the calls of one communicator on streams; nothing here waits on the host.

    Args:
        core: The communicator; None for calls that are all waited for.
        shared: A stream on which others use the same HcclComm. All launches then go there, behind theirs; otherwise
            calls that are waited for go to the current stream, and the core orders the two.
    """

    def __init__(self, core: _core.Communicator | None = None, shared: Any = None) -> None:
        self._core, self._shared = core, shared

    def launch(
        self, device: torch.device, start: Callable[[int], Any], wait: bool, keep: Callable[[], Iterable[Tensor]]
    ) -> StreamWork | None:
        """Calls ``start`` with the raw handle of a stream, on which it launches.

        Args:
            device: The device of the tensors.
            start: Runs with that stream as torch's current one.
            wait: The current stream waits until the launch is done. Otherwise the returned work lets it wait.
            keep: The tensors in use: their memory is not handed out again before the launch is done.
        """
        with npu().device(device):
            current = npu().current_stream(device)
            if wait and self._shared is None:
                start(handle(current))
                return None
            side = self._shared or _side_of(self._core, device)
            if synchronizes("input-event"):
                side.wait_stream(current)
            with npu().stream(side):
                start(handle(side))
            work = StreamWork(self._core, device, side.record_event())
            if wait:
                work.wait()
                return None
            if synchronizes("record-stream"):
                for tensor in keep():
                    tensor.record_stream(side)
            return work


_sides: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by communicator


def _side_of(core: _core.Communicator | None, device: torch.device) -> Any:
    """Returns the communicator's own stream, which all who launch on it share.

    No other communicator has it, so that none waits for another's peers. But torch_npu hands out the same 32 streams of
    a device in turn: with more communicators than that, some share one.
    """
    if core not in _sides:
        for _ in range(_POOL):
            stream = npu().Stream(device)
            if stream not in _sides.values():
                break
        _sides[core] = stream
    return _sides[core]


_handles: dict[Any, int] = {}


def handle(stream: Any) -> int:
    """Returns the raw handle. Reading it passes torch_npu's queue of launches to the stream first."""
    if synchronizes("task-queue"):
        return int(stream.npu_stream)
    key = (stream.device_index, stream.stream_id)
    if key not in _handles:
        _handles[key] = int(stream.npu_stream)
    return _handles[key]


class StreamWork:
    """A launch on one of alltoallv's streams, with the methods that `DeviceWork` needs of an engine's work."""

    def __init__(self, core: _core.Communicator | None, device: torch.device, done: Any) -> None:
        self._core, self._device, self._done = core, device, done
        self._succeeded = False
        self._failure: AllToAllVError | None = None

    def wait(self) -> None:
        """Makes the current stream wait, not the host. Raises a failure that is known."""
        self.is_completed()
        if synchronizes("output-event"):
            npu().current_stream(self._device).wait_event(self._done)

    def is_completed(self) -> bool:
        """Returns whether the launch is done; raises its failure.

        An event is also complete after a launch that HCCL has given up.
        """
        if self._failure is not None:
            raise self._failure
        if not self._succeeded:
            done = self._query()
            if self._core is not None:
                self._core.check_enqueued(done)
            self._succeeded = done
        return self._succeeded

    def _query(self) -> bool:
        try:
            return bool(self._done.query())
        except RuntimeError as error:  # from torch_npu: it is unknown whether the data have come
            text = f"the NPU cannot report whether an asynchronous call is done: {_first_line(error)}"
        self._failure = HcclError(text, id=7007)
        if self._core is not None:
            self._core.abort(text)
        raise self._failure


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
