"""Exchanges in graphs: the same values and gradients as in PyNative, in the order of the program, or an error."""

from __future__ import annotations

import copy
import functools

import mindspore as ms
import numpy as np
import pytest
from checks_gradients import Net, inputs, near
from mindspore import Tensor

import alltoallv.mindspore as am
from alltoallv import Communicator, QuantAllReduceOperation, QuantAllReduceParam, QuantType
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError


def exchange_cell(comm: Communicator, **more) -> am.AllToAllV:
    sends, recvs = ([2, 4], [2, 1]) if comm.rank == 0 else ([1, 5], [4, 5])
    return am.AllToAllV(sends, recvs, group=comm, **more)


def check_jit_function(comm: Communicator) -> None:
    cell = exchange_cell(comm, derivatives=3)

    def cubes(x):
        return (cell(x * 1.0) ** 3).sum()

    def slope(x):
        return ms.grad(cubes)(x).sum()

    x = inputs(comm)
    compiled = ms.jit(cubes)
    assert float(compiled(x)) == float(cubes(x))
    near(ms.grad(compiled)(x), 3 * x.asnumpy() ** 2)
    near(ms.jit(ms.grad(slope))(x), 6 * x.asnumpy())


def check_order_in_a_graph(comm: Communicator) -> None:
    """Independent exchanges, equal ones and one without a use: all run, in the order of the program."""
    a, b, c = (am.AllToAllV([n, n], [n, n], sdispls=[0, n], group=comm) for n in (1, 2, 3))

    @ms.jit
    def many(x):
        c(x)
        p, q, r, s = b(x), a(x + 1.0), a(x + 1.0), c(x)
        return s.sum() + r.sum() + q.sum() + p.sum()

    x = inputs(comm)
    for _ in range(5):
        before = comm.stats()["operators"]
        many(x).asnumpy()
        assert comm.stats()["operators"] == before + 5
        # The graph has ended before the next exchange gets its number.
        near(am.all_to_all_v(x, [1, 1], [1, 1], sdispls=[0, 1], group=comm), [1 + comm.rank, 11 + comm.rank])


def check_order_of_gradients_in_a_graph(comm: Communicator) -> None:
    """Independent exchanges, of counts that would be a mismatch in any other order; MindSpore has several threads."""
    cells = [am.AllToAllV([n, n], [n, n], sdispls=[0, n], group=comm) for n in (1, 2, 3)]

    def loss(x):
        return sum([(cell(x * (1.0 + i)) ** 2).sum() for i, cell in enumerate(cells)])

    x = inputs(comm)
    eager = ms.grad(loss)(x).asnumpy()
    for take in (ms.jit(ms.grad(loss)), ms.grad(ms.jit(loss))):
        for _ in range(2):
            np.testing.assert_allclose(take(x).asnumpy(), eager)


