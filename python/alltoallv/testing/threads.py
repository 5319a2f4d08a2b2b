"""Runs ranks as threads of this process."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from alltoallv.testing.data_path import data_path
from alltoallv.testing.outcome import Outcome, RankTimeout
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
