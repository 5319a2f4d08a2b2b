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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


# Which boxes go from whom to whom, so that the ranks have the tensor in another layout.


class Kept(NamedTuple):
    """What a rank keeps of its source: its box there, in its target, and whether a rank gets it that lacks it."""

    source: Slices
    target: Slices
    travels: bool = False


@dataclass
class Move:
    """One exchange, as one rank takes part in it. Boxes lie in the rank's own part of the tensor.

    Attributes:
        sends, recvs: The boxes for, and from, each of some other ranks, by rank; in one order on both sides.
        kept: The boxes of this rank's own.
        op: The reduction of what comes, which has the target's shape, in the order ``terms`` of ranks; or "".
        shape_in, shape_out: Of the rank's source and target, None where it has none.
        share: Of a transposed move, whose boxes may overlap and are added: what the sums are divided by; else 0.
        zeroes: Whether the target's elements that nobody sends are zeros; they keep their values in a part of a move.
    """

    sends: dict[int, list[Slices]]
    recvs: dict[int, list[Slices]]
    kept: list[Kept]
    shape_in: tuple[int, ...] | None
    shape_out: tuple[int, ...] | None
    op: str = ""
    terms: Sequence[int] = ()
    share: int = 0
    zeroes: bool = True

    def sent(self, rank: int) -> int:
        """Returns how many elements go to a rank."""
        return sum(map(numel, self.sends.get(rank, ())))

    def received(self, rank: int) -> int:
        """Returns how many elements come from a rank."""
        return sum(map(numel, self.recvs.get(rank, ())))

    def parts(self, number: int, unit: int) -> list[Move]:
        """Divides the move into ``number`` of about one size that do the same, one after the other.

        Both ends of a message divide it alike: its boxes as `_halves` does.
        """
        sends, recvs = (
            {j: _shares(boxes_, number, unit) for j, boxes_ in messages.items()}
            for messages in (self.sends, self.recvs)
        )
        sources = _shares([each.source for each in self.kept], number, unit)
        targets = _shares([each.target for each in self.kept], number, unit)
        parts = []
        for k in range(number):
            kept = [
                Kept(source, target, self.kept[i].travels)
                for (i, source), (_, target) in zip(sources[k], targets[k], strict=True)
            ]
            to, of = ({j: [box for _, box in shares[k]] for j, shares in each.items()} for each in (sends, recvs))
            parts.append(replace(self, sends=to, recvs=of, kept=kept, zeroes=False))
        return parts

    def transposed(self) -> Move:
        """Returns the move of gradients: what was sent from comes back, and all that comes is added.

        Raises:
            InvalidParamError: it reduces by what is not linear.
        """
        if self.op not in ("", "sum", "avg"):
            raise InvalidParamError(
                f"source has terms of {self.op!r} for what wants a gradient, expected sum or avg", id=1144
            )
        kept = [Kept(each.target, each.source) for each in self.kept]
        share = self.share or (len(self.terms) if self.op == "avg" else 1)
        return Move(self.recvs, dict(sorted(self.sends.items())), kept, self.shape_out, self.shape_in, share=share)


