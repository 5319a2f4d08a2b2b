"""Moves tensors from one layout over the ranks to another: which boxes of a tensor go from whom to whom."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from alltoallv import _core
from alltoallv._calls import objects
from alltoallv._calls.counts import packed
from alltoallv._calls.dimensions import contiguous
from alltoallv._calls.dimensions import in_rows as rows_of
from alltoallv._calls.guard import guard
from alltoallv._calls.layouts import Boxes, Ints, Layout, Slices, boxes, division, numel, offset
from alltoallv.communicator import Communicator
from alltoallv.dtypes import item_size
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

T = TypeVar("T")
Pieces = list[tuple[Slices, Any]]  # tensors, and where each lies in one
WIDE = {"float16": "float32", "bfloat16": "float32"}  # what a dtype is added in
_TOGETHER = 64 << 20  # bytes of whole tensors that one exchange moves, unless it moves one tensor


class Tools(Protocol[T]):
    """What a plan needs of a framework. Tensors are sliced, reshaped and assigned to as NumPy's arrays."""

    def concatenated(self, parts: Sequence[T]) -> T:
        """Returns flat tensors in one; there is at least one."""

    def new(self, shape: Sequence[int], dtype: str, zero: bool) -> T:
        """Returns a tensor, of zeros where it is asked for."""

    @property
    def reads_rows(self) -> bool:
        """Whether an exchange reads and writes parts that lie in rows with gaps between them."""

    def exchange(self, x: T, out: T | None, placed: Placed, later: bool) -> tuple[T, Callable[[], Any]]:
        """Does the exchange of elements, or begins it; returns the output, a packed one by default, and what waits."""

    def reduced(self, parts: Sequence[T], op: str) -> T:
        """Adds, or combines otherwise, in the order of ``parts``; 16-bit floats in float32, rounded once."""

    def record_bytes(self, coding: Coding, count: int) -> int:
        """Returns the bytes of so many elements as codes and scales."""

    def coded(self, coding: Coding, x: T) -> T:
        """Returns the record, as bytes, of a flat tensor."""

    def decoded(self, coding: Coding, record: T, count: int, dtype: str) -> T:
        """Returns the flat tensor of a record; values that do not fit are the largest finite ones."""


class Placed(NamedTuple):
    """Where elements for every rank begin and where those of every rank go, as the core's plans take it.

    ``steps``: the length of rows and the distance between them, of what goes to every rank and of what comes from it;
    of all zeros, it is in one piece. It is empty where tools read no rows.
    """

    sends: list[int]
    sdispls: list[int]
    recvs: list[int]
    rdispls: list[int]
    steps: list[int]


