"""Declares the methods that front ends need of any communicator, and of a call under way."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


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
