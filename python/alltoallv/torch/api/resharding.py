"""Moves tensors from one layout over the ranks to another, and exchanges one dimension for another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls.adapters import check_untracked
from alltoallv._calls.collectives import CheckedCall, Map
from alltoallv._calls.exchanges import Sizes, read_swap
from alltoallv._calls.guard import guard
from alltoallv._calls.layouts import Layout, boxes, division, read_layout
from alltoallv._calls.resharding import Described, Placed, Resharding
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.quantization.spec import Format, Quantization, traveling
from alltoallv.torch.api.exchange import all_to_all_v
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import Done, Operation, Work
from alltoallv.torch.eager.group import AnyCommunicator, Group, device_of
from alltoallv.torch.eager.observers import between_graphs, is_tracing
from alltoallv.torch.eager.tensors import as_input, check_output, check_tensor, core_name, empty, needs_grad, region
from alltoallv.torch.engines.kernels import check_format, kernels_for
from alltoallv.torch.engines.reduction import combine
from alltoallv.torch.graph import ops as ops
from alltoallv.torch.quantized.ops import DeviceRows, HostRows

__all__ = ["ReshardPlan", "all_to_all_nd", "heads_to_sequence", "reshard", "reshard_state", "sequence_to_heads"]


class _Tools:
    def __init__(self, comm: AnyCommunicator, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._begun: list[Work] = []

    def new(self, shape: Sequence[int], dtype: str, zero: bool) -> Tensor:
        if not isinstance(self._comm, Communicator):
            return (torch.zeros if zero else torch.empty)(
                tuple(shape), dtype=getattr(torch, dtype), device=self._device
            )
        tensor = empty(shape, getattr(torch, dtype))
        return tensor.zero_() if zero else tensor

    def outcome(self, finish: Callable[[], Any], later: bool) -> Any:
        """Returns what ``finish`` returns, or the handle of the exchanges that have begun, whose result that is."""
        if not later:
            return finish()
        return Work(self._comm, _Last(self._begun[-1]), (self,), finish) if self._begun else Done(finish())

    def buffer(self, count: int, dtype: str) -> Tensor:
        return self.new((count,), dtype, False)

    def exchange(self, x: Tensor, out: Tensor, placed: Placed, later: bool) -> Callable[[], Any]:
        sends, sdispls, recvs, rdispls = counts = placed.sends, placed.sdispls, placed.recvs, placed.rdispls
        if not isinstance(self._comm, Communicator):
            places: Any = {"sdispls": sdispls, "rdispls": rdispls, "unit": "element", "out": out, "group": self._comm}
            if not later:
                all_to_all_v(x, sends, recvs, **places)
                return lambda: None
            work = all_to_all_v(x, sends, recvs, **places, async_op=True)[1]
        else:
            name = "all_to_all_v"
            with guard(self._comm, name):
                x = as_input("x", x)
                if placed.plan is None:
                    placed.plan = _core.Plan(self._comm.core, name, core_name(x.dtype), *counts, steps=placed.steps)
                call = CheckedCall(placed.plan, (x.data_ptr(), out.data_ptr()))
                operation = Operation(self._comm, name, call, x, sends, recvs, out, (x, out))
            if not later:
                operation.run()
                return lambda: None
            work = operation.submit()
        self._begun.append(work)
        wait: Callable[[], Any] = work.wait
        return wait

    def reduced(self, parts: Sequence[Tensor], op: str) -> Tensor:
        return combine(parts, op)

    def record_bytes(self, coding: Any, count: int) -> int:
        return self._records(coding, count).stride

    def coded(self, coding: Any, x: Tensor) -> Tensor:
        records = self._records(coding, x.numel())
        coded = torch.empty((1, records.stride), dtype=torch.uint8, device=x.device)
        records.encode(x.detach().contiguous().view(1, -1), coded)
        return coded.view(-1)

    def decoded(self, coding: Any, record: Tensor, count: int, dtype: str) -> Tensor:
        x = torch.empty((1, count), dtype=getattr(torch, dtype), device=record.device)
        self._records(coding, count).decode(record.view(1, -1), x, "saturate")
        return x.view(-1)

    def _records(self, coding: Any, count: int) -> HostRows:
        return HostRows(coding, count) if self._device.type == "cpu" else DeviceRows(coding, count, self._device)


class _Last:
    """The exchange that ends last, as a handle waits for it."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, seconds: float = -1.0) -> bool:
        return self._work.wait(None if seconds < 0 else seconds)

    def done(self) -> bool:
        return self._work.is_completed()


