"""Moving bytes with an engine of torch.distributed. Tensors are flat views of bytes, layouts count bytes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv._calls import reductions
from alltoallv._calls.counts import Layout
from alltoallv.errors import InvalidParamError
from alltoallv.torch.engines.watch import Watch


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as bytes: engines that lack a dtype have this one."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)  # strides of nothing may forbid a view
    return tensor.detach().reshape(-1).view(torch.uint8)


def regions(tensor: Tensor, counts: Sequence[int], displs: Sequence[int]) -> list[Tensor]:
    """A view per peer."""
    return [tensor[displ : displ + count] for count, displ in zip(counts, displs, strict=True)]


def stretch(tensor: Tensor, counts: Sequence[int], displs: Sequence[int]) -> Tensor | None:
    """What the regions take up if they follow each other without gaps; None if they do not."""
    begin = end = None
    for count, displ in zip(counts, displs, strict=True):
        if count == 0:
            continue
        if end is None:
            begin = end = displ
        if displ != end:
            return None
        end += count
    return tensor[begin or 0 : end or 0]


def copy_parts(output: Tensor, input: Tensor, layout: Layout) -> None:
    """What a world of one rank does."""
    (count,), (source,), _, (target,) = layout
    output[target : target + count] = input[source : source + count]


class HostMover:
    """gloo and MPI, in host memory: tensors of a GPU are packed and go there and back in one transfer each.

    Args:
        engine: What torch.distributed calls a backend; None in a world of one rank.
        watch: Waits for it.
        large: Bytes from which a message goes by itself, with its receive posted first; None: never.
    """

    blocks = True  # a call returns when its data have arrived

    def __init__(self, engine: Any, rank: int, size: int, watch: Watch, large: int | None = None) -> None:
        self._engine, self._rank, self._size, self._watch, self._large = engine, rank, size, watch, large

    def exchange(self, output: Tensor, input: Tensor, layout: Layout, wait: bool = True) -> None:
        if self._size == 1:
            return copy_parts(output, input, layout)
        sends, sdispls, recvs, rdispls = layout
        if output.is_cpu and input.is_cpu and not self._is_large(max(*sends, *recvs)):
            target, source = stretch(output, recvs, rdispls), stretch(input, sends, sdispls)
            if target is not None and source is not None:
                return self._exchange(target, source, recvs, sends)
        self.exchange_lists(regions(output, recvs, rdispls), regions(input, sends, sdispls))

    def exchange_lists(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool = True) -> None:
        if self._size == 1:
            outputs[0].copy_(inputs[0])
            return
        if not inputs[0].is_cpu:
            inputs = torch.cat(list(inputs)).cpu().split([x.numel() for x in inputs])
        if outputs[0].is_cpu:
            return self._run(outputs, inputs)
        sizes = [out.numel() for out in outputs]
        host = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        self._run(host.split(sizes), inputs)
        for out, part in zip(outputs, host.to(outputs[0].device).split(sizes), strict=True):
            out.copy_(part)

    def _run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Large messages go by themselves, all but a last byte; small ones, and these bytes, in one exchange.

        The engine's exchange posts what it sends before what it receives: to a peer that a rank both sends to and
        receives from, "ready to receive" then waits behind the rank's own data, and the two directions of a wire take
        turns. Alone the engine's messages could not be waited for: a wait for one that is given up closes the
        connection. But a connection keeps order, so the exchange's part of it arrives last.
        """
        received, sent = ([self._last(j, x) for j, x in enumerate(parts)] for parts in (outputs, inputs))

        def post() -> list[Any]:
            return [
                start([part[: part.numel() - last.numel()]], j, 0)
                for start, parts, lasts in ((self._engine.recv, outputs, received), (self._engine.send, inputs, sent))
                for j, (part, last) in enumerate(zip(parts, lasts, strict=True))
                if j != self._rank and last.numel() < part.numel()
            ]

        works = self._watch.attempt(post)
        outputs[self._rank].copy_(inputs[self._rank])
        recvs, sends = [x.numel() for x in received], [x.numel() for x in sent]
        target = torch.empty(sum(recvs), dtype=torch.uint8, device="cpu")
        self._exchange(target, torch.cat(sent), recvs, sends)
        self._watch.attempt(lambda: [work.wait() for work in works])
        for last, part in zip(received, target.split(recvs), strict=True):
            last.copy_(part)

    def _exchange(self, target: Tensor, source: Tensor, recvs: Sequence[int], sends: Sequence[int]) -> None:
        self._watch.work(self._engine.alltoall_base(target, source, list(recvs), list(sends)))

    def _is_large(self, length: int) -> bool:
        return self._large is not None and length >= self._large

    def _last(self, peer: int, part: Tensor) -> Tensor:
        """What of a message the engine's exchange moves."""
        if peer == self._rank:
            return part[:0]
        return part[-1:] if self._is_large(part.numel()) else part

    def gather(self, output: Tensor, input: Tensor, wait: bool = True) -> None:
        """Every rank's input, one behind the other; of one length on all ranks."""
        if self._size == 1:
            output.copy_(input)
            return
        if self._size == 2 and self._is_large(input.numel()):  # a ring of two has both directions on one connection
            return self.exchange_lists(output.chunk(2), [input, input])
        target = output if output.device.type == "cpu" else torch.empty(output.numel(), dtype=torch.uint8, device="cpu")
        self._watch.work(self._engine.allgather([list(target.chunk(self._size))], [input.cpu()]))
        if target is not output:
            output.copy_(target)

    def broadcast(self, tensor: Tensor, root: int, wait: bool = True) -> None:
        if self._size == 1:
            return
        host = tensor.cpu()
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._watch.work(self._engine.broadcast([host], options))
        if host is not tensor:
            tensor.copy_(host)


