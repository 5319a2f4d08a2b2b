"""Communicators: a rank's membership in a group of ranks."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType
from typing import Any

from alltoallv import _core, membership
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.launch import hccl, mpi, seat, variables
from alltoallv.launch.job import Launch, follow_growth, withdraw_growth
from alltoallv.launch.options import between_hosts, make_options, on_this_host, take_place

BACKENDS = ("auto", "shm", "tcp", "hccl", "nccl")

_thread_domains = itertools.count()
pending: set[Any] = set()  # handles of all communicators, of which several may stand for one
_numbers = itertools.count()
by_name: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


def default_order() -> str | None:
    """Returns the order of sums that the environment asks for."""
    return variables.order("ALLTOALLV_ORDER", os.environ.get("ALLTOALLV_ORDER"))


class Communicator:
    """Represents rank ``rank`` of the ``size`` ranks of a domain.

    All ranks make every collective call on it in the same order; calls from several threads of one rank are
    ordered by the communicator. A disagreement of the ranks is an error on all of them, after which the communicator
    stays usable. A lost rank, a timeout and an abort end it for good: make a new one.

    Use `from_env` in a program that a launcher started, `threads` in a test.

    Attributes:
        rank (int): This process's or thread's number, from 0.
        size (int): How many ranks there are.
        domain (str): The name under which they have met.
        backend (str): What carries their data: ``"shm"``, ``"tcp"``, ``"mpi"``, ``"hccl"`` or ``"nccl"``.
        epoch (int): How often the ranks have met again with others in place of lost ones.
        order (str | None): ``"rank"`` where reductions on devices add in the order of ranks, else None.
    """

    def __init__(
        self,
        core: _core.Communicator,
        options: _core.CommunicatorOptions | None = None,
        order: str | None = None,
        job: Launch | None = None,
    ) -> None:
        self.core = core
        self.job = job  # whose ranks it has, or those that are left of them, if it is known
        self.order = order or default_order()  # of sums; in host memory it is that of the ranks anyway
        self._options = options  # the options it was made from, as far as they are known
        self.rank: int = core.rank
        self.size: int = core.size
        self.domain: str = core.domain
        self.backend: str = core.backend
        self.epoch: int = membership.epochs.get(core, 0)  # how often its ranks have met again with replacements
        self.grown = 0  # how often newcomers have joined it
        self._device_check: str | None = None  # over HCCL: what `from_env` has been given
        # Of the job, before any loss: whether its ranks meet over TCP, and the ranks of this host.
        self._over_tcp, self._here = self.backend != "shm", membership.ranks_here(self) if job is not None else []
        self.host_core = core if self.backend != "hccl" else None  # serves arrays in host memory
        self.name = f"communicator:{self.domain}:{next(_numbers)}"  # stands for this object in graphs, as a string
        by_name[self.name] = self
        _leave_at_exit()

    @classmethod
    def from_env(
        cls,
        domain: str = "default",
        *,
        backend: str = "auto",
        timeout: float = 600.0,
        check: str | None = None,
        order: str | None = None,
    ) -> Communicator:
        """Returns the communicator of all ranks of this job, as the launcher's environment describes it.

        Collective: returns when all ranks have called it. Asked for again, a domain that is still usable is returned.

        Args:
            domain: ``"name"`` or ``"name:MB"``, at most 128 bytes; MB is the shared memory per rank for outputs
                (default and minimum 200). Domains are independent of each other.
            backend: ``"shm"``: shared memory, all ranks on this host. ``"tcp"``: any number of hosts, between which
                data go over TCP; inside a host they go through shared memory. Rank 0 listens at the launcher's address
                (``MASTER_ADDR`` where it gives none), at ``ALLTOALLV_ROOT_PORT`` or the port after the launcher's.
                ``"auto"``: tcp where the launcher says that there are several hosts, else shm. For MPI see `from_mpi`.
                ``"hccl"``: tensors on NPUs, any number of hosts, one rank per device: the thread's current device, else
                the launcher's local rank; MB in ``domain`` is then the size of HCCL's buffer.
            timeout: Seconds that a rank waits for its peers, here and in every operator.
            check: ``"always"`` (the default in shared memory) compares operator, dtype and counts of all ranks before
                any data move; ``"first"`` (hccl, its default there) does so for the first 8 calls; ``"off"`` does not,
                but in host memory it still compares how many bytes move, because later calls depend on that.
            order: ``"rank"``: reductions add in the order of ranks, with the bits of host memory, on NPUs too.
                Default: ``ALLTOALLV_ORDER``, or the engine's own order.

        Raises:
            InvalidParamError: an argument is wrong, or launcher variables contradict each other or the other ranks'; or
                another job has the address that this one was given.
            BackendUnavailableError: the backend cannot be used here.
            CommTimeoutError: ranks did not come; the message names them.
        """
        job = launch.detect()
        if backend not in BACKENDS:
            raise InvalidParamError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}", id=1224)
        if backend == "nccl":
            raise BackendUnavailableError(
                f"backend is {backend!r}, which Communicator.from_env does not offer: use 'shm', 'tcp', 'hccl' or "
                "'auto', and for MPI Communicator.from_mpi",
                id=5029,
            )
        order = variables.order("order", order)
        options = make_options(domain, timeout, None if backend == "hccl" else check)
        if backend != "hccl" and job.replacement:
            job = follow_growth(job, options.domain)
        options.rank, options.size = job.rank, job.size
        if backend == "hccl":
            _forget_defaults(lambda communicator: communicator.domain == options.domain and not communicator.usable)
            take_place(job, options)
            return cls._on_devices(job, options, check, order)
        return cls._of_job(job, options, backend == "tcp" or (backend == "auto" and job.several_hosts), order)

    @classmethod
    def _on_devices(
        cls, job: Launch, options: _core.CommunicatorOptions, check: str | None, order: str | None
    ) -> Communicator:
        """Returns the communicator over HCCL of all ranks of a job, each with a device."""
        communicator = cls(hccl.from_launch(job, options, check), options, order)
        communicator.job, communicator._device_check = job, check
        return communicator

    @classmethod
    def _of_job(
        cls,
        job: Launch,
        options: _core.CommunicatorOptions,
        several_hosts: bool,
        order: str | None,
        epoch: int = -1,
    ) -> Communicator:
        """Returns the communicator of all ranks of a job in host memory; for ``epoch`` see `membership.meet`."""
        _forget_defaults(lambda communicator: communicator.domain == options.domain and not communicator.usable)
        if not several_hosts:
            job.require_one_host(job.size)

        def connect() -> _core.Communicator:
            return between_hosts(job, options) if several_hosts else on_this_host(job, options)

        core = connect() if job.replacement is None else membership.meet(job, options, connect, epoch)
        communicator = cls(core, options, order, job)
        if several_hosts:
            _of_hosts[:] = [communicator]
        return communicator

    @classmethod
    def from_mpi(
        cls, comm: Any, domain: str = "mpi", *, timeout: float = 600.0, check: str | None = None
    ) -> Communicator:
        """Returns a new communicator over the ranks of an MPI communicator.

        Collective. Ranks that share a host move their data through shared memory, and MPI carries what goes between
        hosts; what the ranks ask for is compared over TCP. ``comm`` is not used otherwise: the communicator has a
        duplicate of it.

        Args:
            comm: An ``mpi4py.MPI.Intracomm``, such as ``MPI.COMM_WORLD``; of an MPI that was initialized with
                ``MPI_THREAD_MULTIPLE``, as mpi4py does, if asynchronous calls are made.
            domain, timeout, check: The same as for `from_env`.

        Raises:
            InvalidParamError: an argument is wrong.
            BackendUnavailableError: mpi4py is missing, or the hosts do not reach each other over TCP.
            CommTimeoutError: ranks did not come.
        """
        options = make_options(domain, timeout, check)
        return cls(mpi.connect(comm, options), options)

    @classmethod
    def threads(
        cls,
        n: int,
        domain: str | None = None,
        *,
        timeout: float = 600.0,
        check: str | None = None,
    ) -> list[Communicator]:
        """Returns ``n`` communicators whose ranks are threads of this process; give one to each thread.

        The transport is that between processes. For the arguments see `from_env`; ``domain`` defaults to a new one.
        """
        n = _core.checked_integer("n", n, 1, membership.MOST_RANKS)
        options = make_options(domain or f"threads-{next(_thread_domains)}", timeout, check)
        options.size = n
        options.job = f"pid-{os.getpid()}"
        return [cls(core, options) for core in _core.thread_communicators(options)]

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Returns a new communicator of the ranks that give the same color; this one stays as it is.

        Collective over this communicator.

        Args:
            color: An integer of 64 bits; ranks of one color come together. None: this rank comes into none.
            key: An integer of 64 bits: the new ranks are ordered by it, and where it is equal by the old ranks.

        Returns:
            The communicator, with domain ``"<this domain>/<color>"`` and this one's timeout, check and budget; None
            for color None.

        Raises:
            InvalidParamError: color or key is no such integer; on every rank.
            BackendUnavailableError: the communicator is not one in host memory.
            PeerMismatchError, PeerLostError, CommTimeoutError: a peer calls something else, died or did not come.
        """
        group = membership.split(self, color, key)
        return None if group is None else Communicator(*group, order=self.order)

    def shrink(self) -> Communicator:
        """Returns a new communicator of the ranks that still live, to go on after a loss.

        Every rank that lives and has not destroyed this communicator calls it: usually on `PeerLostError`, which all of
        them raise. This communicator is unusable then and stays so; one that is still usable is aborted, so that peers
        which wait in it learn of it. Ranks that die meanwhile are also left out. Ranks that are threads count as lost
        once they have destroyed their communicator.

        Returns:
            The communicator, whose ranks are in the old order, with the domain, timeout, check and budget of this one;
            between hosts its data go over TCP.

        Raises:
            BackendUnavailableError: the communicator is not one in host memory.
            CommTimeoutError: a rank that lives did not call it within the timeout.
        """
        if self.job is not None:
            withdraw_growth(self.job, self.domain)  # this job goes on
        smaller = Communicator(*membership.shrink(self), order=self.order, job=self.job)
        smaller._over_tcp, smaller._here = self._over_tcp, self._here
        return smaller

    def rejoin(self) -> Communicator:
        """Returns a new communicator of all ranks of the job: the lost ones are other processes, under their numbers.

        Every rank that lives calls it: usually on `PeerLostError`, which all of them raise. Their launcher starts a
        process for each rank that has ended (``python -m alltoallv run --replace N``), which calls `from_env` as the
        first one did. For one that `grow` has made, whoever starts its processes gives a new one the variables of
        `replacement`. A communicator that is still usable ends; one that `shrink` has made of this one serves as well.
        What a replacement has to know it gets from the others: it has nothing but its number.

        Nobody goes on with fewer ranks than the job has, and a number belongs to one process as long as this lives: of
        two halves that do not see each other, none goes on.

        Returns:
            The communicator, with the ranks of the job, and the domain, timeout, check and budget of this one. Its
            ``epoch`` is greater than that of every communicator in which its ranks have been before.

        Raises:
            BackendUnavailableError: the communicator is not in host memory, not one of all ranks of a job or of those
                that `shrink` left, or nobody replaces ranks.
            CommTimeoutError: ranks did not come within the timeout; the message names them.
        """
        epoch = membership.leave(self)
        job, options = self.job or launch.detect(), self.options()
        withdraw_growth(job, self.domain)
        options.rank, options.size = job.rank, job.size
        return Communicator._of_job(job, options, self._over_tcp, self.order, epoch)

    def replaced(self) -> bool:
        """Returns whether each number of the job has a process now, so that `rejoin` need not wait for one to start.

        A look at the ranks of this host, without a message to others, which may see another state: let all decide
        alike, for example by the minimum of all answers. Nobody sees a host all of whose ranks are lost: `rejoin` waits
        for these. For ranks that go on with `shrink` until then.

        Raises:
            BackendUnavailableError: as `rejoin` does.
        """
        membership.epoch_of(self, "replaced")
        job = self.job or launch.detect()
        return job.size == 1 or all(seat.is_taken(job.key, rank) for rank in self._here)

    def grow(self, n: int) -> Communicator:
        """Returns a new communicator of this one's ranks, with their numbers, and of ``n`` newcomers with the next.

        Collective over this communicator, which stays as it is. The newcomers are processes that have been started with
        the variables of `newcomers`, which call `from_env` with this one's domain, check and, for one over HCCL,
        backend. In host memory its ranks may be replaced if they are lost: see `rejoin`.

        Args:
            n: How many ranks come, at least 1; equal on all ranks.

        Returns:
            The communicator, with the domain, timeout, check and budget of this one.

        Raises:
            InvalidParamError: n is no such number, or not equal on all ranks; on every rank.
            BackendUnavailableError: the ranks are threads; or between hosts not all of a job; or over HCCL not all of a
                job on one host, or on devices of a rank table.
            CommTimeoutError: newcomers did not come within the timeout; the message names their ranks.
            PeerMismatchError, PeerLostError: a peer calls something else, or died.
        """
        if self.backend == "hccl":
            options, job = membership.grow_on_devices(self, n)
            take_place(job, options)
            grown_up = Communicator._on_devices(job, options, self._device_check, self.order)
            self.grown += 1
            return grown_up
        core, options, job = membership.grow(self, n)
        return Communicator(core, options, self.order, job)

    def newcomers(self, n: int) -> list[dict[str, str]]:
        """Returns the variables of the environment for each of the ``n`` processes that the next `grow` is to let in.

        They are the same on all ranks of this communicator; whoever starts a newcomer adds them to the environment.
        Among them is the job's secret, if it has one.
        """
        return membership.newcomers(self, n)

    def replacement(self, rank: int) -> dict[str, str]:
        """Returns the variables of the environment for a process that is to take the place of a lost rank.

        It calls `from_env`, and the others `rejoin`. They are for jobs whose launcher does not start it by itself:
        the jobs of `grow`, whose program has started the processes.

        Args:
            rank: The lost rank's number in the job.

        Raises:
            InvalidParamError: there is no such rank.
            BackendUnavailableError: as `rejoin` does, or another launcher started the job.
        """
        return membership.replacement(self, rank)

    def options(self) -> _core.CommunicatorOptions:
        """Returns the options from which a communicator like this one can be made, except its ranks."""
        own, options = self._options, make_options("default")
        options.domain = self.domain
        if own is None:
            options.job = launch.detect().key
            return options
        for name in ("job", "timeout", "check", "budget_mb"):
            setattr(options, name, getattr(own, name))
        return options

    def stats(self) -> dict[str, int]:
        """Returns this rank's counters by name.

        They are ``operators``, ``failed_operators``; bytes per data path as ``bytes_inline``, ``bytes_push``,
        ``bytes_pull``, ``bytes_cma``, ``bytes_staged``, ``bytes_self``, each counted once, by the rank that made the
        last copy; the arena's ``arena_segments``, ``arena_bytes``, ``arena_used_bytes``, ``arena_quarantined_bytes``,
        ``arena_cut_bytes`` (private copies in place of pages that late peers may write to);
        ``private_outputs`` and ``private_output_bytes`` for outputs beyond the budget; ``cma_permitted``;
        ``processors`` that the ranks have together, which take turns if they are more; ``segment_requests``,
        how often a peer's memory had not come by itself; ``unrung_waits``, sleeps of this process that ended only by
        looking now and then, because nobody had woken them: about 0.
        """
        return self.core.stats()

    def flight_record(self) -> dict[str, Any]:
        """Returns the last operators of every rank: number, name, dtype, state, bytes, start and end in nanoseconds.

        On loss, timeout and abort each rank also writes it to ``$ALLTOALLV_FLIGHT_DIR`` if that is set.
        """
        record: dict[str, Any] = json.loads(self.core.flight_record())
        return record

    def abort(self, reason: str | BaseException = "abort() was called") -> None:
        """Makes every rank's present and later calls fail with `PeerLostError`, which explains why. Callable from any
        thread.
        """
        self.core.abort(_utf8(str(reason)))

    def destroy(self) -> None:
        """Leaves the domain and frees what it holds; a second call does nothing.

        Where this thread is inside a call of it, as in a signal handler, it aborts instead, which ends the call.
        """
        self.core.destroy()
        _release_completed()
        _forget_defaults(lambda communicator: communicator.core is self.core)

    @property
    def usable(self) -> bool:
        """False once destroyed or ended by a loss, a timeout or an abort, and in a forked child."""
        return self.core.usable

    def fail(self, operator: str, error: BaseException) -> None:
        """Uses up this rank's next operator with a failure, which every peer then raises too."""
        self.core.fail(operator, error)

    def keep(self, handle: Any) -> None:
        """Keeps what an asynchronous call needs until it is done, even when its `Handle` is dropped."""
        if pending:
            _release_completed()
        pending.add(handle)

    def __enter__(self) -> Communicator:
        return self

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Returns itself, so that what has a group, as a layer, can be copied: the copy is of the same ranks."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, domain={self.domain!r}, backend={self.backend!r})"


