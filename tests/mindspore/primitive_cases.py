"""MindSpore's primitives and what they give by NumPy, from the inputs of all ranks; also the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import comm_func

Outputs = Callable[[list[np.ndarray]], list[np.ndarray]]
ROOT, NOTHING = 1, np.zeros(1, np.float32)


class Case(NamedTuple):
    """``run`` calls a primitive on this rank's input; ``outputs`` are all ranks' outputs."""

    run: Callable[..., Any]
    outputs: Outputs
    shape: tuple[int, ...] = (6,)
    identity: bool = False  # MindSpore's gradient of Broadcast is not the sum over the ranks
    more: tuple[Any, ...] = ()  # inputs that are no data


def given(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(rank).integers(1, 9, shape).astype(np.float32)


def cases(rank: int) -> dict[str, Case]:
    """The cases on one of 2 ranks."""
    total = {
        "sum": lambda x: x[0] + x[1],
        "avg": lambda x: (x[0] + x[1]) / 2,
        "max": lambda x: np.maximum(*x),
        "min": lambda x: np.minimum(*x),
        "prod": lambda x: x[0] * x[1],
    }
    counts = [[2, 4], [1, 5]]  # [i][j]: what rank i sends to rank j
    own, theirs = counts[rank], [row[rank] for row in counts]
    sides = ([-1] * 4 + [1] + [-1] * 3, [0, 1, 0, 0]) if rank == 0 else ([0] + [-1] * 7, [1, 0, 0, 0])
    exchange, gather_v, scatter_v = ops.AlltoAllV(), ops.AllGatherV(), ops.ReduceScatterV()
    transposed, matrix = ops.AlltoAll(2, 0, 1), ops.AlltoAllVC()
    neighbors = ops.NeighborExchange([1 - rank], [1 - rank], ([6],), ([6],), ms.float32)
    halo, blocks = ops.NeighborExchangeV2(*sides, *sides, "NCHW"), ops.AlltoAllV(block_size=3)
    gather, scatter, whole = ops.AllGather(), ops.ReduceScatter(), ops.Broadcast(ROOT)
    reduced, gathered, scattered = ops.Reduce(ROOT), ops.CollectiveGather(ROOT), ops.CollectiveScatter(ROOT)
    barrier, sums = ops.Barrier(), {op: ops.AllReduce(op).add_prim_attr("fusion", 1) for op in total}

    def exchanged(x: list[np.ndarray]) -> list[np.ndarray]:
        parts = [np.split(each, [row[0]]) for each, row in zip(x, counts, strict=True)]
        return [np.concatenate([part[j] for part in parts]) for j in (0, 1)]

    def all_to_all_v(x):
        return exchange(x, own, theirs)

    def by_tensors(x, sends, recvs):
        return exchange(x, sends, recvs)

    def made_inside(x):
        return ops.AlltoAllV(group="hccl_world_group", block_size=3)(x, (1, 1), (1, 1))

    def in_blocks(x):
        return blocks(x, [1, 1], [1, 1])

    def all_to_all_v_c(x):
        return matrix(x, [2, 4, 1, 5])

    def all_gather_v(x):
        return gather_v(x, [6, 6])

    def reduce_scatter_v(x):
        return scatter_v(x, (2, 4))

    def broadcast(x):
        return whole((x,))[0]

    def exchange_neighbors(x):
        return neighbors((x,))[0]

    def behind_a_barrier(x):
        return ops.depend(x, barrier())

    def functions(x):
        y = comm_func.broadcast(comm_func.all_reduce(x)[0] * (rank + 1.0), ROOT)
        return comm_func.reduce_scatter_tensor(comm_func.all_gather_into_tensor(y)[0])[0]

    def rows(x: list[np.ndarray]) -> list[np.ndarray]:
        edges = x[0][:, :, -1:], x[1][:, :, :1]
        return [np.concatenate([x[0], edges[1]], 2), np.concatenate([edges[0], x[1]], 2)]

    def swapped(x: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([each[j : j + 1] for each in x], 1) for j in (0, 1)]

    halves: Outputs = lambda x: [np.concatenate([each.reshape(2, 3)[j] for each in x]) for j in (0, 1)]  # noqa: E731
    both: Outputs = lambda x: [np.concatenate(x)] * 2  # noqa: E731
    return {
        **{f"AllReduce {op}": Case(sums[op], lambda x, op=op: [total[op](x)] * 2) for op in total},
        "AllGather": Case(gather, both, (2, 3)),
        "AllGatherV": Case(all_gather_v, both),
        "ReduceScatter": Case(scatter, lambda x: list(np.split(x[0] + x[1], 2)), (4, 2)),
        "ReduceScatterV": Case(reduce_scatter_v, lambda x: np.split(x[0] + x[1], [2])),
        "Reduce": Case(reduced, lambda x: [NOTHING, x[0] + x[1]]),
        "Broadcast": Case(broadcast, lambda x: [x[ROOT]] * 2, identity=True),
        "CollectiveScatter": Case(scattered, lambda x: list(np.split(x[ROOT], 2))),
        "CollectiveGather": Case(gathered, lambda x: [NOTHING, np.concatenate(x)]),
        "AlltoAll": Case(transposed, swapped, (2, 3)),
        "AlltoAllV": Case(all_to_all_v, exchanged),
        "AlltoAllV by tensors": Case(by_tensors, exchanged, more=(Tensor(own), Tensor(theirs))),
        "AlltoAllV made inside": Case(made_inside, halves),
        "AlltoAllV in blocks": Case(in_blocks, halves),
        "AlltoAllVC": Case(all_to_all_v_c, exchanged),
        "Barrier": Case(behind_a_barrier, lambda x: x),
        "NeighborExchange": Case(exchange_neighbors, lambda x: x[::-1]),
        "NeighborExchangeV2": Case(halo, rows, (1, 2, 2, 3)),
        "comm_func": Case(functions, lambda x: [2 * ROOT * 2 * (x[0] + x[1])] * 2),
    }


def gradients(case: Case, x: list[np.ndarray]) -> list[np.ndarray]:
    """The gradients of the sum over the ranks of the outputs' sums of squares: central differences, exact for these."""
    if case.identity:
        return [2 * out for out in case.outputs(x)]
    loss = lambda x: sum(float((out.astype(np.float64) ** 2).sum()) for out in case.outputs(x))  # noqa: E731
    found = []
    for rank in (0, 1):
        slope = np.zeros(x[rank].shape)
        for at in np.ndindex(slope.shape):
            ends = []
            for step in (0.25, -0.25):
                moved = [each.astype(np.float64) for each in x]
                moved[rank][at] += step
                ends.append(loss(moved))
            slope[at] = 2 * (ends[0] - ends[1])
        found.append(slope)
    return found