_NATIVE = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}
FLOATS = frozenset(getattr(torch, name) for name in reductions.FLOATS)


class DeviceMover:
    """NCCL and its kin: views per peer, nothing packed, on the current stream.

    Every method returns the engine's work with ``wait=False``; otherwise the data are there for the current stream,
    and the host has not waited for them.
    """

    blocks = False

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._group, self._size = weakref.ref(group), size

    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise InvalidParamError("the process group has been destroyed, expected one in use")
        return group

    def close(self) -> None:
        """The communicator is destroyed: what is the mover's own goes, after what is under way."""

    def abandon(self) -> None:
        """The communicator has ended: what is under way may never be done. From any thread."""

    def exchange(self, output: Tensor, input: Tensor, layout: Layout, wait: bool = True) -> Any:
        if self._size == 1:
            return copy_parts(output, input, layout)
        sends, sdispls, recvs, rdispls = layout
        return self.exchange_lists(regions(output, recvs, rdispls), regions(input, sends, sdispls), wait)

    def exchange_lists(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool = True) -> Any:
        if self._size == 1:
            return outputs[0].copy_(inputs[0]) and None
        return dist.all_to_all(list(outputs), list(inputs), group=self.group(), async_op=not wait)

    def gather(self, output: Tensor, input: Tensor, wait: bool = True) -> Any:
        return dist.all_gather_into_tensor(output, input, group=self.group(), async_op=not wait)

    def broadcast(self, tensor: Tensor, root: int, wait: bool = True) -> Any:
        return dist.broadcast(tensor, group=self.group(), group_src=root, async_op=not wait)

    def reduce(self, operator: str, output: Tensor, input: Tensor, op: str, counts: Sequence[int], wait: bool) -> Any:
        """The engine's own reduction, in the engine's own order of additions; tensors of the dtype, not bytes."""
        reduce_op = getattr(dist.ReduceOp, _NATIVE[op])
        if operator == "all_reduce":
            output.copy_(input)
            return dist.all_reduce(output, reduce_op, group=self.group(), async_op=not wait)
        if len(set(counts)) == 1:
            return dist.reduce_scatter_tensor(output, input, reduce_op, group=self.group(), async_op=not wait)
        return dist.reduce_scatter(
            output, list(input.split(list(counts))), reduce_op, group=self.group(), async_op=not wait
        )

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        if dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
            return op != "avg"
        return dtype in FLOATS


Mover = HostMover | DeviceMover


def in_bytes(layout: Layout, itemsize: int) -> Layout:
    """A layout of elements."""
    sends, sdispls, recvs, rdispls = ([value * itemsize for value in values] for values in layout)
    return sends, sdispls, recvs, rdispls
