"""Programs on a thousand simulated ranks: right values, the same errors everywhere, layouts and experts there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import lacking, part

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import CommTimeoutError, InvalidParamError, PeerLostError, PeerMismatchError
from alltoallv.testing import RankFailures, reference, world


def test_every_kind_of_call() -> None:
    """On 5 ranks by the reference: exchanges, learnt counts, rows with gaps, reductions, objects."""
    inputs = [np.arange(10 * 6.0).reshape(10, 6) + 100 * j for j in range(5)]
    sends = [[(i + j) % 4 for j in range(5)] for i in range(5)]

    def program(comm: Communicator) -> list[Any]:
        x, to = inputs[comm.rank], {"group": comm}
        rows = x[: sum(sends[comm.rank])]
        recvs = an.exchange_counts(sends[comm.rank], comm)
        told = an.all_reduce(x.astype("float32"), "max", **to)
        later, work = an.all_to_all_v(rows, sends[comm.rank], recvs, async_op=True, **to)
        work.wait()
        return [
            an.all_to_all_v(rows, sends[comm.rank], **to),
            later,
            an.all_to_all_nd(x, 1, 0, comm),
            an.all_gather(x, **to),
            an.reduce_scatter(x, **to),
            an.all_reduce(np.stack([x, x]), leaves=10, **to),
            told,
            np.array(an.all_gather_object({"rank": comm.rank}, **to)[3]["rank"]),
        ]

    moved = reference.all_to_all_v([x[: sum(counts)] for x, counts in zip(inputs, sends, strict=True)], sends)
    wanted = [
        moved,
        moved,
        reference.all_to_all_nd(inputs, 1, 0),
        [np.stack(inputs)] * 5,
        reference.reduce_scatter(inputs),
        reference.all_reduce_leaves([np.stack([x, x]) for x in inputs]),
        [np.maximum.reduce(inputs).astype("float32")] * 5,
        [np.array(3)] * 5,
    ]
    for rank, found in enumerate(world(5)(program)):
        for one, other in zip(found, (each[rank] for each in wanted), strict=True):
            np.testing.assert_array_equal(one, other)


def test_errors_reach_all_ranks() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(InvalidParamError, match=r"send_counts.*A2A-1079"):
            an.all_to_all_v(np.ones(3), [1, 1, -1 if comm.rank == 2 else 1], group=comm)
        with pytest.raises(PeerMismatchError, match=r"rank 0 sends 1 elements to rank 1, which expects 2.*A2A-3010"):
            an.all_to_all_v(np.ones(3), [1] * 3, [2 if comm.rank == 1 else 1, 1, 1], group=comm)
        with pytest.raises(PeerMismatchError, match=r"rank 0 calls all_gather, rank 1 calls all_reduce.*A2A-3013"):
            (an.all_reduce if comm.rank == 1 else an.all_gather)(np.ones(3), group=comm)
        assert an.all_reduce(np.ones(1), group=comm) == 3

    world(3)(program)

    def leave(comm: Communicator) -> None:
        if comm.rank:
            an.barrier(group=comm)

    with pytest.raises(RankFailures) as failed:
        world(3, comm_timeout=0.5)(leave)
    errors = [outcome.error for outcome in failed.value.outcomes]
    assert errors[0] is None
    assert all(isinstance(error, CommTimeoutError) and "did not come" in str(error) for error in errors[1:])

    def abort(comm: Communicator) -> None:
        if comm.rank:
            with pytest.raises(PeerLostError, match="rank 0 aborted: enough"):
                an.barrier(group=comm)
        else:
            comm.abort("enough")

    world(3)(abort)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_layouts_at_many_ranks(size: int) -> None:
    """A trainer's parts, in three dimensions of a mesh, to a server's on half of the ranks."""
    shape = (96, 64)
    whole = np.arange(96.0 * 64).reshape(shape)
    source = (np.arange(size).reshape(-1, 8, 8).tolist(), (0, None, 1))
    target = (np.arange(size // 2)[::-1].reshape(-1, 16).tolist(), (1, 0))

    def program(comm: Communicator) -> tuple[int, int]:
        x, wanted = part(source, comm.rank, whole), part(target, comm.rank, whole)
        assert x is not None
        plan = an.ReshardPlan(shape, whole.dtype, source, target, group=comm)
        found = plan(np.ascontiguousarray(x[0]))
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            np.testing.assert_array_equal(found, wanted[0])
        return plan.elements_sent, plan.elements_received

    told = world(size)(program)
    assert sum(sent for sent, _ in told) == sum(received for _, received in told)
    for rank in (0, 17, size // 2 - 1, size // 2, size - 1):
        assert told[rank][1] == lacking(source, target, rank, shape)


@pytest.mark.timeout(600)
def test_experts_at_1024_ranks() -> None:
    """Every rank has an expert, which doubles: each token comes back from two of them, weighted."""

    def program(comm: Communicator) -> None:
        rng = np.random.default_rng(comm.rank)
        x = rng.integers(0, 100, (3, 4)).astype("float32")
        experts = np.stack([rng.permutation(comm.size)[:2] for _ in x])
        dispatcher = an.MoEDispatcher(comm.size, group=comm)
        rows, _, state = dispatcher.dispatch(x, experts, np.full(experts.shape, 0.25, "float32"))
        np.testing.assert_array_equal(dispatcher.combine(rows * 2, state), x)

    world(1024)(program)