class Coding(Protocol):
    """A quantized format. Its text is equal for equal ones."""

    @property
    def format(self) -> str: ...

    @property
    def group_size(self) -> int: ...


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
    """

    sends: dict[int, list[Slices]]
    recvs: dict[int, list[Slices]]
    kept: list[Kept]
    shape_in: tuple[int, ...] | None
    shape_out: tuple[int, ...] | None
    op: str = ""
    terms: Sequence[int] = ()
    share: int = 0

    def sent(self, rank: int) -> int:
        """Returns how many elements go to a rank."""
        return sum(map(numel, self.sends.get(rank, ())))

    def received(self, rank: int) -> int:
        """Returns how many elements come from a rank."""
        return sum(map(numel, self.recvs.get(rank, ())))

    def transposed(self) -> Move:
        """Returns the move of gradients: what was sent from comes back, and all that comes is added.

        Raises:
            InvalidParamError: it reduces by what is not linear.
        """
        if self.op not in ("", "sum", "avg"):
            raise InvalidParamError(f"source has terms of {self.op!r} for what wants a gradient, expected sum or avg")
        kept = [Kept(each.target, each.source) for each in self.kept]
        share = self.share or (len(self.terms) if self.op == "avg" else 1)
        return Move(self.recvs, dict(sorted(self.sends.items())), kept, self.shape_out, self.shape_in, share=share)


def movement(source: Boxes, target: Boxes, rank: int, takes: Callable[[int], bool] = lambda index: True) -> Move:
    """Returns the move of every byte that a rank of ``target`` lacks, once, from one of the ranks that have it.

    Copies serve in turn. ``takes``: whether the rank at a place of ``target`` gets values.
    """
    distinct, which = np.unique(source.spans, axis=0, return_inverse=True)
    which = which.reshape(-1)
    by_box = source.ranks[source.owners[np.argsort(which, kind="stable")]]
    copies = np.split(by_box, np.cumsum(np.bincount(which, minlength=len(distinct)))[:-1])
    dims = source.lengths.shape[1]
    mine, wanted = source.of(source.index(rank)), target.index(rank)
    sends: dict[int, list[_Placed]] = defaultdict(list)
    recvs: dict[int, list[_Placed]] = defaultdict(list)
    kept, spans = [], target.spans
    for box in mine:
        of_box = copies[which[box]]
        begin, end = np.maximum(target.begins, source.begins[box]), np.minimum(target.ends, source.ends[box])
        for each in np.flatnonzero((begin < end).all(1)).tolist():
            index = int(target.owners[each])
            other = int(target.ranks[index])
            if takes(index) and other != rank and _server(of_box, index, other) == rank:
                sends[other].append((begin[each].tolist(), source.slices(box, begin[each], end[each])))
    if wanted is not None and takes(wanted):
        own = {int(which[box]): box for box in mine}
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
    found = []
    for a in source.of(i):
        for b in target.of(j):
            begin, end = np.maximum(source.begins[a], target.begins[b]), np.minimum(source.ends[a], target.ends[b])
            if (begin < end).all():
                found.append((begin.tolist(), source.slices(a, begin, end), target.slices(b, begin, end)))
    return [Kept(there, here) for _, there, here in sorted(found, key=lambda of: of[0])]


def moves(shape: Sequence[int], source: Layout, target: Layout, rank: int) -> list[Move]:
    """Returns one rank's exchanges from a layout to another: a second one where terms are added up first."""
    source, target = source.on(shape, "source"), target.on(shape, "target")
    if {each for each in target.placements if isinstance(each, str)} - {"sum"}:
        raise InvalidParamError(f"target has the placements {target.placements}, expected no terms but those of a sum")
    ops = {each for each in source.placements if isinstance(each, str)}
    if len(ops) > 1:
        raise InvalidParamError(f"source has the placements {source.placements}, expected terms of one reduction")
    if ops and source.key == target.key:
        return []
    steps = []
    if ops:
        if not shape:
            raise InvalidParamError("source has terms of a tensor of shape [], expected at least 1 dimension")
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


@dataclass(frozen=True)
class Form(Generic[T]):
    """How pieces of tensors of one dtype travel: as they are, or each as one record of codes and scales."""

    tools: Tools[T]
    dtype: str
    coding: Coding | None = None

    def size(self, box: Slices) -> int:
        """Returns what a piece is in a message: elements, or bytes of a record."""
        return numel(box) if self.coding is None else self.tools.record_bytes(self.coding, numel(box))

    def written(self, piece: Any) -> T:
        """Returns what goes into a message."""
        flat: T = piece.reshape(-1)
        return flat if self.coding is None else self.tools.coded(self.coding, flat)

    def read(self, part: T, box: Slices) -> Any:
        """Returns the piece from its part of a message."""
        flat: Any = part if self.coding is None else self.tools.decoded(self.coding, part, numel(box), self.dtype)
        return flat.reshape([each.stop - each.start for each in box])

    def kept(self, step: Move, source: Any) -> Pieces:
        """Returns what a rank keeps, with the values that others get of it."""
        pieces = [(each, source[each.source]) for each in step.kept]
        rounds = self.coding is not None
        return [
            (each.target, self.read(self.written(piece), each.source) if rounds and each.travels else piece)
            for each, piece in pieces
        ]


