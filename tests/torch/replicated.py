"""Functions of all ranks' data as functions that one rank can differentiate.

A gradient check perturbs its input on every rank at once. So every rank gets the input of all ranks, takes its part,
runs the collective, and gathers the results of all: the same function on every rank. On the way back, the gather adds
what W ranks say about each result, the same every time; the input's gradient is the sum over ranks of the parts,
divided by W. This holds in every order of derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return at.functional.all_reduce(grad, ctx.comm) / ctx.comm.size, None


def replicated(
    comm: Communicator, lengths: list[int], function: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The function of all ranks' inputs, rank r's being ``lengths[r]`` rows, whose result is all ranks' results."""
    begin = sum(lengths[: comm.rank])

    def whole(x: Tensor) -> Tensor:
        mine = _Replicate.apply(x, comm)[begin : begin + lengths[comm.rank]]
        result = function(mine).reshape(-1)
        longest = int(at.functional.all_reduce(torch.eye(comm.size)[comm.rank] * result.numel(), comm).max())
        # Not by cat, which leaves an empty tensor out of the graph: ranks would then differentiate different graphs.
        padded = torch.nn.functional.pad(result, (0, longest - result.numel()))
        return at.functional.all_gather(padded, comm)

    return whole


def check_gradients(
    comm: Communicator, lengths: list[int], tail: tuple[int, ...], function: Callable[[Tensor], Tensor]
) -> None:
    """First and second derivatives of the function; every rank draws the same numbers."""
    torch.manual_seed(sum(lengths))
    x = torch.randn(sum(lengths), *tail, dtype=torch.float64, requires_grad=True)
    whole = replicated(comm, lengths, lambda mine: function(mine.sin()).cos())
    assert torch.autograd.gradcheck(whole, (x,))
    assert torch.autograd.gradgradcheck(whole, (x,))
