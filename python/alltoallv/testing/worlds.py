"""Runs a program's ranks in one process without a transport between them, for worlds of a thousand ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from alltoallv.testing.outcome import RankFailures
from alltoallv.testing.threads import run_threads

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
