"""The all-to-all family, also of experts' rows; `alltoallv.paddle` describes what all functions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from paddle import Tensor

from alltoallv._calls.counts import Counts, Unit
from alltoallv.paddle.front_end import Done, Group, Task, front_end

__all__ = [
    "all_to_all",
    "all_to_all_v",
    "alltoall",
    "alltoall_single",
    "exchange_counts",
    "global_gather",
    "global_scatter",
]


@overload
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    timeout: float | None = None,
) -> Tensor: ...
@overload
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: Literal[True],
    timeout: float | None = None,
) -> tuple[Tensor | None, Task]: ...
def all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit | None = None,
    out: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Sends a region of ``input`` to every rank and receives one from each.

    For every rank j, with this rank called r:

        out_r[rdispls_r[j] : rdispls_r[j] + recv_counts_r[j]] = input_j[sdispls_j[r] : sdispls_j[r] + send_counts_j[r]]

    Args:
        input: A tensor (in NumPy an array) of any shape and any dense dtype; taken flat, or by rows of dimension 0.
            Copied first if it is not contiguous.
        send_counts, recv_counts: One integer >= 0 per rank: a list, tuple, array or integer tensor. ``send_counts`` of
            rank i for j and ``recv_counts`` of rank j for i must agree. ``recv_counts=None`` learns them from the
            peers; the output is then packed.
        sdispls, rdispls: Where the regions begin; packed in rank order if left out. Packed, ``send_counts`` cover the
            whole input; with ``sdispls`` send regions may overlap and leave gaps. Receive regions may leave gaps.
        unit: What counts and displacements count: ``"element"``, or ``"row"`` of dimension 0; None: rows of an input of
            2 dimensions or more, elements of others.
        out: Where to receive; contiguous, of the input's dtype, apart from it in memory. Elements that no region covers
            keep their value. Left out, the output is allocated in shared memory, just large enough, gaps zero. In torch
            and Paddle it cannot be given for an input that wants a gradient.
        capacity: In torch and MindSpore, for tensors on an NPU, without the arguments ``rdispls``, ``out``,
            ``async_op``, ``timeout``: how many units this rank can receive. Counts then stay on the device, as int64
            tensors there, and the host does not wait for them: they may change in a captured graph. ``recv_counts`` are
            only compared with what comes. The result is a `alltoallv.torch.Received` (in MindSpore its own), whose
            ``check()`` raises what is raised at once elsewhere, also on every rank. Only where the kernels in Ascend C
            serve (docs/ascend.md), else BackendUnavailableError on every rank; with ``sdispls`` not differentiable.
        group: A group of the framework (in torch a ProcessGroup, in MindSpore a name), a `Communicator`, or None for
            all ranks.
        async_op: Return ``(output, handle)`` at once. With learnt counts the output is not known yet:
            ``(None, handle)``, and ``handle.result()`` returns it.
        timeout: Seconds to wait for the peers of tensors in host memory; default: the communicator's. In MindSpore and
            Paddle it also holds for the gradient's exchange; in torch it cannot be given for an input that wants one.

    Returns:
        ``out`` if given, else a new tensor: of one dimension if counts are elements; if they are rows, with the other
        dimensions of the input. In torch, Paddle, and MindSpore's PyNative mode it is differentiable, to any order: the
        gradient is the exchange with sends and receives swapped.

    Raises:
        TypeError: ``input`` is no tensor.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, is wrong.
        PeerMismatchError: two ranks disagree about operator, dtype or counts; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
    return front_end.all_to_all_v(
        input, send_counts, recv_counts, sdispls, rdispls, unit, out, group, async_op, timeout
    )


def exchange_counts(
    send_counts: Counts,
    group: Group = None,
) -> Tensor:
    """Returns what every rank will send to this one: entry j is rank j's ``send_counts`` entry for this rank.

    Args:
        send_counts: One integer >= 0 per rank.
        group: See `all_to_all_v`.

    Returns:
        int64, shape ``[W]``, on the CPU; None on a rank outside the group.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    return front_end.exchange_counts(send_counts, group)


