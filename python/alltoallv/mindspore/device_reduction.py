"""Sums of tensors on a device in the order of ranks: MindSpore's operators add, and HCCL only moves the terms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mindspore
from mindspore import Tensor, ops

from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidTensorError
from alltoallv.mindspore.device_codes import canonical_nan, in_tree
from alltoallv.mindspore.device_quantized import Moves
from alltoallv.mindspore.tensors import core_name, executor

_SMALL = 16384  # bytes; smaller inputs go to every rank in one step
#: What MindSpore adds on every device.
_ADDED = "int8, int16, int32, int64, uint8, float16, bfloat16, float32, float64"


def reduce_in_order(
    comm: Communicator,
    operator: str,
    x: Tensor,
    op: str,
    counts: Sequence[int],
    shape: Sequence[int] | None,
    leaves: int = 0,
) -> Tensor:
    """Runs ``"all_reduce"`` or ``"reduce_scatter"`` in MindSpore's queue; returns the flat result, a new tensor.

    Bits are as in host memory: 16-bit floats are added in float32 and rounded once, integers wrap, and a resulting
    NaN is the quiet one.

    Args:
        x: All elements, of which ``counts[j]`` belong to rank j; with ``leaves``, of all ranks, as many for each.
        op: The core's name of a reduction that has passed its checks.
        shape: What ranks compare as the input's shape, if they do.

    Raises:
        InvalidTensorError: on every rank, for a dtype that MindSpore does not add on a device.
    """
    size, total, own = comm.size, sum(counts), counts[comm.rank]
    each, tree = max(leaves // size, 1), leaves > 0  # vectors of every rank
    dtype, gathers = core_name(x.dtype), operator == "all_reduce"
    with guard(comm, operator):
        check_added(dtype)

    def agree() -> None:
        terms: dict[str, Any] = {"ordered": True, "shape": shape, "leaves": leaves}
        comm.core.reduce(operator, dtype, op, 0, 0, list(counts), moves=False, **terms)

    if not total:
        executor.sync()
        agree()
    if not (total if gathers else own):
        return ops.zeros(0, x.dtype)
    moves, flat = Moves(comm, agree), x.reshape(-1)
    if x.nbytes <= _SMALL:
        begin = sum(counts[: comm.rank])
        terms = moves.gather(flat).reshape(size * each, total)
        return combine(terms if gathers else terms[:, begin : begin + own], op, tree)
    if each > 1:  # what goes to one rank lies together
        vectors, ends = flat.reshape(each, total), list(accumulate(counts))
        parts = zip(counts, ends, strict=True)
        flat = ops.cat([vectors[:, end - count : end].reshape(-1) for count, end in parts if count])
    came = moves.exchange(flat, [count * each for count in counts], [own * each] * size)
    part = combine(came.reshape(size * each, own), op, tree) if own else came
    return moves.exchange(part, [own] * size, counts, "all_gather") if gathers else part


def check_added(dtype: str) -> None:
    """Raises InvalidTensorError for a dtype that MindSpore does not add on a device, by the core's name."""
    if dtype not in _ADDED.split(", "):
        raise InvalidTensorError(f"dtype is {dtype}, expected one of {_ADDED} for a sum in a given order", 13, id=2082)


def combine(terms: Tensor, op: str, tree: bool = False) -> Tensor:
    """Returns ``terms[0] op terms[1] op ...`` in this order; shape ``[W, n]`` becomes ``[n]``.

    In a ``tree``, of a sum, neighbours are added in pairs, then the results in pairs, and so on.
    """
    dtype = terms.dtype
    if dtype in (mindspore.float16, mindspore.bfloat16):
        return combine(terms.astype(mindspore.float32), op, tree).astype(dtype)
    floating, total = dtype in (mindspore.float32, mindspore.float64), terms[0]
    if tree:
        total = in_tree(terms)
        return canonical_nan(total) if floating and len(terms) > 1 else total
    for j in range(1, terms.shape[0]):
        term = terms[j]
        if op in ("min", "max"):  # the earlier of equal values stays, and any NaN gives NaN
            better = term < total if op == "min" else term > total
            total = ops.where(ops.logical_or(better, term != term) if floating else better, term, total)
        else:
            total = total * term if op == "prod" else total + term
    if op == "avg":
        total = total / terms.shape[0]
    return canonical_nan(total) if floating else total
