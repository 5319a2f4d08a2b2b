"""Makes named ranges in torch.profiler, and in NVTX for CUDA tensors.

Every collective is a range ``alltoallv.<operator>`` of the calling thread: the whole call, or the launch with
``async_op=True``, whose wait is a range ``alltoallv.wait``. With ``torch.profiler.profile(record_shapes=True)`` it
carries the bytes that this rank sends and receives, the group, the rank and the counts; they stand in the events'
``kwinputs`` and in the exported trace. Without a profiler a range costs one check. NVIDIA's tools name a library in a
variable before the process starts, which NVTX then loads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import _profiler_enabled

from alltoallv._calls.guard import Member

_nothing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
_nvtx = any(os.environ.get(f"NVTX_INJECTION{bits}_PATH") for bits in (64, 32))
_SHOWN = 64  # counts shown; counts of further ranks are cut


def span(
    operator: str,
    communicator: Member,
    itemsize: int,
    sends: Sequence[int],
    recvs: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    cuda: bool = False,
) -> contextlib.AbstractContextManager[Any]:
    """Opens the range of one call; ``sends`` and ``recvs`` are in elements of ``itemsize`` bytes; None: unknown yet."""
    nvtx = cuda and _nvtx
    if not (nvtx or _profiler_enabled()):
        return _nothing
    values: dict[str, Any] = {
        "group": communicator.domain,
        "rank": communicator.rank,
        "bytes_sent": sum(sends) * itemsize,
        "send_counts": _text(sends),
    }
    if recvs is not None:
        values |= {"bytes_received": sum(recvs) * itemsize, "recv_counts": _text(recvs)}
    if async_op:
        values["async"] = "True"
    return _range(f"alltoallv.{operator}", values, nvtx)


def waiting() -> contextlib.AbstractContextManager[Any]:
    """Opens the range of a wait for an asynchronous call."""
    return _range("alltoallv.wait", {}, False) if _profiler_enabled() else _nothing


def _range(name: str, values: dict[str, Any], nvtx: bool) -> contextlib.AbstractContextManager[Any]:
    recorded: contextlib.AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(name, [], values)
    if not nvtx:
        return recorded
    stack = contextlib.ExitStack()
    text = " ".join([name, *(f"{key}={value}" for key, value in values.items())])
    stack.enter_context(torch.cuda.nvtx.range(text.replace("{", "").replace("}", "")))
    stack.enter_context(recorded)
    return stack


def _text(counts: Sequence[int]) -> str:
    shown = ", ".join(map(str, counts[:_SHOWN]))
    return f"[{shown}{', ...' if len(counts) > _SHOWN else ''}]"
