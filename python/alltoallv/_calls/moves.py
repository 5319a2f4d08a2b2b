"""Which boxes of a tensor go from whom to whom, so that the ranks have it in another layout."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from alltoallv._calls.layouts import Boxes, Ints, Layout, Slices, boxes, division, numel
from alltoallv.errors import InvalidParamError


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
