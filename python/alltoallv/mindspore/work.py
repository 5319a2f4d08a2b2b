"""The handle of an asynchronous call, and what an exchange returns where the counts lie on an NPU and the host does not
know them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspore import Tensor
from mindspore._c_expression import CommHandle as Native
from mindspore.communication import comm_func
from mindspore.ops.function import comm_func as functions

from alltoallv._calls.guard import Ended, Handle, raise_for


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


class Received(NamedTuple):
    """The result of an exchange with a capacity: three tensors, filled when MindSpore's queue reaches the call.

    Attributes:
        output: The input's dtype: ``capacity`` rows, or elements, of which the first are what was received, packed in
            the order of the ranks; zeros behind. That of `AllToAllVOperation` has the shape ``[1, capacity]``.
        recv_counts: int64, shape ``[W]``: how many came from each rank.
        status: int32; its column 0 is zeros, or describes what went wrong, the same on all ranks; `check` reads it.
    """

    output: Tensor
    recv_counts: Tensor
    status: Tensor

    def check(self) -> Received:
        """Waits for the device, and returns this result if the exchange was done.

        Raises:
            InvalidParamError, PeerMismatchError, CommTimeoutError: On every rank, as `alltoallv.torch.Received.check`.
        """
        raise_for(self.status.asnumpy().tolist())
        return self
