"""How ranks find each other: what they must agree on, and who cannot get in between.

tests/cpp/bootstrap_test.cpp and bootstrap_processes_test.cpp have strangers who knock, hold names or speak nonsense,
ranks that are taken twice, sizes that differ, and one domain again and again.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
from on_ranks import on_ranks
from started import wait_for
from trouble import LIMIT, attempt, check_works, join, on_threads

from alltoallv import Communicator
from alltoallv.numpy import all_gather

NOBODY = 65534


@contextmanager
def child(function, uid: int | None = None):
    """Runs a function in a forked process, perhaps as another user, until the block ends."""
    pid = os.fork()
    if pid == 0:
        try:
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            function()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_process_of_another_user_cannot_join(ranks):
    """With all variables of the job right it still looks for a job of its own user."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to start a process of another user")
    env = {"ALLTOALLV_JOB_ID": f"other-{os.getpid()}"}
    run = ranks(2, communicator=False, env=env)
    read, write = os.pipe()

    def intrude() -> None:
        os.environ.update(env)
        failure = attempt(join, 1, 2, timeout=1.0)
        os.write(write, f"{failure.name} {failure.text}".encode())

    with child(intrude, NOBODY):
        failure = run(lambda rank, size: rank or attempt(join, 0, size, timeout=2.0))[0]
        assert b"CommTimeoutError rank 0 had not opened" in os.read(read, 4096)
    assert failure.name == "CommTimeoutError"
    assert "rank 1 of 2 had not joined" in failure.text

    with child(intrude, NOBODY):  # and beside the real one it does no harm
        run(lambda rank, size: check_works(join(rank, size, timeout=10.0)))
        assert b"CommTimeoutError rank 0 had not opened" in os.read(read, 4096)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(("option", "values"), [("path", ("auto", "cma")), ("check", ("always", "off"))])
def test_settings_that_differ(ranks, option, values):
    def work(rank, size):
        options = {}
        if rank == 2:  # comes when the others are there
            time.sleep(0.7)
            options[option] = values[1]
        failure = attempt(join, rank, size, timeout=10.0, **options)
        with join(rank, size, "afterwards") as comm:
            check_works(comm)
        return failure

    for failure in ranks(3, communicator=False)(work):
        assert failure.name == "InvalidParamError"
        assert f"rank 2 has {option} = '{values[1]}', rank 0 has {option} = '{values[0]}'" in failure.text


def test_a_difference_is_told_to_who_comes_later(ranks, tmp_path):
    def work(rank, size, told):
        if rank == 1:
            wait_for(told.exists, "the error of rank 2")
        failure = attempt(join, rank, size, check="off" if rank == 2 else "always")
        if rank == 2:
            told.touch()
        return failure

    for failure in ranks(3, communicator=False)(work, tmp_path / "told"):
        assert failure.name == "InvalidParamError"
        assert "rank 2 has check = 'off', rank 0 has check = 'always'" in failure.text
        assert failure.at - failure.began < LIMIT


@on_ranks(4, communicator=False)
def test_jobs_with_the_same_domain_do_not_mix(rank, size):
    """Four processes: two jobs of two ranks, at the same time, both in domain "default"."""
    job, place = divmod(rank, 2)
    for _ in range(10):
        with join(place, 2, f"job-{job}") as comm:
            told = all_gather(np.array([job]), group=comm).ravel().tolist()
            assert told == [job, job]
            check_works(comm)


def test_threads_with_a_size_that_differs():
    """Found at once, not by waiting for ranks that cannot come."""
    comms = Communicator.threads(2, "sizes")
    began = time.monotonic()
    failure = attempt(Communicator.threads, 3, "sizes", timeout=60.0)
    assert failure.name == "InvalidParamError"
    assert "domain 'sizes' is in use by" in failure.text
    assert time.monotonic() - began < LIMIT
    on_threads(check_works, comms)
    for comm in comms:
        comm.destroy()
