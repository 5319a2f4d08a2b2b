"""Copies that several threads of a rank make."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import alltoallv
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.numpy import all_to_all_v
from alltoallv.testing import Ranks
from alltoallv.testing.data_path import data_path

MB = 1 << 20
FILL = 0x5A


def copy_threads() -> int:
    """The copy threads of this process that are alive."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # another thread that ends just now
            count += (task / "comm").read_text().strip() == "alltoallv-copy"
    return count


def has_quota() -> bool:
    """Whether a cgroup limits this process to fewer processors than it may run on."""
    path = Path("/sys/fs/cgroup/cpu.max")
    return path.exists() and not path.read_text().startswith("max")


def exchange(comm: Communicator, threads: int, path: str) -> int:
    """Odd sizes above and below what is shared out, with gaps; returns the helpers that it took."""
    size, rank = comm.size, comm.rank
    with data_path(path), Communicator.from_env("crew") as crewed:
        for round_ in range(3):
            counts = [
                [threads * MB + 4099 * (i + 2 * j) + 1 if (i + j + round_) % 3 else 777 for j in range(size)]
                for i in range(size)
            ]
            sends, recvs = counts[rank], [counts[j][rank] for j in range(size)]
            sdispls = [sum(sends[:j]) + 5 * j for j in range(size)]
            rdispls = [sum(recvs[:j]) + 3 * j for j in range(size)]
            x = alltoallv.empty(sum(sends) + 5 * size, np.uint8)
            out = alltoallv.empty(sum(recvs) + 3 * size, np.uint8)
            out[:] = FILL
            for j in range(size):
                x[sdispls[j] : sdispls[j] + sends[j]] = content(rank, j, sends[j])
            all_to_all_v(x, sends, recvs, sdispls=sdispls, rdispls=rdispls, out=out, group=crewed)
            expected = np.full_like(out, FILL)
            for j in range(size):
                expected[rdispls[j] : rdispls[j] + recvs[j]] = content(j, rank, recvs[j])
            np.testing.assert_array_equal(out, expected)
        helpers = copy_threads()
    assert copy_threads() == 0
    return helpers


def content(sender: int, receiver: int, count: int) -> np.ndarray:
    return np.random.default_rng([sender, receiver]).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("path", ["push", "pull"])
@pytest.mark.parametrize(("size", "threads"), [(1, 2), (2, 3)])
def test_bytes_arrive(ranks: Ranks, size: int, threads: int, path: str) -> None:
    run = ranks(size, fresh=True, env={"ALLTOALLV_COPY_THREADS": str(threads)})
    assert run(exchange, threads, path) == [threads - 1] * size


def test_one_thread_needs_no_help(ranks: Ranks) -> None:
    run = ranks(2, fresh=True, env={"ALLTOALLV_COPY_THREADS": "1"})
    assert run(exchange, 1, "push") == [0, 0]


def test_by_default_spare_processors_help(ranks: Ranks) -> None:
    run = ranks(1, fresh=True, env={"ALLTOALLV_COPY_THREADS": "0"})
    (helpers,) = run(exchange, 4, "push")
    most = min(len(os.sched_getaffinity(0)), 4) - 1
    assert helpers == most or (has_quota() and 0 <= helpers < most)


def test_a_number_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLTOALLV_COPY_THREADS", "many")
    with pytest.raises(
        InvalidParamError, match=r"ALLTOALLV_COPY_THREADS is 'many', expected an integer of at least 0.*A2A-1306"
    ):
        Communicator.from_env("wrong-crew")