def _shares(boxes_: Sequence[Slices], number: int, unit: int) -> list[list[tuple[int, Slices]]]:
    """Divides boxes, one after the other, into shares of about as many elements; each box with the place of its whole.

    For ``unit`` see `_halves`; 0: every box stays whole.
    """
    rest, total, done = [*enumerate(boxes_)][::-1], sum(map(numel, boxes_)), 0
    shares: list[list[tuple[int, Slices]]] = []
    for k in range(number):
        share: list[tuple[int, Slices]] = []
        tails: list[Slices] = []
        while rest and not tails and (k + 1 == number or done < total * (k + 1) // number):
            i, box = rest.pop()
            count = numel(box) if k + 1 == number or not unit else total * (k + 1) // number - done
            heads, tails = _halves(box, count, unit)
            done += sum(map(numel, heads))
            share += [(i, each) for each in heads]
            rest += [(i, each) for each in reversed(tails)]
        shares.append(share)
    return shares


def _halves(box: Slices, count: int, unit: int) -> tuple[list[Slices], list[Slices]]:
    """Divides a box after about ``count`` of its elements, at least one unit; both halves consist of boxes, in order.

    Every box that is made begins a multiple of ``unit`` elements behind the beginning.
    """
    if count >= numel(box):
        return [box], []
    axis = next(axis for axis, each in enumerate(box) if each.stop - each.start > 1)
    begin, end, inner = box[axis].start, box[axis].stop, numel(box[axis + 1 :])
    rows, more = divmod(count, inner)
    if inner % unit:
        step = unit // math.gcd(unit, inner)
        rows, more = max(rows // step * step, step), 0

    def of(first: int, last: int) -> list[Slices]:
        return [(*box[:axis], slice(first, last), *box[axis + 1 :])] if first < last else []

    middle = min(begin + rows, end)
    if not more:
        return of(begin, middle), of(middle, end)
    heads, tails = _halves(of(middle, middle + 1)[0], more, unit)
    return of(begin, middle) + heads, tails + of(middle + 1, end)


def movement(source: Boxes, target: Boxes, rank: int, takes: Callable[[int], bool] = lambda index: True) -> Move:
    """Returns the move of every byte that a rank of ``target`` lacks, once, from one of the ranks that have it.

    Copies serve in turn. ``takes``: whether the rank at a place of ``target`` gets values.
    """
    distinct, which = np.unique(source.spans, axis=0, return_inverse=True)
    which = which.reshape(-1)
    by_box = source.ranks[source.owners[np.argsort(which, kind="stable")]]
    copies = np.split(by_box, np.cumsum(np.bincount(which, minlength=len(distinct)))[:-1])
    dims = source.lengths.shape[1]
    own_boxes, wanted = source.of(source.index(rank)), target.index(rank)
    sends: dict[int, list[_Placed]] = defaultdict(list)
    recvs: dict[int, list[_Placed]] = defaultdict(list)
    kept, spans = [], target.spans
    for box in own_boxes:
        of_box = copies[which[box]]
        begin, end = np.maximum(target.begins, source.begins[box]), np.minimum(target.ends, source.ends[box])
        for each in np.flatnonzero((begin < end).all(1)).tolist():
            index = int(target.owners[each])
            other = int(target.ranks[index])
            if takes(index) and other != rank and _server(of_box, index, other) == rank:
                sends[other].append((begin[each].tolist(), source.slices(box, begin[each], end[each])))
    if wanted is not None and takes(wanted):
        own = {int(which[box]): box for box in own_boxes}
        for box in target.of(wanted):
            begin = np.maximum(distinct[:, :dims], target.begins[box])
            end = np.minimum(distinct[:, dims:], target.ends[box])
            for each in np.flatnonzero((begin < end).all(1)).tolist():
                server = _server(copies[each], wanted, rank)
                goal = target.slices(box, begin[each], end[each])
                if server != rank:
                    recvs[server].append((begin[each].tolist(), goal))
                else:
                    alike = target.ranks[[i for i in target.owners[(spans == spans[box]).all(1)] if takes(int(i))]]
                    travels = not np.isin(alike, copies[each]).all()
                    kept.append(Kept(source.slices(own[each], begin[each], end[each]), goal, bool(travels)))
    return Move(_in_order(sends), _in_order(recvs), kept, source.shape(rank), target.shape(rank))


_Placed = tuple[list[int], Slices]  # where a box begins in the whole tensor, and where it lies in a part


def _in_order(placed: dict[int, list[_Placed]]) -> dict[int, list[Slices]]:
    """Returns the boxes by rank, in the order in which they lie in the whole tensor."""
    return {rank: [box for _, box in sorted(each, key=lambda of: of[0])] for rank, each in sorted(placed.items())}


def _server(copies: Ints, index: int, rank: int) -> int:
    """Returns who of the ranks that have a box serves the rank at place ``index``: itself, if it can."""
    return rank if rank in copies else int(copies[index % len(copies)])


def summation(layout: Layout, divided: Layout, shape: Sequence[int], rank: int) -> Move:
    """Returns the move after which parts of the terms' reduction have the places that ``divided`` gives them."""
    terms, parts = boxes(layout, shape), boxes(divided, shape)
    op = next(each for each in layout.placements if isinstance(each, str))
    i = terms.index(rank)
    if i is None:
        return Move({}, {}, [], None, None, op)
    same = [along == along[i] for along, each in zip(terms.coordinates, layout.placements, strict=True) if each != op]
    others = np.flatnonzero(np.logical_and.reduce([np.ones(len(terms.ranks), bool), *same])).tolist()
    sends = {int(terms.ranks[j]): [each.source for each in _shared(terms, i, parts, j)] for j in others if j != i}
    recvs = {int(terms.ranks[j]): [each.target for each in _shared(terms, j, parts, i)] for j in others if j != i}
    ranks = [int(terms.ranks[j]) for j in others]
    by_rank = dict(sorted(sends.items())), dict(sorted(recvs.items()))
    return Move(*by_rank, _shared(terms, i, parts, i), terms.shape(rank), parts.shape(rank), op, ranks)


def _shared(source: Boxes, i: int, target: Boxes, j: int) -> list[Kept]:
    """Returns what the rank at place ``i`` has that the one at place ``j`` shall have, where it lies in either part."""
    shared = []
    for a in source.of(i):
        for b in target.of(j):
            begin, end = np.maximum(source.begins[a], target.begins[b]), np.minimum(source.ends[a], target.ends[b])
            if (begin < end).all():
                shared.append((begin.tolist(), source.slices(a, begin, end), target.slices(b, begin, end)))
    return [Kept(there, here) for _, there, here in sorted(shared, key=lambda of: of[0])]


def moves(shape: Sequence[int], source: Layout, target: Layout, rank: int) -> list[Move]:
    """Returns one rank's exchanges from a layout to another: a second one where terms are added up first."""
    source, target = source.on(shape, "source"), target.on(shape, "target")
    if {each for each in target.placements if isinstance(each, str)} - {"sum"}:
        raise InvalidParamError(
            f"target has the placements {target.placements}, expected no terms but a sum's", id=1145
        )
    ops = {each for each in source.placements if isinstance(each, str)}
    if len(ops) > 1:
        raise InvalidParamError(
            f"source has the placements {source.placements}, expected terms of one reduction", id=1146
        )
    if ops and source.key == target.key:
        return []
    steps = []
    if ops:
        if not shape:
            raise InvalidParamError("source has terms of a tensor of shape [], expected at least 1 dimension", id=1147)
        source, between = _divided(source, target, int(np.argmax(shape)))
        steps.append(summation(source, between, shape, rank))
        source = between
    goal_boxes = boxes(target, shape)
    held = [along for along, each in zip(goal_boxes.coordinates, target.placements, strict=True) if each == "sum"]
    first = np.logical_and.reduce([np.ones(target.mesh.size, bool), *(along == 0 for along in held)])
    between_boxes = boxes(source, shape)
    if not (steps and first.all() and between_boxes.equal(goal_boxes)):
        steps.append(movement(between_boxes, goal_boxes, rank, lambda index: bool(first[index])))
    return steps


def _divided(source: Layout, target: Layout, longest: int) -> tuple[Layout, Layout]:
    """Returns the source, and where parts of the reduction of its terms shall be: where the target has them, if it can.

    In both the mesh has its dimensions with terms last, so that parts of every rank's own part are divided. Thus a
    target's strides are no strides here: what they step over is divided before.
    """
    alike = source.mesh.shape == target.mesh.shape and bool((source.mesh == target.mesh).all())
    goals = [division(each) if alike else None for each in (target if alike else source).placements]
    order = sorted(range(source.mesh.ndim), key=lambda along: isinstance(source.placements[along], str))
    mesh, placed = np.ascontiguousarray(source.mesh.transpose(order)), [source.placements[along] for along in order]
    parts = [
        (goals[along] or (longest,))[0] if isinstance(source.placements[along], str) else source.placements[along]
        for along in order
    ]
    return Layout(mesh, tuple(placed)), Layout(mesh, tuple(parts))
