"""A rank in trouble that shares no memory with its peers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from alltoallv.testing.hosts import Host, HostRanks

PROGRAM = Path(__file__).with_name("fault_program.py")
# A leader's message does not fit into what TCP buffers then.
LITTLE = "for way in r w; do echo 4096 4096 4096 > /proc/sys/net/ipv4/tcp_${way}mem; done"

Hosts = Callable[..., AbstractContextManager[list[Host]]]


def told(two_hosts: Hosts, case: str, port: int, on_each: int = 1, prepared: str = "true") -> list[str]:
    """What the ranks say before the timeout of 20 s."""
    with two_hosts() as hosts:
        for host in hosts:
            subprocess.run(host.command("sh", "-c", prepared), check=True)
        ranks = HostRanks(PROGRAM, [host for host in hosts for _ in range(on_each)], case, port=port)
        texts = ranks.outputs(90)
    assert ranks.codes() == [0] * len(texts), texts
    found = [re.search(r"after (\S+) s: (.*)", text) for text in texts]
    assert all(each is not None and float(each[1]) < 15 for each in found), texts
    return [each[2] for each in found if each]


def test_counts_that_differ_with_checking_off(two_hosts: Hosts) -> None:
    """Also with ``check="off"``: what was sent too much would be taken for the data of a later call."""
    for text in told(two_hosts, "other_counts", 29_570):
        assert text.startswith("PeerMismatchError"), text
        assert "rank 0 sends 400000 elements to rank 1, which expects 100000" in text


def test_no_memory_after_the_agreement(two_hosts: Hosts) -> None:
    for text in told(two_hosts, "no_memory", 29_580):
        assert text.startswith("OutOfMemoryError"), text


def test_an_empty_part_with_error_feedback(two_hosts: Hosts) -> None:
    for text in told(two_hosts, "empty_part", 29_590):
        assert float(text.removeprefix("off by ")) < 0.05, text


def test_leaders_that_send_at_once_what_tcp_does_not_take(two_hosts: Hosts) -> None:
    """Each receives while it cannot send, so that neither waits for the other."""
    assert told(two_hosts, "many_rows", 29_600, 8, LITTLE) == ["16.0"] * 16


def test_an_engines_exception_is_told_as_often_as_it_is_asked_for(two_hosts: Hosts) -> None:
    asked = [text.split(", ") for text in told(two_hosts, "broken_engine", 29_610)]
    assert all(first == again for first, again in asked), asked
    # Every engine breaks; a rank whose own has not done so yet hears of the other.
    broken = "the engine is broken"
    assert all(first == broken or re.search(r": rank \d was interrupted in", first) for first, _ in asked), asked
    assert broken in [first for first, _ in asked], asked
