"""Which functions of HCCL our calls become, with which buffers, and what a user hears when memory is short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from npu_ranks import bits, caught, communicator, emulated, group, on, use_device
from on_ranks import on_ranks
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import BackendUnavailableError, HcclError
from alltoallv.testing import reference
from alltoallv.testing.golden import assert_bits_equal


def quantized(x: Tensor, comm: Communicator) -> Tensor:
    return at.quantized_all_reduce(x, gather="quantized", group=comm)


def fails(call: Callable[[], object]) -> None:
    """In HcclAllGather, here or on a peer that has come first."""
    torch.npu.synchronize()  # all have made the calls before
    assert "HcclAllGather returned 4 (HCCL_E_INTERNAL" in str(caught(call))


@on_ranks(2, communicator=False)
def test_an_all_gather_is_hccls_own(rank: int, size: int) -> None:
    """Any other function of HCCL may fail then; where HcclAllGather fails, so does ours, and only ours."""
    with communicator(rank) as (comm, device):
        values = torch.linspace(-1, 1, 700) * (rank + 1)
        wanted = quantized(values.to(device), comm)
        for dtype in (np.float32, np.int8, np.complex128):
            arrays = [np.arange(6, dtype=dtype).reshape(2, 3) + j for j in range(size)]
            x = on(device, arrays[rank])
            out = torch.full((2 * size, 3), 7, dtype=x.dtype).to(device)
            with emulated(faults="HcclAlltoAllV=fail:4"):
                at.all_gather_into_tensor(out, x, comm)
                assert_bits_equal(bits(out), reference.all_gather_into_tensor(arrays)[rank])
                assert_bits_equal(bits(at.functional.all_gather(x, comm)), bits(out))
        x = torch.ones(size).to(device)
        gathered = torch.zeros(size * size).to(device)
        with emulated(faults="HcclAllGather=fail:4"):
            at.all_to_all_v(x, [1] * size, [1] * size, group=comm)
            fails(lambda: at.all_gather_into_tensor(gathered, x, comm))
    with communicator(rank) as (comm, device):
        x = values.to(device)
        assert_bits_equal(bits(quantized(x, comm)), bits(wanted))
        with emulated(faults="HcclAllGather=fail:4"):
            fails(lambda: quantized(x, comm))


@on_ranks(2, communicator=False)
def test_an_all_gather_of_a_group_is_hccls_own(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (world, device):
        comm = at.from_group(world, device="npu")
        x = torch.arange(5.0).to(device) + rank
        out = torch.zeros(5 * size).to(device)
        at.all_gather_into_tensor(out, x, comm)
        with emulated(faults="HcclAlltoAllV=fail:4"):
            at.all_gather_into_tensor(out, x, comm)
        assert out.cpu().tolist() == [k + j for j in range(size) for k in range(5)]
        with emulated(faults="HcclAllGather=fail:4"):
            fails(lambda: at.all_gather_into_tensor(out, x, comm))
        for call in (comm.shrink, comm.rejoin, comm.replaced, lambda: comm.grow(1), lambda: comm.split(0)):
            with pytest.raises(
                BackendUnavailableError, match="'hccl', whose ranks stay what they are, expected a Comm"
            ):
                call()


@on_ranks(2, communicator=False, fresh=True, env={"HCCL_BUFFSIZE": "250"})
def test_who_decides_the_buffer_is_named_where_memory_is_short(rank: int, size: int) -> None:
    device = use_device(rank)
    x = torch.zeros(size << 19, dtype=torch.int32).to(device)  # 2 MB to each
    counts = [1 << 19] * size
    for domain, named in (("ep:300", 'now "ep:300"'), ("ep", "HCCL_BUFFSIZE (now 250)")):
        for function in ("HcclAlltoAllV", "HcclAllReduce"):
            comm = Communicator.from_env(domain, backend="hccl", timeout=30)
            calls = {
                "HcclAlltoAllV": lambda comm=comm: at.all_to_all_v(x, counts, counts, group=comm),
                "HcclAllReduce": lambda comm=comm: at.functional.all_reduce(x, comm),
            }
            calls[function]()  # with the check that comes before the first
            with emulated(faults=f"{function}=fail:24"):
                error = caught(calls[function])
            assert isinstance(error, HcclError)
            comm.destroy()
            for part in (named, f"moves {2 * size} MB per rank", "HCCL_E_OOM", function):
                assert part in str(error), error
