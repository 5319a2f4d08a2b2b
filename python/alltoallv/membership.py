"""Makes communicators from others: of some of their ranks, of those that are left after a loss, of all with those who
replace the lost ones, or of more.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import os
import secrets
import select
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from alltoallv import _core
from alltoallv.errors import (
    AllToAllVError,
    BackendUnavailableError,
    CommTimeoutError,
    InvalidParamError,
    PeerLostError,
)
from alltoallv.launch.job import GROWN, GROWN_HOSTS, Launch, announce_growth, grown_job
from alltoallv.launch.options import between_hosts, on_this_host

if TYPE_CHECKING:
    import numpy.typing as npt

    from alltoallv.communicator import Communicator

# Of communicators whose ranks may meet again with those who replace lost ones: how often they have met before.
epochs: weakref.WeakKeyDictionary[_core.Communicator, int] = weakref.WeakKeyDictionary()

NewGroup = tuple[_core.Communicator, _core.CommunicatorOptions]

# The limits of the tries to meet, each twice as long as the one before: a rank that is seen to have died meanwhile is
# left out of the next. A dying process closes its sockets, by which peers learn of it, a moment before it has ended.
_FIRST_TRY, _LONGEST_TRY = 0.05, 1.0  # seconds
_LOOK = 0.05  # seconds between looks at the lives of those that are waited for
_PATIENCE = 5.0  # seconds between survivors that have found each other
_logger = logging.getLogger("alltoallv")
MOST_RANKS = 4096  # of a communicator
_identity = secrets.randbits(62)  # of this process; ranks in other containers may share its number


def split(comm: Communicator, color: int | None, key: int) -> NewGroup | None:
    """Returns what `alltoallv.Communicator.split` makes, with the options it is made from."""
    options = _options_like(comm, "split")
    try:
        color = None if color is None else integer("color", color)
        own_choice = [color is not None, color or 0, integer("key", key)]
    except InvalidParamError as error:
        with contextlib.suppress(AllToAllVError):  # nobody is left to inform: the first error counts
            comm.fail("all_gather", error)
        raise
    gathered = _gather(comm.core, own_choice)
    if color is None:
        return None
    members = sorted((row[2], rank) for rank, row in enumerate(gathered.tolist()) if row[:2] == [1, color])
    options.domain = f"{comm.domain}/{color}"
    ranks = [rank for _, rank in members]
    options.processes = _processes(comm.core, ranks)
    if comm.backend == "shm":
        return _make(options, gathered, ranks, comm.rank)
    options.job = f"split/{gathered[0, 3]:x}"
    return connect(options, comm.core, ranks), options


def connect(
    options: _core.CommunicatorOptions, world: _core.Communicator, members: Sequence[int], limit: float | None = None
) -> _core.Communicator:
    """Returns the communicator of some ranks of one between hosts; collective among these ranks alone.

    They set it up by messages.

    Args:
        options: Job and domain equal on all members and different from others'; they get rank and size.
        whole: The communicator that has more ranks.
        members: The ranks in ``world``, in the order of their ranks in the new one.
        limit: Only after a loss has ended ``world``: the seconds that one survivor waits for another.
    """
    options.rank, options.size = members.index(world.rank), len(members)
    options.processes = _processes(world, members)
    gather = _gatherer(options, world, members, limit)
    if len(set(gather(_core.this_place().encode()))) == 1:
        return _core.communicator(options)
    return _core.engine_communicator(options, gather, None)


def _processes(core: _core.Communicator, members: Sequence[int]) -> list[int]:
    """Returns the numbers of the processes of these ranks: those who wait for one that has ended need not wait on."""
    processes = core.processes
    return [processes[rank] for rank in members] if processes else []


def _gatherer(
    options: _core.CommunicatorOptions, world: _core.Communicator, members: Sequence[int], limit: float | None = None
) -> Callable[[bytes], list[bytes]]:
    """Returns a function that gives every member the bytes, equally many, of all members, through the first of them."""
    # These tags differ from programs' tags; the lower ones also work after a loss (runtime/hosts/tcp_messages.cpp).
    name = f"{options.job}\n{options.domain}"
    tag = -1 - zlib.crc32(name.encode()) % (2**30 - 2) - (0 if limit is None else 2**30)

    def post(operator: str, data: npt.NDArray[np.uint8], peer: int) -> None:
        if limit is not None:
            _post(world, operator, data, peer, tag, limit)
            return
        work = world.post(operator, "uint8", data.ctypes.data, data.nbytes, peer, tag)
        try:
            while not work.wait(_LOOK):
                _core.check_living(options.processes, options.rank, options.domain)
        except PeerLostError as error:
            world.abort(str(error))  # ends the message, so that nothing is written into its memory any more
            with contextlib.suppress(AllToAllVError):
                work.wait()
            raise

    def gather(own: bytes) -> list[bytes]:
        every = np.empty((len(members), len(own)), np.uint8)
        row = np.frombuffer(own, np.uint8).copy()
        if world.rank != members[0]:
            post("send", row, members[0])
            post("recv", every, members[0])
        else:
            every[0] = row
            for j, peer in enumerate(members[1:], 1):
                post("recv", every[j], peer)
            for peer in members[1:]:
                post("send", every, peer)
        return [each.tobytes() for each in every]

    return gather


def _post(world: _core.Communicator, operator: str, data: npt.NDArray[Any], peer: int, tag: int, limit: float) -> None:
    world.post(operator, "uint8", data.ctypes.data, data.nbytes, peer, tag, limit, True)


def shrink(comm: Communicator) -> NewGroup:
    """Returns what `alltoallv.Communicator.shrink` makes, with the options it is made from."""
    final, trial = _options_like(comm, "shrink"), _options_like(comm, "shrink")
    if comm.usable:
        comm.abort(f"rank {comm.rank} called shrink()")
    smaller, options = _shrink_here(comm, final, trial) if comm.backend == "shm" else _shrink_between_hosts(comm, final)
    if comm.core in epochs:
        epochs[smaller] = epochs[comm.core]
    return smaller, options


def _shrink_here(comm: Communicator, final: _core.CommunicatorOptions, trial: _core.CommunicatorOptions) -> NewGroup:
    job, deadline, trial.timeout = final.job, time.monotonic() + final.timeout, min(_FIRST_TRY, final.timeout)
    while True:
        ranks = {entry["rank"]: entry["pid"] for entry in comm.flight_record()["ranks"] if not entry["left"]}
        if comm.rank not in ranks:
            raise InvalidParamError(
                f"the communicator of domain '{comm.domain}' has been destroyed: shrink it before", id=1308
            )
        living = [rank for rank, pid in sorted(ranks.items()) if rank == comm.rank or _lives(pid)]
        trial.job = f"{job}/shrink/{'.'.join(f'{rank}-{ranks.get(rank)}' for rank in living)}"
        trial.rank, trial.size = living.index(comm.rank), len(living)
        trial.processes = _processes(comm.core, living)
        trial.threads = list(ranks.values()).count(os.getpid()) > 1
        try:
            met = _core.communicator(trial)
            try:
                # Not for longer: one that gave up as the others met is trying again, and waits for them there.
                gathered = _gather(met, [0, 0, 0], min(_PATIENCE, final.timeout))
                final.job = job
                final.processes = _processes(met, range(met.size))
                final.join_timeout = min(_PATIENCE, final.timeout)  # one of them may die before it joins
                return _make(final, gathered, list(range(met.size)), met.rank)
            finally:
                met.destroy()
        except (CommTimeoutError, PeerLostError) as error:  # others saw other ranks alive
            if time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"shrink() of domain '{comm.domain}' waited {final.timeout:g} s for the ranks {living}, "
                    f"which live, to call it as well",
                    id=4043,
                ) from error
            trial.timeout = min(2 * trial.timeout, _LONGEST_TRY, final.timeout)


def meet(
    job: Launch,
    options: _core.CommunicatorOptions,
    connect_all: Callable[[], _core.Communicator],
    epoch: int = -1,
    processes: Sequence[int] = (),
) -> _core.Communicator:
    """Returns the communicator of all ranks of a job in which lost ranks are replaced; one that is usable as it is.

    Every number meets once, at rank 0, and one process at a time has a number (`alltoallv.launch.seat`): two parts of a
    job cannot both be complete, and nobody goes on with a part. Whoever ends meanwhile is replaced, and all meet anew.

    Args:
        connect_all: Lets all ranks meet, with ``options``.
        epoch: That of the communicator in which this process has been before; -1: none.
        processes: The numbers of the ranks' processes that must not end meanwhile, by rank; 0: of those who may.

    Raises:
        PeerLostError: one of ``processes`` has ended.
        CommTimeoutError: some numbers have not come; the message names them.
    """
    deadline, patience = time.monotonic() + options.timeout, max(options.warn_after, _PATIENCE)
    while True:
        options.processes = [*processes] or [0] * job.size  # those who were lost come as others
        left = deadline - time.monotonic()
        options.join_timeout = min(patience, max(left, 0.001))
        try:
            core = connect_all()
            if core not in epochs:
                try:
                    epochs[core] = 1 + int(_gather(core, [epoch], options.join_timeout)[:, 0].max())
                except AllToAllVError:
                    with contextlib.suppress(AllToAllVError):
                        core.destroy()  # others may have met: they see at once that this rank meets anew
                    raise
            return core
        except PeerLostError:
            _core.check_living(options.processes, options.rank, options.domain)
            if time.monotonic() >= deadline:
                raise
        except CommTimeoutError as error:
            if left > patience:  # names those who are late, and waits on
                _logger.warning("the %d ranks of the job have not met yet: %s", job.size, error)
                patience *= 2
                continue
            raise CommTimeoutError(
                f"the {job.size} ranks of the job have not met within {options.timeout:g} s, and none of them goes on "
                f"without the others: {error}",
                id=4044,
            ) from None


def leave(comm: Communicator) -> int:
    """Ends a communicator whose ranks are to meet again; returns its epoch."""
    epoch = epoch_of(comm, "rejoin")
    if comm.usable:
        with contextlib.suppress(PeerLostError):  # it is the end of this communicator anyway
            _gather(comm.core, [])  # so that no rank is inside another call of it
        comm.destroy()
    return epoch


def epoch_of(comm: Communicator, function: str) -> int:
    """Returns the epoch of a communicator whose ranks may meet again; BackendUnavailableError for another one."""
    if comm.host_core is None:
        raise BackendUnavailableError(
            f"{function}() of domain '{comm.domain}' over backend '{comm.backend}', expected one in host memory: start "
            "the job again ('python -m alltoallv run --max-restarts N'), or make such a communicator anew over the "
            "ranks that meet in host memory",
            id=5034,
        )
    if comm.core not in epochs:
        raise BackendUnavailableError(
            f"{function}() of domain '{comm.domain}', expected a communicator that Communicator.from_env has made in a "
            "job whose launcher replaces lost ranks ('python -m alltoallv run --replace N'), or one that grow() has "
            "made, or shrink() of one of these",
            id=5035,
        )
    return epochs[comm.core]


def ranks_here(comm: Communicator) -> list[int]:
    """Returns the ranks of a communicator that are on the host of this one."""
    hosts = [process >> 32 for process in comm.core.processes]
    return [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]


def newcomers(comm: Communicator, n: int) -> list[dict[str, str]]:
    """Returns what `alltoallv.Communicator.newcomers` does."""
    job = _grown_job(comm, "newcomers", count(comm, n))
    secret = comm.options().secret
    return [job.variables(rank, secret, 0) for rank in range(comm.size, job.size)]


def replacement(comm: Communicator, rank: int) -> dict[str, str]:
    """Returns what `alltoallv.Communicator.replacement` does."""
    epoch, job = epoch_of(comm, "replacement"), comm.job
    if job is None or job.launcher != "alltoallv":
        raise BackendUnavailableError(
            f"replacement() of domain '{comm.domain}', expected a job of 'python -m alltoallv run' or one that grow() "
            "has made: other launchers start replacements by themselves",
            id=5036,
        )
    rank = _core.checked_rank("rank", rank, job.size)
    return job.variables(rank, comm.options().secret, epoch + 1)


def grow(comm: Communicator, n: int) -> tuple[_core.Communicator, _core.CommunicatorOptions, Launch]:
    """Returns what `alltoallv.Communicator.grow` makes, with the options it is made from, and its job."""
    n, job = _asked(comm, n, "all_gather")
    asked = _gather(comm.core, [n])[:, 0].tolist()
    if len(set(asked)) > 1:
        raise InvalidParamError(f"n is {asked} on ranks 0 to {comm.size - 1}, expected one number on all", id=1309)
    options = comm.options()
    options.rank, options.size = job.rank, job.size
    connect_all = between_hosts if job.several_hosts else on_this_host
    processes = [*(comm.core.processes or [0] * comm.size), *[0] * n]
    # One less, so that it has the epoch of this one; newcomers have been in none.
    core = meet(job, options, lambda: connect_all(job, options), comm.epoch - 1, processes)
    comm.grown += 1
    if comm.job is not None and comm.job.size == comm.size:
        announce_growth(comm.job, comm.domain, job)
    return core, options, job


def grow_on_devices(comm: Communicator, n: int) -> tuple[_core.CommunicatorOptions, Launch]:
    """Returns from what all ranks make a communicator over HCCL with ``n`` newcomers: a job, to whose ranks root info
    goes as to the ranks of any other.
    """
    n, job = _asked(comm, n, "all_to_all_v")
    none = [0] * comm.size
    _core.Plan(comm.core, "all_to_all_v", "uint8", none, none, none, none, terms=n).compare()  # all want as many
    options = comm.options()
    options.rank, options.size = job.rank, job.size
    return options, job


def _asked(comm: Communicator, n: int, operator: str) -> tuple[int, Launch]:
    """Returns the number of newcomers and the job with them; a wrong one fails ``operator``, where peers compare it."""
    try:
        n = count(comm, n)
        return n, _grown_job(comm, "grow", n)
    except InvalidParamError as error:
        with contextlib.suppress(AllToAllVError):
            comm.fail(operator, error)
        raise


def count(comm: Communicator, n: int) -> int:
    """Returns the number of newcomers as an int; raises InvalidParamError if so many cannot come."""
    n = integer("n", n)
    if not 1 <= n <= MOST_RANKS - comm.size:
        raise InvalidParamError(
            f"n is {n}, expected 1 to {MOST_RANKS - comm.size}: a communicator has up to {MOST_RANKS} ranks", id=1310
        )
    return n


def _grown_job(comm: Communicator, function: str, n: int) -> Launch:
    """Returns the job of a communicator with ``n`` newcomers, named as on all ranks, another one each time."""
    if comm.backend == "hccl":
        if comm.job is None or comm.job.rank_table or comm.job.local_size not in (None, comm.size):
            raise BackendUnavailableError(
                f"{function}() of domain '{comm.domain}' over backend 'hccl', expected one of a job on one host, "
                "without a rank table, that Communicator.from_env() or grow() has made",
                id=5037,
            )
        options, processes = comm.options(), []
    else:
        options, processes = _options_like(comm, function), comm.core.processes
    if len(set(processes)) < len(processes):
        raise BackendUnavailableError(
            f"{function}() of domain '{comm.domain}', whose ranks are threads, expected processes", id=5038
        )
    root = None
    if comm.backend not in ("shm", "hccl"):
        if comm.job is None or comm.job.size != comm.size:
            raise BackendUnavailableError(
                f"{function}() of domain '{comm.domain}' over backend '{comm.backend}', expected a communicator that "
                "Communicator.from_env(), rejoin() or grow() has made, at whose address newcomers find rank 0, or one "
                "in shared memory",
                id=5039,
            )
        root = comm.job.root()
    text = f"{options.job}\n{comm.domain}\n{comm.epoch}\n{comm.grown}\n{n}"
    name = (GROWN if root is None else GROWN_HOSTS) + hashlib.sha256(text.encode()).hexdigest()[:32]
    return grown_job(name, comm.rank, comm.size + n, root)


def _shrink_between_hosts(comm: Communicator, options: _core.CommunicatorOptions) -> NewGroup:
    """Lets the survivors meet at the lowest of them, by messages that an ended communicator still carries."""
    job, deadline = options.job.partition("/")[0], time.monotonic() + options.timeout
    options.join_timeout = 10 * _FIRST_TRY  # one of another host that dies as they join is seen by its silence alone
    while True:
        for root in range(comm.rank + 1):
            try:
                message = _survivors(comm, root, options.timeout)
                break
            except PeerLostError:
                if root == comm.rank:
                    raise
        options.job = f"{job}/{message[0]:x}"
        try:
            return connect(options, comm.core, np.flatnonzero(message[1:]).tolist(), _PATIENCE), options
        except (PeerLostError, CommTimeoutError, BackendUnavailableError):  # one of them has died meanwhile
            if time.monotonic() >= deadline:
                raise
            options.join_timeout = min(2 * options.join_timeout, _PATIENCE)


def _survivors(comm: Communicator, root: int, timeout: float) -> npt.NDArray[np.int64]:
    """Returns a number for the new job, and for each rank whether it has come to ``root``.

    Raises:
        PeerLostError: ``root`` is lost.
        CommTimeoutError: a rank that lives did not come.
    """
    message = np.zeros(comm.size + 1, np.int64)
    word, tag = message[:1], -(2**31) + 1  # below the tags of `_gatherer`; the lowest of all means any tag
    if root != comm.rank:
        _post(comm.core, "send", word, root, tag, timeout)
        _post(comm.core, "recv", message, root, tag, timeout)
        return message
    for rank in range(root, comm.size):
        try:
            if rank != root:
                _post(comm.core, "recv", word, rank, tag, timeout)
            message[1 + rank] = True
        except PeerLostError:
            pass
        except CommTimeoutError as error:
            raise CommTimeoutError(
                f"shrink() of domain '{comm.domain}' waited {timeout:g} s for rank {rank}, which lives, to call it",
                id=4045,
            ) from error
    message[0] = secrets.randbits(62)
    for rank in np.flatnonzero(message[1:]).tolist():
        if rank != root:
            with contextlib.suppress(PeerLostError):  # those who meet find out
                _post(comm.core, "send", message, rank, tag, timeout)
    return message


def _options_like(comm: Communicator, function: str) -> _core.CommunicatorOptions:
    if comm.host_core is None:
        raise BackendUnavailableError(
            f"{function}() of domain '{comm.domain}' over backend '{comm.backend}', expected one in host memory",
            id=5040,
        )
    return comm.options()


def integer(name: str, value: Any) -> int:
    """Returns the value as an int; raises InvalidParamError if it is none of 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidParamError(
            f"{name} is {value!r}, expected an integer{' or None' * (name == 'color')}", id=1311
        ) from None
    if not -(2**63) <= number < 2**63:
        raise InvalidParamError(f"{name} is {number}, expected a 64-bit integer", id=1312)
    return number


