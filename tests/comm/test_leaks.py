"""What is left when everything has been destroyed: nothing. Counted before and after, in ranks that live on."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from on_ranks import on_ranks
from started import RUN, process_state, wait_for
from trouble import attempt, check_works, held, join, last_seq, on_threads, pids_of, wait_until_in

import alltoallv
from alltoallv import Communicator
from alltoallv.errors import PeerLostError
from alltoallv.numpy import all_reduce, all_to_all_v, barrier

MB = 1 << 20
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    """What tests before have left in cycles is no leak; what the test itself leaves there is one."""
    gc.collect()


def difference(before: dict, after: dict) -> dict:
    """What is there now and was not before."""
    found = {}
    for kind, names in after.items():
        left = list(names)
        for name in before[kind]:
            if name in left:
                left.remove(name)
        if left:
            found[kind] = left
    return found


def nothing_left(before: dict) -> None:
    """Waits a little: peers' promises and threads that end take a moment. Other programs come and go as well."""
    gc.collect()
    end = time.monotonic() + 40
    while (left := difference(before, held())) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left, left


def warm_up(rank: int, size: int) -> dict:
    """Whatever stays for good, such as modules and their descriptors, is there after the first use."""
    with join(rank, size, "warm-up") as comm:
        check_works(comm)
    del comm
    gc.collect()
    wait_for(lambda: not held()["threads"], "end of the threads")
    return held()


def exchanges(comm) -> list[np.ndarray]:
    """All kinds of operators and of memory; returns arrays that are still alive."""
    size = comm.size
    kept = [alltoallv.empty(3 * MB, np.uint8), alltoallv.empty(5)]
    for n in (3, 100_000):
        x = np.ones(n * size)
        kept.append(all_to_all_v(x, [n] * size, group=comm))
        kept.append(all_to_all_v(kept[-1], [n] * size, [n] * size, group=comm))
        kept.append(all_reduce(x, group=comm))
        private = np.empty(n * size)
        all_to_all_v(x, [n] * size, [n] * size, out=private, group=comm)
        pending = all_to_all_v(x, [n] * size, [n] * size, group=comm, async_op=True)[1]
        kept.append(pending.result())
    barrier(group=comm, async_op=True)
    barrier(group=comm)
    return kept


@pytest.mark.parametrize("path", ["auto", "staged", *(pytest.param(p, marks=SLOW) for p in ("push", "pull", "cma"))])
@on_ranks(3, communicator=False, fresh=True)
def test_nothing_after_ordinary_use(rank, size, path):
    before = warm_up(rank, size)
    for k in range(2):
        comm = join(rank, size, f"{k}", path=path)
        kept = exchanges(comm)
        during = difference(before, held())
        barrier(group=comm)  # so far everybody is there to be watched
        assert during["mappings"]
        assert "alltoallv-watch" in during["threads"]
        assert any("socket" in name for name in during["descriptors"])
        if k % 2:
            del kept
            comm.destroy()
        else:  # arrays that outlive it
            comm.destroy()
            kept[0][:] = 1
            del kept
        del comm
    nothing_left(before)


def test_arrays_hold_their_memory_and_nothing_else():
    before = held()
    comms = Communicator.threads(2)
    kept = alltoallv.empty(20 * MB, np.uint8)
    for comm in comms:
        comm.destroy()
    del comm, comms
    wait_for(lambda: set(difference(before, held())) <= {"mappings", "descriptors"}, "all but the array's memory")
    left = difference(before, held())
    assert len(left["mappings"]) == 1
    kept[:] = 1
    del kept
    with Communicator.threads(1)[0]:
        pass
    nothing_left(before)


def test_nothing_after_use_by_threads():
    before = held()
    for _ in range(3):
        comms = Communicator.threads(3)
        on_threads(exchanges, comms)
        for comm in comms:
            comm.destroy()
        del comm, comms
    nothing_left(before)


def fail_by_mismatch(comm, pids) -> None:
    for _ in range(3):
        attempt(all_reduce, np.ones(5 + comm.rank), group=comm)
        attempt(all_to_all_v, np.ones(4), [-1] * 3 if comm.rank == 1 else [1] * 3, group=comm)


def fail_by_timeout(comm, pids) -> None:
    if comm.rank == 1:
        wait_for(lambda: not comm.usable, "timeout")
    out = alltoallv.empty(3 * MB, np.uint8)
    attempt(all_to_all_v, np.ones(3 * MB, np.uint8), [MB] * 3, [MB] * 3, out=out, group=comm, timeout=0.2)


def fail_by_abort(comm, pids) -> None:
    if comm.rank == 1:
        wait_until_in(comm, last_seq(comm) + 1)
        comm.abort()
    attempt(all_to_all_v, np.ones(3 * MB), [MB] * 3, group=comm)
    attempt(barrier, group=comm)


