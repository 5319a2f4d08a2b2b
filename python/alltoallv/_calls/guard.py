"""Surrounds a call of the core: before it the guard, which keeps the ranks together when one fails, and lockstep in
calls of several operators; after it the handle. Describes what they need of any communicator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import packed
from alltoallv.communicator import Communicator
from alltoallv.communicator import pending as _pending
from alltoallv.errors import AllToAllVError, CommTimeoutError, InvalidParamError, PeerMismatchError


class Pending(Protocol):
    """A call under way."""

    def wait(self, seconds: float = -1.0) -> bool:
        """Returns False if the call is not done within ``seconds``; raises what it raised. Negative: no limit."""

    def done(self) -> bool:
        """Returns True once the call has succeeded or failed."""


class Call(Protocol):
    """A call that has passed its checks. Timeouts are in seconds; below 0 the communicator's own holds."""

    def run(self, timeout: float = -1.0) -> Any: ...
    def submit(self, timeout: float = -1.0) -> Pending: ...


@runtime_checkable
class Member(Protocol):
    """A rank's membership in a group, whichever engine moves its data: what guards, handles and users need of it.

    `alltoallv.Communicator` (shared memory) is one, so is every communicator of `alltoallv.torch.engines`.
    """

    rank: int
    size: int
    domain: str
    backend: str

    @property
    def usable(self) -> bool: ...
    def fail(self, operator: str, error: BaseException) -> None: ...
    def keep(self, pending: Any) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def flight_record(self) -> dict[str, Any]: ...
    def abort(self, reason: str = ...) -> None: ...
    def destroy(self) -> None: ...


class guard:
    """Surrounds all that a front end does between finding the communicator and starting the operator.

    An exception inside is announced to the peers, whose call of this operator then also raises it, and it propagates.
    Without a communicator, as while a graph is recorded, no peer is notified, and never of the classes ``local``, where
    the framework's own functions raise those before they communicate: a program may catch them and go on.
    """

    __slots__ = ("_communicator", "_local", "_operator")

    def __init__(
        self, communicator: Member | None, operator: str, local: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> None:
        self._communicator = communicator
        self._operator = operator
        self._local = local

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._communicator is not None and not isinstance(error, self._local):
            with contextlib.suppress(AllToAllVError):  # nobody is left to inform: the first error counts
                self._communicator.fail(self._operator, error)


class lockstep:
    """Surrounds a call in ``parts``, as many on all ranks, or raises PeerMismatchError before the first.

    When a part fails, some ranks have already begun later ones, which others never reach. So every rank waits until all
    have seen the failure; what they still had under way also fails. Then their next calls meet. A call of one part, and
    one over a device's engine, needs nothing of that.
    """

    def __init__(self, communicator: Any, parts: int) -> None:
        member = isinstance(communicator, Communicator) and communicator.host_core is not None
        self._communicator: Communicator | None = communicator if member and parts > 1 else None
        self._parts = parts

    def __enter__(self) -> None:
        if (comm := self._communicator) is None:
            return
        every = _gathered(comm, self._parts)
        for rank, parts in enumerate(every.tolist()):  # without a check nobody has compared them
            if every[0] != parts:
                raise PeerMismatchError(
                    f"rank 0 begins a call in {every[0]} chunks, rank {rank} begins a call in {parts} chunks", id=3027
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        comm = self._communicator
        while comm is not None and isinstance(error, Exception) and comm.usable:
            try:
                if not _gathered(comm, 0).any():
                    return
            except AllToAllVError:  # it met what a peer still had under way
                continue


def _gathered(comm: Communicator, number: int) -> npt.NDArray[np.int64]:
    """Returns the numbers of all ranks. As bytes, so that it meets no exchange of counts."""
    own_number, size = np.array([number], np.int64), [8] * comm.size
    every = np.empty(comm.size, np.int64)
    plan = _core.Plan(comm.core, "exchange_counts", "uint8", size, [0] * comm.size, size, packed(size), terms=number)
    plan.run(own_number.ctypes.data, every.ctypes.data)
    return every


# Handles of asynchronous calls, to which each front end adds its framework's methods.


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
