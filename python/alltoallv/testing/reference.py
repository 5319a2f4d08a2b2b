"""Computes every operator for all ranks at once, in NumPy: slow, obvious, by the definitions.

Entry r of a list belongs to rank r. Matrices of counts and displacements are W x W; row r belongs to rank r,
in entries of axis 0: elements of flat arrays, rows of others. Arrays may have any dtype, ml_dtypes' included.
Results are new arrays, one per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Matrix = Sequence[Sequence[int]] | npt.NDArray[np.int64]


def packed(counts: Matrix) -> npt.NDArray[np.int64]:
    """Returns the displacements of regions that follow each other in rank order."""
    return np.array([[sum(row[:j]) for j in range(len(row))] for row in _rows(counts)], np.int64).reshape(
        len(counts), -1
    )


def exchange_counts(send_counts: Matrix) -> npt.NDArray[np.int64]:
    """Returns the receive counts: recv_counts[r][j] = send_counts[j][r]."""
    rows = _rows(send_counts)
    return np.array([[rows[j][r] for j in range(len(rows))] for r in range(len(rows))], np.int64)


def all_to_all_nd(
    inputs: Sequence[Array], scatter_dim: int, gather_dim: int, scatter_sizes: Sequence[int] | None = None
) -> list[Array]:
    """Returns outputs: every input is divided along one dimension, and rank r gets all r-th parts along another.

    ``scatter_sizes``: the lengths of the parts; default: ceil(n / W), the last ones smaller or empty.
    """
    size, length = len(inputs), inputs[0].shape[scatter_dim]
    part = -(-length // size)
    ends = [part * j for j in range(1, size)] if scatter_sizes is None else np.cumsum(scatter_sizes)[:-1].tolist()
    parts = [np.split(x, ends, scatter_dim) for x in inputs]
    return [np.concatenate([parts[j][r] for j in range(size)], gather_dim) for r in range(size)]


def all_to_all_v(
    inputs: Sequence[Array],
    send_counts: Matrix,
    sdispls: Matrix | None = None,
    recv_counts: Matrix | None = None,
    rdispls: Matrix | None = None,
    outputs: Sequence[Array] | None = None,
) -> list[Array]:
    """Returns outputs: out_r[rdispls_r[j] : +recv_counts_r[j]] = x_j[sdispls_j[r] : +send_counts_j[r]] for all r and j.

    Args:
        inputs: W arrays that agree in dtype and in every axis but the first.
        send_counts: how much every rank sends to every rank.
        sdispls: where it begins; default: packed in rank order.
        recv_counts: default: what the ranks send.
        rdispls: where it goes; default: packed in rank order.
        outputs: arrays whose values remain where nothing is received; they are not changed. Default: zeros, just
            long enough.

    Raises:
        ValueError: counts disagree, or a region lies outside its array.
    """
    size = len(inputs)
    send = _rows(send_counts)
    receive = _rows(exchange_counts(send) if recv_counts is None else recv_counts)
    source = _rows(packed(send) if sdispls is None else sdispls)
    target = _rows(packed(receive) if rdispls is None else rdispls)
    if outputs is None:
        lengths = [max(target[r][j] + receive[r][j] for j in range(size)) for r in range(size)]
        if min(lengths) < 0:
            raise ValueError(f"counts or displacements are negative: {receive}, {target}")
        results = [np.zeros((lengths[r], *inputs[r].shape[1:]), inputs[r].dtype) for r in range(size)]
    else:
        results = [array.copy() for array in outputs]
    for r in range(size):
        for j in range(size):
            count = receive[r][j]
            if send[j][r] != count:
                raise ValueError(f"send_counts[{j}][{r}] is {send[j][r]} but recv_counts[{r}][{j}] is {count}")
            first, begin = source[j][r], target[r][j]
            if min(count, first, begin) < 0:
                raise ValueError(f"counts or displacements are negative: {count}, {first}, {begin}")
            if first + count > len(inputs[j]) or begin + count > len(results[r]):
                raise ValueError(f"the region from rank {j} to rank {r} lies outside its array")
            results[r][begin : begin + count] = inputs[j][first : first + count]
    return results


def all_to_all_single(inputs: Sequence[Array], input_split_sizes: Matrix | None = None) -> list[Array]:
    """Returns for rank r part r of every rank's input, in rank order; equal parts unless sizes are given."""
    size = len(inputs)
    if input_split_sizes is None:
        input_split_sizes = [[equal_part(array, size)] * size for array in inputs]
    for array, row in zip(inputs, _rows(input_split_sizes), strict=True):
        if sum(row) != len(array):
            raise ValueError(f"input_split_sizes {row} do not add up to the input's first dimension, {len(array)}")
    return all_to_all_v(inputs, input_split_sizes)


