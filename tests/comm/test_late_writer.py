"""A rank that is stopped in the middle of a copy, past its peers' timeout, and goes on later.

What it still writes must land in memory that nobody uses any more; test_late_reader.py has what it still reads.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from on_ranks import on_ranks
from started import process_state, wait_for
from stopped import BYTES, FILL, FOREIGN, MB, OTHER, RECEIVER, SENDER, all_again, counts_of
from trouble import attempt, check_works, join, mapped, pids_of, shared_bytes, stop_myself, trap

import alltoallv
from alltoallv.errors import CommTimeoutError, PeerLostError
from alltoallv.numpy import all_to_all_v, barrier


def foreign(array: np.ndarray) -> int:
    return int(np.count_nonzero(array == FOREIGN))


def send_and_stop(comm, at: int, learns: bool = False) -> None:
    """The sender's part: stands still when it is about to read byte ``at`` of what it sends."""
    sends, recvs = counts_of(SENDER)
    x = mapped(BYTES)
    x[:] = FOREIGN
    barrier(group=comm)  # the receiver's time begins when all are ready
    with trap(x.ctypes.data + at, stop_myself):
        failure = attempt(all_to_all_v, x, sends, None if learns else recvs, group=comm)
    assert failure.name == "CommTimeoutError", failure
    assert f"rank {SENDER} (pid {os.getpid()}, stopped, last operator #" in failure.text, failure


def stand_by(comm, learns: bool = False) -> None:
    """The third rank's part: nothing to move, and perhaps done before the others fail."""
    sends, recvs = counts_of(OTHER)
    barrier(group=comm)
    with suppress(CommTimeoutError, PeerLostError):
        all_to_all_v(np.empty(0, np.uint8), sends, None if learns else recvs, group=comm)


def push_round(comm, suffix: str, learns: bool, at: int) -> int:
    """The receiver returns how many bytes arrived after its call had failed."""
    pids = pids_of(comm)
    if comm.rank == SENDER:
        send_and_stop(comm, at, learns)
        all_again(comm, suffix)
        return 0
    if comm.rank == OTHER:
        stand_by(comm, learns)
        with join(1, 2, f"pair-{suffix}", comm.domain) as pair:
            check_works(pair)
            check_works(pair)
        all_again(comm, suffix)
        return 0

    out = alltoallv.empty(BYTES, np.uint8)
    out[:] = FILL
    address = out.ctypes.data
    memory = shared_bytes(address, BYTES)
    if learns:
        del out  # the operator's own output takes the block just freed
    sends, recvs = counts_of(RECEIVER)
    options = {} if learns else {"out": out}
    nothing = np.empty(0, np.uint8)
    barrier(group=comm)
    failure = attempt(all_to_all_v, nothing, sends, None if learns else recvs, group=comm, timeout=1.0, **options)
    assert failure.name == "CommTimeoutError", failure
    assert f"rank {SENDER} (pid {pids[SENDER]}, stopped" in failure.text, failure
    wait_for(lambda: process_state(pids[SENDER]) == "T", "stop")
    before = foreign(memory)
    assert at - MB <= before <= at, "the sender did not stop in the middle of its copy"
    options.clear()
    if not learns:
        assert foreign(out) == before, "what had arrived is no longer there"
        del out
    assert comm.stats()["arena_quarantined_bytes"] == BYTES, comm.stats()

    # New outputs, at once, of the same size and smaller; also more than the budget has left.
    fresh = [alltoallv.empty(size, np.uint8) for size in (BYTES, BYTES, BYTES, 8 * MB, MB, 4096)]
    for array in fresh:
        array[:] = FILL
        begin = array.ctypes.data
        assert begin + array.nbytes <= address or address + BYTES <= begin, "a quarantined block was given out"
    with join(0, 2, f"pair-{suffix}", comm.domain) as pair:  # while the sender stands still
        check_works(pair)
        os.kill(pids[SENDER], signal.SIGCONT)
        # It goes on writing, to the end of its piece: without the quarantine this would hit a new output.
        wait_for(lambda: foreign(memory) > before, "the rest of the piece")
        time.sleep(0.05)
        arrived = foreign(memory) - before
        check_works(pair)
    all_again(comm, suffix)  # the sender has come to the end of its call
    for array in fresh:
        assert (array == FILL).all(), "a late writer's bytes appeared in a new output"
    assert comm.stats()["arena_quarantined_bytes"] == 0, comm.stats()
    return arrived


@pytest.mark.parametrize("learns", [False, True], ids=["given", "learnt"])
def test_late_writer_touches_only_quarantined_memory(ranks, learns):
    def work(comm):
        found = []
        for k, at in enumerate((MB // 2, BYTES - MB // 3) if learns else (9 * MB + 4096, BYTES // 2)):
            with join(comm.rank, comm.size, f"round-{k}", comm.domain, path="push") as place:
                found.append(push_round(place, f"{k}", learns, at))
        return found

    arrived = ranks(3)(work)[RECEIVER]
    assert all(0 < late <= MB for late in arrived), arrived  # the rest of one piece, and no more


@pytest.fixture
def large_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, bool]]:
    """``large_pages(*options of the compiler)``: from now on new ranks run as on a system with pages of 64 KiB; returns
    arguments for ``ranks``.
    """

    def use(*options: str) -> dict[str, bool]:
        library, source = tmp_path / "large_pages.so", Path(__file__).with_name("large_pages.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", *options, "-o", library, source, "-ldl"], check=True)
        monkeypatch.setenv("LD_PRELOAD", str(library))
        return {"fresh": True, "preloaded": False}

    return use


