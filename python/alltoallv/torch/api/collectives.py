"""The collectives of torch.distributed as calls of a communicator: of its backend and of `torch.api.distributed`.

Each function checks its arguments and returns an `Operation`, ready to start. Tensors that are not contiguous, and
inputs that share memory with outputs where the operator does not allow it, travel as copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv import _core
from alltoallv._calls.collectives import barrier_plan, broadcast_layout, check_length
from alltoallv._calls.counts import Layout, even_parts, scaled
from alltoallv._calls.protocol import Pending
from alltoallv._calls.reductions import check_reduction
from alltoallv._calls.regions import check_apart, check_gather_apart, check_lists_apart, check_outputs_apart, lowest
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.torch.api import group as groups
from alltoallv.torch.api.calls import check_place
from alltoallv.torch.api.group import AnyCommunicator
from alltoallv.torch.api.tensors import as_input, check_dtype, core_name, region
from alltoallv.torch.engines.device import DeviceCall

_Op = dist.ReduceOp.RedOpType
_REDUCE_OPS = {
    _Op.SUM: "sum",
    _Op.AVG: "avg",
    _Op.MIN: "min",
    _Op.MAX: "max",
    _Op.PRODUCT: "prod",
    _Op.BAND: "band",
    _Op.BOR: "bor",
    _Op.BXOR: "bxor",
}
MOVABLE = {dtype for name in _core.dtypes if isinstance(dtype := getattr(torch, name, None), torch.dtype)}


@dataclass(slots=True)
class Operation:
    """A collective whose arguments have passed this rank's checks."""

    name: str
    run: Callable[[float], Any]  # given the timeout in seconds
    submit: Callable[[float], Pending]
    itemsize: int
    sends: Sequence[int]
    recvs: Sequence[int]
    result: Any
    keep: list[Tensor]
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # to, from

    def finish(self) -> None:
        """Copies to outputs that are not contiguous."""
        for target, source in self.copies:
            target.detach().copy_(source)


def op_name(op: Any) -> str:
    """The core's name of a ``ReduceOp``; torch's own if the core has none."""
    return _REDUCE_OPS.get(op.op, op.op.name)


def reduce_at_once(
    core: _core.Communicator, operator: str, input: Tensor, output: Tensor, op: Any, timeout: float
) -> Tensor | None:
    """A reduction that blocks, of tensors that need no more than the core's look; None for others."""
    made: Tensor | None = _core.reduce(core, operator, input, output, _REDUCE_OPS.get(op.op), timeout)
    return made


def all_reduce(comm: AnyCommunicator, tensor: Tensor, op: Any) -> Operation:
    copies: list[tuple[Tensor, Tensor]] = []
    x = in_place(tensor, copies)
    real = torch.view_as_real(x) if x.is_complex() and not isinstance(comm, Communicator) else x
    counts = even_parts(real.numel(), comm.size)
    name = "all_reduce"
    return reduction(comm, name, op, real, real, counts, [real.numel()], [tensor], [x], copies)


def reduce_scatter(comm: AnyCommunicator, output: Tensor, inputs: Sequence[Tensor], op: Any) -> Operation:
    """``inputs`` has one tensor per rank."""
    check_length("input_list", inputs, comm.size)
    check_dtypes([output, *inputs])
    parts = [as_input("input_list", x) for x in inputs]
    counts = [x.numel() for x in parts]
    if output.numel() != counts[comm.rank]:
        raise InvalidTensorError(
            f"output has {output.numel()} elements, expected {counts[comm.rank]} as entry {comm.rank} of input_list", 9
        )
    return _reduce_scatter(comm, output, _joined(parts), counts, op)


def reduce_scatter_single(comm: AnyCommunicator, output: Tensor, input: Tensor, op: Any) -> Operation:
    check_dtypes([output, input])
    if input.numel() != comm.size * output.numel():
        raise InvalidTensorError(
            f"input has shape {tuple(input.shape)}, "
            f"expected {comm.size} times the elements of an output of shape {tuple(output.shape)}",
            9,
        )
    return _reduce_scatter(comm, output, as_input("input", input), [output.numel()] * comm.size, op)


