"""Moving bytes with an engine of torch.distributed. Tensors are flat views of bytes, layouts count bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv.counts import Layout
from alltoallv.errors import InvalidParamError


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as bytes: engines that lack a dtype have this one."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)  # strides of nothing may forbid a view
    return tensor.detach().reshape(-1).view(torch.uint8)


def stretch(counts: Sequence[int], displs: Sequence[int]) -> int | None:
    """Where the regions begin if they follow each other without gaps; None if they do not."""
    begin = end = None
    for count, displ in zip(counts, displs, strict=True):
        if count == 0:
            continue
        if end is None:
            begin = end = displ
        if displ != end:
            return None
        end += count
    return begin or 0


def copy_parts(output: Tensor, input: Tensor, layout: Layout) -> None:
    """What a world of one rank does."""
    (count,), (source,), _, (target,) = layout
    output[target : target + count] = input[source : source + count]


class HostMover:
    """gloo and MPI: packed buffers in host memory, one transfer to and from a GPU where tensors lie there.

    Args:
        engine: What torch.distributed calls a backend; None in a world of one rank.
        wait: Waits for a work of it.
    """

    blocks = True  # a call returns when its data have arrived

    def __init__(self, engine: Any, size: int, wait: Callable[[Any], None]) -> None:
        self._engine, self._size, self._wait = engine, size, wait

    def exchange(self, output: Tensor, input: Tensor, layout: Layout, wait: bool = True) -> None:
        if self._size == 1:
            return copy_parts(output, input, layout)
        sends, sdispls, recvs, rdispls = layout
        total = sum(sends)
        begin = stretch(sends, sdispls)
        if begin is not None:
            source = input[begin : begin + total]
        else:
            source = torch.cat([input[d : d + n] for n, d in zip(sends, sdispls, strict=True)])
        total, begin = sum(recvs), stretch(recvs, rdispls)
        if begin is not None and output.device.type == "cpu":
            return self._run(output[begin : begin + total], source, recvs, sends)
        target = torch.empty(total, dtype=torch.uint8, device="cpu")
        self._run(target, source, recvs, sends)
        parts = target.to(output.device).split(list(recvs))
        for part, count, displ in zip(parts, recvs, rdispls, strict=True):
            output[displ : displ + count] = part

    def exchange_lists(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wait: bool = True) -> None:
        if self._size == 1:
            outputs[0].copy_(inputs[0])
            return
        sends, recvs = [x.numel() for x in inputs], [out.numel() for out in outputs]
        target = torch.empty(sum(recvs), dtype=torch.uint8, device="cpu")
        self._run(target, torch.cat(list(inputs)), recvs, sends)
        for out, part in zip(outputs, target.to(outputs[0].device).split(recvs), strict=True):
            out.copy_(part)

    def _run(self, target: Tensor, source: Tensor, recvs: Sequence[int], sends: Sequence[int]) -> None:
        self._wait(self._engine.alltoall_base(target, source.cpu(), list(recvs), list(sends)))

    def gather(self, output: Tensor, input: Tensor, wait: bool = True) -> None:
        """Every rank's input, one behind the other; of one length on all ranks."""
        if self._size == 1:
            output.copy_(input)
            return
        target = output if output.device.type == "cpu" else torch.empty(output.numel(), dtype=torch.uint8, device="cpu")
        self._wait(self._engine.allgather([list(target.chunk(self._size))], [input.cpu()]))
        if target is not output:
            output.copy_(target)

    def broadcast(self, tensor: Tensor, root: int, wait: bool = True) -> None:
        if self._size == 1:
            return
        host = tensor.cpu()
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._wait(self._engine.broadcast([host], options))
        if host is not tensor:
            tensor.copy_(host)


_NATIVE = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        inputs = [input[d : d + n] for n, d in zip(sends, sdispls, strict=True)]
        outputs = [output[d : d + n] for n, d in zip(recvs, rdispls, strict=True)]
        return dist.all_to_all(outputs, inputs, group=self.group(), async_op=not wait)

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
        return dtype in _FLOATS


Mover = HostMover | DeviceMover


def in_bytes(layout: Layout, itemsize: int) -> Layout:
    """A layout of elements."""
    sends, sdispls, recvs, rdispls = ([value * itemsize for value in values] for values in layout)
    return sends, sdispls, recvs, rdispls
