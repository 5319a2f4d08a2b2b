"""Every function of alltoallv.torch does on NPUs what its page in docs/api says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
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


def _symmetric_calls(rank: int, group: str, device: str | torch.device) -> dict[str, Callable[[], Any]]:
    """A call of each operator of torch.ops.symm_mem but the scaled products; what it returns is compared."""
    ops, size = attrgetter("ops.symm_mem")(torch), 2  # a function that names torch.ops cannot be pickled
    x = symm_mem.empty(2 * size, 3, device=device).copy_(torch.arange(6.0 * size).view(-1, 3) * (rank + 0.7))
    matrix, splits = torch.full((3, 2), 0.3, device=device), torch.tensor([1, 1 + rank], device=device)
    words, told = (
        torch.zeros(4, dtype=torch.int32, device=device),
        torch.zeros(2, size, dtype=torch.int64, device=device),
    )

    def like(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, device=device)

    def written(call: Callable[..., Any], *arguments: Any) -> list[torch.Tensor]:
        call(*arguments)
        return [each for each in arguments if isinstance(each, torch.Tensor)]

    return {
        "_low_contention_all_gather": lambda: ops._low_contention_all_gather(x, group),
        "_low_contention_reduce_scatter": lambda: ops._low_contention_reduce_scatter(x, "avg", group),
        "all_to_all_vdev": lambda: written(ops.all_to_all_vdev, x, like(4, 3), splits, told, group),
        "all_to_all_vdev_2d": lambda: written(ops.all_to_all_vdev_2d, x, like(8, 3), splits, told, group),
        "all_to_all_vdev_2d_offset": lambda: written(
            ops.all_to_all_vdev_2d_offset, x, like(8, 3), torch.stack([splits, splits - 1]), told, group
        ),
        "fused_all_gather_matmul": lambda: ops.fused_all_gather_matmul(x, [matrix], 0, group)[1],
        "fused_matmul_reduce_scatter": lambda: ops.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group),
        "memset32_": lambda: ops.memset32_(words, 1, -5, 2),
        "multi_root_tile_reduce": lambda: written(
            ops.multi_root_tile_reduce, [x[:1], x[1:2]], like(1, 3), [1, 0], group
        ),
        "nvshmem_all_to_all": lambda: ops.nvshmem_all_to_all(x, like(4, 3), group),
        "nvshmem_broadcast": lambda: ops.nvshmem_broadcast(x.clone(), 1, group),
        "one_shot_all_reduce": lambda: ops.one_shot_all_reduce(x, "sum", group),
        "one_shot_all_reduce_copy": lambda: ops.one_shot_all_reduce_copy(like(4, 3), x, "sum", group),
        "one_shot_all_reduce_copy_out": lambda: ops.one_shot_all_reduce_copy_out(
            like(4, 3), x, "avg", group, like(4, 3)
        ),
        "one_shot_all_reduce_out": lambda: ops.one_shot_all_reduce_out(x, "sum", group, like(4, 3)),
        "reduce_scatter_out": lambda: ops.reduce_scatter_out(x, group, False, like(2, 3)),
        "stream_write_value32_": lambda: ops.stream_write_value32_(words.clone(), 3, 7),
        "tile_reduce": lambda: written(ops.tile_reduce, x[:2, :2], like(2, 2), 1, group),
        "two_shot_all_reduce_": lambda: ops.two_shot_all_reduce_(x.clone(), "sum", group),
        "two_shot_all_reduce_out": lambda: ops.two_shot_all_reduce_out(x, "sum", group, like(4, 3)),
    }


@on_ranks(2, communicator=False, timeout=240)
def test_symmetric_memory_has_the_bits_of_host_memory(rank: int, size: int, file: str) -> None:
    offered = importlib.import_module("alltoallv.torch.symm_mem").OFFERED
    with group(rank, size, file) as (world, device):
        symm_mem.rendezvous(symm_mem.empty(4, device=device), world).barrier()
        here, there = (_symmetric_calls(rank, world.group_name, each) for each in ("cpu", device))
        assert here.keys() == {name for name in offered if "scaled" not in name}
        for name in here:
            for one, other in zip(_each(here[name]()), _each(there[name]()), strict=True):
                assert other.device == device, name
                assert torch.equal(one, other.cpu()), name


def _each(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)
