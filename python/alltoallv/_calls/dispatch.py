"""Moves rows to their experts and back, as `alltoallv._calls.routing` says, for the tensors of every front end."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv._calls import headers, objects
from alltoallv._calls.counts import packed
from alltoallv._calls.dispatching import OPERATOR
from alltoallv._calls.guard import guard
from alltoallv._calls.headers import Bytes, Headers
from alltoallv._calls.pieces import Piece, follow, following, places
from alltoallv._calls.routing import Arrival, Numbers, Routing, Sending, row_terms
from alltoallv.communicator import Communicator
from alltoallv.errors import AllToAllVError, PeerMismatchError

T = TypeVar("T", bound=Any)  # a matrix of the front end, or a vector of indices
Received = Callable[[], tuple[T, list[int]]]  # waits for rows of bytes; returns them, and how many came from each rank


@dataclass(eq=False)
class Arrived(Generic[T]):
    """Holds what has arrived: rows ``[rows, d]`` and weights ``[rows]``, or codes and their scales."""

    rows: T
    weights: T | None
    scales: T | None
    sending: Sending
    headers: Headers
    token: Numbers  # of every pair, on the rank that it came from
    arrival: Arrival


class RowMover(ABC, Generic[T]):
    """Moves rows of a front end's tensors: matrices, whose rows travel as bytes. Subclasses know the tensors."""

    def __init__(self, comm: Any, apart: bool, beside: object = None) -> None:
        self.comm, self.apart = comm, apart  # apart: peers are on other hosts, so that tokens follow their headers
        self._beside = beside  # what else all ranks agree on that collect

    @abstractmethod
    def room(self, rows: int, columns: int, dtype: Any) -> T:
        """Returns an uninitialized matrix."""

    @abstractmethod
    def as_bytes(self, rows: T) -> T:
        """Returns contiguous rows as rows of bytes."""

    @abstractmethod
    def as_values(self, rows: T, dtype: Any) -> T:
        """Returns rows of bytes as rows of values."""

    @abstractmethod
    def on_device(self, numbers: npt.NDArray[Any]) -> T:
        """Returns indices or bytes where the rows are."""

    @abstractmethod
    def on_host(self, rows: T) -> Bytes:
        """Returns rows of bytes in host memory."""

    @abstractmethod
    def floats(self, weights: T) -> npt.NDArray[Any]:
        """Returns weights in host memory as numbers that can be compared."""

    @abstractmethod
    def gather(self, rows: T, source: T, out: T, where: T | None = None) -> None:
        """Sets row i of ``out``, or row ``where[i]``, to row ``source[i]``, or to zeros if that is -1."""

    @abstractmethod
    def fuses(self, rows: T, gates: T | None) -> bool:
        """Returns whether `encode` can multiply these rows by these gates."""

    @abstractmethod
    def weighed(self, rows: T, source: T, gates: T | None) -> T:
        """Returns rows ``source`` times their gates in float32 or the wider dtype, in the dtype of the rows."""

    @abstractmethod
    def code_bytes(self, rows: T, payload: str) -> int:
        """Returns the bytes of a row as a scale and codes; raises InvalidTensorError if its dtype has none."""

    @abstractmethod
    def encode(self, rows: T, payload: str, out: T, source: T | None = None, gates: T | None = None) -> None:
        """Sets row i of ``out`` to the scale and codes of row i, or of row ``source[i]`` times its gate."""

    @abstractmethod
    def decode(self, coded: T, payload: str | None, source: T, out: T, where: T | None) -> None:
        """Does what `gather` does with the values of the rows."""

    @abstractmethod
    def split(self, coded: T, length: int) -> tuple[T, T]:
        """Returns the codes of 8 bits and the float32 scales of rows that `encode` made, as rows of bytes."""

    @abstractmethod
    def add(self, coded: T, payload: str | None, places: T, out: T) -> None:
        """Sets row t of ``out`` to the sum of rows ``places[t]``, in float32 or wider, rounded once; -1 adds zeros."""

    @abstractmethod
    def exchange(self, buffer: T, sends: list[int], recvs: list[int] | None, terms: int, begins: bool) -> Received[T]:
        """Sends rows of bytes to ranks with equal terms; without ``recvs``, learns them. ``begins``: in background."""

    def dispatch(
        self, routing: Routing, tokens: T, ids: Numbers, weights: T | None, about: str, begins: bool
    ) -> Callable[[], Arrived[T]]:
        """Sends tokens ``[n, d]`` with choices and weights ``[n, k]`` to their experts; the result receives rows.

        ``about``: what else all ranks agree on.
        """
        with guard(self.comm, OPERATOR):
            routing.check_ids(ids)
            by_weight = self.floats(weights) if weights is not None and routing.weighs else None
            sending = routing.send(ids, by_weight, self.comm.size, about)
            tags = sending.tags.view(np.uint8)
            columns = [tags] if weights is None else [tags, self._column(weights)[sending.order]]
            rows = _Coded(self, tokens, routing.payload)
            terms = row_terms(tokens.dtype, tokens.shape[1], sending.about)
        # As text: a capacity of 1, rows, is not one of 1.0, a factor.
        told = {"tokens of": about} | {name: repr(value) for name, value in asdict(routing).items()}
        with naming(self.comm, told):
            going = _Going(self, rows, sending.order, sending.sends, ids.shape, columns, terms, begins)

        def finish() -> Arrived[T]:
            with naming(self.comm, told):
                parsed = going.parse()
            experts, token = np.ascontiguousarray(parsed.columns[0].view(np.int32).T, np.int64)
            arrival = routing.receive(experts, self.comm.size, self.comm.rank)
            count, length = len(arrival.source), tokens.shape[1]
            out = self.room(count, length, routing.code_dtype or tokens.dtype)
            scales = self.room(count, 1, "float32") if routing.codes else None
            for values, index, where in going.arrivals(parsed, token, arrival.source):
                if scales is None:
                    self.decode(values, routing.payload, index, out, where)
                    continue
                codes, each = self.split(values, length)
                self.gather(each, index, self.as_bytes(scales), where)
                self.gather(codes, index, self.as_bytes(out), where)
            made = None if weights is None else self._weights(parsed.columns[1], weights, arrival.source)
            return Arrived(out, made, None if scales is None else scales.reshape(-1), sending, parsed, token, arrival)

        return finish

    def spread(
        self, tokens: T, weights: T | None, order: Numbers, source: Numbers, token: Numbers, sends: list[int], k: int
    ) -> tuple[T, T | None]:
        """Sends tokens ``[n, d]`` and weights ``[n, k]`` along a known route; returns rows and weights ``[rows]``.

        The rows travel as values, never as codes.
        """
        with guard(self.comm, OPERATOR):
            columns = [] if weights is None else [self._column(weights)[order]]
            rows = _Coded(self, tokens, None)
            terms = row_terms(tokens.dtype, tokens.shape[1], None if weights is None else weights.dtype)
        going = _Going(self, rows, order, sends, (len(tokens), k), columns, terms, False)
        parsed, out = going.parse(), self.room(len(source), tokens.shape[1], tokens.dtype)
        for values, index, where in going.arrivals(parsed, token, source):
            self.decode(values, None, index, out, where)
        return out, None if weights is None else self._weights(parsed.columns[0], weights, source)

    def collect(
        self, way: Sequence[Piece], rows: T, weights: T | None, gates: T | None, payload: str | None, begins: bool
    ) -> Callable[[], tuple[T, T | None]]:
        """Brings rows ``[r, d]`` back in pieces, and sums them over each token's choices, in their order: ``[n, d]``.

        Weights ``[r]`` come back as ``[n, k]``. ``gates`` ``[r]`` multiply the rows before they travel.
        """
        terms = row_terms(rows.dtype, rows.shape[1], payload, None if weights is None else weights.dtype, self._beside)

        def send(piece: Piece) -> Callable[[], tuple[T, T | None]]:
            with guard(self.comm, OPERATOR):
                source = self.on_device(piece.rows)
                parts: list[tuple[T, T | None]] = [(self._chosen(rows, payload, source, gates), None)]
                if weights is not None:
                    parts.append((self.as_bytes(weights.reshape(-1, 1)), source))
                buffer, columns = self.side_by_side(parts)
            exchange = self.exchange(buffer, piece.sends, piece.recvs, terms, begins)

            def received() -> tuple[T, T | None]:
                came, _ = exchange()
                others = None if weights is None else self.as_values(came[:, columns[1]], weights.dtype)
                return came[:, columns[0]], others

            return received

        sent = [send(piece) for piece in way] if begins else None

        def finish() -> tuple[T, T | None]:
            tokens, k = way[-1].tokens.stop, way[0].places.shape[1]
            total = self.room(tokens, rows.shape[1], rows.dtype)
            flat = None if weights is None else self.room(tokens, k, weights.dtype)
            for number, piece in enumerate(way):
                values, others = sent[number]() if sent else send(piece)()
                places = self.on_device(piece.places)
                self.add(values, payload, places, total[piece.tokens])
                if flat is not None and others is not None:
                    flat[piece.tokens] = self.placed(others, places.reshape(-1)).reshape(-1, k)
            return total, flat

        return finish

    def placed(self, rows: T, source: T) -> T:
        """Returns a matrix whose row i is row ``source[i]``, or zeros where that is -1."""
        result = self.room(len(source), rows.shape[1], rows.dtype)
        self.gather(rows, source, result)
        return result

    def side_by_side(self, parts: Sequence[tuple[T, T | None]]) -> tuple[T, list[slice]]:
        """Copies rows of bytes, or chosen ones, of all parts into one buffer; returns it with the parts' columns."""
        columns, begin = [], 0
        for part, _ in parts:
            columns.append(slice(begin, begin + part.shape[1]))
            begin += headers.row_bytes(part.shape[1])
        first, index = parts[0]
        if index is None and len(parts) == 1 and first.shape[1] == begin:
            return first, columns
        buffer = self.room(len(first if index is None else index), begin, "uint8")
        for (part, index), place in zip(parts, columns, strict=True):
            if index is None:
                buffer[:, place] = part
            else:
                self.gather(part, index, buffer[:, place])
        return buffer, columns

    def _chosen(self, rows: T, payload: str | None, source: T, gates: T | None) -> T:
        """Returns rows ``source`` times their gates as rows of bytes."""
        if payload is None:
            return self.as_bytes(self.weighed(rows, source, gates))
        width = self.code_bytes(rows, payload)
        out = self.room(len(source), width, "uint8")
        if self.fuses(rows, gates):
            self.encode(rows, payload, out, source, gates)
        else:
            self.encode(self.weighed(rows, source, gates), payload, out)
        return out

    def _column(self, weights: T) -> Bytes:
        """Returns the weights of all pairs as a column of headers."""
        return self.on_host(self.as_bytes(weights.reshape(-1, 1)))

    def _weights(self, column: Bytes, like: T, source: Numbers) -> T:
        """Returns the weight of every row of the experts."""
        weights = self.as_values(self.on_device(column), like.dtype)
        made: T = self.placed(weights, self.on_device(source)).reshape(-1)
        return made


