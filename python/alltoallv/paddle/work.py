"""The handle of a call."""

from __future__ import annotations

from typing import Any

from alltoallv._calls.handle import Ended, Handle


class Task(Handle):
    """An operator under way or done, with the methods of Paddle's task.

    The tensors it uses stay alive until it is done, also when the handle is dropped.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the operator is done, at most ``timeout`` seconds; returns True.

        Raises:
            CommTimeoutError: not done in time; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        self._wait(timeout)
        return True

    def is_sync(self) -> bool:
        """Whether the call had ended when it returned this handle."""
        return False

    def synchronize(self) -> None:
        """The same as `wait`: the memory is the host's."""
        self.wait()

    def result(self) -> Any:
        """The output, after a wait."""
        self.wait()
        return self._result


class Done(Ended, Task):
    """The handle of a call with ``sync_op=True``."""

    def is_sync(self) -> bool:
        """True."""
        return True
