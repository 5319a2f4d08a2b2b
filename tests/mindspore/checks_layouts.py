"""Tensors move between layouts, and one dimension of them for another."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from layouts import check_formats, check_gradients, check_layouts, check_states, part
from mindspore import Tensor
from mindspore.parallel import Layout
from swaps import check_swaps

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError


def in_mindspores_words(layout: Any, ndim: int) -> Any:
    """Its own Layout, unless there are strides or terms, for which that has no words."""
    mesh, placements = np.asarray(layout[0]), layout[1]
    if any(isinstance(each, str | tuple) for each in placements):
        return layout
    names = tuple("abc"[: mesh.ndim])
    divided = [
        tuple(name for name, each in zip(names, placements, strict=True) if each is not None and each % ndim == dim)
        for dim in range(ndim)
    ]
    return Layout(mesh.shape, names, mesh.reshape(-1).tolist())(*(each or "None" for each in divided))


def check_random_layouts(comm: Communicator, cases: int = 40) -> None:
    check_layouts(am, Tensor, lambda x: x.asnumpy(), comm, comm, cases, in_mindspores_words)
    check_states(am, Tensor, lambda x: x.asnumpy(), comm, comm)


def check_formats_of_layouts(comm: Communicator) -> None:
    check_formats(am, Tensor, lambda x: x.asnumpy(), comm, comm, 12)


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


def check_gradients_of_layouts(comm: Communicator) -> None:
    def gradient(loss: Any, x: Tensor) -> Any:
        return ms.grad(loss)(x).asnumpy()

    def twice(loss: Any, x: Tensor, v: Tensor) -> Any:
        return ms.grad(lambda z: (ms.grad(loss)(z) * v).sum())(x).asnumpy()

    # MindSpore leaves out the second gradient of an empty tensor.
    check_gradients(am, Tensor, lambda x: x.asnumpy(), gradient, twice, comm, comm, 25, least=1)
    x = Tensor(np.ones((4, 4), np.float32))
    with pytest.raises(InvalidParamError, match="x wants a gradient, expected all 2 ranks in both meshes then"):
        ms.grad(lambda z: am.reshard(z, ([0, 1], [None]), ([0], [0]), group=comm).sum())(x)
    with pytest.raises(InvalidParamError, match="source has terms of 'max' for what wants a gradient"):
        ms.grad(lambda z: am.reshard(z, ([0, 1], ["max"]), ([0, 1], [0]), group=comm).sum())(x)
    plan = am.ReshardPlan((4, 4), ms.float32, ([0, 1], [None]), ([0, 1], [0]), group=comm)
    assert ms.grad(lambda z: plan(z).sum())(x).sum() == 8
    state = {"a": x, "b": Tensor(np.ones(2, np.float32))}
    moved = ms.grad(
        lambda z: am.reshard_state(state | {"a": z}, ([0, 1], [0]), ([0, 1], [None]), group=comm)["a"].sum()
    )
    np.testing.assert_array_equal(moved(x).asnumpy(), np.full((4, 4), 2.0))


def check_exchanges_of_dimensions(comm: Communicator) -> None:
    check_swaps(am, Tensor, lambda loss, x: ms.grad(loss)(x).asnumpy(), comm, comm, dtypes=["float32", "int8", "bool"])
