"""Ranks on two hosts wait for messages that nobody sends or takes; tells the errors, and how long they took."""

from __future__ import annotations

import time

import numpy as np

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import DeadlockError

SMALL, LARGE = np.ones(2), np.ones(1 << 20)


def crossed(name: str, call: object, other: object) -> None:
    """Rank 0 makes one call, rank 1 the other; each gets the error."""
    first, second = (Communicator.from_env(f"{name}-{which}", timeout=30) for which in "ab")
    begin = time.monotonic()
    try:
        (call if first.rank == 0 else other)(first, second, 1 - first.rank)
    except DeadlockError as error:
        print(f"{name} {time.monotonic() - begin:.3f} {error}", flush=True)
    for comm in (first, second):
        comm.destroy()


def barrier(first: Communicator, second: Communicator, peer: int) -> None:
    an.barrier(group=second)


def recv(first: Communicator, second: Communicator, peer: int) -> None:
    an.recv(np.empty(2), peer, group=first)


def send(first: Communicator, second: Communicator, peer: int) -> None:
    an.send(LARGE, peer, group=first)


def late(first: Communicator, second: Communicator, peer: int) -> None:
    """Takes late what the peer sends without waiting for it, which is no deadlock."""
    if first.rank == 0:
        sent = an.isend(LARGE, peer, group=first)
        an.barrier(group=second)
        sent.wait()
    else:
        time.sleep(1.5)
        an.barrier(group=second)
        time.sleep(1.5)
        an.recv(np.empty_like(LARGE), peer, group=first)
        an.send(SMALL, peer, group=first)
    if first.rank == 0:
        an.recv(np.empty(2), peer, group=first)
    an.barrier(group=first)
    print("late ok", flush=True)


crossed("late", late, late)
crossed("recv", recv, barrier)
crossed("send", send, barrier)
crossed("both", send, send)
