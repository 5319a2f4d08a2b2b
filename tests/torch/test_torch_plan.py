"""A plan on tensors is the exchange of the same counts, in host memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from backend_groups import on_group

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError


@pytest.mark.parametrize("size", [1, 3])
@on_group(backend="gloo")
def test_a_plan_repeats_the_exchange(rank: int, size: int, world: dist.ProcessGroup) -> None:
    group = at.from_group(world)
    sends = [(rank + j) % 3 for j in range(size)]
    plan = at.Plan(sends, sends, torch.int32, rdispls=[4 * j for j in range(size)], group=group)
    for step in range(3):
        x = torch.arange(sum(sends), dtype=torch.int32) + 100 * rank + 1000 * step
        out = torch.full((4 * size,), -1, dtype=torch.int32)
        assert plan(x, out) is out
        expected = at.all_to_all_v(
            x, sends, sends, rdispls=[4 * j for j in range(size)], out=torch.full_like(out, -1), group=group
        )
        assert torch.equal(out, expected)
        made = plan(x)
        assert torch.equal(made, torch.where(out == -1, 0, out)[: made.numel()])


def test_what_it_refuses() -> None:
    (comm,) = Communicator.threads(1)
    plan = at.Plan([2], [2], group=comm)
    with pytest.raises(InvalidTensorError, match=r"dtype.*A2A-2064"):
        plan(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(InvalidTensorError, match=r"not contiguous.*A2A-2037"):
        plan(torch.zeros(4)[::2])
    with pytest.raises(InvalidParamError, match=r"at least 2.*A2A-1119"):
        plan(torch.zeros(1))
    with pytest.raises(InvalidParamError, match=r"requires grad.*A2A-1423"):
        plan(torch.zeros(2, requires_grad=True))
    with pytest.raises(InvalidParamError, match=r"out has 1 elements.*A2A-1119"):
        plan(torch.zeros(2), torch.zeros(1))
    with pytest.raises(TypeError, match="timeout is given"):
        plan(torch.zeros(2), timeout=1)  # type: ignore[call-arg]
    with torch.no_grad():
        assert plan(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    comm.destroy()
