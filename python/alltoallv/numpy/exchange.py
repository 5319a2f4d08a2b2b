"""The all-to-all family, also as a plan that repeats an exchange and as a dispatcher of tokens, and all gathers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.adapters import not_contiguous
from alltoallv._calls.counts import Counts, Unit, check_length, plan_request
from alltoallv._calls.dispatching import WEIGHED, Dispatching, sum_dtype
from alltoallv._calls.dispatching import DispatchState as DispatchState
from alltoallv._calls.exchanges import ExpertRows
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.dtypes import core_name
from alltoallv.errors import InvalidTensorError
from alltoallv.numpy.arrays import (
    ADAPTER,
    Array,
    Work,
    address,
    as_input,
    check_array,
    check_output,
    later,
    region,
    resolve,
)

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_v",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_v",
    "barrier",
    "exchange_counts",
    "global_gather",
    "global_scatter",
]


class _Exchanges(ExpertRows[Array, Communicator | None, Work]):
    adapter, starts = ADAPTER, True

    enter = staticmethod(resolve)

    def check(self, name: str, x: Any) -> Array:
        array = as_input(name, x)
        core_name(array.dtype)
        return array

    def check_strided(self, name: str, x: Any) -> Array:
        return self.check(name, x) if not isinstance(x, np.ndarray) or not x.dtype.isnative else x

    def started(self, comm: Communicator, call: tuple[Array | None, Any, Any], input: Any) -> tuple[Array | None, Work]:
        output, pending, used = call
        if output is not None:
            return output, Work(comm, pending, (used, output), lambda: output)
        return None, Work(comm, pending.work, (used,), partial(pending.output, used))

    def numbers(self, values: npt.NDArray[np.int64]) -> Array:
        return values


front_end = _Exchanges()


@overload
def all_to_all_v(
    input: Array,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit | None = None,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: Literal[False] = False,
    timeout: float | None = None,
) -> Array: ...
@overload
def all_to_all_v(
    input: Array,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit | None = None,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: Literal[True],
    timeout: float | None = None,
) -> tuple[Array | None, Work]: ...
def all_to_all_v(
    input: Array,
    send_counts: Counts,
    recv_counts: Counts | None = None,
    *,
    sdispls: Counts | None = None,
    rdispls: Counts | None = None,
    unit: Unit | None = None,
    out: Array | None = None,
    group: Communicator | None = None,
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
    comm = resolve(group)
    result = _core.all_to_all_v(  # here, not by front_end.all_to_all_v: a frame is 5 % of a small call
        comm.core, input, out, send_counts, recv_counts, sdispls, rdispls, unit, async_op, timeout
    )
    if result is not None:
        return front_end.started(comm, result, input) if async_op else result
    counts = send_counts, recv_counts, sdispls, rdispls, unit
    return front_end.move("all_to_all_v", comm, input, out, counts, async_op, timeout)


def exchange_counts(
    send_counts: Counts,
    group: Communicator | None = None,
) -> Array:
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


def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Counts | None = None,
    input_split_sizes: Counts | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Splits ``input`` along dimension 0, sends part j to rank j, and concatenates what arrives into ``output``.

    Signature and meaning are as in ``torch.distributed.all_to_all_single``.

    Args:
        output: Shape ``[sum(output_split_sizes), ...]``; contiguous, of the input's dtype, apart from it in memory.
        input: Shape ``[sum(input_split_sizes), ...]``, any dtype.
        output_split_sizes, input_split_sizes: Rows from and for every rank; by default equal parts, for which
            dimension 0 must divide.
        group, async_op, timeout: See `all_to_all_v`.

    Returns:
        None, or the handle with ``async_op=True``. No gradient passes through it in torch, as in torch.distributed;
        `alltoallv.torch.functional` has one with gradients, and so has MindSpore's PyNative mode here.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    return front_end.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op, timeout)


def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Concatenates the ``input_tensor`` of all ranks, in rank order, into ``output_tensor``.

    Signature and meaning are as in ``torch.distributed.all_gather_into_tensor``.

    Args:
        output_tensor: Contiguous, of W times the elements, in shape ``[W * x1, x2, ...]``, ``[W, x1, x2, ...]`` or any
            other.
        input_tensor: Shape ``[x1, x2, ...]``, one on all ranks, of one dtype; may be this rank's part of the output.
        group, async_op, timeout: See `all_to_all_v`.

    Returns:
        None, or the handle with ``async_op=True``.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    return front_end.all_gather_into_tensor(output_tensor, input_tensor, group, async_op, timeout)


def global_scatter(
    x: Array,
    local_count: Counts,
    global_count: Counts,
    group: Communicator | None = None,
) -> Array:
    """Sends every row to the rank of its expert. Differentiable where `all_to_all_v` is.

    Args:
        x: Rows sorted by rank, then by expert: ``local_count[e + j * E]`` rows for expert e of rank j.
            Shape ``[n, ...]``.
        local_count, global_count: ``W * E`` integers >= 0, flat or of shape ``[W, E]``; entry ``e + j * E`` stands for
            expert e and rank j: rows that go from here to expert e of rank j, and rows that come from rank j for
            expert e of this rank.
        group: See `all_to_all_v`.

    Returns:
        Shape ``[sum(global_count), ...]``, rows sorted by this rank's expert, then by the rank they come from.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, also about the rows of one expert, or one
            is lost or late.
    """
    return front_end.global_scatter(x, local_count, global_count, group)


def global_gather(
    x: Array,
    local_count: Counts,
    global_count: Counts,
    group: Communicator | None = None,
) -> Array:
    """Brings the rows of `global_scatter` back to the ranks that sent them: its inverse, as differentiable.

    Args:
        x: Rows sorted by this rank's expert, then by rank. Shape ``[sum(global_count), ...]``.
        local_count, global_count, group: See `global_scatter`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the rank they come from, then by that rank's expert.

    Raises:
        AllToAllVError: as `global_scatter`.
    """
    return front_end.global_gather(x, local_count, global_count, group)


def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[npt.ArrayLike],
    group: Communicator | None = None,
    async_op: bool = False,
    *,
    timeout: float | None = None,
) -> Work | None:
    """Sends ``input_tensor_list[j]`` to rank j and receives ``output_tensor_list[j]`` from it.

    Signature and meaning are as in ``torch.distributed.all_to_all``. Arrays may have any sizes but one dtype; the
    data move directly between the given arrays.

    Args:
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        None, or the `Work` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm, names = resolve(group), ("output_tensor_list", "input_tensor_list", "")
    lists = output_tensor_list, input_tensor_list
    call = _core.call(ADAPTER, comm.core, "all_to_all", *lists, None, None, None, None, names, async_op, timeout)
    return later(comm, call)[1] if async_op else None


