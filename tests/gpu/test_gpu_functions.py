"""Every function of alltoallv.torch does on a GPU what its page in docs/api says."""

from __future__ import annotations

from typing import Any

import torch
from backend_groups import Grouped
from one_gpu import on_gpu, through_nccl
from torch_calls import calls, outcome, tables

from alltoallv.errors import AllToAllVError


def each(rank: int, size: int, comm: Any) -> None:
    """``not run``, until one has: it has the bits of host memory; ``no``: an error that says so."""
    said, on_cpu = tables("GPU"), tables("CPU")
    for name, call in calls(rank, size).items():
        message = name in ("irecv", "isend", "recv", "send")
        if message and size != 2:
            continue
        found = outcome(call, "cuda")
        if said[name] == "no" and not (message and comm.backend == "shm"):  # gloo's way is host memory, with messages
            assert isinstance(found, AllToAllVError), f"{name}: {found}"
            continue
        assert not isinstance(found, Exception), f"{name}: {found}"
        if on_cpu[name] == "yes":
            for one, other in zip(found, outcome(call, "cpu"), strict=True):
                assert torch.equal(one, other), name


def test_over_nccl(grouped: Grouped) -> None:
    grouped(1, through_nccl, seconds=240)(each)


def test_two_ranks_over_gloo(grouped: Grouped) -> None:
    grouped(2, on_gpu, backend="gloo", seconds=240)(each)
