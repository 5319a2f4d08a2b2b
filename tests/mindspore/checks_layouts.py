"""Tensors move between layouts, and one dimension of them for another."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from layouts import check_layouts, part
from mindspore import Tensor
from mindspore.parallel import Layout
from swaps import check_swaps

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError


def check_random_layouts(comm: Communicator) -> None:
    check_layouts(am, Tensor, lambda x: x.asnumpy(), comm, comm, 40)


def check_layouts_of_mindspore(comm: Communicator) -> None:
    """Its tensor maps, also where two dimensions of the mesh divide one of the tensor, in either order."""
    whole = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    mesh = Layout((2, 1), ("rows", "columns"))
    pairs: list[tuple[Any, Any, Any]] = [
        (mesh("rows", "columns"), ([0, 1], [0]), Layout((2,), ("all",))("None", "all")),
        (mesh(("columns", "rows"), "None"), ([0, 1], [0]), mesh("None", "rows")),
        (mesh("columns", "rows"), ([0, 1], [1]), mesh("None", "None")),
        (mesh("None", "rows").to_dict(), ([0, 1], [1]), mesh(("rows", "columns"), "None").to_dict()),
    ]
    goals = ([0, 1], [1]), ([0, 1], [1]), ([0, 1], [None]), ([0, 1], [0])
    for (source, plain, target), goal in zip(pairs, goals, strict=True):
        x, wanted = (part(each, comm.rank, whole) for each in (plain, goal))
        assert x is not None
        assert wanted is not None
        found = am.reshard(Tensor(np.ascontiguousarray(x[0])), source, target, group=comm)
        np.testing.assert_array_equal(found.asnumpy(), wanted[0])
    with pytest.raises(InvalidParamError, match="source is a layout without a tensor_map"):
        am.reshard(Tensor(whole), Layout((2,), ("all",)), mesh("rows", "None"), group=comm)
    with pytest.raises(InvalidParamError, match="reshard has no gradient"):
        ms.grad(lambda x: am.reshard(x, ([0, 1], [0]), ([0, 1], [1]), group=comm).sum())(Tensor(whole))


def check_exchanges_of_dimensions(comm: Communicator) -> None:
    check_swaps(am, Tensor, lambda loss, x: ms.grad(loss)(x).asnumpy(), comm, comm, dtypes=["float32", "int8", "bool"])
