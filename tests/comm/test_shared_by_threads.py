"""Threads that call one communicator at once: ranks may take their calls in different orders, so it is an error."""

from __future__ import annotations

import threading

import numpy as np
from on_ranks import on_ranks
from trouble import check_works, join, on_threads

from alltoallv.errors import PeerLostError, PeerMismatchError
from alltoallv.numpy import all_reduce, barrier

CALLS = 200


def test_two_threads_at_once(ranks):
    def work(rank, size):
        comm = join(rank, size, timeout=30)
        barrier(group=comm)
        start = threading.Barrier(2)
        wrong, errors = [], []

        def use(mine):
            start.wait()
            for call in range(CALLS):
                try:
                    total = all_reduce(np.full(20_000, mine), group=comm)[-1]
                except (PeerMismatchError, PeerLostError) as error:
                    errors.append(error)
                    comm.abort()
                    return
                if total != mine * size and not errors:
                    wrong.append(call)

        on_threads(use, (1, 1000))
        assert len(errors) == 2
        told = [str(error) for error in errors if isinstance(error, PeerMismatchError)]  # else the peer aborted before
        assert all("two threads of rank" in text for text in told), told
        # Of the calls in which the ranks' orders differed before two threads met: no thread saw another until then.
        assert len(wrong) <= 2, f"{len(wrong)} results were mixed before an error came"
        comm.destroy()
        return len(told)

    assert any(ranks(2, communicator=False, fresh=True)(work))


@on_ranks(2, communicator=False)
def test_one_after_the_other(rank, size):
    """Any thread may call while no other does; also beside asynchronous calls that are pending."""
    comm = join(rank, size, timeout=30)
    for _ in range(20):
        pending = barrier(group=comm, async_op=True)
        on_threads(check_works, [comm])
        pending.wait()
        check_works(comm)
    comm.destroy()
