"""Brings the ranks of a group together, through its store or an engine that they have, and connects them."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv.errors import CommTimeoutError, PeerLostError
from alltoallv.launch import detect as launch
from alltoallv.launch import seat, variables
from alltoallv.launch.options import make_options, refuse_strangers

T = TypeVar("T")
_log = logging.getLogger("alltoallv")

_WARN_AFTER = _core.CommunicatorOptions().warn_after
_LOOK_SECONDS = 0.05
_STORE_SECONDS = 10.0  # for the store itself to answer

Gather = Callable[[bytes], list[bytes]]  # collective
Ready = Callable[[float], bool]  # waits for some seconds; returns whether the awaited has come
Wait = Callable[[Ready, Callable[[], list[int]]], None]  # returns once it has come; the second returns who is missing


class Peers(NamedTuple):
    """Holds what a rank knows once all ranks of a group have come.

    Attributes:
        who: Each rank's description of itself: ``"pid"`` is the number of its process, ``"host"`` is equal for those
            that can share memory.
        key: Equal on all ranks, and different from every other meeting's.
        job: Of all ranks of a job: what their store alone shares, by which each of them holds its rank.
    """

    who: list[dict[str, Any]]
    key: str
    job: str = ""

    @property
    def processes(self) -> list[int]:
        """Returns the numbers of the ranks' processes."""
        return [_core.process_number(peer["host"], peer["pid"]) for peer in self.who]

    @property
    def hosts(self) -> int:
        """Returns the number of hosts on which the ranks are."""
        return len({peer["host"] for peer in self.who})


class GroupStore:
    """Reads and writes a part of a group's store.

    Only `collect` waits for other ranks. A store that no longer answers raises PeerLostError.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        self.store, self.size = store, size
        self._dead = False

    def post(self, key: str, value: bytes | str) -> None:
        """Sets a key without waiting for an answer."""
        try:
            self.store.set(key, value)
        except RuntimeError as error:
            raise _silent(error) from error

    def collect(self, key: str, wait: Wait) -> list[bytes]:
        """Waits by `wait` for ``key/j`` of every rank j; returns the values."""
        keys = [f"{key}/{j}" for j in range(self.size)]
        wait(lambda step: self.await_(lambda: bool(self.store.check(keys)), step), lambda: self.missing(key))
        if self.store.has_extended_api():
            return self._ask(lambda: [bytes(value) for value in self.store.multi_get(keys)])
        return self._ask(lambda: [bytes(self.store.get(name)) for name in keys])

    def word(self) -> str:
        """Returns a random word, equal for all who see this part of the store; nothing where it cannot be agreed."""
        try:
            return f"torch {bytes(self._ask(lambda: self.store.compare_set('word', '', uuid.uuid4().hex))).decode()}"
        except PeerLostError:  # a store of another kind, or one that no longer answers, which the meeting finds
            return ""

    def missing(self, key: str) -> list[int]:
        """Returns the ranks j that have not posted ``key/j``."""
        return self._ask(lambda: [j for j in range(self.size) if not self.store.check([f"{key}/{j}"])])

    def await_(self, come: Callable[[], bool], step: float) -> bool:
        """Asks until ``come()`` is true, for at most ``step`` seconds; returns whether it was."""

        def poll() -> bool:
            end, pause = time.monotonic() + step, 0.0002
            while not come():
                if time.monotonic() > end:
                    return False
                time.sleep(pause)
                pause = min(pause * 2, _LOOK_SECONDS)
            return True

        return self._ask(poll, step + _STORE_SECONDS)

    def _ask(self, question: Callable[[], T], seconds: float = _STORE_SECONDS) -> T:
        """Asks on a thread, because the store's own calls may wait for minutes where a network is cut."""
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
            raise PeerLostError(f"the group's store has not answered for {_STORE_SECONDS:.0f} s", id=4046)
        if errors:
            raise _silent(errors[0]) from errors[0]
        return answers[0]


def _silent(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"the group's store does not answer: {str(error).splitlines()[0]}", id=4047)


def meet(
    store: dist.Store,
    rank: int,
    size: int,
    name: str,
    timeout: float,
    processes: Sequence[int] = (),
    *,
    all_ranks: bool = False,
    **more: Any,
) -> Peers:
    """Waits for all ranks of group ``name`` at its store, which may hold values of an earlier group.

    Rank 0 opens a place that no meeting has had. A rank that has gone to an old one does not find itself among those
    who were there, and looks for a newer place.

    Args:
        processes: Numbers of the ranks' processes, as far as they are known from an earlier meeting, else 0.
        all_ranks: Whether these are all ranks of the job: then this process alone is this rank of it.
        more: What peers should know of this rank beside its host.

    Raises:
        InvalidParamError: another process is this rank.
        CommTimeoutError: ranks did not come; the message names them.
        PeerLostError: one of the processes has ended.
    """
    own = GroupStore(dist.PrefixStore("alltoallv", store), size)
    key = uuid.uuid4().hex
    own_entry = _introduction(key, more)
    prefix, everybody = "", b"[]"
    job = own.word() if all_ranks and size > 1 else ""
    if job:
        seat.take(job, rank, f"rank {rank} of the group's store", timeout)
    wait = _waiter(f"rank {rank} of group {name!r}", timeout, lambda: _core.check_living(list(processes), rank, name))

    def gathered() -> bool:
        nonlocal prefix, everybody
        opened = own.store.get("place").decode() if own.store.check(["place"]) else ""
        # Rank 0 may have gathered everybody and opened its next place meanwhile.
        if prefix and own.store.check([f"{prefix}/all"]):
            everybody = bytes(own.store.get(f"{prefix}/all"))
            if json.loads(everybody)[rank]["key"] == key:
                return True
        if opened != prefix:
            own.store.set(f"{opened}/{rank}", own_entry)
            prefix = opened
        return False

    if rank == 0:
        own.post(f"{key}/0", own_entry)
        own.post("place", key)
        everybody = b"[" + b",".join(own.collect(key, wait)) + b"]"
        own.post(f"{key}/all", everybody)
    else:
        wait(lambda step: own.await_(gathered, step), lambda: own.missing(prefix) or [0])
    who = json.loads(everybody)
    return Peers(who, who[0]["key"], job)


