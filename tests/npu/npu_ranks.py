"""What a rank of the NPU tests does first and last, and tensors with given bits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

import alltoallv.torch as at
import alltoallv_emulator as emulator
from alltoallv import Communicator
from alltoallv.testing import golden

#: ATB's seven, and dtypes that HCCL has under other names or not at all.
ATB_DTYPES = ("float16", "float32", "int8", "int32", "int16", "int64", "bfloat16")
DTYPES = (*ATB_DTYPES, "bool", "uint8", "float64", "complex64", "complex128", "float8_e5m2")


_PR_SET_TIMERSLACK = 29


def use_device(rank: int) -> torch.device:
    """Device ``rank``, with torch_npu and compute on it."""
    # A thread of torch_npu's looks every 50 us for what there is to release: five ranks that idle take a processor.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(500_000))  # ns; threads inherit it

    import torch_npu  # noqa: F401

    from alltoallv_emulator import aten

    aten.install()
    device = torch.device(f"npu:{rank}")
    torch.npu.set_device(device)
    return device


def meet() -> None:
    """Returns when all ranks are here: importing torch_npu takes them longer than the times that tests then set."""
    Communicator.from_env("all are here", timeout=50).destroy()


@contextlib.contextmanager
def communicator(rank: int, **options: Any) -> Iterator[tuple[Communicator, torch.device]]:
    """Of all ranks, over HCCL."""
    device = use_device(rank)
    with Communicator.from_env(**{"backend": "hccl", "timeout": 30.0} | options) as comm:
        yield comm, device


@contextlib.contextmanager
def group(rank: int, size: int, file: str, backend: str = "hccl") -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The default group of torch_npu's own HCCL; the ranks meet in ``file``, which no group has used before."""
    device = use_device(rank)
    store = dist.FileStore(file, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    made = dist.group.WORLD
    assert made is not None
    try:
        yield made, device
    finally:
        torch.npu.synchronize()
        dist.destroy_process_group()


@contextlib.contextmanager
def emulated(**options: Any) -> Iterator[None]:
    """Settings of the emulator for a while, in this process."""
    usual = {"devices": 8, "task_delay_us": 0, "faults": "", "exec_timeout": -1, "connect_timeout": -1}
    usual |= {"late_counts": 0, "memory_mb": 8192, "order": os.environ["ALLTOALLV_EMULATOR_ORDER"]}
    for name, value in options.items():
        emulator.set_option(name, value)
    try:
        yield
    finally:
        for name in options:
            emulator.set_option(name, usual[name])


def memory_used(device: torch.device) -> int:
    """Bytes of the device's memory, HCCL's buffers among them."""
    free, total = torch.npu.mem_get_info(device)
    used: int = total - free
    return used


def on(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    """A copy with the same bits; ml_dtypes' dtypes too."""
    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype).to(device)
    data = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    return data.view(dtype).view(array.shape).to(device)


def bits(tensor: Tensor) -> npt.NDArray[Any]:
    """The values, in host memory."""
    data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return data.view(golden.dtype_of(str(tensor.dtype).removeprefix("torch."))).reshape(tensor.shape)


def moved(case: golden.Case, rank: int, device: torch.device, **options: Any) -> npt.NDArray[Any]:
    """What all_to_all_v writes into the output of the case, and returns; ``options`` are its other arguments."""
    out = on(device, case.outputs[rank])
    layout = {"sdispls": case.sdispls[rank], "rdispls": case.rdispls[rank], "out": out}
    x, sends, recvs = on(device, case.inputs[rank]), case.send_counts[rank], case.recv_counts[rank]
    result: Any = at.all_to_all_v(x, sends, recvs, **layout, **options)
    if options.get("async_op"):
        result[1].wait()
    else:
        assert result is out
    return bits(out)


def exchange(comm: Any, device: torch.device) -> list[float]:
    """Sends the rank to every rank; returns what all have sent, on success their numbers."""
    size = comm.size
    x = torch.full((size,), float(comm.rank)).to(device)
    result: list[float] = at.all_to_all_v(x, [1] * size, [1] * size, group=comm).cpu().tolist()
    return result


def caught_or(call: Callable[[], object]) -> object:
    """What the call returns, or raises."""
    try:
        return call()
    except Exception as error:
        return error


def caught(call: Callable[[], object]) -> Exception:
    """What the call raises."""
    error = caught_or(call)
    assert isinstance(error, Exception), "nothing was raised"
    return error


def ended(comm: Communicator) -> None:
    """Waits until the communicator is of no use any more."""
    end = time.monotonic() + 20
    while comm.usable and time.monotonic() < end:
        time.sleep(0.01)
    assert not comm.usable


def wait_at_most(comm: Communicator, seconds: float) -> None:
    """Ranks wait for each other's calls for so long from now on; to join took as long as it may on a busy machine."""
    assert comm.core.control is not None
    comm.core.control.set_timeout(seconds)


def zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size).to(device)


def wait_for(file: Path) -> None:
    """Until a peer has made it, or for long."""
    end = time.monotonic() + 25
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)
