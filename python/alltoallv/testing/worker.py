"""The program of a worker process: runs the functions that it receives, one after the other."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

from alltoallv.extras import extra
from alltoallv.launch.processes import die_with_parent
from alltoallv.testing.data_path import data_path
from alltoallv.testing.outcome import RemoteError

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
