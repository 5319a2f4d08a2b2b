"""Moves tensors from one layout over the ranks to another, in exchanges that are prepared once."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from alltoallv import _core
from alltoallv._calls import messages
from alltoallv._calls.adapters import check_untracked
from alltoallv._calls.counts import packed
from alltoallv._calls.exchanges import contiguous
from alltoallv._calls.guard import guard
from alltoallv._calls.layouts import Layout, Move, Slices, boxes, division, moves, numel
from alltoallv.communicator import Communicator
from alltoallv.dtypes import item_size
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

T = TypeVar("T")
Pieces = list[tuple[Slices, Any]]  # tensors, and where each lies in one
WIDE = {"float16": "float32", "bfloat16": "float32"}  # what a dtype is added in
TOGETHER = 64 << 20  # bytes that a rank packs for one exchange, and of whole tensors that one moves together


class Tools(Protocol[T]):
    """What a plan needs of a framework. Tensors are sliced, reshaped and assigned to as NumPy's arrays."""

    def new(self, shape: Sequence[int], dtype: str, zero: bool) -> T:
        """Returns a tensor, of zeros where it is asked for."""

    def buffer(self, count: int, dtype: str) -> T:
        """Returns a flat tensor for messages, whose memory nobody keeps for longer."""

    def exchange(self, x: T, out: T, placed: Placed, later: bool) -> Callable[[], Any]:
        """Does the exchange of elements of flat tensors, or begins it; returns what waits."""

    def reduced(self, parts: Sequence[T], op: str) -> T:
        """Adds, or combines otherwise, in the order of ``parts``; 16-bit floats in float32, rounded once."""

    def record_bytes(self, coding: Coding, count: int) -> int:
        """Returns the bytes of so many elements as codes and scales."""

    def coded(self, coding: Coding, x: T) -> T:
        """Returns the record, as bytes, of a flat tensor."""

    def decoded(self, coding: Coding, record: T, count: int, dtype: str) -> T:
        """Returns the flat tensor of a record; values that do not fit are the largest finite ones."""


@dataclass
class Placed:
    """Where elements for every rank begin and where the elements from every rank go, as the core's plans take it.

    Attributes:
        steps: The length of rows and the distance between them, of what goes to every rank and of what comes from it;
            of all zeros, it is in one piece. It is empty where tools read no rows.
        plan: The core's plan, which tools that make one leave here for the next call.
    """

    sends: list[int]
    sdispls: list[int]
    recvs: list[int]
    rdispls: list[int]
    steps: list[int]
    plan: Any = None


class Coding(Protocol):
    """A quantized format. Its text is equal for equal ones."""

    @property
    def format(self) -> str: ...

    @property
    def group_size(self) -> int: ...

    @property
    def has_tensor_scale(self) -> bool: ...


@dataclass(frozen=True)
class Form(Generic[T]):
    """How pieces of tensors of one dtype travel: as they are, or each as one record of codes and scales."""

    tools: Tools[T]
    dtype: str
    coding: Coding | None = None

    def size(self, box: Slices) -> int:
        """Returns what a piece is in a message: elements, or bytes of a record."""
        return numel(box) if self.coding is None else self.tools.record_bytes(self.coding, numel(box))

    @property
    def unit(self) -> int:
        """Returns where a piece may be divided: behind so many elements, or 0, nowhere. Codes are the same then."""
        if self.coding is None:
            return 1
        return 0 if self.coding.has_tensor_scale else self.coding.group_size

    def written(self, piece: Any) -> T:
        """Returns what goes into a message."""
        flat: T = piece.reshape(-1)
        return flat if self.coding is None else self.tools.coded(self.coding, flat)

    def read(self, part: T, box: Slices) -> Any:
        """Returns the piece from its part of a message."""
        flat: Any = part if self.coding is None else self.tools.decoded(self.coding, part, numel(box), self.dtype)
        return flat.reshape(_shape(box))

    def kept(self, step: Move, source: Any) -> Pieces:
        """Returns what a rank keeps, with the values that others get of it."""
        pieces = [(each, source[each.source]) for each in step.kept]
        rounds = self.coding is not None
        return [
            (each.target, self.read(self.written(piece), each.source) if rounds and each.travels else piece)
            for each, piece in pieces
        ]


