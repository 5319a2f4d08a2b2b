"""Runs ranks as threads of this process: over shared memory, or without a transport for worlds of a thousand ranks."""

from __future__ import annotations

import faulthandler
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from alltoallv.testing.data_path import data_path
from alltoallv.testing.outcome import Outcome, RankFailures, RankTimeout
from alltoallv.testing.worker import format_exception

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
