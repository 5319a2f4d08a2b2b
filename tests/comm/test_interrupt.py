"""Ctrl-C: it ends the rank that gets it at once, and the others learn which one it was."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from started import wait_for
from trouble import LIMIT, attempt, check_works, join, once_asleep, stamp, stamped

import alltoallv
from alltoallv.errors import InvalidParamError
from alltoallv.numpy import all_to_all_v, barrier, recv, send

INTERRUPTED = 1


def interrupt(cause: Path) -> None:
    stamp(cause)
    os.kill(os.getpid(), signal.SIGINT)


def blocked_call(comm, kind: str):
    """A call that waits for rank 0, which does not come."""
    if kind == "barrier":
        return lambda: barrier(group=comm)
    if kind == "message":
        return lambda: recv(np.zeros(4), 0, group=comm)
    if kind == "exchange":
        return lambda: all_to_all_v(np.ones(comm.size * 10_000), [10_000] * comm.size, group=comm)
    if kind == "pending":
        return barrier(group=comm, async_op=True).wait
    assert kind == "queued"  # behind a pending call, which is what waits for rank 0
    barrier(group=comm, async_op=True)
    return lambda: barrier(group=comm)


@pytest.mark.parametrize("kind", ["barrier", "exchange", "pending", "queued"])
def test_interrupt_of_a_blocked_rank(ranks, kind, tmp_path, prompt):
    cause = tmp_path / "cause"

    def work(comm):
        barrier(group=comm)
        ended = None
        if comm.rank == 0:
            deadline = time.monotonic() + LIMIT + 2
            while comm.usable and time.monotonic() < deadline:
                time.sleep(0.01)
            failure = attempt(barrier, group=comm)
        elif comm.rank == INTERRUPTED:
            call = blocked_call(comm, kind)
            failure = None
            try:
                once_asleep(partial(interrupt, cause))
                call()
            except KeyboardInterrupt:
                ended = time.monotonic()
            if kind == "pending":  # the call itself goes on; leaving the program ends it
                comm.abort("interrupted")
        else:
            failure = attempt(
                barrier if kind != "exchange" else blocked_call(comm, kind),
                **({"group": comm} if kind != "exchange" else {}),
            )
        if comm.rank == INTERRUPTED:
            failure = attempt(barrier, group=comm)
        comm.destroy()
        with join(comm.rank, comm.size, "afterwards", comm.domain) as fresh:  # the program may go on
            check_works(fresh)
        return failure, ended

    found = ranks(3, fresh=True)(work)
    prompt(f"KeyboardInterrupt in a {kind} call", stamped(cause), found[INTERRUPTED][1])
    for rank in (0, 2):
        failure = found[rank][0]
        assert failure.name == "PeerLostError"
        assert f"rank {INTERRUPTED} " in failure.text
        assert "interrupted" in failure.text
    prompt("another rank is interrupted", stamped(cause), found[2][0].at)


def test_interrupt_during_bootstrap(ranks, tmp_path, prompt):
    cause = tmp_path / "cause"

    def work(rank, size):
        if rank == 0:
            once_asleep((tmp_path / "joins").touch)
            failure = attempt(join, rank, size)
            return failure.name, failure.text, failure.at
        if rank == INTERRUPTED:
            wait_for((tmp_path / "joins").exists, "rank 0")
            once_asleep(partial(interrupt, cause))
            with pytest.raises(KeyboardInterrupt):
                join(rank, size)
            return None, "", time.monotonic()
        return None  # the one that they wait for

    found = ranks(3, communicator=False, fresh=True)(work)
    assert found[0][0] == "PeerLostError"
    assert f"rank {INTERRUPTED}" in found[0][1]
    for _, _, at in found[:2]:
        prompt("interrupt during bootstrap", stamped(cause), at)


def test_interrupt_in_the_middle_of_exchanges(ranks, tmp_path):
    """Wherever it falls between Python and core, nothing hangs."""

    def work(comm):
        try:
            if comm.rank == INTERRUPTED:
                threading.Timer(0.3, interrupt, (tmp_path / "cause",)).start()
            while True:
                all_to_all_v(np.ones(3 * comm.size), [3] * comm.size, group=comm)
        except KeyboardInterrupt:
            return "KeyboardInterrupt"
        except alltoallv.errors.PeerLostError as error:
            return str(error)

    for _ in range(5):
        found = ranks(3)(work)
        assert found[INTERRUPTED] == "KeyboardInterrupt"
        for rank in (0, 2):
            assert re.search(f"rank {INTERRUPTED} (was interrupted|has left|\\(pid)", found[rank]), found[rank]


def test_handler_of_the_program_runs_and_the_call_goes_on(ranks, tmp_path):
    def work(comm):
        before = signal.signal(signal.SIGUSR1, lambda number, frame: (tmp_path / f"seen{comm.rank}").touch())
        barrier(group=comm)
        if comm.rank == 0:  # the handlers run while the others wait for it
            for rank in (1, 2):
                wait_for((tmp_path / f"seen{rank}").exists, f"the handler of rank {rank}")
        else:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        barrier(group=comm)
        signal.signal(signal.SIGUSR1, before)
        check_works(comm)

    ranks(3, fresh=True)(work)


@pytest.mark.parametrize("kind", ["barrier", "exchange", "pending", "queued", "message"])
def test_handler_that_destroys_ends_the_call_on_all_ranks(ranks, kind, tmp_path, prompt):
    cause = tmp_path / "cause"

    def work(comm):
        barrier(group=comm)
        if comm.rank != INTERRUPTED:
            wait_for(lambda: not comm.usable, "abort")
            return attempt(barrier, group=comm)

        def leave(number, frame):
            stamp(cause)
            comm.destroy()
            sys.exit(7)

        before = signal.signal(signal.SIGUSR1, leave)
        call = blocked_call(comm, kind)
        once_asleep(partial(os.kill, os.getpid(), signal.SIGUSR1))
        with pytest.raises(SystemExit, match="7"):
            call()
        ended = time.monotonic()
        signal.signal(signal.SIGUSR1, before)
        comm.destroy()
        with join(0, 1, "afterwards", comm.domain) as fresh:
            check_works(fresh)
        return ended

    found = ranks(2, fresh=True)(work)
    assert found[0].name == "PeerLostError"
    assert f"rank {INTERRUPTED} aborted: destroy() was called inside a call" in found[0].text
    prompt(f"destroy() in a handler in a {kind} call", stamped(cause), found[INTERRUPTED])


@pytest.mark.parametrize("kind", ["barrier", "pending", "queued", "message"])
def test_handler_is_refused_other_calls_and_the_call_goes_on(ranks, kind, tmp_path):
    def work(comm):
        barrier(group=comm)
        x, refused = np.zeros(4), []
        if comm.rank != INTERRUPTED:
            wait_for((tmp_path / "over").exists, "the handler")
            send(x, INTERRUPTED, group=comm) if kind == "message" else barrier(group=comm)
            if kind == "queued":
                barrier(group=comm)
            return check_works(comm)

        def use(number, frame):
            bad = [1] * (comm.size + 1)  # which is announced to the peers elsewhere
            for call in (
                lambda: barrier(group=comm),
                lambda: barrier(group=comm, async_op=True),
                lambda: all_to_all_v(x, bad, group=comm),
                lambda: send(x, 0, group=comm),
            ):
                with pytest.raises(InvalidParamError) as error:
                    call()
                refused.append(str(error.value))
            (tmp_path / "over").touch()

        before = signal.signal(signal.SIGUSR1, use)
        call = blocked_call(comm, kind)
        once_asleep(partial(os.kill, os.getpid(), signal.SIGUSR1))
        call()
        signal.signal(signal.SIGUSR1, before)
        check_works(comm)
        return refused

    refused = ranks(2, fresh=True)(work)[INTERRUPTED]
    assert len(refused) == 4
    assert sum("inside another call of the same thread" in text for text in refused) == 3, refused
