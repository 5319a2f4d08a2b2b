"""Runs a function on n ranks: in processes that are kept for the next call, in new ones, or in threads."""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypedDict

from alltoallv.extras import extra
from alltoallv.launch.processes import Forked, ForkServer, Guard, describe_exit, kill_group
from alltoallv.testing.worker import (
    OUTPUT_LIMIT,
    Outcome,
    RankExit,
    RankFailures,
    RankTimeout,
    Reply,
    Task,
    code_of_file,
    run_threads,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


EXIT_SECONDS = 30.0  # for a process to end after its last function; torch takes long on a busy machine
DUMP_SECONDS = 2.0  # for a process to write its stacks before it is killed
END_SECONDS = 5.0  # for a process to end when it is asked to

# Arguments: the connection's descriptor, the parent's pid, and its sys.path.
_WORKER = """
import sys
sys.path[:] = sys.argv[3:]
from alltoallv.testing.worker import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


def _start(connection: int, output: int) -> subprocess.Popen[bytes]:
    # The kernel watches the thread that starts a process; other threads may end too early.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    return subprocess.Popen(
        [sys.executable, "-u", "-c", _WORKER, str(connection), str(parent), *sys.path],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[connection],
        start_new_session=True,
    )


class Worker:
    """A process that runs functions, as the parent sees it."""

    def __init__(self, number: int, guard: Guard, server: ForkServer | None = None) -> None:
        self.number = number
        self.healthy = True
        self._guard = guard
        # One description for both processes: the child appends, the parent reads and empties it.
        self._output = os.memfd_create("rank-output")
        ours, theirs = socket.socketpair()
        start = _start if server is None else server.start
        with theirs:
            self.process: subprocess.Popen[bytes] | Forked = start(theirs.fileno(), self._output)
        guard.add(self.process.pid)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self.connection.send_bytes(pickle.dumps(dict(os.environ)))
        self.pidfd = os.pidfd_open(self.process.pid)

    def send(self, task: Task) -> None:
        """Starts a call. If the process has just died, :func:`collect` finds out."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self.connection.send_bytes(pickle.dumps(task))

    def receive(self, outcome: Outcome) -> None:
        """Receives the reply; without one, the process has ended."""
        try:
            if not self.connection.poll(0):
                raise EOFError
            reply: Reply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.healthy = False
            self.finish(outcome, "before the function returned")
            return
        self.healthy = reply.healthy
        outcome.traceback = reply.traceback
        try:
            value = pickle.loads(reply.value)
        except Exception as error:
            outcome.error = error
            outcome.traceback += f"(the value sent back cannot be read: {error})"
            return
        if reply.failed:
            outcome.error = value
        else:
            outcome.result = value

    def finish(self, outcome: Outcome, when: str = "") -> Outcome:
        """Waits for the process to end; notes what it printed and its exit status, of which a bad one is an error."""
        who = f"rank {outcome.rank} (pid {self.process.pid})"
        try:
            outcome.exit_code = self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.dump_stacks()
            outcome.exit_code = self.end_soon(time.monotonic() + DUMP_SECONDS)
            outcome.error = outcome.error or RankTimeout(f"{who} did not exit within {EXIT_SECONDS:g} s")
        if outcome.error is None and (when or outcome.exit_code != 0):
            text = " ".join(filter(None, [who, describe_exit(outcome.exit_code), when]))
            outcome.error = RankExit(text, outcome.exit_code)
        outcome.output += self.take_output()
        return outcome

    def dump_stacks(self) -> None:
        """Makes the process write its threads' stacks and end."""
        self.process.send_signal(signal.SIGABRT)

    def end_soon(self, deadline: float) -> int:
        """Waits for the process's end, kills it after ``deadline``, and returns its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        kill_group(self.process.pid)
        return self.process.wait()

    def take_output(self) -> str:
        """Returns what the process has printed since the last call; at most a bit more than a report shows."""
        if self._output < 0:
            return ""
        length = os.fstat(self._output).st_size
        data = os.pread(self._output, OUTPUT_LIMIT + 1, max(0, length - OUTPUT_LIMIT - 1))
        os.ftruncate(self._output, 0)
        os.lseek(self._output, 0, os.SEEK_SET)
        return data.decode(errors="replace")

    def kill(self) -> None:
        """Ends the process and all that it started, and frees its resources. Idempotent."""
        if self._output < 0:
            return
        # Whatever writes at a process's end, such as coverage.py, does so on this signal; all others end at once.
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        # This is done even if it has ended by itself: it may have left others behind.
        kill_group(self.process.pid)
        self._guard.remove(self.process.pid)
        self.process.wait()
        self.connection.close()
        os.close(self.pidfd)
        os.close(self._output)
        self._output = -1


def collect(workers: list[Worker], timeout: float) -> list[Outcome]:
    """Waits for every worker's reply or end, and returns the outcomes."""
    outcomes = [Outcome(rank) for rank in range(len(workers))]
    waiting = dict(enumerate(workers))
    end = time.monotonic() + timeout
    while waiting:
        sources: dict[Any, int] = {}
        for rank, worker in waiting.items():
            sources[worker.connection] = sources[worker.pidfd] = rank
        ready = wait(list(sources), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for rank in {sources[source] for source in ready}:
            waiting.pop(rank).receive(outcomes[rank])
    for worker in waiting.values():  # all at once: their stacks then show the same moment
        worker.dump_stacks()
    killing = time.monotonic() + DUMP_SECONDS
    for rank, worker in waiting.items():
        worker.healthy = False
        outcomes[rank].exit_code = worker.end_soon(killing)
        outcomes[rank].error = RankTimeout(
            f"rank {rank} (pid {worker.process.pid}) did not finish within {timeout:g} s and was killed"
        )
    return outcomes


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
