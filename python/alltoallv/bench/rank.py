"""One rank of a benchmark: runs every case and, on rank 0, prints one JSON line per case."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import alltoallv.numpy as an
from alltoallv.bench.cases import Case, bus_factor, moved_bytes
from alltoallv.bench.contenders import Contender, Gloo, Limit, Ours
from alltoallv.communicator import Communicator

BLOCKS = 10  # each contender in turn, so that a slow spell of the machine meets all of them


def main(config: dict[str, Any]) -> None:
    """Measures ``config["cases"]``."""
    comm = Communicator.from_env(domain="bench:512")
    contenders: list[Contender] = [Ours(comm, config["api"]), Limit()]
    if "gloo" in config["peers"]:
        import torch

        torch.set_num_threads(1)
        contenders.insert(1, Gloo())
    for fields in config["cases"]:
        case = Case(**fields)
        row = measure(comm, contenders, case, config["seconds"])
        if comm.rank == 0:
            print(json.dumps(row), flush=True)
    an.barrier(group=comm)


def measure(comm: Communicator, contenders: list[Contender], case: Case, seconds: float) -> dict[str, Any]:
    """Times of all contenders, interleaved; the slowest rank counts."""
    expected = case.expected(comm.rank, comm.size)
    calls: dict[str, Callable[[], Any]] = {}
    wrong: dict[str, int] = {}
    repeats: dict[str, int] = {}
    for contender in contenders:
        call, result = contender.prepare(case)
        calls[contender.name] = call
        start = time.perf_counter()
        got = result(call())
        wrong[contender.name] = 0 if contender.name == "limit" else int((np.ravel(got) != expected).sum())
        call()
        once = agree(comm, (time.perf_counter() - start) / 2)
        repeats[contender.name] = int(np.clip(seconds / len(contenders) / BLOCKS / max(once, 1e-7), 2, 2000))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BLOCKS):
        for name, call in calls.items():
            an.barrier(group=comm)
            for _ in range(repeats[name]):
                start = time.perf_counter()
                call()
                samples[name].append(time.perf_counter() - start)
    row: dict[str, Any] = {"np": comm.size, **case.asdict(), "count": case.count, "times": {}}
    for name, times in samples.items():
        us = np.sort(np.array(times)) * 1e6
        row["times"][name] = {
            "median_us": agree(comm, float(np.median(us))),
            "min_us": agree(comm, float(us[0])),
            "p90_us": agree(comm, float(us[int(len(us) * 0.9)])),
            "calls": len(us),
            "wrong": int(agree(comm, float(wrong[name]))),
        }
    us = row["times"]["ours"]["median_us"]
    row["algbw"] = moved_bytes(case, comm.size) / us / 1e3  # bytes per microsecond are MB/s
    row["busbw"] = row["algbw"] * bus_factor(case.collective, comm.size)
    return row


def agree(comm: Communicator, value: float) -> float:
    """The largest value of any rank."""
    out = np.empty(1)
    an.all_reduce(np.array([value]), "max", out=out, group=comm)
    return float(out[0])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