def all_gather(
    input: npt.ArrayLike,
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Gathers the ``input`` of every rank, stacked: shape ``[W, *input.shape]``. Inputs have one shape and dtype.

    Args:
        input: Any shape and any dtype of fixed size.
        out: The array for the result: contiguous, of the input's dtype, W times its elements, apart from it except for
            this rank's part. By default it is allocated in shared memory.
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        The output, or ``(output, work)`` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = resolve(group)
    result = _core.all_gather(comm.core, out, input, async_op, timeout)
    if result is not None:
        return front_end.started(comm, result, input) if async_op else result
    return front_end.gather("all_gather", comm, out, input, async_op, timeout, ("out", "input"))


def all_gather_v(
    input: npt.ArrayLike,
    recv_counts: Counts | None = None,
    *,
    out: Array | None = None,
    group: Communicator | None = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Concatenates the ``input`` of all ranks, each with any number of rows, in the order of ranks.

    Args:
        input: Any dtype of fixed size, at least 1 dimension; all dimensions but the first are equal on all ranks.
        recv_counts: The number of rows of every rank's input; None asks the peers.
        out: The array for the result: contiguous, of the input's dtype, apart from the input, with at least as many
            rows as the result. Needs ``recv_counts``. By default it is allocated in shared memory.
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        An array of shape ``[sum of all rows, *input.shape[1:]]``; ``(output, work)`` with ``async_op=True``. Without
        ``recv_counts`` that output is None, and the array is the work's result.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = resolve(group)
    with guard(comm, "all_gather"):
        x = as_input("input", input)
        _core.row_size(x.shape)  # refuses an input without rows
        counts = ([len(x)] * comm.size, recv_counts, [0] * comm.size, None, "row")
    return front_end.move("all_gather", comm, x, out, counts, async_op, timeout)


def barrier(*, group: Communicator | None = None, async_op: bool = False, timeout: float | None = None) -> Work | None:
    """Returns when every rank has called it. A warning and the timeout's error name late ranks.

    Args:
        group: A `Communicator`, or None for the default one.
        async_op: Return at once; the outputs are complete after the work's ``wait()``, which raises the errors.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        None, or the `Work` with ``async_op=True``.

    Raises:
        AllToAllVError: On every rank: an argument of any rank is wrong (InvalidParamError, InvalidTensorError), ranks
            disagree (PeerMismatchError), or one is lost or late (PeerLostError, CommTimeoutError).
    """
    comm = resolve(group)
    call = _core.call(ADAPTER, comm.core, "barrier", async_op=async_op, timeout=timeout)
    return later(comm, call)[1] if async_op else None


class Plan(_core.ArrayPlan):
    """`all_to_all_v` with counts that are given once.

    Making a plan does not communicate; calling it is collective. A peer may call the function of the same name instead:
    both are the same operator. A call is ``plan(input, out=None, *, timeout=None)``:

    Args:
        input: Contiguous array of the plan's dtype, with ``input_size`` elements, taken flat; more with ``sdispls``.
        out: The array for the result: contiguous, of the plan's dtype, with at least ``output_size`` elements, without
            overlap with ``input``. Elements outside the receive regions keep their value. By default a flat array of
            ``output_size`` elements is allocated in shared memory, with zeros in its gaps.
        timeout: Seconds to wait for the peers; default: the communicator's.

    Returns:
        The output.

    Raises:
        The errors of `all_to_all_v`.
    """

    def __init__(
        self,
        send_counts: Counts,
        recv_counts: Counts,
        dtype: npt.DTypeLike = np.float32,
        *,
        sdispls: Counts | None = None,
        rdispls: Counts | None = None,
        group: Communicator | None = None,
    ) -> None:
        """The arguments are as for `all_to_all_v`, in elements.

        Raises:
            InvalidParamError, InvalidTensorError: an argument is wrong; the peers' next call also raises the error.
        """
        self._communicator = comm = resolve(group)
        with guard(comm, "all_to_all_v"):
            self.dtype = np.dtype(dtype)
            self._covers = sdispls is None
            self.input_size, request = plan_request(comm.size, send_counts, recv_counts, sdispls, rdispls)
            (self.output_size,), self._gaps = request.shape, request.has_gaps
            plan = request.plan(comm.core, "all_to_all_v", core_name(self.dtype))
            self._run = plan.run
            super().__init__(plan, self.input_size, self.output_size, self._covers)

    if TYPE_CHECKING:

        def __call__(self, input: Array, out: Array | None = None, *, timeout: float | None = None) -> Array:
            """Exchanges ``input`` and returns the output; for shapes and errors see above."""

    def _checked(self, input: Array, out: Array | None, timeout: float | None) -> Array:
        """Runs a call whose arrays the fast path does not take: arrays of rare kinds, and wrong ones."""
        with guard(self._communicator, "all_to_all_v"):
            self._check_input(input)
            if out is None:
                out = ADAPTER.new((self.output_size,), input, zero=self._gaps)
            else:
                check_output("out", out, self.dtype)
                check_length("out", out.size, self.output_size, False)
                _core.check_apart(region(out), region(input))
            source, target = address(input), address(out)
            limit = _core.read_timeout(timeout)
        self._run(source, target, limit)
        return out

    def _check_input(self, input: Array) -> None:
        check_array("input", input)
        if input.dtype != self.dtype:
            raise InvalidTensorError(f"input has dtype {input.dtype}, expected {self.dtype} as the plan", 13, id=2064)
        if not input.flags.c_contiguous:
            raise not_contiguous("input")
        check_length("input", input.size, self.input_size, self._covers)


class MoEDispatcher(Dispatching[Array]):
    """Sends tokens to their experts, which are spread over the ranks of a group, and brings the results back.

    A token travels once to every rank that has one of its experts, with its gate weights and expert numbers, in one
    exchange, which also states how many rows arrive; results come back in pieces of about 16 MiB. Every method is
    collective: all ranks call it, also those without tokens or rows. Results do not depend, to the bit, on which rank
    holds a token or an expert, if an expert treats every row by itself and no capacity is set.

    Args:
        num_experts: Number of experts on all ranks together.
        group: A `Communicator`, or None for the default one.
        options: ``capacity``, ``drop``, ``alignment``, ``payload``, ``combine_payload``, ``codes``, ``placement``,
            ``active_ranks``; equal on all ranks. See `RoutingOptions`.

    A step:

        dispatcher = MoEDispatcher(8)
        rows, counts, state = dispatcher.dispatch(tokens, ids, weights)
        parts = np.split(rows, np.cumsum(counts)[:-1])
        outputs = np.concatenate([expert(part) for expert, part in zip(experts, parts)])
        tokens = dispatcher.combine(outputs, state)

    The last four lines are also ``dispatcher(tokens, ids, weights, experts)``.
    """

    adapter = ADAPTER

    def member(self) -> Communicator:
        return resolve(self.group)

    def array(self, name: str, x: Any) -> Array:
        return as_input(name, x)

    def weighted(self, expert_outputs: Any, state: DispatchState[Array]) -> tuple[Array, Array | None]:
        """Returns rows and weights separately where the combine multiplies them."""
        rows, weights = as_input("expert_outputs", expert_outputs), state.weights
        if weights is None or {core_name(rows.dtype), core_name(weights.dtype)} <= {*WEIGHED}:
            return rows, weights
        _core.moe_check_outputs(rows.shape, len(weights))
        wide = sum_dtype(rows.dtype, weights.dtype)
        each = weights.astype(wide).reshape(-1, *[1] * (rows.ndim - 1))
        return (rows.astype(wide) * each).astype(rows.dtype), None

    def layer(self, tokens: Any, expert_ids: Any, gate_weights: Any, *options: Any) -> Array:
        """Accepts everything that NumPy can convert to arrays."""
        weights = None if gate_weights is None else np.asarray(gate_weights)
        return super().layer(np.asarray(tokens), np.asarray(expert_ids), weights, *options)

    def parts(self, tokens: Array, ends: Sequence[int]) -> list[Array]:
        return np.split(tokens, ends)[: len(ends)]

    def joined(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)
