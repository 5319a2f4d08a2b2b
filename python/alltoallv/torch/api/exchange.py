"""`all_to_all_v` on torch tensors, also as a plan that repeats an exchange, and for the rows of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls import experts
from alltoallv._calls.adapters import check_on_npu, check_untracked
from alltoallv._calls.counts import Counts, Unit, check_length, plan_request, read_request
from alltoallv._calls.experts import Matrix
from alltoallv._calls.guard import COUNT_NAMES, guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.quantization.requests import exclude as check_excluded
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import (
    COLLECTIVES,
    Collective,
    Operation,
    Parameters,
    Received,
    Tensors,
    Work,
    counts_on_device,
)
from alltoallv.torch.eager.group import AnyCommunicator, Group, device_of
from alltoallv.torch.eager.observers import check_untimed, is_tracing
from alltoallv.torch.eager.tensors import (
    as_input,
    check_contiguous,
    check_dtype,
    check_memory,
    check_output,
    check_tensor,
    core_name,
    needs_grad,
    reads_rows,
    region,
    row_size,
    shaped,
)
from alltoallv.torch.graph import calling
from alltoallv.torch.graph import ops as ops
from alltoallv.torch.graph.calling import is_watched
from alltoallv.torch.graph.ops import Operator, communicator_of, known_size

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from alltoallv._calls.front_end import ExchangeOptions

__all__ = ["all_to_all_v", "exchange_counts", "global_gather", "global_scatter"]


@partial(Collective, outputs="out", inputs="input", updates=True)
def _all_to_all_v(comm: AnyCommunicator, outs: Tensors, ins: Tensors, parameters: Parameters) -> Operation:
    out, x = outs[0], as_input("input", ins[0])
    check_dtype("out", out, x.dtype)
    sends, recvs, sdispls, rdispls = parameters.counts
    request = _core.Request.all_to_all_v(comm.size, x.shape, sends, recvs, sdispls, rdispls, parameters.unit, out.shape)
    return calls.exchange(comm, "all_to_all_v", out, x, request.layout, request.row, request=request)


class _AllToAllV(Protocol):
    """The type of `all_to_all_v`: with async_op it also returns a handle; with a capacity it returns a `Received`."""

    @overload
    def __call__(
        self,
        input: Tensor,
        send_counts: Counts,
        recv_counts: Counts | None = None,
        *,
        capacity: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[ExchangeOptions[Tensor, Group]],
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        input: Tensor,
        send_counts: Counts,
        recv_counts: Counts | None = None,
        *,
        capacity: None = None,
        async_op: Literal[True],
        **options: Unpack[ExchangeOptions[Tensor, Group]],
    ) -> tuple[Tensor | None, Work]: ...
    @overload
    def __call__(
        self,
        input: Tensor,
        send_counts: Counts,
        recv_counts: Counts | None = None,
        *,
        sdispls: Counts | None = None,
        unit: Unit | None = None,
        group: Group = None,
        capacity: int,
    ) -> Received: ...


def _typed(function: Callable[..., Any]) -> _AllToAllV:
    """Describes what `all_to_all_v` returns with which arguments."""
    return cast("_AllToAllV", function)


@_typed
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
    capacity: int | None = None,
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
    if capacity is not None:
        options = {"rdispls": rdispls, "out": out, "async_op": async_op, "timeout": timeout}
        return _within(input, (send_counts, sdispls, recv_counts), unit, capacity, group, options)
    if not is_dynamo_compiling() and (shared := groups.on_shm(group)) is not None:
        result = _core.all_to_all_v(
            shared.core, input, out, send_counts, recv_counts, sdispls, rdispls, unit, async_op, timeout
        )
        if result is NotImplemented and out is None and timeout is None and async_op is False:
            result = ops.exchange(input, shared, (send_counts, recv_counts, sdispls, rdispls, unit))
        if result is not None and result is not NotImplemented:
            return calls.started(shared, result, input) if async_op else result
    counts = (send_counts, recv_counts, sdispls, rdispls, unit)
    if is_tracing(input):
        if not (torch.compiler.is_compiling() or input.is_meta):
            groups.resolve(group, device_of(input))  # made before the graph runs, where possible
        check_untimed(timeout)
        return calling.record_all_to_all_v(input, *counts, out, group, async_op)
    comm = groups.resolve(group, device_of(input))
    if comm is None:
        return (None, None) if async_op else None
    with guard(comm, "all_to_all_v"):
        limit = calls.limit(comm, timeout)
        x = as_input("input", input)
        wants_grad = needs_grad(input)
        for name, value in (("timeout", timeout), ("out", out)):
            check_untracked(wants_grad, value, argument=name)
        if out is not None:
            check_output("out", out, x.dtype)
            _core.check_apart(region(out), region(x))
        request = read_request(comm.size, x.shape, *counts, out, wants_grad and async_op)
        for name, tensor in (("input", x), ("out", out)):  # the caller's code may have run while counts were read
            if tensor is not None:
                check_memory(name, tensor)
    if request.learns:
        return _learning(comm, input, x, request, wants_grad, async_op, limit)
    row, shape = max(request.row, 1), request.shape
    if wants_grad:
        layout = torch.frombuffer(request.buffer, dtype=torch.int64).view(4, -1)
        operands = input, layout, math.prod(shape), row, "all_to_all_v", comm
        if not async_op:
            return ops.all_to_all_v(*operands).view(shape)
    seen = is_watched() and not wants_grad
    with guard(comm, "all_to_all_v"):
        target = out
        if target is None:  # flat, so that autograd makes the view: one made here could not be changed in place
            target = calls.new_output(comm, (math.prod(shape),) if wants_grad else shape, x)
            if request.has_gaps:
                target.zero_()
        terms = request.layout, row
        call = None if seen else calls.exchange(comm, "all_to_all_v", target, x, *terms, request=request)
    if call is None:
        parameters = Parameters(counts=counts[:4], unit=unit)
        work = calling.watch_collective(comm, _all_to_all_v, [target], [x], parameters, limit, async_op)
        return (target, work) if async_op else target
    if wants_grad:
        call.result = ops.all_to_all_v.ran(target, *operands).view(shape)
    if async_op:
        return call.result, call.submit(limit)
    call.run(limit)
    return target


def _within(
    input: Tensor,
    counts: tuple[Counts, Counts | None, Counts | None],
    unit: Unit | None,
    capacity: int,
    group: Group,
    others: dict[str, object],
) -> Received | None:
    """Receives up to ``capacity`` units, by counts on the device."""
    comm = None if is_tracing() else groups.resolve(group, device_of(input))
    if comm is None and not is_tracing():
        return None
    with guard(comm, "all_to_all_v"):
        check_excluded("capacity is given", **others)
        if comm is not None:
            check_tensor("input", input)
            check_on_npu("input", device_of(input), input.device)
        by_row = reads_rows(unit, input.dim())
        if not is_tracing():
            _core.checked_least("capacity", capacity, 0)
        check_untracked(needs_grad(input), counts[1], argument="sdispls")
        row = row_size(input) if by_row else 1
        size = groups.world_size(group) if comm is None else comm.size
        placed = [
            None if each is None else counts_on_device(name, each, input.device, size)
            for name, each in zip(COUNT_NAMES, counts, strict=True)
        ]
    results = ops.all_to_all_v_counted(input, *placed, capacity, row, groups.name_of(group) if comm is None else comm)
    shape = (capacity, *input.shape[1:]) if by_row else (capacity,)
    return Received(results[0].view(shape), *results[1:])


def _learning(
    comm: AnyCommunicator,
    input: Tensor,
    x: Tensor,
    request: _core.Request,
    wants_grad: bool,
    async_op: bool,
    limit: float,
) -> Any:
    sends, sdispls, _, _ = request.layout
    if wants_grad or (is_watched() and not async_op and limit < 0):
        layout = torch.tensor([sends, sdispls], dtype=torch.int64, device="cpu")
        out, layout_out = ops.all_to_all_v_learn(input, layout, request.row, "all_to_all_v", comm)
        return out.view(request.shape_for(layout_out[2].tolist()))
    with guard(comm, "all_to_all_v"):
        learning = calls.learn(comm, "all_to_all_v", x, sends, sdispls, request.row)

    def finish(output: Tensor, counts: Sequence[int]) -> Tensor:
        return shaped(output, request.shape_for(counts))

    def run() -> Any:
        return (None, learning.submit(finish, limit)) if async_op else finish(*learning.run(limit))

    return calling.watch_call("all_to_all_v", comm, [], [x], run) if is_watched() else run()


def exchange_counts(send_counts: Counts, group: Group = None) -> Tensor:
    """Returns what every rank will send to this one: entry j is rank j's ``send_counts`` entry for this rank.

    Args:
        send_counts: One integer >= 0 per rank.
        group: See `all_to_all_v`.

    Returns:
        int64, shape ``[W]``, on the CPU; None on a rank outside the group.

    Raises:
        AllToAllVError: an argument of any rank is wrong, the ranks disagree, or one is lost or late.
    """
    if is_tracing():
        return calling.record_exchange_counts(send_counts, group)
    comm = groups.resolve(group)
    if comm is None:
        return None  # type: ignore[return-value]
    comm = groups.on_host(comm)
    with guard(comm, "exchange_counts"):
        counts = experts.read_counts(send_counts, comm.size)
        x = as_input("send_counts", torch.from_numpy(counts))
        out = torch.empty_like(x)
        layout = experts.layout(counts.reshape(-1, 1))
        call = None if is_watched() else calls.exchange(comm, "exchange_counts", out, x, layout)
    if call is None:
        return ops.all_to_all_v(x, torch.tensor(layout, device="cpu"), comm.size, 1, "exchange_counts", comm)
    call.run()
    return out


# Paddle's global_scatter and global_gather; the counts are as in `alltoallv._calls.experts`.


def global_scatter(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
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
    return _moved(x, local_count, global_count, group, gathers=False)


def global_gather(x: Tensor, local_count: Counts, global_count: Counts, group: Group = None) -> Tensor:
    """Brings the rows of `global_scatter` back to the ranks that sent them: its inverse, as differentiable.

    Args:
        x: Rows sorted by this rank's expert, then by rank. Shape ``[sum(global_count), ...]``.
        local_count, global_count, group: See `global_scatter`.

    Returns:
        Shape ``[sum(local_count), ...]``, rows sorted by the rank they come from, then by that rank's expert.

    Raises:
        AllToAllVError: as `global_scatter`.
    """
    return _moved(x, local_count, global_count, group, gathers=True)


def _moved(x: Tensor, local_count: Counts, global_count: Counts, group: Group, *, gathers: bool) -> Tensor:
    """Sends the rows; the ranks agree on the counts, [card, expert] matrices, expert by expert."""
    if is_tracing(x):
        counts_of_rows = local_count if gathers else global_count  # of the result's rows
        matrices = [torch.as_tensor(counts, device="cpu") for counts in (local_count, global_count)]
        rows = -1 if isinstance(counts_of_rows, Tensor) else sum(counts_of_rows)
        return global_rows(x, *matrices, rows, gathers, groups.name_of(group))
    comm = groups.resolve(group, device_of(x))
    if comm is None:
        return None  # type: ignore[return-value]
    operator, rows_of_x = ("global_gather", "global_count") if gathers else ("global_scatter", "local_count")
    host = groups.on_host(comm)  # counts lie in host memory wherever the rows do
    with guard(host, operator):
        local, global_ = experts.read(comm.size, x.shape, local_count, global_count, rows_of_x)
        received = torch.empty(global_.shape, dtype=torch.int64, device="cpu")
        call = calls.exchange(host, "exchange_counts", received, torch.from_numpy(local), experts.layout(local))
    call.run()
    experts.check_received(comm, operator, received.numpy(), global_)
    if gathers:
        return all_to_all_v(_transposed(x, global_.T), global_.sum(1), local.sum(1), unit="row", group=comm)
    return _transposed(all_to_all_v(x, local.sum(1), global_.sum(1), unit="row", group=comm), global_)


def _back(call: Any, grad: Tensor, *counts: Tensor) -> Any:
    return global_rows(grad, *counts, call.x.shape[0], not call.gathers, call.group)


@partial(
    Operator,
    fake=lambda x, local, received, rows, *others: x.new_empty((known_size(rows), *x.shape[1:])),
    gradient=_back,
    saves=("local_count", "global_count"),
)
def global_rows(x: Tensor, local_count: Tensor, global_count: Tensor, rows: int, gathers: bool, group: str) -> Tensor:
    """Does `global_scatter`, or `global_gather`, in a graph. The result has ``rows`` rows; -1: known when it runs."""
    return _moved(x, local_count, global_count, communicator_of(group, x), gathers=gathers)


def _transposed(rows: Tensor, counts: Matrix) -> Tensor:
    order = experts.transposition(counts)
    return rows if order is None else rows[torch.from_numpy(order).to(rows.device)]


class Plan(_core.ArrayPlan):
    """Does `all_to_all_v` with counts that are given once, without gradients.

    Making a plan talks to no peer, except that the first use of a ProcessGroup is collective. Calling it is collective.
    A peer may use the function of the same name instead: the two are the same operator. A call is
    ``plan(input, out=None)``:

    Args:
        input: Contiguous tensor of the plan's dtype, of ``input_size`` elements, taken flat; more with ``sdispls``.
        out: Where to receive: contiguous, of the plan's dtype, at least ``output_size`` elements, apart from ``input``
            in memory. Elements that no region covers keep their value. Left out, a flat tensor of ``output_size``
            elements is allocated, in shared memory where that moves the data, gaps zero.

    Returns:
        The output, without gradient.

    Raises:
        The errors of `all_to_all_v`; InvalidParamError for an input that requires grad while gradients are recorded.
    """

    def __init__(
        self,
        send_counts: Counts,
        recv_counts: Counts,
        dtype: torch.dtype = torch.float32,
        *,
        sdispls: Counts | None = None,
        rdispls: Counts | None = None,
        group: Group = None,
        device: str = "cpu",
    ) -> None:
        """Takes the arguments of `all_to_all_v`, in elements; ``device`` is the kind of device of the tensors.

        Raises:
            InvalidParamError, InvalidTensorError: an argument is wrong; the peers' next call also raises it.
        """
        comm = groups.resolve(group, device)
        if comm is None:
            raise InvalidParamError(
                "group is one that this rank is not a member of, expected a group with this rank", id=1422
            )
        self._communicator = comm
        with guard(comm, "all_to_all_v"):
            self.dtype = dtype
            self._covers = sdispls is None
            self.input_size, request = plan_request(comm.size, send_counts, recv_counts, sdispls, rdispls)
            (self.output_size,), self._gaps, self._layout = request.shape, request.has_gaps, request.layout
            name = core_name(dtype)
            plan = request.plan(comm.core, "all_to_all_v", name) if isinstance(comm, Communicator) else None
            super().__init__(plan, self.input_size, self.output_size, self._covers)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, out: Tensor | None = None) -> Tensor:
            """Exchanges ``input`` and returns the output; for shapes and errors see above."""

    def _checked(self, input: Tensor, out: Tensor | None, timeout: None) -> Tensor:
        """Checks and runs a call on unusual or wrong tensors; the usual ones take a shorter way."""
        comm = self._communicator
        with guard(comm, "all_to_all_v"):
            if timeout is not None:
                raise TypeError("timeout is given, expected none: set the timeout on the group")
            self._check_input(input)
            if out is None:
                out = calls.new_output(comm, self.output_size, input)
                if self._gaps:
                    out.zero_()
            else:
                check_output("out", out, self.dtype)
                check_length("out", out.numel(), self.output_size, False)
                _core.check_apart(region(out), region(input))
            call = None if is_watched() else calls.exchange(comm, "all_to_all_v", out, input, self._layout)
        if call is not None:
            call.run()
            return out
        sends, sdispls, recvs, rdispls = self._layout
        parameters = Parameters(counts=(sends, recvs, sdispls, rdispls), unit="element")
        flat = out.view(-1)[: self.output_size], input.view(-1)[: self.input_size]
        calling.watch_collective(comm, COLLECTIVES["all_to_all_v"], flat[:1], flat[1:], parameters, -1.0, False)
        return out

    def _check_input(self, input: Tensor) -> None:
        check_tensor("input", input)
        if input.dtype != self.dtype:
            raise InvalidTensorError(f"input has dtype {input.dtype}, expected {self.dtype} as the plan", 13, id=2064)
        check_contiguous("input", input)
        check_length("input", input.numel(), self.input_size, self._covers)
        if input.requires_grad and torch.is_grad_enabled():
            raise InvalidParamError("input requires grad, which a plan does not follow: use all_to_all_v", id=1423)
