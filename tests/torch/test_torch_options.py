"""Options that differ between ranks are an error of both, in alltoallv.torch and in torch.distributed's own calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from backend_groups import carrier, on_group
from options_that_differ import Case, check, dispatchers, operations, quantized

import alltoallv.torch as at
from alltoallv.torch import nn


def collectives(functions: Any, rank: int) -> list[Case]:
    x, parts, total = torch.ones(4), [torch.ones(2), torch.ones(2)], dist.ReduceOp.SUM
    calls: list[Callable[[Any], object]] = [
        lambda op: functions.all_reduce(x, op),
        lambda op: functions.reduce(x, 0, op),
        lambda op: functions.reduce_scatter(torch.ones(2), parts, op),
        lambda op: functions.reduce_scatter_tensor(torch.ones(2), x, op),
    ]
    if functions is dist:
        calls.append(lambda op: dist.all_reduce_coalesced(parts, op))
    cases: list[Case] = [(call, total, dist.ReduceOp.MAX, "reduces with sum", "reduces with max") for call in calls]
    rooted: list[Callable[[Any], object]] = [
        lambda root: functions.broadcast(x, root),
        lambda root: functions.reduce(x, root),
        lambda root: functions.gather(parts[0], parts if rank == root else None, root),
        lambda root: functions.scatter(parts[0], parts if rank == root else None, root),
    ]
    return [*cases, *((call, 0, 1, "has root 0", "has root 1") for call in rooted)]


@on_group(2)
def test_options_that_differ(rank: int, size: int, group: dist.ProcessGroup) -> None:
    def tensor(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    cases = [*collectives(at, rank), *collectives(dist, rank), *quantized(at, tensor, torch, None)]
    check(carrier(group), [*cases, *dispatchers(nn, tensor, None), *operations(tensor, carrier(group))])
    at.barrier()
