"""The base of all handles of asynchronous calls, to which each front end adds its framework's methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from alltoallv._calls.guard import Member, Pending
from alltoallv.communicator import pending as _pending
from alltoallv.errors import AllToAllVError, CommTimeoutError, InvalidParamError, PeerMismatchError


class Handle:
    """An operator under way. The tensors it uses stay alive until it is done, even when the handle is dropped."""

    def __init__(self, communicator: Member, core: Pending, keep: tuple[Any, ...], finish: Callable[[], Any]) -> None:
        self._core = core
        self._keep: tuple[Any, ...] = keep
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        communicator.keep(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the operator is done, at most ``timeout`` seconds; returns True.

        Raises:
            CommTimeoutError: not done in time; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        if timeout is not None and not isinstance(timeout, int | float):
            timeout = self._seconds(timeout)
        limit = -1.0 if timeout is None else max(0.0, timeout)
        try:
            if self._seen():
                with self._waiting():
                    done = self._core.wait(limit)
            else:
                done = self._core.wait(limit)
        except AllToAllVError:
            self._let_go()
            raise
        if not done:
            raise CommTimeoutError(f"the operator was not done after {timeout} s; it is still under way", id=4042)
        if self._finish is not None:
            self._result = self._finish()
            self._keep, self._finish = (), None
            _pending.discard(self)
        return True

    _seen: ClassVar[Any] = staticmethod(bool)  # whether somebody sees waits as `_waiting` shows them

    def _waiting(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that surrounds a wait."""
        return contextlib.nullcontext()

    def _seconds(self, timeout: Any) -> float | None:
        """Converts a timeout that is not a number, if the framework has one."""
        raise TypeError(f"timeout is {timeout!r}, expected seconds or None")

    def result(self) -> Any:
        """Waits for the operator, without a time limit of its own, and returns the output."""
        self.wait()
        return self._result

    def _let_go(self) -> None:
        self._keep, self._finish = (), None
        _pending.discard(self)

    def is_completed(self) -> bool:
        """Returns True once the operator has succeeded or failed."""
        return self._core.done()

    def exception(self) -> BaseException | None:
        """Returns what the operator raised; None if it succeeded or is still under way."""
        if not self._core.done():
            return None
        try:
            self._core.wait()
        except Exception as error:
            return error
        return None


class Ended:
    """A handle of a call that was already done when it returned. List it before a kind of `Handle` among the bases."""

    def __init__(self, output: Any) -> None:
        self._result = output

    def wait(self, timeout: Any = None) -> bool:
        """Returns True."""
        return True

    def result(self) -> Any:
        """Returns the output."""
        return self._result

    def is_completed(self) -> bool:
        """Returns True."""
        return True

    def exception(self) -> None:
        """Returns None."""


# What a device says of an all_to_all_v whose counts lie on it.


COUNT_NAMES = "send_counts", "sdispls", "recv_counts"
STATUS_SHAPE = (48, 8)  # words for the most cores that a kernel has

_LATE = CommTimeoutError, "rank {} did not come in time, now or in an earlier call"
_ERRORS: dict[int, tuple[type[AllToAllVError], str]] = {
    4: (InvalidParamError, "rank {} receives more than its capacity"),
    5: (InvalidParamError, "rank {} has a negative count in send_counts, or a region outside of its input"),
    6: (PeerMismatchError, "rank {} has rows of another size than rank 0"),
    7: (PeerMismatchError, "rank {} receives other counts than its recv_counts"),
}


def raise_for(status: Sequence[Sequence[int]]) -> None:
    """Raises what a status of `STATUS_SHAPE` says, if it says anything."""
    for code, rank, *_ in status:
        if code != 0:
            kind, text = _ERRORS.get(code, _LATE)
            raise kind(f"all_to_all_v with a capacity: {text.format(rank)}")
