"""Gradients in PyNative, of first and second order, against what one process computes from the formula."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import alltoallv.mindspore as am
from alltoallv import AllToAllVParam, Communicator, QuantAllReduceParam, QuantType
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.mindspore.tensors import executor


def inputs(comm: Communicator, n: int = 6) -> Tensor:
    return Tensor(np.arange(1, n + 1, dtype=np.float32) + 10 * comm.rank)


def near(tensor, expected) -> None:
    np.testing.assert_allclose(tensor.asnumpy(), np.asarray(expected, np.float32), rtol=1e-5)


def near_cubes(function, x, factor=1.0) -> None:
    """The function's gradients of both orders are the gradients of ``factor`` times the sum of the cubes."""
    near(ms.grad(function)(x), factor * 3 * x.asnumpy() ** 2)
    near(ms.grad(lambda x: ms.grad(function)(x).sum())(x), factor * 6 * x.asnumpy())


def check_gradient(comm: Communicator) -> None:
    x = inputs(comm)
    sends, recvs = ([2, 4], [2, 1]) if comm.rank == 0 else ([1, 5], [4, 5])

    def cubes(x):
        return (am.all_to_all_v(x, sends, recvs, group=comm) ** 3).sum()

    near_cubes(cubes, x)


def check_gradient_of_learnt_counts_and_rows(comm: Communicator) -> None:
    x = inputs(comm).reshape(3, 2)

    def cubes(x):
        return (am.all_to_all_v(x, [1, 2], unit="row", group=comm) ** 3).sum()

    near_cubes(cubes, x)


def check_gradient_of_gaps_and_overlaps(comm: Communicator) -> None:
    """Element 0 is never sent, element 2 twice."""
    x = inputs(comm, 4)

    def cubes(x):
        return (am.all_to_all_v(x, [2, 2], [2, 2], sdispls=[1, 2], rdispls=[3, 0], group=comm) ** 3).sum()

    near_cubes(cubes, x, np.array([0, 1, 2, 1]))


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
        assert handle.wait() is None
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
        near_cubes(function, x)

    def part(x):
        large = ops.zeros((6,))
        am.all_to_all_single(large[1:5], x * 1, group=comm)
        return (large**3).sum()

    with pytest.raises(InvalidTensorError, match="part of a larger tensor"):
        ms.grad(part)(x)


def check_gradients_of_lists_and_reductions(comm: Communicator) -> None:
    """Every rank weighs what it gets: a gradient has the weights of all ranks that got the value."""
    r, x = comm.rank, inputs(comm, 2)
    weights = [np.arange(4, dtype=np.float32) + j for j in range(2)]
    mine, total = Tensor(weights[r]), weights[0] + weights[1]

    def gathered(y):
        am.all_gather(outs := [ops.zeros(2), ops.zeros(2)], y, comm)
        return ops.concat(outs)

    def gathered_into(y):
        am.all_gather_into_tensor(out := ops.zeros(4), y, group=comm)
        return out

    def reduced(y, op="sum"):
        am.all_reduce(y, op, comm)
        return y

    def averaged(y):
        return reduced(y, "avg")

    def scattered(y):
        am.reduce_scatter_tensor(out := ops.zeros(1), y, group=comm)
        return out

    def listed(y):
        am.reduce_scatter(out := ops.zeros(2), [y, y * 2], group=comm)
        return out

    def sent(y):
        am.broadcast(y, 0, comm)
        return y

    for function, factor in (
        (gathered, total[2 * r :][:2]),
        (gathered_into, total[2 * r :][:2]),
        (reduced, total[:2]),
        (averaged, total[:2] / 2),
        (scattered, np.array([weights[0][0], weights[1][0]])),
        (listed, weights[0][:2] + 2 * weights[1][:2]),
        (sent, total[:2] * (r == 0)),
    ):

        def cubes(x, function=function):
            y = function(x * x * x)
            return (y * mine[: y.size]).sum()

        near_cubes(cubes, x, factor)
    with pytest.raises(InvalidParamError, match="op is 'max', expected 'sum' or 'avg' for a tensor with a gradient"):
        ms.grad(lambda x: reduced(x * 1, "max").sum())(x)


