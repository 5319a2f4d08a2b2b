"""Tensors move between layouts, described as DTensor's or plainly, with gradients, on groups and between graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend_groups import on_group
from layouts import check_gradients, check_layouts, part, random_layout
from on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError


@on_ranks(4)
def test_random_layouts(comm: Communicator) -> None:
    rng = np.random.default_rng(5)
    for case in range(40):
        shape = tuple(int(n) for n in rng.integers(0, 9, rng.integers(1, 4)))
        dtype = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)[case % 4]
        whole = rng.integers(0, 100, shape)
        source, target = (random_layout(rng, comm.size, len(shape)) for _ in range(2))
        x, wanted = (part(each, comm.rank, whole) for each in (source, target))
        given = None if x is None else torch.from_numpy(x[0].copy()).to(dtype)
        found = at.reshard(given, source, target, group=comm)
        if case % 3 == 0:
            plan = at.ReshardPlan(shape, dtype, source, target, group=comm)
            found = plan(given)
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.dtype == dtype
            expected = torch.from_numpy(wanted[0].copy()).to(dtype)
            assert torch.equal(found.float(), expected.float()), f"case {case}: {shape} from {source} to {target}"


@on_ranks(3)
def test_later(comm: Communicator) -> None:
    check_layouts(at, torch.from_numpy, lambda x: x.numpy(), comm, comm, 16)
    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(InvalidParamError, match="async_op is True for a tensor that requires grad"):
        at.reshard(x, ([0, 1, 2], [0]), ([0, 1, 2], [1]), group=comm, async_op=True)


@pytest.mark.parametrize("backend", ["gloo", "alltoallv"])
@on_ranks(4, communicator=False)
def test_as_dtensor_redistributes(rank: int, size: int, file: str, backend: str) -> None:
    dist.init_process_group(backend, store=dist.FileStore(file, size), rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(7 * 6.0).reshape(7, 6)
    layouts: list[Any] = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Shard(1)), (Shard(1), Replicate())]
    for source in layouts:
        x = distribute_tensor(whole, mesh, source)
        for target in layouts:
            found = at.reshard(x.to_local(), (mesh, source), (mesh, target), shape=x.shape)
            assert torch.equal(found, x.redistribute(mesh, target).to_local())
    terms = whole * (rank + 1)
    found = at.reshard(terms, (mesh, (Partial(), Partial())), (mesh, (Shard(0), Replicate())))
    assert torch.equal(found, (whole * 10).chunk(2)[rank // 2])
    least = at.reshard(terms, (mesh, (Partial("min"), Shard(1))), (mesh, (Shard(1), Shard(0))), shape=(7, 12))
    assert torch.equal(least, torch.cat([whole, whole * 2], 1).chunk(2, 1)[rank // 2].chunk(2)[rank % 2])
    strided = _StridedShard(0, split_factor=2)
    with pytest.raises(InvalidParamError, match=r"source has the placement .*expected Shard, Replicate or Partial"):
        at.reshard(whole, (mesh, (strided, Shard(0))), ([0], [0]))
    half = dist.new_group([1, 3])  # a DeviceMesh has ranks of the job, a plain mesh has the group's own
    if rank in (1, 3):
        own = dist.DeviceMesh("cpu", [1, 3], _init_backend=False)
        found = at.reshard(whole.chunk(2)[rank // 2], (own, [Shard(0)]), ([0, 1], [None]), group=half)
        assert torch.equal(found, whole)
    dist.barrier()
    dist.destroy_process_group()


@on_group(4)
def test_gradients_of_random_layouts(rank: int, size: int, group: dist.ProcessGroup) -> None:
    def gradient(loss: Any, x: torch.Tensor) -> Any:
        return torch.autograd.grad(loss(z := x.requires_grad_()), z)[0].numpy()

    def twice(loss: Any, x: torch.Tensor, v: torch.Tensor) -> Any:
        (first,) = torch.autograd.grad(loss(z := x.requires_grad_()), z, create_graph=True)
        return torch.autograd.grad((first * v).sum(), z)[0].numpy()

    with Communicator.from_env(domain="gradients") as comm:
        check_gradients(at, torch.tensor, lambda x: x.numpy(), gradient, twice, comm, group, 30)


@on_group(2)
def test_gradients(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """They move back; those of copies are added."""
    whole = torch.arange(12.0).reshape(4, 3)
    everybody = list(range(size))
    x = whole.chunk(size)[rank].clone().requires_grad_()
    y = at.reshard(x, (everybody, [0]), (everybody, [1]))
    assert torch.equal(y, whole.chunk(size, 1)[rank])
    (y * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 1.0, 2.0]] * 2  # columns 0 and 1 are rank 0's, column 2 is rank 1's
    x.grad = None
    copied = at.reshard(x, (everybody, [0]), (everybody, [None]))
    (copied * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [[3.0] * 3] * 2
    z = whole.clone().requires_grad_()
    at.reshard(z, (everybody, ["sum"]), (everybody, [0])).mul(rank + 1).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    with pytest.raises(InvalidParamError, match="x wants a gradient, expected all 2 ranks in both meshes then"):
        at.reshard(x, (everybody, [0]), ([0], [0]))


@on_group(2)
def test_between_graphs(rank: int, size: int, group: dist.ProcessGroup) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        moved = at.reshard(x + 1, ([0, 1], [0]), ([0, 1], [1]))
        return moved * 2

    x = torch.arange(8.0).reshape(2, 4) + rank * 8
    assert torch.equal(torch.compile(program, backend="aot_eager")(x), program(x))