def all_to_all(input_lists: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """Returns for rank r the list of entry r of every rank's list, in rank order."""
    size = len(input_lists)
    return [[input_lists[j][r].copy() for j in range(size)] for r in range(size)]


def all_gather(inputs: Sequence[Array]) -> list[list[Array]]:
    """Returns for every rank the list of all inputs, in rank order; their shapes may differ."""
    return [[array.copy() for array in inputs] for _ in inputs]


def all_gather_into_tensor(inputs: Sequence[Array]) -> list[Array]:
    """Returns for every rank all inputs, concatenated along axis 0."""
    return [np.concatenate(inputs) for _ in inputs]


def broadcast(inputs: Sequence[Array], root: int = 0) -> list[Array]:
    """Returns for every rank the input of ``root``."""
    return [inputs[root].copy() for _ in inputs]


def all_reduce(inputs: Sequence[Array], op: str = "sum") -> list[Array]:
    """Returns for every rank inputs[0] op inputs[1] op ... in this order.

    float16 and bfloat16 accumulate in float32 and are rounded once, half to even. Integers wrap. For bool,
    sum and max mean or, prod and min mean and. min and max of a NaN are NaN; of +0 and -0 the earlier stays.
    avg, for floats only, divides the sum by W. A NaN that a reduction makes is the positive quiet one without
    payload. One rank's input is its result.

    Args:
        inputs: W arrays of one shape and dtype: bool, an integer, float16, bfloat16, float32 or float64.
        op: sum, avg, min, max or prod.

    Raises:
        ValueError: the operation is not defined for the dtype.
    """
    return [_reduce(inputs, op) for _ in inputs]


def all_reduce_leaves(inputs: Sequence[Array], op: str = "sum") -> list[Array]:
    """Returns for every rank the combination of all entries of axis 0, by a tree over their number n.

    A node over n > 1 entries combines that over the first m, the largest power of two below n, with that over the
    others. What is said about values in `all_reduce` holds here, with n in place of W.

    Args:
        inputs: W arrays of one shape and dtype; rank r's holds its entries, which follow the entries of rank r - 1.
    """
    entries = [entry.reshape(-1) for array in inputs for entry in array[:, None]]
    return [_reduce(entries, op, tree=True).reshape(inputs[0].shape[1:]) for _ in inputs]


def scan(inputs: Sequence[Array], op: str = "sum", exclusive: bool = False) -> list[Array | None]:
    """Returns for rank r inputs[0] op ... op inputs[r]; exclusive: without inputs[r], and None on rank 0."""
    ends = range(1 - exclusive, len(inputs) + 1 - exclusive)
    return [_reduce(inputs[:end], op) if end else None for end in ends]


def reduce_scatter(inputs: Sequence[Array], op: str = "sum", counts: Sequence[int] | None = None) -> list[Array]:
    """Returns for rank r part r of the reduction: ``counts[r]`` entries of axis 0, by default equal parts."""
    size = len(inputs)
    if counts is None:
        counts = [equal_part(inputs[0], size)] * size
    reduced = _reduce(inputs, op)
    begins = [sum(counts[:r]) for r in range(size)]
    return [reduced[begins[r] : begins[r] + counts[r]].copy() for r in range(size)]


def global_scatter(
    inputs: Sequence[Array], local_counts: Sequence[Sequence[int]], global_counts: Sequence[Sequence[int]]
) -> list[Array]:
    """Sends rows to experts, as Paddle's operator of this name does.

    Expert e of rank j has number i = e + j * E. Rank r's input holds, for every i in ascending order, the
    ``local_counts[r][i]`` rows for that expert. Rank r's result holds, for each of its own experts e and then
    for every source rank j, the ``global_counts[r][e + j * E]`` rows that j sent to e.

    Args:
        inputs: W arrays of rows.
        local_counts: W lists of length W * E.
        global_counts: W lists of length W * E, with global_counts[r][e + j*E] == local_counts[j][e + r*E].
    """
    size, experts = _expert_layout(local_counts, global_counts)
    results = []
    for r in range(size):
        rows = [inputs[r][:0]]
        for e in range(experts):
            for j in range(size):
                begin = sum(local_counts[j][: e + r * experts])
                rows.append(inputs[j][begin : begin + local_counts[j][e + r * experts]])
        results.append(np.concatenate(rows))
    return results


def global_gather(
    inputs: Sequence[Array], local_counts: Sequence[Sequence[int]], global_counts: Sequence[Sequence[int]]
) -> list[Array]:
    """Brings the rows back: the inverse of :func:`global_scatter` with the same counts.

    Rank r's input is ordered as global_scatter's result: its own expert e, then source rank j. Rank r's
    result holds, for every i = e + j * E in ascending order, the ``local_counts[r][i]`` rows from expert e of
    rank j.
    """
    size, experts = _expert_layout(local_counts, global_counts)
    results = []
    for r in range(size):
        rows = [inputs[r][:0]]
        for j in range(size):
            for e in range(experts):
                before = [(e2, j2) for e2 in range(experts) for j2 in range(size) if (e2, j2) < (e, r)]
                begin = sum(global_counts[j][e2 + j2 * experts] for e2, j2 in before)
                rows.append(inputs[j][begin : begin + global_counts[j][e + r * experts]])
        results.append(np.concatenate(rows))
    return results


_NANS = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}
_SUMS = "sum", "avg", "prod"
_BITS = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}  # for bools they are logical