def begin_together(
    steps: Sequence[Move], inputs: Sequence[Any], outs: Sequence[Any], size: int, form: Form[Any], later: bool
) -> Callable[[], list[Any]]:
    """Runs, or begins, the moves of several tensors of one dtype in one exchange.

    Returns what waits for them and returns a target for each, of ``outs`` where that is not None; or None.
    """
    tools, single = form.tools, len(steps) == 1 and form.coding is None
    sends, recvs = (
        [sum(form.size(box) for boxes_ in every for box in boxes_.get(j, ())) for j in range(size)]
        for every in ([step.sends for step in steps], [step.recvs for step in steps])
    )
    dtype = form.dtype if form.coding is None else "uint8"
    in_rows = single and tools.reads_rows and not (steps[0].op or steps[0].share)  # alike on all ranks
    source = _where(steps[0].sends, steps[0].shape_in, size, in_rows) if single else None
    goal = _where(steps[0].recvs, steps[0].shape_out, size, in_rows) if in_rows else None
    if source is not None:
        x = inputs[0].reshape(-1)
    else:
        messages: dict[str, Any] = {}  # a piece is quantized once for all its receivers
        parts = []
        for j in range(size):
            for i, step in enumerate(steps):
                for box in step.sends.get(j, ()):
                    if (name := f"{i} {box}") not in messages:
                        messages[name] = form.written(inputs[i][box])
                    parts.append(messages[name])
        x = tools.concatenated(parts) if parts else tools.new((0,), dtype, False)
        source = packed(sends), [0, 0] * size
    into = None if goal is None else _new(steps[0], outs[0], form)
    rdispls, rows = goal or (packed(recvs), [0, 0] * size)
    placed = Placed(sends, source[0], recvs, rdispls, source[1] + rows if in_rows else [])
    came, wait = tools.exchange(x, into, placed, later)

    def finish() -> list[Any]:
        wait()
        if into is not None:
            return [_filled(into, form.kept(steps[0], inputs[0]))]
        results, begins = [], packed(recvs)
        for step, source, out in zip(steps, inputs, outs, strict=True):
            arrived: dict[int, Pieces] = {}
            for j, boxes_ in step.recvs.items():
                arrived[j] = []
                for box in boxes_:
                    end = begins[j] + form.size(box)
                    arrived[j].append((box, form.read(came[begins[j] : end], box)))
                    begins[j] = end
            results.append(_assembled(step, source, out, arrived, came if single else None, form))
        return results

    return finish


def _where(
    parts: Mapping[int, Sequence[Slices]], shape: tuple[int, ...] | None, size: int, in_rows: bool
) -> tuple[list[int], list[int]] | None:
    """Returns where in a tensor what goes to or comes from every rank begins, and its rows, if it can be left there.

    That is where it is one box for each rank, and in one piece, or ``in_rows`` at one distance.
    """
    if shape is None or any(len(each) > 1 for each in parts.values()):
        return None
    strides, displs, steps = contiguous(shape), [0] * size, [0, 0] * size
    for j, boxes_ in parts.items():
        for box in boxes_:
            rows = rows_of([each.stop - each.start for each in box], strides)
            if rows is None or (any(rows) and not in_rows):
                return None
            displs[j] = sum(each.start * stride for each, stride in zip(box, strides, strict=True))
            steps[2 * j : 2 * j + 2] = rows
    return displs, steps


def _new(step: Move, out: Any, form: Form[Any]) -> Any:
    """Returns a rank's target before anything has come: ``out``, or a new tensor."""
    shape = step.shape_out or ()
    boxes_ = [each.target for each in step.kept] + [box for each in step.recvs.values() for box in each]
    covered = sum(map(numel, boxes_)) == math.prod(shape)
    if out is None:
        return form.tools.new(shape, form.dtype, not covered)
    if not covered:
        out[...] = 0
    return out


def _assembled(step: Move, source: Any, out: Any, arrived: dict[int, Pieces], alone: Any, form: Form[Any]) -> Any:
    """Returns a rank's target from what has come; ``alone``: all that has come, where it is of this tensor only."""
    if step.shape_out is None:
        return None
    own, dtype, tools = form.kept(step, source), form.dtype, form.tools
    came = [piece for each in arrived.values() for piece in each]
    if step.share:
        return _added(step, own + came, dtype, tools)
    if step.op:
        terms = [_joined(arrived.get(j, own), step.shape_out, dtype, tools) for j in step.terms]
        return _stored(tools.reduced(terms, step.op), out)
    if out is None and alone is not None and not own and _covered(came, step.shape_out):
        offsets = [offset(box, step.shape_out) for box, _ in came]
        if offsets == packed([numel(box) for box, _ in came]):
            return alone.reshape(step.shape_out)
    return _filled(_new(step, out, form), own + came)


