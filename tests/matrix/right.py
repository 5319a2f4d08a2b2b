"""Calls that are right, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from case import (
    MEMORY,
    SENDS,
    UNSEEN,
    Arguments,
    Case,
    Part,
    Turned,
    a2a,
    at_root,
    data,
    exchanged,
    experts,
    filled,
    gaps,
    gather,
    gathered,
    lists,
    moe,
    moe_back,
    reduce,
    reduced,
    s,
    scattered,
    single,
    v,
)

from alltoallv.testing import golden, quantized, reference

V, S, A, G = "all_to_all_v", "all_to_all_single", "all_to_all", "all_gather_into_tensor"
N = "all_to_all_nd"
KINDS = "tuple", "array", "int32 array", "tensor"
#: Collectives that torch.distributed does not have.
NOT_OF_TORCH = (
    *(V, N, "exchange_counts", "global_scatter", "global_gather"),
    *("quantized_all_reduce", "quantized_reduce_scatter", "quantized_all_to_all"),
)


def stack(dtype: str = "float32") -> Callable[[int], Arguments]:
    return lambda rank: {"input": data(rank, 2, 3, dtype=dtype), "out": filled(3, 2, 3, dtype=dtype)}


def stacked(all_: list[Arguments]) -> list[Any]:
    return [np.stack([a["input"] for a in all_])] * 3


def nd(dtype: str = "float32", *, out: bool = False, **more: Any) -> Callable[[int], Arguments]:
    outs = {"out": filled(6, 1, 4, dtype=dtype)} if out else {}
    return lambda rank: {"input": data(rank, 2, 3, 4, dtype=dtype), "scatter_dim": 1, "gather_dim": 0, **outs, **more}


def uneven_nd(rank: int) -> Arguments:
    sizes = {"scatter_sizes": [2, 0, 3], "gather_sizes": [1, 2, 3]}
    return {"input": data(rank, 2, rank + 1, 5), "scatter_dim": -1, "gather_dim": 1, **sizes}


def swapped(all_: list[Arguments]) -> list[Any]:
    inputs = [a["input"].array if isinstance(a["input"], Turned) else a["input"] for a in all_]
    return reference.all_to_all_nd(inputs, all_[0]["scatter_dim"], all_[0]["gather_dim"], all_[0].get("scatter_sizes"))


def tell(dtype: str = "float32") -> Callable[[int], Arguments]:
    return lambda rank: {"array": data(rank, 4, 2, dtype=dtype), "root": 1}


def told(all_: list[Arguments]) -> list[Any]:
    return [all_[1]["array"]] * 3


def at_2(dtype: str = "float32") -> Callable[[int], Arguments]:
    return lambda rank: (
        {"input": data(rank, 2, 3, dtype=dtype), "root": 2}
        | ({"out": filled(3, 2, 3, dtype=dtype)} if rank == 2 else {})
    )


def from_1(dtype: str = "float32") -> Callable[[int], Arguments]:
    return lambda rank: (
        {"out": filled(2, 3, dtype=dtype), "root": 1} | ({"input": data(7, 3, 2, 3, dtype=dtype)} if rank == 1 else {})
    )


def dealt(all_: list[Arguments]) -> list[Any]:
    return list(all_[1]["input"])


RIGHT = [
    Case(V, "1-D", v(), exchanged),
    Case(V, "2-D in rows", v(2), exchanged),
    Case(V, "3-D in rows", v(2, 3, unit="row"), exchanged),
    Case(V, "2-D in elements", v(2, factor=2, unit="element"), exchanged),
    Case(V, "rows without elements", v(0), exchanged),
    Case(V, "learnt", v(learns=True), exchanged),
    Case(V, "learnt rows", v(2, learns=True), exchanged),
    Case(V, "learnt, async", v(learns=True, async_op=True), exchanged),
    Case(V, "nothing at all", lambda rank: {"input": data(0, 0), "send_counts": [0] * 3, "recv_counts": [0] * 3},
         exchanged),
    Case(V, "gaps", gaps(out=True), exchanged),
    Case(V, "gaps between rows", gaps(2, out=True), exchanged),
    Case(V, "gaps are zero", gaps(2, out=False), exchanged),
    Case(V, "gaps, async", gaps(out=True, async_op=True), exchanged),
    Case(V, "send regions overlap", v(sdispls=[0, 1, 0]), exchanged),
    Case(V, "async", v(async_op=True), exchanged),
    Case(V, "timeout", v(timeout=5), exchanged, needs=("timeout",)),
    Case(S, "even", s(even=True), single),
    Case(S, "even rows", s(2, even=True), single),
    Case(S, "uneven", s(), single),
    Case(S, "uneven rows of int64", s(2, dtype="int64"), single),
    Case(S, "rows without elements", s(0), single),
    Case(S, "async", s(2, async_op=True), single),
    Case(S, "timeout", s(2, timeout=5), single, needs=("timeout",)),
    Case(A, "uneven", a2a(), lists),
    Case(A, "async", a2a(async_op=True), lists),
    Case(A, "timeout", a2a(timeout=5), lists, needs=("timeout",)),
    Case(G, "concatenated", gather(6, 3), gathered),
    Case(G, "stacked", gather(3, 2, 3), gathered),
    Case(G, "any shape of as many elements", gather(18), gathered),
    Case(G, "async", gather(6, 3, async_op=True), gathered),
    Case(G, "timeout", gather(6, 3, timeout=5), gathered, needs=("timeout",)),
    Case(G, "in place", lambda rank: {"output_tensor": Part(0, 6), "input_tensor": Part(2 * rank, 2 * rank + 2)},
         lambda all_: [MEMORY[:6]] * 3),
    Case(N, "even", nd(), swapped),
    Case(N, "uneven", uneven_nd, swapped),
    Case(N, "into out", nd(out=True), swapped),
    Case(N, "async", nd(async_op=True), swapped),
    Case(N, "into out, async", nd(out=True, async_op=True), swapped),
    Case(N, "not contiguous", lambda rank: {"input": Turned(data(rank, 3, 6)), "scatter_dim": 0, "gather_dim": 1},
         swapped),
    Case("exchange_counts", "told", lambda rank: {"send_counts": SENDS[rank]},
         lambda all_: list(reference.exchange_counts([a["send_counts"] for a in all_]))),
    Case("all_gather", "stacked", stack(), stacked),
    Case("broadcast", "from rank 1", tell(), told),
    Case("broadcast", "async", lambda rank: {"array": data(rank, 4, 2), "root": 2, "async_op": True},
         lambda all_: [all_[2]["array"]] * 3),
    Case("barrier", "passed", lambda rank: {}, lambda all_: [None] * 3),
    *[Case("all_reduce", op, reduce(op=op), reduced) for op in ("sum", "avg", "min", "max", "prod")],
    *[Case("all_reduce", op, reduce("int64", op=op), reduced, needs=("reductions of bits",))
      for op in ("band", "bor", "bxor")],
    *[Case("reduce", op, reduce(op=op, root=1), at_root(reduced, UNSEEN)) for op in ("sum", "avg", "max")],
    Case("reduce", "async", reduce("int64", root=2, async_op=True), at_root(reduced, UNSEEN)),
    Case("gather", "stacked", at_2(), at_root(stacked, None)),
    Case("scatter", "even", from_1(), dealt),
    Case("scatter", "async",
         lambda rank: {"out": filled(2), "root": 0, "async_op": True} | ({"input": data(7, 3, 2)} if rank == 0 else {}),
         lambda all_: list(all_[0]["input"])),
    Case("all_reduce", "of int64", reduce("int64"), reduced),
    Case("all_reduce", "async", reduce(async_op=True), reduced),
    Case("reduce_scatter", "even", lambda rank: reduce()(rank) | {"out": filled(2, 2)}, scattered),
    Case("reduce_scatter", "uneven", reduce(recv_counts=[3, 2, 1]), scattered, needs=("uneven parts of one tensor",
        "reduce_scatter without an output")),
    Case("quantized_all_reduce", "dynamic", lambda rank: {"input": data(rank, 40, 5) / 7, "group_size": 16},
         lambda all_: quantized.quantized_all_reduce([a["input"] for a in all_], group_size=16)),
    Case("quantized_all_reduce", "shared scale, async", lambda rank: {
        "input": data(rank, 8, dtype="int8"), "scale": 0.5, "async_op": True},
        lambda all_: quantized.shared_scale_all_reduce([a["input"] for a in all_], np.float32(0.5))),
    Case("quantized_reduce_scatter", "uneven", lambda rank: {
        "input": data(rank, 6, 40) / 7, "recv_counts": [3, 2, 1], "group_size": 16},
        lambda all_: quantized.quantized_reduce_scatter([a["input"] for a in all_], [3, 2, 1], group_size=16)),
    Case("quantized_all_to_all", "learnt", lambda rank: {
        "input": data(rank, sum(SENDS[rank]), 40) / 7, "send_counts": SENDS[rank]},
        lambda all_: quantized.quantized_all_to_all([a["input"] for a in all_], SENDS)),
    Case("global_scatter", "rows", moe, experts("global_scatter")),
    Case("global_gather", "rows", moe_back, experts("global_gather")),
]  # fmt: skip
RIGHT += [
    replace(case, what=f"counts as {kind}", counts=kind, needs=(f"counts as {kind.split()[-1]}",))
    for case in RIGHT
    if case.name
    in (f"{V}: gaps", f"{S}: uneven", "exchange_counts: told", "global_scatter: rows", "global_gather: rows")
    for kind in KINDS
]

# --- every dtype

FLOATS = "float16", "bfloat16", "float32", "float64"
REDUCED = [name for name in golden.DTYPES if not name.startswith(("complex", "float8"))]
RIGHT += [
    Case(function, f"of {name}", make(name), want, dtype=name)
    for name in golden.DTYPES
    for function, make, want in (
        (V, lambda name: v(2, dtype=name), exchanged),
        (S, lambda name: s(2, dtype=name), single),
        (A, a2a, lists),
        (G, lambda name: gather(6, 3, dtype=name), gathered),
        (N, nd, swapped),
        ("all_gather", stack, stacked),
        ("broadcast", tell, told),
        ("gather", at_2, at_root(stacked, None)),
        ("scatter", from_1, dealt),
    )
]  # fmt: skip
RIGHT += [
    Case(function, f"{op} of {name}", make(name, op), want, dtype=name)
    for name in REDUCED
    for op in ("sum", "avg", "min", "max", "prod")
    if (op != "avg" or name in FLOATS) and name not in ("float32", "int64")
    for function, make, want in (
        ("all_reduce", lambda name, op: reduce(name, op=op), reduced),
        ("reduce_scatter", lambda name, op: lambda rank: reduce(name, op=op)(rank) | {"out": filled(2, 2, dtype=name)},
            scattered),
    )
]  # fmt: skip
