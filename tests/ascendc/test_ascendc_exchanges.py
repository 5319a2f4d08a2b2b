"""The kernels that communicate through windows, on their twin: ranks at different speeds, late, absent, ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels_on_twin import DATA_PLACE, FLAGS, STATUSES, TYPES, Windows, on_ranks, run, struct

from alltoallv.numpy import barrier
from alltoallv.testing import quantized as reference

Array = np.ndarray[Any, Any]
GROUPS = [(1, 1), (2, 1), (2, 3), (3, 2), (4, 2)]  # ranks, lanes
UNTOUCHED = 77


class Exchange:
    """all_to_all_v with counts in device memory: one rank's call."""

    def __init__(
        self,
        windows: Windows,
        rank: int,
        x: Array,
        counts: Array,
        capacity: int,
        sdispls: Array | None = None,
        expected: Array | None = None,
    ):
        self.windows, self.rank, self.x, self.row_bytes = windows, rank, x, x.shape[1]
        self.counts, self.sdispls = counts.astype(np.int64), sdispls
        self.y = np.full((capacity, self.row_bytes), UNTOUCHED, np.uint8)
        self.expected = None if expected is None else expected.astype(np.int64)
        self.recv_counts = np.full(windows.size, -5, np.int64) if expected is None else self.expected.copy()
        self.status = np.full((windows.lanes, 8), -1, np.int32)

    def __call__(self, seed: int = 0, delay: float = 0.0, wait_us: int | None = None) -> Exchange:
        numbers = [self.row_bytes, len(self.x), len(self.y), self.sdispls is not None, self.expected is not None]
        own = struct(("u8", numbers))
        tiling = np.concatenate([self.windows.tiling(self.rank, wait_us), own])
        arguments = self.x, self.counts, self.sdispls, self.y, self.recv_counts, self.status, tiling
        run("alltoallv_all_to_all_v", self.windows.lanes, *arguments, seed=seed, mean_delay_us=delay)
        return self

    @property
    def outcomes(self) -> set[tuple[str, int]]:
        return outcomes(self.status)


def outcomes(status: Array) -> set[tuple[str, int]]:
    """What the lanes say, and of which rank."""
    return {(STATUSES[code], rank) for code, rank in status[:, :2].tolist()}


def expected_rows(xs: list[Array], matrix: Array, rank: int, capacity: int, starts: Array | None = None) -> Array:
    y = np.full((capacity, xs[0].shape[1]), UNTOUCHED, np.uint8)
    at = 0
    for j, count in enumerate(matrix[:, rank]):
        begin = int(matrix[j, :rank].sum()) if starts is None else int(starts[j, rank])
        y[at : at + count] = xs[j][begin : begin + count]
        at += count
    return y


@pytest.mark.parametrize(("size", "lanes"), GROUPS)
def test_any_counts(size: int, lanes: int) -> None:
    """Every call with new data, new sizes, and ranks that come and go at different times."""
    rng = np.random.default_rng(size * 10 + lanes)
    windows = Windows(size, lanes, DATA_PLACE + (16 << 10))
    for call in range(40):
        row_bytes = int(rng.choice([1, 4, 6, 64, 100]))
        matrix = rng.integers(0, [3, 40, 200][call % 3], (size, size))
        xs = [rng.integers(0, 255, (int(matrix[i].sum()), row_bytes)).astype(np.uint8) for i in range(size)]
        capacity = [int(matrix[:, r].sum()) + int(rng.integers(0, 4)) for r in range(size)]
        delays = rng.choice([0.0, 0.0, 5.0], size)
        calls = [Exchange(windows, r, xs[r], matrix[r], capacity[r]) for r in range(size)]
        on_ranks([partial(calls[r], seed=7 * call + r, delay=delays[r]) for r in range(size)])
        for r in range(size):
            assert calls[r].outcomes <= {("done", 0)}, calls[r].status
            assert (calls[r].recv_counts == matrix[:, r]).all()
            assert (calls[r].y == expected_rows(xs, matrix, r, capacity[r])).all(), (call, r)


def test_displacements() -> None:
    """Blocks may overlap and leave gaps in the input."""
    rng = np.random.default_rng(5)
    windows = Windows(3, 2)
    matrix, starts = rng.integers(0, 9, (3, 3)), rng.integers(0, 12, (3, 3))
    xs = [rng.integers(0, 255, (20, 24)).astype(np.uint8) for _ in range(3)]
    calls = [Exchange(windows, r, xs[r], matrix[r], 40, starts[r].astype(np.int64)) for r in range(3)]
    on_ranks(calls)
    for r in range(3):
        assert (calls[r].y == expected_rows(xs, matrix, r, 40, starts)).all()