def all_gather(comm: AnyCommunicator, outputs: Sequence[Tensor], input: Tensor) -> Operation:
    """``outputs`` has one tensor per rank, of that rank's size."""
    check_length("tensor_list", outputs, comm.size)
    check_dtypes([input, *outputs])
    copies: list[tuple[Tensor, Tensor]] = []
    x, outs = as_input("tensor", input), [output_of(out, copies) for out in outputs]
    mine = outs[comm.rank]
    if region(x) != region(mine) or not isinstance(comm, Communicator):
        x = apart([x], outs)[0]
    check_outputs_apart([region(out) for out in outs], "tensor_list")
    if x.numel() != mine.numel():
        raise InvalidTensorError(
            f"tensor has {x.numel()} elements, expected {mine.numel()} as entry {comm.rank} of tensor_list", 9
        )
    return exchange_lists(comm, "all_gather", [x] * comm.size, outs, [list(outputs)], copies)


def all_gather_single(comm: AnyCommunicator, output: Tensor, input: Tensor) -> Operation:
    check_dtype("output_tensor", output, input.dtype)
    request = _core.Request.all_gather(comm.size, input.shape, output.numel(), "output_tensor")
    copies: list[tuple[Tensor, Tensor]] = []
    x, out = as_input("input_tensor", input), output_of(output, copies)
    check_gather_apart(region(out), region(x), comm.rank)
    if not isinstance(comm, Communicator):
        x = apart([x], [out])[0]
    return _exchange(comm, "all_gather_into_tensor", x, out, request.layout, [output], copies)


