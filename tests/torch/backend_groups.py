"""A default group of torch.distributed for the length of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

import alltoallv.torch as at


@contextlib.contextmanager
def joined(
    rank: int, size: int, file: str, *, backend: str = "alltoallv", timeout: float = 60.0
) -> Iterator[dist.ProcessGroup]:
    """The ranks meet in ``file``, which no group has used before."""
    torch.set_num_threads(1)
    store = dist.FileStore(file, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


def carrier(group: dist.ProcessGroup) -> at.backend.Communicator:
    """The communicator of a group of backend alltoallv."""
    assert isinstance(group, at.backend.AllToAllVGroup)
    assert group.communicator is not None
    return group.communicator


def operators(group: dist.ProcessGroup) -> int:
    """How many operators have run over shared memory."""
    return carrier(group).stats()["operators"]
