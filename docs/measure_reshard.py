"""Measures reshard beside what programs do without it: gather and broadcast over gloo, and DTensor.redistribute.

python -m alltoallv run -n 4 --no-prefix docs/measure_reshard.py [CALLS]

Four calls in turn, for float32 of 1, 16 and 64 MiB on each rank, from rows to columns: `reshard`; a `ReshardPlan`;
rank 0 gathers all over gloo, and broadcasts all, of which each rank takes its part; and DTensor.redistribute, on
backend alltoallv as well (on CPU torch makes it of an all-gather). The time is from the moment all ranks begin to the
moment all have ended; the figures are medians, of ratios those of neighbours, whose noise is the same. All results are
compared.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import alltoallv.torch as at


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
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
