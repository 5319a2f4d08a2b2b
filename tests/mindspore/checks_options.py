"""Options that differ between ranks are an error of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from leaf_front_ends import LEAVES, check_leaves, share, terms
from mindspore import Tensor
from options_that_differ import Case, check, dispatchers, operations, quantized

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError


def collectives(comm: Communicator) -> list[Case]:
    x, y, z = (Tensor(np.ones(n, np.float32)) for n in (4, 2, 2 * comm.size))
    parts = [Tensor(np.ones(2, np.float32)) for _ in range(comm.size)]
    calls: list[Callable[[Any], object]] = [
        lambda op: am.all_reduce(x, op, comm),
        lambda op: am.reduce(x, 0, op, comm),
        lambda op: am.reduce_scatter(y, parts, op, comm),
        lambda op: am.reduce_scatter_tensor(y, z, op, comm),
    ]
    rooted: list[Callable[[Any], object]] = [
        lambda root: am.broadcast(x, root, comm),
        lambda root: am.reduce(x, root, group=comm),
        lambda root: am.gather(y, parts, root, comm),
        lambda root: am.scatter(y, parts, root, comm),
    ]
    cases: list[Case] = [(call, "sum", "max", "reduces with sum", "reduces with max") for call in calls]
    return [*cases, *((call, 0, 1, "has root 0", "has root 1") for call in rooted)]


def check_options_that_differ(comm: Communicator) -> None:
    cases = [*collectives(comm), *quantized(am, Tensor, ms, comm), *dispatchers(am, Tensor, comm)]
    check(comm, [*cases, *operations(Tensor, comm)])


def check_sums_of_leaves(comm: Communicator) -> None:
    def gradients(loss: Any, tensors: Any) -> Any:
        found = ms.grad(loss, tuple(range(len(tensors))))(*tensors)
        return [x.asnumpy() for x in (found if isinstance(found, tuple) else (found,))]

    check_leaves(am, Tensor, gradients, comm)


def check_sums_of_leaves_in_a_graph(comm: Communicator) -> None:
    x = Tensor(share(terms(300, "float32"), comm))
    cell = am.AllReduceLeaves(LEAVES, group=comm)

    def loss(x: Tensor) -> Tensor:
        total = cell(x * 1)
        return (total * total).sum()

    def value(x: Tensor) -> Tensor:
        return cell(x * 1)

    for plain, graph in ((value, ms.jit(value)), (ms.grad(loss), ms.jit(ms.grad(loss)))):
        assert graph(x).asnumpy().tobytes() == plain(x).asnumpy().tobytes()
    coded = am.QuantizedAllReduce(leaves=LEAVES, bits=4, op="avg", group=comm)

    def squared(x: Tensor) -> Tensor:
        total = coded(x * 1)
        return (total * total).sum()

    for plain, graph in ((coded, ms.jit(coded)), (ms.grad(squared), ms.jit(ms.grad(squared)))):
        assert graph(x).asnumpy().tobytes() == plain(x).asnumpy().tobytes()


def check_order_of_ranks(comm: Communicator) -> None:
    x, part = Tensor(np.full(4, comm.rank + 1.0, np.float32)), Tensor(np.zeros(2, np.float32))
    wide = Tensor(np.full(2 * comm.size, comm.rank + 1.0, np.float32))
    total = sum(range(1, comm.size + 1))
    am.all_reduce(x, group=comm, order="rank")
    am.reduce_scatter_tensor(part, wide, group=comm, order="rank")
    assert (x.asnumpy().tolist(), part.asnumpy().tolist()) == ([total] * 4, [total] * 2)
    with pytest.raises(InvalidParamError, match=r"order is 'ring', expected 'rank' or None"):
        am.reduce(x, 0, group=comm, order="ring" if comm.rank == 0 else None)
