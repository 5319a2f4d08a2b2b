"""The handle of an asynchronous call."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch

from alltoallv._calls.handle import Ended, Handle
from alltoallv.torch.api import profile

_LONG = 1e9  # seconds


class Work(Handle):
    """An operator under way, with the methods of ``torch.distributed.Work``.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Blocks until the operator is done, at most ``timeout`` (seconds or a timedelta); returns True.

        Raises:
            CommTimeoutError: not done in time; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds() or None  # torch's zero means no limit
        self._wait(timeout)
        return True

    def _waiting(self) -> contextlib.AbstractContextManager[Any]:
        return profile.waiting()

    def is_success(self) -> bool:
        """True once the operator has succeeded."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Waits: the memory is the host's."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output, completed by a thread that waits for the operator.

        It raises errors as RuntimeError, with their class and text in the message.
        """
        outcome: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait(_LONG)  # on the host: a stream of this thread is nobody else's
                outcome.set_result((self.result(), None))
            except Exception as error:
                outcome.set_result((None, error))

        # torch's C++ takes what `set_exception` leaves for a result; an error of a callback it sees as an error.
        future = outcome.then(unwrap)
        threading.Thread(target=complete, name="alltoallv-future", daemon=True).start()
        return future


class Done(Ended, Work):
    """The handle of a call in a graph."""


def unwrap(outcome: torch.futures.Future[Any]) -> Any:
    """The result in a future of (result, error); raises the error."""
    result, error = outcome.value()
    if error is not None:
        raise error.with_traceback(None)
    return result
