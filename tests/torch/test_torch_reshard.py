"""Tensors move between layouts, described as DTensor's or plainly, with gradients, on groups and between graphs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend_groups import on_group
from layouts import check_formats, check_gradients, check_layouts, check_states
from on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.testing import world


def in_dtensors_words(layout: Any, ndim: int) -> Any:
    """The mesh turned round, so that its later dimensions divide first, as FSDP over tensor parallelism says it."""
    mesh, placements = np.asarray(layout[0]).T, [each % ndim if isinstance(each, int) else each for each in layout[1]]
    if any(isinstance(each, tuple) for each in placements):
        return layout
    sizes, turned, placed = mesh.shape, placements[::-1], list[Any]()
    for along, each in enumerate(turned):
        before = math.prod(n for n, other in zip(sizes[along + 1 :], turned[along + 1 :], strict=True) if other == each)
        if isinstance(each, str):
            placed.append(Partial("product" if each == "prod" else each))
        elif each is None:
            placed.append(Replicate())
        else:
            placed.append(Shard(each) if before == 1 else _StridedShard(each, split_factor=before))
    return dist.DeviceMesh("cpu", mesh.tolist(), _init_backend=False), placed


@pytest.mark.parametrize("cases", [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
@on_ranks(4, communicator=False, timeout=2900)
def test_random_layouts(rank: int, size: int, file: str, cases: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    with Communicator.from_env(domain="layouts") as comm:
        check_layouts(at, torch.from_numpy, lambda x: x.numpy(), comm, comm, cases, in_dtensors_words)
    dist.destroy_process_group()


@on_ranks(3)
def test_other_dtypes(comm: Communicator) -> None:
    """They move as they are, and a handle is for what wants no gradient."""
    check_layouts(at, torch.from_numpy, lambda x: x.numpy(), comm, comm, 12)
    check_states(at, torch.from_numpy, lambda x: x.numpy(), comm, comm)
    check_formats(at, torch.from_numpy, lambda x: x.numpy(), comm, comm, 12)
    whole = torch.arange(30.0).reshape(6, 5)
    source, target = ([0, 1, 2], [0]), ([2, 0], [1])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        found = at.reshard(whole.chunk(3)[comm.rank].to(dtype), source, target, group=comm)
        if found is None:
            assert comm.rank == 1
        else:
            assert torch.equal(found.float(), whole.to(dtype).chunk(2, 1)[0 if comm.rank else 1].float())
    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(InvalidParamError, match=r"async_op is True for a tensor that wants a gradient.*A2A-1157"):
        at.reshard(x, ([0, 1, 2], [0]), ([0, 1, 2], [1]), group=comm, async_op=True)


def check_fsdp_over_tensor_parallelism(mesh: dist.DeviceMesh) -> None:
    """Its parameters are sharded in strides; torch puts them together to the same, and they come back."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    everybody: Any = list(range(4)), [Replicate()]
    strided = 0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        x, source = parameter.detach().to_local(), (parameter.device_mesh, parameter.placements)
        strided += any(isinstance(each, _StridedShard) for each in parameter.placements)
        whole = at.reshard(x, source, everybody, shape=parameter.shape)
        assert torch.equal(whole, parameter.detach().full_tensor()), name
        assert torch.equal(at.reshard(whole, everybody, source), x), name
    assert strided == 2  # weight and bias of the first layer


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
    check_fsdp_over_tensor_parallelism(mesh)
    half = dist.new_group([1, 3])  # a DeviceMesh has ranks of the job, a plain mesh has the group's own
    if rank in (1, 3):
        own = dist.DeviceMesh("cpu", [1, 3], _init_backend=False)
        found = at.reshard(whole.chunk(2)[rank // 2], (own, [Shard(0)]), ([0, 1], [None]), group=half)
        assert torch.equal(found, whole)
    dist.barrier()
    dist.destroy_process_group()


def test_uneven_strides() -> None:
    """They are FSDP's, and torch's: tensor parallelism divides first, which leaves a rank without a row."""
    whole = torch.arange(9.0)
    source = np.arange(8).reshape(4, 2), [_StridedShard(0, split_factor=2), Shard(0)]

    def program(comm: Communicator) -> None:
        parts = [*whole.chunk(2)[comm.rank % 2].chunk(4), whole[:0]]
        found = at.reshard(parts[comm.rank // 2].clone(), source, (range(8), [None]), group=comm)
        assert torch.equal(found, whole)

    world(8)(program)


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
    """They move back; the gradients of copies are added."""
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
    x.grad = None
    coarse = at.reshard(x, (everybody, [0]), (everybody, [None]), format="int4")
    (coarse * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [[3.0] * 3] * 2  # as it is, while the values are rounded
    assert 0 < (coarse - whole).abs().max() < 1
    z = whole.clone().requires_grad_()
    at.reshard(z, (everybody, ["sum"]), (everybody, [0])).mul(rank + 1).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    with pytest.raises(
        InvalidParamError, match=r"x wants a gradient, expected all 2 ranks in both meshes then.*A2A-1156"
    ):
        at.reshard(x, (everybody, [0]), ([0], [0]))


@on_group(2)
def test_between_graphs(rank: int, size: int, group: dist.ProcessGroup) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        moved = at.reshard(x + 1, ([0, 1], [0]), ([0, 1], [1]))
        return moved * 2

    x = torch.arange(8.0).reshape(2, 4) + rank * 8
    assert torch.equal(torch.compile(program, backend="aot_eager")(x), program(x))
