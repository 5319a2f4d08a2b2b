"""Makes one operator of each call while a dispatch mode is active, so that the mode sees the call, and may repeat it.

A mode watches (CommDebugMode), or records what it replays later, as a graph of an NPU does. The operators write where
the call itself would write, and have its timeout; asynchronous ones begin the call. What an operator's arguments cannot
say is also an operator, which cannot be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv._calls.guard import guard
from alltoallv.errors import BackendUnavailableError
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import COLLECTIVES, REDUCE_OPS, Collective, Done, Parameters, Tensors, Work
from alltoallv.torch.eager.group import AnyCommunicator
from alltoallv.torch.eager.observers import is_tracing
from alltoallv.torch.graph.traced import as_counts

T = TypeVar("T")
_begun = threading.local()  # the call that an operator of this thread has begun, or is to run

Launch = Callable[[Tensor, Tensor], None]
_launches: dict[int, Launch] = {}  # by id; a mode may repeat what it has seen, until the process ends


def is_watched() -> bool:
    """Returns whether a mode sees the operators of this thread, whose tensors are themselves."""
    return not is_tracing() and torch._C._len_torch_dispatch_stack() > 0


def collective(
    comm: AnyCommunicator,
    row: Collective,
    outs: Tensors,
    ins: Tensors,
    parameters: Parameters,
    limit: float,
    async_op: bool,
) -> Work | None:
    """Makes a call of the arguments of ``row.prepare``; ``limit`` is in seconds, below 0 for the default."""
    kind = parameters.op.op if type(parameters.op) is dist.ReduceOp else parameters.op
    if kind not in REDUCE_OPS:
        operation = _prepared(comm, row, outs, ins, parameters)  # an operator cannot have it as an argument
        return operation.submit(limit) if async_op else operation.run(limit) and None
    counts = [as_counts(() if entry is None else entry) for entry in parameters.counts]
    device = groups.device_of(next(iter([*outs, *ins]), None))
    later = async_op and device == "cpu"  # a device's stream orders what comes after it
    terms = row.name, kind.name, parameters.root, counts, parameters.unit or "", parameters.order or "", limit, later
    torch.ops.alltoallv.collective_([x.detach() for x in outs], [x.detach() for x in ins], *terms, groups.name_of(comm))
    if not async_op:
        return None
    operation, work = _begun.__dict__.pop("call", (None, None))
    if operation is None:
        return Done(row.result(outs))
    operation.result = row.result(outs)
    result: Work = work
    return result


@torch.library.custom_op("alltoallv::collective_", mutates_args=("outputs",))
def _collective_(
    outputs: list[Tensor],
    inputs: list[Tensor],
    name: str,
    op: str,
    root: int,
    counts: list[Tensor],
    unit: str,
    order: str,
    timeout: float,
    async_op: bool,
    group: str,
) -> None:
    comm = groups.by_name(group, groups.device_of(next(iter([*outputs, *inputs]), None)))
    values = tuple(each.tolist() if len(each) else None for each in counts)
    parameters = Parameters(dist.ReduceOp(getattr(dist.ReduceOp, op)), root, values, unit or None, order or None)
    operation = _prepared(comm, COLLECTIVES[name], outputs, inputs, parameters)
    if async_op:
        _begun.call = operation, operation.submit(timeout)
    else:
        operation.run(timeout)


def _prepared(comm: AnyCommunicator, row: Collective, outs: Tensors, ins: Tensors, parameters: Parameters) -> Any:
    with guard(comm, row.operator):
        return row.prepare(comm, outs, ins, parameters)


def launch(run: Launch, x: Tensor, out: Tensor) -> None:
    """Calls ``run``, which reads ``x`` and writes ``out``; the same one for calls that are alike."""
    _launches[id(run)] = run
    torch.ops.alltoallv.launch_(x.detach(), out.detach(), id(run))


@torch.library.custom_op("alltoallv::launch_", mutates_args=("out",))
def _launch_(x: Tensor, out: Tensor, call: int) -> None:
    _launches[call](x, out)


def call(name: str, comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], run: Callable[[], T]) -> T:
    """Makes an operator of ``run``, which reads and writes these tensors."""
    _begun.run = run
    try:
        tensors = [[x.detach() for x in each] for each in (outputs, inputs)]
        torch.ops.alltoallv.call_(*tensors, name, groups.name_of(comm))
        result: T = _begun.__dict__.pop("result", None)
        return result
    finally:
        _begun.__dict__.pop("run", None)


@torch.library.custom_op("alltoallv::call_", mutates_args=("outputs",))
def _call_(outputs: list[Tensor], inputs: list[Tensor], name: str, group: str) -> None:
    run = _begun.__dict__.pop("run", None)
    if run is None:
        raise BackendUnavailableError(
            f"{name} of group {group!r} cannot be repeated: it has more arguments than an operator accepts", id=5071
        )
    _begun.result = run()