def test_what_all_ranks_refuse_alike() -> None:
    """Too little room, counts that the input does not have, other rows: no rank writes, and the next call is right."""
    windows, x = Windows(3, 2), np.arange(40, dtype=np.uint8).reshape(10, 4)
    two = np.full(3, 2)

    def calls(
        capacity: int = 9, counts: Array = two, x_of_2: Array = x, expected: Array | None = None
    ) -> list[Exchange]:
        made = [Exchange(windows, r, x, two, 9, expected=two if r else None) for r in range(2)]
        made.append(Exchange(windows, 2, x_of_2, counts, capacity, expected=expected))
        on_ranks([partial(each, seed=r) for r, each in enumerate(made)])
        return made

    for wrong, status in (
        (calls(capacity=5), "overflow"),
        (calls(counts=np.array([2, -1, 2])), "bad_counts"),
        (calls(counts=np.array([2, 2, 9])), "bad_counts"),
        (calls(x_of_2=np.zeros((10, 8), np.uint8)), "mismatch"),
        (calls(expected=np.array([2, 2, 1])), "unexpected"),
    ):
        for each in wrong:
            assert each.outcomes == {(status, 2)}
            assert (each.y == UNTOUCHED).all()
        for each in calls(expected=two):
            assert each.outcomes <= {("done", 0)}
            assert (each.recv_counts == 2).all()


def test_an_absent_rank_is_named_and_ends_the_communicator() -> None:
    windows, x = Windows(3, 2), np.zeros((3, 8), np.uint8)
    ones = np.ones(3)
    first = [Exchange(windows, r, x, ones, 3) for r in range(3)]
    on_ranks([partial(call, wait_us=3_000_000) for call in first[:2]])
    for call in first[:2]:  # who is told of the other's end names the same rank
        assert call.outcomes <= {("late", 2), ("told", 2)}, call.status
        assert (call.y == UNTOUCHED).all()
    assert first[2](wait_us=3_000_000).outcomes <= {("told", 2)}  # it comes late
    again = [Exchange(windows, r, x, ones, 3) for r in range(3)]
    on_ranks(again)
    for call in again:
        assert {status for status, _ in call.outcomes} == {"broken"}


def killed(windows: Windows, run_kernel: Callable[[], Any]) -> None:
    """Rank 1 ends in the midst of its kernel, once some rounds are done."""

    def kill() -> None:
        while windows.memory[0][FLAGS][32:36].view(np.int32)[0] < 20:  # the round that rank 1 has signalled to rank 0
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    run_kernel()


@pytest.mark.parametrize("kernel", ["all_to_all_v", "quant_all_reduce"])
def test_a_killed_rank_is_named_by_all_others(ranks: Any, tmp_path: Path, kernel: str) -> None:
    """Ranks are processes, which share their windows."""
    path, wait_us = tmp_path / "windows", 5_000_000
    window_bytes = DATA_PLACE + (4096 if kernel == "all_to_all_v" else 16 << 10)
    Windows(3, 1, window_bytes, path=path)

    def work(comm: Any) -> tuple[set[tuple[str, int]], set[str], float]:
        windows, status = Windows(3, 1, window_bytes, wait_us, path), np.full((1, 8), -1, np.int32)
        y: Array
        if kernel == "all_to_all_v":
            call = Exchange(windows, comm.rank, np.zeros((60_000, 32), np.uint8), np.full(3, 20_000), 60_000)
            run_kernel, status, y = call, call.status, call.y
        else:
            x, y = np.ones(2_000_000, np.float32), np.zeros(2_000_000, np.float32)
            fields = struct(("u8", [x.size, 128, 1]), ("u4", [0, 0, 0, 1, 0, 8]))
            tiling = np.concatenate([windows.tiling(comm.rank), fields])
            run_kernel = partial(run, "alltoallv_quant_all_reduce", 1, x, None, None, y, status, tiling)
        barrier(group=comm)
        if comm.rank == 1:
            killed(windows, run_kernel)
        begin = time.monotonic()
        run_kernel()
        seconds, first = time.monotonic() - begin, set(outcomes(status))
        run_kernel()
        return first, {code for code, _ in outcomes(status)}, seconds

    found = ranks(3, outcomes=True)(work)
    assert found[1].exit_code == -signal.SIGKILL
    for survivor in (found[0], found[2]):
        assert survivor.error is None, survivor.report()
        first, again, seconds = survivor.result
        assert first <= {("late", 1), ("told", 1)}
        assert again == {"broken"}
        print(f"{kernel}: a rank killed after 20 rounds, {first} after {seconds:.1f} s")


