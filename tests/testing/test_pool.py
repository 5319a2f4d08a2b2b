"""The fixture ``ranks`` and what stands behind it, on real processes that fail in every way."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
import time

import pytest
from started import is_alive, wait_gone

from alltoallv.testing import RankExit, RankFailures, Ranks, RankTimeout, RemoteError

CONSTANT = 7


@pytest.fixture(scope="module", params=[(), ("alltoallv.numpy",)], ids=["started", "forked"])
def ranks(request):
    """In place of the plugin's: both kinds of processes, without communicators."""
    runner = Ranks(request.param)
    yield functools.partial(runner, communicator=False)
    runner.close()


class OwnError(Exception):
    """Known to this module only, which workers cannot import."""

    def __init__(self, rank, detail):
        super().__init__(f"rank {rank} says {detail}")
        self.rank = rank

    def __reduce__(self):
        return OwnError, (self.rank, "again")


def helper(rank):
    return rank * CONSTANT


def place(rank, size, *args):
    return rank, size, os.getpid(), helper(rank), *args


def test_processes_are_kept(ranks):
    first = ranks(3)(place)
    for _ in range(20):
        again = ranks(3)(place)
        assert [r[2] for r in again] == [r[2] for r in first]
    fewer = ranks(2)(place)
    assert [r[2] for r in fewer] == [r[2] for r in first][:2]


def test_environment(ranks):
    def variables(rank, size):
        return {k: v for k, v in os.environ.items() if k.startswith("ALLTOALLV_") or k == "EXTRA"}

    run = ranks(2, env={"EXTRA": "1"})
    first, second = run(variables), run(variables)
    for rank, found in enumerate(first):
        assert found["ALLTOALLV_RANK"] == found["ALLTOALLV_LOCAL_RANK"] == str(rank)
        assert found["ALLTOALLV_WORLD_SIZE"] == found["ALLTOALLV_LOCAL_WORLD_SIZE"] == "2"
        assert found["EXTRA"] == "1"
    assert first[0]["ALLTOALLV_JOB_ID"] == first[1]["ALLTOALLV_JOB_ID"] != second[0]["ALLTOALLV_JOB_ID"]
    assert "EXTRA" not in ranks(2)(variables)[0]


def test_output_of_ranks_that_succeed_is_shown(ranks, capsys):
    def talk(rank, size):
        print("hello from", rank)
        os.write(2, b"and below\n")

    ranks(2)(talk)
    assert capsys.readouterr().out.splitlines() == [
        "[0] hello from 0",
        "[0] and below",
        "[1] hello from 1",
        "[1] and below",
    ]
    ranks(2)(place)
    assert capsys.readouterr().out == ""


def test_every_failing_rank_is_reported(ranks):
    def fail(rank, size):
        print("printed by", rank)
        if rank == 1:
            raise OwnError(rank, "no")
        if rank == 2:
            raise ValueError("second")
        return rank

    with pytest.raises(RankFailures) as caught:
        ranks(4)(fail)
    failures = caught.value
    assert isinstance(failures, AssertionError)
    assert sorted(failures.errors) == [1, 2]
    assert type(failures.errors[1]) is OwnError
    assert failures.errors[1].rank == 1
    assert type(failures.errors[2]) is ValueError
    assert [o.result for o in failures.outcomes] == [0, None, None, 3]
    text = str(failures)
    assert text.startswith("2 of 4 ranks failed (rank 1: OwnError: rank 1 says again; rank 2: ValueError: second)")
    assert 'raise ValueError("second")' in text  # the source line of the remote traceback
    assert "printed by 1" in text
    assert "printed by 2" in text
    assert "printed by 0" not in text
    assert len(ranks(4)(place)) == 4


def test_exception_that_cannot_be_sent(ranks):
    def fail(rank, size):
        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a}{b}")
                self.lock = threading.Lock()

        raise Odd("x", "y")

    with pytest.raises(RankFailures) as caught:
        ranks(1)(fail)
    assert type(caught.value.errors[0]) is RemoteError
    assert str(caught.value.errors[0]) == "Odd: xy"


def test_result_that_cannot_be_sent(ranks):
    with pytest.raises(RankFailures, match=r"1 of 1 ranks failed .*cannot pickle"):
        ranks(1)(lambda rank, size: threading.Lock())


