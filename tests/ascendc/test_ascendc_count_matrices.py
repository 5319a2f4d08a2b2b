"""all_to_all_v with counts in device memory against the host's operator, for very many matrices of counts."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from pathlib import Path
from typing import Any

import compiled
import kernels_on_twin as twin
import numpy as np
import pytest
from kernels_on_twin import DATA_PLACE, Windows, on_ranks, struct

import alltoallv
from alltoallv.numpy import all_to_all_v

Array = np.ndarray[Any, Any]
MATRICES = int(os.environ.get("ALLTOALLV_ASCENDC_MATRICES", 4_000))
CHUNK = 2_000
UNTOUCHED = 77
# Of all matrices: ranks, lanes, the share, and bytes of a window, so few that larger blocks take several rounds.
KINDS = [(2, 1, 0.6, 4096), (3, 1, 0.25, 6144), (2, 2, 0.1, 8192), (5, 1, 0.05, 8192)]


@pytest.fixture(scope="module")
def run_calls(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``alltoallv_run_calls`` of calls.cpp."""
    folder = tmp_path_factory.mktemp("calls")
    source = Path(__file__).with_name("calls.cpp")
    function = ctypes.CDLL(str(compiled.library(source, folder / "calls.so"))).alltoallv_run_calls
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p,
        ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    return function


def rows_of(array: Array) -> Array:
    """Addresses of an array's parts along its first two dimensions."""
    index = np.arange(array.shape[0] * array.shape[1], dtype=np.uint64).reshape(array.shape[:2])
    return np.uint64(array.ctypes.data) + index * np.uint64(array[0, 0].nbytes)


class Calls:
    """Calls of every rank: device memory for all of them, one after the other."""

    def __init__(self, rng: np.random.Generator, windows: Windows, calls: int):
        self.windows, size = windows, windows.size
        self.row_bytes = rng.choice([1, 4, 6, 8, 24, 40], calls)
        most = np.where(rng.random(calls) < 0.05, 24, rng.integers(1, 6, calls))  # a few of several rounds
        self.matrices = rng.integers(0, most[:, None, None] + 1, (calls, size, size))
        self.packed = rng.random((size, calls)) < 0.7
        self.rows = self.matrices.sum(2).T + np.where(self.packed, 0, 5)  # of each input
        self.starts = rng.integers(0, np.maximum(1, self.rows.T[:, :, None] - self.matrices + 1))
        self.capacity = self.matrices.sum(1).T + rng.integers(0, 3, (size, calls))
        room = int(max((self.rows * self.row_bytes).max(), (self.capacity * self.row_bytes).max()))
        self.x = rng.integers(0, 255, (size, calls, room), np.uint8)
        self.y = np.full_like(self.x, UNTOUCHED)
        self.counts = np.ascontiguousarray(self.matrices.transpose(1, 0, 2))
        self.sdispls = np.ascontiguousarray(self.starts.transpose(1, 0, 2))
        self.expects = rng.random((size, calls)) < 0.3  # then the kernel reads these counts, else it writes them
        received = self.matrices.transpose(2, 0, 1)
        self.recv_counts = np.where(self.expects[..., None], received, -5).astype(np.int64)
        self.status = np.full((size, calls, windows.lanes, 8), -1, np.int32)

    def run(self, run_calls: Any, seed: int) -> None:
        size, calls = self.status.shape[:2]
        sdispls = np.where(self.packed, 0, rows_of(self.sdispls)).astype(np.uint64)
        tilings = [
            [np.concatenate([self.windows.tiling(r), struct(("u8", numbers))]) for numbers in zip(
                self.row_bytes, self.rows[r], self.capacity[r], ~self.packed[r], self.expects[r], strict=True)]
            for r in range(size)
        ]  # fmt: skip
        self.tilings = np.array(tilings)
        arrays = (self.y, self.recv_counts, self.status, self.tilings)
        addresses = [rows_of(self.x), rows_of(self.counts), sdispls, *map(rows_of, arrays)]
        arguments = np.ascontiguousarray(np.stack(addresses, 2))
        fault = ctypes.create_string_buffer(1200)
        run = ctypes.cast(twin.LIBRARY.alltoallv_twin_run, ctypes.c_void_p)
        failed = run_calls(
            run, b"alltoallv_all_to_all_v", size, self.windows.lanes, calls, arguments.ctypes.data, 7, seed, fault, 1200
        )
        assert not failed, fault.value.decode()
        assert (self.status[..., :2] == 0).all()

    def check(self, rank: int, comm: alltoallv.Communicator) -> int:
        """Makes the same calls with the host's operator; returns how many results were compared."""
        for i, matrix in enumerate(self.matrices):
            n = int(self.row_bytes[i])
            x = self.x[rank, i, : self.rows[rank, i] * n].reshape(-1, n)
            sdispls = None if self.packed[rank, i] else self.starts[i, rank].tolist()
            expected = all_to_all_v(x, matrix[rank].tolist(), sdispls=sdispls, unit="row", group=comm)
            y = self.y[rank, i]
            assert y[: expected.size].tobytes() == expected.tobytes(), (rank, matrix)
            assert (y[expected.size :] == UNTOUCHED).all(), (rank, matrix)
            assert (self.recv_counts[rank, i] == matrix[:, rank]).all(), (rank, matrix)
        return len(self.matrices)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("size", "lanes", "share", "window_bytes"), KINDS)
def test_equal_to_the_host(run_calls: Any, size: int, lanes: int, share: float, window_bytes: int) -> None:
    rng = np.random.default_rng(100 * size + lanes)
    windows = Windows(size, lanes, DATA_PLACE + window_bytes)
    comms = alltoallv.Communicator.threads(size)
    left, equal = round(MATRICES * share), 0
    while left > 0:
        calls = Calls(rng, windows, min(CHUNK, left))
        calls.run(run_calls, seed=left)
        compared = on_ranks([partial(calls.check, r, comm) for r, comm in enumerate(comms)])
        equal += compared[0]
        left -= compared[0]
    for comm in comms:
        comm.destroy()
    print(f"{size} ranks, {lanes} lanes: {equal} count matrices equal to the host's operator")
