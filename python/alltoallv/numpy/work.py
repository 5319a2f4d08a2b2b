"""The handle of an asynchronous call."""

from __future__ import annotations

from typing import Any

from alltoallv._calls.handle import Handle


class Work(Handle):
    """An operator under way. The arrays it uses stay alive until it is done, also when the handle is dropped."""

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the operator is done; returns its output.

        Args:
            timeout: Seconds; None waits as long as the communicator's own timeout allows.

        Raises:
            CommTimeoutError: not done after ``timeout``; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        return self._wait(timeout)
