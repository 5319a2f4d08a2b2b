"""Asynchronous calls: order, results, errors, and who keeps the arrays alive."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_cases import SEED, Array, Launch, put
from on_ranks import on_both

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidTensorError, PeerMismatchError
from alltoallv.testing import golden, reference


class Gate:
    """Through which the last rank comes when all others have opened it: files in a folder, not a collective."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / str(time.monotonic_ns())
        self.folder.mkdir()

    def open(self, communicator: Communicator) -> None:
        (self.folder / str(communicator.rank)).touch()

    def enter(self, communicator: Communicator) -> None:
        end = time.monotonic() + 20
        while len(list(self.folder.iterdir())) < communicator.size - 1:
            assert time.monotonic() < end, "the other ranks have not come"
            time.sleep(0.01)


def is_late(communicator: Communicator) -> bool:
    return communicator.rank == communicator.size - 1


def start_everything(communicator: Communicator, n: int) -> list[tuple[str, Any, Array]]:
    """One of every operator, under way: its name, its handle, and what it must yield."""
    size, r = communicator.size, communicator.rank
    rng = np.random.default_rng(SEED)
    inputs = [golden.fill(rng, (n * size, 2), np.dtype(np.float32)) for _ in range(size)]
    x = inputs[r]
    started: list[tuple[str, Any, Array]] = []

    def add(name: str, call: Any, expected: Array) -> None:
        output, work = call if isinstance(call, tuple) else (None, call)
        assert output is None or output.shape == expected.shape
        started.append((name, work, expected))

    flat, counts = [x.reshape(-1) for x in inputs], [[2 * n] * size] * size
    everything = {"group": communicator, "async_op": True}
    moved = reference.all_to_all_v(flat, counts)[r]
    add("all_to_all_v", av.all_to_all_v(x, counts[r], counts[r], unit="element", **everything), moved)
    add("learning", av.all_to_all_v(x, counts[r], unit="element", **everything), moved)
    rows = [n] * size
    add("rows", av.all_to_all_v(x, rows, unit="row", **everything), moved.reshape(-1, 2))
    out = np.empty_like(x)
    add("single", av.all_to_all_single(out, x, None, None, communicator, True), moved.reshape(-1, 2))
    gathered = np.concatenate(inputs)
    out = np.empty_like(gathered)
    add("into_tensor", av.all_gather_into_tensor(out, x, communicator, True), gathered)
    add("all_gather", av.all_gather(x, **everything), np.stack(inputs))
    array = x.copy()
    add("broadcast", av.broadcast(array, size - 1, **everything), inputs[-1])
    add("all_reduce", av.all_reduce(x, "max", **everything), reference.all_reduce(inputs, "max")[r])
    add("reduce_scatter", av.reduce_scatter(x, op="min", **everything), reference.reduce_scatter(inputs, "min")[r])
    return started


def check(name: str, work: av.Work, expected: Array) -> None:
    result = work.result()
    golden.assert_bits_equal(result, expected, name)
    assert work.is_completed()
    assert work.exception() is None
    assert work.result() is result


@pytest.mark.parametrize("n", [5, 5000])
def test_every_operator_returns_before_the_peers_come(launch: Launch, tmp_path: Path, n: int) -> None:
    def run(communicator: Communicator, gate: Gate) -> None:
        if is_late(communicator):
            gate.enter(communicator)
        started = start_everything(communicator, n)
        if not is_late(communicator):
            assert not any(work.is_completed() for _, work, _ in started)
            assert all(work.exception() is None for _, work, _ in started)
            gate.open(communicator)
        for one in reversed(started):  # the last one first: then all are done
            check(*one)

    for size in (2, 3):
        launch(size, run, Gate(tmp_path))


@on_both(3)
def test_synchronous_calls_queue_behind_pending_ones(communicator: Communicator) -> None:
    if is_late(communicator):
        time.sleep(0.1)
    started = start_everything(communicator, 3)
    result, work = av.all_gather([communicator.rank], group=communicator, async_op=True)
    assert av.all_reduce([1], group=communicator).tolist() == [communicator.size]
    assert result.ravel().tolist() == list(range(communicator.size))  # without having waited for it
    work.wait()
    for one in started:
        check(*one)


@on_both(2)
def test_any_value_is_a_flag(communicator: Communicator) -> None:
    """By its truth, in every function alike; one that has none is an error on every rank."""
    x, out, all_ = np.ones(2), np.zeros(2), np.zeros(4)
    for flag in (1, "yes", np.True_, 0, None, np.False_):
        how: dict[str, Any] = {"group": communicator, "async_op": flag}
        made = [av.all_to_all_v(x, [1, 1], [1, 1], **how), av.all_gather(x, **how), av.all_reduce(x, **how)]
        works = [av.all_to_all_single(out, x, **how), av.all_gather_into_tensor(all_, x, **how)]
        if flag:
            works += [pair[1] for pair in made]
        for work in works:
            assert work.wait() if flag else work is None
        assert {type(each) for each in made} == {tuple if flag else np.ndarray}
    neither = np.ones(2) if communicator.rank == 0 else False
    with pytest.raises(ValueError, match="truth value"):
        av.all_to_all_v(x, [1, 1], [1, 1], group=communicator, async_op=neither)