def check(name: str, case: Case, rank: int, wrap: Callable[..., Any] = lambda run: run) -> None:
    """The primitive has NumPy's bits and gradients; ``wrap`` makes a graph of a function."""
    x = [given(r, case.shape) for r in (0, 1)]
    run, own = case.run, Tensor(x[rank])

    def output(x):
        return run(x * 1.0)

    def loss(x):
        return (run(x * 1.0) ** 2).sum()

    def slope(x):
        return ms.grad(loss)(x)

    def output_by(x, sends, recvs):
        return run(x * 1.0, sends, recvs)

    def loss_by(x, sends, recvs):
        return (run(x * 1.0, sends, recvs) ** 2).sum()

    def slope_by(x, sends, recvs):
        return ms.grad(loss_by)(x, sends, recvs)

    values, grads = (wrap(each) for each in ((output_by, slope_by) if case.more else (output, slope)))
    made, expected = values(own, *case.more).asnumpy(), case.outputs(x)[rank]
    assert made.shape == expected.shape, name
    np.testing.assert_array_equal(made, expected.astype(np.float32), name)
    if name not in ("AllReduce max", "AllReduce min"):  # where both are equal MindSpore's gradient goes to both
        np.testing.assert_allclose(grads(own, *case.more).asnumpy(), gradients(case, x)[rank], 1e-5, 1e-4, name)