def _stored(tensor: Any, out: Any) -> Any:
    """Returns a tensor, or ``out`` with its values."""
    if out is None:
        return tensor
    out[...] = tensor
    return out


def _filled(out: Any, pieces: Pieces) -> Any:
    for box, piece in pieces:
        out[box] = piece
    return out


def _covered(pieces: Pieces, shape: Sequence[int]) -> bool:
    return sum(numel(box) for box, _ in pieces) == math.prod(shape)


def _joined(pieces: Pieces, shape: tuple[int, ...], dtype: str, tools: Tools[Any]) -> Any:
    """Returns a tensor of pieces that cover it; where there is but one, that."""
    return pieces[0][1] if len(pieces) == 1 else _filled(tools.new(shape, dtype, False), pieces)


def _added(step: Move, pieces: Pieces, dtype: str, tools: Tools[Any]) -> Any:
    """Returns the gradient of a rank's source; 16-bit floats are added in float32."""
    total = tools.new(step.shape_out or (), WIDE.get(dtype, dtype), True)
    for box, piece in pieces:
        total[box] += piece
    if step.share > 1:
        total /= step.share
    if dtype not in WIDE:
        return total
    out = tools.new(step.shape_out or (), dtype, False)
    out[...] = total
    return out


def travels_coded(dtype: str) -> bool:
    """Returns whether tensors of a dtype travel in a format, where one is asked for."""
    return dtype in _core.dtypes and _core.dtypes[dtype].quantizes


class Described(NamedTuple):
    """What a rank says of its part of one tensor before the first exchange."""

    name: str
    source: Layout
    target: Layout
    shape: tuple[int, ...] | None  # of the whole tensor
    part: tuple[int, ...] | None  # of this rank's source
    dtype: str | None
    wants_gradient: bool = False
    coding: str = "none"


def agreed(comm: Communicator, mine: Sequence[Described]) -> list[tuple[tuple[int, ...], str, bool]]:
    """Compares with the other ranks; returns each tensor's whole shape, dtype and whether a rank wants its gradient.

    Raises:
        PeerMismatchError: layouts, shapes or dtypes differ; the message names the ranks.
        InvalidParamError, InvalidTensorError: a shape is unknown, or a part does not have the shape of its place.
    """
    with guard(comm, "all_gather"):
        told = [
            ((each.source.key, each.target.key), f"source {each.source}, target {each.target}", *each[3:])
            for each in mine
        ]
        call = objects.all_gather(comm, pickle.dumps(([each.name for each in mine], told)))
    read = functools.lru_cache(None)(pickle.loads)  # most ranks say the same
    names, every = zip(*map(read, call(-1.0)), strict=True)
    for rank, theirs in enumerate(names):
        if theirs != names[0]:
            raise PeerMismatchError(f"reshard: rank 0 has the tensors {names[0]}, rank {rank} has {theirs}")
    return [_agreed(each, [theirs[i] for theirs in every]) for i, each in enumerate(mine)]