class _Moved(Map[Tensor]):
    """The resharding of one tensor, as autograd sees it: all ranks take part in the gradient's exchange."""

    def __init__(self, comm: AnyCommunicator, device: torch.device, plan: Resharding[Tensor]) -> None:
        self._comm, self._device, self._plan = comm, device, plan

    def run(self, input: Tensor | None) -> Any:
        target: Any = self._plan.begin([input], _Tools(self._comm, self._device))()[0]
        return target.clone() if isinstance(input, Tensor) and target is input else target

    def transposed(self) -> _Moved:
        return _Moved(self._comm, self._device, self._plan.transposed())


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, call: _Moved) -> Tensor:
        ctx.call = call
        return call.run(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.call.back(grad, _Applied.apply), None


class ReshardPlan:
    """Moves tensors of one shape, dtype and kind of device from a layout to another; made once, called for many.

    Making it is collective: the ranks compare what they ask for. See `reshard` for layouts and gradients.

    Args:
        shape, dtype: Of the whole tensor.
        source, target: Layouts.
        format, group_size: See `reshard`.
        group: A ProcessGroup, a `Communicator`, or None for all ranks.
        device: Where the tensors lie.

    Attributes:
        source_shape, target_shape: Of this rank's parts; None where it has none.
        elements_sent, elements_received, bytes_sent, bytes_received: What this rank sends to others, and gets from
            them, in a call.

    Raises:
        InvalidParamError: a layout is no pair of a mesh and placements, or does not fit the shape.
        PeerMismatchError: the ranks give different layouts, shapes or dtypes.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        source: Any,
        target: Any,
        *,
        format: Format | None = None,
        group_size: int | None = None,
        group: Group = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        comm = groups.resolve(group, self._device.type)
        if comm is None:
            raise InvalidParamError(
                "this rank is not a member of the group, expected only its members to make a plan", id=1418
            )
        self._comm = comm
        with guard(groups.on_host(comm), "all_gather"):
            full = tuple(int(n) for n in shape)
            layouts = [_layout(*each, comm.size, group) for each in (("source", source), ("target", target))]
            source, target = (each.on(full, name) for each, name in zip(layouts, ("source", "target"), strict=True))
            self.source_shape = boxes(source, full).shape(comm.rank)
            self.target_shape = boxes(target, full).shape(comm.rank)
            described = Described("x", source, target, full, self.source_shape, core_name(dtype))
            coding = _coding(format, group_size, self._device)
        self._dtype = dtype
        self._plan = Resharding[Tensor](groups.on_host(comm), [described], coding, isinstance(comm, Communicator))
        self.elements_sent, self.elements_received = self._plan.elements_sent, self._plan.elements_received
        self.bytes_sent, self.bytes_received = self._plan.moved_bytes(_Tools(comm, self._device))

    @between_graphs
    def __call__(self, x: Tensor | None, out: Tensor | None = None, *, async_op: bool = False) -> Any:
        """Returns this rank's part of the target, or None; ``x`` is its part of the source, or None.

        The part is a new tensor, or ``out``: contiguous, of its shape and dtype, apart from ``x``; for a tensor that
        wants no gradient. With ``async_op`` it returns a handle at once; its ``result()`` waits and returns the part.
        """
        with guard(self._comm, "all_to_all_v"):
            actual = None if x is None else (tuple(x.shape), x.dtype, x.device.type)
            expected = None if self.source_shape is None else (self.source_shape, self._dtype, self._device.type)
            if actual != expected:
                raise InvalidTensorError(f"x has shape, dtype and device {actual}, expected {expected}", id=2105)
            _check_later(async_op, x)
            wants = x is not None and needs_grad(x)
            if wants:
                self._plan.check_gradient()
            check_untracked(wants, out, "x")
            if out is not None:
                _check_outputs(self._plan, [out], [x])
        if wants:
            return _Applied.apply(x, _Moved(self._comm, self._device, self._plan))
        tools = _Tools(self._comm, self._device if x is None else x.device)
        finish = self._plan.begin([x], tools, async_op, [None if out is None else out.detach()])

        def result() -> Any:
            part = finish()[0]
            return part if out is None else out

        return tools.outcome(result, async_op)


def reshard(
    x: Tensor | None,
    source: Any,
    target: Any,
    *,
    shape: Sequence[int] | None = None,
    format: Format | None = None,
    group_size: int | None = None,
    out: Tensor | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
) -> Any:
    """Moves a tensor from one layout over the ranks to another.

    A layout is a pair ``(mesh, placements)``: a DeviceMesh and DTensor's ``Shard``, ``Replicate`` and ``Partial``, also
    the strided shards of FSDP over tensor parallelism, or plainly an array of the group's ranks of any number of
    dimensions, each rank at most once, and one placement for each of its dimensions:

    - an integer d: the ranks along it have parts of dimension d of the tensor, in order, of ceil(n / W) rows, the last
      ones smaller or empty. Two dimensions of the mesh may divide the same d, the first one before the second;
    - a pair (d, p): they have parts in strides: dimension d is cut into p pieces first, and each rank has its part of
      every piece;
    - None: the ranks along it have copies;
    - ``"sum"``, ``"avg"``, ``"min"``, ``"max"``, ``"prod"``: every rank along it has a term; the tensor is their
      reduction, in the order of the mesh, 16-bit floats in float32. In ``target`` only ``"sum"``: the first rank along
      it gets the values, the others zeros.

    The meshes may be of different, overlapping or disjoint ranks. Every byte that a rank lacks is sent to it once, from
    one of the ranks that have it, and none that it has. Terms are added up first, by one more exchange.

    Args:
        x: This rank's part of the source (of a DTensor ``to_local()``); None on a rank that is not in its mesh.
        source, target: Layouts, equal on all ranks.
        shape: Of the whole tensor. Default: what the parts make together.
        format: The format in which float32, float16 and bfloat16 elements travel, such as ``"int8"``; see
            docs/quantization.md. Each piece for a rank is one flat vector, quantized once by its sender. Elements that
            some rank lacks are rounded on all ranks, also where they stay, so that copies are equal; others keep their
            values, as do the other dtypes. Terms have no format. Gradients move as they are. Default: none.
        group_size: Elements that share a scale. Default: the format's, or 128.
        out: This rank's part, to be written: contiguous, of its shape and dtype, apart from ``x``. Not for what wants a
            gradient. Default: a new tensor.
        group: A ProcessGroup, a `Communicator`, or None for all ranks.
        device: Where tensors lie, for a rank without ``x``. Default: ``"cpu"``.
        async_op: Return a handle at once, whose ``result()`` waits and returns what is returned else. Layouts, shapes
            and dtypes are compared before; a `ReshardPlan` has done that already. Not for tensors that require grad.

    Returns:
        This rank's part of the target, ``out`` or a new tensor; None on a rank that is not in its mesh. Differentiable
        where all ranks are in both meshes: the gradient moves back the same way, and gradients of copies are added.

    Raises:
        InvalidParamError, InvalidTensorError: a layout or a part of any rank is wrong.
        PeerMismatchError: the ranks give different layouts, shapes or dtypes.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    shapes = None if shape is None else {"x": shape}
    return _moved({"x": x}, source, target, shapes, (format, group_size), group, device, async_op, out, single=True)


def reshard_state(
    state: Mapping[str, Tensor | None],
    source: Any,
    target: Any,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    format: Format | None = None,
    group_size: int | None = None,
    out: Mapping[str, Tensor | None] | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
) -> Any:
    """Moves several tensors by name, up to 64 MiB of a dtype in one exchange; see `reshard`.

    Args:
        state: This rank's parts, on one device; the same names on all ranks, in the same order.
        source, target: A layout for all, or a dict of one for each name.
        shapes: Of the whole tensors that have one here.
        format, group_size, group, device, async_op: See `reshard`.
        out: A dict of tensors to be written, by name, None where this rank has no part; see `reshard`.

    Returns:
        The parts of the target, by name; on a rank outside the group None for each. Where one requires grad, they move
        one after the other.

    Raises:
        AllToAllVError: as `reshard`.
    """
    return _moved(state, source, target, shapes, (format, group_size), group, device, async_op, out)


@between_graphs
def _moved(
    state: Mapping[str, Tensor | None],
    source: Any,
    target: Any,
    shapes: Mapping[str, Sequence[int]] | None,
    form: tuple[Any, Any],
    group: Group,
    device: torch.device | str | None,
    async_op: bool,
    out: Any,
    single: bool = False,
) -> Any:
    """Returns the parts of the target by name, of a ``single`` tensor its part, or a handle of that."""
    lies = next((x.device for x in state.values() if isinstance(x, Tensor)), torch.device(device or "cpu"))
    comm = groups.resolve(group, lies.type)
    if comm is None:
        nothing = None if single else dict.fromkeys(state)
        return Done(nothing) if async_op else nothing
    with guard(groups.on_host(comm), "all_gather"):
        _check_later(async_op, *state.values())
        coding = _coding(*form, lies)
        inputs = []
        for name, x in state.items():
            if x is not None:
                check_tensor(name, x)
                if x.device != lies:
                    raise InvalidTensorError(f"{name} lies on {x.device}, expected {lies} like the others", id=2106)
            layouts = [each[name] if isinstance(each, Mapping) else each for each in (source, target)]
            of_source, of_target = (
                _layout(what, each, comm.size, group) for what, each in zip(("source", "target"), layouts, strict=True)
            )
            full = tuple(int(n) for n in shapes[name]) if shapes and name in shapes else None
            part, dtype = (None, None) if x is None else (tuple(x.shape), core_name(x.dtype))
            inputs.append(Described(name, of_source, of_target, full, part, dtype, x is not None and needs_grad(x)))
    plan = Resharding[Tensor](groups.on_host(comm), inputs, coding, isinstance(comm, Communicator))
    outs = None if out is None else [out] if single else [out[name] for name in state]
    if outs is not None:
        with guard(comm, "all_to_all_v"):
            _check_outputs(plan, outs, list(state.values()))
    wants = [wants for *_, wants in plan.terms]
    if any(wants):
        plans = [plan.alone(i) for i in range(len(state))]
        with guard(comm, "all_to_all_v"):
            for each in itertools.compress(plans, wants):
                each.check_gradient()
        moved = [_Moved(comm, lies, each) for each in plans]
        calls = zip(state.values(), moved, wants, strict=True)
        tensors = [_Applied.apply(x, each) if recorded else each.run(x) for x, each, recorded in calls]
        return tensors[0] if single else dict(zip(state, tensors, strict=True))
    tools = _Tools(comm, lies)
    memory = None if outs is None else [each if each is None else each.detach() for each in outs]
    finish = plan.begin(list(state.values()), tools, async_op, memory)

    def result() -> Any:
        tensors = finish() if outs is None else (finish() and outs)
        return tensors[0] if single else dict(zip(state, tensors, strict=True))

    return tools.outcome(result, async_op)


def _check_outputs(plan: Resharding[Tensor], outs: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> None:
    """Raises where the caller's outputs are not what the targets are, or overlap one another or an input."""
    for out in outs:
        if out is not None:
            check_output("out", out, out.dtype)
    plan.check_outputs([None if out is None else (tuple(out.shape), core_name(out.dtype)) for out in outs])
    own, theirs = ([region(x.detach()) for x in each if x is not None and x.is_contiguous()] for each in (inputs, outs))
    _core.check_lists_apart(theirs, own, "out")


def _coding(format: Any, group_size: Any, device: torch.device) -> Quantization | None:
    """Returns the format in which tensors on a device travel, which its kernels know."""
    coding = traveling(format, group_size)
    if coding is not None and device.type != "cpu":
        check_format(coding, kernels_for(device.type))
    return coding


def _check_later(async_op: bool, *tensors: Tensor | None) -> None:
    """Raises where a handle would come for what autograd records."""
    if async_op and needs_grad(*tensors):
        raise InvalidParamError("async_op is True for a tensor that wants a gradient, expected False", id=1157)


def _layout(name: str, value: Any, size: int, group: Group) -> Layout:
    """Returns the layout with torch's meshes and placements in our words."""
    try:
        mesh, placements = value
        placements = list(placements)
    except (TypeError, ValueError):
        return read_layout(name, value, size)  # it raises the error
    if hasattr(mesh, "device_type"):
        ranks = mesh.mesh.cpu().numpy()
        if isinstance(group, dist.ProcessGroup):
            ranks = np.vectorize(lambda rank: dist.get_group_rank(group, int(rank)), otypes=[np.int64])(ranks)
        mesh = ranks
    elif isinstance(mesh, Tensor):
        mesh = mesh.cpu().numpy()
    plain = [_plain(name, each) for each in placements]
    strided = any(isinstance(each, tuple) for each in plain) and not any(isinstance(each, tuple) for each in placements)
    layout = read_layout(name, (mesh, plain), size)
    return _in_turn(layout) if strided else layout


def _in_turn(layout: Layout) -> Layout:
    """Returns a layout of strided shards as torch reads it: its mesh with dimensions in the order in which they divide.

    What is in p pieces has been divided before by later dimensions of the mesh, p ranks together, if there are such.
    """
    turns: dict[int, list[int]] = {}
    for along in reversed(range(layout.mesh.ndim)):
        if (parted := division(layout.placements[along])) is None:
            continue
        turn = turns.setdefault(parted[0], [])
        ranks = [math.prod(layout.mesh.shape[each] for each in turn[:n]) for n in range(len(turn) + 1)]
        if parted[1] not in ranks:
            return layout
        turn.insert(ranks.index(parted[1]), along)
    order = [along for turn in turns.values() for along in turn]
    order += [along for along in range(layout.mesh.ndim) if along not in order]
    parts = [division(placement) for placement in layout.placements]
    placements = [parted[0] if parted else each for parted, each in zip(parts, layout.placements, strict=True)]
    return Layout(np.ascontiguousarray(layout.mesh.transpose(order)), tuple(placements[along] for along in order))


def _plain(name: str, placement: Any) -> Any:
    kind = type(placement).__name__
    if not type(placement).__module__.startswith("torch.distributed.tensor"):
        return placement
    if kind == "Shard":
        return placement.dim
    if kind == "_StridedShard":
        return placement.dim, int(placement.split_factor)
    if kind == "Replicate":
        return None
    if kind == "Partial":
        return "prod" if placement.reduce_op == "product" else placement.reduce_op
    raise InvalidParamError(f"{name} has the placement {placement!r}, expected Shard, Replicate or Partial", id=1425)


def all_to_all_nd(
    input: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: Group = None,
    *,
    scatter_sizes: Sizes = None,
    gather_sizes: Sizes = None,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges one dimension of a tensor for another: ranks that have parts of the one get parts of the other.

    For every rank r:

        out_r = concatenate(over j, along gather_dim, split(input_j, scatter_sizes, along scatter_dim)[r])

    What goes to a rank is copied from where it lies in the input to where it belongs in the output: nothing is permuted
    before or after. On NPUs and GPUs, whose libraries move parts in one piece, they are copied before
    and after.

    Args:
        input: At least 2 dimensions, any dense dtype; equal on all ranks but for dimension ``gather_dim``.
            Read in place where what goes to a rank lies in rows at one distance, else copied first.
        scatter_dim, gather_dim: Two dimensions, the same on all ranks; below 0 they count from the last.
        group: A ProcessGroup, a `Communicator`, or None for all ranks.
        scatter_sizes: The lengths along ``scatter_dim`` that every rank gets, one per rank, or their sum. Default, and
            for a sum: ceil(n / W) each, the last ones smaller or empty, as `reshard` and DTensor divide.
        gather_sizes: The lengths along ``gather_dim`` that the ranks have, one per rank, or their sum, divided in the
            same way. Default: all have as much as this one.
        out: Where to receive: contiguous, of the result's shape and the input's dtype, apart from it in memory. An
            input that is not contiguous is copied first then. Not for an input that wants a gradient.
        async_op: Return ``(output, handle)`` at once.

    Returns:
        ``out`` if given, else a new tensor: the shape of ``input`` with ``scatter_sizes[r]`` and ``sum(gather_sizes)``
        along the two dimensions. Differentiable, to any order, and an operator
        of its own in a graph of torch.compile. None on a rank outside the group.

    Raises:
        TypeError: ``input`` is no tensor.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, is wrong.
        PeerMismatchError: two ranks disagree about dimensions, sizes or dtype; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    if not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        dims = scatter_dim, gather_dim, scatter_sizes, gather_sizes
        result = _core.all_to_all_nd(shared.core, input, out, *dims, async_op)
        if result is not None and result is not NotImplemented:
            return calls.started(shared, result, input) if async_op else result
    comm = None
    if is_tracing(input):
        if not (torch.compiler.is_compiling() or input.is_meta):
            groups.resolve(group, device_of(input))  # made before the graph runs, where possible
        rank, size = groups.rank_in(group), groups.world_size(group)
    else:
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return (None, None) if async_op else None
        rank, size = comm.rank, comm.size
    with guard(comm, "all_to_all_nd"):
        if not isinstance(input, Tensor):
            check_tensor("input", input)  # it raises the error
        swap = read_swap(input.shape, rank, size, scatter_dim, gather_dim, scatter_sizes, gather_sizes)
        if out is not None:
            check_untracked(needs_grad(input), out)
            check_output("out", out, input.dtype)
            _core.check_shape("out", out.shape, swap.shape_out)
    sizes = swap.scatter_sizes, swap.gather_sizes
    operands = input, swap.scatter, swap.gather, *sizes, rank, group if comm is None else comm
    if comm is None or not (async_op or out is not None):
        output = ops.all_to_all_nd(*operands)
        output = output if out is None else out.copy_(output)
        return (output, Done(output)) if async_op else output
    with guard(comm, "all_to_all_nd"):
        operation = calls.exchange_dimensions(comm, swap, input, out)
    if needs_grad(input):
        operation.result = ops.all_to_all_nd.ran(operation.result, *operands)
    if async_op:
        return operation.result, operation.submit()
    operation.run()
    return operation.result


def sequence_to_heads(
    input: Tensor,
    group: Group = None,
    *,
    sequence: Sizes = None,
    heads: Sizes = None,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges a part of the sequence with all heads for the whole sequence with a part of the heads.

    It is what attention needs whose tensors are divided along the sequence (Ulysses): `all_to_all_nd` with
    ``scatter_dim=heads_dim`` and ``gather_dim=sequence_dim``. `heads_to_sequence` brings the result back.

    Args:
        input: In the default order ``[batch, part of the sequence, heads, ...]``.
        group: A ProcessGroup, a `Communicator`, or None for all ranks.
        sequence: The lengths of the ranks' parts, one per rank, or their sum. Default: all are as long as this one.
        heads: How many heads every rank gets, one per rank, or their sum. Default: ceil(heads / W), the last ones fewer
            or none.
        sequence_dim, heads_dim: The two dimensions.
        out, async_op: See `all_to_all_nd`.

    Returns:
        ``[batch, sequence, part of the heads, ...]``, as `all_to_all_nd`.

    Raises:
        AllToAllVError: as `all_to_all_nd`.
    """
    sizes = {"scatter_sizes": heads, "gather_sizes": sequence}
    return all_to_all_nd(input, heads_dim, sequence_dim, group, out=out, async_op=async_op, **sizes)


def heads_to_sequence(
    input: Tensor,
    group: Group = None,
    *,
    sequence: Sizes = None,
    heads: Sizes = None,
    sequence_dim: int = 1,
    heads_dim: int = 2,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Any:
    """Exchanges the whole sequence with a part of the heads for a part of the sequence with all heads.

    See `sequence_to_heads`, whose transpose it is.

    Args:
        input: In the default order ``[batch, sequence, part of the heads, ...]``.
        group: A ProcessGroup, a `Communicator`, or None for all ranks.
        sequence: The lengths of the ranks' parts, one per rank, or their sum. Default: ceil(n / W), the last ones
            shorter or empty.
        heads: How many heads the ranks have, one per rank, or their sum. Default: all have as many as this one.
        sequence_dim, heads_dim: The two dimensions.
        out, async_op: See `all_to_all_nd`.

    Returns:
        ``[batch, part of the sequence, heads, ...]``, as `all_to_all_nd`.

    Raises:
        AllToAllVError: as `all_to_all_nd`.
    """
    sizes = {"scatter_sizes": sequence, "gather_sizes": heads}
    return all_to_all_nd(input, sequence_dim, heads_dim, group, out=out, async_op=async_op, **sizes)
