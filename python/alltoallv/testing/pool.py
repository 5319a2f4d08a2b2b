"""Runs a function on n ranks: in processes that are kept for the next call, in new ones, or in threads."""

from __future__ import annotations

import atexit
import io
import itertools
import os
import sys
import sysconfig
import threading
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from alltoallv.extras import extra
from alltoallv.launch.forkserver import ForkServer
from alltoallv.launch.processes import Guard
from alltoallv.testing.outcome import Outcome, RankFailures
from alltoallv.testing.process import Worker, collect
from alltoallv.testing.threads import run_threads
from alltoallv.testing.worker import Task, code_of_file

if TYPE_CHECKING:
    from typing_extensions import Unpack

cloudpickle = extra("cloudpickle", "testing")

_by_value_lock = threading.Lock()


class CommunicatorOptions(TypedDict, total=False):
    """Arguments of ``Communicator.from_env``, the first two also of ``Communicator.threads``.

    Attributes:
        domain, check, backend, order: As of ``Communicator.from_env``.
    """

    domain: str
    check: str | None
    backend: str
    order: str | None


class RankOptions(CommunicatorOptions, total=False):
    """The options of `Ranks`.

    Attributes:
        fresh, preloaded, threads, communicator, outcomes, timeout, comm_timeout, env: As of a call of `Ranks`.
    """

    fresh: bool
    preloaded: bool
    threads: bool
    communicator: bool
    outcomes: bool
    timeout: float
    comm_timeout: float
    env: Mapping[str, str] | None