@pytest.mark.parametrize("pages", ["of the system", "large"])
def test_late_writer_leaves_the_callers_array_alone(ranks, large_pages, pages):
    """The caller goes on with its own array: also in the pages that it shares with other arrays, and in new calls."""

    def work(comm):
        if comm.rank == OTHER:
            base = counted = None
        else:
            base = alltoallv.empty(4096 + BYTES + 200, np.uint8)
            base[:] = 1
            counted = base[4096 + 100 : -100]  # on large pages it does not begin in the second one
        for k in range(2):
            with join(comm.rank, comm.size, f"kept-{k}", comm.domain, path="push") as place:
                pids = pids_of(place)
                if place.rank == SENDER:
                    send_and_stop(place, BYTES // 2)
                elif place.rank == OTHER:
                    stand_by(place)
                else:
                    sends, recvs = counts_of(RECEIVER)
                    shared = shared_bytes(counted.ctypes.data, BYTES) if k == 0 else None
                    if k == 1:  # private by now: nobody can be late with it
                        base[:] = 1
                    barrier(group=place)
                    failure = attempt(all_to_all_v, base[:0], sends, recvs, out=counted, group=place, timeout=1.2)
                    assert failure.name == "CommTimeoutError", failure
                    wait_for(lambda pid=pids[SENDER]: process_state(pid) == "T", "stop")
                    assert (base[:100] == 1).all()
                    assert (base[-100:] == 1).all()
                    base[:] = FILL
                    before = foreign(shared) if k == 0 else 0
                    os.kill(pids[SENDER], signal.SIGCONT)
                    if k == 0:
                        wait_for(lambda shared=shared, before=before: foreign(shared) > before, "the late bytes")
                        assert place.stats()["arena_cut_bytes"] > BYTES
                all_again(comm, f"kept-{k}")
                if place.rank == RECEIVER:
                    assert (base == FILL).all(), "a late writer reached the caller's array"
        with join(comm.rank, comm.size, "afterwards", comm.domain) as place:
            sends, recvs = counts_of(comm.rank, 4 * MB)
            x = np.full(sum(sends), FOREIGN, np.uint8)
            out = counted[: sum(recvs)] if comm.rank == RECEIVER else np.empty(0, np.uint8)
            all_to_all_v(x, sends, recvs, out=out, group=place)
            assert (out == FOREIGN).all()
            del base, counted, out
            return place.stats()["arena_cut_bytes"]

    options = large_pages() if pages == "large" else {}
    assert ranks(3, **options)(work)[RECEIVER] == 0


def test_large_pages_hold_one_array_each(ranks, large_pages):
    """What is cut out of the memory that peers see must not take a part of the next array along."""

    def work(comm):
        place = join(comm.rank, 3, "failing", comm.domain)
        pids = pids_of(place)
        if comm.rank == OTHER:  # as long as it stands still, it may be late
            stop_myself()
            return []
        del_me = alltoallv.empty(56 * MB, np.uint8)
        del del_me  # a segment of that size
        out, beside = alltoallv.empty(1000, np.float64), alltoallv.empty(1000, np.float64)
        found = []
        with join(comm.rank, 2, "pair", comm.domain) as pair:
            if comm.rank == RECEIVER:
                wait_for(lambda: process_state(pids[OTHER]) == "T", "stop")
                failure = attempt(all_to_all_v, out[:0], [0] * 3, [0, 1000, 0], out=out, group=place, timeout=0.3)
                assert failure.name == "CommTimeoutError", failure
                assert place.stats()["arena_cut_bytes"] >= out.nbytes
            for k in range(3):
                x = np.full(1000 if comm.rank == SENDER else 0, float(k))
                # Where peers write, so that the data do not go inline.
                into = beside if comm.rank == RECEIVER else beside[:0]
                beside[:] = FOREIGN
                all_to_all_v(x, [x.size, 0], [0, into.size], out=into, group=pair)
                found.append(sorted(set(into.tolist())))
            assert comm.rank == SENDER or place.stats()["arena_cut_bytes"] >= out.nbytes
            barrier(group=pair)
        if comm.rank == RECEIVER:
            os.kill(pids[OTHER], signal.SIGCONT)
        return found

    assert ranks(3, **large_pages("-DROUNDS"))(work)[RECEIVER] == [[0.0], [1.0], [2.0]]


def test_late_thread_is_waited_for():
    """Threads share their pages: none writes any more once its peer's call has failed."""

    def work(comm):
        if comm.rank == SENDER:
            x = np.full(BYTES, FOREIGN, np.uint8)
            for _ in range(40):
                try:
                    all_to_all_v(x, [x.size, 0], [0, 0], group=comm)
                except CommTimeoutError:
                    return 0
            return 0
        out = alltoallv.empty(BYTES, np.uint8)
        for k in range(40):
            try:
                all_to_all_v(out[:0], [0, 0], [0, out.size], out=out, group=comm, timeout=0.001 * (1 + k % 7))
            except CommTimeoutError:
                out[:] = FILL
                time.sleep(0.05)
                return foreign(out)
        raise AssertionError("no timeout")

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(work, alltoallv.Communicator.threads(2, "late-threads"))) == 0


