"""Ranks that wait for each other in different groups are told so at once, and nobody else is."""

from __future__ import annotations

import datetime
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from on_ranks import on_ranks
from trouble import LIMIT, attempt, check_works, join, on_threads

from alltoallv import Communicator
from alltoallv.errors import DeadlockError
from alltoallv.numpy import all_reduce, barrier, isend, recv, send

ONE = np.ones(2)


def groups(rank: int, *members: tuple[int, ...]) -> list[Communicator | None]:
    """Of the groups of these ranks, those that this rank is in, as members in this order."""
    names = ["".join(map(str, of)) + chr(ord("a") + i) for i, of in enumerate(members)]
    return [
        join(of.index(rank), len(of), "deadlock", name, timeout=60.0) if rank in of else None
        for name, of in zip(names, members, strict=True)
    ]


def check(failure, *parts: str) -> None:
    assert failure.name == "DeadlockError", failure
    assert failure.code == DeadlockError.code
    assert failure.at - failure.began < LIMIT, failure  # about a second on an idle machine
    for part in parts:
        assert part in failure.text, failure


def test_two_groups_in_opposite_order(ranks):
    def work(rank, size):
        a, b = groups(rank, (0, 1), (0, 1))
        all_reduce(ONE, group=a)
        failure = attempt(all_reduce, ONE, group=a) if rank == 0 else attempt(barrier, group=b)
        assert not a.usable
        assert not b.usable
        for comm in (a, b):
            assert attempt(barrier, group=comm).name == "DeadlockError"
            comm.destroy()
        for comm in groups(rank, (0, 1), (0, 1)):  # the same domains once more
            check_works(comm)
        return failure

    for failure in ranks(2, fresh=True, communicator=False)(work):
        check(failure, "in operator #2 all_reduce of domain '01a' for rank 1")
        check(failure, "in operator #1 barrier of domain '01b' for rank 0", ", which waits in ")


def test_a_lost_predecessor_does_not_hide_a_deadlock(ranks):
    """It is still referred to, in the domain of one that was made afterwards."""

    def work(rank, size):
        lost = groups(rank, (0, 1))[0]
        if rank == 1:
            lost.abort("the test has had enough")
        assert attempt(barrier, group=lost).name == "PeerLostError"
        a, b = groups(rank, (0, 1), (0, 1))
        failure = attempt(barrier, group=a if rank == 0 else b)
        assert not lost.usable
        return failure

    for failure in ranks(2, fresh=True, communicator=False)(work):
        check(failure, "in operator #1 barrier of domain '01a'", "in operator #1 barrier of domain '01b'")


def test_three_ranks_in_a_circle(ranks):
    """Nobody is in all groups. A third one, beside the circle, goes on."""

    def work(rank, size):
        mine = groups(rank, (0, 1), (1, 2), (2, 0), (0, 1, 2))
        failure = attempt(all_reduce, ONE, group=mine[rank])
        check_works(mine[3])
        return failure

    for failure in ranks(3, fresh=True, communicator=False)(work):
        check(failure, "'01a'", "'12b'", "'20c'", "for rank 1, which waits as rank 0 in operator #1")


def test_pending_calls(ranks):
    """What waits on its own thread, behind a call that waits on the communicator's, is a part of it."""

    def work(rank, size):
        a, b = groups(rank, (0, 1), (0, 1))
        if rank == 0:
            return attempt(all_reduce(ONE, group=a, async_op=True)[1].wait)
        all_reduce(ONE, group=b, async_op=True)
        return attempt(barrier, group=b)

    for failure in ranks(2, fresh=True, communicator=False)(work):
        check(failure, "'01a'", "'01b'")


def test_threads():
    a, b = (Communicator.threads(3, timeout=60.0) for _ in range(2))
    first = {0: a, 1: b, 2: a}
    with ThreadPoolExecutor(3) as pool:
        for failure in pool.map(lambda rank: attempt(all_reduce, ONE, group=first[rank][rank]), range(3)):
            check(failure, f"domain '{a[0].domain}'", f"domain '{b[0].domain}'")


@on_ranks(2, fresh=True, communicator=False)
def test_another_thread_lets_go(rank, size):
    """Opposite orders on the main threads, while another thread of each rank computes, and then calls."""
    a, b = groups(rank, (0, 1), (0, 1))

    def later():
        time.sleep(1.5)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            sum(range(1000))
        all_reduce(ONE, group=(b, a)[rank])

    other = threading.Thread(target=later)
    other.start()
    all_reduce(ONE, group=(a, b)[rank])
    other.join()