class Ranks:
    """A callable that runs a function on ranks; the fixture ``ranks`` is one.

    ``ranks(4)(function, *args)`` calls ``function(communicator, *args)`` on 4 ranks and returns the 4 results
    in rank order. The function and its arguments are pickled by cloudpickle; a function of a test module is
    sent by value. Every call has a new communicator in a domain of its own, which is destroyed afterwards. A
    process whose function failed or left a thread behind is replaced.

    Args:
        preload: modules, such as ``torch``, that a process imports once; ranks are forked from it. They may start no
            threads, and what they read from the environment when imported is as in the first call.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._server: ForkServer | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._guard: Guard | None = None
        self._idle: list[Worker] = []
        self._died_idle: list[Outcome] = []
        self._numbers = itertools.count()
        self._calls = itertools.count()
        self._id = uuid.uuid4().hex

    def __call__(
        self,
        size: int,
        *,
        fresh: bool = False,
        preloaded: bool = True,
        threads: bool = False,
        communicator: bool = True,
        outcomes: bool = False,
        timeout: float = 60.0,
        comm_timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
        **options: Unpack[CommunicatorOptions],
    ) -> Callable[..., list[Any]]:
        """Returns a function that runs another one on ``size`` ranks.

        Args:
            size: number of ranks.
            fresh: start new processes and let them end afterwards; their exit statuses count. For functions
                that kill ranks or change their process.
            preloaded: False, with ``fresh``: new interpreters, that have imported nothing yet.
            threads: ranks are threads of this process instead.
            communicator: False: the function gets ``rank, size`` instead of a communicator.
            outcomes: return an Outcome for every rank instead of raising; for ranks meant to fail.
            timeout: seconds after which all ranks write their stacks and are killed.
            comm_timeout: the communicators' own timeout in seconds.
            env: environment variables of the ranks for this call. What a library reads only once needs
                ``fresh``, and if a preloaded module reads it when imported, ``preloaded=False``.
            **options: further arguments of ``Communicator.from_env`` or ``Communicator.threads``.

        The returned function raises:
            RankFailures: ranks failed; it has every rank's exception and output.
        """
        if size < 1:
            raise ValueError(f"size is {size}, expected at least 1")
        if threads and (fresh or env):
            raise ValueError("threads cannot have fresh=True or an environment of their own")
        if not (preloaded or fresh):
            raise ValueError("preloaded=False is for fresh=True: processes that are kept are all alike")
        call = next(self._calls)
        settings = {"domain": f"ranks-{call}", "timeout": comm_timeout} | options if communicator else None

        def run(function: Callable[..., Any], *args: Any) -> list[Any]:
            if threads:
                results = run_threads(size, function, args, settings, timeout)
            else:
                job = {"ALLTOALLV_JOB_ID": f"{self._id}-{call}-{next(self._calls)}"} | dict(env or {})
                results = self._run(size, function, args, job, settings, timeout, fresh, preloaded)
            for outcome in results:
                if outcome.error is None:
                    for line in outcome.output.splitlines():
                        print(f"[{outcome.rank}] {line}")
            if outcomes:
                return results
            if any(outcome.error is not None for outcome in results):
                raise RankFailures(results)
            return [outcome.result for outcome in results]

        return run

    def close(self) -> None:
        """Ends the processes that are kept.

        Raises:
            RankFailures: a process did not end well, or died between two calls.
        """
        if os.getpid() != self._owner:  # in a forked child the processes belong to its parent
            return
        with self._lock:
            workers, self._idle = self._idle, []
            guard, self._guard = self._guard, None
            server, self._server = self._server, None
        try:
            for worker in workers:
                worker.connection.close()
            outcomes = [*self._died_idle, *(worker.finish(Outcome(worker.number)) for worker in workers)]
        finally:
            for worker in workers:
                worker.kill()
            if server is not None:
                server.close()
            if guard is not None:
                guard.close()
        if any(outcome.error is not None for outcome in outcomes):
            raise RankFailures(outcomes)

    def _run(
        self,
        size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        env: dict[str, str],
        settings: dict[str, Any] | None,
        timeout: float,
        fresh: bool,
        preloaded: bool,
    ) -> list[Outcome]:
        payload = _pickle_by_value(function, args)
        workers, guard, server = self._take(0 if fresh else size)
        try:
            while len(workers) < size:
                workers.append(Worker(next(self._numbers), guard, server if preloaded else None))
            for rank, worker in enumerate(workers):
                variables = {
                    "ALLTOALLV_RANK": str(rank),
                    "ALLTOALLV_WORLD_SIZE": str(size),
                    "ALLTOALLV_LOCAL_RANK": str(rank),
                    "ALLTOALLV_LOCAL_WORLD_SIZE": str(size),
                    "ALLTOALLV_RESTART_COUNT": "0",
                }
                worker.send(Task(rank, size, payload, variables | env, settings))
            outcomes = collect(workers, timeout)
            if fresh:
                for worker in workers:
                    worker.connection.close()
                for worker, outcome in zip(workers, outcomes, strict=True):
                    worker.finish(outcome)
            for worker, outcome in zip(workers, outcomes, strict=True):
                outcome.output += worker.take_output()
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        kept = [] if fresh else [worker for worker in workers if worker.healthy]
        with self._lock:
            self._idle += kept
        for worker in workers:
            if worker not in kept:
                worker.kill()
        return outcomes

    def _take(self, most: int) -> tuple[list[Worker], Guard, ForkServer | None]:
        """Returns idle workers, and what starts others."""
        with self._lock:
            if self._guard is None:
                self._guard = Guard()
            if self._preload and self._server is None:
                self._server = ForkServer(self._preload, "alltoallv.testing.worker.forked", path=sys.path)
            guard, server = self._guard, self._server
            # The longest-serving come first, so that a process mostly keeps its rank.
            self._idle.sort(key=lambda worker: worker.number)
            workers, self._idle = self._idle[:most], self._idle[most:]
        for worker in [worker for worker in workers if worker.process.poll() is not None]:
            workers.remove(worker)
            self._died_idle.append(worker.finish(Outcome(worker.number), "between two calls"))
            worker.kill()
        return workers, guard, server


def _pickle_by_value(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickles a call with all that it needs of its module, unless workers can import that."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    roots = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    package = os.path.dirname(os.path.dirname(__file__))
    roots += [package, f"{package}_tools", f"{package}_emulator"]
    installed = file is None or file.startswith(tuple(root + os.sep for root in roots))
    with _by_value_lock:
        if module is None or installed or module.__name__ in cloudpickle.list_registry_pickle_by_value():
            return _dumps((function, args))
        cloudpickle.register_pickle_by_value(module)
        try:
            return _dumps((function, args))
        finally:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
    """Keeps the file names of code, by which tracebacks find its lines; cloudpickle drops them from 3.1.3 on."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            make, args = self.dispatch_table[types.CodeType](obj)
            return code_of_file, (obj.co_filename, make, args)
        return super().reducer_override(obj)


def _dumps(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


_shared: Ranks | None = None


def run_ranks(size: int, function: Callable[..., Any], *args: Any, **options: Unpack[RankOptions]) -> list[Any]:
    """Runs ``function(communicator, *args)`` on ``size`` ranks, without pytest.

    Returns the results in rank order. The processes are kept until the program ends.

    Raises:
        RankFailures: ranks failed; it has every rank's exception and output.
    """
    global _shared
    if _shared is None or _shared._owner != os.getpid():
        _shared = Ranks()
        atexit.register(_shared.close)
    return _shared(size, **options)(function, *args)
