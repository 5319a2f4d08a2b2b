"""The handle of an asynchronous call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from alltoallv.backends.protocol import Member, Pending
from alltoallv.communicator import release
from alltoallv.errors import AllToAllVError, CommTimeoutError
from alltoallv.torch import profile

_LONG = 1e9  # seconds


class Work:
    """An operator under way, with the methods of ``torch.distributed.Work``.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """

    def __init__(
        self,
        communicator: Member,
        core: Pending,
        keep: tuple[Any, ...],
        finish: Callable[[], Any],
    ) -> None:
        self._core = core
        self._keep: tuple[Any, ...] = keep
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        communicator.keep(self)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Blocks until the operator is done, at most ``timeout`` (seconds or a timedelta); returns True.

        Raises:
            CommTimeoutError: not done in time; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds() or None  # torch's zero means no limit
        try:
            with profile.waiting():
                done = self._core.wait(-1.0 if timeout is None else float(timeout))
        except AllToAllVError:
            self._let_go()
            raise
        if not done:
            raise CommTimeoutError(f"the operator was not done after {timeout} s; it is still under way")
        if self._finish is not None:
            self._result = self._finish()
            self._let_go()
        return True

    def _let_go(self) -> None:
        self._keep, self._finish = (), None
        release(self)

    def is_completed(self) -> bool:
        """True once the operator has succeeded or failed."""
        return self._core.done()

    def is_success(self) -> bool:
        """True once the operator has succeeded."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the operator raised; None if it succeeded or is still under way."""
        if not self._core.done():
            return None
        try:
            self._core.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> Any:
        """The output, after a wait."""
        self.wait()
        return self._result

    def synchronize(self) -> None:
        """The same as `wait`: the memory is the host's."""
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


def unwrap(outcome: torch.futures.Future[Any]) -> Any:
    """The result in a future of (result, error); raises the error."""
    result, error = outcome.value()
    if error is not None:
        raise error.with_traceback(None)
    return result
