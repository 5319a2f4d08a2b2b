"""Gradients in PyNative, of first and second order, against what one process computes from the formula."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError


def inputs(comm: Communicator, n: int = 6) -> Tensor:
    return Tensor(np.arange(1, n + 1, dtype=np.float32) + 10 * comm.rank)


def near(tensor, expected) -> None:
    np.testing.assert_allclose(tensor.asnumpy(), np.asarray(expected, np.float32), rtol=1e-5)


def check_gradient(comm: Communicator) -> None:
    """The cubes of what arrives: the gradient comes back as 3 x², the second as 6 x."""
    x = inputs(comm)
    sends, recvs = ([2, 4], [2, 1]) if comm.rank == 0 else ([1, 5], [4, 5])

    def cubes(x):
        return (am.all_to_all_v(x, sends, recvs, group=comm) ** 3).sum()

    near(ms.grad(cubes)(x), 3 * x.asnumpy() ** 2)
    value, grad = ms.value_and_grad(cubes)(x)
    assert float(value) > 0
    near(grad, 3 * x.asnumpy() ** 2)
    near(ms.grad(lambda x: (ms.grad(cubes)(x) * 2).sum())(x), 12 * x.asnumpy())


def check_gradient_of_learnt_counts_and_rows(comm: Communicator) -> None:
    x = inputs(comm).reshape(3, 2)

    def cubes(x):
        return (am.all_to_all_v(x, [1, 2], unit="row", group=comm) ** 3).sum()

    near(ms.grad(cubes)(x), 3 * x.asnumpy() ** 2)
    near(ms.grad(lambda x: ms.grad(cubes)(x).sum())(x), 6 * x.asnumpy())


def check_gradient_of_gaps_and_overlaps(comm: Communicator) -> None:
    """Element 0 is never sent, element 2 twice."""
    x = inputs(comm, 4)
    twice = np.array([0, 1, 2, 1], np.float32)

    def cubes(x):
        return (am.all_to_all_v(x, [2, 2], [2, 2], sdispls=[1, 2], rdispls=[3, 0], group=comm) ** 3).sum()

    near(ms.grad(cubes)(x), twice * 3 * x.asnumpy() ** 2)
    near(ms.grad(lambda x: ms.grad(cubes)(x).sum())(x), twice * 6 * x.asnumpy())


def check_gradient_where_a_rank_gets_nothing(comm: Communicator) -> None:
    x = inputs(comm, 4)

    def cubes(x):
        return (am.all_to_all_v(x, [4, 0], group=comm) ** 3).sum()

    near(ms.grad(cubes)(x), 3 * x.asnumpy() ** 2)

    mine = x if comm.rank == 0 else Tensor(np.empty(0, np.float32))  # rank 1 sends nothing
    sends = [2, 2] if comm.rank == 0 else [0, 0]

    def from_rank_0(x):
        return (am.all_to_all_v(x, sends, group=comm) ** 3).sum()

    near(ms.grad(from_rank_0)(mine), 3 * mine.asnumpy() ** 2)


def check_gradient_of_given_outputs(comm: Communicator) -> None:
    x = inputs(comm, 4)

    def single(x):
        out = ops.zeros((4,))
        am.all_to_all_single(out, x * 1, group=comm)
        return (out**3).sum()

    def single_waited(x):
        out = ops.zeros((4,))
        handle = am.all_to_all_single(out, x * 1, group=comm, async_op=True)
        assert handle.wait() is True
        assert handle.is_completed()
        return (out**3).sum()

    def several(x):
        outs = [ops.zeros((2, 1)), ops.zeros((1, 2))]
        am.all_to_all(outs, [x[:2], x[2:]], group=comm)
        return (outs[0] ** 3).sum() + (outs[1] ** 3).sum()

    def into(x):
        out = x.sum() * 0 + ops.ones((6,))
        am.all_to_all_v(x * 1, [2, 2], [2, 2], rdispls=[1, 3], out=out, group=comm)
        return (out**3).sum() - 2

    def waited(x):
        out, handle = am.all_to_all_v(x * 1, [2, 2], [2, 2], group=comm, async_op=True)
        handle.wait()
        return (out**3).sum()

    for function in (single, single_waited, several, into, waited):
        near(ms.grad(function)(x), 3 * x.asnumpy() ** 2)
        near(ms.grad(lambda x, f=function: ms.grad(f)(x).sum())(x), 6 * x.asnumpy())

    def part(x):
        large = ops.zeros((6,))
        am.all_to_all_single(large[1:5], x * 1, group=comm)
        return (large**3).sum()

    with pytest.raises(InvalidTensorError, match="part of a larger tensor"):
        ms.grad(part)(x)


def check_gradient_of_all_gather(comm: Communicator) -> None:
    """Both ranks use all of it: the gradient is the sum of theirs."""
    x = inputs(comm, 3)
    weights = [Tensor(np.arange(6, dtype=np.float32) + j) for j in range(2)]

    def loss(x):
        out = ops.zeros((6,))
        am.all_gather_into_tensor(out, x * 1, group=comm)
        return ((out**3) * weights[comm.rank]).sum()

    total = sum(w.asnumpy() for w in weights)[3 * comm.rank : 3 * comm.rank + 3]
    near(ms.grad(loss)(x), 3 * x.asnumpy() ** 2 * total)
    near(ms.grad(lambda x: ms.grad(loss)(x).sum())(x), 6 * x.asnumpy() * total)


def check_gradient_of_all_reduce(comm: Communicator) -> None:
    """What each rank's loss makes of the sum comes back to every rank."""
    x = inputs(comm, 3)
    weights = [Tensor(np.arange(3, dtype=np.float32) + j) for j in range(2)]
    total = sum(w.asnumpy() for w in weights)

    def loss(x, op="sum"):
        y = x * 1
        am.all_reduce(y, op, group=comm)
        return (y * weights[comm.rank]).sum()

    near(ms.grad(loss)(x), total)
    near(ms.grad(lambda x: loss(x, "avg"))(x), total / 2)
    with pytest.raises(InvalidParamError, match="op is 'max', expected 'sum' or 'avg' for a tensor with a gradient"):
        ms.grad(lambda x: loss(x, "max"))(x)


