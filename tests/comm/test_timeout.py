"""Ranks that do not arrive: warnings, then an error on all, each naming who is late and what it does."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from started import process_state, wait_for
from trouble import LIMIT, attempt, check_works, join, pids_of

import alltoallv
from alltoallv import Communicator
from alltoallv.launch.options import make_options
from alltoallv.numpy import all_reduce, all_to_all_v, barrier

LATE = 1


def barrier_only(comm) -> None:
    barrier(group=comm)


@pytest.mark.parametrize(
    ("operator", "threads"), [("all_to_all_v", False), ("all_reduce", False), ("barrier", False), ("barrier", True)]
)
def test_rank_that_never_arrives(ranks, operator, threads, prompt):
    def call(comm):
        if operator == "all_to_all_v":
            return lambda: all_to_all_v(np.ones(2 * comm.size), [2] * comm.size, group=comm)
        if operator == "all_reduce":
            return lambda: all_reduce(np.ones(50_000), group=comm)
        return lambda: barrier(group=comm)

    def work(comm):
        pids = pids_of(comm)
        if comm.rank == LATE:
            wait_for(lambda: not comm.usable, "timeout of the others")
            time.sleep(0.2)
        failure = attempt(call(comm))
        again = attempt(barrier, group=comm)
        assert again.text == failure.text
        assert again.at - again.began < LIMIT
        assert not comm.usable
        return pids, failure

    ranks(3, threads=threads)(barrier_only)  # processes that have started: the timeout holds for the bootstrap too
    found = ranks(3, threads=threads, comm_timeout=2.0)(work)
    pids = found[0][0]
    began = min(failure.began for _, failure in found)  # whoever came first has waited the longest
    for rank, (_, failure) in enumerate(found):
        assert failure.name == "CommTimeoutError", failure
        assert failure.code == alltoallv.errors.CommTimeoutError.code
        assert failure.text == found[0][1].text  # also on the late one
        assert re.search(r"rank \d waited \d+\.\d s", failure.text)
        assert f"#2 {operator}" in failure.text
        assert f"for rank {LATE} (pid {pids[LATE]}, running, last operator #1 all_gather)" in failure.text
        if rank == LATE:
            prompt("a late rank meets the timeout", failure.began, failure.at)
        else:
            assert failure.at - began >= 1.9
            prompt("timeout of 2 s", began + 2, failure.at)


def test_rank_that_is_stopped(ranks, tmp_path):
    def work(comm):
        pids = pids_of(comm)
        if comm.rank == LATE:
            os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 resumes it
        else:
            wait_for(lambda: process_state(pids[LATE]) == "T", "SIGSTOP")
        failure = attempt(barrier, group=comm, timeout=1.0)
        (tmp_path / str(comm.rank)).touch()
        if comm.rank == 0:
            wait_for((tmp_path / "2").exists, "the error of rank 2")
            os.kill(pids[LATE], signal.SIGCONT)
        comm.destroy()
        with join(comm.rank, comm.size, "afterwards", comm.domain) as fresh:
            check_works(fresh)
        return failure.text, pids[LATE]

    found = ranks(3)(work)
    assert len({text for text, _ in found}) == 1
    text, pid = found[0]
    assert f"for rank {LATE} (pid {pid}, stopped, last operator #1 all_gather)" in text


def test_several_late_ranks_are_all_named(launch):
    def work(comm):
        barrier(group=comm)
        if comm.rank in (1, 3):
            wait_for(lambda: not comm.usable, "timeout")
        return attempt(barrier, group=comm, timeout=1.0).text

    texts = launch(4, work)
    assert len(set(texts)) == 1
    assert re.search(r"for rank 1 \(.*\), rank 3 \(.*\); the timeout is over \[A2A-4012\]$", texts[0])


def test_timeout_of_one_call(launch, prompt):
    def work(comm):
        barrier(group=comm)
        if comm.rank == LATE:
            wait_for(lambda: not comm.usable, "timeout")
        failures = []
        for call in (
            lambda: all_to_all_v(np.ones(comm.size), [1] * comm.size, [1] * comm.size, group=comm, timeout=0.5),
            lambda: all_reduce(np.ones(3), group=comm, timeout=0.5),
            lambda: barrier(group=comm, timeout=0.5),
        ):
            failures.append(attempt(call))
        return failures

    found = launch(3, work)
    began = min(failures[0].began for failures in found)
    for rank, failures in enumerate(found):
        assert {f.name for f in failures} == {"CommTimeoutError"}
        assert re.search(r"rank \d waited (0\.[5-9]|\d+\.\d) s", failures[0].text)
        if rank != LATE:
            prompt("timeout of one call", began + 0.5, failures[0].at)


def test_timeout_of_asynchronous_calls(launch, tmp_path):
    def work(comm):
        x, counts = np.ones(comm.size), [1] * comm.size
        looked = [tmp_path / f"{comm.domain.replace('/', '-')}-{rank}" for rank in range(comm.size) if rank != LATE]
        if comm.rank == LATE:
            wait_for(lambda: all(file.exists() for file in looked), "a look at the others' calls")
        _, pending = all_to_all_v(x, counts, counts, group=comm, async_op=True)
        if comm.rank != LATE:  # waiting has a limit of its own, which ends nothing
            for limit in (0.1, -1):
                with pytest.raises(alltoallv.errors.CommTimeoutError, match="still under way"):
                    pending.wait(limit)
            assert comm.usable
            assert not pending.is_completed()
            looked[comm.rank > LATE].touch()
        pending.wait()
        if comm.rank == LATE:
            wait_for(lambda: not comm.usable, "timeout")
        _, pending = all_to_all_v(x, counts, counts, group=comm, async_op=True, timeout=0.5)
        failure = attempt(pending.wait)
        assert pending.is_completed()
        return failure

    found = launch(3, work)
    assert len({f.text for f in found}) == 1
    assert f"for rank {LATE}" in found[0].text


class Warnings(logging.Handler):
    """Collects what the logger of the package says; there is a file named after those for whom rank 0 waits in the
    first barrier.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self.texts.append(record.getMessage())
        if self.texts[-1].startswith("rank 0 ") and "#2 barrier" in self.texts[-1]:
            waits = self.texts[-1].partition(" for ")[2]
            (self.folder / f"for {', '.join(re.findall(r'rank [0-9]+', waits))}").touch()


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_warning_names_late_ranks(ranks, threads, monkeypatch, tmp_path):
    def work(comm):
        warnings = Warnings(tmp_path)
        logger = logging.getLogger("alltoallv")
        logger.addHandler(warnings)
        pids = pids_of(comm)
        if comm.rank == 2:  # until it has been named
            wait_for((tmp_path / "for rank 1, rank 2").exists, "a warning of rank 0")
        if comm.rank == 1:  # until it is named alone
            wait_for((tmp_path / "for rank 1").exists, "another warning of rank 0")
        barrier(group=comm)
        barrier(group=comm)
        logger.removeHandler(warnings)
        return pids, warnings.texts

    monkeypatch.setenv("ALLTOALLV_WARN_AFTER", "0.3")
    env = None if threads else {"ALLTOALLV_WARN_AFTER": "0.3"}
    found = ranks(3, threads=threads, env=env)(work)
    pids, texts = found[0]
    of_rank_0 = [text for text in texts if text.startswith("rank 0 ") and "#2 barrier" in text]
    assert re.match(r"rank 0 has waited \d+\.\d s in operator #2 barrier of domain '.*' for rank 1 \(", of_rank_0[0])
    assert f"rank 1 (pid {pids[1]}, running, last operator #1 all_gather)" in of_rank_0[0]
    assert f"rank 2 (pid {pids[2]}, " in of_rank_0[0]
    assert "rank 2" not in of_rank_0[-1], of_rank_0  # it has come meanwhile
    waited = [float(text.split()[4]) for text in of_rank_0]
    assert waited[0] >= 0.3
    assert all(later > 1.5 * before for before, later in itertools.pairwise(waited)), waited  # twice as long each
    of_rank_1 = [text for text in found[1][1] if text.startswith("rank 1 ") and "#2 barrier" in text]
    assert not of_rank_1  # nobody was later than it