def _waiter(who: str, timeout: float, look: Callable[[], None] = lambda: None) -> Wait:
    """Returns a function that waits until ``timeout`` seconds from now are over, then names those who are missing.

    It calls ``look`` meanwhile, which may raise, and warns as calls do that wait for peers.
    """
    start = time.monotonic()
    end, next_warning = start + timeout, start + variables.seconds(os.environ, "ALLTOALLV_WARN_AFTER", _WARN_AFTER)

    def wait(ready: Ready, missing: Callable[[], list[int]]) -> None:
        nonlocal next_warning

        def late(verb: str, seconds: float) -> str:
            return f"{who} {verb} {seconds:.1f} s for {', '.join(f'rank {j}' for j in missing())} to join"

        while not ready(min(0.5, max(end - time.monotonic(), 0.0))):
            look()
            now = time.monotonic()
            if now >= end:
                raise CommTimeoutError(late("waited", timeout), id=4048)
            if now >= next_warning:
                next_warning = now + (now - start)
                _log.warning(late("has waited", now - start))

    return wait


def meet_over(gather: Gather, **more: Any) -> Peers:
    """Does `meet` for ranks that have no store, but a function that gives every rank the bytes of all."""
    who = [json.loads(peer) for peer in gather(_introduction(uuid.uuid4().hex, more).encode())]
    return Peers(who, who[0]["key"])


def _introduction(key: str, more: dict[str, Any]) -> str:
    return json.dumps({"host": _core.this_place(), "pid": os.getpid(), "key": key, **more})


def gatherer(peers: Peers, of_group: dist.Store, rank: int, size: int, name: str, timeout: float) -> Gather:
    """Returns a function that gives every rank the bytes of all ranks, through a part of the group's store."""
    numbers = itertools.count()

    def living() -> None:
        _core.check_living(peers.processes, rank, name)

    @functools.cache
    def own_part() -> GroupStore:
        return GroupStore(dist.PrefixStore(f"alltoallv/{peers.key}", connection(of_group)), size)

    def gather(payload: bytes) -> list[bytes]:
        key = f"gather/{next(numbers)}"
        own_part().post(f"{key}/{rank}", payload)
        return own_part().collect(key, _waiter(f"rank {rank}", timeout, living))

    return gather


def connect(
    peers: Peers,
    gather: Gather,
    rank: int,
    size: int,
    name: str,
    timeout: float,
    check: str | None = None,
    *,
    all_ranks: bool = False,
) -> Communicator:
    """Connects the ranks over shared memory on one host; over TCP between hosts, with shared memory inside each host.

    Args:
        gather: Lets ranks on several hosts find each other.
        name: The group's name.
        timeout: Seconds, here and in every operator.
        check: See `Communicator.from_env`.
        all_ranks: Whether these are all ranks of the job.

    Raises:
        InvalidParamError: all ranks belong to different jobs, which have been given one address.
        CommTimeoutError: ranks did not come; the message names them.
        BackendUnavailableError: hosts do not reach each other over TCP.
    """
    domain = f"torch-{name}".replace(":", "-")  # a colon would begin a size
    options = make_options(domain.encode()[:128].decode(errors="ignore"), timeout, check)
    options.rank, options.size = rank, size
    options.job, options.processes = "torch:" + peers.key, peers.processes
    core = _core.communicator(options) if peers.hosts == 1 else _core.engine_communicator(options, gather, None)
    if all_ranks and size > 1:
        here = peers.who[rank]["host"]
        pids = {j: int(peer["pid"]) for j, peer in enumerate(peers.who) if peer["host"] == here}
        # Where another process has claimed this rank there are two jobs, however few ranks of this one are left.
        claimed = bool(peers.job) and seat.contested(peers.job)
        refuse_strangers(launch.depth_of_torch(), pids, 0 if claimed else size, core)
    comm = Communicator(core, options)
    if peers.job:
        weakref.finalize(comm, seat.leave, peers.job)
    return comm


_connections: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def connection(store: Any) -> Any:
    """Returns a connection of this process to a group's store, without its prefixes; a default group's share one.

    Another thread may be in a long wait on the group's own connection. TCPStore takes seconds for about every twelfth.
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
