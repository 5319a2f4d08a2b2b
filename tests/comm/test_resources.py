"""Descriptors or memory that run out on one rank: done without, or an error of its own class on all ranks at once."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from trouble import LIMIT, check_works, join, refused

import alltoallv
from alltoallv.errors import OutOfMemoryError, ResourceError
from alltoallv.numpy import all_gather, all_to_all_v, barrier

MB = 1 << 20


@contextmanager
def limited(what: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def no_more_descriptors() -> int:
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    return next(number for number in range(1 << 16) if number not in used)


def no_more_memory(room: int = MB) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize() + room


def exchange(comm, amount: int = MB) -> None:
    """Into outputs of segments that no peer has mapped yet."""
    out = alltoallv.empty(comm.size * amount, "uint8")
    x = np.full(comm.size * amount, comm.rank, "uint8")
    all_to_all_v(x, [amount] * comm.size, [amount] * comm.size, out=out, group=comm)
    assert [int(out[j * amount]) for j in range(comm.size)] == list(range(comm.size))


def meet_again(rank: int, size: int) -> None:
    """A meeting that failed leaves nothing behind that disturbs the next."""
    comm = join(rank, size, "second", timeout=30)
    check_works(comm)
    comm.destroy()


def test_descriptors(ranks):
    """A rank without any takes a spare one for the segments of its peers, time after time."""

    def work(rank, size):
        comm = join(rank, size, timeout=30)
        barrier(group=comm)
        begin = time.monotonic()
        with limited(resource.RLIMIT_NOFILE, no_more_descriptors() if rank == 1 else 512):
            kept = []
            for _ in range(6):
                kept.append(alltoallv.empty(20 * MB, "uint8"))  # so that the next lies in another segment
                exchange(comm)
        assert time.monotonic() - begin < LIMIT
        check_works(comm)
        comm.destroy()

    ranks(3, communicator=False, fresh=True)(work)


def test_memory(ranks):
    """Where a peer's segment cannot be mapped all ranks hear of it at once, and who it was."""

    def work(rank, size):
        comm = join(rank, size, timeout=60)
        check_works(comm)
        huge = alltoallv.empty(150 * MB, "uint8") if rank == 0 else None
        begin = time.monotonic()
        sends, recvs = ([0, 0], [0, MB]) if rank == 0 else ([MB, 0], [0, 0])
        x = np.zeros(sum(sends), "uint8")
        with (
            limited(resource.RLIMIT_AS, no_more_memory(16 * MB) if rank == 1 else resource.RLIM_INFINITY),
            pytest.raises(OutOfMemoryError) as caught,
        ):
            all_to_all_v(x, sends, recvs, out=None if huge is None else huge[:MB], group=comm)
        assert time.monotonic() - begin < LIMIT
        assert isinstance(caught.value, MemoryError)
        assert isinstance(caught.value, ResourceError)
        assert "mapping" in str(caught.value)
        assert "Cannot allocate memory" in str(caught.value)
        assert rank == 1 or "rank 1 failed in operator" in str(caught.value)
        assert not comm.usable
        comm.destroy()

    ranks(2, communicator=False, fresh=True)(work)


def test_joining_without_descriptors(ranks):
    """A rank that has spare ones joins another domain with them."""

    def work(rank, size):
        first = join(rank, size, "first", timeout=20)
        barrier(group=first)
        begin = time.monotonic()
        with limited(resource.RLIMIT_NOFILE, no_more_descriptors() if rank == 1 else 512):
            second = join(rank, size, "second", domain="second", timeout=20)
            barrier(group=second)
        assert time.monotonic() - begin < LIMIT
        check_works(first)
        second.destroy()
        first.destroy()

    ranks(2, communicator=False, fresh=True)(work)


@pytest.mark.parametrize("victim", [0, 1])
def test_joining_without_memory(ranks, victim):
    """All hear of it at once, and who it was; with memory they meet."""

    def work(rank, size):
        begin = time.monotonic()
        with (
            limited(resource.RLIMIT_AS, no_more_memory() if rank == victim else resource.RLIM_INFINITY),
            pytest.raises(ResourceError) as caught,
        ):
            join(rank, size, "first", timeout=30)
        assert time.monotonic() - begin < LIMIT
        assert rank == victim or f"rank {victim} " in str(caught.value)
        meet_again(rank, size)

    ranks(3, communicator=False, fresh=True)(work)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_joining_without_any_descriptors(ranks, victim):
    """A rank that cannot open its first socket is named to the others at once, to those that come later too."""

    def work(rank, size):
        if rank == (victim + 1) % size:
            time.sleep(0.3)
        begin = time.monotonic()
        with (
            limited(resource.RLIMIT_NOFILE, no_more_descriptors() if rank == victim else 512),
            pytest.raises(ResourceError, match="Too many open files") as caught,
        ):
            join(rank, size, "first", timeout=30)
        assert time.monotonic() - begin < LIMIT
        assert rank == victim or f"rank {victim}" in str(caught.value)
        meet_again(rank, size)

    ranks(3, communicator=False, fresh=True)(work)


