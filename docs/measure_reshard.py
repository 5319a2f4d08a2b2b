"""Measures reshard beside what programs do without it: gather and broadcast over gloo, and DTensor.redistribute.

python -m alltoallv run -n 4 --no-prefix docs/measure_reshard.py [CALLS]

Four calls in turn, for float32 of 1, 16 and 64 MiB on each rank, from rows to columns: `reshard`; a `ReshardPlan`;
rank 0 gathers all over gloo, and broadcasts all, of which each rank takes its part; and DTensor.redistribute, on
backend alltoallv as well (on CPU torch makes it of an all-gather). The time is from the moment all ranks begin to the
moment all have ended; the figures are medians, and ratios are medians of neighbours' ratios, whose noise is the same.
All results are compared.

python -m alltoallv run -n 2 --no-prefix docs/measure_reshard.py --memory numpy|torch MIB

One tensor of which each rank has so many MiB, from one layout in strides to another: what goes to a rank has to be
packed. Prints how much more memory a rank has at most meanwhile (its share of pages, by the kernel's count).
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import alltoallv.numpy as an
import alltoallv.torch as at
from alltoallv import Communicator


def gathered(x: Tensor, gloo: dist.ProcessGroup) -> Tensor:
    """Returns this rank's columns by way of rank 0, as a program without an all-to-all does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = x.new_empty(size * x.shape[0], x.shape[1])
    dist.gather(x, [*whole.chunk(size)] if rank == 0 else None, group=gloo)
    dist.broadcast(whole, 0, group=gloo)
    return whole.chunk(size, 1)[rank].contiguous()


def seconds(call: Callable[[], Tensor], right: Tensor) -> float:
    """Of a call that all ranks begin together and have ended."""
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    dist.barrier()
    end = time.perf_counter()
    assert torch.equal(result, right)
    return end - begin


def times(others: Sequence[float], ours: Sequence[float]) -> str:
    return f"{statistics.median(other / own for other, own in zip(others, ours, strict=True)):.1f}"


def measured(mib: int, calls: int, gloo: dist.ProcessGroup) -> str:
    """Returns what is printed of tensors of this size on each rank."""
    rank, size, rows = dist.get_rank(), dist.get_world_size(), 512
    x = torch.randn(rows, mib * 2**18 // rows, generator=torch.Generator().manual_seed(rank))
    layouts = (range(size), [0]), (range(size), [1])
    plan = at.ReshardPlan((size * rows, x.shape[1]), x.dtype, *layouts)
    mesh = DeviceMesh("cpu", range(size))
    tensor = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    right = gathered(x, gloo)
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: at.reshard(x, *layouts),
        lambda: plan(x),
        lambda: gathered(x, gloo),
        lambda: tensor.redistribute(mesh, [Shard(1)]).to_local(),
    )
    rounds = [[seconds(way, right) for way in ways] for _ in range(calls)]
    whole, planned, over_gloo, redistributed = zip(*rounds, strict=True)
    return (
        f"{mib} MiB a rank: {1e3 * statistics.median(whole):.2f} ms, as a plan {1e3 * statistics.median(planned):.2f} "
        f"ms: {times(over_gloo, whole)} and {times(over_gloo, planned)} times as fast as gather and broadcast over "
        f"gloo, {times(redistributed, whole)} and {times(redistributed, planned)} times as fast as DTensor.redistribute"
    )


def share() -> float:
    """Returns the MiB of this process, of shared pages its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def measure_memory(front_end: Any, tensor: Callable[[Any], Any], mib: int) -> None:
    """Prints what is needed for a tensor in pieces."""
    comm, rows = Communicator.from_env(), 512
    columns, ranks = comm.size * mib * 2**18 // rows, range(comm.size)
    whole = np.add.outer(np.arange(rows, dtype=np.float32), np.arange(columns, dtype=np.float32))  # exact
    of_rows, of_columns = (
        np.concatenate(np.split(whole, 2 * comm.size, dim)[comm.rank :: comm.size], dim) for dim in (0, 1)
    )
    del whole
    x = tensor(of_rows)
    plan = front_end.ReshardPlan((rows, columns), x.dtype, (ranks, [(0, 2)]), (ranks, [(1, 2)]), group=comm)
    front_end.barrier(group=comm)
    before, shares, ended = share(), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            shares.append(share())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = comm.stats()["operators"]
    y = plan(x)
    number = comm.stats()["operators"] - begun
    ended.set()
    watcher.join()
    most = max(*shares, share()) - before
    assert np.array_equal(np.asarray(y), of_columns)
    print(
        f"rank {comm.rank}, {front_end.__name__}: {mib} MiB in, as many out, {plan.bytes_sent / 2**20:.0f} MiB sent in "
        f"{number} exchanges: {most:.0f} MiB more at most, {most - mib:.0f} MiB of them packed"
    )


def main(calls: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("alltoallv")
    gloo = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    for mib in (1, 16, 64):
        text = measured(mib, calls, gloo)
        if dist.get_rank() == 0:
            print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        front_end, tensor = {"numpy": (an, np.asarray), "torch": (at, torch.from_numpy)}[sys.argv[2]]
        measure_memory(front_end, tensor, int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
