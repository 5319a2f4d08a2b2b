"""Calls of several operators that are under way at once: after an error the next call works on all ranks."""

from __future__ import annotations

import pytest
import torch
from moe_pieces import pieces_of
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError, PeerMismatchError


@pytest.mark.parametrize("what", ["dtype", "chunks"])
@on_ranks(2)
def test_linear(comm: Communicator, what: str) -> None:
    """The first call is wrong on rank 1; none of its chunks shows up in the result of the second."""
    x, w = torch.arange(512.0)[:, None].expand(512, 16).contiguous(), torch.ones(128, 16)
    odd = comm.rank == 1
    given = (x.double(), w.double()) if odd and what == "dtype" else (x, w)
    with pytest.raises(PeerMismatchError if what == "chunks" else ValueError):
        at.quantized_linear_all_reduce(*given, group=comm, chunks=2 if odd and what == "chunks" else 4)
    y = at.quantized_linear_all_reduce(x, w, group=comm, chunks=4)
    torch.testing.assert_close(y[:, 0], 2 * x.sum(1), rtol=0.02, atol=1.0)
    at.barrier(comm)


@on_ranks(2)
def test_combine_in_the_background(comm: Communicator) -> None:
    """Rows of several pieces: what one rank refuses leaves nothing under way on the others."""
    dispatcher = at.nn.MoEDispatcher(4, comm)
    tokens, ids = torch.arange(60.0)[:, None] + 100 * comm.rank, torch.arange(60)[:, None] % 4
    with pieces_of(64):
        rows, _, state = dispatcher.dispatch(tokens, ids)
        for wrong in (rows[1:], rows.expand(-1, 2)):
            with pytest.raises(AllToAllVError):
                dispatcher.combine(wrong if comm.rank == 1 else rows, state, async_op=True).result()
            at.barrier(comm)
            assert torch.equal(dispatcher.combine(rows, state, async_op=True).result(), tokens)
