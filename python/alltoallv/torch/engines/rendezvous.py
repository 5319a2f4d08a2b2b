"""What the ranks of a group tell each other through the group's store, apart from data: who they are, and trouble."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from alltoallv.errors import CommTimeoutError, PeerLostError

T = TypeVar("T")

_ANSWER_SECONDS = 2.0  # for a roll call; waiting ranks look at the store twice a second
_LOOK_SECONDS = 0.05
_STORE_SECONDS = 10.0  # for the store itself

Ready = Callable[[float], bool]  # waits for some seconds; whether what is waited for has come
Wait = Callable[[Ready, Callable[[], list[int]]], None]  # returns once it has; the second tells who is missing


class Meeting(NamedTuple):
    """What a rank knows once all ranks of a group have come.

    Attributes:
        who: Every rank's `introduction`.
        key: Equal on all ranks, and different from every other meeting's.
    """

    who: list[dict[str, Any]]
    key: str

    @property
    def hosts(self) -> int:
        """How many hosts the ranks are on."""
        return len({peer["host"] for peer in self.who})

    def store(self, of_group: dist.Store, rank: int, size: int) -> GroupStore:
        """A part of the group's store that nobody has written to."""
        return GroupStore(dist.PrefixStore(f"alltoallv/{self.key}", connection(of_group)), rank, size)


class GroupStore:
    """A part of a store that belongs to one communicator.

    Only `collect` waits for other ranks. A store that no longer answers raises PeerLostError.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
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
        wait(lambda step: self.await_(lambda: bool(self.store.check(keys)), step), lambda: self.missing(key))
        if self.store.has_extended_api():
            return self._ask(lambda: [bytes(value) for value in self.store.multi_get(keys)])
        return self._ask(lambda: [bytes(self.store.get(name)) for name in keys])

    def missing(self, key: str) -> list[int]:
        """Ranks j that have not posted ``key/j``."""
        return [j for j in range(self.size) if self.peek(f"{key}/{j}") is None]

    def await_(self, come: Callable[[], bool], step: float) -> bool:
        """Asks until ``come()`` is true, for ``step`` seconds; whether it was."""

        def poll() -> bool:
            end, pause = time.monotonic() + step, 0.0002
            while not come():
                if time.monotonic() > end:
                    return False
                time.sleep(pause)
                pause = min(pause * 2, _LOOK_SECONDS)
            return True

        return self._ask(poll, step + _STORE_SECONDS)

    def absent(self, seq: int, age: float) -> list[int]:
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


def meet(store: dist.Store, rank: int, size: int, name: str, timeout: float, **more: Any) -> Meeting:
    """Waits for all ranks of group ``name`` at its store, which may hold what they wrote for a group of before.

    Rank 0 opens a place that no meeting has had; a rank that has gone to an old one does not find itself among those
    who were there, and looks for a newer.

    Args:
        more: What peers should know of this rank beside its `introduction`.

    Raises:
        CommTimeoutError: ranks did not come; the message names them.
    """
    own = GroupStore(dist.PrefixStore("alltoallv", store), rank, size)
    key = uuid.uuid4().hex
    mine = json.dumps(introduction(key=key, **more))
    place, end, everybody = "", time.monotonic() + timeout, b"[]"

    def wait(ready: Ready, missing: Callable[[], list[int]]) -> None:
        while not ready(min(0.5, max(end - time.monotonic(), 0.0))):
            if time.monotonic() >= end:
                late = ", ".join(f"rank {j}" for j in missing())
                raise CommTimeoutError(f"rank {rank} of group {name!r} waited {timeout:.1f} s for {late} to join")

    def gathered() -> bool:
        nonlocal place, everybody
        opened = own.store.get("place").decode() if own.store.check(["place"]) else ""
        # Rank 0 may have gathered everybody and opened its next place meanwhile.
        if place and own.store.check([f"{place}/all"]):
            everybody = bytes(own.store.get(f"{place}/all"))
            if json.loads(everybody)[rank]["key"] == key:
                return True
        if opened != place:
            own.store.set(f"{opened}/{rank}", mine)
            place = opened
        return False

    if rank == 0:
        own.post(f"{key}/0", mine)
        own.post("place", key)
        everybody = b"[" + b",".join(own.collect(key, wait)) + b"]"
        own.post(f"{key}/all", everybody)
    else:
        wait(lambda step: own.await_(gathered, step), lambda: own.missing(place) or [0])
    who = json.loads(everybody)
    return Meeting(who, who[0]["key"])


_connections: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def connection(store: Any) -> Any:
    """A connection of this process to a group's store, less its prefixes: one for all groups of a default group.

    Another thread may sit in a long wait on the group's own. TCPStore takes seconds for every twelfth or so.
    """
    root = store._underlying_non_prefix_store if isinstance(store, dist.PrefixStore) else store
    if not hasattr(root, "clone"):
        return root
    world = dist.group.WORLD
    if world is None:
        return root.clone()
    if world not in _connections or _connections[world][0] is not root:
        _connections[world] = root, root.clone()
    return _connections[world][1]


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