def test_errors_surface_in_wait_on_every_rank(launch: Launch) -> None:
    """What the ranks disagree about; and what one rank refuses, which that rank learns at once."""

    def run(communicator: Communicator) -> None:
        size, r = communicator.size, communicator.rank
        asynchronous = {"group": communicator, "async_op": True}
        x = np.arange(3 * size)
        good = [3] * size
        came = [av.all_gather(x[:1], **asynchronous)[1]]
        recvs = [3 + (r == 1 and j == 0) for j in range(size)]
        out, mismatch = av.all_to_all_v(x, good, recvs, **asynchronous)
        out[...] = -1
        came.append(av.all_gather(x[:1], **asynchronous)[1])
        _, dtypes = av.all_to_all_v(x.astype(np.int16 if r == 0 else np.int32), good, **asynchronous)
        came.append(av.all_reduce(x, **asynchronous)[1])
        refused = None
        if r == size - 1:
            with pytest.raises(InvalidTensorError, match=r"out is a list.*A2A-2061"):
                av.all_to_all_v(x, good, good, out=[1], **asynchronous)
        else:
            _, refused = av.all_to_all_v(x, good, good, **asynchronous)
        came.append(av.barrier(**asynchronous))

        with pytest.raises(
            PeerMismatchError, match=r"#2 .*rank 0 sends 3 elements to rank 1, which expects 4.*A2A-3010"
        ):
            mismatch.wait()
        assert (out == -1).all()
        with pytest.raises(PeerMismatchError, match=r"#4 .*rank 0 has dtype int16, rank 1 has dtype int32.*A2A-3009"):
            dtypes.wait()
        if refused is not None:
            with pytest.raises(
                InvalidTensorError, match=rf"#6 .*failed on rank {size - 1}: out is a list, expected.*A2A-2061"
            ):
                refused.wait()
            assert isinstance(refused.exception(), InvalidTensorError)
            with pytest.raises(InvalidTensorError):  # again
                refused.wait()
        for work in came:
            work.wait()
        assert communicator.usable
        assert av.all_reduce([1], group=communicator).tolist() == [size]

    launch(2, run)
    launch(3, run)


def test_dropped_handles_keep_arrays_alive(launch: Launch, tmp_path: Path) -> None:
    """The handle, the arrays and even the communicator's wrapper are dropped while the peer has not come yet."""

    def run(communicator: Communicator, gate: Gate, n: int, in_arena: bool) -> None:
        r = communicator.rank
        alive: list[weakref.ref[Any]] = []

        def submit(comm: Communicator, number: int) -> None:
            x = put(np.full(2 * n, 10 * r + number), in_arena)
            out = put(np.zeros(2 * n, np.int64), in_arena)
            alive.extend([weakref.ref(x), weakref.ref(out)])
            av.all_to_all_v(x, [n, n], [n, n], out=out, group=comm, async_op=True)

        if r == 0:
            submit(communicator, 0)
            another = Communicator(communicator.core)
            submit(another, 1)
            del another
            gc.collect()
            assert all(ref() is not None for ref in alive)
            rubbish = [put(np.full(2 * n, -1), in_arena) for _ in range(10)]
            gate.open(communicator)
            av.barrier(group=communicator)
            del rubbish
            (alone,) = Communicator.threads(1)
            end = time.monotonic() + 30
            while any(ref() is not None for ref in alive) and time.monotonic() < end:
                work = av.barrier(group=alone, async_op=True)  # any asynchronous call lets go of those that are done
                assert work is not None
                work.wait()
                gc.collect()
            assert all(ref() is None for ref in alive)
        else:
            gate.enter(communicator)
            for number in (0, 1):
                out = av.all_to_all_v(np.full(2 * n, 10 * r), [n, n], [n, n], group=communicator)
                assert out.tolist() == [number] * n + [10 * r] * n
            av.barrier(group=communicator)

    for in_arena in (False, True):
        launch(2, run, Gate(tmp_path), 5, in_arena)
        launch(2, run, Gate(tmp_path), 100_000, in_arena)


@on_both(2)
def test_a_handle_that_was_waited_for_keeps_nothing_alive(communicator: Communicator) -> None:
    x, out = np.arange(2), np.zeros(2, np.int64)
    refs = [weakref.ref(x), weakref.ref(out)]
    work = av.all_to_all_v(x, [1, 1], [1, 1], out=out, group=communicator, async_op=True)[1]
    work.wait()
    del x
    assert refs[0]() is None
    del out, work
    assert refs[1]() is None


@on_both(3)
def test_destroy_waits_for_what_is_pending(communicator: Communicator) -> None:
    if is_late(communicator):
        time.sleep(0.1)
    result, work = av.all_gather([communicator.rank], group=communicator, async_op=True)
    communicator.destroy()
    assert result.ravel().tolist() == list(range(communicator.size))
    assert work.result() is result


@on_both(3)
def test_many_in_flight_from_several_threads(communicator: Communicator) -> None:
    """Calls of several threads are ordered by the communicator; here each order is as good as another."""
    from concurrent.futures import ThreadPoolExecutor

    def reduce(_: int) -> list[int]:
        works = [av.all_reduce(np.ones(3, np.int32), group=communicator, async_op=True)[1] for _ in range(25)]
        return [int(work.result().sum()) for work in works]

    with ThreadPoolExecutor(4) as pool:
        for sums in pool.map(reduce, range(4)):
            assert sums == [3 * communicator.size] * 25
