"""Ports for jobs of the tests."""

from __future__ import annotations

import random
import socket

_CHOICE, _GIVEN = random.SystemRandom(), set[int]()


def free_port() -> int:
    """A port that nobody held a moment ago, and that this process has not given before.

    Below those from which systems take the ports of connections (32768 and up on Linux): one of these could be gone
    before the job listens.
    """
    while True:
        port = _CHOICE.randrange(10_000, 29_000)
        if port not in _GIVEN:
            _GIVEN.add(port)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) != 0:
                    return port
