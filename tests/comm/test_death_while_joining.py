"""A rank that ends while others wait for it to join: a wait sees all that its process knows of the lives of others."""

from __future__ import annotations

import os
import signal
import time

import pytest
from started import process_state, wait_for
from trouble import LIMIT, attempt, check_works, join

from alltoallv import Communicator, _core, membership
from alltoallv.numpy import barrier

VICTIM = 2


def end_by(how: str) -> None:
    time.sleep(0.3)  # the others wait by now
    if how == "exit":  # as a program ends
        _core.destroy_all()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def in_split(comm: Communicator, how: str) -> Communicator | None:
    """The victim ends once the ranks have agreed on the parent, before it joins."""
    if comm.rank == VICTIM:
        membership._make = lambda *_: end_by(how)
    return comm.split(0, comm.rank)


def in_a_second_domain(comm: Communicator, how: str) -> Communicator:
    if comm.rank == VICTIM:
        end_by(how)
    return join(comm.rank, comm.size, "second", "other", timeout=60)


def before_a_second_domain(comm: Communicator, how: str) -> Communicator:
    """The others come later, but have not been told of it by a call."""
    if comm.rank == VICTIM:
        end_by(how)
    pid = comm.flight_record()["ranks"][VICTIM]["pid"]
    wait_for(lambda: process_state(pid) in ("Z", ""), "the death")
    return join(comm.rank, comm.size, "second", "other", timeout=60)


@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("meet", [in_split, in_a_second_domain, before_a_second_domain])
def test_named_at_once(ranks, meet, how, tmp_path):
    def work(rank, size):
        comm = join(rank, size, "second", timeout=60)
        barrier(group=comm)
        failure = attempt(meet, comm, how)
        (tmp_path / str(rank)).touch()
        wait_for((tmp_path / str(1 - rank)).exists, "the error of the other")  # not of another that has ended by now
        return failure

    found = ranks(3, fresh=True, communicator=False, outcomes=True)(work)
    for outcome in found[:VICTIM]:
        failure = outcome.result
        assert failure.name == "PeerLostError", outcome.report()
        assert f"rank {VICTIM} " in failure.text
        assert "rank 0" not in failure.text
        assert failure.at - failure.began < LIMIT


def test_another_process_in_its_place(ranks, tmp_path):
    """Once the loss has been raised, a process that was started anew may join as that rank."""

    def work(rank, size):
        comm = join(rank, size, "again", timeout=60)
        barrier(group=comm)
        if rank == VICTIM:
            child = os.fork()
            if child != 0:
                os._exit(0)
            wait_for(lambda: len(os.listdir(tmp_path)) == 2, "the errors of the others")
        else:
            assert attempt(barrier, group=comm).name == "PeerLostError"
            (tmp_path / str(rank)).touch()
        check_works(join(rank, size, "again", timeout=30))
        if rank == VICTIM:
            os._exit(0)

    for outcome in ranks(3, fresh=True, communicator=False, outcomes=True)(work)[:VICTIM]:
        assert outcome.error is None, outcome.report()
