"""The reductions of torch.distributed, with torch's signatures: see `alltoallv.torch.api.collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions

from alltoallv import _core
from alltoallv._calls.collectives import CheckedCall, ReductionPlan, check_reduction, leaf_products, shape_of_list
from alltoallv._calls.counts import even_parts
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import (
    REDUCE_OPS,
    Collective,
    Method,
    Operation,
    Parameters,
    Tensors,
    Work,
    check_place,
    op_for,
    order_for,
)
from alltoallv.torch.eager.group import AnyCommunicator, Group, device_of
from alltoallv.torch.eager.observers import is_tracing
from alltoallv.torch.eager.tensors import (
    Copies,
    apart,
    as_input,
    check_one_dtype,
    core_name,
    in_place,
    joined,
    output_of,
)
from alltoallv.torch.graph import ops as ops
from alltoallv.torch.graph.calling import call_collective

__all__ = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "row_parallel_linear"]


_SUM = dist.ReduceOp.SUM


def _by_op(options: Any) -> Parameters:
    return Parameters(options.reduceOp)


def _at_once(
    operator: str,
    core: _core.Communicator,
    outs: Tensors,
    ins: Tensors,
    parameters: Parameters,
    limit: float | None,
    async_op: bool,
) -> Any:
    if parameters.order not in (None, "rank"):
        return None
    op = None
    for kind, name in REDUCE_OPS.items():  # to look it up takes eight times as long as to compare it with SUM
        if parameters.op is kind or parameters.op == kind:
            op = name
            break
    limit = -1.0 if limit is None else limit
    if operator == "reduce":
        return _core.call_plain(core, operator, outs[0], None, parameters.root, op, async_op, limit)
    if operator == "reduce_scatter" and len(ins) > 1:
        return _core.call_plain(core, operator, outs[0], ins, None, op, async_op, limit)
    return _core.reduce(core, operator, (ins or outs)[0], outs[0], op, limit, async_op)


@partial(
    Collective,
    outputs="tensor",
    updates=True,
    at_once=partial(_at_once, "all_reduce"),
    method=Method(("allreduce",), AllreduceOptions, _by_op, coalesced=("allreduce_coalesced",)),
)
def _all_reduce(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    copies: Copies = []
    out = in_place(outs[0], copies)
    x, op, order = ins[0] if ins else out, op_for(out, parameters.op), order_for(parameters)
    operation = calls.reduce(comm, "all_reduce", out, x, op, even_parts(x.numel(), comm.size), outs[0].shape, order)
    return operation.giving(outs, copies)


def all_reduce(
    tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False, *, order: str | None = None
) -> Work | None:
    """Replaces ``tensor`` by the combination of all ranks' tensors, element by element.

    Signature and meaning of ``torch.distributed.all_reduce``. In host memory all ranks get the same bits: the terms are
    combined in the order of ranks, 16-bit floats in float32, rounded once.

    Args:
        tensor: Any shape, the same on all ranks, as the dtype is: an integer, bool, float (not of 8 bits) or complex.
        op: ``ReduceOp.SUM``, ``PRODUCT``, ``MIN``, ``MAX``, for floats also ``AVG``, for integers and bool also
            ``BAND``, ``BOR``, ``BXOR``; for complex tensors SUM and AVG alone.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on devices too, with the bits of host memory, where that is the
            order anyway. Default: the group's, which is ``ALLTOALLV_ORDER`` or the engine's own.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return call_collective(_all_reduce, [tensor], [], group, async_op, Parameters(op, order=order))


