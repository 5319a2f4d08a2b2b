"""Keeps the ranks together when one fails: the guard of every front end, lockstep in calls of several operators, and
what they need of any communicator.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import packed
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, PeerMismatchError


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