def _agreed(mine: Described, told: Sequence[Any]) -> tuple[tuple[int, ...], str, bool]:
    name, (keys, texts, shapes, parts, dtypes, gradients, codings) = mine.name, zip(*told, strict=True)
    for rank, key in enumerate(keys):
        if key != keys[0]:
            raise PeerMismatchError(f"{name}: rank 0 has {texts[0]}, rank {rank} has {texts[rank]}")
    shape, dtype = _equal(name, "the whole shape", shapes), _equal(name, "dtype", dtypes)
    _equal(name, "the format", codings)
    if dtype is None:
        raise InvalidParamError(f"{name}: no rank has a part, expected all ranks of the source's mesh to give theirs")
    if "avg" in mine.source.placements and not dtype.startswith(("float", "bfloat", "complex")):
        raise InvalidParamError(f"{name} has dtype {dtype}, expected one of fractions for terms of an average")
    if mine.coding != "none" and travels_coded(dtype) and any(isinstance(each, str) for each in mine.source.placements):
        raise InvalidParamError(f"{name} has terms in its source, which have no format, expected format None")
    holders = sorted(mine.source.ranks)
    gives = set(holders)
    for rank, part in enumerate(parts):
        if (part is None) == (rank in gives):
            has = ("no part", "one") if part is None else ("a part", "None")
            raise InvalidTensorError(
                f"{name}: rank {rank} gives {has[0]}, expected {has[1]}, as the source's mesh says"
            )
    shape = shape or _whole(name, mine.source, parts)
    places = boxes(mine.source.on(shape, "source"), shape).shapes()
    for rank in holders:
        if parts[rank] != (expected := places[rank]):
            raise InvalidTensorError(
                f"{name} of rank {rank} has shape {list(parts[rank])}, expected {list(expected)}, "
                f"its part of {list(shape)}"
            )
    return shape, dtype, _wants_gradient(mine, holders, gradients)


def _wants_gradient(mine: Described, holders: Sequence[int], told: Sequence[bool]) -> bool:
    """Returns whether autograd records the call, on every rank: the gradient is one more exchange of all."""
    for rank in holders:
        if told[rank] != told[holders[0]]:
            a, b = sorted((rank, holders[0]), key=lambda each: not told[each])
            raise PeerMismatchError(f"{mine.name}: rank {a} wants a gradient, rank {b} wants none")
    return told[holders[0]]


def _equal(name: str, what: str, values: Sequence[Any]) -> Any:
    """Returns what all ranks say that say something; None if none does."""
    given = [(rank, value) for rank, value in enumerate(values) if value is not None]
    for rank, value in given:
        if value != given[0][1]:
            raise PeerMismatchError(f"{name}: rank {given[0][0]} has {what} {given[0][1]}, rank {rank} has {value}")
    return given[0][1] if given else None