def test_both_pending(ranks):
    """Opposite orders of calls that are all under way are none; nor is a rank that is late, or behind a late one."""

    def work(rank, size):
        a, b, c = groups(rank, (0, 1), (0, 1), (0, 1, 2))
        if rank == 2:
            time.sleep(1.5)
            return all_reduce(ONE, group=c)
        calls = [all_reduce(ONE, group=comm, async_op=True)[1] for comm in ((a, b), (b, a))[rank]]
        if rank == 1:
            time.sleep(1.0)
        for call in calls:
            call.wait()
        return all_reduce(ONE, group=c)

    for total in ranks(3, fresh=True, communicator=False)(work):
        assert total.tolist() == [3, 3]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_calls(ranks, seed):
    """Many groups in one order, on two threads of every rank, with pauses around the time that a wait is looked at."""
    sets = [(0, 1, 2), (0, 1), (1, 2), (0, 2), (0, 1, 2), (0, 1), (1, 2), (0, 2)]

    def work(rank, size):
        mine = groups(rank, *sets)

        def call(half):
            order = random.Random(seed * 10 + half)
            pause = random.Random(f"{seed}/{rank}/{half}")
            for _ in range(70):
                number = order.randrange(half, len(sets), 2)
                if pause.random() < 0.04:
                    time.sleep(pause.uniform(0.3, 0.9))
                if mine[number] is not None:
                    assert all_reduce(ONE, group=mine[number]).tolist() == [len(sets[number])] * 2

        on_threads(call, range(2))

    ranks(3, fresh=True, communicator=False)(work)


@pytest.mark.parametrize("call", [recv, send])
def test_a_message_against_a_collective(ranks, call):
    """Both in one group, of which one rank waits for the other's row, the other for its half of a message."""

    def work(rank, size):
        (a,) = groups(rank, (0, 1))
        return attempt(all_reduce, ONE, group=a) if rank == 0 else attempt(call, np.ones(100_000), 0, group=a)

    for failure in ranks(2, fresh=True, communicator=False)(work):
        other = f"in {call.__name__} of domain '01a' for"
        check(failure, "in operator #1 all_reduce of domain '01a' for rank 1", other)


def test_messages_that_move_by_themselves_are_no_deadlock(ranks):
    """One that its sender does not wait for yet, and one whose sender comes late."""

    def work(rank, size):
        a, b = groups(rank, (0, 1), (0, 1))
        got = np.zeros(100_000)
        if rank == 0:
            sent = isend(got + 1, 1, group=a)
            barrier(group=b)
            sent.wait()
            time.sleep(1.5)
            send(got + 2, 1, group=a)
            return True
        time.sleep(1.5)
        recv(got, 0, group=a)
        assert (got == 1).all()
        barrier(group=b)
        recv(got, 0, group=a)
        return bool((got == 2).all())

    assert all(ranks(2, fresh=True, communicator=False)(work))


FOREIGN = """
def wait(timeout, started):
    started.set()
    end.wait()

def _worker(work_queue, started):
    wait(work_queue, started)
"""


@pytest.mark.parametrize("name", [b"lib/threading.py", b"concurrent/futures/thread.py", b"jos\xe9/work.py"])
def test_frames_of_others_are_no_concern_of_a_wait(ranks, name):
    """A look for deadlocks reads what threads are in: a library may name its files and variables as it likes."""

    def work(comm):
        end, started = threading.Event(), threading.Event()
        library = {"end": end}
        exec(compile(FOREIGN, os.fsdecode(name), "exec"), library)
        for what in (datetime.timedelta(seconds=6), "6 s", object()):
            for function in ("wait", "_worker"):
                threading.Thread(target=library[function], args=(what, started), daemon=True).start()
        started.wait()
        if comm.rank == 1:
            time.sleep(1.0)  # the other one looks
        barrier(group=comm)
        end.set()

    ranks(2, fresh=True)(work)


@pytest.mark.parametrize("limit", ["call", "group"])
def test_a_wait_that_ends_by_itself_is_none(ranks, limit):
    """A short limit finds out who is late; the other group goes on."""

    def work(rank, size):
        (a, b) = groups(rank, (0, 1), (0, 1))
        if limit == "group":
            a = join(rank, 2, "deadlock", "short", timeout=1.5)
        failure = None
        if rank == 0:
            failure = attempt(barrier, group=a, **({"timeout": 1.5} if limit == "call" else {}))
        barrier(group=b)
        check_works(b)
        return failure

    failure = ranks(2, fresh=True, communicator=False)(work)[0]
    assert failure.name == "CommTimeoutError", failure
    assert "for rank 1 (" in failure.text
