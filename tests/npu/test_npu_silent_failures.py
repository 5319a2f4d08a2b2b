"""HCCL that returns success and has done nothing: noticed, and gone round or an error on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from npu_ranks import communicator, emulated, exchange, moved, use_device
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import HcclError, PeerLostError
from alltoallv.testing import Ranks
from alltoallv.testing.golden import assert_bits_equal, random_case


@pytest.mark.parametrize("size", [2, 3])
def test_success_with_zeros_is_noticed_and_gone_round(ranks: Ranks, size: int) -> None:
    """Some CANN releases do that; the data then go through HcclAllGather."""

    def check(rank: int, size: int) -> None:
        rng = np.random.default_rng(0)
        use_device(rank)
        with emulated(faults="HcclAlltoAllV=zeros"), communicator(rank) as (comm, device):
            assert comm.stats()["falls_back"] == 1
            for dtype in ("float32", "int8", "complex64"):
                for async_op in (False, True):
                    case = random_case(rng, size, dtype)
                    written = moved(case, rank, device, group=comm, async_op=async_op)
                    assert_bits_equal(written, case.expected[rank], dtype)

    outcomes = ranks(size, communicator=False, outcomes=True)(check)
    for outcome in outcomes:
        assert outcome.error is None, outcome
    assert "HcclAlltoAllV returned success and did not move the data" in outcomes[0].output


@on_ranks(3, communicator=False)
def test_zeros_on_one_rank_only(rank: int, size: int) -> None:
    use_device(rank)
    faults = "HcclAlltoAllV=zeros" if rank == 1 else ""
    with emulated(faults=faults), communicator(rank) as (comm, device):
        assert comm.stats()["falls_back"] == 1  # on all alike
        assert exchange(comm, device) == [0.0, 1.0, 2.0]


@on_ranks(2, communicator=False, fresh=True, env={"HCCL_EXEC_TIMEOUT": "3"})
def test_a_rank_that_skips_the_self_check(rank: int, size: int) -> None:
    """All ranks alike: gone round. One alone: an error on every rank."""
    use_device(rank)
    with emulated(faults="HcclAlltoAllV=skip"), communicator(rank) as (comm, device):
        assert comm.stats()["falls_back"] == 1
        assert exchange(comm, device) == list(range(size))
    with emulated(faults="HcclAlltoAllV=skip" if rank == 1 else ""), pytest.raises((HcclError, PeerLostError)):
        Communicator.from_env("another", backend="hccl", timeout=20)


@pytest.mark.parametrize("fault", ["zeros", "skip"])
def test_reductions_that_do_nothing(ranks: Ranks, fault: str) -> None:
    """A tiny one before the first of a kind tells; parts then go to their owners, who add them."""

    def check(rank: int, size: int, fault: str) -> None:
        with communicator(rank) as (comm, device):
            x = torch.arange(float(2 * size)).to(device) + rank
            total = torch.arange(float(2 * size)) * size + size * (size - 1) / 2
            with emulated(faults=f"HcclAllReduce={fault};HcclReduceScatter={fault}"):
                for _ in range(2):
                    assert at.functional.all_reduce(x, comm).cpu().tolist() == total.tolist()
                    assert (
                        at.functional.reduce_scatter(x, comm).cpu().tolist() == total[2 * rank : 2 * rank + 2].tolist()
                    )
            assert comm.stats()["all_reduce_falls_back"] == comm.stats()["reduce_scatter_falls_back"] == 1
            assert comm.usable

    outcomes = ranks(2, communicator=False, outcomes=True)(check, fault)
    for outcome in outcomes:
        assert outcome.error is None, outcome
    assert "HCCL's all_reduce returned success and did not reduce the data" in outcomes[0].output


@on_ranks(2, communicator=False)
def test_zeros_from_all_gather_too_is_an_error(rank: int, size: int) -> None:
    use_device(rank)
    with (
        emulated(faults="Hccl*=zeros"),
        pytest.raises(HcclError, match="HcclAllGather returned success and did not move the data"),
    ):
        Communicator.from_env(backend="hccl", timeout=20)
