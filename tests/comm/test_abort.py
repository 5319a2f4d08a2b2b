"""Aborting: every rank wakes, fails at once from then on, and explains why."""

from __future__ import annotations

import threading
import time

import numpy as np
from on_ranks import on_ranks
from started import wait_for
from trouble import LIMIT, attempt, join, wait_until_in

import alltoallv
from alltoallv import Communicator
from alltoallv.numpy import all_to_all_v, barrier

REASON = "the loss became NaN in step 7 – naïvely"


def test_abort_wakes_all_ranks(launch, prompt):
    """From a thread of a rank that is itself blocked."""

    def work(comm):
        barrier(group=comm)
        caused = []

        def abort() -> None:
            wait_until_in(comm, 2, 0, 1, 2)
            caused.append(time.monotonic())
            comm.abort(REASON)

        if comm.rank == 1:
            threading.Thread(target=abort).start()
        if comm.rank == 3:  # never waits in this operator
            wait_for(lambda: not comm.usable, "abort")
            failure = attempt(barrier, group=comm)
        else:
            failure = attempt(all_to_all_v, np.ones(comm.size), [1] * comm.size, group=comm)
        later = [attempt(barrier, group=comm) for _ in range(3)]
        later.append(attempt(all_to_all_v, np.ones(comm.size), [1] * comm.size, [1] * comm.size, group=comm))
        assert not comm.usable
        return caused, failure, later

    found = launch(4, work)
    (cause,) = found[1][0]
    for _, failure, later in found:
        assert failure.name == "PeerLostError"
        assert f"rank 1 aborted: {REASON}" in failure.text
        assert "operator #2" in failure.text
        prompt("abort", cause, failure.at)
        for call in later:
            assert call.name == "PeerLostError"
            assert REASON in call.text
            assert call.at - call.began < LIMIT  # at once


def test_first_abort_counts(launch):
    def work(comm):
        comm.abort(f"by rank {comm.rank}")
        comm.abort("once more")
        return attempt(barrier, group=comm).text.partition(": ")[2]

    texts = launch(3, work)
    assert len(set(texts)) == 1
    rank = texts[0][5]
    assert texts[0] == f"rank {rank} aborted: by rank {rank} [A2A-4049]"


@on_ranks(3)
def test_what_was_published_before_an_abort_counts(comm):
    """A barrier that everybody has entered succeeds on all ranks, whatever one of them does right afterwards."""
    for k in range(50):
        with join(comm.rank, comm.size, f"{k}", comm.domain) as place:
            barrier(group=place)
            if comm.rank == k % comm.size:
                place.abort()


def test_abort_after_the_end_does_nothing():
    first, second = Communicator.threads(2)
    first.destroy()
    first.abort("too late")
    second.destroy()
    second.abort("too late")


def test_abort_with_a_long_reason():
    first, second = Communicator.threads(2)
    first.abort("日本" * 1000)
    failure = attempt(barrier, group=second)
    assert failure.text.partition("aborted: ")[2].strip("日本") == " [A2A-4049]"
    assert len(failure.text) > 300


def test_abort_with_the_exception_that_is_the_reason():
    first, second = Communicator.threads(2)
    first.abort(ValueError("no more data"))
    assert "aborted: no more data" in attempt(barrier, group=second).text
    first.destroy()
    second.destroy()


def test_abort_races_with_everything():
    """From many threads, while calls begin and end, and while it is destroyed."""
    for k in range(12):
        comms = Communicator.threads(3)
        names = []

        def work(comm, names=names):
            try:
                for _ in range(10**6):
                    all_to_all_v(np.ones(3 * comm.size), [3] * comm.size, group=comm)
            except alltoallv.errors.AllToAllVError as error:
                names.append(type(error).__name__)
            comm.destroy()

        workers = [threading.Thread(target=work, args=(comm,)) for comm in comms]
        for worker in workers:
            worker.start()
        time.sleep(0.0012 * k)
        aborts = [threading.Thread(target=comm.abort) for comm in comms for _ in range(2)]
        for thread in aborts:
            thread.start()
        for thread in [*aborts, *workers]:
            thread.join(LIMIT)
            assert not thread.is_alive()
        assert names == ["PeerLostError"] * 3