@contextlib.contextmanager
def naming(comm: Any, told: Mapping[str, str]) -> Iterator[None]:
    """Names what differs of what all ranks tell of a call, where the core has found on all of them that terms do."""
    try:
        yield
    except PeerMismatchError as error:
        if not isinstance(comm, Communicator) or comm.host_core is None or "or options" not in str(error):
            raise
        every = list[dict[str, str]]()
        with contextlib.suppress(AllToAllVError):  # a rank is elsewhere
            every = objects.all_gather(comm, dict(told))(-1.0)
        for rank, name in ((rank, name) for rank, options in enumerate(every) for name in options):
            if every[rank][name] != every[0][name]:
                text = f"rank 0 has {name} {every[0][name]}, rank {rank} has {name} {every[rank][name]}"
                raise PeerMismatchError(f"{str(error).partition(': ')[0]}: {text}") from None
        raise


class _Coded(Generic[T]):
    """This rank's tokens as rows of bytes, coded as far as they are needed."""

    def __init__(self, mover: RowMover[T], tokens: T, payload: str | None) -> None:
        self._mover, self._tokens, self._payload, self._done = mover, tokens, payload, 0
        if payload is None:
            self.rows = mover.as_bytes(tokens)
        else:
            self.rows = mover.room(len(tokens), mover.code_bytes(tokens, payload), "uint8")

    def until(self, end: int) -> T:
        """Returns rows of bytes, of which those before ``end`` are valid."""
        new = slice(self._done, end)
        if self._payload is not None and end > self._done:
            self._mover.encode(self._tokens[new], self._payload, self.rows[new])
            self._done = end
        return self.rows


