"""The handle of an asynchronous call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch.autograd import _profiler_enabled

from alltoallv._calls.handle import Ended, Handle
from alltoallv.torch.eager import profile

Future: TypeAlias = torch.futures.Future[Any]
_LONG = 1e9  # seconds


class Work(Handle):
    """An operator under way, with the methods of ``torch.distributed.Work``.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """

    _seen = staticmethod(_profiler_enabled)

    def _waiting(self) -> contextlib.AbstractContextManager[Any]:
        return profile.waiting()

    def _seconds(self, timeout: Any) -> float | None:
        if isinstance(timeout, timedelta):
            return timeout.total_seconds() or None  # torch's zero means no limit
        return super()._seconds(timeout)

    def is_success(self) -> bool:
        """Returns True once the operator has succeeded."""
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        """Waits for the operator: its memory is the host's, which has no streams."""
        self.wait()

    def get_future(self) -> Future:
        """Returns a future of the output, completed by a thread that waits for the operator.

        It raises errors as RuntimeError, with their class and text in the message.
        """

        def result() -> Any:
            self.wait(_LONG)  # this thread has no stream of its own that anybody could use
            return self.result()

        outcome, future = promise()
        threading.Thread(target=settle, args=(outcome, result), name="alltoallv-future", daemon=True).start()
        return future


class Done(Ended, Work):
    """The handle of a call in a graph, which is done when it returns."""


def promise() -> tuple[Future, Future]:
    """Returns a future to `settle`, and the one for the caller, which then has the result or raises the error."""
    outcome: Future = torch.futures.Future()
    # torch's C++ would take a value of `set_exception` for a result; it recognizes an error that a callback raises.
    return outcome, outcome.then(_unwrap)


def settle(outcome: Future, result: Callable[[], Any]) -> None:
    """Completes a future of `promise` with what ``result()`` returns or raises."""
    try:
        outcome.set_result((result(), None))
    except Exception as error:
        outcome.set_result((None, error))


def _unwrap(outcome: Future) -> Any:
    result, error = outcome.value()
    if error is not None:
        raise error.with_traceback(None)
    return result
