"""What MindSpore's parser takes for the functions of ``mindspore.communication.comm_func`` when it makes a graph."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor
from mindspore.communication.comm_func import default_handle

from alltoallv.mindspore.group import WORLD as _NAMES
from alltoallv.mindspore.primitives.classes import (
    AllGather,
    AllReduce,
    Barrier,
    CollectiveGather,
    CollectiveScatter,
    ReduceScatter,
    SummedBroadcast,
)

__all__ = [
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather_into_tensor",
    "reduce_scatter_tensor",
    "scatter_tensor",
]
WORLD = _NAMES[0]


def all_reduce(tensor: Tensor, op: str = "sum", group: str = WORLD, async_op: bool = False) -> Any:
    return AllReduce(op, group)(tensor), default_handle if async_op else None


def all_gather_into_tensor(tensor: Tensor, group: str = WORLD, async_op: bool = False) -> Any:
    return AllGather(group)(tensor), default_handle if async_op else None


def reduce_scatter_tensor(tensor: Tensor, op: str = "sum", group: str = WORLD, async_op: bool = False) -> Any:
    return ReduceScatter(op, group)(tensor), default_handle if async_op else None


def broadcast(tensor: Tensor, src: int = 0, group: str = WORLD) -> Tensor:
    return SummedBroadcast(src, group)((tensor,))[0]


def scatter_tensor(tensor: Tensor, src: int = 0, group: str = WORLD) -> Tensor:
    return CollectiveScatter(src, group)(tensor)


def gather_into_tensor(tensor: Tensor, dst: int = 0, group: str = WORLD) -> Tensor:
    return CollectiveGather(dst, group)(tensor)


def barrier(group: str = WORLD) -> Any:
    return Barrier(group)()