def check_gradients_of_operations(comm: Communicator) -> None:
    """The gradients of the cells: of regions that overlap or are left out, and straight through a quantized sum."""
    x, weight, both = inputs(comm, 6), float(comm.rank + 1), {"rank": comm.rank, "rank_size": 2}
    places = {"send_counts": [2, 2], "sdispls": [1, 2], "recv_counts": [2, 2], "rdispls": [2, 0]}
    moves = am.AllToAllVOperation(AllToAllVParam(**both, **places), comm)
    adds = am.QuantAllReduceOperation(QuantAllReduceParam(**both, quant_type=QuantType.DYNAMIC), comm)
    near(ms.grad(lambda x: (moves(x * 1) * weight).sum())(x), [0, 1, 3, 2, 0, 0])
    cubes = x.asnumpy() ** 2 * np.array([0, 1, 2, 1, 0, 0])
    near(ms.grad(lambda x: (moves(x) ** 3).sum())(x), 3 * cubes)
    near(ms.grad(lambda x: (adds(x * 2) * weight).sum())(x), [6] * 6)

    def given(x):
        out = ops.zeros((1, 4))
        moves(x * 1, out=out)
        return (out * weight).sum()

    near(ms.grad(given)(x), [0, 1, 3, 2, 0, 0])
    with pytest.raises(InvalidParamError, match="x wants a gradient"):
        ms.grad(lambda x: adds(x, out=ops.zeros(6)).sum())(x)
    constant = Tensor(np.ones(6, np.float32))
    near(ms.grad(lambda x: adds(constant, out=ops.zeros(6)).sum() * x.sum())(x), [12] * 6)
    executor.clear_res()  # the exception has left MindSpore's own in disorder


def check_what_has_no_gradient_is_refused(comm: Communicator) -> None:
    """It would be zero; what wants none may be used inside a gradient function."""
    x, other = inputs(comm, 2), 1 - comm.rank

    def parts():
        return [ops.zeros(2), ops.zeros(2)]

    for name, call in {
        "reduce": lambda y: am.reduce(y, 0, group=comm),
        "gather": lambda y: am.gather(y, parts(), 1, comm),
        "scatter": lambda y: am.scatter(ops.zeros(2), [y, y * 2], 1, comm),
        "send": lambda y: am.isend(y, other, comm),
        "recv": lambda y: am.irecv(y * 1, other, comm),
    }.items():

        def total(x, call=call):
            call(x * 1)
            return x.sum()

        with pytest.raises(InvalidParamError, match=f"{name} has no gradient and got a tensor that wants one"):
            ms.grad(total)(x)
        if name != "send" and name != "recv":
            near(ms.grad(lambda x, call=call: (call(ops.stop_gradient(x * 1)), x.sum())[1])(x), [1, 1])
    am.all_reduce(total := x * 1, "max", group=comm)  # outside of a gradient function, whose flag is still set
    near(total, [11, 12])
    near(ms.grad(lambda x: (am.all_to_all_v(x, [1, 1], group=comm) ** 2).sum())(x), 2 * x.asnumpy())
    executor.clear_res()


def check_calls_after_a_gradient_that_failed(comm: Communicator) -> None:
    """MindSpore goes on recording, and would differentiate every graph: also one that is a gradient."""

    class Squares(nn.Cell):
        def __init__(self):
            super().__init__()
            self.exchange = am.AllToAllV([1, 1], [1, 1], group=comm)

        def construct(self, x):
            return (self.exchange(x) ** 2).sum()

    def fail() -> None:
        def function(x):
            raise RuntimeError("the user's")

        with pytest.raises(RuntimeError, match="the user's"):
            ms.grad(function)(x)
        assert executor.grad_flag()

    x = inputs(comm, 2)
    older = ms.jit(ms.grad(Squares()))
    fail()
    near(ms.jit(ms.grad(Squares()))(x), 2 * x.asnumpy())
    fail()
    am.all_reduce(x * 1, "max", group=comm)
    assert not executor.grad_flag()
    near(older(x), 2 * x.asnumpy())
    near(ms.grad(lambda x: (am.all_to_all_v(x, [1, 1], group=comm) ** 2).sum())(x), 2 * x.asnumpy())


def check_gradient_of_scatter_and_gather(comm: Communicator) -> None:
    local = [[2, 1, 0, 3], [1, 1, 2, 0]][comm.rank]
    global_ = [[2, 1, 1, 1], [0, 3, 2, 0]][comm.rank]
    x = inputs(comm, 2 * sum(local)).reshape(-1, 2)

    def and_back(x):
        y = am.global_scatter(x, local, global_, group=comm)
        return (am.global_gather(y * 2, local, global_, group=comm) ** 3).sum()

    near_cubes(and_back, x, 8)


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


def check_parameters_outside_of_gradient_functions(comm: Communicator) -> None:
    """MindSpore marks them, and inputs of gradients, for ever: calls that have no gradient take them all the same."""
    used, factor = Tensor(np.ones((2, 2), np.float32)), comm.rank + 1.0
    ms.grad(lambda x: (x * x).sum())(used)
    for x in (ms.Parameter(Tensor(np.full((2, 2), factor, np.float32)), name="x"), used * 1, used):
        whole = ops.zeros((8, 2))
        am.all_reduce(x, "max", group=comm)
        am.all_gather_into_tensor(whole[:4], x, group=comm)
        am.quantized_all_reduce(x, error_feedback=am.ErrorFeedback(), group=comm)
        assert float(whole.sum()) == 8 * float(x.max())
