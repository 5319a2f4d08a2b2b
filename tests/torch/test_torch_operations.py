"""ATB's operations on torch tensors; those on NPUs are in tests/npu."""

from __future__ import annotations

import pytest
import torch
from atb_front_ends import check_operations
from engine_groups import to_numpy, to_torch
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv import AllToAllVOperation, AllToAllVParam, Communicator
from alltoallv.errors import InvalidTensorError


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_operations(comm: Communicator) -> None:
    check_operations(comm, at, lambda a: to_torch(a).clone(), to_numpy, at.ErrorFeedback())


def test_another_device_and_another_framework() -> None:
    (comm,) = Communicator.threads(1)
    param = AllToAllVParam(rank_size=1, send_counts=[2], sdispls=[1], recv_counts=[2], rdispls=[0])
    operation = AllToAllVOperation(param, comm)
    x = torch.nn.Parameter(torch.arange(3.0))
    assert operation(x).tolist() == operation(x.detach().numpy()).tolist() == [[1, 2]]
    with pytest.raises(InvalidTensorError, match=r"x lies on meta, expected cpu.*A2A-2058") as caught:
        operation(x.to("meta"))
    assert caught.value.code == 14
    with pytest.raises(
        InvalidTensorError, match=r"out is a ndarray, expected a torch tensor, as x.*A2A-2059"
    ) as caught:
        operation(x, out=x.detach().numpy())
    assert caught.value.code == 5
    comm.destroy()
