"""What `all_to_all_v` returns where the counts lie on an NPU and the host does not know them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alltoallv._calls.counts import Counts
from alltoallv._calls.handle import raise_for
from alltoallv.errors import InvalidParamError


class Received(NamedTuple):
    """The result of an `all_to_all_v` with a capacity: three tensors on the device, filled by the device.

    Attributes:
        output: The input's dtype: ``capacity`` rows, or elements, of which the first are what was received, packed in
            the order of the ranks; zeros behind.
        recv_counts: int64, shape ``[W]``: how many came from each rank.
        status: int32; its column 0 is zeros, or describes what went wrong, the same on all ranks; `check` reads it.
    """

    output: Tensor
    recv_counts: Tensor
    status: Tensor

    def check(self) -> Received:
        """Waits for the device, and returns this result if the exchange was done; may be called when it suits.

        Raises:
            InvalidParamError: On every rank: one receives more than its capacity, or has counts that do not fit its
                input. Nothing was written anywhere, and the communicator stays usable.
            PeerMismatchError: The same for rows of different sizes, or counts that are not the ``recv_counts`` given.
            CommTimeoutError: A rank did not come in time (HCCL_EXEC_TIMEOUT); the group's kernels are of no more use.
        """
        raise_for(self.status.cpu().tolist())
        return self


def counts_on_device(name: str, counts: Counts, device: torch.device, size: int) -> Tensor:
    """Returns counts as int64 on the device; those that lie there are not read by the host."""
    tensor = counts if isinstance(counts, Tensor) else torch.tensor(list(counts), dtype=torch.int64, device="cpu")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
        raise InvalidParamError(f"{name} has dtype {tensor.dtype}, expected integers", id=1432)
    if tuple(tensor.shape) != (size,):
        raise InvalidParamError(
            f"{name} has shape {tuple(tensor.shape)}, expected ({size},), one entry per rank", id=1433
        )
    return tensor.to(device, torch.int64).contiguous()