def _reduce(inputs: Sequence[Array], op: str, tree: bool = False) -> Array:
    dtype = inputs[0].dtype
    if op not in (*_SUMS, "min", "max", *_BITS):
        raise ValueError(f"op is {op!r}, expected one of {', '.join((*_SUMS, 'min', 'max', *_BITS))}")
    is_float = dtype.name in _NANS
    is_defined = op in ("sum", "avg") if dtype.kind == "c" else dtype.kind in "biu" and op != "avg"
    if not (op not in _BITS if is_float else is_defined):
        raise ValueError(f"{op} is not defined for {dtype.name}")
    if len(inputs) == 1:
        return inputs[0].copy()
    if op in ("min", "max"):
        return _extreme(inputs, op)
    if op in _BITS:
        combined: Array = _BITS[op].reduce(np.stack(inputs))
        return combined
    if dtype.kind == "c":  # real and imaginary part separately
        parts: Array = _reduce([array.reshape(-1).view(f"f{dtype.itemsize // 2}") for array in inputs], op, tree)
        return parts.view(dtype).reshape(inputs[0].shape)
    if dtype == np.bool_:
        logical: Array = np.any(inputs, axis=0) if op == "sum" else np.all(inputs, axis=0)
        return logical
    wide = np.dtype(np.float32) if dtype.itemsize < 4 and is_float else dtype
    with np.errstate(all="ignore"):
        total = _combined([array.astype(wide) for array in inputs], op, tree)
        if op == "avg":
            total = total / wide.type(len(inputs))
        result: Array = np.asarray(total.astype(dtype))
    if is_float:
        result[np.isnan(total)] = quiet_nan(dtype)
    return result


def _combined(terms: Sequence[Array], op: str, tree: bool) -> Array:
    if len(terms) == 1:
        return terms[0]
    at = 1 << (len(terms) - 1).bit_length() - 1 if tree else len(terms) - 1
    left, right = _combined(terms[:at], op, tree), _combined(terms[at:], op, tree)
    return np.asarray(left * right if op == "prod" else left + right)


def _extreme(inputs: Sequence[Array], op: str) -> Array:
    result = inputs[0].copy()
    with np.errstate(all="ignore"):
        for array in inputs[1:]:
            better = array < result if op == "min" else array > result
            result[better] = array[better]
        if result.dtype.kind not in "biu":
            for array in inputs:
                result[np.isnan(array)] = quiet_nan(result.dtype)
    return result


def quiet_nan(dtype: np.dtype[Any]) -> Any:
    """Returns the positive quiet NaN without payload of a float that can be reduced."""
    return np.array([_NANS[dtype.name]], f"u{dtype.itemsize}").view(dtype)[0]


def _rows(matrix: Matrix) -> list[list[int]]:
    """Returns the matrix as Python integers, which do not overflow."""
    rows = [[int(value) for value in row] for row in matrix]
    if any(len(row) != len(rows) for row in rows):
        raise ValueError(f"expected a square matrix, got rows of length {[len(row) for row in rows]}")
    return rows


def equal_part(array: Array, size: int) -> int:
    """Returns the first dimension of one of ``size`` equal parts; raises ValueError if it does not divide."""
    if len(array) % size:
        raise ValueError(f"the first dimension, {len(array)}, does not divide by {size} ranks")
    return len(array) // size


def _expert_layout(local_counts: Sequence[Sequence[int]], global_counts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Returns the number of ranks and of experts per rank."""
    size = len(local_counts)
    experts, rest = divmod(len(local_counts[0]), size)
    if rest:
        raise ValueError(f"local_counts have {len(local_counts[0])} entries, expected a multiple of {size} ranks")
    for r in range(size):
        for j in range(size):
            for e in range(experts):
                if global_counts[r][e + j * experts] != local_counts[j][e + r * experts]:
                    raise ValueError(
                        f"global_counts[{r}][{e + j * experts}] is {global_counts[r][e + j * experts]}, but "
                        f"local_counts[{j}][{e + r * experts}] is {local_counts[j][e + r * experts]}"
                    )
    return size, experts
