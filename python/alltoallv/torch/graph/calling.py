"""Makes a call with arguments as `alltoallv.torch` takes them: at once, as an operator of a graph, or of a mode that
watches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from alltoallv import _core
from alltoallv._calls.adapters import check_untracked
from alltoallv._calls.counts import Counts, Unit
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import (
    COLLECTIVES,
    NO_PARAMETERS,
    REDUCE_OPS,
    Collective,
    Done,
    Parameters,
    Tensors,
    Work,
)
from alltoallv.torch.eager.group import AnyCommunicator, Group, device_of
from alltoallv.torch.eager.observers import check_untimed, is_tracing
from alltoallv.torch.eager.tensors import check_contiguous, check_tensor, needs_grad, reads_rows, row_size
from alltoallv.torch.graph import ops as ops
from alltoallv.torch.graph.ops import effectful

# Gives the functions of `alltoallv.torch` their form in a graph: operators, and copies where they write.
#
# Nothing here depends on values: arguments are checked when the operators run. An operator of a graph is done when the
# next one begins, so a call with ``async_op=True`` returns the handle of a call that has ended.


def record_collective(
    row: Collective,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Parameters,
    group: Group,
    async_op: bool,
) -> Done | None:
    """Records a collective; its arguments are checked when the graph runs."""
    outs, ins = [x.detach() for x in outputs], [x.detach() for x in inputs]
    counts = [as_counts(() if entry is None else entry) for entry in parameters.counts]
    terms = row.name, _name_of(parameters.op), parameters.root, counts, parameters.unit, parameters.order or ""
    results = torch.ops.alltoallv.collective(outs, ins, *terms, groups.name_of(group))
    for output, value in zip(outputs, results, strict=True):
        output.copy_(value)
    return Done(row.result(outputs)) if async_op else None


_NAMES = frozenset(each.name for each in REDUCE_OPS)
_SUM = dist.ReduceOp.SUM  # named where a graph makes `Parameters`: torch 2.10 cannot take the default
_BEFORE_2_12 = torch.__version__ < (2, 12)


def _name_of(op: Any) -> str:
    """Returns torch's name of a ReduceOp."""
    if type(op) is dist.ReduceOp.RedOpType and op.name in _NAMES:  # torch 2.10 and 2.11 have no constant of it
        name: str = op.name
        return name
    if _BEFORE_2_12 and type(op) is dist.ReduceOp:
        name = op.op.name
        return name
    return _name_of_object(op)


def _name_of_object(op: Any) -> str:
    kind = op.op if type(op) is dist.ReduceOp else op
    if kind not in REDUCE_OPS:
        raise InvalidParamError(
            f"op is {op!r}, expected a ReduceOp of {', '.join(each.name for each in REDUCE_OPS)} in a graph", id=1440
        )
    return kind.name  # type: ignore[no-any-return, unused-ignore]


# torch.compile cannot look into a ReduceOp; this is `assume_constant_result`, without its import.
_name_of_object._dynamo_marked_constant = True  # type: ignore[attr-defined]


def as_counts(values: Counts) -> Tensor:
    """Returns counts as operators take them: int64, in host memory."""
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
    order: str,
    group: str,
) -> list[Tensor]:
    row = COLLECTIVES[name]
    comm = groups.by_name(group, groups.device_of(next(iter([*outputs, *inputs]), None)))
    values = tuple(each.tolist() if len(each) else None for each in counts)
    parameters = Parameters(dist.ReduceOp(getattr(dist.ReduceOp, op)), root, values, unit, order or None)
    with guard(comm, row.operator):
        results = [calls.new_output(comm, x.shape, x) for x in outputs]
        if row.updates:
            for new, old in zip(results, outputs, strict=True):
                new.copy_(old)
        operation = row.prepare(comm, results, inputs, parameters)
    operation.run()
    return results


effectful(_run, lambda outs, *others: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in outs])


