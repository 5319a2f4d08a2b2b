"""Exchanges rows in host memory over an emulated HCCL communicator, without torch_npu's process group.

The operators that communicate wait for each of their exchanges at once. A process group's events, streams and threads,
which let a program go on meanwhile, would only cost them time.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from alltoallv_emulator import library_folder
from alltoallv_emulator.host_views import host_view, synchronize, to_npu

__all__ = ["all_to_all"]

_UINT8 = 7  # HCCL_DATA_TYPE_UINT8


@functools.cache
def _function() -> Any:
    function = ctypes.CDLL(str(library_folder() / "libhccl.so")).HcclAlltoAllV
    counts, pointer, kind = ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, counts, counts, kind, pointer, counts, counts, kind, pointer, pointer]
    return function


def _regions(counts: Sequence[int], width: int) -> tuple[Any, Any]:
    """Returns the numbers of bytes and the places of the ranks' rows, which are packed."""
    nbytes = [count * width for count in counts]
    array = ctypes.c_uint64 * len(counts)
    return array(*nbytes), array(*accumulate(nbytes[:-1], initial=0))


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
    width = math.prod(rows.shape[1:]) * rows.itemsize
    moved = to_npu(rows.reshape(-1).view(torch.uint8), device)
    output = torch.empty(sum(recvs) * width, dtype=torch.uint8, device=device)
    input_regions, output_regions = _regions(sends, width), _regions(recvs, width)
    comm = group._get_backend(device).get_hccl_comm(dist.get_rank())
    result = _function()(
        moved.data_ptr(), *input_regions, _UINT8, output.data_ptr(), *output_regions, _UINT8,
        comm, torch.npu.current_stream(device).npu_stream,
    )  # fmt: skip
    if result != 0:
        raise RuntimeError(f"HcclAlltoAllV returned {result}, expected 0; its reason is on standard error")
    synchronize(device)
    return host_view(output).clone().view(rows.dtype).view(sum(recvs), *rows.shape[1:])
