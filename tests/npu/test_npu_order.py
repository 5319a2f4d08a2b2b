"""Emulated HCCL adds in an order that depends on the length; with ``order="rank"`` sums have the CPU's bits."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from npu_ranks import bits, emulated, group, on, use_device
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.testing import golden, reference
from alltoallv.testing.golden import assert_bits_equal

DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "uint8")
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "prod": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX}


def rows(rank: int, device: torch.device) -> torch.Tensor:
    """Four times 184 rows, which differ by rank."""
    made = torch.Generator().manual_seed(rank)
    return torch.randn(4 * 184, 5120, generator=made).to(torch.bfloat16).to(device)


@on_ranks(8, communicator=False)
def test_rows_in_a_longer_batch(rank: int, n: int, file: str) -> None:
    """The same rows have the same bits whatever stands beside them only if the order is that of the ranks."""
    with group(rank, n, file) as (_, device):
        x = rows(rank, device)
        for order, agree in (("length", False), ("rank", True), ("halving", True)):
            few, many = x[:184].clone(), x.clone()
            torch.npu.synchronize()
            with emulated(order=order):
                dist.all_reduce(few)
                dist.all_reduce(many)
                torch.npu.synchronize()
            assert torch.equal(few, many[:184]) == agree, order
        with emulated(order="length"):
            few, many = x[:184].clone(), x.clone()
            at.all_reduce(few, order="rank")
            at.all_reduce(many, order="rank")
            assert torch.equal(few, many[:184])


@pytest.mark.parametrize("size", [3, 4])
@on_ranks(communicator=False)
def test_orders(rank: int, n: int, file: str) -> None:
    """One term is 2^24, where float32 has even numbers only; the others are 1."""
    with group(rank, n, file) as (_, device):
        x = torch.full((n,), 2.0**24 if rank == 0 else 1.0).to(device)
        above = {}
        for order in ("rank", "ring", "halving"):
            total, part = x.clone(), torch.empty(1, device=device)
            torch.npu.synchronize()
            with emulated(order=order):
                dist.all_reduce(total)
                dist.reduce_scatter_tensor(part, x)
                torch.npu.synchronize()
            assert part.item() == total[rank].item()
            above[order] = [int(value) - 2**24 for value in total.tolist()]
        ring, halving = {3: ([2, 0, 0], 0), 4: ([4, 4, 0, 0], 2)}[n]  # part j: from rank j + 1 on, round to j
        assert above == {"rank": [0] * n, "ring": ring, "halving": [halving] * n}


def terms(size: int, numel: int, dtype: str, seed: int) -> list[Any]:
    """What the ranks give: values of many magnitudes, whose sum depends on the order."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(size, numel)) * 2.0 ** rng.integers(-3, 4, (size, numel))
    return list(
        (values * (1 if "float" in dtype else 10))
        .clip(0 if dtype == "uint8" else -100, 100)
        .astype(golden.dtype_of(dtype))
    )


