"""Forked children, such as a DataLoader's: they cannot use the parent's communicators, nor disturb them."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from on_ranks import on_ranks
from started import CHILD_SECONDS, forked, run
from trouble import attempt, check_works, held, join, on_threads, pids_of, stamp, stamped, wait_until_in

import alltoallv
from alltoallv import Communicator
from alltoallv.numpy import all_reduce, all_to_all_v, barrier, irecv, isend


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_use_in_the_child_is_refused(ranks, threads):
    def work(comm):
        check_works(comm)
        x, counts = np.ones(comm.size), [1] * comm.size
        pending = barrier(group=comm, async_op=True)
        pending.wait()
        message = (irecv if comm.rank == 0 else isend)(x, 1 - comm.rank, group=comm) if comm.rank < 2 else pending
        if comm.rank != 0:
            barrier(group=comm)
            message.wait()
            return None

        def use() -> list:
            calls = [
                lambda: barrier(group=comm),
                lambda: barrier(group=comm, async_op=True).wait(),
                lambda: all_to_all_v(x, counts, counts, group=comm),
                lambda: all_to_all_v(x, counts, group=comm),
                lambda: all_reduce(x, group=comm),
                lambda: comm.fail("barrier", ValueError("no")),
                message.wait,
            ]
            found = [attempt(call) for call in calls]
            assert not comm.usable
            comm.abort("from the child")  # is nothing to the parent
            comm.destroy()
            return [(f.name, "before fork" in f.text and "make a new one in the child" in f.text) for f in found]

        told = forked(use)
        barrier(group=comm)
        message.wait()
        return told

    told = ranks(3, threads=threads, fresh=not threads)(work)[0]
    assert told == str([("BackendUnavailableError", True)] * 7)


PROGRAM = """
import os, signal, sys, warnings
import numpy as np, alltoallv
from alltoallv.numpy import all_to_all_v, all_reduce, barrier
warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, of a fork beside any thread, such as the reactor
comm = alltoallv.Communicator.from_env()
arrays = [all_to_all_v(np.ones(9000 * comm.size), [9000] * comm.size, group=comm) for _ in range(3)]
barrier(group=comm, async_op=True).wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
for _ in range(20):
    assert all_reduce(np.ones(3), group=comm).tolist() == [comm.size] * 3
print("good")
"""


def test_child_that_ends_in_the_ordinary_way(tmp_path):
    """All of Python's clean-up runs in it: handlers at exit, destructors of communicators, arrays, handles."""
    result = run(tmp_path, PROGRAM, "-n", "3", text=True)
    assert sorted(result.stdout.splitlines()) == ["[0] good", "[1] good", "[2] good"], result
    assert (result.returncode, result.stderr) == (0, "")


def test_child_closes_what_it_inherits(ranks):
    def work(comm):
        check_works(comm)
        kept = alltoallv.empty(1000)
        barrier(group=comm)

        def look():
            mine = held()
            return [name for name in mine["descriptors"] if "alltoallv" in name or "pidfd" in name], mine["threads"]

        assert all(look()), "so this is how they look"
        told = forked(look)
        check_works(comm)
        del kept
        return told

    assert ranks(2, fresh=True)(work) == [str(([], []))] * 2


@pytest.mark.parametrize("ending", ["SIGKILL", "_exit"])
def test_parents_death_is_seen_although_the_child_lives(ranks, ending, tmp_path, prompt):
    def work(comm):
        pids = pids_of(comm)
        if comm.rank == 1:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            wait_until_in(comm, 2)
            stamp(tmp_path / "cause")
            if ending == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        failure = attempt(barrier, group=comm)
        assert f"rank 1 (pid {pids[1]}" in failure.text, failure
        survivors = {0: 0, 2: 1}
        comm.destroy()
        with join(survivors[comm.rank], 2, "survivors", comm.domain) as smaller:
            check_works(smaller)
        return failure

    found = ranks(3, fresh=True, outcomes=True)(work)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].report()
        assert found[rank].result.name == "PeerLostError"
        prompt(f"{ending} of a rank whose child lives on", stamped(tmp_path / "cause"), found[rank].result.at)


@on_ranks(3, fresh=True)
def test_children_make_a_communicator_of_their_own(comm):
    """The children of all ranks form a group, while the parents use theirs."""
    check_works(comm)
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_SECONDS)
        status = 1
        try:
            with join(comm.rank, comm.size, "children", comm.domain) as mine:
                for _ in range(5):
                    check_works(mine)
                y = all_to_all_v(np.ones(200_000 * mine.size), [200_000] * mine.size, group=mine)
                assert y.sum() == y.size
            inner = Communicator.threads(2)
            on_threads(check_works, inner)
            status = 0
        except BaseException as error:
            os.write(2, f"child of rank {comm.rank}: {type(error).__name__}: {error}\n".encode())
        os._exit(status)
    for _ in range(5):
        check_works(comm)
    assert os.waitpid(pid, 0)[1] == 0
    check_works(comm)


@pytest.mark.slow
def test_fork_at_any_moment(ranks):
    """While another thread is in the middle of exchanges, of making communicators, of ending them."""

    def work(comm):
        over = threading.Event()
        errors = []

        def exchange() -> None:
            try:
                while not over.is_set():
                    flag = all_reduce(np.array([0]), group=comm)
                    all_to_all_v(np.ones(30_000 * comm.size), [30_000] * comm.size, group=comm)
                    with join(comm.rank, comm.size, "in between", comm.domain) as other:
                        barrier(group=other)
                    del flag
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=exchange)
        thread.start()
        for _ in range(40):
            pid = os.fork()
            if pid == 0:
                signal.alarm(CHILD_SECONDS)
                comm.destroy()
                inner = Communicator.threads(1)
                check_works(inner[0])
                inner[0].destroy()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, "a child hung or died"
        over.set()
        thread.join(10)
        comm.abort("the end")  # the others may be one call ahead
        thread.join(10)
        return [f"{type(e).__name__}: {e}" for e in errors]

    for errors in ranks(2, fresh=True, outcomes=False)(work):
        assert all("the end" in text or "left" in text for text in errors), errors