class Broken(logging.Handler):
    """Raises what it is told, once it has made a file."""

    def __init__(self, error: BaseException, file: Path) -> None:
        super().__init__()
        self.error, self.file = error, file

    def emit(self, record: logging.LogRecord) -> None:
        self.file.touch()
        raise self.error


def test_a_broken_handler_of_the_warning(ranks, tmp_path):
    """It is reported as an exception that nobody can catch, and the operator goes on; Ctrl-C ends it."""

    def work(comm, error, ends):
        warned, ended = tmp_path / type(error).__name__, tmp_path / "ended"
        logger, handler = logging.getLogger("alltoallv"), Broken(error, warned)
        reported = []
        sys.unraisablehook = lambda unraisable: reported.append(type(unraisable.exc_value).__name__)
        barrier(group=comm)
        logger.addHandler(handler)
        try:
            if comm.rank == LATE:
                wait_for(ended.exists if ends else warned.exists, "a warning of rank 0")
            barrier(group=comm)
            outcome = ""
        except (KeyboardInterrupt, alltoallv.errors.PeerLostError) as caught:
            outcome = type(caught).__name__
            ended.touch()
        finally:
            logger.removeHandler(handler)
            sys.unraisablehook = sys.__unraisablehook__
        if not ends:
            assert all_reduce([comm.rank], group=comm).tolist() == [1]
        return outcome, reported

    env = {"ALLTOALLV_WARN_AFTER": "0.3"}
    found = ranks(2, env=env)(work, RuntimeError("no space left"), False)
    assert found[0][0] == ""
    assert set(found[0][1]) == {"RuntimeError"}
    assert found[1] == ("", [])
    found = ranks(2, env=env)(work, KeyboardInterrupt(), True)
    assert [name for name, _ in found] == ["KeyboardInterrupt", "PeerLostError"]


