"""Runs functions on ranks, in a worker process or in threads of this one, and reports how they ended."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

from alltoallv.extras import extra
from alltoallv.launch.processes import die_with_parent
from alltoallv.testing.data_path import data_path

OUTPUT_LIMIT = 64 << 10  # characters of a rank's output that a report shows


class RankExit(Exception):
    """A rank's process ended without returning a result, or with a bad exit status.

    ``exit_code`` is negative for a signal, as in ``subprocess.Popen.returncode``.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankTimeout(Exception):
    """A rank did not finish in time and was killed; its stacks are in the output."""


class RemoteError(Exception):
    """Stands for an exception that cannot be sent between processes; its text is the original's."""


@dataclass
class Outcome:
    """Describes how a function ended on one rank.

    Attributes:
        rank: the rank.
        result: what the function returned.
        error: the exception that it raised, or RankExit or RankTimeout; None if all went well.
        traceback: the exception's traceback, as text.
        output: the text that the rank printed.
        exit_code: the process's, negative for a signal; None while the process lives on, and for threads.
    """

    rank: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    output: str = ""
    exit_code: int | None = None

    def report(self) -> str:
        """Returns all that is known, for a person."""
        text = self.traceback or f"{type(self.error).__name__}: {self.error}"
        lines = [f"--- rank {self.rank}: {type(self.error).__name__} ---", text.rstrip()]
        if self.output:
            cut = "...\n" if len(self.output) > OUTPUT_LIMIT else ""
            lines += [f"--- output of rank {self.rank} ---", (cut + self.output[-OUTPUT_LIMIT:]).rstrip()]
        return "\n".join(lines)


class RankFailures(AssertionError):
    """At least one rank failed; the message holds every failing rank's traceback and output.

    Attributes:
        outcomes: the outcomes of all ranks.
        errors: the exception of every rank that failed, by rank.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.errors = {o.rank: o.error for o in outcomes if o.error is not None}
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        summary = "; ".join(f"rank {o.rank}: {type(o.error).__name__}: {_first_line(o.error)}" for o in failed)
        head = f"{len(failed)} of {len(self.outcomes)} ranks failed ({summary})"
        super().__init__("\n".join([head, *(outcome.report() for outcome in failed)]))


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]


cloudpickle = extra("cloudpickle", "testing")

_THREAD_SECONDS = 0.2  # given to threads to end after the function has


@dataclass
class Task:
    """Describes one call on one rank. ``payload`` is the pickled (function, args)."""

    rank: int
    size: int
    payload: bytes
    env: dict[str, str]
    communicator: dict[str, Any] | None  # arguments of from_env; None: the function gets rank and size
    path: list[str] = field(default_factory=lambda: list(sys.path))
    directory: str = field(default_factory=os.getcwd)


@dataclass
class Reply:
    """The result of a call; ``value`` is the pickled result or exception. Only a healthy worker is used again."""

    failed: bool
    value: bytes
    traceback: str = ""
    healthy: bool = True


def code_of_file(name: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    """Unpickles a function's code, and restores the name of its file."""
    return make(*args).replace(co_filename=name)


def main(descriptor: int, parent: int) -> None:
    """Serves the connection until its other end closes; with a ``parent`` other than 0, dies with it."""
    if parent:
        die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()  # also reports where a rank hangs: the parent sends SIGABRT
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    connection: Connection[Any, Any] = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):  # `serve` also finds that
        environment = pickle.loads(connection.recv_bytes())  # the current one; a fork server's is older
        os.environ.clear()
        os.environ.update(environment)
    for module in ("numpy", "ml_dtypes", "alltoallv"):  # most functions need these
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    serve(connection)
    # The interpreter visits all objects several times when it ends: more than a second of work where torch_npu
    # is loaded, and far longer on a busy machine. Once is enough to end what is garbage.
    gc.collect()
    gc.freeze()


def forked(descriptors: Sequence[int]) -> None:
    """The same in a process of a `ForkServer`, which gets its connection and what takes its output."""
    connection, output = descriptors
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    main(connection, 0)


def serve(connection: Connection[Any, Any]) -> None:
    """Runs the calls that it receives, until the other end closes."""
    environment = dict(os.environ)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        reply = run(pickle.loads(message))
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            connection.send_bytes(pickle.dumps(reply))
        except (BrokenPipeError, ConnectionError):
            return


