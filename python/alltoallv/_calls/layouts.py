"""Layouts of a tensor over ranks: which boxes of it each rank has.

A layout is a mesh of ranks, and for each of its dimensions what the ranks along it have of a tensor: parts of one of
its dimensions, copies, or terms of a reduction. The words, and the sizes of uneven parts, are as in torch's
DTensor: parts of ceil(n / W), the last ones smaller or empty; a dimension that two dimensions of the mesh divide is
divided by the first of them, and each part by the second. In strides, the dimension is first cut into pieces, as if
to be divided, and a rank has its part of every one of them, one after the other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv._calls.counts import integer
from alltoallv.errors import InvalidParamError

Slices = tuple[slice, ...]
Ints = npt.NDArray[np.int64]
Placement = int | tuple[int, int] | str | None
REDUCTIONS = "sum", "avg", "min", "max", "prod"


@dataclass(frozen=True)
class Layout:
    """Where the parts of a tensor are.

    Attributes:
        mesh: Ranks of the group, each at most once.
        placements: For each dimension of the mesh the dimension of the tensor that it divides, with the number of
            pieces of one that it divides in strides; None for copies; or the reduction of whose terms every rank has
            one.
    """

    mesh: Ints
    placements: tuple[Placement, ...]

    @property
    def ranks(self) -> list[int]:
        """Returns the ranks in the order of the mesh."""
        return list(map(int, self.mesh.flat))

    def __str__(self) -> str:
        return f"placements {self.placements} on a mesh {list(self.mesh.shape)} from rank {self.mesh.flat[0]} on"

    @property
    def key(self) -> str:
        """Returns a text that is equal for equal layouts."""
        return hashlib.sha256(repr((self.mesh.shape, self.placements)).encode() + self.mesh.tobytes()).hexdigest()

    def on(self, shape: Sequence[int], name: str) -> Layout:
        """Returns the layout with dimensions from 0 on; raises if a tensor of that shape has not so many."""
        placements: list[Placement] = []
        for each in self.placements:
            if (parted := division(each)) is None:
                placements.append(each)
                continue
            dim, pieces = parted
            if not -len(shape) <= dim < len(shape):
                raise InvalidParamError(f"{name} divides dimension {dim}, expected one of shape {list(shape)}", id=1136)
            placements.append(dim % len(shape) if pieces == 1 else (dim % len(shape), pieces))
        return replace(self, placements=tuple(placements))


def read_layout(name: str, value: Any, size: int) -> Layout:
    """Returns the layout that the argument ``name`` describes: ``(mesh, placements)``."""
    if isinstance(value, Layout):
        return value
    try:
        mesh_given, placements_given = value
        mesh = np.asarray(mesh_given)
        placements = tuple(placements_given)
    except (TypeError, ValueError):
        raise InvalidParamError(
            f"{name} is {value!r}, expected a pair of a mesh of ranks and placements", id=1137
        ) from None
    if mesh.dtype.kind not in "iu" or not mesh.ndim or not mesh.size:
        raise InvalidParamError(
            f"{name} has the mesh {mesh_given!r}, expected ranks in at least one dimension", id=1138
        )
    if len(np.unique(mesh)) < mesh.size or mesh.min() < 0 or mesh.max() >= size:
        raise InvalidParamError(
            f"{name} has the mesh {mesh.tolist()}, expected ranks 0 to {size - 1}, each at most once", id=1139
        )
    if len(placements) != mesh.ndim:
        raise InvalidParamError(
            f"{name} has {len(placements)} placements, expected {mesh.ndim}, one per mesh dimension", id=1140
        )
    return Layout(np.ascontiguousarray(mesh, np.int64), tuple(_placement(name, each) for each in placements))


def _placement(name: str, value: Any) -> Placement:
    if value is None or (isinstance(value, str) and value in REDUCTIONS):
        return value
    numbers = [integer(each) for each in (value if isinstance(value, tuple) else (value, 1))]
    if len(numbers) == 2:
        dim, pieces = numbers
        if dim is not None and pieces is not None and pieces > 0:
            return dim if pieces == 1 else (dim, pieces)
    expected = (
        "a dimension to divide, a pair of one and of pieces to divide it in strides, None for copies, or one of "
        f"{', '.join(REDUCTIONS)} for terms"
    )
    raise InvalidParamError(f"{name} has the placement {value!r}, expected {expected}", id=1141)


def division(placement: Placement) -> tuple[int, int] | None:
    """Returns the dimension that a placement divides, and in how many pieces; None if it divides none."""
    if isinstance(placement, tuple):
        return placement
    return (placement, 1) if isinstance(placement, int) else None


@dataclass(frozen=True)
class Boxes:
    """What every rank of a mesh has: one box, none if its part is empty, or several where that is in strides.

    Ranks have either the same box, or boxes that do not overlap.

    Attributes:
        ranks: In the order of the mesh.
        lengths: Of each rank's part: [rank, dimension].
        coordinates: Of each rank: [dimension of the mesh, rank].
        owners: The place in ``ranks`` of each box's rank.
        table: Begin and end of each box, and where it begins in its rank's part: [box, 3, dimension].
    """

    ranks: Ints
    lengths: Ints
    coordinates: Ints
    owners: Ints
    table: Ints

    @property
    def begins(self) -> Ints:
        """Returns where the boxes begin: [box, dimension]."""
        return self.table[:, 0]

    @property
    def ends(self) -> Ints:
        """Returns where the boxes end: [box, dimension]."""
        return self.table[:, 1]

    @property
    def spans(self) -> Ints:
        """Returns begin and end of the boxes: [box, 2 * dimensions]."""
        return np.concatenate([self.begins, self.ends], 1)

    def index(self, rank: int) -> int | None:
        """Returns the place of a rank; None if it is not in the mesh."""
        indices = np.flatnonzero(self.ranks == rank)
        return int(indices[0]) if len(indices) else None

    def of(self, i: int | None) -> list[int]:
        """Returns the boxes of the rank at place ``i``; none of None."""
        indices: list[int] = np.flatnonzero(self.owners == (-1 if i is None else i)).tolist()
        return indices

    def shape(self, rank: int) -> tuple[int, ...] | None:
        """Returns the shape of a rank's part; None if it has none."""
        i = self.index(rank)
        return None if i is None else tuple(self.lengths[i].tolist())

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Returns the shape of every rank's part."""
        return dict(zip(self.ranks.tolist(), map(tuple, self.lengths.tolist()), strict=True))

    def equal(self, other: Boxes) -> bool:
        """Returns whether every rank has the same part in both."""
        return all(map(np.array_equal, self._in_order(), other._in_order()))

    def _in_order(self) -> tuple[Ints, Ints, Ints]:
        """Returns ranks, lengths and boxes in an order that is not the mesh's."""
        order = np.argsort(self.ranks)
        boxes = np.concatenate([self.ranks[self.owners][:, None], *self.table.swapaxes(0, 1)], 1)
        return self.ranks[order], self.lengths[order], np.unique(boxes, axis=0)

    def slices(self, box: int, begin: Ints, end: Ints) -> Slices:
        """Returns what lies in one of the boxes, as a box of its rank's part."""
        shift = self.table[box, 2] - self.table[box, 0]
        return tuple(slice(a, b) for a, b in zip((begin + shift).tolist(), (end + shift).tolist(), strict=True))

    def divided(self, dim: int, pieces: int, along: Ints, number: int) -> Boxes:
        """Returns the parts of ``number`` ranks, at the places ``along``, of each piece of a dimension of their own."""
        extents, lengths = self.lengths[:, dim], self.lengths.copy()
        lengths[:, dim] = 0
        stretch, owners, tables = -(-extents // pieces), [], []
        places, sizes = self.table[:, 2, dim], self.table[:, 1, dim] - self.table[:, 0, dim]
        for piece in range(pieces):
            end = np.minimum(stretch * (piece + 1), extents)
            part = -(-(end - np.minimum(stretch * piece, extents)) // number)
            low = np.minimum(stretch * piece + part * along, end)
            high = np.minimum(low + part, end)
            first, last = np.maximum(low[self.owners], places), np.minimum(high[self.owners], places + sizes)
            chosen = first < last
            table = self.table[chosen]
            table[:, 0, dim] += (first - places)[chosen]
            table[:, 1, dim] = table[:, 0, dim] + (last - first)[chosen]
            table[:, 2, dim] = (lengths[:, dim][self.owners] + first - low[self.owners])[chosen]
            lengths[:, dim] += high - low
            owners.append(self.owners[chosen])
            tables.append(table)
        return replace(self, lengths=lengths, owners=np.concatenate(owners), table=np.concatenate(tables))


def boxes(layout: Layout, shape: Sequence[int]) -> Boxes:
    """Returns what every rank has of a tensor of that shape, or terms of."""
    coordinates = np.indices(layout.mesh.shape).reshape(layout.mesh.ndim, -1)
    lengths = np.tile(np.asarray(shape, np.int64), (layout.mesh.size, 1))
    table = np.stack([np.zeros_like(lengths), lengths, np.zeros_like(lengths)], 1)
    chosen = np.flatnonzero((lengths > 0).all(1))
    result = Boxes(layout.mesh.reshape(-1), lengths, coordinates, chosen, table[chosen])
    for along, number, placement in zip(coordinates, layout.mesh.shape, layout.placements, strict=True):
        if (parted := division(placement)) is not None:
            result = result.divided(*parted, along, number)
    return result


def numel(box: Slices) -> int:
    """Returns the elements of a box."""
    return math.prod(each.stop - each.start for each in box)


def offset(box: Slices, shape: Sequence[int]) -> int | None:
    """Returns where a box begins in a flat tensor; None if it is not in one piece."""
    inside, begin = False, 0
    for each, n in zip(box, shape, strict=True):
        if inside and (each.start, each.stop) != (0, n):
            return None
        inside |= each.stop - each.start > 1
        begin = begin * n + each.start
    return begin
