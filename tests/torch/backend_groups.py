"""A default group of torch.distributed for the length of a test."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import Function, called_by

import alltoallv.torch as at
from alltoallv.testing import Ranks


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
    if backend == "gloo":  # it may be made on one rank while another still connects to that: so none leaves before
        dist.barrier()
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


class Grouped:
    """The fixture ``grouped``: ranks that have joined a group, which is a new one in every call."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks, self._files = ranks, (str(folder / f"group-{number}") for number in itertools.count())

    def __call__(
        self,
        size: int,
        way: Callable[..., contextlib.AbstractContextManager[Any]] = joined,
        *,
        seconds: float = 60.0,
        fresh: bool = False,
        outcomes: bool = False,
        **options: Any,
    ) -> Callable[..., list[Any]]:
        """Returns a function that runs ``function(rank, size, group, *args)`` on all ranks.

        ``way`` makes the group, with ``options``; the other arguments are as in `Ranks`.
        """

        def run(function: Callable[..., Any], *args: Any) -> list[Any]:
            @functools.wraps(function)
            def on_rank(rank: int, size: int, file: str) -> Any:
                with way(rank, size, file, **options) as group:
                    return function(rank, size, group, *args)

            call = self._ranks(size, communicator=False, timeout=seconds, fresh=fresh, outcomes=outcomes)
            return call(on_rank, next(self._files))

        return run


def on_group(
    size: int | None = None, way: Callable[..., contextlib.AbstractContextManager[Any]] = joined, **options: Any
) -> Callable[[Function], Function]:
    """As `on_ranks`, on ranks of a group: the test's function is called with rank, size and group."""
    return called_by("grouped", 3, size, lambda grouped, size: grouped(size, way, **options))