def _whole(name: str, source: Layout, parts: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape of a tensor of whose source these are the parts."""
    first = parts[source.ranks[0]]
    for rank in source.ranks:
        if len(parts[rank]) != len(first):
            raise InvalidTensorError(f"{name} of rank {rank} has {len(parts[rank])} dimensions, expected {len(first)}")
    divided = [division(each) for each in source.on(first, "source").placements]
    shape = list(first)
    for dim in range(len(first)):
        along = tuple(slice(None) if each and each[0] == dim else 0 for each in divided)
        shape[dim] = sum(parts[int(rank)][dim] for rank in np.asarray(source.mesh[along]).flat)
    return tuple(shape)


class Resharding(Generic[T]):
    """Runs the moves of one or several tensors; the plans of all front ends."""

    def __init__(self, comm: Communicator, mine: Sequence[Described], coding: Coding | None = None) -> None:
        self.terms = agreed(comm, mine if coding is None else [each._replace(coding=str(coding)) for each in mine])
        self._coding = coding
        self.steps = [
            moves(shape, each.source, each.target, comm.rank)
            for each, (shape, *_) in zip(mine, self.terms, strict=True)
        ]
        self._mine, self._size = list(mine), comm.size

    @property
    def elements_sent(self) -> int:
        """Returns how many elements this rank sends to others."""
        return sum(step.sent(j) for steps in self.steps for step in steps for j in step.sends)

    @property
    def elements_received(self) -> int:
        """Returns how many elements this rank gets from others."""
        return sum(step.received(j) for steps in self.steps for step in steps for j in step.recvs)

    def _form(self, dtype: str, tools: Tools[Any]) -> Form[Any]:
        return Form(tools, dtype, self._coding if travels_coded(dtype) else None)

    def moved_bytes(self, tools: Tools[Any], itemsize: int) -> tuple[int, int]:
        """Returns how many bytes this rank sends to others, and gets from them."""
        totals = [0, 0]
        for steps, (_, dtype, _) in zip(self.steps, self.terms, strict=True):
            form = self._form(dtype, tools)
            unit = itemsize if form.coding is None else 1
            for step in steps:
                for way, messages in enumerate((step.sends, step.recvs)):
                    totals[way] += unit * sum(form.size(box) for boxes_ in messages.values() for box in boxes_)
        return totals[0], totals[1]

    def transposed(self) -> Resharding[T]:
        """Returns what moves gradients of the targets back.

        Raises:
            InvalidParamError: it reduces by what is not linear.
        """
        back = copy.copy(self)
        back.steps = [[step.transposed() for step in reversed(steps)] for steps in self.steps]
        back._coding = None  # gradients move as they are
        return back

    def alone(self, i: int) -> Resharding[T]:
        """Returns what moves one of the tensors."""
        one = copy.copy(self)
        one.terms, one.steps, one._mine = [self.terms[i]], [self.steps[i]], [self._mine[i]]
        return one

    def check_gradient(self) -> None:
        """Raises InvalidParamError where a tensor that wants a gradient cannot have one."""
        for each in self._mine:
            if not all(len(layout.ranks) == self._size for layout in (each.source, each.target)):
                raise InvalidParamError(
                    f"{each.name} wants a gradient, expected all {self._size} ranks in both meshes then"
                )
        self.transposed()

    def check_outputs(self, found: Sequence[tuple[tuple[int, ...], str] | None]) -> None:
        """Raises where the shapes and dtypes of the caller's outputs are not the targets'."""
        for each, output, steps, (_, dtype, wants) in zip(self._mine, found, self.steps, self.terms, strict=True):
            if wants:
                raise InvalidParamError(
                    f"out is given for {each.name}, which wants a gradient, expected one or the other"
                )
            shape = steps[-1].shape_out if steps else each.part
            if output != (expected := None if shape is None else (shape, dtype)):
                raise InvalidTensorError(f"out for {each.name} has shape and dtype {output}, expected {expected}")

    def begin(
        self, inputs: Sequence[Any], tools: Tools[Any], later: bool = False, outs: Sequence[Any] | None = None
    ) -> Callable[[], list[Any]]:
        """Runs, or begins, the exchanges; returns what returns every tensor's target, of ``outs`` if given.

        Terms are added before, by one more exchange: then that is what begins.
        """
        results = list(inputs)
        outs = [None] * len(inputs) if outs is None else outs
        begun = self._step(0, results, outs, tools, later)

        def finish() -> list[Any]:
            for each in begun:
                each()
            for number in range(1, max((len(steps) for steps in self.steps), default=0)):
                for each in self._step(number, results, outs, tools, False):
                    each()
            return [x if steps else _stored(x, out) for x, out, steps in zip(results, outs, self.steps, strict=True)]

        return finish

    def _step(
        self, number: int, results: list[Any], outs: Sequence[Any], tools: Tools[Any], later: bool
    ) -> list[Callable[[], None]]:
        """Runs, or begins, the exchanges of one step; returns what then puts results where their inputs are."""
        begun: list[Callable[[], None]] = []
        for dtype in sorted({dtype for _, dtype, _ in self.terms}):
            chosen = [i for i, each in enumerate(self.steps) if self.terms[i][1] == dtype and len(each) > number]
            for group in self._together(chosen, item_size(dtype)):
                last = [outs[i] if len(self.steps[i]) == number + 1 else None for i in group]
                moved = [self.steps[i][number] for i in group], [results[i] for i in group], last
                finish = begin_together(*moved, self._size, self._form(dtype, tools), later)

                def put(group: list[int] = group, finish: Callable[[], list[Any]] = finish) -> None:
                    for i, result in zip(group, finish(), strict=True):
                        results[i] = result

                if later:
                    begun.append(put)
                else:  # what it needs beside the tensors is free for the next
                    put()
        return begun

    def _together(self, chosen: Sequence[int], itemsize: int) -> list[list[int]]:
        """Divides tensors into those that one exchange moves, which needs memory to pack them, for one tensor none."""
        groups: list[list[int]] = []
        room = -1
        for i in chosen:
            nbytes = math.prod(self.terms[i][0]) * itemsize
            if nbytes > room:
                groups.append([])
                room = _TOGETHER
            groups[-1].append(i)
            room -= nbytes
        return groups
