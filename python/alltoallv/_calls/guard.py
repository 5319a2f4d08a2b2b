"""The guard of every front end: a rank that fails its own checks makes its peers fail as well."""

from __future__ import annotations

import contextlib
from types import TracebackType

from alltoallv._calls.protocol import Member
from alltoallv.errors import AllToAllVError


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
