"""Late, lost, leaving and aborting ranks of a group over gloo: nothing hangs, and messages name who is missing."""

from __future__ import annotations

import atexit
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_groups import caught, engine, logged

import alltoallv.torch as at
from alltoallv.errors import (
    BackendUnavailableError,
    CommTimeoutError,
    InvalidParamError,
    PeerLostError,
)
from alltoallv.testing import Ranks


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def exchange(comm: Any) -> torch.Tensor:
    return at.all_to_all_v(torch.ones(comm.size), [1] * comm.size, [1] * comm.size, group=comm)


def test_late_rank(ranks: Ranks, file: str) -> None:
    """The others time out and name it; it meets the timeout at once; the next communicator works."""

    def run(rank: int, size: int) -> tuple[Exception, int, str]:
        with engine(rank, size, file, timeout=2.0) as comm:
            exchange(comm)
            if rank == 1:
                time.sleep(3.0)
            if rank == 2:
                time.sleep(0.5)  # late, but not missing
            begin = time.monotonic()
            error = caught(lambda: exchange(comm))
            assert time.monotonic() - begin < (4.0 if rank == 1 else 6.0)
            assert not comm.usable
            assert str(caught(lambda: exchange(comm))) == str(error)
            again = at.from_group(comm.group, backend="gloo", timeout=20)
            assert again is not comm
            assert exchange(again).tolist() == [1] * size
            return error, os.getpid(), comm.domain

    found = ranks(3, communicator=False)(run)
    assert {type(error) for error, _, _ in found} == {CommTimeoutError}
    (text,) = {str(error) for error, _, _ in found}
    pid, domain = found[1][1:]
    assert text.endswith(
        f"waited 2.0 s in operator #2 all_to_all_v of domain '{domain}' for rank 1 (pid {pid}, running)"
    )


def test_ranks_that_fail_and_die(ranks: Ranks, file: str) -> None:
    """Who fails and ends at once has told its waiting peers; who dies without a word is named."""

    def run(rank: int, size: int) -> Any:
        with engine(rank, size, file) as comm:
            pair = dist.new_group([0, 1])
            exchange(comm)
            if rank == 2:
                time.sleep(0.5)
                caught(lambda: at.all_to_all_v(torch.ones(3), [1, 1, 7], [1] * 3, group=comm))
                atexit._run_exitfuncs()
                os._exit(5)
            two = at.from_group(pair, backend="gloo", timeout=30)
            exchange(two)
            error = caught(lambda: exchange(comm))
            assert isinstance(error, InvalidParamError)
            assert "failed on rank 2: sdispls[2] + send_counts[2] is 2 + 7" in str(error)
            if rank == 1:
                time.sleep(0.3)
                os._exit(3)
            begin = time.monotonic()
            error = caught(lambda: exchange(two))
            assert time.monotonic() - begin < 8
            assert isinstance(error, PeerLostError)
            assert "operator #2 all_to_all_v of domain" in str(error)
            assert "rank 1 was lost: " in str(error)
            assert str(error).endswith(", gone)")
            assert not two.usable
            print("right", flush=True)
            os._exit(0)

    found = ranks(3, communicator=False, fresh=True, outcomes=True)(run)
    assert [one.exit_code for one in found] == [0, 3, 5], [one.report() for one in found]
    assert "right" in found[0].output


@pytest.mark.parametrize("dead_for", [0.0, 0.5])
def test_rank_that_dies_with_large_messages_under_way(ranks: Ranks, file: str, dead_for: float) -> None:
    """Before its peer has posted them, or while it waits for them."""
    length = 8 << 20

    def run(rank: int, size: int) -> None:
        with engine(rank, size, file, check="off") as comm:
            exchange(comm)
            if rank == 1:
                time.sleep(0.5 - dead_for)
                os._exit(3)
            time.sleep(dead_for)
            error = caught(lambda: at.all_to_all_v(torch.ones(2 * length), [length] * 2, [length] * 2, group=comm))
            assert isinstance(error, PeerLostError), error
            assert "operator #2 all_to_all_v of domain" in str(error)
            assert "rank 1 was lost: " in str(error)
            assert not comm.usable
            print("right", flush=True)
            os._exit(0)

    found = ranks(2, communicator=False, fresh=True, outcomes=True)(run)
    assert [one.exit_code for one in found] == [0, 3], [one.report() for one in found]
    assert "right" in found[0].output


