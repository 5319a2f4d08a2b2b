"""The ATB-shaped operator on tensors of emulated NPUs: its own communicators, one that the caller owns, checks."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from npu_ranks import ATB_DTYPES, bits, communicator, emulated, on, use_device
from npu_starts import hccl_comm, write_table
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv import AllToAllVParam
from alltoallv.errors import HcclError, InvalidParamError, InvalidTensorError
from alltoallv.testing import Ranks
from alltoallv.testing.golden import Case, assert_bits_equal, random_case


def param_of(case: Case, rank: int, **more: Any) -> AllToAllVParam:
    return AllToAllVParam(
        rank=rank,
        rank_size=case.world_size,
        send_counts=case.send_counts[rank],
        sdispls=case.sdispls[rank],
        recv_counts=case.recv_counts[rank],
        rdispls=case.rdispls[rank],
        **more,
    )


def some_case(seed: int, size: int, dtype: str) -> Case:
    """ATB's rules: every rank sends and receives something, and receive regions leave no gap."""
    rng = np.random.default_rng(seed)
    while True:
        case = random_case(rng, size, dtype, gaps=False)
        if min(case.recv_counts.sum(axis=1)) > 0 and min(case.send_counts.sum(axis=1)) > 0:
            return case


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(communicator=False)
def test_the_seven_dtypes(rank: int, size: int) -> None:
    device = use_device(rank)
    for seed, dtype in enumerate(ATB_DTYPES):
        case = some_case(seed, size, dtype)
        operation = at.AllToAllVOperation(param_of(case, rank))  # backend "hccl" on an NPU is HCCL
        x = on(device, case.inputs[rank])
        for _ in range(2):
            y = operation(x)
            assert y.device == device
            assert y.shape == (1, case.expected[rank].size)
            assert_bits_equal(bits(y).reshape(-1), case.expected[rank], dtype)
        out = torch.empty_like(y)
        assert operation(x, out=out) is out
        assert_bits_equal(bits(out).reshape(-1), case.expected[rank], dtype)


@on_ranks(2, communicator=False)
def test_on_a_communicator_given(rank: int, size: int) -> None:
    """What the device or one rank's tensor does not allow is refused, on every rank, and the next call is right."""
    with communicator(rank) as (comm, device):
        case = some_case(0, size, "float32")
        x = on(device, case.inputs[rank])
        operation = at.AllToAllVOperation(param_of(case, rank), comm)
        assert_bits_equal(bits(operation(x))[0], case.expected[rank])
        with pytest.raises(InvalidTensorError) as told:
            operation(x.cpu())
        assert told.value.code == 14
        with pytest.raises((InvalidParamError, InvalidTensorError)):
            operation(x[:0] if rank else x)  # rank 0 has nothing to reproach itself with
        assert_bits_equal(bits(operation(x))[0], case.expected[rank])
        with emulated(devices=1):
            if rank == 0:  # alone: the check comes before anything that is collective
                from alltoallv import _core
                from alltoallv.atb.params import DeviceInfo

                with pytest.raises(InvalidParamError, match="number of devices"):
                    at.AllToAllVOperation(param_of(case, rank), comm, device=DeviceInfo(*_core.npu_devices()))


def test_an_hccl_comm_that_the_caller_owns(ranks: Ranks, tmp_path: Path) -> None:
    def check(rank: int, size: int, table: str) -> None:
        device = use_device(rank)
        library, comm = hccl_comm(rank, table)
        case = some_case(3, size, "int16")
        operation = at.AllToAllVOperation(param_of(case, rank, hccl_comm=comm.value, comm_domain="theirs"))
        assert_bits_equal(bits(operation(on(device, case.inputs[rank])))[0], case.expected[rank])
        with pytest.raises((InvalidParamError, InvalidTensorError)):
            operation(on(device, case.inputs[rank])[: 0 if rank else None])
        named = ctypes.create_string_buffer(128)
        assert library.HcclGetCommName(comm, named) == 0  # still the caller's
        assert library.HcclCommDestroy(comm) == 0
        with pytest.raises(HcclError, match="HCCL_E_PARA"):  # on every rank, and no rank waits
            operation(on(device, case.inputs[rank]))

    ranks(2, communicator=False, fresh=True)(check, write_table(tmp_path / "table.json", [2]))


def test_an_hccl_comm_that_the_caller_has_replaced(ranks: Ranks, tmp_path: Path) -> None:
    """Under the same name, while an operation still has the old one."""

    def check(rank: int, size: int, table: str) -> None:
        device = use_device(rank)
        case = some_case(3, size, "int16")
        kept = []
        for _ in range(2):
            library, comm = hccl_comm(rank, table)
            operation = at.AllToAllVOperation(param_of(case, rank, hccl_comm=comm.value, comm_domain="theirs"))
            assert_bits_equal(bits(operation(on(device, case.inputs[rank])))[0], case.expected[rank])
            kept.append(operation)
            torch.npu.synchronize()
            assert library.HcclCommDestroy(comm) == 0

    ranks(2, communicator=False, fresh=True)(check, write_table(tmp_path / "table.json", [2]))