def check_cell_in_graph_mode(comm: Communicator) -> None:
    net = Net(comm)
    rows = Tensor(np.random.default_rng(comm.rank).standard_normal((3, 4)).astype(np.float32))

    def loss(x):
        return (net(x) ** 2).sum()

    def gradients():
        value, grads = ms.value_and_grad(loss, None, net.trainable_params())(rows)
        return [value.asnumpy(), *(g.asnumpy() for g in grads)]

    eager = gradients()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        graph = gradients()
        near(am.all_to_all_v(inputs(comm)[:2], [1, 1], [1, 1], group=comm), [1 + comm.rank, 11 + comm.rank])
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    for one, other in zip(eager, graph, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def check_bytecode_capture(comm: Communicator) -> None:
    @ms.jit(capture_mode="bytecode")
    def doubled(x):
        return am.all_to_all_v(x * 1.0, [3, 3], [3, 3], group=comm) * 2

    x = inputs(comm)
    near(doubled(x), am.all_to_all_v(x, [3, 3], [3, 3], group=comm).asnumpy() * 2)
    near(ms.grad(lambda x: (doubled(x) ** 2).sum())(x), 8 * x.asnumpy())


def check_function_in_a_graph_is_refused(comm: Communicator) -> None:
    @ms.jit
    def run(x):
        return am.all_to_all_v(x, [3, 3], [3, 3])

    operation = QuantAllReduceOperation(
        QuantAllReduceParam(rank=comm.rank, rank_size=2, quant_type=QuantType.DYNAMIC), comm
    )

    @ms.jit
    def operate(x):
        return operation(x)

    for call, name in ((run, "all_to_all_v"), (operate, "Operation._adapter")):
        with pytest.raises(RuntimeError, match=f"{name}' is not supported"):
            call(inputs(comm))


def check_errors_in_a_graph(comm: Communicator) -> None:
    cell = am.AllToAllV([1, 2], [1, 2], sdispls=[0, 1], group=comm)
    nothing = am.AllToAllV([6, 0], [6, 6] if comm.rank == 0 else [0, 0], group=comm)

    def plus_one(x):
        return cell(x) + 1

    @ms.jit
    def empty(x):
        return nothing(x) + 1

    with pytest.raises(PeerMismatchError):
        ms.jit(plus_one)(inputs(comm)).asnumpy()
    with pytest.raises(InvalidParamError, match="cannot hand over empty tensors"):
        empty(inputs(comm)).asnumpy()
    with pytest.raises(InvalidParamError, match=r"the input's shape is \[\?\] when MindSpore compiles the graph"):
        ms.jit(ms.enable_dynamic(x=Tensor(shape=[None], dtype=ms.float32))(plus_one))(inputs(comm))
    near(am.all_to_all_v(inputs(comm)[:2], [1, 1], [1, 1], group=comm), [1 + comm.rank, 11 + comm.rank])


def once(cell, *inputs, dynamic=False):
    """The cell's output in a new graph: MindSpore cannot use one again that has failed."""

    def call(x, *more):
        return cell(x, *more)

    def of_any_rows(x):
        return cell(x)

    unknown = ms.enable_dynamic(x=Tensor(shape=[None, 3], dtype=ms.float32))
    return ms.jit(unknown(of_any_rows) if dynamic else call)(*inputs).asnumpy()


def check_what_one_rank_cannot_compile_fails_on_all(comm: Communicator) -> None:
    cell, counted = am.AllToAllV([1, 1], [1, 1], group=comm), am.DynamicAllToAllV(2, group=comm)
    wrong, x, counts = comm.rank == 1, Tensor(np.ones((2, 3), np.float32)), Tensor([1, 1])
    for text, *given in (
        (r"input has shape \[\], expected at least 1 dimension", cell, Tensor(1.0) if wrong else x),
        (r"input is empty", cell, Tensor(np.zeros((2, 0), np.float32))),
        (r"send_counts has dtype Float32, expected integers", counted, x, counts * 1.5 if wrong else counts, counts),
        (r"the output is empty", am.QuantizedReduceScatter(2, [2, 0], group=comm), x),
    ):
        with pytest.raises((InvalidParamError, InvalidTensorError), match=text):
            once(*given)
    with pytest.raises(InvalidParamError, match=r"the input's shape is \[\?, 3\]"):
        once(cell, x, dynamic=wrong)
    assert (once(cell, x) == 1).all()


def check_a_network_with_cells_can_be_copied(comm: Communicator) -> None:
    rows, counts = Tensor(np.full((2, 16), comm.rank, np.float32)), Tensor([1, 1])
    param = QuantAllReduceParam(rank=comm.rank, rank_size=2, quant_type=QuantType.DYNAMIC)
    for total, cell, *more in (
        (16, am.AllToAllV([1, 1], [1, 1], group=comm)),
        (16, am.DynamicAllToAllV(2, group=comm), counts, counts),
        (32, am.QuantAllReduceCell(param, comm)),
        (32, am.QuantizedAllReduce(group=comm)),
    ):
        net = copy.deepcopy(ms.nn.CellList([cell]))
        for run in (net[0], lambda *given, net=net: once(net[0], *given)):
            assert float(run(rows, *more).sum()) == total


def check_rows_left_behind(comm: Communicator) -> None:
    """Packed counts cover the input; with displacements rows may stay."""
    x, counts, begins = Tensor(np.arange(12, dtype=np.float32).reshape(4, 3)), Tensor([1, 1]), Tensor([0, 1])
    for cell, *more in (
        (am.AllToAllV([1, 1], [1, 1], group=comm),),
        (am.DynamicAllToAllV(2, group=comm), counts, counts),
    ):
        for run in (cell, functools.partial(once, cell)):
            with pytest.raises(
                InvalidParamError, match="sum to 2, expected 4, the rows of the input: give sdispls to leave"
            ):
                run(x, *more)
    left = am.AllToAllV([1, 1], [1, 1], sdispls=[0, 1], group=comm)
    for made in (left(x).asnumpy(), once(left, x), once(am.DynamicAllToAllV(2, group=comm), x, counts, counts, begins)):
        np.testing.assert_array_equal(made, [x.asnumpy()[comm.rank]] * 2)


def check_errors_of_a_graph_count_rows(comm: Communicator) -> None:
    x = Tensor(np.ones((2, 3), np.float32))
    cell, texts = am.AllToAllV([2, 1], [2, 1], group=comm), []
    for run in (cell, lambda x: once(cell, x)):
        with pytest.raises(InvalidParamError) as caught:
            run(x)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def check_a_graph_of_an_operation_demands_its_inputs(comm: Communicator) -> None:
    fields = {"rank": comm.rank, "rank_size": 2}
    scale, codes = Tensor([0.5], ms.float16), Tensor(np.zeros(16, np.int8))
    shared, dynamic = (
        am.QuantAllReduceCell(QuantAllReduceParam(**fields, quant_type=kind), comm)
        for kind in (QuantType.PER_TENSOR, QuantType.DYNAMIC)
    )
    for cell, *given in ((shared, codes), (shared, codes, scale), (dynamic, codes.astype(ms.float32), scale, scale)):
        expected = 3 if cell is shared else 1
        with pytest.raises(InvalidTensorError, match=f"number of inputs is {len(given)}, expected {expected}"):
            once(cell, *given)
