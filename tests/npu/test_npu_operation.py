"""The ATB-shaped operator on tensors of emulated NPUs: its own communicators, one that the caller owns, checks."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from npu_ranks import ATB_DTYPES, bits, communicator, emulated, on, use_device

import alltoallv.torch as at
import alltoallv_emulator as emulator
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
def test_the_seven_dtypes(ranks: Ranks, size: int) -> None:
    def check(rank: int, size: int) -> None:
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

    ranks(size, communicator=False)(check)


def test_on_a_communicator_given_and_checks_of_the_device(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> None:
        with communicator(rank) as (comm, device):
            case = some_case(0, size, "float32")
            x = on(device, case.inputs[rank])
            assert_bits_equal(bits(at.AllToAllVOperation(param_of(case, rank), comm)(x))[0], case.expected[rank])
            with pytest.raises(InvalidTensorError) as told:
                at.AllToAllVOperation(param_of(case, rank), comm)(x.cpu())
            assert told.value.code == 14
            with emulated(devices=1):
                if rank == 0:  # alone: the check comes before anything that is collective
                    from alltoallv import _core
                    from alltoallv.atb.params import DeviceInfo

                    with pytest.raises(InvalidParamError, match="number of devices"):
                        at.AllToAllVOperation(param_of(case, rank), comm, device=DeviceInfo(*_core.npu_devices()))

    ranks(2, communicator=False)(check)


def test_an_hccl_comm_that_the_caller_owns(ranks: Ranks, tmp_path: Path) -> None:
    def check(rank: int, size: int, table: str) -> None:
        device = use_device(rank)
        library = ctypes.CDLL(str(emulator.library_folder() / "libhccl.so"))
        comm = ctypes.c_void_p()
        assert library.HcclCommInitClusterInfo(table.encode(), rank, ctypes.byref(comm)) == 0
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

    ranks(2, communicator=False, fresh=True)(check, str(table_of_one_server(tmp_path)))


def test_an_hccl_comm_that_the_caller_has_replaced(ranks: Ranks, tmp_path: Path) -> None:
    """Under the same name, while an operation still has the old one."""

    def check(rank: int, size: int, table: str) -> None:
        device = use_device(rank)
        library = ctypes.CDLL(str(emulator.library_folder() / "libhccl.so"))
        case = some_case(3, size, "int16")
        kept = []
        for _ in range(2):
            comm = ctypes.c_void_p()
            assert library.HcclCommInitClusterInfo(table.encode(), rank, ctypes.byref(comm)) == 0
            operation = at.AllToAllVOperation(param_of(case, rank, hccl_comm=comm.value, comm_domain="theirs"))
            assert_bits_equal(bits(operation(on(device, case.inputs[rank])))[0], case.expected[rank])
            kept.append(operation)
            torch.npu.synchronize()
            assert library.HcclCommDestroy(comm) == 0

    ranks(2, communicator=False, fresh=True)(check, str(table_of_one_server(tmp_path)))


def table_of_one_server(folder: Path) -> Path:
    table = {
        "status": "completed",
        "version": "1.0",
        "server_count": "1",
        "server_list": [
            {
                "server_id": "one",
                "device": [{"device_id": str(r), "device_ip": "", "rank_id": str(r)} for r in range(2)],
            }
        ],
    }

    path = folder / "table.json"
    path.write_text(json.dumps(table))
    return path


def test_refused_on_every_rank(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> None:
        with communicator(rank) as (comm, device):
            case = some_case(0, size, "float32")
            operation = at.AllToAllVOperation(param_of(case, rank), comm)
            x = on(device, case.inputs[rank])
            with pytest.raises((InvalidParamError, InvalidTensorError)):
                operation(x[:0] if rank else x)  # rank 0 has nothing to reproach itself with
            assert_bits_equal(bits(operation(x))[0], case.expected[rank])

    ranks(2, communicator=False)(check)