def alltoall_single(
    out_tensor: Tensor,
    in_tensor: Tensor,
    in_split_sizes: Counts | None = None,
    out_split_sizes: Counts | None = None,
    group: Group = None,
    sync_op: bool = True,
    *,
    timeout: float | None = None,
) -> Task | None:
    """Splits ``in_tensor`` along dimension 0, sends part j to rank j, concatenates what arrives into ``out_tensor``.

    Signature and meaning are as in ``paddle.distributed.alltoall_single`` in Paddle 3: the output comes first, the
    input's split sizes before the output's. Split sizes count rows and default to equal parts, into which dimension 0
    must divide. It has no gradient, as in Paddle; `all_to_all_v` has one.

    Args:
        out_tensor: Shape ``[sum(out_split_sizes), ...]``, of the input's dtype; contiguous, apart from ``in_tensor``.
        in_tensor: Shape ``[sum(in_split_sizes), ...]``, any dtype; it is never written.
        in_split_sizes, out_split_sizes: One integer >= 0 per rank. What rank i sends to j, rank j must receive from i.
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    names = "out_tensor", "in_tensor", "out_split_sizes", "in_split_sizes"
    return _single(out_tensor, in_tensor, (out_split_sizes, in_split_sizes), group, sync_op, timeout, names)


def _single(
    out: Tensor, x: Tensor, splits: Any, group: Group, sync_op: bool, timeout: float | None, names: Any
) -> Task | None:
    comm = front_end.enter(group)
    if comm is None:
        return None
    call = front_end.single(comm, out, x, splits, not sync_op, timeout, names)
    return Done(call) if sync_op else call[1]


def alltoall(
    out_tensor_list: list[Tensor] | Tensor,
    in_tensor_list: Sequence[Tensor] | Tensor,
    group: Group = None,
    sync_op: bool = True,
    *,
    timeout: float | None = None,
) -> Task | None:
    """Sends ``in_tensor_list[j]`` to rank j and receives ``out_tensor_list[j]`` from it.

    Signature and meaning are as in ``paddle.distributed.alltoall`` in Paddle 3: the outputs come first. Tensors may
    have any shapes but one dtype; the data move directly between them. An empty ``out_tensor_list`` is filled with
    tensors of the shapes of ``in_tensor_list``. Two tensors instead of the lists are divided into W equal parts along
    dimension 0, as by `alltoall_single`.

    Args:
        group: A Paddle group, a `Communicator`, or None for all ranks.
        sync_op: Return when the outputs are complete; if false, at once, and they are after the task's ``wait()``.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        A task, also with ``sync_op=True``; None, with a warning, on a rank outside the group.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    if isinstance(out_tensor_list, Tensor) and isinstance(in_tensor_list, Tensor):
        singles = "out_tensor_list", "in_tensor_list", "", ""
        return _single(out_tensor_list, in_tensor_list, (None, None), group, sync_op, timeout, singles)
    names = "out_tensor_list", "in_tensor_list", ""
    return front_end.call("all_to_all", group, not sync_op, out_tensor_list, in_tensor_list, names, timeout=timeout)


all_to_all = alltoall
"""`alltoall`, by its name in the other front ends."""


def global_scatter(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """Sends every row to the rank of its expert, like `alltoallv.numpy.global_scatter`, on tensors, with gradients.

    Counts that are tensors must be int64, else it raises InvalidTensorError with Paddle's text. ``use_calc_stream`` is
    ignored on CPU.
    """
    return front_end.global_scatter(x, local_count, global_count, group)


def global_gather(
    x: Tensor, local_count: Counts, global_count: Counts, group: Group = None, use_calc_stream: bool = True
) -> Tensor:
    """Reverses `global_scatter`: brings the rows back to the ranks that sent them, with gradients."""
    return front_end.global_gather(x, local_count, global_count, group)
