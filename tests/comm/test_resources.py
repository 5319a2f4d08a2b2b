"""Descriptors or memory that run out on one rank: done without, or an error of its own class on all ranks at once."""

from __future__ import annotations

import errno
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks
from scarcity import no_more_descriptors, no_more_memory, no_room_in_files, refused
from trouble import LIMIT, check_works, join

import alltoallv
from alltoallv import AllToAllVOperation, AllToAllVParam
from alltoallv.errors import AllToAllVError, OutOfMemoryError, ResourceError
from alltoallv.numpy import (
    Plan,
    all_gather,
    all_reduce,
    all_to_all_v,
    barrier,
    gather,
    irecv,
    isend,
    quantized_all_reduce,
    recv,
    reduce_scatter,
    send,
)
from alltoallv_tools.ports import free_port

MB = 1 << 20


@contextmanager
def fails_on_all(rank: int, victim: int, error: type[Exception], words: str | None = None) -> Iterator[None]:
    """The block raises this error at once, which names the victim on all other ranks."""
    begin = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        yield
    assert time.monotonic() - begin < LIMIT
    assert rank == victim or re.search(rf"rank {victim}\b", str(caught.value))


Starve = Callable[[Callable[[], Any]], Any]


def under(limits: Callable[[], AbstractContextManager[None]]) -> Starve:
    """Calls something within limits, as `refused` does while a system call is refused."""

    def call(work: Callable[[], Any]) -> Any:
        with limits():
            return work()

    return call


def exchange(comm, amount: int = 8 * MB) -> None:
    """Into outputs of segments that no peer has mapped yet: beyond the first one, which is made while joining."""
    out = alltoallv.empty(comm.size * amount, "uint8")
    x = np.full(comm.size * amount, comm.rank, "uint8")
    all_to_all_v(x, [amount] * comm.size, [amount] * comm.size, out=out, group=comm)
    assert [int(out[j * amount]) for j in range(comm.size)] == list(range(comm.size))


@on_ranks(3, communicator=False, fresh=True)
def test_descriptors(rank, size):
    """A rank without any takes a spare one for the segments of its peers, time after time."""
    comm = join(rank, size, timeout=30)
    barrier(group=comm)
    begin = time.monotonic()
    with no_more_descriptors() if rank == 1 else nullcontext():
        kept = []
        for _ in range(6):
            kept.append(alltoallv.empty(20 * MB, "uint8"))  # so that the next lies in another segment
            exchange(comm)
    assert time.monotonic() - begin < LIMIT
    check_works(comm)
    comm.destroy()


@on_ranks(2, communicator=False, fresh=True)
def test_a_peers_segment_that_cannot_be_mapped(rank, size):
    """The call ends on all ranks at once, and the communicator, since data were moving."""
    comm = join(rank, size, timeout=60)
    check_works(comm)
    huge = alltoallv.empty(150 * MB, "uint8") if rank == 0 else None
    sends, recvs = ([0, 0], [0, MB]) if rank == 0 else ([MB, 0], [0, 0])
    x, out = np.zeros(sum(sends), "uint8"), None if huge is None else huge[:MB]
    call = partial(all_to_all_v, x, sends, recvs, out=out, group=comm)
    with fails_on_all(rank, 1, OutOfMemoryError, "mapping.*Cannot allocate memory"):
        under(partial(no_more_memory, 16 * MB))(call) if rank == 1 else call()
    assert issubclass(OutOfMemoryError, MemoryError)
    assert issubclass(OutOfMemoryError, ResourceError)
    assert not comm.usable
    comm.destroy()


@on_ranks(2, communicator=False, fresh=True)
def test_joining_without_descriptors(rank, size):
    """A rank that has spare ones joins another domain with them."""
    first = join(rank, size, "first", timeout=40)
    barrier(group=first)
    begin = time.monotonic()
    with no_more_descriptors() if rank == 1 else nullcontext():
        second = join(rank, size, "second", domain="second", timeout=40)
        barrier(group=second)
    assert time.monotonic() - begin < LIMIT
    check_works(first)
    second.destroy()
    first.destroy()


@pytest.mark.parametrize("victim", [0, 1])
def test_joining_with_few_descriptors(ranks, victim):
    """However many there are: all join, or all hear at once who had too few, whatever had taken the last one."""

    def work(rank, size):
        outcomes = []
        for few in range(9):
            with no_more_descriptors(few) if rank == victim else nullcontext(), ExitStack() as joined:
                begin, error = time.monotonic(), None
                try:
                    joined.enter_context(join(rank, size, f"few{few}", timeout=30))
                except AllToAllVError as caught:
                    error = caught
                assert time.monotonic() - begin < LIMIT
            assert error is None or rank == victim or re.search(rf"rank {victim}\b", str(error)), error
            outcomes.append(error is None)
        return outcomes

    first, *others = ranks(3, communicator=False, fresh=True)(work)
    assert not first[0]
    assert all(other == first for other in others)


