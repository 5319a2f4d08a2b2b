"""ATB's operations and the quantized collectives as cells: NumPy's bits in PyNative and in graphs, and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from adapters.mindspore_column import MindsporeColumn
from atb_front_ends import check_operations
from mindspore import Tensor, nn

import alltoallv
import alltoallv.mindspore as am
import alltoallv.numpy as an
from alltoallv import AllToAllVParam, Communicator, QuantAllReduceParam, QuantType
from alltoallv.errors import AllToAllVError, InvalidParamError, PeerMismatchError
from alltoallv.testing.golden import assert_bits_equal

COUNTS = [[2, 3], [1, 2]]
column = MindsporeColumn()


def jitted(cell: nn.Cell) -> Callable[..., Tensor]:
    def function(*inputs: Tensor) -> Tensor:
        return cell(*inputs)

    return ms.jit(function)


def in_graph_mode(cell: nn.Cell) -> Callable[..., Tensor]:
    def function(*inputs: Tensor) -> Tensor:
        ms.set_context(mode=ms.GRAPH_MODE)
        try:
            return cell(*inputs)
        finally:
            ms.set_context(mode=ms.PYNATIVE_MODE)

    return function


WAYS = (lambda cell: cell, jitted, in_graph_mode)


def exchange_param(comm: Communicator, **more: Any) -> AllToAllVParam:
    sends, recvs = COUNTS[comm.rank], [row[comm.rank] for row in COUNTS]
    fields = {
        "rank": comm.rank,
        "send_counts": sends,
        "sdispls": [1, 0],
        "recv_counts": recvs,
        "rdispls": [recvs[1], 0],
    }
    return AllToAllVParam(rank_size=comm.size, **(fields | more))


def check_operations_of_atb(comm: Communicator) -> None:
    check_operations(comm, am, column.tensor, column.array, am.ErrorFeedback())


def check_cell_of_atb(comm: Communicator) -> None:
    """Every dtype, regions that overlap and are out of order; the gradient is NumPy's exchange back, summed."""
    param = exchange_param(comm)
    cell, operation = am.AllToAllVCell(param, comm), alltoallv.AllToAllVOperation(param, comm)
    for dtype in ("float16", "float32", "int8", "int16", "int32", "int64", ml_dtypes.bfloat16):
        x = (np.arange(6) + 10 * comm.rank).astype(dtype).reshape(2, 3)
        wanted = operation(x)
        for way in WAYS if dtype == "float32" else WAYS[:2]:
            assert_bits_equal(column.array(way(cell)(column.tensor(x))), wanted)
    x = (np.arange(6, dtype=np.float32) / 7 + comm.rank).reshape(2, 3)
    slopes = 2 * operation(x)
    back = an.all_to_all_v(slopes.reshape(-1), param.recv_counts, param.send_counts, sdispls=param.rdispls, group=comm)
    summed = np.zeros(6, np.float32)
    for begin, count, end in zip(param.sdispls, param.send_counts, np.cumsum(param.send_counts), strict=True):
        summed[begin : begin + count] += back[end - count : end]

    def squares(x: Tensor) -> Tensor:
        y = cell(x)
        return (y * y).sum()

    for function in (squares, ms.jit(squares)):
        for take in (ms.grad(function), ms.jit(ms.grad(function))):
            assert_bits_equal(take(Tensor(x)).asnumpy(), summed.reshape(2, 3))


def check_cell_of_atb_refuses_what_the_operation_does(comm: Communicator) -> None:
    """With ATB's code, on every rank."""
    cell = am.AllToAllVCell(exchange_param(comm), comm)
    wrong = np.zeros(6, np.bool_ if comm.rank else np.float32)
    for way in WAYS[:2]:
        with pytest.raises(AllToAllVError) as caught:
            way(cell)(Tensor(wrong)).asnumpy()
        assert caught.value.code == 13
    with pytest.raises(InvalidParamError, match="recv_counts"):
        am.AllToAllVCell(exchange_param(comm, recv_counts=[1]), comm)
    with pytest.raises(InvalidParamError, match="as in the communicator"):
        am.AllToAllVCell(exchange_param(comm, rank=1 - comm.rank), comm)


