"""Large messages between two ranks of a host, which must not use its network, not even the loopback."""

from __future__ import annotations

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import PeerMismatchError

WORDS = 2_000_000  # 16 MB


def sent_bytes() -> int:
    """What this host has sent over all its interfaces."""
    with open("/proc/self/net/dev") as file:
        lines = file.read().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def values(sender: int, number: int) -> np.ndarray:
    return np.arange(WORDS, dtype=np.int64) * 7 + 1000 * sender + number


comm = Communicator.from_env(timeout=60)
me, away = comm.rank, comm.size - 1  # the last rank is on another host
if me < 2:
    before, peer = sent_bytes(), 1 - me
    for number in range(2):
        sent = [an.isend(values(me, 2 * number + i), peer, tag=i, group=comm) for i in range(2)]
        got = [np.zeros(WORDS, np.int64) for _ in range(2)]
        received = [an.irecv(got[i], peer if number == 0 else None, tag=i, group=comm) for i in (1, 0)]
        for work in [*sent, *received]:
            work.wait()
        for i in range(2):
            assert np.array_equal(got[i], values(peer, 2 * number + i)), (number, i)
        assert [work.source for work in received] == [peer, peer]
    moved = sent_bytes() - before
    assert moved < 1_000_000, moved
    print(f"{moved} bytes over the network")
    call = (lambda: an.send(values(0, 9), 1, group=comm)) if me == 0 else (lambda: an.recv(got[0][1:], 0, group=comm))
    try:
        call()
    except PeerMismatchError:
        pass
    else:
        raise AssertionError("one element less is not refused")
an.barrier(group=comm)

# From any rank, one of which is on another host.
if me == 0:
    from_others = set()
    for _ in range(away):
        work = an.irecv(out := np.zeros(WORDS, np.int64), None, tag=5, group=comm)
        work.wait()
        assert np.array_equal(out, values(work.source, 5))
        from_others.add(work.source)
    assert from_others == set(range(1, comm.size)), from_others
else:
    an.send(values(me, 5), 0, tag=5, group=comm)
an.barrier(group=comm)
comm.destroy()
