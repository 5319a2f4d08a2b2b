"""What the ranks of a group tell each other through the group's store, apart from data: who they are, and trouble."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from alltoallv.errors import CommTimeoutError, PeerLostError

T = TypeVar("T")

_ANSWER_SECONDS = 2.0  # for a roll call; waiting ranks look at the store twice a second
_LOOK_SECONDS = 0.05
_STORE_SECONDS = 10.0  # for the store itself

Ready = Callable[[float], bool]  # waits for some seconds; whether what is waited for has come
Wait = Callable[[Ready, Callable[[], list[int]]], None]  # returns once it has; the second tells who is missing


class GroupStore:
    """A part of the group's store that belongs to one communicator.

    Only `collect` waits for other ranks. A store that no longer answers raises PeerLostError.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        # A connection of its own: another thread may sit in a long wait on the group's.
        self.store = dist.PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)
        self.rank, self.size = rank, size
        self._dead = False
        self._answered = 0  # of the roll calls

    def post(self, key: str, value: bytes | str) -> None:
        """Does not wait for an answer."""
        try:
            self.store.set(key, value)
        except RuntimeError as error:
            raise _silent(error) from error

    def peek(self, key: str) -> bytes | None:
        """The value of a key; None if nobody has set it."""
        return self._ask(lambda: bytes(self.store.get(key)) if self.store.check([key]) else None)

    def set_once(self, key: str, value: str) -> bytes:
        """Sets a key that nobody has set; returns its value, the winner's."""
        return self._ask(lambda: bytes(self.store.compare_set(key, "", value)))

    def collect(self, key: str, wait: Wait) -> list[bytes]:
        """``key/j`` of every rank j, which `wait` waits for."""
        keys = [f"{key}/{j}" for j in range(self.size)]
        wait(lambda step: self._await(keys, step), lambda: self.missing(key))
        if self.store.has_extended_api():
            return self._ask(lambda: [bytes(value) for value in self.store.multi_get(keys)])
        return self._ask(lambda: [bytes(self.store.get(name)) for name in keys])

    def missing(self, key: str) -> list[int]:
        """Ranks j that have not posted ``key/j``."""
        return [j for j in range(self.size) if self.peek(f"{key}/{j}") is None]

    def _await(self, keys: Sequence[str], step: float) -> bool:
        def poll() -> bool:
            end, pause = time.monotonic() + step, 0.0002
            while not self.store.check(list(keys)):
                if time.monotonic() > end:
                    return False
                time.sleep(pause)
                pause = min(pause * 2, _LOOK_SECONDS)
            return True

        return self._ask(poll, step + _STORE_SECONDS)

    def call_roll(self, seq: int, age: float) -> list[int]:
        """Which ranks do not say within 2 s that they were in operator ``seq`` when they were asked."""
        number = self._ask(lambda: int(self.store.add("roll", 1)))
        begin = time.monotonic()
        present = {self.rank}
        while len(present) < self.size and time.monotonic() < begin + _ANSWER_SECONDS:
            time.sleep(_LOOK_SECONDS)
            self.answer_roll(seq, age + time.monotonic() - begin)  # others may ask at the same time
            for j in set(range(self.size)) - present:
                answer = self.peek(f"here/{number}/{j}")
                if answer is not None:
                    there, stay = json.loads(answer)
                    came_later = stay + 2 * _LOOK_SECONDS < time.monotonic() - begin
                    if there > seq or (there == seq and not came_later):
                        present.add(j)
        return sorted(set(range(self.size)) - present)

    def answer_roll(self, seq: int, age: float) -> None:
        """Says that this rank has been in operator ``seq`` for ``age`` seconds, if somebody asks."""
        latest = self._ask(lambda: int(self.store.add("roll", 0)))
        for number in range(self._answered + 1, latest + 1):
            self.post(f"here/{number}/{self.rank}", json.dumps([seq, age]))
        self._answered = latest

    def _ask(self, question: Callable[[], T], seconds: float = _STORE_SECONDS) -> T:
        """On a thread: the store's own calls may wait for minutes where a network is cut."""
        answers: list[T] = []
        errors: list[RuntimeError] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                errors.append(error)

        if not self._dead:
            thread = threading.Thread(target=ask, name="alltoallv-store", daemon=True)
            thread.start()
            thread.join(seconds)
            self._dead = thread.is_alive()
        if self._dead:
            raise PeerLostError(f"the group's store has not answered for {_STORE_SECONDS:.0f} s")
        if errors:
            raise _silent(errors[0]) from errors[0]
        return answers[0]


def _silent(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"the group's store does not answer: {str(error).splitlines()[0]}")


def introduction(**more: Any) -> dict[str, Any]:
    """What peers may want to know of this process."""
    return {"pid": os.getpid(), "name": socket.gethostname(), "host": host(), **more}


def host() -> str:
    """What ranks must have in common to share memory: the kernel, and the namespaces of sockets and processes."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid"))])


def introduce(store: GroupStore, group_name: str, timeout: float, **more: Any) -> list[dict[str, Any]]:
    """Every rank's `introduction`.

    Raises:
        CommTimeoutError: ranks did not come; the message names them.
    """
    store.post(f"rank/{store.rank}", json.dumps(introduction(**more)))
    end = time.monotonic() + timeout

    def wait(ready: Ready, missing: Callable[[], list[int]]) -> None:
        while not ready(min(0.5, max(end - time.monotonic(), 0.0))):
            if time.monotonic() >= end:
                late = ", ".join(f"rank {j}" for j in missing())
                raise CommTimeoutError(
                    f"rank {store.rank} of group {group_name!r} waited {timeout:.1f} s for {late} to join"
                )

    return [json.loads(text) for text in store.collect("rank", wait)]


def describe_rank(rank: int, who: dict[str, Any], left: bool) -> str:
    """As the core does: pid, and state where this process can see it."""
    if who["host"].split()[0::2] == host().split()[0::2]:  # one kernel, one namespace of processes
        return f"rank {rank} (pid {who['pid']}, {'left' if left else process_state(who['pid'])})"
    return f"rank {rank} (pid {who['pid']} on {who['name']}{', left' if left else ''})"


def process_state(pid: int) -> str:
    """``running``, ``stopped`` or ``gone``, from the kernel's own table."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "running")
