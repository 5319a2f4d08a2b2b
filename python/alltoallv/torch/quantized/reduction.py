"""Quantized reductions over an engine that moves bytes, in chunks that overlap.

Two shots: exchange, sum, gather. One shot, where that moves fewer bytes or few bytes: everybody gets everything and
sums it all. While one chunk travels, this rank quantizes the next and sums the one before. On an accelerator there are
two shots, one chunk and one launch of a kernel for each step, in the order of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from alltoallv._calls.counts import packed
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.movers import Mover
from alltoallv.torch.quantized.codecs import Codec, Dynamic, codec_for

PIECES = 4  # chunks of a part, between hosts, as far as the limits allow; docs/quantization.md has what was measured
CHUNKS = (1 << 18, 1 << 20)  # elements of the smallest and the largest chunk
SMALL = 1 << 16  # bytes that a rank receives in one shot without much ado
EVEN = 1 << 19  # bytes that a rank sends to each: up to here one shot of as many bytes as two is faster
AHEAD = 3  # exchanges under way while a chunk is summed

Wait = Callable[[], None]
T = TypeVar("T")


class Wire:
    """Starts a transfer of bytes, and returns what waits for it: over a mover, without overlap.

    That is an accelerator's engine, whose transfers lie in the order of the stream.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def chunk(self, part: int) -> int:
        """How many of a part's elements travel at a time."""
        return part

    def in_one_shot(self, size: int, sent: int, gathered: int) -> bool:
        """Whether all shall go to all, in ``sent`` bytes; the shots of two are as large as that, and ``gathered``."""
        return False

    def exchange(self, output: Tensor, input: Tensor, recvs: Sequence[int], sends: Sequence[int]) -> Wait:
        layout = (list(sends), packed(sends), list(recvs), packed(recvs))
        self._mover.exchange(output.view(-1), input.view(-1), layout)
        return _nothing

    def gather(self, output: Tensor, input: Tensor) -> Wait:
        self._mover.gather(output.view(-1), input.view(-1))
        return _nothing


