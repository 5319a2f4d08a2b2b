"""Collectives of ``mindspore.mint.distributed`` that write into lists of tensors, that reduce, or that have a root.

Signatures and return values are as in ``mint.distributed``: None, or a `CommHandle` with ``async_op=True``. Outputs
are contiguous tensors of the caller. ``dst`` and ``src`` are ranks of the job; with a `Communicator` they are ranks in
it. Gradients pass through the outputs. With a gradient, an output must not be a part of a larger tensor, tensors have
one size on all ranks, and ``op`` is ``"sum"``. reduce, gather and scatter have no gradients: inside a gradient function
they refuse tensors that want one, on all ranks. All functions raise the errors of `alltoallv.mindspore.all_to_all_v`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, ops

from alltoallv import _core
from alltoallv._calls.collectives import Reduction, check_order, gathering
from alltoallv._calls.counts import Counts
from alltoallv._calls.guard import guard
from alltoallv._core import CheckedCall
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.front_end import (
    LATE,
    Broadcast,
    Gradient,
    ListExchange,
    apply,
    check_async,
    enter,
    front_end,
    refuse_gradient,
    refuse_timeout,
    summed,
)
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import CommHandle, Done, executor, in_queue

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_leaves",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "row_parallel_linear",
    "scatter",
]

_NAMES = "tensor_list", "tensor", ""
Values = Callable[[], Sequence[Tensor]]  # returns the values of the outputs, for their gradient


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> CommHandle | None:
    """Sends ``input_tensor_list[j]`` to rank j and receives ``output_tensor_list[j]`` from it.

    Tensors may have any shapes but one dtype; what arrives keeps the shape of the receiver's tensor. The data move
    directly between the given tensors, without packing.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """

    def gradient(comm: Communicator, call: CheckedCall) -> Values:
        outputs: list[Any] = call.outputs
        shapes = [tuple(out.shape) for out in outputs]
        return lambda: ListExchange.apply(comm, shapes, *call.inputs)

    comm, tensors = enter(group), (output_tensor_list, input_tensor_list)
    if in_queue():
        with guard(comm, "all_to_all"):
            refuse_timeout(timeout)
    names = "output_tensor_list", "input_tensor_list", ""
    return front_end.call("all_to_all", comm, async_op, *tensors, names, timeout=timeout, gradient=gradient)


def all_reduce(
    tensor: Tensor, op: str = "sum", group: Group = None, async_op: bool = False, *, order: str | None = None
) -> CommHandle | None:
    """Replaces ``tensor`` by the reduction of all ranks' tensors of this shape and dtype; all ranks get the same bits.

    Args:
        tensor: Any shape; an integer, bool or float dtype, or, for sum and avg, a complex one.
        op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, or for floats ``"avg"``. Values are combined in the order of
            ranks, 16-bit floats in float32, and rounded once. Sum and avg have a gradient.
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on NPUs too, with the bits of host memory, where that is the order
            anyway. Default: the communicator's, which is ``ALLTOALLV_ORDER`` or HCCL's own.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = _ordered(group, "all_reduce", order)
    arguments = (comm.core, "all_reduce", tensor, tensor, op)
    if async_op is False and isinstance(tensor, Tensor) and _core.reduce(*arguments) is not None:
        return None

    def gradient(comm: Communicator, call: CheckedCall) -> Values:
        if op not in ("sum", "avg"):
            raise InvalidParamError(f"op is {op!r}, expected 'sum' or 'avg' for a tensor with a gradient", id=1318)
        return lambda: [summed(tensor, comm, op)]

    return front_end.call("all_reduce", comm, async_op, tensor, reduce_op=op, gradient=gradient)