def check_cell_of_atb_finds_its_communicator(comm: Communicator) -> None:
    param = exchange_param(comm, comm_domain="cells")
    x = np.arange(6, dtype=np.float32) + 10 * comm.rank
    assert_bits_equal(am.AllToAllVCell(param)(Tensor(x)).asnumpy(), alltoallv.AllToAllVOperation(param)(x))
    reduces = QuantAllReduceParam(
        rank=comm.rank, rank_size=comm.size, comm_domain="cells", quant_type=QuantType.DYNAMIC
    )
    assert_bits_equal(
        am.QuantAllReduceCell(reduces)(Tensor(x)).asnumpy(), alltoallv.QuantAllReduceOperation(reduces)(x)
    )
    with pytest.raises(InvalidParamError, match="nowhere"):  # as the operation, whose ranks are the table's
        am.QuantAllReduceCell(replace(reduces, rank_table_file="nowhere.json"))


def gradients(cell: nn.Cell, x: Tensor) -> list[np.ndarray[Any, Any]]:
    """Of the sum of the squares, in PyNative and in a graph."""

    def squares(x: Tensor) -> Tensor:
        return (cell(x) ** 2).sum()

    return [take(x).asnumpy() for take in (ms.grad(squares), ms.jit(ms.grad(squares)))]


def twice(_cell: nn.Cell, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * 2,)


def and_one(_cell: nn.Cell, _inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output + 1


def thrice(_cell: nn.Cell, inputs: tuple[Tensor], _outputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] * 3,)


def check_cells_have_what_other_cells_have(comm: Communicator) -> None:
    """Hooks, casts, amp and recompute of MindSpore, which the cells' own call passed over in PyNative."""
    cell = am.AllToAllV([1, 1], [1, 1], group=comm)
    x = (np.arange(6, dtype=np.float32) / 7 + comm.rank).reshape(2, 3)
    moved = functools.partial(an.all_to_all_v, send_counts=[1, 1], recv_counts=[1, 1], group=comm)
    (backward,) = {take.tobytes() for take in gradients(cell, Tensor(x))}  # that of both ways
    cell.recompute()
    assert [grad.tobytes() for grad in gradients(cell, Tensor(x))] == [backward] * 2

    hooked = am.AllToAllV([1, 1], [1, 1], group=comm)
    hooked.register_forward_pre_hook(twice)
    hooked.register_forward_hook(and_one)
    for way in WAYS:
        assert_bits_equal(way(hooked)(Tensor(x)).asnumpy(), moved(2 * x) + 1)
    hooked.register_backward_hook(thrice)
    slopes = ms.grad(lambda x: (hooked(x) ** 2).sum())(Tensor(x))
    assert_bits_equal(slopes.asnumpy(), 3 * 2 * moved(2 * (moved(2 * x) + 1)))

    half = am.AllToAllV([1, 1], [1, 1], group=comm).to_float(ms.float16)
    for way in WAYS:
        assert_bits_equal(way(half)(Tensor(x)).asnumpy(), moved(x.astype(np.float16)))
    weights = Tensor(np.eye(3, dtype=np.float32) * (comm.rank + 1) / 2)  # exact in half precision

    def layers() -> list[nn.Cell]:
        ends = [am.AllToAllV([1, 1], [1, 1], group=comm) for _ in range(2)]
        return [ends[0], nn.SequentialCell(nn.Dense(3, 3, weights, has_bias=False), nn.ReLU()), ends[1]]

    mixed = ms.amp.auto_mixed_precision(nn.SequentialCell(*layers()), "O2")
    made = [way(mixed)(Tensor(x)).asnumpy() for way in WAYS[:2]]
    for result in made:
        assert_bits_equal(result, made[0])
    assert_bits_equal(made[0], made[0].astype(np.float16).astype(np.float32))
    again, kept = layers(), layers()
    again[1].recompute()
    found = [*gradients(nn.SequentialCell(*again), Tensor(x)), *gradients(nn.SequentialCell(*kept), Tensor(x))]
    for grad in found:
        np.testing.assert_array_equal(grad, found[0])


