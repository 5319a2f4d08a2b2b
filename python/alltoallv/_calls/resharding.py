"""Moves tensors from one layout over the ranks to another: which box of a tensor goes from whom to whom.

A layout is a mesh of ranks, and for each of its dimensions what the ranks along it have of a tensor: parts of one of
its dimensions, copies, or terms of a reduction. The words, and the sizes of uneven parts, are those of torch's
DTensor: parts of ceil(n / W), the last ones smaller or empty; a dimension that two dimensions of the mesh divide is
divided by the first of them, and each part by the second.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv._calls import objects
from alltoallv._calls.counts import integer, packed
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

T = TypeVar("T")
Slices = tuple[slice, ...]
Ints = npt.NDArray[np.int64]
Placement = int | str | None
REDUCTIONS = "sum", "avg", "min", "max", "prod"
WIDE = {"float16": "float32", "bfloat16": "float32"}  # what a dtype is added in


class Tools(Protocol[T]):
    """What a plan needs of a framework. Tensors are sliced, reshaped and assigned to as NumPy's arrays."""

    def concatenated(self, parts: Sequence[T]) -> T:
        """Returns flat tensors in one; there is at least one."""

    def new(self, shape: Sequence[int], dtype: str, zero: bool) -> T:
        """Returns a tensor, of zeros where it is asked for."""

    def exchange(
        self, x: T, sends: list[int], sdispls: list[int], recvs: list[int], later: bool
    ) -> tuple[T, Callable[[], Any]]:
        """Does the all_to_all_v of elements, or begins it; returns the packed output, and what waits for it."""

    def reduced(self, parts: Sequence[T], op: str) -> T:
        """Adds, or combines otherwise, in the order of ``parts``; 16-bit floats in float32, rounded once."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of a tensor are.

    Attributes:
        mesh: Ranks of the group, each at most once.
        placements: For each dimension of the mesh the dimension of the tensor that it divides, None for copies, or
            the reduction of whose terms every rank has one.
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
        for each in self.placements:
            if isinstance(each, int) and not -len(shape) <= each < len(shape):
                raise InvalidParamError(f"{name} divides dimension {each}, expected one of shape {list(shape)}")
        named = (each % len(shape) if isinstance(each, int) else each for each in self.placements)
        return replace(self, placements=tuple(named))


def read_layout(name: str, value: Any, size: int) -> Layout:
    """Returns the layout that the argument ``name`` describes: ``(mesh, placements)``."""
    if isinstance(value, Layout):
        return value
    try:
        mesh_given, placements_given = value
        mesh = np.asarray(mesh_given)
        placements = tuple(placements_given)
    except (TypeError, ValueError):
        raise InvalidParamError(f"{name} is {value!r}, expected a pair of a mesh of ranks and placements") from None
    if mesh.dtype.kind not in "iu" or not mesh.ndim or not mesh.size:
        raise InvalidParamError(f"{name} has the mesh {mesh_given!r}, expected ranks in at least one dimension")
    if len(np.unique(mesh)) < mesh.size or mesh.min() < 0 or mesh.max() >= size:
        raise InvalidParamError(
            f"{name} has the mesh {mesh.tolist()}, expected ranks 0 to {size - 1}, each at most once"
        )
    if len(placements) != mesh.ndim:
        raise InvalidParamError(
            f"{name} has {len(placements)} placements, expected {mesh.ndim}, one per mesh dimension"
        )
    return Layout(np.ascontiguousarray(mesh, np.int64), tuple(_placement(name, each) for each in placements))


def _placement(name: str, value: Any) -> Placement:
    if value is None or (isinstance(value, str) and value in REDUCTIONS):
        return value
    number = integer(value)
    if number is None:
        expected = f"a dimension to divide, None for copies, or one of {', '.join(REDUCTIONS)} for terms"
        raise InvalidParamError(f"{name} has the placement {value!r}, expected {expected}")
    return number


@dataclass(frozen=True)
class Boxes:
    """The part of every rank of a mesh, in the order of the mesh: ``[begins, ends)`` in each dimension."""

    ranks: Ints
    begins: Ints
    ends: Ints
    coordinates: Ints  # [dimension of the mesh, rank]

    def index(self, rank: int) -> int | None:
        """Returns the place of a rank; None if it is not in the mesh."""
        found = np.flatnonzero(self.ranks == rank)
        return int(found[0]) if len(found) else None

    def shape(self, rank: int) -> tuple[int, ...] | None:
        """Returns the shape of a rank's part; None if it has none."""
        i = self.index(rank)
        return None if i is None else tuple((self.ends[i] - self.begins[i]).tolist())

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Returns the shape of every rank's part."""
        return dict(zip(self.ranks.tolist(), map(tuple, (self.ends - self.begins).tolist()), strict=True))

    def equal(self, other: Boxes) -> bool:
        """Returns whether every rank has the same part in both."""
        orders = np.argsort(self.ranks), np.argsort(other.ranks)
        pairs = zip((self.ranks, self.begins, self.ends), (other.ranks, other.begins, other.ends), strict=True)
        return all(np.array_equal(a[orders[0]], b[orders[1]]) for a, b in pairs)

    def slices(self, i: int, begin: Ints, end: Ints) -> Slices:
        """Returns a box as a part of that of the rank at place ``i``."""
        return tuple(slice(a, b) for a, b in zip(*((x - self.begins[i]).tolist() for x in (begin, end)), strict=True))


