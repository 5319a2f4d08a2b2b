"""Ranks on one GPU. NCCL refuses two ranks on a GPU: one has NCCL, two have gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from backend_groups import joined
from torch import Tensor

import alltoallv.torch as at
from alltoallv.torch.engines.nccl import FIRST, NcclMember


@contextlib.contextmanager
def on_gpu(rank: int, size: int, file: str, backend: str, timeout: float = 60.0) -> Iterator[Any]:
    torch.cuda.set_device(0)
    with joined(rank, size, file, backend=backend, timeout=timeout) as group, np.errstate(all="ignore"):
        yield at.from_group(group, device="cuda")


def _launched(member: NcclMember, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool) -> Any:
    return dist.all_to_all(list(outputs), list(inputs), group=member.group, async_op=not wait)


@contextlib.contextmanager
def through_nccl(rank: int, size: int, file: str, backend: str = "cpu:gloo,cuda:nccl") -> Iterator[Any]:
    """One rank that sends to itself through NCCL, and does not copy as a single rank does."""
    with mock.patch.object(NcclMember, "_exchange_views", _launched), on_gpu(rank, size, file, backend) as comm:
        yield comm


def compared(comm: Any) -> None:
    """Makes the calls that ranks compare, so that the next ones are only launched."""
    x = torch.ones(4, device="cuda")
    for _ in range(FIRST + 1):
        at.all_to_all_v(x, [4], [4], group=comm)
    torch.cuda.synchronize()
