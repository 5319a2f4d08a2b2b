"""The handle of an asynchronous call."""

from __future__ import annotations

from typing import Any

from mindspore._c_expression import CommHandle as Native
from mindspore.communication import comm_func
from mindspore.ops.function import comm_func as functions

from alltoallv._calls.handle import Ended, Handle


class CommHandle(Handle, functions.CommHandle, comm_func.CommHandle):
    """A running operator: MindSpore's ``CommHandle``, with a few methods more.

    The tensors that it uses stay alive until it is done, even if the handle is dropped.
    """

    def __new__(cls, *_arguments: Any) -> CommHandle:
        handle: CommHandle = super().__new__(cls)
        Native.__init__(handle)
        return handle

    def wait(self, timeout: float | None = None) -> None:  # type: ignore[override]
        """Blocks until the operator is done, at most ``timeout`` seconds.

        Raises:
            CommTimeoutError: not done in time; it is still under way and may be waited for again.
            AllToAllVError: whatever the operator raised.
        """
        Handle.wait(self, timeout)


class Done(Ended, CommHandle):
    """The handle of a call that ended before it returned."""

    def wait(self, timeout: Any = None) -> None:  # type: ignore[override]
        """Returns at once."""
