"""Every limit that a process may have, on one rank, over both transports: all goes well, or all ranks hear who had too
little, at once.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scarcity import limited, no_more_descriptors, no_more_memory
from trouble import LIMIT, check_works, join

from alltoallv.errors import ResourceError
from alltoallv.numpy import all_reduce, all_to_all_v, barrier, irecv, isend
from alltoallv_tools.ports import free_port

MB = 1 << 20
VICTIM, NOBODY = 1, 54321
Limit = Callable[[int], AbstractContextManager[None]]


@contextmanager
def unprivileged() -> Iterator[None]:
    """In the block root is a user without privileges, whom limits of processes also concern."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def no_more_threads(few: int) -> AbstractContextManager[None]:
    """In the block this user gets so many threads beside those that there are."""
    used = 0
    for task in Path("/proc").glob("[0-9]*/task/*/status"):
        try:
            used += int(re.search(r"^Uid:\s*(\d+)", task.read_text(), re.MULTILINE)[1]) == os.getuid()
        except OSError:
            continue
    return limited(resource.RLIMIT_NPROC, used + few)


def least(what: int, value: int) -> Limit:
    return lambda _: limited(what, value)


LIMITS: dict[str, tuple[Limit, tuple[int, ...]]] = {
    "descriptors": (no_more_descriptors, (0, 2, 4, 6, 9, 14)),
    "memory": (lambda few: no_more_memory(few * MB), (4, 12, 20, 40, 80, 200)),
    "threads": (no_more_threads, (0, 1, 2, 3, 5)),
    "stack": (least(resource.RLIMIT_STACK, MB // 2), (0,)),
    "locked memory": (least(resource.RLIMIT_MEMLOCK, 0), (0,)),
    "pending signals": (least(resource.RLIMIT_SIGPENDING, 0), (0,)),
}


def calls(comm, x: np.ndarray, y: np.ndarray) -> list[Callable[[], object]]:
    """A large exchange twice, what needs threads, and what needs descriptors."""
    counts, message, me = [x.size // comm.size] * comm.size, y[: x.size // 2], comm.rank

    def asynchronous() -> None:
        all_reduce(x, out=y, group=comm, async_op=True)[1].wait()

    def messages() -> None:
        if me < 2:
            (isend if me == 0 else irecv)(message, 1 - me, group=comm).wait()

    def split() -> None:
        part = comm.split(0, me)
        barrier(group=part)
        part.destroy()

    exchange = partial(all_to_all_v, x, counts, counts, out=y, group=comm)
    return [exchange, exchange, asynchronous, messages, split]


@pytest.mark.parametrize("moment", ["joining", "later"])
@pytest.mark.parametrize("what", LIMITS)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_limit_of_one_rank(ranks, backend, what, moment):
    limit, steps = LIMITS[what]
    port = free_port()

    def work(rank, size):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        data = np.ones(300_000), np.zeros(300_000)
        told = []

        def try_out(call: Callable[[], object]) -> object:
            began = time.monotonic()
            try:
                return call()
            except (ResourceError, MemoryError) as error:
                told.append(str(error))
            finally:
                assert time.monotonic() - began < LIMIT
            assert rank == VICTIM or re.search(rf"rank {VICTIM}\b", told[-1]), told[-1]
            return None

        for few in steps:
            meet = partial(join, rank, size, f"limit{few}", timeout=30, backend=backend)
            comm = None if moment == "joining" else meet()
            make = [] if comm is None else calls(comm, *data)
            with limit(few) if rank == VICTIM else nullcontext():
                if comm is None:
                    comm = try_out(meet)
                    make = calls(comm, *data) if comm is not None else []
                for call in make:
                    if comm.usable:
                        try_out(call)
            if comm is not None:
                comm.destroy()
        return told

    def as_user(rank, size):
        with unprivileged() if what == "threads" else nullcontext():
            told = work(rank, size)
        with join(rank, size, "without", timeout=30, backend=backend) as comm:
            check_works(comm)
        return told

    told = ranks(3, communicator=False, fresh=True)(as_user)
    if what in ("memory", "threads") or (what, moment) == ("descriptors", "joining"):
        assert any(told), "the limit was none"
    elif what != "descriptors":  # of which a rank has spare ones
        assert not any(told)