REFUSED_JOINING = [
    ("memfd_create", errno.EMFILE, ResourceError, 0),
    ("memfd_create", errno.ENOMEM, OutOfMemoryError, 0),
    ("ftruncate", errno.ENOSPC, ResourceError, 0),
    ("mmap", errno.ENOMEM, OutOfMemoryError, 0),
    ("mmap", errno.ENOMEM, OutOfMemoryError, 2),
    ("epoll_create1", errno.EMFILE, ResourceError, 0),
    ("epoll_create1", errno.ENOMEM, OutOfMemoryError, 2),
]


@pytest.mark.parametrize(("call", "number", "error", "victim"), REFUSED_JOINING)
def test_joining_where_the_kernel_refuses(ranks, call, number, error, victim):
    """All hear at once what was refused, and to whom; when it is no longer refused they meet."""

    def work(rank, size):
        begin = time.monotonic()
        meet = partial(join, rank, size, "first", timeout=30)
        with pytest.raises(error, match=os.strerror(number)) as caught:
            refused(call, number, meet) if rank == victim else meet()
        assert time.monotonic() - begin < LIMIT
        assert rank == victim or f"rank {victim}" in str(caught.value)
        meet_again(rank, size)

    ranks(3, communicator=False, fresh=True)(work)


def test_a_peers_segment_where_the_kernel_refuses(ranks):
    """The rank that cannot map it ends the call on all ranks at once, and the communicator, since data were moving."""

    def work(rank, size):
        comm = join(rank, size, timeout=60)
        check_works(comm)
        counts = [8 * MB] * size
        x, out = np.zeros(sum(counts), "uint8"), alltoallv.empty(sum(counts), "uint8")  # in a segment of its own
        call = partial(all_to_all_v, x, counts, counts, out=out, group=comm)
        begin = time.monotonic()
        with pytest.raises(OutOfMemoryError, match="Cannot allocate memory") as caught:
            refused("mmap", errno.ENOMEM, call) if rank == 1 else call()
        assert time.monotonic() - begin < LIMIT
        assert rank == 1 or "rank 1 failed in operator" in str(caught.value)
        assert not comm.usable
        comm.destroy()

    ranks(3, communicator=False, fresh=True)(work)


@pytest.mark.parametrize(("call", "number"), [("memfd_create", errno.EMFILE), ("ftruncate", errno.ENOSPC)])
def test_outputs_where_the_kernel_refuses(ranks, call, number):
    """Outputs are private, and counted."""

    def work(rank, size):
        comm = join(rank, size, timeout=30)
        counts = [MB // 8] * size
        exchange = partial(all_to_all_v, np.arange(sum(counts)), counts, counts, group=comm)
        out = refused(call, number, exchange) if rank == 1 else exchange()
        part = np.arange(MB // 8) + rank * (MB // 8)
        np.testing.assert_array_equal(out, np.concatenate([part] * size))
        assert (comm.stats()["private_outputs"] > 0) == (rank == 1)
        check_works(comm)
        comm.destroy()

    ranks(2, communicator=False, fresh=True)(work)


def test_no_memory_for_an_output(ranks):
    """The rank says so in its row, before any data move: the communicator goes on."""

    def work(rank, size):
        comm = join(rank, size, timeout=30)
        check_works(comm)
        before, x = np.full(size * 64 * MB, 7, "uint8") if rank != 1 else None, np.zeros(64 * MB, "uint8")
        begin = time.monotonic()
        with (
            limited(resource.RLIMIT_AS, no_more_memory(16 * MB) if rank == 1 else resource.RLIM_INFINITY),
            pytest.raises(OutOfMemoryError) as caught,
        ):
            all_gather(x, out=before, group=comm)
        assert time.monotonic() - begin < LIMIT
        assert rank == 1 or "rank 1" in str(caught.value)
        assert before is None or (before == 7).all()
        assert comm.usable
        check_works(comm)
        comm.destroy()

    ranks(2, communicator=False, fresh=True)(work)


def test_joining_without_room(ranks):
    """Rank 0 can make no file in memory: `ftruncate` fails."""

    def work(rank, size):
        begin = time.monotonic()
        with (
            limited(resource.RLIMIT_FSIZE, 4096 if rank == 0 else resource.RLIM_INFINITY),
            pytest.raises(ResourceError, match=r"cannot size the shared control segment .* too large") as caught,
        ):
            join(rank, size, "first", timeout=30)
        assert time.monotonic() - begin < LIMIT
        assert rank == 0 or "rank 0 " in str(caught.value)
        meet_again(rank, size)

    ranks(3, communicator=False, fresh=True)(work)


def test_outputs_without_room(ranks):
    """Where no segment can be made outputs are private, and counted."""

    def work(rank, size):
        comm = join(rank, size, timeout=30)
        with limited(resource.RLIMIT_FSIZE, 4096 if rank == 1 else resource.RLIM_INFINITY):
            check_works(comm)
            exchange(comm)
        assert (comm.stats()["private_outputs"] > 0) == (rank == 1)
        comm.destroy()

    ranks(2, communicator=False, fresh=True)(work)