def _utf8(text: str) -> str:
    """Returns the text with escapes for what has no UTF-8, as names of files may have."""
    return text.encode("utf-8", "backslashreplace").decode()


def _release_completed() -> None:
    for handle in list(pending):
        with contextlib.suppress(RuntimeError):  # its device's; whoever waits for that handle is told, nobody else
            if handle.is_completed():
                pending.discard(handle)


defaults: dict[str, Communicator] = {}  # of domain "default", by backend


def default(backend: str = "auto") -> Communicator:
    """Returns the communicator of domain "default" over a backend; the first use makes it.

    One that a loss, a timeout or an abort has ended stays, so that later calls raise instead of waiting for peers that
    may be gone; `Communicator.from_env` and ``destroy()`` make room for another.
    """
    if backend not in defaults:
        defaults[backend] = Communicator.from_env(backend=backend)
    return defaults[backend]


_of_hosts: list[Communicator] = []  # the last communicator of all ranks of a job on several hosts


def of_all_hosts() -> Communicator | None:
    """Returns a communicator of all ranks of a job on several hosts, if `Communicator.from_env` has made one."""
    return _of_hosts[0] if _of_hosts and _of_hosts[0].usable else None


def _forget_defaults(which: Callable[[Communicator], bool]) -> None:
    for backend, communicator in list(defaults.items()):
        if which(communicator):
            defaults.pop(backend, None)


def _leave_at_exit() -> None:
    """Lets ranks of a process that multiprocessing has forked leave as it ends: it does not run atexit's functions."""
    global _leaves
    process = sys.modules.get("multiprocessing.process")
    if _leaves != os.getpid() and process is not None and process.parent_process() is not None:
        _leaves = os.getpid()
        util.Finalize(None, _core.destroy_all, exitpriority=0)


_leaves = 0  # the process that does so
atexit.register(_core.destroy_all)