def record_all_to_all_v(
    input: Tensor,
    send_counts: Counts,
    recv_counts: Counts | None,
    sdispls: Counts | None,
    rdispls: Counts | None,
    unit: Unit | None,
    out: Tensor | None,
    group: Group,
    async_op: bool,
) -> Any:
    by_row = reads_rows(unit, input.dim())
    row = row_size(input) if by_row else 1
    name = groups.name_of(group)
    sends = as_counts(send_counts) * row
    sdispl = _displs(sdispls, sends, row)
    if recv_counts is None:
        if rdispls is not None or out is not None:
            raise InvalidParamError("recv_counts is None, expected counts with rdispls or out", id=1441)
        output, _ = ops.all_to_all_v_learn(input, torch.stack([sends, sdispl]), row, "all_to_all_v", name)
    else:
        recvs = as_counts(recv_counts) * row
        layout = torch.stack([sends, sdispl, recvs, _displs(rdispls, recvs, row)])
        if out is not None:
            check_untracked(needs_grad(input), out)
            parameters = Parameters(
                _SUM, counts=(send_counts, recv_counts, sdispls, rdispls), unit="row" if by_row else "element"
            )
            record_collective(COLLECTIVES["all_to_all_v"], [out], [input], parameters, group, False)
            return outcome(out, None, async_op)
        is_known = not (isinstance(recv_counts, Tensor) or isinstance(rdispls, Tensor))
        numel = 0 if not row else _rows(recv_counts, rdispls) * row if is_known else -1
        output = ops.all_to_all_v(input, layout, numel, row, "all_to_all_v", name)
    output = output.view(-1 if row else _rows(recv_counts, rdispls), *input.shape[1:]) if by_row else output
    if async_op and recv_counts is None:
        return None, Done(output)
    return outcome(output, None, async_op)


def record_exchange_counts(send_counts: Counts, group: Group) -> Tensor:
    size = groups.world_size(group)
    ones = as_counts([1] * size)
    places = _displs(None, ones, 1)
    layout = torch.stack([ones, places, ones, places])
    return ops.all_to_all_v(as_counts(send_counts), layout, size, 1, "exchange_counts", groups.name_of(group))


def outcome(result: Tensor, out: Tensor | None, async_op: bool) -> Any:
    """Returns the result of a call with these arguments: the output, copied to ``out`` if given, and a handle if asked.

    Raises:
        InvalidTensorError: ``out`` has another dtype or shape.
    """
    if out is not None:
        if (out.dtype, out.shape) != (result.dtype, result.shape):
            raise InvalidTensorError(
                f"the output has dtype {out.dtype} and shape {tuple(out.shape)}, "
                f"expected {result.dtype} and {tuple(result.shape)}",
                id=2124,
            )
        out.copy_(result)
        result = out
    return (result, Done(result)) if async_op else result


def _rows(recv_counts: Counts | None, rdispls: Counts | None) -> int:
    """Returns how many rows a result has; where these have no elements, no operator's result says so."""
    if recv_counts is None or isinstance(recv_counts, Tensor) or isinstance(rdispls, Tensor):
        raise InvalidParamError(
            "input has rows without elements, expected recv_counts and rdispls in lists in a graph", id=1442
        )
    if rdispls is None:
        return sum(recv_counts)
    return max([begin + count for begin, count in zip(rdispls, recv_counts, strict=True) if count > 0], default=0)


def _displs(values: Counts | None, counts: Tensor, row: int) -> Tensor:
    return counts.cumsum(0) - counts if values is None else as_counts(values) * row


# Makes one operator of each call while a dispatch mode is active, so that the mode sees the call, and may repeat it.
#
# A mode watches (CommDebugMode), or records what it replays later, as a graph of an NPU does. The operators write where
# the call itself would write, and have its timeout; asynchronous ones begin the call. What an operator's arguments
# cannot say is also an operator, which cannot be repeated.


T = TypeVar("T")
_begun = threading.local()  # the call that an operator of this thread has begun, or is to run

Launch = Callable[[Tensor, Tensor], None]
_launches: dict[int, Launch] = {}  # by id; a mode may repeat what it has seen, until the process ends


def is_watched() -> bool:
    """Returns whether a mode sees the operators of this thread, whose tensors are themselves."""
    return not is_tracing() and torch._C._len_torch_dispatch_stack() > 0


