"""One call at a time, in order: asynchronous calls on a thread of their own, synchronous ones behind them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_IDLE_SECONDS = 5.0


class QueuedCall:
    """A call that waits for its turn, runs, or has ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.result: Any = None

    def run(self) -> None:
        call, self._call = self._call, None  # what the call holds may go before the handle does
        try:
            if call is not None:
                self.result = call()
        except BaseException as error:
            self._error = error
        self._ended.set()

    def wait(self, seconds: float = -1.0) -> bool:
        """False if it has not ended within ``seconds``; raises what the call raised. Negative: no limit."""
        if not self._ended.wait(None if seconds < 0 else seconds):
            return False
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def done(self) -> bool:
        return self._ended.is_set()


class CallQueue:
    """Runs calls in the order in which they are made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = threading.Condition()
        self._pending: deque[QueuedCall] = deque()
        self._busy = False  # a call runs, on whichever thread
        self._worker: threading.Thread | None = None
        self._closed = False

    def run(self, call: Callable[[], Any]) -> Any:
        """Runs it on this thread if nothing is before it."""
        with self._state:
            inline = not self._busy and not self._pending
            if inline:
                self._busy = True
        if not inline:
            queued = self.submit(call)
            queued.wait()
            return queued.result
        try:
            return call()
        finally:
            self._leave()

    def submit(self, call: Callable[[], Any]) -> QueuedCall:
        """Runs it later, on the queue's thread."""
        queued = QueuedCall(call)
        with self._state:
            self._pending.append(queued)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"alltoallv-{self._name}", daemon=True)
                self._worker.start()
            self._state.notify_all()
        return queued

    @property
    def busy(self) -> bool:
        with self._state:
            return self._busy or bool(self._pending)

    def drain(self, seconds: float) -> bool:
        """Waits until nothing is pending; False if something still is after ``seconds``."""
        with self._state:
            return self._state.wait_for(lambda: not self._busy and not self._pending, seconds)

    def close(self) -> None:
        """Ends the thread once nothing is pending."""
        with self._state:
            self._closed = True
            self._state.notify_all()

    def _may_work(self) -> bool:
        return bool(self._pending or self._closed) and not self._busy

    def _leave(self) -> None:
        with self._state:
            self._busy = False
            self._state.notify_all()

    def _work(self) -> None:
        while True:
            with self._state:
                may_work = self._state.wait_for(self._may_work, _IDLE_SECONDS)
                if not self._pending:  # closed, or forgotten: no thread stays behind
                    self._worker = None
                    return
                if not may_work:
                    continue
                queued = self._pending.popleft()
                self._busy = True
            try:
                queued.run()
            finally:
                del queued
                self._leave()