def boxes(layout: Layout, shape: Sequence[int]) -> Boxes:
    """Returns what every rank has of a tensor of that shape, or terms of."""
    coordinates = np.indices(layout.mesh.shape).reshape(layout.mesh.ndim, -1)
    begins = np.zeros((layout.mesh.size, len(shape)), np.int64)
    ends = np.tile(np.asarray(shape, np.int64), (layout.mesh.size, 1))
    for along, number, dim in zip(coordinates, layout.mesh.shape, layout.placements, strict=True):
        if isinstance(dim, int):
            first, length = begins[:, dim].copy(), ends[:, dim] - begins[:, dim]
            part = -(-length // number)
            begins[:, dim] = first + np.minimum(part * along, length)
            ends[:, dim] = first + np.minimum(part * (along + 1), length)
    return Boxes(layout.mesh.reshape(-1), begins, ends, coordinates)


@dataclass
class Move:
    """One exchange, as one rank takes part in it. Boxes lie in the rank's own part of the tensor.

    Attributes:
        sends, recvs: The box for, and from, each of some other ranks, by rank.
        kept: The box of this rank's own, in its source and in its target, if any.
        op: The reduction of what comes, which has the target's shape, in the order ``terms`` of ranks; or "".
        shape_in, shape_out: Of the rank's source and target, None where it has none.
        share: Of a transposed move, whose boxes may overlap and are added: what the sums are divided by; else 0.
    """

    sends: dict[int, Slices]
    recvs: dict[int, Slices]
    kept: tuple[Slices, Slices] | None
    shape_in: tuple[int, ...] | None
    shape_out: tuple[int, ...] | None
    op: str = ""
    terms: Sequence[int] = ()
    share: int = 0

    def transposed(self) -> Move:
        """Returns the move of gradients: what was sent from comes back, and all that comes is added.

        Raises:
            InvalidParamError: it reduces by what is not linear.
        """
        if self.op not in ("", "sum", "avg"):
            raise InvalidParamError(f"source has terms of {self.op!r} for what wants a gradient, expected sum or avg")
        kept = None if self.kept is None else self.kept[::-1]
        share = self.share or (len(self.terms) if self.op == "avg" else 1)
        return Move(self.recvs, dict(sorted(self.sends.items())), kept, self.shape_out, self.shape_in, share=share)


def _numel(box: Slices) -> int:
    return math.prod(each.stop - each.start for each in box)


def _offset(box: Slices, shape: Sequence[int]) -> int | None:
    """Returns where a box begins in a flat tensor; None if it is not in one piece."""
    inside, offset = False, 0
    for each, n in zip(box, shape, strict=True):
        if inside and (each.start, each.stop) != (0, n):
            return None
        inside |= each.stop - each.start > 1
        offset = offset * n + each.start
    return offset


def movement(source: Boxes, target: Boxes, rank: int, takes: Callable[[int], bool] = lambda index: True) -> Move:
    """Returns the move of every byte that a rank of ``target`` lacks, once, from one of the ranks that have it.

    Copies serve in turn. ``takes``: whether the rank at a place of ``target`` gets values.
    """
    both = np.concatenate([source.begins, source.ends], 1)
    distinct, which = np.unique(both, axis=0, return_inverse=True)
    which = which.reshape(-1)
    by_box = source.ranks[np.argsort(which, kind="stable")]
    copies = np.split(by_box, np.cumsum(np.bincount(which, minlength=len(distinct)))[:-1])
    dims = source.begins.shape[1]
    mine, wanted = source.index(rank), target.index(rank)
    sends: dict[int, Slices] = {}
    recvs: dict[int, Slices] = {}
    kept = None
    if mine is not None:
        of_box = copies[which[mine]]
        begin, end = np.maximum(target.begins, source.begins[mine]), np.minimum(target.ends, source.ends[mine])
        for index in np.flatnonzero((begin < end).all(1)):
            other = int(target.ranks[index])
            if takes(int(index)) and _server(of_box, int(index), other) == rank and other != rank:
                sends[other] = source.slices(mine, begin[index], end[index])
    if wanted is not None and takes(wanted):
        begin = np.maximum(distinct[:, :dims], target.begins[wanted])
        end = np.minimum(distinct[:, dims:], target.ends[wanted])
        for each in np.flatnonzero((begin < end).all(1)):
            server = _server(copies[each], wanted, rank)
            box = target.slices(wanted, begin[each], end[each])
            if server != rank:
                recvs[server] = box
            elif mine is not None:
                kept = source.slices(mine, begin[each], end[each]), box
    return Move(sends, dict(sorted(recvs.items())), kept, source.shape(rank), target.shape(rank))


def _server(copies: Ints, index: int, rank: int) -> int:
    """Returns who of the ranks that have a box serves the rank at place ``index``: itself, if it can."""
    return rank if rank in copies else int(copies[index % len(copies)])


def summation(layout: Layout, divided: Layout, shape: Sequence[int], rank: int) -> Move:
    """Returns the move after which parts of the terms' reduction have the places that ``divided`` gives them."""
    terms, parts = boxes(layout, shape), boxes(divided, shape)
    op = next(each for each in layout.placements if isinstance(each, str))
    i = terms.index(rank)
    if i is None:
        return Move({}, {}, None, None, None, op)
    same = [along == along[i] for along, each in zip(terms.coordinates, layout.placements, strict=True) if each != op]
    others = np.flatnonzero(np.logical_and.reduce([np.ones(len(terms.ranks), bool), *same]))
    shape_out = parts.shape(rank)
    assert shape_out is not None
    whole = tuple(slice(0, n) for n in shape_out)
    sends = {int(terms.ranks[j]): terms.slices(i, parts.begins[j], parts.ends[j]) for j in others if j != i}
    kept = terms.slices(i, parts.begins[i], parts.ends[i]), whole
    ranks = [int(terms.ranks[j]) for j in others]
    recvs = {j: whole for j in sorted(ranks) if j != rank}
    return Move(dict(sorted(sends.items())), recvs, kept, terms.shape(rank), shape_out, op, ranks)


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

    In both the mesh has its dimensions with terms last, so that parts of every rank's own box are divided.
    """
    alike = source.mesh.shape == target.mesh.shape and bool((source.mesh == target.mesh).all())
    goals = [
        goal if alike and isinstance(goal, int) else longest
        for goal in (target.placements if alike else source.placements)
    ]
    order = sorted(range(source.mesh.ndim), key=lambda along: isinstance(source.placements[along], str))
    mesh, placed = np.ascontiguousarray(source.mesh.transpose(order)), [source.placements[along] for along in order]
    parts = [goals[along] if isinstance(source.placements[along], str) else source.placements[along] for along in order]
    return Layout(mesh, tuple(placed)), Layout(mesh, tuple(parts))


def begin_together(
    steps: Sequence[Move], inputs: Sequence[Any], size: int, dtype: str, tools: Tools[Any], later: bool
) -> Callable[[], list[Any]]:
    """Runs, or begins, the moves of several tensors of one dtype in one exchange.

    Returns what waits for them and returns a target for each, or None.
    """
    single = len(steps) == 1
    ranks = range(size)
    sends = [[_numel(step.sends[j]) if j in step.sends else 0 for j in ranks] for step in steps]
    recvs = [[_numel(step.recvs[j]) if j in step.recvs else 0 for j in ranks] for step in steps]
    x, sdispls = _as_it_lies(steps[0], inputs[0], size) if single else None, None
    if x is not None:
        x, sdispls = x
    else:
        parts = [inputs[i][step.sends[j]].reshape(-1) for j in ranks for i, step in enumerate(steps) if j in step.sends]
        x = tools.concatenated(parts) if parts else tools.new((0,), dtype, False)
    totals = [sum(column) for column in zip(*sends, strict=True)], [sum(column) for column in zip(*recvs, strict=True)]
    places = packed(totals[0]) if sdispls is None else sdispls
    came, wait = tools.exchange(x, totals[0], places, totals[1], later)

    def finish() -> list[Any]:
        wait()
        results, begins = [], packed(totals[1])
        for step, source, counts in zip(steps, inputs, recvs, strict=True):
            arrived = {}
            for j in step.recvs:
                arrived[j] = came[begins[j] : begins[j] + counts[j]]
                begins[j] += counts[j]
            results.append(_assembled(step, source, arrived, came if single else None, dtype, tools))
        return results

    return finish


def _as_it_lies(step: Move, source: Any, size: int) -> tuple[Any, list[int]] | None:
    """Returns a source that is sent without a copy and where each rank's part begins; None if it cannot be."""
    if source is None or step.shape_in is None:
        return None
    offsets = {j: _offset(box, step.shape_in) for j, box in step.sends.items()}
    if None in offsets.values():
        return None
    return source.reshape(-1), [offsets.get(j) or 0 for j in range(size)]


def _assembled(step: Move, source: Any, arrived: dict[int, Any], alone: Any, dtype: str, tools: Tools[Any]) -> Any:
    """Returns a rank's target from what has come; ``alone``: all that has come, where it is of this tensor only."""
    if step.shape_out is None:
        return None
    if step.share:
        return _added(step, source, arrived, dtype, tools)
    if step.op:
        assert step.kept is not None
        own = source[step.kept[0]]
        return tools.reduced([arrived[j].reshape(step.shape_out) if j in arrived else own for j in step.terms], step.op)
    boxes_ = list(step.recvs.values())
    offsets = [_offset(box, step.shape_out) for box in boxes_]
    in_order = packed([_numel(box) for box in boxes_]) == offsets
    covered = sum(map(_numel, boxes_)) + (_numel(step.kept[1]) if step.kept else 0) == math.prod(step.shape_out)
    if alone is not None and step.kept is None and in_order and covered:
        return alone.reshape(step.shape_out)
    out = tools.new(step.shape_out, dtype, not covered)
    if step.kept is not None:
        out[step.kept[1]] = source[step.kept[0]]
    for j, box in step.recvs.items():
        out[box] = arrived[j].reshape([each.stop - each.start for each in box])
    return out


def _added(step: Move, source: Any, arrived: dict[int, Any], dtype: str, tools: Tools[Any]) -> Any:
    """Returns the gradient of a rank's source; 16-bit floats are added in float32."""
    total = tools.new(step.shape_out or (), WIDE.get(dtype, dtype), True)
    if step.kept is not None:
        total[step.kept[1]] += source[step.kept[0]]
    for j, box in step.recvs.items():
        total[box] += arrived[j].reshape(tuple(total[box].shape))
    if step.share > 1:
        total /= step.share
    if dtype not in WIDE:
        return total
    out = tools.new(step.shape_out or (), dtype, False)
    out[...] = total
    return out


class Described(NamedTuple):
    """What a rank says of its part of one tensor before the first exchange."""

    name: str
    source: Layout
    target: Layout
    shape: tuple[int, ...] | None  # of the whole tensor
    part: tuple[int, ...] | None  # of this rank's source
    dtype: str | None
    wants_gradient: bool = False


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
    name, (keys, texts, shapes, parts, dtypes, gradients) = mine.name, zip(*told, strict=True)
    for rank, key in enumerate(keys):
        if key != keys[0]:
            raise PeerMismatchError(f"{name}: rank 0 has {texts[0]}, rank {rank} has {texts[rank]}")
    shape, dtype = _equal(name, "the whole shape", shapes), _equal(name, "dtype", dtypes)
    if dtype is None:
        raise InvalidParamError(f"{name}: no rank has a part, expected all ranks of the source's mesh to give theirs")
    if "avg" in mine.source.placements and not dtype.startswith(("float", "bfloat", "complex")):
        raise InvalidParamError(f"{name} has dtype {dtype}, expected one of fractions for terms of an average")
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
    divided = source.on(first, "source").placements
    shape = list(first)
    for dim in range(len(first)):
        along = tuple(slice(None) if each == dim else 0 for each in divided)
        shape[dim] = sum(parts[int(rank)][dim] for rank in np.asarray(source.mesh[along]).flat)
    return tuple(shape)


class Resharding(Generic[T]):
    """Runs the moves of one or several tensors; the plans of all front ends."""

    def __init__(self, comm: Communicator, mine: Sequence[Described]) -> None:
        self.terms = agreed(comm, mine)
        self.steps = [
            moves(shape, each.source, each.target, comm.rank)
            for each, (shape, *_) in zip(mine, self.terms, strict=True)
        ]
        self._mine, self._size = list(mine), comm.size

    @property
    def elements_sent(self) -> int:
        """Returns how many elements this rank sends to others."""
        return sum(_numel(box) for steps in self.steps for step in steps for box in step.sends.values())

    @property
    def elements_received(self) -> int:
        """Returns how many elements this rank gets from others."""
        return sum(_numel(box) for steps in self.steps for step in steps for box in step.recvs.values())

    def transposed(self) -> Resharding[T]:
        """Returns what moves gradients of the targets back.

        Raises:
            InvalidParamError: it reduces by what is not linear.
        """
        back = copy.copy(self)
        back.steps = [[step.transposed() for step in reversed(steps)] for steps in self.steps]
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

    def begin(self, inputs: Sequence[Any], tools: Tools[Any], later: bool = False) -> Callable[[], list[Any]]:
        """Runs, or begins, one exchange per dtype; returns what returns every tensor's target.

        Terms are added before, by one more exchange: then that is what begins.
        """
        results = list(inputs)
        begun = self._step(0, results, tools, later)

        def finish() -> list[Any]:
            for each in begun:
                each()
            for number in range(1, max((len(steps) for steps in self.steps), default=0)):
                for each in self._step(number, results, tools, False):
                    each()
            return results

        return finish

    def _step(self, number: int, results: list[Any], tools: Tools[Any], later: bool) -> list[Callable[[], None]]:
        """Begins the exchanges of one step; returns what puts their results where their inputs are."""
        begun: list[Callable[[], None]] = []
        for dtype in sorted({dtype for _, dtype, _ in self.terms}):
            chosen = [i for i, each in enumerate(self.steps) if self.terms[i][1] == dtype and len(each) > number]
            if not chosen:
                continue
            moved = [self.steps[i][number] for i in chosen], [results[i] for i in chosen]
            finish = begin_together(*moved, self._size, dtype, tools, later)

            def put(chosen: list[int] = chosen, finish: Callable[[], list[Any]] = finish) -> None:
                for i, result in zip(chosen, finish(), strict=True):
                    results[i] = result

            begun.append(put)
        return begun