def fail_with_pending_calls(comm, pids) -> None:
    works = [all_to_all_v(np.ones(3 * MB), [MB] * 3, group=comm, async_op=True)[1] for _ in range(3)]
    if comm.rank == 1:
        comm.abort()
    for pending in works:  # the first may have been quick enough
        with suppress(PeerLostError):
            pending.wait()
    assert attempt(lambda: [barrier(group=comm) for _ in range(2)]).name == "PeerLostError"


def fail_by_stop(comm, pids) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    attempt(all_to_all_v, np.ones(3 * MB), [MB] * 3, group=comm, timeout=0.3)
    if comm.rank == 0:
        wait_for(lambda: process_state(pids[1]) == "T", "stop")
        os.kill(pids[1], signal.SIGCONT)


FAILURES = [fail_by_mismatch, fail_by_timeout, fail_by_abort, fail_with_pending_calls, fail_by_stop]


@pytest.mark.parametrize("fail", FAILURES)
@on_ranks(3, communicator=False, fresh=True)
def test_nothing_after_failures(rank, size, fail):
    before = warm_up(rank, size)
    for k in range(2):
        comm = join(rank, size, f"{k}")
        pids = pids_of(comm)
        kept = exchanges(comm)
        fail(comm, pids)
        comm.destroy()
        del comm, kept
    nothing_left(before)


def exchange_for_ever(comm) -> None:
    while True:
        all_to_all_v(np.ones(3 * MB), [MB] * 3, group=comm)


def test_nothing_after_a_loss(ranks):
    def work(rank, size):
        before = warm_up(rank, size)
        comm = join(rank, size)
        kept = exchanges(comm)
        if rank == 1:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        attempt(exchange_for_ever, comm)
        comm.destroy()
        with join(rank // 2, 2, "survivors") as smaller:
            check_works(smaller)
        del comm, kept, smaller
        nothing_left(before)

    found = ranks(3, communicator=False, fresh=True, outcomes=True)(work)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].report()


@on_ranks(3, communicator=False, fresh=True)
def test_nothing_after_a_bootstrap_that_fails(rank, size):
    before = warm_up(rank, size)
    for k in range(3):
        attempt(join, rank, size + 1, f"absent-{k}", timeout=0.2)
        attempt(join, 0 if rank == 2 else rank, size, f"twice-{k}", timeout=0.5)
        attempt(join, rank, size, f"settings-{k}", timeout=0.5, path="cma" if rank == 1 else "auto")
    nothing_left(before)


PROGRAM = """
import os, sys, time, numpy as np, alltoallv
from alltoallv.numpy import all_to_all_v, barrier
comm = alltoallv.Communicator.from_env()
y = all_to_all_v(np.ones(100_000 * comm.size), [100_000] * comm.size)
if sys.argv[1] == "exit" and comm.rank == 1:
    os._exit(3)
if sys.argv[1] == "raise":
    raise SystemExit("bye")
if sys.argv[1] == "pending":
    barrier(group=comm, async_op=True) if comm.rank else time.sleep(0.2)
if sys.argv[1] == "exit":
    barrier(group=comm)
"""


FORKED = """
import multiprocessing, os, alltoallv
from alltoallv.numpy import barrier

def rank(number, stays):
    global comm
    place = {"RANK": number, "WORLD_SIZE": 2, "JOB_ID": f"forked{os.getppid()}"}
    os.environ.update({f"ALLTOALLV_{name}": str(value) for name, value in place.items()})
    comm = alltoallv.Communicator.from_env(timeout=30)
    barrier(group=comm)
    if number == 1:
        stays.recv()

context = multiprocessing.get_context("fork")
ends, stays = context.Pipe()
ranks = [context.Process(target=rank, args=(j, stays)) for j in range(2)]
for one in ranks:
    one.start()
ranks[0].join()
ends.send(None)
ranks[1].join()
"""


def test_ranks_forked_by_multiprocessing_leave_as_they_end():
    """Their peers do not take them for lost, which would be told on stderr."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""


def test_programs_leave_nothing_behind(tmp_path):
    """No destroy, no care taken: the end of the processes is enough. Four jobs at once."""
    before = set(held()["files"])
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    endings = {"return": 0, "pending": 0, "raise": 1, "exit": 3}
    jobs = {ending: subprocess.Popen([*RUN, "-n", "3", str(script), ending]) for ending in endings}
    assert {ending: job.wait(60) for ending, job in jobs.items()} == endings
    wait_for(lambda: set(held()["files"]) <= before, "nothing new")
    assert [file.name for file in tmp_path.iterdir()] == ["program.py"]
