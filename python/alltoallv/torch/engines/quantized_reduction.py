"""Runs quantized reductions over an engine that only moves bytes, in two shots: exchange, sum, gather.

Each step launches one kernel, in the order of the device's stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alltoallv._calls.counts import packed
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization.spec import QuantizedReduction
from alltoallv.torch.engines.codecs import Codec, Dynamic, SharedScale, TwoScales
from alltoallv.torch.engines.reduction import Steps


def reduce_quantized(
    steps: Steps,
    request: QuantizedReduction,
    output: Tensor,
    input: Tensor,
    error: Tensor | None,
    gather_error: Tensor | None,
    bounds: Tensor | None = None,
) -> None:
    """Runs a reduction on flat tensors.

    Raises:
        ValueOverflowError: on every rank, if a value did not fit on any and ``overflow`` is "raise".
    """
    codec: Codec
    if request.scale is None:
        codec = Dynamic(request, output, input, error, gather_error)
    else:
        codec = (SharedScale if request.scale_2 is None else TwoScales)(request, steps.size, output, input)
    if request.operator == "quantized_reduce_scatter":
        _reduce_scatter(steps, request.counts, codec, input.device)
        if bounds is not None and bounds.numel():
            bounds.copy_(codec.bounds)
    elif request.count:
        _all_reduce(steps, request.count, codec, input.device, max(request.leaves // steps.size, 1))
        if bounds is not None:
            _gather_bounds(steps, codec, bounds)
    if request.quantization.overflow == "raise":
        _share_overflows(steps, codec, request, input.device)


def _all_reduce(steps: Steps, count: int, codec: Codec, device: torch.device, vectors: int) -> None:
    """Runs an all-reduce of ``vectors`` of every rank. Parts are equal shares of units; the last ranks have fewer."""
    size, units = steps.size, -(-count // codec.unit)
    share = -(-units // size) * codec.unit
    sent = codec.sent_bytes(share)
    outbox, inbox = (_bytes(size, vectors * sent, device) for _ in range(2))
    for number, messages in enumerate(outbox.split(sent, 1)):
        codec.encode(messages, number * count, count, share)
    _exchange(steps, inbox, outbox, [vectors * sent] * size, [vectors * sent] * size)
    gathered = codec.gathered_bytes(share)
    own_row = _bytes(1, gathered, device)
    first = min(steps.rank * share, count)
    if own := min(share, count - first):
        codec.combine(inbox.view(-1, sent), first, own, share, own_row, 0)
    # Equal parts are gathered in their final place.
    result = codec.result if size * share == count else None
    everything = _bytes(size, gathered, device) if result is None else result.view(size, gathered)
    steps.gather(everything.view(-1), own_row.view(-1))
    if result is None:
        codec.decode(everything, 0, count, share)


def _gather_bounds(steps: Steps, codec: Codec, bounds: Tensor) -> None:
    """Fills ``bounds`` with the bounds of all parts, of which each rank has its own."""
    share = -(-bounds.numel() // steps.size)  # a group is a unit
    own_row, everything = bounds.new_zeros(share), bounds.new_empty(steps.size * share)
    own_row[: codec.bounds.numel()] = codec.bounds
    steps.gather(everything.view(torch.uint8), own_row.view(torch.uint8))
    bounds.copy_(everything[: bounds.numel()])


def _reduce_scatter(steps: Steps, counts: Sequence[int], codec: Codec, device: torch.device) -> None:
    """Runs a reduce-scatter; rank j's part has ``counts[j]`` elements."""
    rank, sizes = steps.rank, [codec.sent_bytes(count) for count in counts]
    outbox = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    for part, first, count in zip(outbox.split(sizes), packed(counts), counts, strict=True):
        if count:
            codec.encode(part.view(1, -1), first, count, count)
    inbox = _bytes(len(counts), sizes[rank], device)
    if any(counts):
        _exchange(steps, inbox, outbox, [sizes[rank]] * len(counts), sizes)
    if own := counts[rank]:
        assert codec.result is not None
        codec.combine(inbox, 0, own, own, codec.result.view(1, -1), 0)


def _share_overflows(steps: Steps, codec: Codec, request: QuantizedReduction, device: torch.device) -> None:
    own_report = torch.zeros(4, dtype=torch.uint8, device=device)
    if codec.overflows:
        own_report[0] = torch.cat(codec.overflows).amax()
    overflow_reports = _bytes(steps.size, 4, device)
    steps.gather(overflow_reports.view(-1), own_report)
    if overflow_reports[:, 0].any():
        raise ValueOverflowError(
            f"{request.operator}: a value does not fit into {request.out_dtype}, and overflow is 'raise'", id=6002
        )


def _exchange(steps: Steps, output: Tensor, input: Tensor, recvs: list[int], sends: list[int]) -> None:
    steps.exchange(output.view(-1), input.view(-1), (sends, packed(sends), recvs, packed(recvs)))


def _bytes(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty((rows, columns), dtype=torch.uint8, device=device)
