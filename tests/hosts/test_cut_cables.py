"""The cable between two hosts is cut, slow, or cut while a host dies: no wait without end, and no wrong byte."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from started import wait_for

from alltoallv.testing.hosts import Host, HostRanks, torchrun_environment

PROGRAM = Path(__file__).with_name("cut_program.py")
TIMEOUT = 4.0  # the leaders stay silent for long enough to fill what TCP buffers
LIMIT = TIMEOUT + 20

Hosts = Callable[..., AbstractContextManager[list[Host]]]


@pytest.fixture
def hosts(two_hosts: Hosts) -> Iterator[list[Host]]:
    with two_hosts() as joined:
        yield joined


def cable(host: Host, state: str) -> None:
    """Takes the end of the cable out of the host, or puts it in."""
    subprocess.run(["ip", "-n", host.name, "link", "set", host.interface, state], check=True)


def at_work(hosts: list[Host], file: Path, port: int) -> HostRanks:
    """Four ranks, two on each host, in the middle of random collectives."""
    place = [hosts[0], hosts[0], hosts[1], hosts[1]]
    ranks = HostRanks(PROGRAM, place, str(file), "1000000", str(TIMEOUT), port=port)
    end = time.monotonic() + 60
    while not file.exists():
        ended = any(process.poll() is not None for process in ranks.processes)
        assert not ended, ranks.outputs(1)
        assert time.monotonic() < end, ranks.outputs(1)
        time.sleep(0.01)
    return ranks


def looked_at(text: str) -> tuple[str, float]:
    """The error's class, and how long the last call has taken."""
    told = re.search(r"after (\S+) s: (\w+)", text)
    assert told, text
    assert ", 0 wrong" in text, text
    return told[2], float(told[1])


def test_a_cut_cable_ends_every_wait(hosts: list[Host], tmp_path: Path) -> None:
    """Put back in time it is not noticed; cut for good it is an error by the timeout."""
    ranks = at_work(hosts, tmp_path / "at-it", 29_530)
    cable(hosts[1], "down")
    time.sleep(0.2)
    cable(hosts[1], "up")
    time.sleep(TIMEOUT)
    assert [process.poll() for process in ranks.processes] == [None] * 4, ranks.outputs(1)
    cable(hosts[1], "down")
    texts = ranks.outputs(60)
    for kind, seconds in map(looked_at, texts):
        assert kind in ("CommTimeoutError", "PeerLostError"), texts
        assert seconds < LIMIT, "\n".join(texts)


def test_of_two_halves_none_goes_on_and_both_do_once_they_meet(hosts: list[Host], tmp_path: Path) -> None:
    def variables(rank: int) -> dict[str, str]:
        return {**torchrun_environment(rank, 4, 2, hosts[0].address, 29_570), "ALLTOALLV_REPLACEMENT": "0"}

    def all_have(what: str) -> bool:
        return len(list(tmp_path.glob(f"{what}-*"))) == 4

    place = [hosts[0], hosts[0], hosts[1], hosts[1]]
    program = PROGRAM.with_name("programs.py")
    ranks = HostRanks(program, place, "two_halves", str(tmp_path), port=29_570, environment=variables)
    wait_for(lambda: all_have("works"), "the first meeting")
    cable(hosts[1], "down")
    wait_for(lambda: all_have("refused"), "an error on all")
    cable(hosts[1], "up")
    texts = ranks.outputs(60)
    for rank, text in enumerate(texts):
        assert "none of them goes on without the others" in text, texts
        assert re.search("rank [23]" if rank < 2 else "for rank 0", text), texts
        assert text.endswith("epoch 1: [4.0]\n"), texts


def test_half_open_connections_end_by_the_timeout(hosts: list[Host], tmp_path: Path) -> None:
    """A host is gone without a word: its ranks are killed while the cable is cut, which is put back afterwards."""
    ranks = at_work(hosts, tmp_path / "at-it", 29_550)
    cable(hosts[1], "down")
    for process in ranks.processes[2:]:
        process.kill()
    time.sleep(0.3)
    cable(hosts[1], "up")
    for text in ranks.outputs(60)[:2]:
        kind, seconds = looked_at(text)
        assert kind in ("CommTimeoutError", "PeerLostError"), text
        assert re.search("rank [23]", text), text
        assert seconds < LIMIT, text


def test_a_slow_cable_changes_no_bit(two_hosts: Hosts, tmp_path: Path) -> None:
    with two_hosts(limit=("20mbit", "32kb", "400ms")) as (a, b):
        ranks = HostRanks(PROGRAM, [a, a, b, b], str(tmp_path / "at-it"), "60", "30", port=29_560)
        texts = ranks.outputs(100)
    assert ranks.codes() == [0] * 4, texts
    assert all("60 operators, 0 wrong" in text for text in texts), texts
