"""Collectives that write into tensors, as one operator of a graph that returns what they write; it is copied there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.torch.api import collectives, profile, rooted
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.collectives import Operation
from alltoallv.torch.api.group import AnyCommunicator, Group
from alltoallv.torch.api.work import Done
from alltoallv.torch.graph import inductor

_OPS = {
    dist.ReduceOp.SUM: "SUM",
    dist.ReduceOp.AVG: "AVG",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.MAX: "MAX",
    dist.ReduceOp.PRODUCT: "PRODUCT",
    dist.ReduceOp.BAND: "BAND",
    dist.ReduceOp.BOR: "BOR",
    dist.ReduceOp.BXOR: "BXOR",
}

Tensors = list[Tensor]
Prepare = Callable[[AnyCommunicator, Tensors, Tensors, Any, int], Operation]
# Of the communicator, the outputs, the inputs, the reduction and the root.
_PREPARE: dict[str, Prepare] = {
    "all_reduce": lambda c, outs, ins, op, root: collectives.all_reduce(c, outs[0], op),
    "reduce_scatter": lambda c, outs, ins, op, root: collectives.reduce_scatter(c, outs[0], ins, op),
    "reduce_scatter_tensor": lambda c, outs, ins, op, root: collectives.reduce_scatter_single(c, outs[0], ins[0], op),
    "all_gather": lambda c, outs, ins, op, root: collectives.all_gather(c, outs, ins[0]),
    "broadcast": lambda c, outs, ins, op, root: collectives.broadcast(c, outs[0], root),
    "reduce": lambda c, outs, ins, op, root: rooted.reduce(c, outs[0], root, op),
    "gather": lambda c, outs, ins, op, root: rooted.gather(c, outs, ins[0], root),
    "scatter": lambda c, outs, ins, op, root: rooted.scatter(c, outs[0], ins, root),
}


def collective(
    name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any, root: int, group: Group, async_op: bool
) -> Done | None:
    """What a graph has in place of the collective ``name``; the arguments are checked when it runs."""
    if op not in _OPS:
        raise InvalidParamError(f"op is {op!r}, expected a ReduceOp of {', '.join(_OPS.values())} in a graph")
    outs, ins = [x.detach() for x in outputs], [x.detach() for x in inputs]
    made = torch.ops.alltoallv.collective(outs, ins, name, _OPS[op], root, groups.name_of(group))
    for output, value in zip(outputs, made, strict=True):
        output.copy_(value)
    return Done(list(outputs)) if async_op else None


@torch.library.custom_op("alltoallv::collective", mutates_args=())
def _run(outputs: list[Tensor], inputs: list[Tensor], name: str, op: str, root: int, group: str) -> list[Tensor]:
    comm = groups.by_name(group, groups.device_of(next(iter([*outputs, *inputs]))))
    made = [x.clone(memory_format=torch.contiguous_format) for x in outputs]
    with guard(comm, name.removesuffix("_tensor")):
        operation = _PREPARE[name](comm, made, inputs, dist.ReduceOp(getattr(dist.ReduceOp, op)), root)
    with profile.span(operation.name, comm, operation.itemsize, operation.sends, operation.recvs):
        operation.run(-1.0)
        operation.finish()
    return made


@_run.register_fake
def _(outputs: list[Tensor], inputs: list[Tensor], name: str, op: str, root: int, group: str) -> list[Tensor]:
    inductor.teach(_run._opoverload)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in outputs]


# Every rank must issue the same collectives in the same order: a compiler may neither drop nor reorder them.
torch.library._register_effectful_op(_run._qualname, torch.library.EffectType.ORDERED)
