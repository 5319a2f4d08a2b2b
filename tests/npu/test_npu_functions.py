"""Every function of alltoallv.torch does on NPUs what its page in docs/api says."""

from __future__ import annotations

import torch
from npu_ranks import group
from on_ranks import on_ranks
from torch_calls import calls, outcome, tables

from alltoallv.errors import AllToAllVError


@on_ranks(2, communicator=False, timeout=240)
def test_each_function_does_what_its_page_says(rank: int, size: int, file: str) -> None:
    """``emulated``: it has the bits of host memory; ``no``: an error that says so."""
    said, said_on_cpu = tables("NPU"), tables("CPU")
    with group(rank, size, file, "cpu:gloo,npu:hccl") as (_, device):
        for name, call in calls(rank, size).items():
            found = outcome(call, device)
            if said[name] == "no":
                assert isinstance(found, AllToAllVError), f"{name}: {found}"
                continue
            assert said[name] == "emulated", name
            assert not isinstance(found, Exception), f"{name}: {found}"
            if said_on_cpu[name] == "no":
                continue
            for one, other in zip(found, outcome(call, "cpu"), strict=True):
                assert torch.equal(one, other), name
