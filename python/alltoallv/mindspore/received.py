"""What an exchange returns where the counts lie on an NPU and the host does not know them."""

from __future__ import annotations

from typing import NamedTuple

from mindspore import Tensor

from alltoallv._calls.handle import raise_for


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
