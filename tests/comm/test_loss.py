"""Ranks that die or leave: an error on every survivor, at once, and new communicators among them."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest
from started import process_state, wait_for
from trouble import LIMIT, attempt, check_works, join, pids_of, stamp, stamped, wait_until_in

import alltoallv
from alltoallv.numpy import all_reduce, all_to_all_v, barrier
from alltoallv.testing import RankExit

VICTIM = 1
PATHS = ["push", "pull", "cma", "staged"]


def go_on(comm, old_rank: int, suffix: str = "survivors") -> None:
    """The survivors of the loss of the victim make a smaller communicator, in the same domain."""
    survivors = [rank for rank in range(comm.size) if rank != VICTIM]
    comm.destroy()
    with join(survivors.index(old_rank), len(survivors), suffix, comm.domain) as smaller:
        check_works(smaller)


def of_survivors(found) -> list:
    """What the ranks other than the victim have returned."""
    survivors = [outcome for outcome in found if outcome.rank != VICTIM]
    for outcome in survivors:
        assert outcome.error is None, outcome.report()
    return [outcome.result for outcome in survivors]


def check_failure(failure, victim_pid: int, operator: str) -> None:
    assert failure.name == "PeerLostError", failure
    assert failure.code == alltoallv.errors.PeerLostError.code
    assert f"rank {VICTIM}" in failure.text, failure
    assert f"pid {victim_pid}, gone" in failure.text, failure
    assert f"#2 {operator}" in failure.text, failure


ENDINGS = [(2, "SIGKILL"), (3, "SIGSEGV"), (3, "SIGTERM"), (3, "_exit"), (5, "SIGKILL")]


@pytest.mark.parametrize(("size", "ending"), ENDINGS)
def test_loss_while_peers_wait(ranks, size, ending, tmp_path, prompt):
    def work(comm):
        pids = pids_of(comm)
        if comm.rank == VICTIM:
            wait_until_in(comm, 2)
            stamp(tmp_path / "cause")
            if ending == "_exit":
                os._exit(3)
            os.kill(os.getpid(), getattr(signal, ending))
        x = np.ones(1000 * comm.size)
        failure = attempt(all_to_all_v, x, [1000] * comm.size, group=comm)
        assert not comm.usable
        again = attempt(barrier, group=comm)  # for good, and at once
        assert again.name == "PeerLostError"
        assert again.at - again.began < LIMIT
        go_on(comm, comm.rank)
        return pids, failure

    found = ranks(size, fresh=True, outcomes=True)(work)
    assert type(found[VICTIM].error) is RankExit
    for pids, failure in of_survivors(found):
        check_failure(failure, pids[VICTIM], "all_to_all_v")
        prompt(f"{ending} of a rank that is waited for", stamped(tmp_path / "cause"), failure.at)


def test_a_killed_rank_is_never_called_running(ranks):
    """Much memory keeps it ending for a while, in which its sockets are closed and it is no zombie yet."""

    def work(comm):
        if comm.rank == VICTIM:
            held = np.ones(50_000_000)
            barrier(group=comm)
            os.kill(os.getpid(), signal.SIGKILL)
            return held
        barrier(group=comm)
        return attempt(barrier, group=comm).text

    for _ in range(5):
        found = ranks(3, fresh=True, outcomes=True)(work)
        for text in of_survivors(found):
            assert ", gone" in text
            assert "running" not in text


def test_loss_before_the_call(ranks, tmp_path, prompt):
    """The peers are busy elsewhere when it happens: their next call fails at once."""

    def work(comm):
        pids = pids_of(comm)
        (tmp_path / str(comm.rank)).touch()
        if comm.rank == VICTIM:
            wait_for(lambda: {"0", "2"} <= set(os.listdir(tmp_path)), "the end of the all_gather on all ranks")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(lambda: process_state(pids[VICTIM]) in ("Z", ""), "the death")
        failure = attempt(barrier, group=comm)
        go_on(comm, comm.rank)
        return pids, failure

    found = ranks(3, fresh=True, outcomes=True)(work)
    for pids, failure in of_survivors(found):
        check_failure(failure, pids[VICTIM], "barrier")
        prompt("call after a rank was killed", failure.began, failure.at)


def test_whoever_learns_of_a_death_says_so_at_once(ranks):
    """Without a call, once for all domains, and not of a rank that leaves in an orderly way."""

    def work(comm):
        pids = pids_of(comm)
        second, left = comm.split(0), comm.split(0)
        standard_error, (read, write) = os.dup(2), os.pipe()
        os.dup2(write, 2)
        os.close(write)
        with os.fdopen(read) as told:
            if comm.rank == 0:
                left.destroy()
            else:
                assert "rank 0 has left" in attempt(barrier, group=left).text
            barrier(group=comm)
            if comm.rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            line = told.readline()
            for group in (second, comm):
                assert attempt(barrier, group=group).name == "PeerLostError"
            os.dup2(standard_error, 2)
            return pids, line, told.read()

    for pids, line, rest in of_survivors(ranks(3, fresh=True, outcomes=True)(work)):
        expected = rf"alltoallv: domain '.*': rank 1 was lost: .*; rank 1 \(pid {pids[VICTIM]}, gone, .*\)"
        assert re.fullmatch(expected, line.rstrip()), line
        assert rest == ""


def test_who_dies_after_the_first_is_not_told(ranks, tmp_path):
    """The line names the rank of the first death; a later one follows from it, as a launcher ends the rest."""
    second = 2

    def work(comm):
        pids = pids_of(comm)
        standard_error, (read, write) = os.dup(2), os.pipe()
        os.dup2(write, 2)
        os.close(write)
        with os.fdopen(read) as told:
            barrier(group=comm)
            if comm.rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            line = told.readline()
            (tmp_path / str(comm.rank)).touch()
            if comm.rank == second:
                wait_for(lambda: {"0", "3"} <= set(os.listdir(tmp_path)), "what all tell of the first death")
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for(lambda: process_state(pids[second]) in ("Z", ""), "the second death")
            failure = attempt(barrier, group=comm)
            comm.destroy()  # no thread looks at the peers any more
            os.dup2(standard_error, 2)
            return line, told.read(), failure.text

    found = ranks(4, fresh=True, outcomes=True)(work)
    for line, rest, text in [outcome.result for outcome in found if outcome.rank in (0, 3)]:
        assert f"rank {VICTIM} was lost" in line
        assert rest == ""
        assert f"rank {VICTIM} was lost" in text
        assert f"rank {second} was lost" not in text


def test_loss_is_seen_by_asynchronous_calls(ranks, tmp_path, prompt):
    def work(comm):
        barrier(group=comm)
        if comm.rank == VICTIM:
            wait_until_in(comm, 2)
            stamp(tmp_path / "cause")
            os.kill(os.getpid(), signal.SIGKILL)
        works = [barrier(group=comm, async_op=True) for _ in range(3)]
        failures = [attempt(work.wait) for work in works]
        assert [f.name for f in failures] == ["PeerLostError"] * 3
        go_on(comm, comm.rank)
        return failures[-1]

    found = ranks(3, fresh=True, outcomes=True)(work)
    for failure in of_survivors(found):
        prompt("SIGKILL, seen by pending calls", stamped(tmp_path / "cause"), failure.at)


def killed_during(comm, call, delay, cause):
    """Calls without end until the victim is killed; then the survivors go on."""
    pids = pids_of(comm)

    def kill() -> None:
        stamp(cause)
        os.kill(os.getpid(), signal.SIGKILL)

    def for_ever() -> None:
        while True:
            call()

    if comm.rank == VICTIM:
        threading.Timer(delay, kill).start()
    failure = attempt(for_ever)
    stats = comm.stats()
    go_on(comm, comm.rank, f"survivors-{comm.domain}")
    return pids, failure, stats


def kill_in_an_exchange(comm, path, delay, cause, elements):
    counts = [elements] * comm.size
    x = (alltoallv.empty if path == "pull" else np.empty)(elements * comm.size, np.uint8)
    x[:] = comm.rank
    out = (alltoallv.empty if path == "push" else np.empty)(elements * comm.size, np.uint8)
    return killed_during(comm, lambda: all_to_all_v(x, counts, counts, out=out, group=comm), delay, cause)


def check_killed(found, cause, prompt, what) -> None:
    assert found[VICTIM].exit_code == -signal.SIGKILL
    for pids, failure, _ in of_survivors(found):
        assert failure.name == "PeerLostError", failure
        assert f"rank {VICTIM} (pid {pids[VICTIM]}" in failure.text, failure
        assert "operator #" in failure.text
        prompt(what, stamped(cause), failure.at)


@pytest.mark.parametrize("path", PATHS)
def test_loss_in_the_middle_of_an_exchange(ranks, path, tmp_path, prompt):
    cause = tmp_path / "cause"
    delay = random.Random(path).uniform(0.1, 0.2)
    found = ranks(3, outcomes=True, path=path)(kill_in_an_exchange, path, delay, cause, 4 << 20)
    check_killed(found, cause, prompt, f"SIGKILL during an exchange by {path}")
    assert sum(stats[f"bytes_{path}"] for _, _, stats in of_survivors(found)) > 0, "the path carried nothing"


@pytest.mark.parametrize("kind", ["all_reduce", "learning", "inline"])
def test_loss_in_other_operators(ranks, kind, tmp_path, prompt):
    cause = tmp_path / "cause"

    def work(comm):
        x = np.ones({"all_reduce": 3_000_000, "learning": 300_000, "inline": 3}[kind])
        counts = [len(x) // comm.size] * comm.size
        call = (
            (lambda: all_reduce(x, group=comm)) if kind == "all_reduce" else lambda: all_to_all_v(x, counts, group=comm)
        )
        return killed_during(comm, call, 0.15, cause)

    check_killed(ranks(3, outcomes=True)(work), cause, prompt, f"SIGKILL during {kind}")


def test_rank_that_returns_while_others_call(launch, tmp_path, prompt):
    def work(comm):
        barrier(group=comm)
        if comm.rank == VICTIM:
            wait_until_in(comm, 2)
            stamp(tmp_path / "cause")
            comm.destroy()
            return None
        return attempt(barrier, group=comm)

    found = launch(3, work)
    for failure in (found[0], found[2]):
        assert failure.name == "PeerLostError"
        assert f"rank {VICTIM} has left domain" in failure.text
        assert "left, last operator #1 barrier" in failure.text
        assert "#2 barrier" in failure.text
        prompt("a rank leaves while others wait", stamped(tmp_path / "cause"), failure.at)


def test_process_that_ends_without_destroy_has_left(ranks):
    """At exit a rank leaves in an orderly way; whoever still waits for it is told so."""

    def work(comm):
        barrier(group=comm)
        if comm.rank == VICTIM:
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
        return attempt(barrier, group=comm)

    found = ranks(3, fresh=True, outcomes=True)(work)
    for failure in of_survivors(found):
        assert failure.name == "PeerLostError"
        assert f"rank {VICTIM} has left" in failure.text


def test_loss_concerns_one_domain_only(ranks):
    """Ranks 0 and 1 share a domain, ranks 1 and 2 another: each loses only its own."""

    def work(rank, size):
        pairs = {0: [(0, "low")], 1: [(1, "low"), (0, "high")], 2: [(1, "high")]}[rank]
        comms = [join(place, 2, name, name) for place, name in pairs]
        for comm in comms:
            check_works(comm)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            failure = attempt(barrier, group=comms[0])
            assert failure.name == "PeerLostError"
        for _ in range(20):
            check_works(comms[-1])
        assert comms[-1].usable

    found = ranks(3, fresh=True, communicator=False, outcomes=True)(work)
    assert [o.error is None for o in found] == [False, True, True], [o.report() for o in found[1:]]


def test_loss_during_the_birth_of_a_communicator(ranks):
    """A rank dies at some point of the bootstrap: the others end with an error that names it, or by timeout."""

    def work(rank, size, delay):
        if rank == VICTIM:  # by then its peers are there, or not
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            comm = join(rank, size, f"birth-{delay}", timeout=1.0)
        except alltoallv.errors.AllToAllVError as error:
            failure = type(error).__name__, str(error)
        else:
            found = attempt(lambda: [barrier(group=comm) for _ in range(10**9)])
            failure = found.name, found.text
            comm.destroy()
        survivors = [r for r in range(size) if r != VICTIM]
        with join(survivors.index(rank), size - 1, f"birth-after-{delay}", timeout=20.0) as comm:
            check_works(comm)
        return failure

    for k in range(4):
        found = ranks(3, communicator=False, outcomes=True)(work, k * 0.0015)
        assert found[VICTIM].exit_code == -signal.SIGKILL
        for name, text in of_survivors(found):
            assert name in ("PeerLostError", "CommTimeoutError")
            assert "rank" in text


def test_sockets_of_a_lost_rank_close_without_a_pidfd(ranks, tmp_path, prompt):
    """Where the kernel has no pidfds the sockets tell; here both do, and one error results."""

    def work(comm):
        barrier(group=comm)
        if comm.rank == VICTIM:
            wait_until_in(comm, 2)
            stamp(tmp_path / "cause")
            for name in os.listdir("/proc/self/fd"):  # all connections at once, while the process lives on
                try:
                    if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                        os.close(int(name))
                except OSError:
                    pass
            with suppress(AssertionError):
                wait_for(lambda: {"0", "2"} <= set(os.listdir(tmp_path)), "the errors of the others")
            os._exit(0)
        failure = attempt(barrier, group=comm)
        wait_for(lambda: not comm.usable, "poison")
        (tmp_path / str(comm.rank)).touch()
        return failure

    found = ranks(3, fresh=True, outcomes=True)(work)
    for failure in of_survivors(found):
        assert "its connection was closed" in failure.text
        prompt("connections closed", stamped(tmp_path / "cause"), failure.at)