class _Going(Generic[T]):
    """Tokens under way as rows of bytes, each once to every rank that has an expert of it.

    They stand behind headers of their pairs, or follow them in pieces, while the next ones are coded. Then this rank's
    own do not travel.
    """

    def __init__(
        self,
        mover: RowMover[T],
        coded: _Coded[T],
        order: Numbers,
        sends: list[int],
        shape: tuple[int, ...],
        columns: list[Bytes],
        terms: int,
        begins: bool,
    ) -> None:
        self._mover, self._coded, self._comm = mover, coded, mover.comm
        self._widths, self._terms = [column.shape[1] for column in columns], terms
        (tokens, k), self._width = shape, coded.rows.shape[1]
        with guard(self._comm, OPERATOR):
            self._stride = headers.row_bytes(self._width)
            self._which = headers.distinct(order // k, sends)
            made = headers.encode(columns, sends, (terms, tokens, k), self._stride)
            now = self._which
            if follow(mover.apart, tokens, self._stride):
                now = [these[:0] for these in now]
            else:
                coded.until(tokens)
            buffer, counts = self._behind(made, now)
        self._exchange = cache(mover.exchange(buffer, counts, None, terms, begins))

    def _behind(self, made: Sequence[Bytes], which: Sequence[Numbers]) -> tuple[T, list[int]]:
        """Returns, for every rank, its header and then its rows, in one buffer, and how many rows these are."""
        counts = [len(header) + len(these) for header, these in zip(made, which, strict=True)]
        buffer = self._mover.room(sum(counts), self._stride, "uint8")
        for header, these, begin in zip(made, which, packed(counts), strict=True):
            end = begin + len(header)
            if len(header):
                buffer[begin:end] = self._mover.on_device(header)
            place = buffer[end : end + len(these), : self._width]
            self._mover.gather(self._coded.rows, self._mover.on_device(these), place)
        return buffer, counts

    def parse(self) -> Headers:
        """Returns what the headers say that arrive."""
        received, recvs = self._exchange()

        def fetch(which: Numbers) -> Bytes:
            return self._mover.on_host(received[self._mover.on_device(which)])

        with guard(self._comm, OPERATOR):
            return headers.decode(fetch, recvs, self._widths, self._terms, self._comm.rank)

    def arrivals(self, parsed: Headers, token: Numbers, source: Numbers) -> Iterator[tuple[T, T, T | None]]:
        """Yields rows of bytes, the index of one for each of the experts' rows ``where``, and ``where``.

        -1 stands for zeros, and None for all rows of the experts in their order.
        """
        place, rank = self._mover.on_device, self._comm.rank
        received = self._exchange()[0][:, : self._width]
        late = [follow(self._mover.apart, tokens, self._stride) for tokens in parsed.tokens]
        index = headers.lines(parsed, token)
        if not any(late):
            yield received, place(np.append(index, -1)[source]), None
            return
        begun = [
            (self._begin(piece.until, piece.going, piece.recvs), piece)
            for piece in following(parsed, token, self._which, late, rank, self._stride)
        ]
        there = places(source, len(token))
        pairs = np.append(np.repeat(late, parsed.pairs), False)
        now = np.flatnonzero(~pairs[source])
        yield received, place(np.append(index, -1)[source[now]]), place(now)
        if late[rank]:
            own = slice(packed(parsed.pairs)[rank], packed(parsed.pairs)[rank] + parsed.pairs[rank])
            yield self._coded.rows, place(token[own]), place(there[own])
        for exchange, piece in begun:
            yield exchange()[0][:, : self._width], place(piece.rows), place(there[piece.pairs])

    def _begin(self, until: int, which: list[Numbers], recvs: list[int]) -> Received[T]:
        with guard(self._comm, OPERATOR):
            self._coded.until(until)
            buffer, sends = self._behind([np.zeros((0, self._stride), np.uint8)] * len(which), which)
        return self._mover.exchange(buffer, sends, recvs, self._terms, True)