def attempt_and_work(*arguments, **options):
    """The error, and the seconds of a processor until it: who waits for another thread of its process spins."""
    began = time.thread_time()
    return attempt(*arguments, **options), time.thread_time() - began


def test_failing_threads_do_not_wait_for_each_other():
    """Both have begun to write into the other's output: neither may wait until the other has ended its call."""
    comms = alltoallv.Communicator.threads(2, "failing-threads")
    outs = [alltoallv.empty(BYTES, np.uint8) for _ in comms]

    def work(comm):
        x = np.full(BYTES, FOREIGN, np.uint8)
        counts = [0, BYTES] if comm.rank == 0 else [BYTES, 0]
        return attempt_and_work(all_to_all_v, x, counts, counts, out=outs[comm.rank], group=comm)

    with trap(outs[1].ctypes.data, partial(comms[0].abort, "enough")), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, comms))
    for failure, spent in found:
        assert failure.name == "PeerLostError"
        assert spent < 0.5, "each has waited for the other's patience of 1 s"


def test_rank_whose_call_has_ended_is_not_waited_for():
    """Rank 1's few bytes went with its row; rank 0's call fails in the middle of what rank 2 writes."""
    comms = alltoallv.Communicator.threads(3, "ended-thread")
    out, ended = alltoallv.empty(BYTES + 1, np.uint8), threading.Event()

    def fail() -> None:
        ended.wait(40)
        comms[0].abort("enough")

    def work(comm):
        if comm.rank == 0:
            return attempt_and_work(all_to_all_v, out[:0], [0] * 3, [0, 1, BYTES], out=out, group=comm)
        mine = [1, BYTES][comm.rank - 1]
        call = partial(all_to_all_v, np.full(mine, FOREIGN, np.uint8), [mine, 0, 0], [0] * 3, group=comm)
        if comm.rank == 2:
            return attempt_and_work(call)
        call()
        ended.set()
        return None

    with trap(out.ctypes.data + 2 * mmap.PAGESIZE, fail), ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, comms))
    for failure, spent in (found[0], found[2]):
        assert failure.name == "PeerLostError"
        assert spent < 0.5, "it has waited for a rank that had ended its call"


def test_sender_that_dies_instead_frees_the_block(ranks):
    def work(comm):
        pids = pids_of(comm)
        if comm.rank == SENDER:
            send_and_stop(comm, 5 * MB)
        if comm.rank == OTHER:
            stand_by(comm)
            return attempt(barrier, group=comm).name
        out = alltoallv.empty(BYTES, np.uint8)
        sends, recvs = counts_of(RECEIVER)
        barrier(group=comm)
        failure = attempt(all_to_all_v, out[:0], sends, recvs, out=out, group=comm, timeout=1.2)
        del out
        wait_for(lambda: process_state(pids[SENDER]) == "T", "stop")
        assert comm.stats()["arena_quarantined_bytes"] == BYTES
        os.kill(pids[SENDER], signal.SIGKILL)
        wait_for(lambda: comm.stats()["arena_quarantined_bytes"] == 0, "release after the sender's death")
        return failure.name

    found = ranks(3, fresh=True, outcomes=True, path="push")(work)
    assert found[RECEIVER].error is None, found[RECEIVER].report()
    assert [found[rank].result for rank in (RECEIVER, OTHER)] == ["CommTimeoutError"] * 2


@on_ranks(3, path="push")
def test_quarantine_outlives_the_communicator(comm):
    """Also when the receiver destroys everything before the sender goes on."""
    pids = pids_of(comm)
    if comm.rank == SENDER:
        send_and_stop(comm, 5 * MB)
    elif comm.rank == OTHER:
        stand_by(comm)
    else:
        out = alltoallv.empty(BYTES, np.uint8)
        address = out.ctypes.data
        sends, recvs = counts_of(RECEIVER)
        barrier(group=comm)
        attempt(all_to_all_v, out[:0], sends, recvs, out=out, group=comm, timeout=1.2)
        wait_for(lambda: process_state(pids[SENDER]) == "T", "stop")
        comm.destroy()
        del out
        fresh = [alltoallv.empty(BYTES, np.uint8) for _ in range(2)]
        for array in fresh:
            array[:] = FILL
            assert abs(array.ctypes.data - address) >= BYTES
        os.kill(pids[SENDER], signal.SIGCONT)
    all_again(comm, "end")
    if comm.rank == RECEIVER:
        assert all((array == FILL).all() for array in fresh)
        del fresh, array
        with join(0, 1, "last", comm.domain) as last:
            assert last.stats()["arena_quarantined_bytes"] == 0