def all_to_all(comm: AnyCommunicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    check_length("output_tensor_list", outputs, comm.size)
    check_length("input_tensor_list", inputs, comm.size)
    check_dtypes([*inputs, *outputs])
    copies: list[tuple[Tensor, Tensor]] = []
    outs = [output_of(out, copies) for out in outputs]
    xs = [as_input("input_tensor_list", x) for x in inputs]
    check_lists_apart([region(out) for out in outs], [region(x) for x in xs])
    return exchange_lists(comm, "all_to_all", xs, outs, list(outputs), copies)


def all_to_all_single(
    comm: AnyCommunicator, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Operation:
    """Splits in rows of dimension 0; empty: equal parts."""
    check_dtypes([output, input])
    copies: list[tuple[Tensor, Tensor]] = []
    out, x = output_of(output, copies), as_input("input", input)
    check_apart(region(out), region(x))
    request = _core.Request.all_to_all_single(comm.size, out.shape, x.shape, output_splits, input_splits)
    return _exchange(comm, "all_to_all_single", x, out, request.layout, [output], copies)


def broadcast(comm: AnyCommunicator, tensor: Tensor, root: int) -> Operation:
    copies: list[tuple[Tensor, Tensor]] = []
    x = in_place(tensor, copies)
    if comm.rank == root:
        copies.clear()
    layout = broadcast_layout(comm.rank, comm.size, x.numel(), root)
    source = target = x
    if not isinstance(comm, Communicator):  # HCCL refuses one buffer for both, also where it has nothing to do
        nothing = x.new_empty(1)
        source, target = (x, nothing) if comm.rank == root else (nothing, x)
    return _exchange(comm, "broadcast", source, target, layout, [tensor], copies, root)


def barrier(comm: AnyCommunicator) -> Operation:
    none, plan = [0] * comm.size, barrier_plan(groups.on_host(comm))
    return Operation("barrier", partial(plan.run, 0, 0), partial(plan.submit, 0, 0), 1, none, none, [], [])


def _exchange(
    comm: AnyCommunicator,
    name: str,
    x: Tensor,
    out: Tensor,
    layout: Layout,
    result: Any,
    copies: list[tuple[Tensor, Tensor]],
    root: int = 0,
) -> Operation:
    check_place(comm, x, out)
    dtype, (sends, _, recvs, _) = core_name(x.dtype), layout
    if not isinstance(comm, Communicator):
        call = comm.exchange(name, dtype, out, x, layout, 1, root)
        return _on_engine(name, call, x.itemsize, sends, recvs, result, [x, out], copies)
    plan = _core.Plan(comm.core, name, dtype, *layout, root)
    source, target = x.data_ptr(), out.data_ptr()
    run, submit = partial(plan.run, source, target), partial(plan.submit, source, target)
    return Operation(name, run, submit, x.itemsize, sends, recvs, result, [x, out], copies)


def exchange_lists(
    comm: AnyCommunicator,
    name: str,
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    result: Any,
    copies: list[tuple[Tensor, Tensor]],
) -> Operation:
    check_place(comm, *xs, *outs)
    dtype, sends, recvs = core_name(xs[0].dtype), [x.numel() for x in xs], [out.numel() for out in outs]
    about = xs[0].itemsize, sends, recvs, result, [*xs, *outs], copies
    if not isinstance(comm, Communicator):
        return _on_engine(name, comm.exchange_lists(name, dtype, outs, xs), *about)
    source, sdispls = lowest([region(x) for x in xs])
    target, rdispls = lowest([region(out) for out in outs])
    plan = _core.Plan(comm.core, name, dtype, sends, sdispls, recvs, rdispls, byte_displs=True)
    return Operation(name, partial(plan.run, source, target), partial(plan.submit, source, target), *about)


def _on_engine(name: str, call: DeviceCall, *about: Any) -> Operation:
    """``about``: as `Operation` has it. The engine's calls have the communicator's timeout."""
    return Operation(name, lambda timeout: call.run(), lambda timeout: call.submit(), *about)


def reduction(
    comm: AnyCommunicator,
    name: str,
    op: Any,
    x: Tensor,
    out: Tensor,
    counts: list[int],
    recvs: Sequence[int],
    result: Any,
    keep: list[Tensor],
    copies: list[tuple[Tensor, Tensor]],
) -> Operation:
    check_place(comm, x, out)
    what = name, core_name(x.dtype), op_name(op)
    check_reduction(what[2], what[1])
    if not isinstance(comm, Communicator):
        call = comm.reduce(*what[:2], out, x, what[2], counts)
        return _on_engine(name, call, x.itemsize, counts, recvs, result, keep, copies)
    args = (*what, x.data_ptr(), out.data_ptr(), counts)
    run, submit = partial(comm.core.reduce, *args), partial(comm.core.submit_reduce, *args)
    return Operation(name, run, submit, x.itemsize, counts, recvs, result, keep, copies)


def _reduce_scatter(comm: AnyCommunicator, output: Tensor, x: Tensor, counts: list[int], op: Any) -> Operation:
    copies: list[tuple[Tensor, Tensor]] = []
    out = output_of(output, copies)
    x = apart([x], [out])[0]
    keep = [x, out]
    if x.is_complex() and not isinstance(comm, Communicator):
        x, out, counts = torch.view_as_real(x), torch.view_as_real(out), scaled(counts, 2)
    name = "reduce_scatter"
    return reduction(comm, name, op, x, out, counts, [out.numel()], [output], keep, copies)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def output_of(tensor: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Where to receive: the tensor itself, or memory that is copied there afterwards."""
    if _is_plain(tensor):
        return tensor.detach()
    space = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    copies.append((tensor, space))
    return space


def in_place(tensor: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The tensor as input and output at once, or such a copy of it."""
    if _is_plain(tensor):
        return tensor.detach()
    copy = as_input("tensor", tensor)
    copies.append((tensor, copy))
    return copy


def apart(inputs: list[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, as copies where they share memory with an output."""
    regions = [(out.data_ptr(), out.data_ptr() + out.nbytes) for out in outputs if out.nbytes]
    low, high = min((a for a, _ in regions), default=0), max((b for _, b in regions), default=0)

    def meets(x: Tensor) -> bool:
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        return begin < high and low < end and any(begin < b and a < end for a, b in regions if begin < end)

    return [x.clone() if meets(x) else x for x in inputs]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after another in memory; no copy if they lie so, as the chunks of one tensor do."""
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end and part.numel():
            return torch.cat([x.reshape(-1) for x in parts])
        end += part.nbytes
    if any(x.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr() for x in parts):
        return torch.cat([x.reshape(-1) for x in parts])
    return parts[0].as_strided((sum(x.numel() for x in parts),), (1,))


def check_dtypes(tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise InvalidTensorError(f"input and output have dtypes {names}, expected one dtype", 13)