@pytest.mark.parametrize("fresh", [False, True])
def test_killed_rank(ranks, fresh):
    def end(rank, size):
        if rank == 1:
            print("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            os._exit(3)
        return rank

    found = ranks(3, fresh=fresh, outcomes=True)(end)
    assert found[0].result == 0
    assert found[0].error is None
    assert found[0].exit_code == (0 if fresh else None)
    assert [o.exit_code for o in found[1:]] == [-signal.SIGKILL, 3]
    assert all(type(o.error) is RankExit for o in found[1:])
    assert [o.error.exit_code for o in found[1:]] == [-signal.SIGKILL, 3]
    assert found[1].output == "last words\n"
    assert "was killed by SIGKILL before the function returned" in str(found[1].error)
    with pytest.raises(RankFailures, match="exited with code 3 before the function returned"):
        ranks(3, fresh=fresh)(end)


def test_crash_shows_the_stack(ranks):
    def crash(rank, size):
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(RankFailures, match="was killed by SIGSEGV") as caught:
        ranks(1)(crash)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert "in crash" in str(caught.value)


def test_fresh_processes_are_new_and_end_well(ranks):
    kept = {result[2] for result in ranks(2)(place)}
    fresh = [result[2] for result in ranks(2, fresh=True)(place)]
    assert not kept & set(fresh)
    assert not any(map(is_alive, fresh))


def test_exit_status_of_a_fresh_process_counts(ranks):
    def late(rank, size):
        import atexit

        if rank == 1:
            atexit.register(os._exit, 5)
        return rank

    with pytest.raises(RankFailures) as caught:
        ranks(2, fresh=True)(late)
    assert list(caught.value.errors) == [1]
    assert caught.value.errors[1].exit_code == 5
    assert [o.result for o in caught.value.outcomes] == [0, 1]


def test_timeout_shows_where_every_rank_hangs(ranks):
    def hang(rank, size):
        def deep_inside():
            time.sleep(100)

        if rank == 1:
            return "done"
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        deep_inside()

    began = time.monotonic()
    found = ranks(3, timeout=3.0, outcomes=True)(hang)
    assert time.monotonic() - began > 2.9
    assert type(found[0].error) is type(found[2].error) is RankTimeout
    assert found[1].result == "done"
    assert "did not finish within 3 s and was killed" in str(found[0].error)
    assert "in deep_inside" in found[0].output
    assert found[2].exit_code == -signal.SIGKILL  # a stopped process answers nothing else
    assert len(ranks(3)(place)) == 3


def test_process_with_a_leaked_thread_is_replaced(ranks):
    def leak(rank, size, seconds):
        threading.Thread(target=time.sleep, args=(seconds,), daemon=True).start()
        return os.getpid()

    short = ranks(2)(leak, 0)
    long = ranks(2)(leak, 100)
    assert long == short
    after = [result[2] for result in ranks(2)(place)]
    assert not set(after) & set(long)
    assert wait_gone(long) == []


def test_what_a_rank_started_goes_with_it(ranks):
    def start(rank, size):
        return subprocess.Popen(["sleep", "100"]).pid

    pids = ranks(2, fresh=True)(start)
    assert wait_gone(pids) == []


# --- threads


def test_threads_that_fail(ranks):
    def fail(rank, size):
        if rank != 1:
            raise OwnError(rank, "no")
        return "fine"

    with pytest.raises(RankFailures) as caught:
        ranks(3, threads=True)(fail)
    assert sorted(caught.value.errors) == [0, 2]
    assert caught.value.errors[2].rank == 2
    assert "raise OwnError" in str(caught.value)


def test_threads_that_hang(ranks):
    event = threading.Event()

    def hang(rank, size):
        def deep_inside():
            event.wait(60)

        if rank:
            deep_inside()

    found = ranks(2, threads=True, timeout=1.0, outcomes=True)(hang)
    event.set()
    assert found[0].error is None
    assert type(found[1].error) is RankTimeout
    assert "in deep_inside" in found[1].output


def test_wrong_arguments(ranks):
    with pytest.raises(ValueError, match="size is 0, expected at least 1"):
        ranks(0)
    with pytest.raises(ValueError, match="threads cannot have"):
        ranks(2, threads=True, fresh=True)
    with pytest.raises(ValueError, match="preloaded=False is for fresh=True"):
        ranks(2, preloaded=False)
