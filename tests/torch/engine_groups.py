"""A default group whose tensors go through the group's own engine, as they would on several hosts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from backend_groups import joined
from torch import Tensor

import alltoallv.torch as at
from alltoallv.testing import golden
from alltoallv.torch.engines import rendezvous
from alltoallv.torch.engines.group import TorchGroupCommunicator

#: Dtypes that both torch and the reference know.
DTYPES = [name for name in golden.DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]


@contextlib.contextmanager
def engine(rank: int, size: int, file: str, **options: Any) -> Iterator[TorchGroupCommunicator]:
    """The ranks meet in ``file`` and get a communicator over gloo."""
    with joined(rank, size, file, backend="gloo") as group:
        comm = at.from_group(group, **{"backend": "gloo", "timeout": 30.0} | options)
        assert isinstance(comm, TorchGroupCommunicator)
        yield comm
        comm.destroy()


@contextlib.contextmanager
def views(rank: int, size: int, file: str, **options: Any) -> Iterator[TorchGroupCommunicator]:
    """The way of NCCL, views per peer and agreement through the store, in host memory: this package's backend moves."""
    with joined(rank, size, file) as group:
        raw = dist.distributed_c10d._world.pg_map[group][1]
        meeting = rendezvous.meet(raw, rank, size, "views", 30)
        named = {"domain": "views", "timeout": 30.0} | options
        comm = TorchGroupCommunicator(group, "nccl", meeting.store(raw, rank, size), meeting.who, **named)
        yield comm
        comm.destroy()


@contextlib.contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """What the package logs at ``level`` or above, while it does."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("alltoallv")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def to_torch(array: npt.NDArray[Any]) -> Tensor:
    """A copy with the same bits; ml_dtypes' dtypes too."""
    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    data = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    return data.view(getattr(torch, array.dtype.name)).view(array.shape)


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return data.view(golden.dtype_of(str(tensor.dtype).removeprefix("torch."))).reshape(tensor.shape)


def caught(call: Callable[[], object]) -> Exception:
    """What the call raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")