@pytest.mark.parametrize("cases", [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
@on_ranks(4, communicator=False, timeout=2900)
def test_the_bits_are_those_of_the_cpu(rank: int, n: int, file: str, cases: int) -> None:
    """Shapes, dtypes, operations and groups at random, over an HCCL that adds in another order.

    Every fourth is captured with other values, and replayed with these.
    """
    with group(rank, n, file) as (world, device), emulated(order="ring"):
        groups = [world, dist.new_group([0, 2, 3]), dist.new_group([1, 0])]
        rng = np.random.default_rng(7)
        for case in range(cases):
            made, dtype, op = groups[rng.integers(3)], DTYPES[rng.integers(6)], list(OPS)[rng.integers(4)]
            counts = rng.integers(0, int(rng.choice([4, 100, 4000])), 4).tolist()
            members = dist.get_process_group_ranks(made) if made is not dist.GroupMember.NON_GROUP_MEMBER else []
            if rank not in members or (op == "avg" and "float" not in dtype):
                continue
            size, place = len(members), members.index(rank)
            counts = counts[:size]
            arrays = terms(size, sum(counts), dtype, case)
            about = f"case {case}: {op} of {dtype} {counts} on {members}"
            values = on(device, arrays[place])
            replays = case % 4 == 0
            x = torch.ones_like(values) if replays else values
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph) if replays else contextlib.nullcontext():
                whole, root, part = x.clone(), x.clone(), x.new_empty(counts[place])
                at.all_reduce(whole, OPS[op], group=made, order="rank")
                work = at.reduce_scatter(part, list(x.split(counts)), OPS[op], group=made, order="rank", async_op=True)
                work.wait()
                at.reduce(root, group_dst=0, op=OPS[op], group=made, order="rank")
            if replays:
                x.copy_(values)
                graph.replay()
                torch.npu.synchronize()
            wanted = reference.all_reduce(arrays, op)[place]
            assert_bits_equal(bits(whole), wanted, about)
            assert_bits_equal(bits(root), arrays[place] if place else wanted, about)
            assert_bits_equal(bits(part), reference.reduce_scatter(arrays, op, counts)[place], about)


@on_ranks(3, communicator=False)
def test_options_of_a_group(rank: int, n: int, file: str) -> None:
    """Given to init_process_group or new_group, they hold for dist's functions and ours, and for groups split off."""
    device = use_device(rank)
    ordered, store = at.GroupOptions(order="rank"), dist.FileStore(file, n)
    limit = timedelta(seconds=60)
    dist.init_process_group("alltoallv", store=store, rank=rank, world_size=n, timeout=limit, pg_options=ordered)
    with emulated(order="ring"):
        arrays = terms(n, n * 3000, "float32", 1)
        wanted, x = reference.all_reduce(arrays, "sum")[rank], on(device, arrays[rank])
        plain, other = dist.new_group(), dist.new_group(pg_options=ordered)
        split = dist.split_group(dist.group.WORLD, [[0, 1, 2]])
        for made, agrees in ((None, True), (plain, False), (other, True), (split, True)):
            y, part, z = x.clone(), x.new_empty(3000), x.clone()
            dist.all_reduce(y, group=made)
            dist.reduce_scatter_tensor(part, x, group=made)
            at.all_reduce(z, group=made)
            for found in (y, z):
                assert (bits(found) == wanted).all() == agrees
            if agrees:  # the last part of a ring is added in the order of ranks anyway
                assert_bits_equal(bits(part), wanted[rank * 3000 :][:3000])
        differs = dist.new_group(pg_options=at.GroupOptions(order="rank" if rank else None))
        with pytest.raises(PeerMismatchError, match=r"rank 0 .*has order None, rank 1 .*has order 'rank'"):
            at.all_reduce(x, group=differs)
        with pytest.raises(InvalidParamError, match="order is 'ring', expected 'rank' or None"):
            at.GroupOptions(order="ring")
    torch.npu.synchronize()
    dist.destroy_process_group()


@pytest.mark.parametrize("asked", ["group", "environment"])
@on_ranks(3, communicator=False, fresh=True)
def test_a_group_adds_in_order(rank: int, n: int, file: str, asked: str) -> None:
    """Then torch.distributed's own functions do so too, on backend alltoallv."""
    if asked == "environment":
        os.environ["ALLTOALLV_ORDER"] = "rank"
    with group(rank, n, file, "alltoallv") as (world, device), emulated(order="ring"):
        arrays = terms(n, 3 * 7000, "bfloat16", 1)
        wanted = reference.all_reduce(arrays, "sum")[rank]
        x = on(device, arrays[rank])
        if asked == "group":
            plain = x.clone()
            dist.all_reduce(plain)
            assert (bits(plain) != wanted).any()
            at.from_group(world, device="npu", order="rank")
        y, z, part = x.clone(), x.clone(), x.new_empty(7000)
        dist.all_reduce(y)
        work = dist.all_reduce(z, async_op=True)
        work.wait()
        dist.reduce_scatter_tensor(part, x)
        for found in (y, z, at.functional.all_reduce(x)):
            assert_bits_equal(bits(found), wanted)
        assert_bits_equal(bits(part), wanted[rank * 7000 : (rank + 1) * 7000])
        x.requires_grad_()
        at.functional.all_reduce(x).backward(on(device, arrays[rank]))
        assert_bits_equal(bits(x.grad), wanted)


@on_ranks(2, communicator=False)
def test_ranks_agree_on_the_order(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device):
        x = torch.ones(3).to(device)
        with pytest.raises(PeerMismatchError, match=r"rank 0 .*has order 'rank', rank 1 .*has order None"):
            at.all_reduce(x, order="rank" if rank == 0 else None)
        with pytest.raises(InvalidParamError, match="order is 'ring', expected 'rank' or None"):
            at.all_reduce(x, order="ring")
        at.all_reduce(x, order="rank")
        assert x.tolist() == [2.0] * 3


@on_ranks(3, communicator=False)
def test_gradients_are_added_in_the_same_order(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device), emulated(order="ring"):
        arrays = terms(n, n * 3000, "float32", 3)
        wanted, own = reference.all_reduce(arrays, "sum")[rank], slice(rank * 3000, (rank + 1) * 3000)
        mine = on(device, arrays[rank])
        x = mine.clone().requires_grad_()
        y = at.functional.all_reduce(x, order="rank")
        y.backward(mine)
        part = at.functional.reduce_scatter(mine, order="rank")
        z = mine[own].clone().requires_grad_()
        at.functional.all_gather(z, order="rank").backward(mine)
        assert x.grad is not None
        assert z.grad is not None
        for found, expected in ((y.detach(), wanted), (x.grad, wanted), (part, wanted[own]), (z.grad, wanted[own])):
            assert_bits_equal(bits(found), expected)
        dist.barrier()  # a refusal after the compared calls ends the domain, also for a rank that is still behind
        with pytest.raises(InvalidParamError, match=r"order is 'ring', expected 'rank' or None"):
            at.functional.all_gather(mine, order="ring")


@on_ranks(3, communicator=False)
def test_a_captured_sum_keeps_its_order(rank: int, n: int, file: str) -> None:
    with group(rank, n, file) as (_, device), emulated(order="ring"):
        arrays = terms(n, 9000, "float32", 2)
        x, graph = on(device, arrays[rank]), torch.npu.NPUGraph()
        at.all_reduce(x.clone(), order="rank")
        with torch.npu.graph(graph):
            y = x.clone()
            at.all_reduce(y, order="rank")
        for _ in range(2):
            graph.replay()
            torch.npu.synchronize()
            assert_bits_equal(bits(y), reference.all_reduce(arrays, "sum")[rank])

        def doubled(z: torch.Tensor) -> torch.Tensor:
            z = z * 1
            at.all_reduce(z, order="rank")
            return z * 2

        compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), y * 2)
