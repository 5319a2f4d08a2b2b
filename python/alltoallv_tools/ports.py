"""Ports on which a job's first rank will listen."""

from __future__ import annotations

import random
import socket

_CHOICE, _GIVEN = random.SystemRandom(), set[int]()


def free_port() -> int:
    """Returns a TCP port that nobody holds now, and that this process has not been given before.

    It lies below those from which systems take the ports of connections (32768 and up on Linux): one of these could be
    gone before the rank listens. Only if a hundred are taken, it is the system's choice.
    """
    for port in (*(_CHOICE.randrange(10_000, 29_000) for _ in range(100)), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            chosen = int(probe.getsockname()[1])
        if chosen not in _GIVEN or port == 0:
            break
    _GIVEN.add(chosen)
    return chosen