class HostWire(Wire):
    """Over gloo or MPI, whose works run on threads of their own."""

    def __init__(self, engine: Any, wait: Callable[[Any], None], based: bool) -> None:
        self._engine, self._wait, self._based = engine, wait, based

    def chunk(self, part: int) -> int:
        smallest, largest = CHUNKS
        return min(max(part // PIECES, smallest), largest)

    def in_one_shot(self, size: int, sent: int, gathered: int) -> bool:
        received, in_two = size * sent, sent + gathered
        return received <= SMALL or received < in_two or (received == in_two and sent <= EVEN)

    def exchange(self, output: Tensor, input: Tensor, recvs: Sequence[int], sends: Sequence[int]) -> Wait:
        work = self._engine.alltoall_base(output.view(-1), input.view(-1), list(recvs), list(sends))
        return lambda: self._wait(work)

    def gather(self, output: Tensor, input: Tensor) -> Wait:
        if self._based:
            work = self._engine._allgather_base(output.view(-1), input.view(-1))
        else:
            work = self._engine.allgather([list(output.unbind())], [input.view(-1)])
        return lambda: self._wait(work)


def reduce_quantized(
    wire: Wire,
    rank: int,
    size: int,
    request: QuantizedReduction,
    output: Tensor,
    input: Tensor,
    error: Tensor | None,
    gather_error: Tensor | None,
) -> None:
    """Runs a reduction on flat tensors.

    Raises:
        ValueOverflowError: on every rank, if on any a value did not fit and ``overflow`` is "raise".
    """
    codec = codec_for(request, size, output, input, error, gather_error)
    if request.operator == "quantized_reduce_scatter":
        assert isinstance(codec, Dynamic)
        _reduce_scatter(wire, rank, request.counts, codec, input.device)
    elif (
        request.count
        and gather_error is None
        and wire.in_one_shot(size, codec.sent_bytes(request.count), codec.gathered_bytes(request.count))
    ):
        _sum_everywhere(wire, size, request.count, codec, input.device)
    elif request.count:
        _AllReduce(wire, rank, size, request.count, codec, input.device).run()
    if request.quantization.overflow == "raise":
        _share_misfits(wire, size, codec, request, input.device)


class _AllReduce:
    """Parts are equal shares of units, fewer for the last ranks."""

    def __init__(self, wire: Wire, rank: int, size: int, count: int, codec: Codec, device: torch.device) -> None:
        self._wire, self._rank, self._size, self._count, self._codec = wire, rank, size, count, codec
        self._device = device
        units = -(-count // codec.unit)
        self._share = -(-units // size) * codec.unit
        self._step = min(max(wire.chunk(self._share) // codec.unit, 1) * codec.unit, self._share)
        # Equal parts in one step are gathered where they shall lie.
        self._result = codec.result if self._whole() and size * self._share == count else None

    def run(self) -> None:
        steps = range(-(-self._share // self._step))
        exchanges = [self._exchange(step) for step in steps[:AHEAD]]
        gathers: list[tuple[Tensor, Wait]] = []
        for step in steps:
            inbox, wait = exchanges[step]
            wait()
            gathers.append(self._gather(step, inbox))
            exchanges[step] = gathers[step]  # lets the inbox go
            if step + AHEAD < len(steps):
                exchanges.append(self._exchange(step + AHEAD))
            if step:
                self._finish(step - 1, gathers)
        self._finish(len(steps) - 1, gathers)

    def _piece(self, rank: int, step: int) -> tuple[int, int]:
        """First element and number of a rank's part in a step."""
        begin = min(rank * self._share, self._count)
        end = min(begin + self._share, self._count)
        first = min(begin + step * self._step, end)
        return first, min(self._step, end - first)

    def _whole(self) -> bool:
        """All in one step: the parts follow each other, and one call of a kernel takes them all."""
        return self._step == self._share

    def _length(self, step: int) -> int:
        """Elements of the longest piece, for which messages are made: the first rank's."""
        return self._piece(0, step)[1]

    def _bytes(self, rows: int, columns: int) -> Tensor:
        return torch.empty((rows, columns), dtype=torch.uint8, device=self._device)

    def _exchange(self, step: int) -> tuple[Tensor, Wait]:
        length = self._length(step)
        size = self._codec.sent_bytes(length)
        outbox, inbox = self._bytes(self._size, size), self._bytes(self._size, size)
        if self._whole():
            self._codec.encode(outbox, 0, self._count, length)
        else:
            for j in range(self._size):
                first, count = self._piece(j, step)
                if count:
                    self._codec.encode(outbox[j : j + 1], first, count, length)
        wait = self._wire.exchange(inbox, outbox, [size] * self._size, [size] * self._size)
        return inbox, wait

    def _gather(self, step: int, inbox: Tensor) -> tuple[Tensor, Wait]:
        length = self._length(step)
        size = self._codec.gathered_bytes(length)
        mine = self._bytes(1, size)
        everything = self._bytes(self._size, size) if self._result is None else self._result.view(self._size, size)
        first, count = self._piece(self._rank, step)
        if count:
            self._codec.combine(inbox, first, count, length, mine, step * self._step)
        return everything, self._wire.gather(everything, mine)

    def _finish(self, step: int, gathers: list[tuple[Tensor, Wait]]) -> None:
        everything, wait = gathers[step]
        gathers[step] = (everything[:0], wait)
        wait()
        if self._result is not None:
            return
        length = self._length(step)
        if self._whole():
            self._codec.decode(everything, 0, self._count, length)
            return
        for j in range(self._size):
            first, count = self._piece(j, step)
            if count:
                self._codec.decode(everything[j : j + 1], first, count, length)


def _sum_everywhere(wire: Wire, size: int, count: int, codec: Codec, device: torch.device) -> None:
    """In one shot. The error feedback of a gather would be known to one rank alone, so there is none."""
    step = min(max(wire.chunk(-(-count // size)) // codec.unit, 1) * codec.unit, count)
    sums = torch.empty((1, codec.gathered_bytes(step)), dtype=torch.uint8, device=device)

    def start(first: int) -> tuple[tuple[int, Tensor], Wait]:
        length = min(step, count - first)
        mine, everything = (
            torch.empty((rows, codec.sent_bytes(length)), dtype=torch.uint8, device=device) for rows in (1, size)
        )
        codec.encode(mine, first, length, length)
        return (length, everything), wire.gather(everything, mine)

    for first, (length, everything) in _ahead(range(0, count, step), start):
        mine = sums[:, : codec.gathered_bytes(length)]
        codec.combine(everything, first, length, length, mine, first)
        codec.decode(mine, first, length, length)


def _reduce_scatter(wire: Wire, rank: int, counts: Sequence[int], codec: Dynamic, device: torch.device) -> None:
    """Rank j's part has ``counts[j]`` elements; chunks are those of the longest part."""
    unit, longest, starts = codec.unit, max(counts), packed(counts)
    step = min(max(wire.chunk(longest) // unit, 1) * unit, max(longest, 1))

    def start(begin: int) -> tuple[Tensor, Wait]:
        lengths = [max(min(step, count - begin), 0) for count in counts]
        sizes = [codec.sent_bytes(length) for length in lengths]
        outbox = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for j, part in enumerate(outbox.split(sizes)):
            if lengths[j]:
                codec.encode(part.view(1, -1), starts[j] + begin, lengths[j], lengths[j])
        inbox = torch.empty((len(counts), sizes[rank]), dtype=torch.uint8, device=device)
        return inbox, wire.exchange(inbox, outbox, [sizes[rank]] * len(counts), sizes)

    for begin, inbox in _ahead(range(0, longest, step), start):
        if length := max(min(step, counts[rank] - begin), 0):
            codec.finish(inbox, length, begin)


def _ahead(begins: Sequence[int], start: Callable[[int], tuple[T, Wait]]) -> Iterator[tuple[int, T]]:
    """Where steps begin, and what their transfers bring; later ones are under way."""
    under_way = [start(begin) for begin in begins[:AHEAD]]
    for number, begin in enumerate(begins):
        made, wait = under_way.pop(0)
        wait()
        if number + AHEAD < len(begins):
            under_way.append(start(begins[number + AHEAD]))
        yield begin, made


def _share_misfits(wire: Wire, size: int, codec: Codec, request: QuantizedReduction, device: torch.device) -> None:
    mine = torch.zeros(4, dtype=torch.uint8, device=device)
    if codec.overflows:
        mine[0] = torch.cat(codec.overflows).amax()
    told = torch.empty((size, 4), dtype=torch.uint8, device=device)
    wire.gather(told, mine)()
    if told[:, 0].any():
        raise ValueOverflowError(
            f"{request.operator}: a value does not fit into {request.out_dtype}, and overflow is 'raise'"
        )


def _nothing() -> None:
    pass