class Exchange:
    """One exchange, by which the moves of several tensors of one dtype are done; prepared once, for many calls.

    Args:
        in_rows: Whether tools read and write parts that lie in rows with gaps between them, alike on all ranks.
    """

    def __init__(self, steps: Sequence[Move], size: int, form: Form[Any], in_rows: bool) -> None:
        self._steps, (first, *more) = steps, steps
        self._dtype = form.dtype if form.coding is None else "uint8"
        single, in_rows = form.coding is None and not more, _moves_rows(first, form, in_rows) and not more
        source = _where(first.sends, first.shape_in, size, in_rows) if single else None
        self._goal = _where(first.recvs, first.shape_out, size, in_rows) if single and _assigns(first) else None
        recvs = [[(i, box) for i, step in enumerate(steps) for box in step.recvs.get(j, ())] for j in range(size)]
        self._recvs = [[(i, box, form.size(box)) for i, box in each] for each in recvs]
        # What several ranks get of the same is packed once.
        self._sends: dict[str, list[tuple[int, Slices, int]]] = {}
        sends, sdispls, self._packed = [], [], 0
        begins: dict[str, tuple[int, int]] = {}
        for j in range(size):
            message = [(i, box) for i, step in enumerate(steps) for box in step.sends.get(j, ())]
            if (name := str(message)) not in begins:
                self._sends[name] = [(i, box, form.size(box)) for i, box in message]
                begins[name] = self._packed, sum(length for *_, length in self._sends[name])
                self._packed += begins[name][1]
            sdispls.append(begins[name][0])
            sends.append(begins[name][1])
        self._in_place = source is not None
        sdispls, rows = source or (sdispls, [0, 0] * size)
        counts = [sum(length for *_, length in each) for each in self._recvs]
        rdispls, more_rows = self._goal or (packed(counts), [0, 0] * size)
        self.placed = Placed(sends, sdispls, counts, rdispls, rows + more_rows if in_rows else [])

    def begin(
        self, inputs: Sequence[Any], outs: Sequence[Any], form: Form[Any], later: bool
    ) -> Callable[[], list[Any]]:
        """Runs the exchange, or begins it.

        Returns what waits for it and returns a target for each tensor, of ``outs`` where that is not None; or None.
        """
        x = inputs[0].reshape(-1) if self._in_place else self._message(inputs, form)
        into = None if self._goal is None else new_target(self._steps[0], outs[0], form)
        came = form.tools.buffer(sum(self.placed.recvs), self._dtype) if into is None else into.reshape(-1)
        wait = form.tools.exchange(x, came, self.placed, later)

        def finish() -> list[Any]:
            wait()
            if into is not None:
                return [_filled(into, form.kept(self._steps[0], inputs[0]))]
            arrived: list[list[list[tuple[Slices, Any]]]] = [[[] for _ in self._recvs] for _ in self._steps]
            begin = 0
            for j, each in enumerate(self._recvs):
                for i, box, length in each:
                    arrived[i][j].append((box, form.read(came[begin : begin + length], box)))
                    begin += length
            return [_assembled(*each, form) for each in zip(self._steps, inputs, outs, arrived, strict=True)]

        return finish

    def _message(self, inputs: Sequence[Any], form: Form[Any]) -> Any:
        """Returns what goes to all ranks, packed; a piece is quantized once for all its receivers."""
        x = form.tools.buffer(self._packed, self._dtype)
        begin = 0
        written: dict[str, Any] = {}
        for message in self._sends.values():
            for i, box, length in message:
                part = x[begin : begin + length]
                if form.coding is None:
                    part.reshape(_shape(box))[...] = inputs[i][box]
                else:
                    name = f"{i} {box}"
                    part[...] = written[name] if name in written else form.written(inputs[i][box])
                    written[name] = part
                begin += length
        return x


