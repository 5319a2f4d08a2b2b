"""torch.ops.symm_mem on CPU: what torch's own tests of these operators ask of them, on our group and on gloo's."""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from backend_groups import Grouped

from alltoallv import _core
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

EXPERTS, WIDTH = 3, 5  # of every rank; of a row


def operator(name: str) -> Any:

    importlib.import_module("alltoallv.torch.symm_mem")
    return attrgetter(f"ops.symm_mem.{name}")(torch)  # a function that names torch.ops cannot be pickled


def filled(values: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """In symmetric memory, with room for more rows."""
    importlib.import_module("alltoallv.torch.symm_mem")
    made = symm_mem.empty((rows or len(values), *values.shape[1:]), dtype=values.dtype, device="cpu").fill_(-1)
    made[: len(values)] = values
    return made


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return every


def one_dimension(rank: int, size: int, world: dist.ProcessGroup) -> None:
    group = world.group_name
    torch.manual_seed(rank)
    splits = torch.randint(10, (size,))
    x = torch.randn(int(splits.sum()), WIDTH)
    expected_splits = torch.stack(gathered(splits))[:, rank].contiguous()
    expected = torch.empty(int(expected_splits.sum()), WIDTH)
    dist.all_to_all_single(expected, x, expected_splits.tolist(), splits.tolist())
    in_splits, told = filled(splits), filled(torch.zeros(2, size, dtype=torch.int64))
    inp, out = filled(x, 10 * size), filled(expected[:0], 20 * size)
    assert _core.in_arena(inp.data_ptr(), inp.nbytes)
    operator("all_to_all_vdev")(inp, out, in_splits, told, group)
    assert torch.equal(in_splits, splits)
    assert torch.equal(told[0], expected_splits)
    assert torch.equal(told[1], expected_splits.cumsum(0) - expected_splits)
    assert torch.equal(out[: len(expected)], expected)
    assert (out[len(expected) :] == -1).all()


def there_and_back(rank: int, size: int, world: dist.ProcessGroup, align: int) -> None:
    group = world.group_name
    torch.manual_seed(rank)
    n = size * EXPERTS
    splits = torch.randint(6, (n,))
    splits[rank] = 0
    if align == 8:
        splits[1::EXPERTS] = 0  # an expert without rows
    x = torch.randn(int(splits.sum()), WIDTH)
    every_split = gathered(splits)
    every_x = [x.clone() for _ in range(size)]
    for source in range(size):
        every_x[source] = x.clone() if source == rank else torch.empty(int(every_split[source].sum()), WIDTH)
        dist.broadcast(every_x[source], source)
    in_splits, told = filled(splits), filled(torch.zeros(2, n, dtype=torch.int64))
    inp, out = filled(x, 6 * n), filled(x[:0], (6 + 16) * n)
    operator("all_to_all_vdev_2d")(inp, out, in_splits, told, group, major_align=align)
    at = i = 0
    for e in range(EXPERTS):
        begin = at
        for source in range(size):
            chunk = every_x[source].split(every_split[source].tolist())[rank * EXPERTS + e]
            assert told[:, i].tolist() == [len(chunk), at]
            assert torch.equal(out[at : at + len(chunk)], chunk)
            at, i = at + len(chunk), i + 1
        padded = begin + max(-(-(at - begin) // align), 1) * align
        assert (out[at:padded] == -1).all()
        at = padded
    back, told_back = filled(x[:0], 6 * n), torch.full((2, n), -1)
    operator("all_to_all_vdev_2d_offset")(out, back, told, told_back, group)
    assert torch.equal(told_back, torch.stack([splits, splits.cumsum(0) - splits]))
    assert torch.equal(back[: len(x)], x)
    assert (back[len(x) :] == -1).all()


def wrong(rank: int, size: int, world: dist.ProcessGroup) -> None:
    group = world.group_name
    torch.manual_seed(rank)
    call, x, told = (operator("all_to_all_vdev_2d"), torch.zeros(2 * size), torch.zeros(2, size, dtype=torch.int64))
    splits = torch.ones(size, dtype=torch.int64)
    with pytest.raises(InvalidParamError, match="major_align is 0, expected at least 1"):
        call(x, x.clone(), splits, told, group, rank)
    with pytest.raises(InvalidTensorError, match="in_splits has shape"):
        call(x, x.clone(), torch.ones(size + (rank == 0), dtype=torch.int64), told, group)
    with pytest.raises(InvalidTensorError, match="in_splits is torch"):
        call(x, x.clone(), splits.int() if rank else splits, told, group)
    with pytest.raises((InvalidParamError, InvalidTensorError, PeerMismatchError)):  # more than there is, on all ranks
        call(x, x.clone(), splits * 3 if rank == 0 else splits, told, group)
    call(x, x.clone(), splits, told, group)  # still usable


@pytest.mark.parametrize("backend", ["alltoallv", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_to_all_vdev(grouped: Grouped, size: int, backend: str) -> None:
    grouped(size, backend=backend)(one_dimension)


@pytest.mark.parametrize("align", [1, 8, 16])
@pytest.mark.parametrize("size", [2, 4])
def test_there_and_back(grouped: Grouped, size: int, align: int) -> None:
    grouped(size)(there_and_back, align)


def test_wrong_arguments(grouped: Grouped) -> None:
    grouped(2)(wrong)