def watch_collective(
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


def watch_launch(run: Launch, x: Tensor, out: Tensor) -> None:
    """Calls ``run``, which reads ``x`` and writes ``out``; the same one for calls that are alike."""
    _launches[id(run)] = run
    torch.ops.alltoallv.launch_(x.detach(), out.detach(), id(run))


@torch.library.custom_op("alltoallv::launch_", mutates_args=("out",))
def _launch_(x: Tensor, out: Tensor, call: int) -> None:
    _launches[call](x, out)


def watch_call(name: str, comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], run: Callable[[], T]) -> T:
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


def call_collective(
    row: Collective,
    outs: Sequence[Tensor],
    ins: Sequence[Tensor],
    group: Group,
    async_op: bool,
    parameters: Parameters = NO_PARAMETERS,
    timeout: float | None = None,
    *,
    root: tuple[str, int | None, int | None] | None = None,
) -> Work | None:
    """Calls a collective; `rank_in` turns ``root`` into a rank of the group."""
    if not row.strict and timeout is None and not is_dynamo_compiling():  # strict functions ask the core themselves
        shared, resolved = groups.on_shm(group), parameters
        if shared is not None and root is not None:
            resolved = parameters._replace(root=_plain_root(shared, group, *root))
        if shared is not None and row.at_once is not None:
            started = row.at_once(shared.core, outs, ins, resolved, None, async_op)
            if started is not None:
                used = outs, started
                return Work(shared, started[1], used, lambda: row.result(outs)) if async_op else None
    first = next((x for tensors in (ins, outs) if isinstance(tensors, list | tuple) for x in tensors), None)
    if is_tracing(first):
        check_untimed(timeout)
        if root is not None:
            parameters = parameters._replace(root=rank_in(group, *root))
        return record_collective(row, outs, ins, parameters, group, async_op)
    comm = groups.resolve(group, device_of(first))
    if comm is None:
        return None
    with guard(comm, row.operator, TypeError):  # torch.distributed's wrappers check types on a rank alone
        limit = calls.limit(comm, timeout)
        for name, tensors in ((row.inputs, ins), (row.outputs, outs)):
            if not isinstance(tensors, list | tuple):
                _core.check_list(name, tensors, comm.size)
                raise InvalidTensorError(
                    f"{name} is a {type(tensors).__name__}, expected a list of tensors", 5, id=2104
                )
            for label, tensor in _labelled(name, tensors):
                check_tensor(label, tensor)
        if row.strict:
            for label, out in _labelled(row.outputs, outs):
                check_contiguous(label, out)
        if root is not None:
            parameters = parameters._replace(root=rank_in(group, *root))
        operation = None if (seen := is_watched()) else row.prepare(comm, outs, ins, parameters)
    if seen:
        return watch_collective(comm, row, outs, ins, parameters, limit, async_op)
    assert operation is not None
    if async_op:
        if row.strict:
            operation.result = row.result(outs)
        return operation.submit(limit)
    operation.run(limit)
    return None


def _labelled(name: str, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Returns the tensors of an argument, each with its name for errors."""
    return [(f"{name}[{j}]" if name.endswith("_list") else name, x) for j, x in enumerate(tensors)]


def _plain_root(comm: Communicator, group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """Returns `rank_in`; -1, no rank, where that raises."""
    with contextlib.suppress(InvalidParamError):
        return rank_in(group, name, rank, group_rank)
    return -1


def rank_in(group: Group, name: str, rank: int | None, group_rank: int | None) -> int:
    """Returns the rank in the group that the argument called ``name``, or ``group_{name}``, means."""
    if (rank is None) == (group_rank is None):
        raise InvalidParamError(f"{name} is {rank!r} and group_{name} {group_rank!r}, expected one of them", id=1420)
    if group_rank is not None:
        if not is_tracing():  # in a graph the operator raises, on all ranks
            _core.checked_rank(f"group_{name}", group_rank, groups.world_size(group))
        return group_rank
    assert rank is not None
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if rank not in ranks:
            raise InvalidParamError(f"{name} is {rank!r}, expected one of the group's ranks {ranks}", id=1169)
        return ranks.index(rank)
    return rank
