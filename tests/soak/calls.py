"""Random calls of collectives: the arguments of all ranks, and what must come, written from the definition."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from case import (
    UNSEEN,
    Arguments,
    Array,
    at_root,
    exchanged,
    experts,
    filled,
    gathered,
    lists,
    reduced,
    scattered,
    single,
)

from alltoallv.testing import reference

DTYPES = ("float32", "float64", "int32", "int64", "uint8", "int8", "float16", "bool")
_POOL = {
    dtype: (np.random.default_rng(7).integers(-50, 50, 1 << 20) % (2 if dtype == "bool" else 251)).astype(dtype)
    for dtype in DTYPES
}
BITS = "reductions of bits"


@dataclass(frozen=True)
class Call:
    """One collective on all ranks; arguments in the names of `alltoallv.numpy`."""

    function: str
    arguments: list[Arguments]
    want: Callable[[list[Arguments]], list[Any]]


def draw(rng: random.Random, size: int, lacks: dict[str, str], units: int | None = None) -> Call:
    """A call of any collective.

    Args:
        size: How many ranks.
        lacks: What the front end does not offer, as `column.Column.lacks`.
        units: About how many elements every part has; None: mostly few.
    """
    functions = [name for name in _MAKERS if name not in lacks]
    call = make(rng.choice(functions), rng, size, lacks, units)
    if call.function not in ("barrier", "exchange_counts", *_EXPERTS) and rng.random() < 0.2:
        for arguments in call.arguments:
            arguments["async_op"] = True
    return call


def make(
    function: str, rng: random.Random, size: int, lacks: dict[str, str] | None = None, units: int | None = None
) -> Call:
    """A call of this collective."""
    if units is None:
        units = rng.choice((0, 1, 5, 5, 30, 30, 30, 200)) if rng.random() < 0.97 else rng.choice((4000, 60_000))
    return _MAKERS[function](rng, size, lacks or {}, units)


def _data(rng: random.Random, dtype: str, *shape: int) -> Array:
    count = int(np.prod(shape, dtype=int))
    begin = rng.randrange((1 << 20) - count)
    return _POOL[dtype][begin : begin + count].reshape(shape)


def _counts(rng: random.Random, size: int, units: int) -> list[list[int]]:
    return [[rng.randrange(units + 1) for _ in range(size)] for _ in range(size)]


def _turned(counts: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*counts, strict=True)]


def _exchange(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype, tail = rng.choice(DTYPES), rng.choice(((), (), (3,)))
    sends = _counts(rng, size, units)
    recvs = _turned(sends)
    all_: list[Arguments] = [
        {"input": _data(rng, dtype, sum(sends[r]), *tail), "send_counts": sends[r], "recv_counts": recvs[r]}
        for r in range(size)
    ]
    how = rng.choice(("packed", "learnt", "out", "gaps"))
    for r, arguments in enumerate(all_):
        if how == "learnt":
            del arguments["recv_counts"]
        elif how == "out":
            arguments["out"] = filled(sum(recvs[r]), *tail, dtype=dtype)
        elif how == "gaps":
            arguments["sdispls"] = reference.packed(sends)[r].tolist()
            arguments["rdispls"] = [int(d) + 2 * j + 1 for j, d in enumerate(reference.packed(recvs)[r])]
            arguments["out"] = filled(sum(recvs[r]) + 2 * size + 1, *tail, dtype=dtype)
    return Call("all_to_all_v", all_, exchanged)


def _single(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype, sends = rng.choice(DTYPES), _counts(rng, size, units)
    recvs = _turned(sends)
    all_ = [
        {
            "output": filled(sum(recvs[r]), dtype=dtype),
            "input": _data(rng, dtype, sum(sends[r])),
            "output_split_sizes": recvs[r],
            "input_split_sizes": sends[r],
        }
        for r in range(size)
    ]
    return Call("all_to_all_single", all_, single)


def _lists(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype, sends = rng.choice(DTYPES), _counts(rng, size, units)
    all_ = [
        {
            "output_tensor_list": [filled(n, 2, dtype=dtype) for n in _turned(sends)[r]],
            "input_tensor_list": [_data(rng, dtype, n, 2) for n in sends[r]],
        }
        for r in range(size)
    ]
    return Call("all_to_all", all_, lists)


def _gather_into(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype, rows = rng.choice(DTYPES), 1 + units
    all_ = [
        {"output_tensor": filled(rows * size, 3, dtype=dtype), "input_tensor": _data(rng, dtype, rows, 3)}
        for _ in range(size)
    ]
    return Call("all_gather_into_tensor", all_, gathered)


def _counts_told(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    all_ = [{"send_counts": row} for row in _counts(rng, size, units)]
    return Call("exchange_counts", all_, lambda all_: list(reference.exchange_counts([a["send_counts"] for a in all_])))


def _stacked(all_: list[Arguments]) -> list[Any]:
    return [np.stack([a["input"] for a in all_])] * len(all_)


def _gather_all(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype = rng.choice(DTYPES)
    all_ = [
        {"input": _data(rng, dtype, 1 + units, 3), "out": filled(size, 1 + units, 3, dtype=dtype)} for _ in range(size)
    ]
    return Call("all_gather", all_, _stacked)


def _broadcast(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype, root = rng.choice(DTYPES), rng.randrange(size)
    all_ = [{"array": _data(rng, dtype, 1 + units, 2), "root": root} for _ in range(size)]
    return Call("broadcast", all_, lambda all_: [all_[root]["array"]] * size)


def _barrier(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    return Call("barrier", [{} for _ in range(size)], lambda all_: [None] * size)


def _reduction(rng: random.Random, lacks: dict[str, str]) -> tuple[str, str]:
    dtype = rng.choice(DTYPES)
    ops = ["sum", "max", "min", "prod"]
    if dtype.startswith("float"):
        ops.append("avg")
    elif BITS not in lacks:
        ops += ["band", "bor", "bxor"]
    return dtype, rng.choice(ops)


def _all_reduce(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype, op = _reduction(rng, lacks)
    all_ = [{"input": _data(rng, dtype, 1 + units, 2), "op": op} for _ in range(size)]
    return Call("all_reduce", all_, reduced)


def _reduce(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    call, root = _all_reduce(rng, size, lacks, units), rng.randrange(size)
    return Call("reduce", [{**a, "root": root} for a in call.arguments], at_root(reduced, UNSEEN))


def _reduce_scatter(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    (dtype, op), rows = _reduction(rng, lacks), 1 + units
    all_ = [
        {"input": _data(rng, dtype, rows * size, 2), "op": op, "out": filled(rows, 2, dtype=dtype)} for _ in range(size)
    ]
    return Call("reduce_scatter", all_, scattered)


def _gather(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype, root = rng.choice(DTYPES), rng.randrange(size)
    all_: list[Arguments] = [{"input": _data(rng, dtype, 1 + units, 3), "root": root} for _ in range(size)]
    all_[root]["out"] = filled(size, 1 + units, 3, dtype=dtype)
    return Call("gather", all_, at_root(_stacked, None))


def _scatter(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    dtype, root = rng.choice(DTYPES), rng.randrange(size)
    all_: list[Arguments] = [{"out": filled(1 + units, 3, dtype=dtype), "root": root} for _ in range(size)]
    all_[root]["input"] = _data(rng, dtype, size, 1 + units, 3)
    return Call("scatter", all_, lambda all_: list(all_[root]["input"]))


def _expert_rows(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> tuple[list[Arguments], str]:
    local = [[rng.randrange(2 + min(units, 50)) for _ in range(2 * size)] for _ in range(size)]
    told = [[local[j][e + 2 * r] for j in range(size) for e in range(2)] for r in range(size)]
    return [{"local_count": local[r], "global_count": told[r]} for r in range(size)], rng.choice(("float32", "int64"))


def _to_experts(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    all_, dtype = _expert_rows(rng, size, lacks, units)
    all_ = [{"x": _data(rng, dtype, sum(a["local_count"]), 2), **a} for a in all_]
    return Call("global_scatter", all_, experts("global_scatter"))


def _from_experts(rng: random.Random, size: int, lacks: dict[str, str], units: int) -> Call:
    all_, dtype = _expert_rows(rng, size, lacks, units)
    all_ = [{"x": _data(rng, dtype, sum(a["global_count"]), 2), **a} for a in all_]
    return Call("global_gather", all_, experts("global_gather"))


_EXPERTS = ("global_scatter", "global_gather")
_MAKERS: dict[str, Callable[[random.Random, int, dict[str, str], int], Call]] = {
    "all_to_all_v": _exchange,
    "all_to_all_single": _single,
    "all_to_all": _lists,
    "all_gather_into_tensor": _gather_into,
    "exchange_counts": _counts_told,
    "all_gather": _gather_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "global_scatter": _to_experts,
    "global_gather": _from_experts,
}