def test_a_late_rank_is_waited_for() -> None:
    windows = Windows(2, 2)
    calls = [Exchange(windows, r, np.full((2, 40), r, np.uint8), np.ones(2), 2) for r in range(2)]
    on_ranks([partial(call, delay=200.0 * r) for r, call in enumerate(calls)])
    assert [call.outcomes for call in calls] == [{("done", 0)}] * 2
    assert (calls[0].y[1] == 1).all()


def test_the_number_of_the_round_lives_on_the_device() -> None:
    """The same arguments again and again, as a captured graph is replayed, with other counts and data in them."""
    rng, size = np.random.default_rng(8), 2
    windows = Windows(size, 1)
    calls = [Exchange(windows, r, np.zeros((20, 16), np.uint8), np.zeros(size), 20) for r in range(size)]
    for replay in range(1_000):
        matrix = rng.integers(0, 10, (size, size))
        for r, call in enumerate(calls):
            call.x[:] = rng.integers(0, 255, call.x.shape)
            call.counts[:] = matrix[r]
            call.y[:] = UNTOUCHED
        on_ranks([partial(call, seed=replay + r) for r, call in enumerate(calls)])
        for r, call in enumerate(calls):
            assert (call.y == expected_rows([each.x for each in calls], matrix, r, 20)).all(), replay
    assert windows.sequences(0) == windows.sequences(1) == [1_000]


@pytest.mark.parametrize(("size", "lanes"), GROUPS)
def test_quantized_all_reduce(size: int, lanes: int) -> None:
    """Scales of each rank's own, and a common one; every result has the reference's bits on every rank."""
    rng = np.random.default_rng(size * 10 + lanes)
    windows = Windows(size, lanes, DATA_PLACE + (128 << 10))
    for call in range(18):
        name, out_name, scale_name = rng.choice(list(TYPES), 3)
        (dtype, acl_type), (out, out_type), (scale_dtype, scale_type) = TYPES[name], TYPES[out_name], TYPES[scale_name]
        count, average = int(rng.choice([1, 5, 100, 3_000, 12_000])), int(rng.integers(2))
        group, channels = int(rng.choice([1, 7, 128, 300] if count < 5_000 else [128, 1_000])), 1
        scale, offset, bits = None, None, 8
        if call % 3 == 2:
            group, average, channels = 0, 0, int(rng.choice([1, 5])) if count % 5 == 0 else 1
            scale, offset = (
                rng.standard_normal(channels).astype(scale_dtype),
                rng.standard_normal(1).astype(scale_dtype),
            )
            xs = [rng.integers(-128, 128, count).astype(np.int8) for _ in range(size)]
            rows = [x.reshape(-1, channels) for x in xs]
            expected = reference.shared_scale_all_reduce(rows, scale, offset[0], dtype=out_name)[0].reshape(-1)
        else:
            xs = [rng.standard_normal(count).astype(dtype) for _ in range(size)]
            op, bits = "avg" if average else "sum", 4 if call % 3 else 8
            expected = reference.quantized_all_reduce(xs, group_size=group, bits=bits, op=op, dtype=out_name)[0]
        fields = ("u8", [count, group, channels]), ("u4", [acl_type, out_type, scale_type, 1, average, bits])
        delays = rng.choice([0.0, 0.0, 5.0], size)

        ys = [np.full(count, 7, out) for _ in range(size)]
        statuses = [np.full((lanes, 8), -1, np.int32) for _ in range(size)]
        tilings = [np.concatenate([windows.tiling(r), struct(*fields)]) for r in range(size)]
        ranks = [
            partial(
                run, "alltoallv_quant_all_reduce", lanes, xs[r], scale, offset, ys[r], statuses[r], tilings[r],
                seed=10 * call + r, mean_delay_us=delays[r],
            )
            for r in range(size)
        ]  # fmt: skip
        on_ranks(ranks)
        for y, status in zip(ys, statuses, strict=True):
            assert (status[:, 0] == 0).all()
            assert y.tobytes() == expected.tobytes(), (count, group, name, out_name, bits)