def test_rank_that_leaves(ranks: Ranks, file: str) -> None:
    def run(rank: int, size: int) -> None:
        with engine(rank, size, file) as comm:
            exchange(comm)
            if rank == 0:
                comm.destroy()
            else:
                error = caught(lambda: exchange(comm))
                assert isinstance(error, PeerLostError)
                assert f"rank 0 has left domain '{comm.domain}': rank 0 (pid " in str(error)
                assert str(error).endswith(", left)")
            dist.barrier()

    ranks(2, communicator=False)(run)


def test_abort(ranks: Ranks, file: str) -> None:
    """Wakes the ranks that wait, and those that come later."""

    def run(rank: int, size: int) -> None:
        with engine(rank, size, file) as comm:
            exchange(comm)
            if rank == 2:
                time.sleep(1.0)
                comm.abort("the test says so")
            begin = time.monotonic()
            error = caught(lambda: exchange(comm))
            assert time.monotonic() - begin < 4
            assert isinstance(error, PeerLostError)
            assert "rank 2 aborted: the test says so" in str(error)
            out, work = at.all_to_all_v(torch.ones(size), [1] * size, [1] * size, group=comm, async_op=True)
            assert isinstance(caught(work.wait), PeerLostError)
            assert isinstance(work.exception(), PeerLostError)
            assert out.numel() == size

    ranks(3, communicator=False)(run)


def test_interrupted_wait(ranks: Ranks, file: str) -> None:
    """Ctrl-C gets through, and the peers are told."""

    def run(rank: int, size: int) -> None:
        import _thread
        import threading

        with engine(rank, size, file) as comm:
            exchange(comm)
            if rank == 0:
                threading.Timer(0.7, _thread.interrupt_main).start()
                with pytest.raises(KeyboardInterrupt):
                    exchange(comm)
                time.sleep(0.5)
            else:
                time.sleep(1.5)
                error = caught(lambda: exchange(comm))
                assert "rank 0 broke off all_to_all_v: KeyboardInterrupt" in str(error)

    ranks(2, communicator=False)(run)


def test_warning_about_a_late_rank(ranks: Ranks, file: str) -> None:
    def run(rank: int, size: int) -> None:
        with logged(logging.WARNING) as lines, engine(rank, size, file) as comm:
            if rank == 1:
                time.sleep(2.5)
            comm.barrier().run()
            assert comm.flight_record()["ranks"][0]["operators"][0]["operator"] == "barrier"
        if rank == 0:
            assert "rank 0 has waited" in lines[0]
            assert "in operator #1 barrier of domain 'torch-0' for rank 1 (pid " in lines[0]

    ranks(2, communicator=False, env={"ALLTOALLV_WARN_AFTER": "1.0"})(run)


def test_rank_that_never_joins(ranks: Ranks, file: str) -> None:
    def run(rank: int, size: int) -> None:
        from backend_groups import joined

        with joined(rank, size, file, backend="gloo") as group:
            if rank == 0:
                with pytest.raises(CommTimeoutError, match=r"rank 0 of group '.*' waited 1.0 s for rank 1 to join"):
                    at.from_group(group, backend="gloo", timeout=1.0)
            dist.barrier()

    ranks(2, communicator=False)(run)


def test_forked_child(ranks: Ranks, file: str) -> None:
    """It must not speak for its parent."""

    def run(rank: int, size: int) -> None:
        with engine(rank, size, file) as comm:
            exchange(comm)
            child = os.fork()
            if child == 0:
                right = not comm.usable and isinstance(caught(lambda: exchange(comm)), BackendUnavailableError)
                comm.destroy()
                os._exit(0 if right else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert exchange(comm).tolist() == [1, 1]

    ranks(2, communicator=False)(run)
