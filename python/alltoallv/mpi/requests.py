"""Requests, and what a Status tells of a message."""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError
from alltoallv.mpi.constants import ANY_SOURCE, ANY_TAG, SUCCESS, UNDEFINED
from alltoallv.mpi.datatypes import BYTE, Datatype, of
from alltoallv.numpy import MessageWork


class Status:
    """Tells the source, the tag and the size of a message that has been received or found."""

    def __init__(self, status: Status | None = None) -> None:
        self.source, self.tag, self.error, self._bytes = ANY_SOURCE, ANY_TAG, SUCCESS, 0
        if status is not None:
            self.__dict__.update(status.__dict__)

    def Get_source(self) -> int:
        return self.source

    def Set_source(self, source: int) -> None:
        self.source = source

    def Get_tag(self) -> int:
        return self.tag

    def Set_tag(self, tag: int) -> None:
        self.tag = tag

    def Get_error(self) -> int:
        return self.error

    def Set_error(self, error: int) -> None:
        self.error = error

    def Get_count(self, datatype: Datatype | str = BYTE) -> int:
        """Returns how many of a type the message has; UNDEFINED if it does not end with one."""
        size = of(datatype).Get_size()
        if size == 0:
            return 0
        return self._bytes // size if self._bytes % size == 0 else UNDEFINED

    def Get_elements(self, datatype: Datatype | str) -> int:
        return self.Get_count(Datatype(of(datatype).dtype))

    def Set_elements(self, datatype: Datatype | str, count: int) -> None:
        self._bytes = of(datatype).Get_size() * count

    count = property(Get_count)

    def Is_cancelled(self) -> bool:
        return False

    cancelled = property(Is_cancelled)

    def fill(self, source: int, tag: int, nbytes: int) -> None:
        self.source, self.tag, self.error, self._bytes = source, tag, SUCCESS, nbytes


def fill(status: Status | None, source: int, tag: int, nbytes: int) -> None:
    if status is not None:
        status.fill(source, tag, nbytes)


class Request:
    """A call under way; once it is waited for there is nothing left, and it is like REQUEST_NULL.

    Args:
        work: What `alltoallv.numpy` returned, or nothing where nothing is under way.
        finish: Makes the call's result when that is done; gets a Status to fill, or None.
    """

    def __init__(self, work: Any = None, finish: Callable[[Status | None], Any] | None = None) -> None:
        self._work, self._finish = work, finish

    def _is_null(self) -> bool:
        return self._work is None and self._finish is None

    def _is_active(self) -> bool:
        """Returns whether there is something to wait for."""
        return not self._is_null()

    def _done(self) -> bool:
        if self._work is None or self._work.is_completed():
            return True
        self._look(2e-5)  # so that a program that asks again and again lets it move on
        return bool(self._work.is_completed())

    def _look(self, seconds: float = 1e-3) -> None:
        """Lets it move on for a moment."""
        if self._work is not None:
            with contextlib.suppress(TimeoutError):
                self._work.wait(seconds)

    def _complete(self, status: Status | None) -> Any:
        if self._work is not None:
            self._work.wait()
        work, finish = self._work, self._finish
        self._work = self._finish = None
        _tell(work, status)
        return finish(status) if finish is not None else None

    def wait(self, status: Status | None = None) -> Any:
        """Returns the object of a lower-case call when it is done."""
        return self._complete(status)

    def Wait(self, status: Status | None = None) -> bool:
        self._complete(status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        if not self._done():
            return False, None
        return True, self._complete(status)

    def Test(self, status: Status | None = None) -> bool:
        return self.test(status)[0]

    def Get_status(self, status: Status | None = None) -> bool:
        done = self._done()
        if done:
            _tell(self._work, status)
        return done

    get_status = Get_status

    def Free(self) -> None:
        self._work = self._finish = None  # a send goes on, see Handle

    def Cancel(self) -> None:
        if not self._is_null():
            raise NotImplementedError("Request.Cancel is not in alltoallv.mpi, expected a message that is received")

    cancel = Cancel

    def __bool__(self) -> bool:
        return not self._is_null()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Request) and self._is_null() and other._is_null())

    __hash__ = object.__hash__

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> bool:
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> list[Any]:
        slots = _statuses(requests, statuses)
        return [request._complete(slot) for request, slot in zip(requests, slots, strict=True)]

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> bool:
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        if not all(request._done() for request in requests):
            return False, None
        return True, cls.waitall(requests, statuses)

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        while True:
            index, flag, result = cls.testany(requests, status)
            if flag:
                return index, result
            next(request for request in requests if request._is_active())._look()

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        under_way = [index for index, request in enumerate(requests) if request._is_active()]
        for index in under_way:
            if requests[index]._done():
                return index, True, requests[index]._complete(status)
        if not under_way and status is not None:
            status.fill(ANY_SOURCE, ANY_TAG, 0)
        return UNDEFINED, not under_way, None

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> list[int] | None:
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        while True:
            done, results = cls.testsome(requests, statuses)
            if done is None or done:
                return done, results
            next(request for request in requests if request._is_active())._look()

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> list[int] | None:
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        under_way = [index for index, request in enumerate(requests) if request._is_active()]
        if not under_way:
            return None, None
        done = [index for index in under_way if requests[index]._done()]
        slots = _statuses(done, statuses)
        return done, [requests[index]._complete(slot) for index, slot in zip(done, slots, strict=True)]


class Prequest(Request):
    """A call that is started again and again, until it is freed."""

    def __init__(self, begin: Callable[[], Request]) -> None:
        super().__init__()
        self._begin: Callable[[], Request] | None = begin

    def _is_null(self) -> bool:
        return self._begin is None

    def _is_active(self) -> bool:
        return super()._is_null() is False

    def Free(self) -> None:
        super().Free()
        self._begin = None

    def Start(self) -> None:
        if self._begin is None or self._is_active():
            raise InvalidParamError("the request is under way or freed, expected one that can be started", id=1393)
        begun = self._begin()
        self._work, self._finish = begun._work, begun._finish

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        for request in requests:
            request.Start()


REQUEST_NULL = Request()


def _tell(work: Any, status: Status | None) -> None:
    """Fills a status with what a call that is done has received."""
    if isinstance(work, MessageWork) and work.source >= 0 and work.result() is not None:
        fill(status, work.source, work.tag, work.count * work.result().itemsize)
    else:
        fill(status, ANY_SOURCE, ANY_TAG, 0)


def _statuses(requests: Sequence[Any], statuses: Sequence[Status] | None) -> list[Status | None]:
    """Returns a status for each request; a list that is too short gets more."""
    if statuses is None:
        return [None] * len(requests)
    if isinstance(statuses, list):
        statuses.extend(Status() for _ in range(len(requests) - len(statuses)))
    return [*statuses[: len(requests)], *[None] * (len(requests) - len(statuses))]


_sent: list[tuple[Communicator, Any]] = []  # sends that have returned before they were received


def let_go(comm: Communicator, work: Any) -> None:
    """Keeps a send of a copy, which its caller does not wait for."""
    _forget_received()
    _sent.append((comm, work))


def _forget_received() -> None:
    _sent[:] = [each for each in _sent if not each[1].is_completed()]


def wait_for_sends(comm: Communicator | None = None) -> None:
    """Waits until what has been sent in ``comm``, or anywhere, is received, or its receiver has left."""
    for where, work in [*_sent]:
        if comm in (None, where):
            with contextlib.suppress(AllToAllVError):
                work.wait()
    _forget_received()


@atexit.register
def _finalize() -> None:
    if getattr(sys, "last_value", None) is None:  # after an error nobody may come to receive
        wait_for_sends()