def run(task: Task) -> Reply:
    """Calls the function with the environment and communicator of its rank."""
    threads = set(threading.enumerate())
    os.environ.update(task.env)
    sys.path[:] = task.path
    try:
        os.chdir(task.directory)
        function, args = pickle.loads(task.payload)
        if task.communicator is None:
            result = function(task.rank, task.size, *args)
        else:
            from alltoallv import Communicator

            with data_path(task.communicator.pop("path", None)):
                communicator = Communicator.from_env(**task.communicator)
            try:
                result = function(communicator, *args)
            except BaseException:
                with contextlib.suppress(Exception):  # the function's own error is the one to report
                    communicator.destroy()
                raise
            communicator.destroy()
        reply = Reply(False, cloudpickle.dumps(result))
    except BaseException as error:  # also SystemExit: the process must go on
        reply = Reply(True, pack_exception(error), format_exception(error), healthy=False)
    for thread in set(threading.enumerate()) - threads:
        thread.join(_THREAD_SECONDS)
        reply.healthy &= not thread.is_alive()
    return reply


def pack_exception(error: BaseException) -> bytes:
    """Pickles an exception, or a RemoteError with its text where that does not work both ways."""
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(RemoteError(f"{type(error).__name__}: {error}"))
    return data


def format_exception(error: BaseException) -> str:
    """Returns the traceback without the frame of :func:`run`."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


ABORT_SECONDS = 2.0  # given to a late rank to end once its communicator is aborted


def run_threads(
    size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    settings: dict[str, Any] | None,
    timeout: float,
) -> list[Outcome]:
    """Runs the function on ``size`` threads, with communicators if there are ``settings`` for them."""
    communicators: list[Any] = []
    if settings is not None:
        from alltoallv import Communicator, _core

        if settings.pop("simulated", False):
            communicators = [Communicator(core) for core in _core.simulated_communicators(size, **settings)]
        else:
            with data_path(settings.pop("path", None)):
                communicators = Communicator.threads(size, **settings)
    outcomes = [Outcome(rank) for rank in range(size)]

    def call(rank: int) -> None:
        try:
            if not communicators:
                outcomes[rank].result = function(rank, size, *args)
                return
            try:
                outcomes[rank].result = function(communicators[rank], *args)
            finally:
                communicators[rank].destroy()
        except BaseException as error:
            outcomes[rank].error = error
            outcomes[rank].traceback = format_exception(error)

    threads = []
    for rank in range(size):
        threads.append(threading.Thread(target=call, args=(rank,), name=f"rank-{rank}", daemon=True))
        threads[rank].start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        stacks = _dump_stacks()
        for communicator in communicators:
            communicator.abort(f"rank {late[0]} did not finish within {timeout:g} s")
        for rank in late:
            threads[rank].join(ABORT_SECONDS)
            outcomes[rank].error = RankTimeout(f"rank {rank} did not finish within {timeout:g} s")
            outcomes[rank].output = stacks if rank == late[0] else ""
    return outcomes


def _dump_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


_numbers = itertools.count()


def world(size: int, *, timeout: float = 600.0, comm_timeout: float = 300.0) -> Callable[..., list[Any]]:
    """Returns a function that runs another one on ``size`` simulated ranks and returns their results in rank order.

    ``world(1024)(function, *args)`` calls ``function(communicator, *args)`` on 1,024 threads of this process. Values
    are right and errors are the same on all ranks: exchanges of every kind, reductions and objects are carried out at
    a table, where the last rank of each compares all calls and moves everybody's data. There are neither messages nor
    quantized reductions, and times mean nothing: `run_ranks` has the transport.

    Args:
        size: Number of ranks.
        timeout: Seconds after which ranks that have not finished are given up.
        comm_timeout: Seconds that a rank waits for its peers in an operator.

    Raises:
        ValueError: ``size`` is below 1.
        RankFailures: By the returned function: ranks failed; it has every rank's exception.
    """
    if size < 1:
        raise ValueError(f"size is {size}, expected at least 1")

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        # A thread that waits for Python's lock asks for it every few milliseconds, which thousands must not.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        try:
            return _results(size, function, args, comm_timeout, timeout)
        finally:
            sys.setswitchinterval(interval)

    return run


def _results(
    size: int, function: Callable[..., Any], args: tuple[Any, ...], comm_timeout: float, timeout: float
) -> list[Any]:
    settings = {"domain": f"world-{next(_numbers)}", "timeout": comm_timeout, "simulated": True}
    outcomes = run_threads(size, function, args, settings, timeout)
    if any(outcome.error is not None for outcome in outcomes):
        raise RankFailures(outcomes)
    return [outcome.result for outcome in outcomes]
