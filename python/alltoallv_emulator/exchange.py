"""Exchanges rows in host memory over an emulated HCCL communicator, without torch_npu's process group.

The operators that communicate wait for each of their exchanges at once. A process group's events, streams and threads,
which let a program go on meanwhile, would only cost them time.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from alltoallv_emulator import library_folder

__all__ = ["all_to_all"]


@functools.cache
def _function() -> Any:
    function = ctypes.CDLL(str(library_folder() / "libhccl.so")).AlltoallvEmulatorExchange
    pointer, counts = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)
    function.argtypes = [pointer, counts, pointer, counts, pointer]
    return function


def all_to_all(
    group: Any, device: torch.device, rows: torch.Tensor, sends: Sequence[int], recvs: Sequence[int]
) -> torch.Tensor:
    """Sends ``sends[j]`` rows to rank j; returns the ``recvs[j]`` rows of every rank j, in rank order.

    Args:
        group: A ProcessGroup of torch_npu, whose communicator is used.
        device: The npu of this rank.
        rows: In host memory, sorted by the rank that they go to.
        sends: The number of rows for each rank.
        recvs: The number of rows from each rank.

    Raises:
        RuntimeError: HCCL refuses the call, or it fails.
    """
    torch.npu.synchronize(device)  # calls of a communicator on other streams come first
    rows = rows.contiguous()
    width = math.prod(rows.shape[1:]) * rows.itemsize
    output = rows.new_empty(sum(recvs), *rows.shape[1:])
    array = ctypes.c_uint64 * len(sends)
    nbytes = [array(*(count * width for count in counts)) for counts in (sends, recvs)]
    # torch_npu takes the device from a rank; of another device it would begin to make a second communicator.
    comm = group._get_backend(device).get_hccl_comm(device.index)
    result = _function()(rows.data_ptr(), nbytes[0], output.data_ptr(), nbytes[1], comm)
    if result != 0:
        raise RuntimeError(f"HcclAlltoAllV returned {result}, expected 0; its reason is on standard error")
    return output
