"""Collectives that write into tensors, as one operator of a graph that returns what they write; it is copied there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.torch.api import calls
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.collectives import COLLECTIVES, Collective, Terms
from alltoallv.torch.api.group import Group
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


def collective(
    row: Collective, outputs: Sequence[Tensor], inputs: Sequence[Tensor], terms: Terms, group: Group, async_op: bool
) -> Done | None:
    """What a graph has in place of a collective; the arguments are checked when it runs."""
    if terms.op not in _OPS:
        raise InvalidParamError(f"op is {terms.op!r}, expected a ReduceOp of {', '.join(_OPS.values())} in a graph")
    outs, ins = [x.detach() for x in outputs], [x.detach() for x in inputs]
    counts = [as_counts(() if given is None else given) for given in terms.counts]
    about = row.name, _OPS[terms.op], terms.root, counts, terms.unit, groups.name_of(group)
    made = torch.ops.alltoallv.collective(outs, ins, *about)
    for output, value in zip(outputs, made, strict=True):
        output.copy_(value)
    if not async_op:
        return None
    return Done(outputs[0] if row.strict and not row.outputs.endswith("_list") else list(outputs))


def as_counts(values: Counts) -> Tensor:
    """As operators take them: int64, on the host."""
    if isinstance(values, Tensor):
        return values.to("cpu", torch.int64)
    return torch.tensor(values, dtype=torch.int64, device="cpu")


@torch.library.custom_op("alltoallv::collective", mutates_args=())
def _run(
    outputs: list[Tensor],
    inputs: list[Tensor],
    name: str,
    op: str,
    root: int,
    counts: list[Tensor],
    unit: str,
    group: str,
) -> list[Tensor]:
    row = COLLECTIVES[name]
    comm = groups.by_name(group, groups.device_of(next(iter([*outputs, *inputs]))))
    given = tuple(each.tolist() if len(each) else None for each in counts)
    terms = Terms(dist.ReduceOp(getattr(dist.ReduceOp, op)), root, given, unit)
    with guard(comm, row.operator):
        made = [calls.new_output(comm, x.shape, x) for x in outputs]
        if row.updates:
            for new, old in zip(made, outputs, strict=True):
                new.copy_(old)
        operation = row.prepare(comm, made, inputs, terms)
    operation.run()
    return made


@_run.register_fake
def _(outputs: list[Tensor], inputs: list[Tensor], *given: Any) -> list[Tensor]:
    inductor.teach(_run._opoverload)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in outputs]


# Every rank must issue the same collectives in the same order: a compiler may neither drop nor reorder them.
torch.library._register_effectful_op(_run._qualname, torch.library.EffectType.ORDERED)