def test_warning_of_asynchronous_calls_goes_to_stderr(ranks, tmp_path):
    """Their thread must not enter Python; one that waits for them would make them itself, so this one only looks."""

    def work(comm):
        warned = tmp_path / "warned"
        if comm.rank == LATE:
            wait_for(warned.exists, "a warning of rank 0")
        pending = barrier(group=comm, async_op=True)
        while not pending.is_completed():
            if comm.rank != LATE and os.fstat(2).st_size > 0:  # the runner's file
                warned.touch()
            time.sleep(0.001)

    found = ranks(2, env={"ALLTOALLV_WARN_AFTER": "0.3"}, outcomes=True)(work)
    assert re.search(r"alltoallv: rank 0 has waited \d+\.\d s in operator #1 barrier .* for rank 1", found[0].output)
    assert found[1].output == ""


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_bootstrap_names_absent_ranks(ranks, absent, prompt, tmp_path):
    """A warning does before, of rank 0, or of the others where rank 0 is absent."""
    ranks(3)(barrier_only)

    def work(rank, size):
        if rank == absent:
            return None
        logger, warnings = logging.getLogger("alltoallv"), Warnings(tmp_path)
        logger.addHandler(warnings)
        failure = attempt(join, rank, size, "absent", timeout=1.0)
        logger.removeHandler(warnings)
        assert bool(warnings.texts) == (rank == 0 or absent == 0), warnings.texts
        assert all(
            re.search(rf"rank {absent}\b.* had not .*after|after .* rank {absent} of 3 had not joined", one)
            for one in warnings.texts
        ), warnings.texts
        with join([r for r in range(size) if r != absent].index(rank), size - 1, "present") as comm:
            check_works(comm)
        return failure

    found = ranks(3, communicator=False, env={"ALLTOALLV_WARN_AFTER": "0.3"})(work)
    began = min(failure.began for failure in filter(None, found))
    for failure in filter(None, found):
        assert failure.name == "CommTimeoutError"
        assert f"rank {absent}" in failure.text, failure
        assert "domain 'default'" in failure.text
        prompt("bootstrap with a timeout of 1 s", began + 1, failure.at)


def test_rank_that_comes_after_the_bootstrap_has_timed_out(ranks, tmp_path):
    def work(rank, size):
        if rank == LATE:
            wait_for((tmp_path / "over").exists, "the other rank's timeout")
        failure = attempt(join, rank, size, timeout=0.7)
        (tmp_path / "over").touch()
        return failure.name

    assert ranks(2, communicator=False)(work) == ["CommTimeoutError"] * 2


def test_the_limits_that_nobody_has_chosen():
    options = make_options("nobody's")
    assert (options.timeout, options.warn_after) == (600, 10)
    for make in (Communicator.from_env, Communicator.from_mpi, Communicator.threads):
        assert inspect.signature(make).parameters["timeout"].default == 600
