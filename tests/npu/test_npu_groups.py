"""Groups of torch.distributed with torch_npu's own ProcessGroupHCCL, which is also an independent oracle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from npu_ranks import DTYPES, bits, caught, emulated, group, moved, on
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv.errors import HcclError, PeerLostError
from alltoallv.testing import Ranks
from alltoallv.testing.golden import assert_bits_equal, random_case


@pytest.mark.parametrize("fault", ["die", "fail:24"])
def test_a_rank_is_lost_while_it_joins(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    """In HCCL, which knows of it only after HCCL_CONNECT_TIMEOUT."""

    def check(rank: int, size: int, file: str, fault: str) -> str:
        with group(rank, size, file, backend="gloo") as (world, device):
            comm = at.from_group(world, device="npu", timeout=60)
            x = torch.zeros(size).to(device)
            start = time.monotonic()
            with emulated(faults=f"HcclCommInitRootInfoConfig={fault}" if rank == 1 else "", connect_timeout=6):
                error = caught(lambda: at.all_to_all_v(x, [1] * size, [1] * size, group=comm))
            assert time.monotonic() - start < 45
            assert isinstance(error, PeerLostError if rank != 1 else HcclError)
            return str(error)

    path = str(tmp_path / "store")
    first, second, third = ranks(3, communicator=False, fresh=True, outcomes=True)(check, path, fault)
    for outcome in (first, third):
        assert outcome.error is None, outcome
        assert "rank 1" in outcome.result
        assert ("HCCL_E_OOM" if fault != "die" else "gone") in outcome.result
    assert (second.error is None) == (fault != "die")


@on_ranks(4, communicator=False)
def test_the_same_bits_as_torch_npu(rank: int, size: int, file: str) -> None:
    rng = np.random.default_rng(1)
    with group(rank, size, file) as (_, device):
        for dtype in ("float16", "float32", "int8", "int64", "bfloat16"):
            case = random_case(rng, size, dtype, gaps=False, permuted=False, max_count=200)
            sends, recvs = case.send_counts[rank].tolist(), case.recv_counts[rank].tolist()
            x = on(device, case.inputs[rank])
            ours, theirs = (on(device, case.outputs[rank]) for _ in range(2))
            at.all_to_all_single(ours, x, recvs, sends)
            dist.all_to_all_single(theirs, x, recvs, sends)
            torch.npu.synchronize()
            assert_bits_equal(bits(ours), case.expected[rank], dtype)
            assert_bits_equal(bits(theirs), case.expected[rank], dtype)


@on_ranks(2, communicator=False)
def test_regions_async_and_learnt_counts(rank: int, size: int, file: str) -> None:
    rng = np.random.default_rng(2)
    with group(rank, size, file) as (world, device):
        for n, dtype in enumerate(DTYPES):
            case = random_case(rng, size, dtype)
            written = moved(case, rank, device, async_op=n % 2 == 0)
            assert_bits_equal(written, case.expected[rank], dtype)
        for async_op in (False, True):
            case = random_case(rng, size, "float32", gaps=False, permuted=False)
            result = at.all_to_all_v(on(device, case.inputs[rank]), case.send_counts[rank], async_op=async_op)
            assert_bits_equal(bits(result[1].result() if async_op else result), case.expected[rank])
        comm = at.from_group(world, device="npu")
        assert comm.backend == "hccl"
        assert comm.check == "first"


@on_ranks(4, communicator=False)
def test_subgroups(rank: int, size: int, file: str) -> None:
    with group(rank, size, file) as (_, device):
        groups = [dist.new_group([0, 2]), dist.new_group([3, 1, 0])]
        for made in groups:
            members = dist.get_process_group_ranks(made)
            if rank not in members:
                continue
            place, w = dist.get_rank(made), len(members)
            x = (torch.arange(2.0 * w) + 100 * rank).to(device)
            y = at.all_to_all_v(x, [2] * w, [2] * w, group=made)
            expected = [100.0 * j + 2 * place + k for j in members for k in range(2)]
            assert y.cpu().tolist() == expected


@on_ranks(2, communicator=False)
def test_the_communicator_of_torch_npu_is_used(rank: int, size: int, file: str) -> None:
    from alltoallv.torch.engines.hccl import handle_of

    with group(rank, size, file) as (world, device):
        theirs = torch.ones(2).to(device)
        dist.all_reduce(theirs)
        handle = handle_of(world, device)
        assert handle != 0
        assert handle == world._get_backend(torch.device("npu")).get_hccl_comm(rank)
        y = at.all_to_all_v(torch.full((2,), float(rank)).to(device), [1, 1], [1, 1])
        assert y.cpu().tolist() == [0, 1]


@on_ranks(3, communicator=False)
def test_the_communicator_of_a_subgroup_is_that_of_the_device(rank: int, size: int, file: str) -> None:
    """Not of the device whose number is the rank in the group."""
    with group(rank, size, file) as (_, device):
        made = dist.new_group([1, 2])
        if rank == 0:
            return
        dist.all_reduce(torch.ones(2).to(device), group=made)
        with emulated(faults="HcclCommInit*=fail:4"):  # there is one already
            y = at.all_to_all_v(torch.full((2,), 1.0 * rank).to(device), [1, 1], [1, 1], group=made)
        assert y.cpu().tolist() == [1, 2]


@on_ranks(2, communicator=False, fresh=True)
def test_calls_of_torch_npu_and_ours_run_in_their_order(rank: int, size: int, file: str) -> None:
    """They share a communicator, in which HCCL can do one thing after the other only."""
    with group(rank, size, file) as (_, device):
        x = torch.full((size,), 1.0 + rank).to(device)
        others = [1.0 + j for j in range(size)]
        for async_op in (False, True):
            with emulated(task_delay_us=20_000):
                total, theirs = x.clone(), []
                theirs.append(dist.all_reduce(total, async_op=True))
                result: Any = at.all_to_all_v(x, [1] * size, [1] * size, async_op=async_op)
                again = x.clone()
                theirs.append(dist.all_reduce(again, async_op=True))
                y = result[1].result() if async_op else result
                for work in theirs:
                    work.wait()
                assert y.cpu().tolist() == others
                assert total.cpu().tolist() == again.cpu().tolist() == [sum(others)] * size


@pytest.mark.parametrize("backend", ["hccl", "gloo"])
def test_groups_used_in_another_order_on_each_rank(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    """Asynchronous calls that the ranks do not compare: every communicator has a stream of its own, also those that we
    make for groups without HCCL.
    """

    def check(rank: int, size: int, file: str, backend: str) -> None:
        with group(rank, size, file, backend) as (world, device):
            groups = [world, dist.new_group(list(range(size)), backend=backend)]
            x = torch.full((size,), 1.0 + rank).to(device)
            for made in groups:
                for _ in range(8):
                    at.all_to_all_v(x, [1] * size, [1] * size, group=made)
            for _ in range(3):
                mine = groups if rank == 0 else groups[::-1]
                calls = [at.all_to_all_v(x, [1] * size, [1] * size, group=g, async_op=True) for g in mine]
                for y, work in calls:
                    work.wait()
                    assert y.cpu().tolist() == [1.0 + j for j in range(size)]

    env = {"HCCL_EXEC_TIMEOUT": "10"}
    ranks(2, communicator=False, fresh=True, env=env)(check, str(tmp_path / "store"), backend)