def refusing(call: str, number: int, error: type[Exception] = ResourceError) -> tuple[Starve, type[Exception], str]:
    return partial(refused, call, number), error, os.strerror(number)


SCARCE: dict[str, tuple[Starve, type[Exception], str | None]] = {
    "descriptors": (under(no_more_descriptors), ResourceError, "Too many open files"),
    "memory": (under(no_more_memory), ResourceError, None),
    "room": (under(no_room_in_files), ResourceError, "cannot size the shared control segment .* too large"),
    "memfd_create, EMFILE": refusing("memfd_create", errno.EMFILE),
    "memfd_create, ENOMEM": refusing("memfd_create", errno.ENOMEM, OutOfMemoryError),
    "ftruncate, ENOSPC": refusing("ftruncate", errno.ENOSPC),
    "mmap, ENOMEM": refusing("mmap", errno.ENOMEM, OutOfMemoryError),
    "epoll_create1, EMFILE": refusing("epoll_create1", errno.EMFILE),
    "epoll_create1, ENOMEM": refusing("epoll_create1", errno.ENOMEM, OutOfMemoryError),
}
VICTIMS = {"descriptors": (0, 1, 2), "memory": (0, 1), "mmap, ENOMEM": (0, 2), "epoll_create1, ENOMEM": (2,)}


@pytest.mark.parametrize(("what", "victim"), [(what, victim) for what in SCARCE for victim in VICTIMS.get(what, (0,))])
def test_joining_without(ranks, what, victim):
    """All hear at once what there was not, and who had none; with it they meet."""
    starve, error, words = SCARCE[what]

    def work(rank, size):
        meet = partial(join, rank, size, "first", timeout=30)
        if what == "descriptors" and rank == (victim + 1) % size:
            time.sleep(0.3)  # who comes later also hears it
        with fails_on_all(rank, victim, error, words):
            starve(meet) if rank == victim else meet()
        comm = join(rank, size, "second", timeout=30)  # nothing is left behind that disturbs the next meeting
        check_works(comm)
        comm.destroy()

    ranks(3, communicator=False, fresh=True)(work)


@pytest.mark.parametrize("what", ["memfd_create, EMFILE", "ftruncate, ENOSPC", "room"])
def test_outputs_without(ranks, what):
    """Where no segment can be made outputs are private, and counted."""
    starve, _, _ = SCARCE[what]

    def work(rank, size):
        comm = join(rank, size, timeout=30)

        def call() -> None:
            check_works(comm)
            exchange(comm)

        starve(call) if rank == 1 else call()
        assert (comm.stats()["private_outputs"] > 0) == (rank == 1)
        comm.destroy()

    ranks(2, communicator=False, fresh=True)(work)


@on_ranks(2, communicator=False, fresh=True)
def test_no_memory_for_an_output(rank, size):
    """The rank says so in its row, before any data move: the communicator goes on."""
    comm = join(rank, size, timeout=30)
    check_works(comm)
    before, x = np.full(size * 64 * MB, 7, "uint8") if rank != 1 else None, np.zeros(64 * MB, "uint8")
    with fails_on_all(rank, 1, OutOfMemoryError), no_more_memory(16 * MB) if rank == 1 else nullcontext():
        all_gather(x, out=before, group=comm)
    assert before is None or (before == 7).all()
    assert comm.usable
    check_works(comm)
    comm.destroy()


@on_ranks(2, communicator=False, fresh=True)
def test_no_memory_for_the_output_of_a_plan(rank, size):
    comm = join(rank, size, timeout=30)
    sends, recvs = ([0, 0], [256 * MB, 0]) if rank == 1 else ([0, 256 * MB], [0, 0])
    plan, x = Plan(sends, recvs, dtype="uint8", group=comm), np.zeros(sum(sends), "uint8")
    with fails_on_all(rank, 1, OutOfMemoryError), no_more_memory(16 * MB) if rank == 1 else nullcontext():
        plan(x)
    check_works(comm)
    comm.destroy()


