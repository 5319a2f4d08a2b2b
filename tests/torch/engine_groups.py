"""A communicator over the engine of a group, as on a GPU, and what tests of it share."""

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

from alltoallv import Communicator
from alltoallv.testing import golden
from alltoallv.torch.engines import hosts, rendezvous
from alltoallv.torch.engines.nccl import NcclMember
from alltoallv.torch.engines.staged import StagedMember

#: Dtypes that both torch and the reference know.
DTYPES = [name for name in golden.DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]


class Views(NcclMember):
    """NCCL's way in host memory: views per peer, and agreement before the first calls."""

    reaches_host = True


class Staged(StagedMember):
    """The way of tensors without an engine, for some that lie in host memory already."""

    reaches_host = True


@contextlib.contextmanager
def _connected(rank: int, size: int, file: str, timeout: float) -> Iterator[tuple[dist.ProcessGroup, Communicator]]:
    with joined(rank, size, file) as group:
        raw = dist.distributed_c10d._world.pg_map[group][1]
        meeting = rendezvous.meet(raw, rank, size, "views", 30)
        gather = rendezvous.gatherer(meeting, raw, rank, size, 30)
        with hosts.connect(meeting, gather, rank, size, "views", timeout) as control:
            yield group, control


@contextlib.contextmanager
def views(rank: int, size: int, file: str, *, timeout: float = 30.0, check: str | None = None) -> Iterator[Views]:
    """In place of NCCL, backend alltoallv of torch.distributed moves the views."""
    with _connected(rank, size, file, timeout) as (group, control):
        yield Views(group, "nccl", control, check)


@contextlib.contextmanager
def staged(rank: int, size: int, file: str) -> Iterator[Staged]:
    with _connected(rank, size, file, 30.0) as (group, control):
        yield Staged(group, control)


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
