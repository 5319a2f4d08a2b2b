"""The works that collectives of the backend return: torch's Work, over pending calls of a communicator."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork

from alltoallv import _core
from alltoallv._calls.guard import Pending
from alltoallv.errors import CommTimeoutError
from alltoallv.torch.eager.calls import Future, promise, settle

Result = list[Tensor] | list[list[Tensor]]
_Place = tuple[int, ...]  # of a future: the place of the callback that began it, then its number in the group

_TURN_SECONDS = 10.0  # to wait for an earlier callback, which may itself wait for a later one
callbacks: dict[int, tuple[Futures, _Place]] = {}  # by thread: the future whose callbacks it runs


class BackendWork(TorchWork):
    """A call under way.

    ``finish`` copies results to where the caller wants them, in the thread that first sees the call done. The tensors
    of ``keep`` live until then, and the work leaves its group's ``pending``; ``futures`` completes its futures.
    """

    __slots__ = "_call", "_finish", "_futures", "_keep", "_lock", "_pending", "_result"

    def __init__(
        self,
        call: Pending,
        result: Result,
        keep: object,
        pending: set[BackendWork],
        futures: Futures,
        finish: Callable[[], None] | None = None,
    ) -> None:
        TorchWork.__init__(self)  # takes half the time of super()
        self._call = call
        self._result = result
        self._keep = keep
        self._pending, self._futures = pending, futures
        self._finish = finish
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Blocks until the operator is done, at most ``timeout``, also in seconds (zero: no limit); returns True.

        Raises:
            CommTimeoutError: not done in time; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._call.wait(limit if limit > 0 else -1.0):
            raise CommTimeoutError(f"the operator was not done after {limit} s; it is still under way", id=4042)
        if self._finish is not None:
            self._settle()
        else:
            self._keep = None
            self._pending.discard(self)
        return True

    def _settle(self) -> None:
        if self._finish is not None:
            with self._lock:
                if self._finish is not None:
                    self._finish()
                    self._finish = None
        self._keep = None
        self._pending.discard(self)

    def ended(self) -> bool:
        """Returns True once the call has succeeded or failed."""
        return self._call.done()

    def is_completed(self) -> bool:
        if not self.ended():
            return False
        if self.exception() is None:
            self._settle()
        return True

    def is_success(self) -> bool:
        return self.ended() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Returns what the operator raised; None if it succeeded or is still under way."""
        return self.await_end() if self.ended() else None

    def await_end(self) -> BaseException | None:
        """Waits until the call has ended; returns what it raised."""
        try:
            self._call.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> Any:
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future:
        """Returns a future of the outputs.

        It raises errors as RuntimeError, with their class and text in the message.
        """
        outcome, future = promise()
        if self.ended():
            settle(outcome, self.result)
        else:
            self._futures.add(self, outcome)
        return future


class MessageWork(BackendWork):
    """A message under way."""

    __slots__ = ()

    def _source_rank(self) -> int:
        """Returns the rank in the group that a received message has come from."""
        return self._call.source  # type: ignore[attr-defined]

    source_rank = _source_rank


class WorkList(TorchWork):
    """Makes one work of several."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
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

    def get_future(self) -> Future:
        """Returns a future of the list of the works' own results."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [future.value() for future in done.value()])


class CoalescedWork(WorkList):
    """Makes one work of calls that write into memory of their own, which is copied once all have succeeded."""

    def __init__(self, works: Sequence[TorchWork], copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Takes pairs of an output and the memory that a call writes; works that are not given have ended."""
        super().__init__(works)
        self._copies, self._outputs = copies, [output for output, _ in copies]
        self._lock = threading.Lock()
        if not works:
            self._settle()

    def _settle(self) -> None:
        with self._lock:
            for output, space in self._copies:
                output.detach().copy_(space)
            self._copies = ()

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        super().wait(timeout)
        self._settle()
        return True

    def is_completed(self) -> bool:
        if not super().is_completed():
            return False
        if self.exception() is None:
            self._settle()
        return True

    def result(self) -> Any:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future:
        """Returns a future of the outputs."""

        def settled(done: Any) -> list[Tensor]:
            done.value()
            self._settle()
            return self._outputs

        return super().get_future().then(settled)


class Futures:
    """Runs the threads that complete the futures of a group, whose operators end in the order of their calls.

    One of them watches the next operator. Callbacks may wait for operators, so another watches before they run.
    Operators that callbacks begin are begun in the order of their futures, as on the other ranks; see `in_turn`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._queue: deque[tuple[_Place, BackendWork, Future]] = deque()
        self._places: set[_Place] = set()  # of futures whose callbacks have not returned
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []
        self._watched = False
        self._idle = self._called = 0  # threads that wait to be called; calls that none of them has answered
        self._closed = False
        _all.add(self)

    def add(self, work: BackendWork, future: Future) -> None:
        """Completes the future once the work has ended."""
        owner, inside = callbacks.get(threading.get_ident(), (None, ()))
        with self._changed:
            position = (*(inside if owner is self else ()), next(self._numbers))
            self._queue.append((position, work, future))
            self._places.add(position)
            try:
                self._call_watcher()
            except RuntimeError:
                self._queue.pop()
                self._places.discard(position)
                raise

    def await_turn(self, position: _Place) -> None:
        """Waits for earlier futures and the operators of their callbacks, but not for enclosing callbacks."""
        with self._changed:
            self._changed.wait_for(
                lambda: not any(other < position and other != position[: len(other)] for other in self._places),
                _TURN_SECONDS,
            )

    def close(self) -> None:
        """Ends the threads, once the works they wait for have ended."""
        with self._changed:
            self._closed = True
            threads, self._threads = self._threads, []
            self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _call_watcher(self) -> None:
        """Lets a thread watch the next operator; called with the lock held."""
        if self._watched:
            return
        if self._idle > self._called:
            self._called += 1
            self._changed.notify_all()
        else:
            thread = threading.Thread(target=self._watch, name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._watched = True

    def _watch(self) -> None:
        while True:
            with self._changed:
                position, work, future = self._queue.popleft()
            work.await_end()
            with self._changed:
                self._watched = False
                if self._queue:
                    with contextlib.suppress(
                        RuntimeError
                    ):  # no thread can be started: this one goes on after the callbacks
                        self._call_watcher()
            callbacks[threading.get_ident()] = self, position
            settle(future, work.result)
            del callbacks[threading.get_ident()], work, future
            with self._changed:
                self._places.discard(position)
                self._changed.notify_all()
                if self._queue and not self._watched:
                    self._watched = True
                    continue
                self._idle += 1
                self._changed.wait_for(lambda: self._called or self._closed)
                self._idle -= 1
                if not self._called:
                    return
                self._called -= 1


def in_turn() -> None:
    """Waits, in a future's callback, for the callbacks of earlier ones; call it before a collective begins."""
    if (entry := callbacks.get(threading.get_ident())) is not None:
        entry[0].await_turn(entry[1])


_all: weakref.WeakSet[Futures] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # No thread may come back from the core into an interpreter that is gone.
    if any(futures._threads for futures in _all):
        _core.destroy_all()
        for futures in list(_all):
            futures.close()
