"""The handle of a call."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from alltoallv._calls.guard import Member, Pending
from alltoallv._calls.handle import Ended, Handle


class Task(Handle):
    """An operator under way or done, with the methods of Paddle's task.

    The tensors that it uses stay alive until it is done, even if the handle is dropped.
    """

    def __init__(self, communicator: Member, core: Pending, keep: tuple[Any, ...], finish: Callable[[], Any]) -> None:
        self.communicator: Member = communicator
        super().__init__(communicator, core, keep, finish)

    def is_sync(self) -> bool:
        """True if the call had ended when it returned this handle."""
        return False

    def synchronize(self) -> None:
        """Waits like `wait`: the memory is the host's."""
        self.wait()

    def _seconds(self, timeout: Any) -> float | None:
        """Converts Paddle's timedelta, in which 0, its default, means no limit."""
        if isinstance(timeout, datetime.timedelta):
            return timeout.total_seconds() or None
        return super()._seconds(timeout)


class Done(Ended, Task):
    """The handle of a call with ``sync_op=True``."""

    def is_sync(self) -> bool:
        """Returns True."""
        return True