def exchanges_of(step: Move, size: int, form: Form[Any], in_rows: bool) -> int:
    """Returns in how many exchanges this rank wants to do a large move, so that it packs up to 64 MiB for each."""
    if step.share:
        return 1  # which gradients come in one exchange says in which order they are added
    places = form.coding is None, _moves_rows(step, form, in_rows)
    sent = received = 0
    if not places[0] or _where(step.sends, step.shape_in, size, places[1]) is None:
        sent = sum(sum(map(numel, each)) for each in {str(each): each for each in step.sends.values()}.values())
    if not (places[0] and _assigns(step)) or _where(step.recvs, step.shape_out, size, places[1]) is None:
        received = sum(map(step.received, step.recvs)) + sum(numel(each.source) for each in step.kept if each.travels)
    return -(-max(sent, received, 1) * item_size(form.dtype) // TOGETHER)


def _assigns(step: Move) -> bool:
    """Returns whether what comes is the target's, and nothing is computed of it."""
    return not (step.op or step.share)


def _moves_rows(step: Move, form: Form[Any], in_rows: bool) -> bool:
    return in_rows and form.coding is None and _assigns(step)


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
            rows = _core.in_rows(_shape(box), strides)
            if rows is None or (any(rows) and not in_rows):
                return None
            displs[j] = sum(each.start * stride for each, stride in zip(box, strides, strict=True))
            steps[2 * j : 2 * j + 2] = rows
    return displs, steps


def new_target(step: Move, out: Any, form: Form[Any]) -> Any:
    """Returns a rank's target before anything has come: ``out``, or a new tensor; None where it has none."""
    if step.shape_out is None or not step.zeroes:
        return out
    shape = step.shape_out
    came = sum(map(step.received, step.recvs)) + sum(numel(each.target) for each in step.kept)
    covered = bool(step.op) or came == math.prod(shape)
    if out is None:
        return form.tools.new(shape, form.dtype, not covered)
    if not covered:
        out[...] = 0
    return out


def _assembled(step: Move, source: Any, out: Any, arrived: Sequence[Pieces], form: Form[Any]) -> Any:
    """Returns a rank's target from what has come of every rank."""
    if step.shape_out is None:
        return None
    own = form.kept(step, source)
    came = [piece for each in arrived for piece in each]
    if step.share:
        return _added(step, own + came, form.dtype, form.tools)
    if step.op:
        terms = [arrived[j] or own for j in step.terms]
        boxes_ = [box for box, _ in terms[0]]
        sums = [
            (box, form.tools.reduced([piece for _, piece in each], step.op))
            for box, *each in zip(boxes_, *terms, strict=True)
        ]
        if out is None and len(sums) == 1 and sums[0][1].shape == step.shape_out:
            return sums[0][1]
        own, came = [], sums
    return _filled(new_target(step, out, form), own + came)


def _shape(box: Slices) -> list[int]:
    return [each.stop - each.start for each in box]


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


def agreed(comm: Communicator, tensors: Sequence[Described]) -> list[tuple[tuple[int, ...], str, bool]]:
    """Compares with the other ranks; returns each tensor's whole shape, dtype and whether a rank wants its gradient.

    Raises:
        PeerMismatchError: layouts, shapes or dtypes differ; the message names the ranks.
        InvalidParamError, InvalidTensorError: a shape is unknown, or a part does not have the shape of its place.
    """
    with guard(comm, "all_gather"):
        terms = [
            ((each.source.key, each.target.key), f"source {each.source}, target {each.target}", *each[3:])
            for each in tensors
        ]
        call = messages.all_gather(comm, pickle.dumps(([each.name for each in tensors], terms)))
    read = functools.lru_cache(None)(pickle.loads)  # most ranks say the same
    names, every = zip(*map(read, call(-1.0)), strict=True)
    for rank, theirs in enumerate(names):
        if theirs != names[0]:
            raise PeerMismatchError(f"reshard: rank 0 has the tensors {names[0]}, rank {rank} has {theirs}", id=3016)
    return [_agreed(each, [theirs[i] for theirs in every]) for i, each in enumerate(tensors)]


def _agreed(own: Described, terms: Sequence[Any]) -> tuple[tuple[int, ...], str, bool]:
    name, (keys, texts, shapes, parts, dtypes, gradients, codings) = own.name, zip(*terms, strict=True)
    for rank, key in enumerate(keys):
        if key != keys[0]:
            raise PeerMismatchError(f"{name}: rank 0 has {texts[0]}, rank {rank} has {texts[rank]}", id=3017)
    shape, dtype = _equal(name, "the whole shape", shapes), _equal(name, "dtype", dtypes)
    _equal(name, "the format", codings)
    if dtype is None:
        raise InvalidParamError(
            f"{name}: no rank has a part, expected all ranks of the source's mesh to give theirs", id=1153
        )
    if "avg" in own.source.placements and not dtype.startswith(("float", "bfloat", "complex")):
        raise InvalidParamError(f"{name} has dtype {dtype}, expected one of fractions for terms of an average", id=1154)
    if own.coding != "none" and travels_coded(dtype) and any(isinstance(each, str) for each in own.source.placements):
        raise InvalidParamError(f"{name} has terms in its source, which have no format, expected format None", id=1155)
    holders = sorted(own.source.ranks)
    gives = set(holders)
    for rank, part in enumerate(parts):
        if (part is None) == (rank in gives):
            has = ("no part", "one") if part is None else ("a part", "None")
            raise InvalidTensorError(
                f"{name}: rank {rank} gives {has[0]}, expected {has[1]}, as the source's mesh says", id=2047
            )
    shape = shape or _whole(name, own.source, parts)
    places = boxes(own.source.on(shape, "source"), shape).shapes()
    for rank in holders:
        if parts[rank] != (expected := places[rank]):
            raise InvalidTensorError(
                f"{name} of rank {rank} has shape {list(parts[rank])}, expected {list(expected)}, "
                f"its part of {list(shape)}",
                id=2048,
            )
    return shape, dtype, _wants_gradient(own, holders, gradients)


def _wants_gradient(own: Described, holders: Sequence[int], gradients: Sequence[bool]) -> bool:
    """Returns whether autograd records the call, on every rank: the gradient is one more exchange of all."""
    for rank in holders:
        if gradients[rank] != gradients[holders[0]]:
            a, b = sorted((rank, holders[0]), key=lambda each: not gradients[each])
            raise PeerMismatchError(f"{own.name}: rank {a} wants a gradient, rank {b} wants none", id=3018)
    return gradients[holders[0]]


def _equal(name: str, what: str, values: Sequence[Any]) -> Any:
    """Returns what all ranks say that say something; None if none does."""
    known_values = [(rank, value) for rank, value in enumerate(values) if value is not None]
    for rank, value in known_values:
        if value != known_values[0][1]:
            raise PeerMismatchError(
                f"{name}: rank {known_values[0][0]} has {what} {known_values[0][1]}, rank {rank} has {value}", id=3019
            )
    return known_values[0][1] if known_values else None


def _whole(name: str, source: Layout, parts: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape of a tensor of whose source these are the parts."""
    first = parts[source.ranks[0]]
    for rank in source.ranks:
        if len(parts[rank]) != len(first):
            raise InvalidTensorError(
                f"{name} of rank {rank} has {len(parts[rank])} dimensions, expected {len(first)}", id=2049
            )
    divided = [division(each) for each in source.on(first, "source").placements]
    shape = list(first)
    for dim in range(len(first)):
        along = tuple(slice(None) if each and each[0] == dim else 0 for each in divided)
        shape[dim] = sum(parts[int(rank)][dim] for rank in np.asarray(source.mesh[along]).flat)
    return tuple(shape)


class Resharding(Generic[T]):
    """Runs the moves of one or several tensors; the plans of all front ends.

    Args:
        in_rows: Whether the front end's tools read and write parts that lie in rows with gaps between them.
    """

    def __init__(
        self, comm: Communicator, parts: Sequence[Described], coding: Coding | None = None, in_rows: bool = True
    ) -> None:
        self.terms = agreed(comm, parts if coding is None else [each._replace(coding=str(coding)) for each in parts])
        self.steps = [
            moves(shape, each.source, each.target, comm.rank)
            for each, (shape, *_) in zip(parts, self.terms, strict=True)
        ]
        self._coding, self._tensors, self._size, self._in_rows = coding, list(parts), comm.size, in_rows
        self._divisions = self._agreed_divisions(comm)
        self._prepared: dict[int, list[Together]] = {}

    def _agreed_divisions(self, comm: Communicator) -> list[list[int]]:
        """Returns in how many exchanges each tensor moves in each step, as many as the rank wants that wants most."""
        divisions = [[1] * len(steps) for steps in self.steps]
        large = [i for i in range(len(self.steps)) if self._nbytes(i) > TOGETHER and self.steps[i]]
        if large:
            for i in large:
                form = self._form(self.terms[i][1], None)
                divisions[i] = [exchanges_of(step, self._size, form, self._in_rows) for step in self.steps[i]]
            with guard(comm, "all_gather"):
                call = messages.all_gather(comm, [divisions[i] for i in large])
            for i, of_ranks in zip(large, zip(*call(-1.0), strict=True), strict=True):
                divisions[i] = [max(each) for each in zip(*of_ranks, strict=True)]
        return divisions

    def _nbytes(self, i: int) -> int:
        """Returns the bytes of a whole tensor."""
        shape, dtype, _ = self.terms[i]
        return math.prod(shape) * item_size(dtype)

    @property
    def elements_sent(self) -> int:
        """Returns how many elements this rank sends to others."""
        return sum(step.sent(j) for steps in self.steps for step in steps for j in step.sends)

    @property
    def elements_received(self) -> int:
        """Returns how many elements this rank gets from others."""
        return sum(step.received(j) for steps in self.steps for step in steps for j in step.recvs)

    def _form(self, dtype: str, tools: Any) -> Form[Any]:
        return Form(tools, dtype, self._coding if travels_coded(dtype) else None)

    def moved_bytes(self, tools: Tools[Any]) -> tuple[int, int]:
        """Returns how many bytes this rank sends to others, and gets from them."""
        sent = received = 0
        for number in range(self._most_steps):
            for each in self._together(number, tools):
                unit = 1 if self._form(each.dtype, tools).coding else item_size(each.dtype)
                sent += unit * sum(sum(exchange.placed.sends) for exchange in each.exchanges)
                received += unit * sum(sum(exchange.placed.recvs) for exchange in each.exchanges)
        return sent, received

    @property
    def _most_steps(self) -> int:
        return max(map(len, self.steps), default=0)

    def transposed(self) -> Resharding[T]:
        """Returns what moves gradients of the targets back.

        Raises:
            InvalidParamError: it reduces by what is not linear.
        """
        back = copy.copy(self)
        back.steps = [[step.transposed() for step in reversed(steps)] for steps in self.steps]
        back._coding, back._prepared = None, {}  # gradients move as they are
        back._divisions = [[1] * len(steps) for steps in self.steps]
        return back

    def alone(self, i: int) -> Resharding[T]:
        """Returns what moves one of the tensors."""
        single = copy.copy(self)
        single.terms, single.steps, single._tensors = [self.terms[i]], [self.steps[i]], [self._tensors[i]]
        single._divisions, single._prepared = [self._divisions[i]], {}
        return single

    def check_gradient(self) -> None:
        """Raises InvalidParamError where a tensor that wants a gradient cannot have one."""
        for each in self._tensors:
            if not all(len(layout.ranks) == self._size for layout in (each.source, each.target)):
                raise InvalidParamError(
                    f"{each.name} wants a gradient, expected all {self._size} ranks in both meshes then", id=1156
                )
        self.transposed()

    def check_outputs(self, outputs: Sequence[tuple[tuple[int, ...], str] | None]) -> None:
        """Raises where the shapes and dtypes of the caller's outputs are not the targets'."""
        for each, output, steps, (_, dtype, wants) in zip(self._tensors, outputs, self.steps, self.terms, strict=True):
            check_untracked(wants, outputs, each.name)
            shape = steps[-1].shape_out if steps else each.part
            if output != (expected := None if shape is None else (shape, dtype)):
                raise InvalidTensorError(
                    f"out for {each.name} has shape and dtype {output}, expected {expected}", id=2050
                )

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
            for number in range(1, self._most_steps):
                for each in self._step(number, results, outs, tools, False):
                    each()
            return [x if steps else _stored(x, out) for x, out, steps in zip(results, outs, self.steps, strict=True)]

        return finish

    def _step(
        self, number: int, results: list[Any], outs: Sequence[Any], tools: Tools[Any], later: bool
    ) -> list[Callable[[], None]]:
        """Runs, or begins, the exchanges of one step; returns what then puts results where their inputs are."""
        begun: list[Callable[[], None]] = []
        for chosen, dtype, exchanges in self._together(number, tools):
            form, inputs = self._form(dtype, tools), [results[i] for i in chosen]
            targets = [outs[i] if len(self.steps[i]) == number + 1 else None for i in chosen]
            if len(exchanges) > 1:
                targets = [new_target(self.steps[i][number], out, form) for i, out in zip(chosen, targets, strict=True)]
            for exchange in exchanges:
                begun.append(partial(_put, results, chosen, exchange.begin(inputs, targets, form, later)))
                if not later:  # nothing keeps what was packed, so that its memory is free for the next
                    begun.pop()()
        return begun

    def _together(self, number: int, tools: Tools[Any]) -> list[Together]:
        """Returns the exchanges of one step, prepared by the first call: which tensors move together, and how.

        An exchange of several tensors needs memory to pack them, one that has its own, often none.
        """
        if (together := self._prepared.get(number)) is not None:
            return together
        together = []
        for dtype in sorted({dtype for _, dtype, _ in self.terms}):
            groups: list[list[int]] = []
            room = -1
            for i in (i for i, each in enumerate(self.steps) if self.terms[i][1] == dtype and len(each) > number):
                if self._nbytes(i) > room:
                    groups.append([])
                    room = TOGETHER
                groups[-1].append(i)
                room -= self._nbytes(i)
            form = self._form(dtype, tools)
            for group in groups:
                steps, parts = [self.steps[i][number] for i in group], self._divisions[group[0]][number]
                divided = [steps] if parts == 1 else [[each] for each in steps[0].parts(parts, form.unit)]
                exchanges = [Exchange(each, self._size, form, self._in_rows) for each in divided]
                together.append(Together(group, dtype, exchanges))
        self._prepared[number] = together
        return together


def _put(results: list[Any], chosen: Sequence[int], finish: Callable[[], list[Any]]) -> None:
    for i, result in zip(chosen, finish(), strict=True):
        results[i] = result


class Together(NamedTuple):
    """Tensors of one dtype that move together, and the exchanges that do it."""

    tensors: list[int]
    dtype: str
    exchanges: list[Exchange]
