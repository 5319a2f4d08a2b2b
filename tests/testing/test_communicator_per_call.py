"""The fixture ``ranks`` with its communicators: golden cases through the operator, ranks that die in it."""

from __future__ import annotations

import os
import time

import pytest

from alltoallv.errors import PeerLostError
from alltoallv.testing import RankFailures, RankTimeout


def test_every_call_has_its_own_communicator(ranks):
    def look(communicator):
        return communicator.rank, communicator.size, communicator.domain, os.getpid()

    for threads in (False, True):
        run = ranks(2, threads=threads)
        first, second, other = run(look), run(look), ranks(2, threads=threads)(look)
        assert [r[:2] for r in first] == [(0, 2), (1, 2)]
        assert [r[3] for r in first] == [r[3] for r in second] == [r[3] for r in other]
        assert first[0][2] == first[1][2] != other[0][2]
        assert ranks(2, threads=threads, domain="mine")(look)[0][2] == "mine"


def test_communicator_is_destroyed_afterwards(ranks):
    kept = []
    ranks(2, threads=True)(kept.append)
    assert [communicator.usable for communicator in kept] == [False, False]

    def fail(communicator):
        kept.append(communicator)
        raise ValueError

    with pytest.raises(RankFailures):
        ranks(2, threads=True)(fail)
    assert not any(communicator.usable for communicator in kept)


def test_failing_function_does_not_leave_its_peers_waiting(ranks):
    def work(communicator):
        from alltoallv.numpy import barrier

        if communicator.rank == 0:
            raise ValueError("no barrier for me")
        barrier(group=communicator)

    for threads in (False, True):
        began = time.monotonic()
        found = ranks(2, threads=threads, outcomes=True)(work)
        assert time.monotonic() - began < 25  # of the 30 s that a communicator waits
        assert [type(o.error) for o in found] == [ValueError, PeerLostError]


def test_threads_that_hang_in_a_call_are_aborted(ranks):
    def work(communicator):
        from alltoallv.numpy import barrier

        if communicator.rank == 0:
            time.sleep(2.5)
        barrier(group=communicator)

    found = ranks(2, threads=True, timeout=1, outcomes=True)(work)
    assert type(found[1].error) is RankTimeout
    assert "barrier" in found[1].output or "barrier" in found[0].output
