"""The two ranks of the self-test: they exchange data over every path, time it, and check which path was used.

`selftest` starts them; rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np

import alltoallv
from alltoallv import Communicator
from alltoallv.numpy import all_to_all_v, barrier
from alltoallv.testing.data_path import data_path

SMALL, LARGE = 4 << 10, 1 << 20  # bytes to each peer
WARM_UP, REPETITIONS = 5, 25
TIMEOUT = 20.0

# name -> (requested path, bytes, input in shared memory, output in shared memory)
CASES = {
    "inline": ("inline", SMALL, False, False),
    "push": ("push", LARGE, False, True),
    "pull": ("pull", LARGE, True, False),
    "cma": ("cma", LARGE, False, False),
    "staged": ("staged", LARGE, False, False),
    "auto, small": ("auto", SMALL, False, False),
    "auto, operator's output": ("auto", LARGE, False, True),
    "auto, private arrays": ("auto", LARGE, False, False),
}


def run_case(path: str, size: int, shared_input: bool, shared_output: bool) -> dict[str, Any]:
    """Exchanges ``size`` bytes with every peer over the path that ``path`` requests.

    Returns:
        "bytes", "seconds" (median), "carried" (bytes of this rank per path in one exchange), "correct".
    """
    domain = f"doctor {path} {size} {shared_input:d}{shared_output:d}"
    with data_path(path), Communicator.from_env(domain, timeout=TIMEOUT) as comm:
        counts = [0 if j == comm.rank else size for j in range(comm.size)]
        total = sum(counts)
        x = (alltoallv.empty if shared_input else np.empty)(total, np.uint8)
        out = (alltoallv.empty if shared_output else np.empty)(total, np.uint8)
        pattern = np.arange(size, dtype=np.uint32).astype(np.uint8)
        x[:] = np.tile(pattern, comm.size - 1) + np.uint8(comm.rank)
        expected = np.concatenate([pattern + np.uint8(j) for j in range(comm.size) if j != comm.rank])

        def arrives() -> bool:
            out[:] = ~expected
            all_to_all_v(x, counts, counts, out=out, group=comm)
            return bool((out == expected).all())

        before = comm.stats()
        correct = arrives()
        carried = {
            name.removeprefix("bytes_"): count - before[name]
            for name, count in comm.stats().items()
            if name.startswith("bytes_") and count > before[name]
        }
        seconds = []
        for _ in range(WARM_UP + REPETITIONS):
            barrier(group=comm)
            begin = time.perf_counter()
            all_to_all_v(x, counts, counts, out=out, group=comm)
            seconds.append(time.perf_counter() - begin)
        correct &= arrives()
        median = statistics.median(seconds[WARM_UP:])
        return {"bytes": size, "seconds": median, "carried": carried, "correct": correct}


def main() -> int:
    """Runs all cases; returns 0 if every byte was right on this rank."""
    results = {name: run_case(*case) for name, case in CASES.items()}
    with Communicator.from_env(timeout=TIMEOUT) as comm:
        barrier(group=comm)
        if comm.rank == 0:
            print(json.dumps(results), flush=True)
    return 0 if all(case["correct"] for case in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