def all_reduce_leaves(tensor: Tensor, leaves: int, group: Group = None) -> Tensor:
    """Returns the sum of L tensors, of which every one of W ranks has its share ``tensor``, ``[L / W, ...]``.

    All are added in a tree over L alone: neighbours in pairs, then the results in pairs, and so on; 16-bit floats in
    float32, rounded once. So the sum has the same bits for every W. Its gradient is for each leaf the sum of the
    ranks' gradients, in such a tree over the ranks.

    Args:
        tensor: Of one shape and dtype on all ranks: an integer, bool, float or complex dtype; on NPUs
            no bool, complex or unsigned one but uint8.
        leaves: L, a multiple of W, up to 4096, equal on all ranks.
        group: The name of a group, a `Communicator`, or None for all ranks.

    Returns:
        Shape ``[...]``, a new tensor.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    total: Tensor = front_end.all_reduce_leaves(tensor, leaves, group, apply)
    return total


def row_parallel_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, leaves: int, group: Group = None
) -> Tensor:
    """Runs a linear layer split by its inputs over the ranks: sums ``input @ weight.T``, and adds ``bias``.

    Every rank divides its product into L / W products of as many input features each, and all L are added as by
    `all_reduce_leaves`. So every product has the same shape for every number W of ranks, and the sum has the same bits,
    as far as the framework's product of one shape has: on CPU with as many threads in every rank.

    Args:
        input: ``[..., K]``, this rank's part of the features, in rank order; its leading dimensions are the same on all
            ranks.
        weight: ``[N, K]``, this rank's columns of the layer's weight, in the input's dtype.
        bias: ``[N]``, added once to the sum; every rank gives the same.
        leaves: L, a multiple of W, up to 4096, equal on all ranks; K is a multiple of L / W.
        group: The name of a group, a `Communicator`, or None for all ranks.

    Returns:
        ``[..., N]`` in the input's dtype. Differentiable in input, weight and bias.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    total: Tensor = front_end.row_parallel_linear((input, weight, bias), leaves, group, apply, multiply, ops.stack)
    return total


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    return ops.matmul(x.contiguous(), weight.contiguous().T)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    order: str | None = None,
) -> CommHandle | None:
    """Reduces ``input_list[j]`` of all ranks into rank j's ``output``.

    ``input_list`` has one tensor per rank, of any sizes, but the same on all ranks. ``op`` as in `all_reduce`.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on NPUs too, with the bits of host memory, where that is the order
            anyway. Default: the communicator's, which is ``ALLTOALLV_ORDER`` or HCCL's own.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm, counts = _ordered(group, "reduce_scatter", order), None
    inputs: Any = input_list
    if in_queue() and isinstance(input_list, list | tuple) and all(isinstance(x, Tensor) for x in input_list):
        with guard(comm, "reduce_scatter"):
            counts = [x.size for x in input_list]  # addresses are not known yet: count as for one tensor
            inputs = ops.concat([x.reshape(-1) for x in input_list])
    terms: dict[str, Any] = {"reduce_op": op, "counts": counts, "gradient": _scattered_sum(op)}
    return front_end.call("reduce_scatter", comm, async_op, output, inputs, ("output", "input_list", ""), **terms)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    order: str | None = None,
) -> CommHandle | None:
    """Reduces the ``input`` of all ranks; rank j gets the j-th of W equal parts in ``output``.

    ``input`` has W times the elements of ``output``. ``op`` as in `all_reduce`.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on NPUs too, with the bits of host memory, where that is the order
            anyway. Default: the communicator's, which is ``ALLTOALLV_ORDER`` or HCCL's own.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = _ordered(group, "reduce_scatter", order)
    terms: dict[str, Any] = {"reduce_op": op, "gradient": _scattered_sum(op)}
    return front_end.call("reduce_scatter", comm, async_op, output, input, ("output", "input_list", ""), **terms)


def reduce_scatter_tensor_uneven(
    output: Tensor,
    input: Tensor,
    input_split_sizes: Counts | None = None,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
) -> CommHandle | None:
    """Reduces the ``input`` of all ranks; rank j gets ``input_split_sizes[j]`` rows of dimension 0 of the result.

    The split sizes are the same on all ranks, and default to equal parts. ``op`` as in `all_reduce`.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    terms: dict[str, Any] = {"reduce_op": op, "counts": _sizes(input_split_sizes), "gradient": _scattered_sum(op)}
    names = "output", "input", "input_split_sizes"
    return front_end.call("reduce_scatter", group, async_op, output, input, names, **terms)


def _ordered(group: Group, operator: str, order: str | None) -> Communicator:
    """Returns a group's communicator, whose sums and their gradients on NPUs have the order that a call asks for."""
    comm = enter(group)
    if order is None:
        return comm
    check_order(comm, operator, order)
    return Communicator(comm.core, order=order) if in_queue() and comm.order != order else comm


def _sizes(sizes: Counts | None) -> Counts:
    """Returns split sizes; no entries mean equal sizes."""
    return () if sizes is None else sizes


def _scattered_sum(op: str) -> Gradient:
    def gradient(comm: Communicator, call: CheckedCall) -> Values:
        parts: list[Any] = call.inputs
        if op != "sum" or len({x.size for x in parts}) > 1:
            raise InvalidParamError(f"op is {op!r}, expected 'sum' of equal parts for tensors with a gradient", id=1319)
        result: Any = call.result
        counts = call.counts or [result.size] * comm.size

        def values() -> Sequence[Tensor]:
            x = parts[0] if len(parts) == 1 else ops.concat([part.reshape(-1) for part in parts])
            shapes = tuple(x.shape), tuple(result.shape)
            return [apply(x, Reduction(LATE, comm, "reduce_scatter", *shapes, "sum", counts))]

        return values

    return gradient


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Copies the ``tensor`` of rank j into ``tensor_list[j]`` of every rank; both have the same size.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return front_end.call(
        "all_gather", group, async_op, tensor_list, tensor, _NAMES, one_tensor=False, gradient=_gathered
    )