def squares_of(cell: nn.Cell) -> Callable[..., Any]:
    def squares(x: Tensor, sends: Tensor, recvs: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        out = cell(x, sends + 0, recvs, begins)  # counts that a graph computes
        return (out**2).sum(), out

    return ms.value_and_grad(squares, 0, has_aux=True)


def check_counts_as_tensors(comm: Communicator) -> None:
    """One graph for all counts; values and gradients of NumPy's and of PyNative."""
    compiled: dict[bool, Any] = {}
    for seed in range(2):
        counts = np.random.default_rng(seed).integers(0, 3, (2, 2))
        for by_row in (False, True):
            shape = (6, 2) if by_row else (6,)
            cell = am.DynamicAllToAllV(8, unit="row" if by_row else "element", group=comm)
            x = np.random.default_rng(comm.rank).normal(size=shape).astype(np.float32)
            sends, recvs = (Tensor(n.astype(np.int32)) for n in (counts[comm.rank], counts[:, comm.rank]))
            begins = Tensor(np.array([2, 1], np.int32))
            out = np.zeros((8, *shape[1:]), np.float32)
            wanted = an.all_to_all_v(
                x, sends.asnumpy(), recvs.asnumpy(), sdispls=begins.asnumpy(), out=out, group=comm,
                unit="row" if by_row else "element",
            )  # fmt: skip

            step = squares_of(cell)
            graph = compiled.setdefault(by_row, ms.jit(step))
            found = []
            for way in (step, graph):
                (_, made), grad = way(Tensor(x), sends, recvs, begins)
                assert_bits_equal(made.asnumpy(), wanted)
                found.append(grad.asnumpy())
            np.testing.assert_array_equal(*found)
    packed = am.DynamicAllToAllV(5, group=comm)
    ones = Tensor(np.array([1, 2], np.int64))
    counts = Tensor(np.array([1 + comm.rank] * 2, np.int64))
    x = Tensor(np.arange(3, dtype=np.int64) + 10 * comm.rank)
    for way in WAYS:
        wanted = [0, 10, 0, 0, 0] if comm.rank == 0 else [1, 2, 11, 12, 0]
        np.testing.assert_array_equal(way(packed)(x, ones, counts).asnumpy(), wanted)


def check_cells_count_as_the_function(comm: Communicator) -> None:
    """Rows of two dimensions or more, unless the unit says otherwise: nothing is lost without a word."""
    sends, recvs = ([1, 2], [1, 1]) if comm.rank == 0 else ([1, 2], [2, 2])
    tensors = [Tensor(np.array(counts)) for counts in (sends, recvs)]
    for shape in ((3,), (3, 2), (3, 2, 2)):
        x = Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * comm.rank)
        wanted = am.all_to_all_v(x, sends, recvs, group=comm)
        assert wanted.shape == (sum(recvs), *shape[1:])
        cell, dynamic = am.AllToAllV(sends, recvs, group=comm), am.DynamicAllToAllV(sum(recvs), group=comm)
        for way in WAYS[:2]:
            for made in (way(cell)(x), way(dynamic)(x, *tensors)):
                assert_bits_equal(made.asnumpy(), wanted.asnumpy())

        def squares(x: Tensor, cell: nn.Cell = cell) -> Tensor:
            return (cell(x) ** 2).sum()

        for function in (squares, ms.jit(squares)):
            assert_bits_equal(ms.grad(function)(x).asnumpy(), 2 * x.asnumpy())
        elements = [[n * (x.size // 3) for n in counts] for counts in (sends, recvs)]
        flat = am.AllToAllV(*elements, unit="element", group=comm)
        for way in WAYS[:2]:
            assert_bits_equal(way(flat)(x).asnumpy(), wanted.asnumpy().reshape(-1))
    with pytest.raises(InvalidParamError, match="unit is 'rows', expected 'element', 'row' or None"):
        am.AllToAllV(sends, recvs, unit="rows", group=comm)
    with pytest.raises(InvalidParamError, match="unit is 'rows', expected 'element', 'row' or None"):
        am.DynamicAllToAllV(5, unit="rows", group=comm)


def check_counts_as_tensors_that_disagree(comm: Communicator) -> None:
    cell = jitted(am.DynamicAllToAllV(4, group=comm))
    x, fine = Tensor(np.arange(3.0, dtype=np.float32)), np.array([1, 2])
    with pytest.raises(PeerMismatchError):
        cell(x, Tensor(fine), Tensor(fine)).asnumpy()
    with pytest.raises(InvalidParamError, match="expected 2, one per rank"):
        cell(x, Tensor(np.array([1, 1, 1])), Tensor(np.array([1, 1, 1]))).asnumpy()
    with pytest.raises(InvalidParamError, match="rows is 0"):
        am.DynamicAllToAllV(0, group=comm)


def check_quantized_cell_of_atb(comm: Communicator) -> None:
    rng = np.random.default_rng(comm.rank)
    codes, scale, offset = rng.integers(-9, 9, (2, 32)).astype(np.int8), np.array([0.5], "f2"), np.array([1], "f2")
    param = QuantAllReduceParam(rank=comm.rank, rank_size=comm.size)
    wanted = alltoallv.QuantAllReduceOperation(param, comm)(codes, scale, offset)
    cell = am.QuantAllReduceCell(param, comm)
    for way in WAYS:
        assert_bits_equal(way(cell)(Tensor(codes), Tensor(scale), Tensor(offset)).asnumpy(), wanted)
    for fields in ({}, {"bits": 4, "all_reduce_type": "avg"}, {"out_data_type": 27}, {"out_data_type": 1}):
        param = QuantAllReduceParam(rank=comm.rank, rank_size=comm.size, quant_type=QuantType.DYNAMIC, **fields)
        cell = am.QuantAllReduceCell(param, comm)
        for dtype in ("float32",) if fields else ("float32", "float16", ml_dtypes.bfloat16):
            x = rng.normal(size=300).astype(dtype)
            wanted = alltoallv.QuantAllReduceOperation(param, comm)(x)
            for way in WAYS[:2]:
                assert_bits_equal(column.array(way(cell)(column.tensor(x))), wanted)
    straight_through(cell, Tensor(np.ones(6, np.float32)))


def check_quantized_cells(comm: Communicator) -> None:
    rng = np.random.default_rng(comm.rank)
    x = rng.normal(size=(4, 40)).astype(np.float32)
    codes = rng.integers(-9, 9, (4, 40)).astype(np.int8)
    recvs = [1, 1] if comm.rank == 0 else [3, 3]
    cases: list[tuple[nn.Cell, Any, Any]] = [
        (am.QuantizedAllReduce(group=comm), an.quantized_all_reduce(x, group=comm), x),
        (
            am.QuantizedAllReduce(bits=4, gather="quantized", out_dtype=ms.float16, group=comm),
            an.quantized_all_reduce(x, bits=4, gather="quantized", out_dtype="float16", group=comm),
            x,
        ),
        (
            am.QuantizedAllReduce(scale=Tensor(np.array([0.25], np.float16)), offset=1.0, group=comm),
            an.quantized_all_reduce(codes, scale=0.25, offset=1.0, group=comm),
            codes,
        ),
        (
            am.QuantizedReduceScatter(4, [1, 3], op="avg", group=comm),
            an.quantized_reduce_scatter(x, [1, 3], op="avg", group=comm),
            x,
        ),
        (
            am.QuantizedAllToAll([1, 3], recvs, bits=4, group=comm),
            an.quantized_all_to_all(x, [1, 3], recvs, bits=4, group=comm),
            x,
        ),
    ]
    for cell, wanted, given in cases:
        for way in WAYS[:2]:
            assert_bits_equal(way(cell)(Tensor(given)).asnumpy(), wanted)
    ones = Tensor(np.ones((4, 40), np.float32))
    for cell, _, given in cases:
        if given is x:
            straight_through(cell, ones)
    with pytest.raises(TypeError, match="QuantizedAllToAll has no option 'gather'"):
        am.QuantizedAllToAll([1, 3], recvs, gather="full", group=comm)


def straight_through(cell: nn.Cell, x: Tensor) -> None:
    """The gradient of the sum of squares is that of PyNative in a graph too."""

    def squares(x: Tensor) -> Tensor:
        return (cell(x) ** 2).sum()

    found = [take(x).asnumpy() for take in (ms.grad(squares), ms.jit(ms.grad(squares)), ms.grad(ms.jit(squares)))]
    assert found[0].any()
    for grad in found:
        np.testing.assert_array_equal(grad, found[0])