def _gather(core: _core.Communicator, own: Sequence[int], timeout: float = -1.0) -> npt.NDArray[np.int64]:
    """Returns all ranks' numbers, each followed by one that names the call and two that name the rank's process."""
    row = np.array([*own, secrets.randbits(62), _identity, os.getpid()], np.int64)
    gathered = np.empty((core.size, row.size), np.int64)
    request = _core.Request.all_gather(core.size, row.shape)
    request.plan(core, "all_gather", "int64").run(row.ctypes.data, gathered.ctypes.data, timeout)
    return gathered


def _make(
    options: _core.CommunicatorOptions, gathered: npt.NDArray[np.int64], members: Sequence[int], rank: int
) -> NewGroup:
    """Makes the communicator of the ranks that have come, in this order.

    It is a job of its own, so that no other communicator meets with it.
    """
    options.job = f"{options.job.partition('/')[0]}/{gathered[0, 3]:x}"
    options.rank, options.size = members.index(rank), len(members)
    options.threads = len({tuple(process) for process in gathered[members, 4:].tolist()}) < len(members)
    return _core.communicator(options), options


def _lives(pid: int) -> bool:
    """Returns whether the process is alive: it has not ended, whether or not its parent has waited for it."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # signals are refused here: the meeting finds out
        return pid > 0
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(handle)
