"""Gives the functions of `alltoallv.torch` their form in a graph: operators, and copies where they write.

Nothing here depends on values: arguments are checked when the operators run. An operator of a graph is done
when the next one begins, so a call with ``async_op=True`` returns the handle of a call that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alltoallv._calls.adapters import check_untracked
from alltoallv._calls.counts import Counts, Unit
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.torch.eager import calls
from alltoallv.torch.eager import group as groups
from alltoallv.torch.eager.calls import COLLECTIVES, REDUCE_OPS, Collective, Done, Parameters
from alltoallv.torch.eager.group import Group
from alltoallv.torch.eager.tensors import needs_grad, reads_rows, row_size
from alltoallv.torch.graph import ops as ops
from alltoallv.torch.graph.ops import effectful


def collective(
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


def all_to_all_v(
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
            collective(COLLECTIVES["all_to_all_v"], [out], [input], parameters, group, False)
            return outcome(out, None, async_op)
        is_known = not (isinstance(recv_counts, Tensor) or isinstance(rdispls, Tensor))
        numel = 0 if not row else _rows(recv_counts, rdispls) * row if is_known else -1
        output = ops.all_to_all_v(input, layout, numel, row, "all_to_all_v", name)
    output = output.view(-1 if row else _rows(recv_counts, rdispls), *input.shape[1:]) if by_row else output
    if async_op and recv_counts is None:
        return None, Done(output)
    return outcome(output, None, async_op)


def exchange_counts(send_counts: Counts, group: Group) -> Tensor:
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