@on_ranks(2)
def test_no_memory_for_a_copy_of_an_input(comm):
    """An array with gaps is copied first: who cannot tells its peer, which waits."""
    counts = {"send_counts": [1, 1], "sdispls": [0, 1], "recv_counts": [1, 1], "rdispls": [0, 1]}
    operation = AllToAllVOperation(AllToAllVParam(rank=comm.rank, rank_size=2, **counts), communicator=comm)
    beyond, one = np.broadcast_to(np.float32(1), 1 << 45), np.ones(2, "float32")
    x, half = (beyond, beyond.size // 2) if comm.rank == 1 else (one, 1)
    for call in (
        lambda: all_to_all_v(x, [half] * 2, group=comm),
        lambda: all_to_all_v(x, [half] * 2, [1, 1], group=comm),
        lambda: all_reduce(x, group=comm),
        lambda: reduce_scatter(x, group=comm),
        lambda: all_gather(x, group=comm),
        lambda: gather(x, group=comm),
        lambda: quantized_all_reduce(x, group=comm),
        lambda: operation(x),
    ):
        with fails_on_all(comm.rank, 1, MemoryError, "Unable to allocate" + r".*A2A-5003" * (comm.rank == 0)):
            call()
        check_works(comm)


@on_ranks(2, fresh=True)
def test_no_memory_for_the_output_of_an_operation(comm):
    n = 32 * MB
    counts = {"send_counts": [n, n], "sdispls": [0, n], "recv_counts": [n, n], "rdispls": [0, n]}
    param = AllToAllVParam(rank=comm.rank, rank_size=2, **counts)
    operation, x = AllToAllVOperation(param, communicator=comm), np.zeros(2 * n, "int8")
    kept = [operation(x) for _ in range(4)]  # so that none is used again
    with fails_on_all(comm.rank, 1, OutOfMemoryError), no_more_memory(16 * MB) if comm.rank == 1 else nullcontext():
        operation(x)
    del kept
    check_works(comm)


@on_ranks(2, communicator=False, fresh=True)
def test_no_thread_for_a_message(rank, size):
    """The peer, which waits for that message, is told at once."""
    comm = join(rank, size, timeout=30)
    check_works(comm)
    out = np.zeros(50_000)
    with fails_on_all(rank, 0, ResourceError, "no thread can be made for messages"):
        if rank == 0:
            with no_more_memory():
                irecv(out, 1, group=comm)
        else:
            send(out, 0, group=comm)
    assert not comm.usable
    comm.destroy()


@on_ranks(1, communicator=False, fresh=True)
def test_no_threads_for_a_domain_of_threads(rank, size):
    begin = time.monotonic()
    with no_more_memory(300 * MB), pytest.raises(ResourceError, match=r"no thread can be made.*A2A-5066"):
        alltoallv.Communicator.threads(64)
    assert time.monotonic() - begin < LIMIT
    alltoallv.Communicator.threads(2)[0].destroy()


@pytest.mark.parametrize(("size", "options"), [(2, {}), (3, {"path": "cma"}), (4, {})])
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EFAULT])
def test_reading_peers_is_refused_after_joining(ranks, size, options, error):
    """By a sandbox, or since a peer may no longer be looked into: the data come another way, also in the same call."""

    def work(comm):
        me, before, after = comm.rank, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

        def calls():
            for n in (30_000, 400_000):
                y = np.empty(n * comm.size)
                for k in range(3):
                    all_to_all_v(np.full(y.size, me + 10.0 * k), [n] * comm.size, [n] * comm.size, out=y, group=comm)
                    assert (y.reshape(comm.size, n) == np.arange(comm.size)[:, None] + 10.0 * k).all()
                works = [isend(np.full(n, me + 10.0 * k), after, group=comm) for k in range(3)]
                for k in range(3):
                    y = np.empty(n)
                    recv(y, before, group=comm)
                    assert (y == before + 10.0 * k).all()
                for one in works:
                    one.wait()

        if me % 2 == 1 or comm.size == 2:  # of two ranks both ask each other at once
            refused("process_vm_readv", error, calls)
        else:
            calls()
        check_works(comm)
        return comm.usable

    assert all(ranks(size, **options)(work))


def test_messages_that_are_not_taken_yet_cost_their_receiver_little(ranks):
    """Between hosts small data go with the offer, up to a few MiB for each peer."""
    port = free_port()
    many, x = 1500, np.arange(1000.0)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def work(rank, size):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        comm, y = join(rank, size, timeout=60, backend="tcp"), np.empty_like(x)
        if rank == 0:
            send(x, 1, tag=1, group=comm)  # from the first message on the other listens
            works = [isend(x + k, 1, group=comm) for k in range(many)]
            send(x, 1, tag=1, group=comm)
            for one in works:
                one.wait()
            return 0
        recv(y, 0, tag=1, group=comm)
        before = resident()
        recv(y, 0, tag=1, group=comm)
        cost = resident() - before
        for k in range(many):
            recv(y, 0, group=comm)
            assert (y == x + k).all()
        return cost

    assert ranks(2, communicator=False, fresh=True)(work)[1] < many * x.nbytes * 2 / 3
