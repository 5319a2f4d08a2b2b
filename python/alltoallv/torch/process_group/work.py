"""What a collective of the backend returns: torch's Work, over pending calls of a communicator."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork

from alltoallv import _core
from alltoallv._calls.protocol import Pending
from alltoallv.errors import CommTimeoutError
from alltoallv.torch.api.work import unwrap

Result = list[Tensor] | list[list[Tensor]]


class BackendWork(TorchWork):
    """Calls under way, or finished ones if ``calls`` is empty.

    ``finish`` copies results to where the caller wants them, in the thread that first sees the calls done. The tensors
    of ``keep`` live until then.
    """

    def __init__(
        self,
        calls: Sequence[Pending],
        result: Result,
        finish: Callable[[], None] | None = None,
        keep: object = None,
        futures: Futures | None = None,
    ) -> None:
        super().__init__()
        self._calls = calls
        self._result = result
        self._finish = finish
        self._keep = keep
        self._futures = futures
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the operator is done, at most ``timeout`` (zero: no limit); returns True.

        Raises:
            CommTimeoutError: not done in time; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        limit = timeout.total_seconds()
        end = time.monotonic() + limit
        for call in self._calls:
            if not call.wait(max(end - time.monotonic(), 0.0) if limit > 0 else -1.0):
                raise CommTimeoutError(f"the operator was not done after {limit} s; it is still under way")
        self._settle()
        return True

    def _settle(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
            self._keep = None

    def ended(self) -> bool:
        """True once all calls have succeeded or failed."""
        return all(call.done() for call in self._calls)

    def is_completed(self) -> bool:
        if not self.ended():
            return False
        if self.exception() is None:
            self._settle()
        return True

    def is_success(self) -> bool:
        return self.ended() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the operator raised; None if it succeeded or is still under way."""
        if self.ended():
            for call in self._calls:
                try:
                    call.wait()
                except Exception as error:
                    return error
        return None

    def result(self) -> Any:
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs. It raises errors as RuntimeError, with their class and text in the message."""
        outcome: torch.futures.Future[Any] = torch.futures.Future()
        # DDP's C++ takes what `set_exception` leaves for a result; an error of a callback it sees as an error.
        future = outcome.then(unwrap)
        if self._futures is None or self.ended():
            self.complete(outcome)
        else:
            self._futures.add(self, outcome)
        return future

    def complete(self, outcome: torch.futures.Future[Any]) -> None:
        """Waits, and sets the result or the error as the value."""
        try:
            outcome.set_result((self.result(), None))
        except Exception as error:
            outcome.set_result((None, error))


class WorkList(TorchWork):
    """Several works as one."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def result(self) -> Any:
        return [work.result() for work in self._works]

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of the works' own results."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [future.value() for future in done.value()])


class Futures:
    """One thread that completes the futures of a group, whose operators end in the order of their calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[BackendWork, torch.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        _all.add(self)

    def add(self, work: BackendWork, future: torch.futures.Future[Any]) -> None:
        with self._lock:
            self._queue.put((work, future))
            if self._thread is None:
                self._thread = threading.Thread(target=_complete, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread, once the works it waits for have ended."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _complete(pending: queue.SimpleQueue[tuple[BackendWork, torch.futures.Future[Any]] | None]) -> None:
    while (item := pending.get()) is not None:
        work, future = item
        work.complete(future)


_all: weakref.WeakSet[Futures] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # No thread may come back from the core into an interpreter that is gone.
    if any(futures._thread is not None for futures in _all):
        _core.destroy_all()
        for futures in list(_all):
            futures.close()