def check_gradient_of_scatter_and_gather(comm: Communicator) -> None:
    local = [[2, 1, 0, 3], [1, 1, 2, 0]][comm.rank]
    global_ = [[2, 1, 1, 1], [0, 3, 2, 0]][comm.rank]
    x = inputs(comm, 2 * sum(local)).reshape(-1, 2)

    def cubes(x):
        return (am.global_scatter(x, local, global_, group=comm) ** 3).sum()

    def and_back(x):
        y = am.global_scatter(x, local, global_, group=comm)
        return (am.global_gather(y * 2, local, global_, group=comm) ** 3).sum()

    near(ms.grad(cubes)(x), 3 * x.asnumpy() ** 2)
    near(ms.grad(and_back)(x), 24 * x.asnumpy() ** 2)
    near(ms.grad(lambda x: ms.grad(and_back)(x).sum())(x), 48 * x.asnumpy())


class Net(nn.Cell):
    """Linear, exchange, linear."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.first = nn.Dense(4, 4, weight_init="ones", has_bias=False)
        self.last = nn.Dense(4, 2, weight_init="ones", has_bias=False)
        self.exchange = am.AllToAllV([1, 2], [1, 1] if comm.rank == 0 else [2, 2], unit="row", group=comm)

    def construct(self, x):
        return self.last(self.exchange(self.first(x)))


def check_cell_training(comm: Communicator) -> None:
    """Weights before the exchange learn from rows that other ranks have used: as in one process with all rows."""
    rows = np.random.default_rng(3).standard_normal((2, 3, 4)).astype(np.float32)
    net = Net(comm)
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    step = ms.value_and_grad(lambda x: (net(x) ** 2).sum(), None, optimizer.parameters)
    weight = np.ones((4, 4), np.float32)
    last = np.ones((2, 4), np.float32)
    _, grads = step(Tensor(rows[comm.rank]))
    # By hand: y = x W^T, z = y L^T, loss = sum z²; dL/dW = (2 z L)^T x over this rank's own rows.
    z = rows[comm.rank] @ weight.T @ last.T
    near(grads[0], (2 * z @ last).T @ rows[comm.rank])
    arrived = np.concatenate([rows[j][:1] if comm.rank == 0 else rows[j][1:] for j in range(2)]) @ weight.T
    near(grads[1], (2 * (arrived @ last.T)).T @ arrived)
    before = [p.asnumpy().copy() for p in optimizer.parameters]
    optimizer(grads)
    for p, b, g in zip(optimizer.parameters, before, grads, strict=True):
        near(p, b - 0.01 * g.asnumpy())
