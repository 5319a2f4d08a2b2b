"""Moves arrays from one layout over the ranks to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import memory
from alltoallv._calls.guard import guard
from alltoallv._calls.resharding import Described, Layout, Resharding, boxes, read_layout
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name, numpy_dtype
from alltoallv.errors import InvalidTensorError
from alltoallv.numpy.arrays import Array, as_input, resolve
from alltoallv.numpy.exchange import all_to_all_v

_WIDE = {"float16": "float32", "bfloat16": "float32"}
_STEPS = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


class _Tools:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def concatenated(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def new(self, shape: Sequence[int], dtype: str, zero: bool) -> Array:
        out = memory.empty(tuple(shape), numpy_dtype(dtype))
        if zero:
            out.view(np.uint8)[...] = 0
        return out

    def exchange(self, x: Array, sends: list[int], sdispls: list[int], recvs: list[int]) -> Array:
        return all_to_all_v(x, sends, recvs, sdispls=sdispls, unit="element", group=self._comm)

    def reduced(self, parts: Sequence[Array], op: str) -> Array:
        dtype = parts[0].dtype
        total = parts[0].astype(numpy_dtype(_WIDE.get(core_name(dtype), core_name(dtype))))
        for each in parts[1:]:
            total = _STEPS[op](total, each.astype(total.dtype))
        return (total / total.dtype.type(len(parts)) if op == "avg" else total).astype(dtype)


class ReshardPlan:
    """Moves arrays of one shape and dtype from a layout to another; made once, called for many.

    Making it is collective: the ranks compare what they ask for. See `reshard` for layouts.

    Args:
        shape, dtype: Of the whole array.
        source, target: Layouts.
        group: A `Communicator`, or None for all ranks.

    Attributes:
        source_shape, target_shape: Of this rank's parts; None where it has none.
        elements_sent, elements_received: What this rank sends to others, and gets from them, in a call.

    Raises:
        InvalidParamError: a layout is no pair of a mesh and placements, or does not fit the shape.
        PeerMismatchError: the ranks give different layouts, shapes or dtypes.
    """

    def __init__(
        self, shape: Sequence[int], dtype: npt.DTypeLike, source: Any, target: Any, *, group: Communicator | None = None
    ) -> None:
        self._comm = comm = resolve(group)
        with guard(comm, "all_gather"):
            whole, name = tuple(int(n) for n in shape), core_name(np.dtype(dtype))
            layouts = [read_layout(*each, comm.size) for each in (("source", source), ("target", target))]
            source, target = (each.on(whole, name_) for each, name_ in zip(layouts, ("source", "target"), strict=True))
            self.source_shape = boxes(source, whole).shape(comm.rank)
            self.target_shape = boxes(target, whole).shape(comm.rank)
        told = Described("x", source, target, whole, self.source_shape, name)
        self._dtype, self._plan = np.dtype(dtype), Resharding[Array](comm, [told])
        self.elements_sent, self.elements_received = self._plan.elements_sent, self._plan.elements_received

    def __call__(self, x: npt.ArrayLike | None) -> Array | None:
        """Returns this rank's part of the target, a new array, or None; ``x`` is its part of the source, or None."""
        with guard(self._comm, "all_to_all_v"):
            array = None if x is None else as_input("x", x)
            found = None if array is None else (array.shape, array.dtype)
            expected = None if self.source_shape is None else (self.source_shape, self._dtype)
            if found != expected:
                raise InvalidTensorError(f"x has shape and dtype {found}, expected {expected}")
        result: Array | None = self._plan.run([array], _Tools(self._comm))[0]
        return result


def reshard(
    x: npt.ArrayLike | None,
    source: Any,
    target: Any,
    *,
    shape: Sequence[int] | None = None,
    group: Communicator | None = None,
) -> Array | None:
    """Moves an array from one layout over the ranks to another.

    A layout is a pair ``(mesh, placements)``. The mesh is an array of ranks of any number of dimensions, each rank at
    most once. There is one placement for each dimension of the mesh:

    - an integer d: the ranks along it have parts of dimension d of the array, in order, of ceil(n / W) rows, the last
      ones smaller or empty. Two dimensions of the mesh may divide the same d, the first one before the second;
    - None: the ranks along it have copies;
    - ``"sum"``, ``"avg"``, ``"min"``, ``"max"``, ``"prod"``: every rank along it has a term; the array is their
      reduction, in the order of the mesh, 16-bit floats in float32. In ``target`` only ``"sum"``: the first rank along
      it gets the values, the others zeros.

    The meshes may be of different, overlapping or disjoint ranks. Every byte that a rank lacks is sent to it once, from
    one of the ranks that have it, and none that it has. Terms are added up first, by one more exchange.

    Args:
        x: This rank's part of the source; None on a rank that is not in its mesh.
        source, target: Layouts, equal on all ranks.
        shape: Of the whole array. Default: what the parts make together.
        group: A `Communicator`, or None for all ranks.

    Returns:
        This rank's part of the target, a new array; None on a rank that is not in its mesh.

    Raises:
        InvalidParamError, InvalidTensorError: a layout or a part of any rank is wrong.
        PeerMismatchError: the ranks give different layouts, shapes or dtypes.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    return reshard_state({"x": x}, source, target, shapes=None if shape is None else {"x": shape}, group=group)["x"]


def reshard_state(
    state: Mapping[str, npt.ArrayLike | None],
    source: Any,
    target: Any,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    group: Communicator | None = None,
) -> dict[str, Array | None]:
    """Moves several arrays by name, all of one dtype in one exchange; see `reshard`.

    Args:
        state: This rank's parts; the same names on all ranks, in the same order.
        source, target: A layout for all, or a dict of one for each name.
        shapes: Of the whole arrays that have one here.

    Returns:
        The parts of the target, by name.

    Raises:
        AllToAllVError: as `reshard`.
    """
    comm = resolve(group)
    with guard(comm, "all_gather"):
        arrays = {name: None if x is None else as_input(name, x) for name, x in state.items()}
        told = [
            Described(
                name,
                _layout("source", source, name, comm.size),
                _layout("target", target, name, comm.size),
                tuple(int(n) for n in shapes[name]) if shapes and name in shapes else None,
                None if x is None else x.shape,
                None if x is None else core_name(x.dtype),
            )
            for name, x in arrays.items()
        ]
    results = Resharding[Array](comm, told).run(list(arrays.values()), _Tools(comm))
    return dict(zip(arrays, results, strict=True))


def _layout(argument: str, given: Any, name: str, size: int) -> Layout:
    return read_layout(argument, given[name] if isinstance(given, Mapping) else given, size)