@partial(
    Collective,
    outputs="tensor",
    updates=True,
    at_once=partial(_at_once, "reduce"),
    method=Method(("reduce",), ReduceOptions, lambda options: Parameters(options.reduceOp, options.rootRank)),
)
def _reduce(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    _core.checked_rank("dst", parameters.root, comm.size)
    copies: Copies = []
    x, here = in_place(outs[0], copies), comm.rank == parameters.root
    if not here:
        copies.clear()
    op, order = op_for(x, parameters.op), order_for(parameters)
    if isinstance(comm, Communicator):
        check_place(comm, x)
        dtype, counts = core_name(x.dtype), even_parts(x.numel(), comm.size)
        check_reduction(op, dtype)
        plan = ReductionPlan(comm.core, "reduce", dtype, op, counts, x.shape, parameters.root)
        call = CheckedCall(plan, (x.data_ptr(), x.data_ptr() if here else 0))
        return Operation(comm, "reduce", call, x, [x.numel()], [x.numel()] if here else [], list(outs), x, copies)
    out = x if here else x.clone()  # an engine combines on every rank
    operation = calls.reduce(comm, "all_reduce", out, out, op, even_parts(out.numel(), comm.size), out.shape, order)
    return operation.giving(outs, copies)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    order: str | None = None,
) -> Work | None:
    """Replaces the ``tensor`` of one rank by the combination of all ranks' tensors; the others' tensors stay.

    Signature and meaning of ``torch.distributed.reduce``; the bits and ``op`` are as for `all_reduce`.

    Args:
        dst: The receiving rank: its number in the job for a ProcessGroup, in the communicator for a `Communicator`.
        group_dst: The receiving rank's number in the group, in place of ``dst``.
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on devices too, with the bits of host memory, where that is the
            order anyway. Default: the group's, which is ``ALLTOALLV_ORDER`` or the engine's own.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return call_collective(
        _reduce, [tensor], [], group, async_op, Parameters(op, order=order), root=("dst", dst, group_dst)
    )


@partial(
    Collective,
    outputs="output",
    inputs="input_list",
    at_once=partial(_at_once, "reduce_scatter"),
    method=Method(("reduce_scatter",), ReduceScatterOptions, _by_op),
)
def _reduce_scatter(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    _core.check_list("input_list", ins, comm.size)
    check_one_dtype(*outs, *ins)
    parts = [as_input("input_list", x) for x in ins]
    counts = [x.numel() for x in parts]
    _core.check_part("output", outs[0].numel(), "input_list", counts[comm.rank], comm.rank)
    return _scattered(comm, outs, joined(parts), counts, parameters, shape_of_list(parts))


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    order: str | None = None,
) -> Work | None:
    """Combines ``input_list[j]`` of all ranks into rank j's ``output``.

    Signature and meaning of ``torch.distributed.reduce_scatter``: one tensor per rank, of any sizes, which are equal on
    all ranks; ``output`` has as many elements as this rank's entry. ``op`` as for `all_reduce`.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on devices too, with the bits of host memory, where that is the
            order anyway. Default: the group's, which is ``ALLTOALLV_ORDER`` or the engine's own.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return call_collective(_reduce_scatter, [output], input_list, group, async_op, Parameters(op, order=order))


@partial(
    Collective,
    outputs="output",
    inputs="input",
    operator="reduce_scatter",
    at_once=partial(_at_once, "reduce_scatter"),
    method=Method(
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ReduceScatterOptions,
        _by_op,
        flat=True,
        coalesced=("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
)
def _reduce_scatter_tensor(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    output, input = outs[0], ins[0]
    check_one_dtype(output, input)
    if input.numel() != comm.size * output.numel():
        raise InvalidTensorError(
            f"input has shape {tuple(input.shape)}, "
            f"expected {comm.size} times the elements of an output of shape {tuple(output.shape)}",
            9,
            id=2113,
        )
    return _scattered(comm, outs, as_input("input", input), [output.numel()] * comm.size, parameters, input.shape)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    order: str | None = None,
) -> Work | None:
    """Combines the ``input`` of all ranks, of which rank j gets the j-th of W equal parts as ``output``.

    Signature and meaning of ``torch.distributed.reduce_scatter_tensor``: ``input`` has W times the elements of
    ``output``. ``op`` as for `all_reduce`.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on devices too, with the bits of host memory, where that is the
            order anyway. Default: the group's, which is ``ALLTOALLV_ORDER`` or the engine's own.

    Returns:
        None, or the `Work` with ``async_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return call_collective(_reduce_scatter_tensor, [output], [input], group, async_op, Parameters(op, order=order))


def _scattered(
    comm: AnyCommunicator,
    outs: Tensors,
    x: Tensor,
    counts: list[int],
    parameters: Parameters,
    shape: Sequence[int] | None,
) -> Operation:
    copies: Copies = []
    out = output_of(outs[0], copies)
    x = apart([x], [out])[0]
    op, order = op_for(x, parameters.op), order_for(parameters)
    return calls.reduce(comm, "reduce_scatter", out, x, op, counts, shape, order).giving(outs, copies)


# A linear layer split by its inputs over the ranks, whose result has the same bits for every number of ranks.


def row_parallel_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, leaves: int, group: Group = None
) -> Tensor | None:
    """Runs a linear layer split by its inputs over the ranks: sums ``input @ weight.T``, and adds ``bias``.

    Every rank divides its product into L / W products of as many input features each, and all L are added as
    `functional.all_reduce` adds ``leaves``. So every product has the same shape for every number W of ranks, and the
    sum has the same bits, as far as torch's product of one shape has: on CPU with as many threads in every rank
    (``torch.set_num_threads``), on devices of one kind.

    Args:
        input: ``[..., K]``, this rank's part of the features, in rank order; its leading dimensions are the same on all
            ranks.
        weight: ``[N, K]``, this rank's columns of the layer's weight, in the input's dtype.
        bias: ``[N]``, added once to the sum; every rank gives the same.
        leaves: L, a multiple of W, up to 4096, equal on all ranks; K is a multiple of L / W.
        group: A ProcessGroup, a `Communicator`, or None for the default group.

    Returns:
        ``[..., N]`` in the input's dtype; None on a rank outside the group. Differentiable in input, weight and bias:
        the gradient is summed over the ranks, in a tree over them.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm: Any = None
    if not is_tracing(input):
        comm = groups.resolve(group, device_of(input))
        if comm is None:
            return None
    with guard(comm, "all_reduce"):
        products = torch.stack(leaf_products(input, weight, bias, leaves, groups.world_size(group), ops.multiply))
    total: Tensor = ops.all_reduce_leaves(products, leaves, group)
    return total if bias is None else total + bias