def all_gather_into_tensor_uneven(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Counts | None = None,
    group: Group = None,
    async_op: bool = False,
) -> CommHandle | None:
    """Concatenates the ``input`` of all ranks along dimension 0 into ``output``.

    Rank j's input has ``output_split_sizes[j]`` rows; the sizes are the same on all ranks and default to equal ones.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    names = "output", "input", "output_split_sizes"
    terms: dict[str, Any] = {"counts": _sizes(output_split_sizes), "gradient": _gathered}
    return front_end.call("all_gather", group, async_op, output, input, names, one_tensor=True, **terms)


def _gathered(comm: Communicator, call: CheckedCall) -> Values:
    inputs: list[Any] = call.inputs
    outputs: list[Any] = call.outputs
    (x,), counts = inputs, call.counts or [out.size for out in outputs]
    if not call.counts and len(set(counts)) > 1:
        raise InvalidParamError("tensor_list has tensors of different sizes, expected one size for a gradient", id=1320)

    def values() -> Sequence[Tensor]:
        flat = apply(x, gathering(LATE, comm, x.shape, (sum(counts),), counts))
        return [flat] if call.counts else [flat[j * x.size : (j + 1) * x.size] for j in range(comm.size)]

    return values


def broadcast(tensor: Tensor, src: int, group: Group = None, async_op: bool = False) -> CommHandle | None:
    """Copies the ``tensor`` of one rank into the tensors of all others, which have the same size and dtype.

    ``src`` is that rank's number in the job; with a `Communicator`, its rank there. The gradient is the sum of all
    ranks' gradients and goes to ``src``.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """

    def gradient(comm: Communicator, call: CheckedCall) -> Values:
        return lambda: [Broadcast.apply(tensor, comm, groups.rank_in(group, src, "src"))]

    return front_end.call("broadcast", group, async_op, tensor, root=("src", src), gradient=gradient)


def reduce(
    tensor: Tensor,
    dst: int,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    order: str | None = None,
) -> CommHandle | None:
    """Replaces the ``tensor`` of rank ``dst`` by the reduction of all tensors; the other ranks' tensors do not change.

    ``op`` and the result's bits are as in `all_reduce`.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.
        order: ``"rank"`` adds in the order of ranks on NPUs too, with the bits of host memory, where that is the order
            anyway. Default: the communicator's, which is ``ALLTOALLV_ORDER`` or HCCL's own.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = _ordered(group, "reduce", order)
    if not in_queue():
        return front_end.call("reduce", group, async_op, tensor, reduce_op=op, root=("dst", dst))
    # HCCL reduces on all ranks, here into a copy: our transport over it has no reduction to one rank.
    with guard(comm, "all_reduce", TypeError):
        LATE.check_output("tensor", tensor)
        refuse_gradient("reduce", tensor)
        root = front_end.checked_rank(comm, group, "dst", dst)
        total = tensor.copy()
    all_reduce(total, op, comm)
    if comm.rank == root:
        tensor.copy_(total)
    return Done(tensor) if async_op else None


def gather(
    tensor: Tensor, gather_list: Sequence[Tensor], dst: int = 0, group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Copies the ``tensor`` of rank j into ``gather_list[j]`` of rank ``dst``; both have the same size.

    Other ranks ignore ``gather_list``.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return front_end.call(
        "gather", group, async_op, gather_list, tensor, ("gather_list", "tensor", ""), root=("dst", dst)
    )


def scatter(
    tensor: Tensor, scatter_list: Sequence[Tensor], src: int = 0, group: Group = None, async_op: bool = False
) -> CommHandle | None:
    """Copies ``scatter_list[j]`` of rank ``src`` into the ``tensor`` of rank j; both have the same size.

    Other ranks ignore ``scatter_list``.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    return front_end.call(
        "scatter", group, async_op, tensor, scatter_list, ("tensor", "scatter_list", ""), root=("src", src)
    )


def barrier(group: Group = None, async_op: bool = False, device_ids: Any = None) -> CommHandle | None:
    """Returns when every rank has called it; a warning and the timeout's error name late ranks.

    ``device_ids`` is accepted for compatibility with MindSpore and ignored.

    Args:
        group: The name of a group, a `Communicator`, or None for all ranks.
        async_op: Return at once; the outputs are complete after the handle's ``wait()``, which raises the errors.

    Returns:
        None, or the `CommHandle` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = enter(group)
    if in_queue():
        executor.sync()
        comm = on_host(comm)
    with guard(comm, "barrier", TypeError):
        check_async(async_op)
        ready = _core.CheckedCall(LATE, comm.core, "barrier")
    if async_op:
        return CommHandle(comm, ready.submit(), (ready,), lambda: None)
    ready.run()
    return None
