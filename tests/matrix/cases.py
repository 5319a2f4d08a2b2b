"""The cases of the matrix: calls that every front end answers alike, in the arguments of `alltoallv.numpy`.

Arrays become tensors of the framework, counts what a case says; what must come is written from the definition, by
`alltoallv.testing.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alltoallv.testing import reference

SIZE = 3
CULPRIT = 2  # the rank that makes a mistake
SENDS = [[1, 2, 0], [3, 1, 2], [2, 0, 4]]  # what rank r sends to rank j
RECVS = [list(column) for column in zip(*SENDS, strict=True)]
TOTAL = [sum(row) for row in SENDS], [sum(row) for row in RECVS]

Array = np.ndarray[Any, Any]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Rows of one tensor of the framework, so that arguments may overlap in memory."""

    begin: int
    end: int


@dataclass(frozen=True)
class Case:
    """One call on every rank.

    Attributes:
        function, what: The collective and what is particular, which make the case's name.
        arguments: Of a rank.
        want: The outputs of all ranks, given all ranks' arguments.
        counts: What counts are given as: list, tuple, array, int32 array, tensor.
        needs: Features that a front end may lack.
        mistake: What `CULPRIT` has otherwise; then ``error`` has the class and the text that it gets, where {name}
            stands for an argument's name.
        everywhere: All ranks make the mistake: a framework may find it before we are asked.
    """

    function: str
    what: str
    arguments: Callable[[int], Arguments]
    want: Callable[[list[Arguments]], list[Any]] | None = None
    counts: str = "list"
    needs: tuple[str, ...] = ()
    mistake: Callable[[], Arguments] | None = None
    error: tuple[str, str] = ("", "")
    everywhere: bool = False

    @property
    def name(self) -> str:
        """Of the test, and in the lists of what is otherwise."""
        return f"{self.function}: {self.what}"


def data(rank: int, *shape: int, dtype: str = "float32") -> Array:
    """Values that tell ranks and places apart."""
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 100 * rank
    return values % 3 == 0 if dtype == "bool" else values.astype(dtype)


def filled(*shape: int, dtype: str = "float32") -> Array:
    """An output before the call."""
    return np.full(shape, 1 if dtype == "bool" else 77, dtype)


# --- what must come


def exchanged(all_: list[Arguments]) -> list[Any]:
    def flat(x: Array) -> Array:
        rows = all_[0].get("unit") or ("row" if all_[0]["input"].ndim > 1 else "element")
        return x if rows == "row" else x.reshape(-1)

    def of(name: str) -> Any:
        return [a[name] for a in all_] if name in all_[0] else None

    outs = of("out")
    made = reference.all_to_all_v(
        [flat(x) for x in of("input")],
        of("send_counts"),
        of("sdispls"),
        of("recv_counts"),
        of("rdispls"),
        None if outs is None else [flat(out) for out in outs],
    )
    return made if outs is None else [x.reshape(out.shape) for x, out in zip(made, outs, strict=True)]


def single(all_: list[Arguments]) -> list[Any]:
    sizes = [a["input_split_sizes"] for a in all_] if "input_split_sizes" in all_[0] else None
    return reference.all_to_all_single([a["input"] for a in all_], sizes)


def lists(all_: list[Arguments]) -> list[Any]:
    return reference.all_to_all([a["input_tensor_list"] for a in all_])


def gathered(all_: list[Arguments]) -> list[Any]:
    inputs = [a["input_tensor"] if isinstance(a["input_tensor"], np.ndarray) else MEMORY[:2] for a in all_]
    out = all_[0]["output_tensor"]
    return [x.reshape(out.shape) for x in reference.all_gather_into_tensor(inputs)]


def reduced(all_: list[Arguments]) -> list[Any]:
    return reference.all_reduce([a["input"] for a in all_], all_[0].get("op", "sum"))


def scattered(all_: list[Arguments]) -> list[Any]:
    return reference.reduce_scatter([a["input"] for a in all_], all_[0].get("op", "sum"), all_[0].get("recv_counts"))


def experts(function: str) -> Callable[[list[Arguments]], list[Any]]:
    def wanted(all_: list[Arguments]) -> list[Any]:
        counts = [[a[name] for a in all_] for name in ("local_count", "global_count")]
        return getattr(reference, function)([a["x"] for a in all_], *counts)

    return wanted


# --- the calls


def counts_v(rank: int, factor: int = 1) -> Arguments:
    return {"send_counts": [n * factor for n in SENDS[rank]], "recv_counts": [n * factor for n in RECVS[rank]]}


def v(*tail: int, dtype: str = "float32", factor: int = 1, learns: bool = False, **more: Any) -> Callable[[int], Any]:
    def arguments(rank: int) -> Arguments:
        made = {"input": data(rank, TOTAL[0][rank], *tail, dtype=dtype), **counts_v(rank, factor), **more}
        if learns:
            del made["recv_counts"]
        return made

    return arguments


def gaps(*tail: int, out: bool, **more: Any) -> Callable[[int], Any]:
    """Regions in the reverse order of ranks with an untouched unit before each."""

    def displs(counts: list[int]) -> list[int]:
        return [1 + sum(n + 1 for n in counts[j + 1 :]) if counts[j] else 0 for j in range(SIZE)]

    def arguments(rank: int) -> Arguments:
        made = {"input": data(rank, TOTAL[0][rank] + 4, *tail), **counts_v(rank), **more}
        made |= {"sdispls": displs(SENDS[rank]), "rdispls": displs(RECVS[rank])}
        return made | ({"out": filled(TOTAL[1][rank] + 4, *tail)} if out else {})

    return arguments


def s(*tail: int, even: bool = False, dtype: str = "float32", **more: Any) -> Callable[[int], Any]:
    def arguments(rank: int) -> Arguments:
        rows = (6, 6) if even else (TOTAL[1][rank], TOTAL[0][rank])
        made = {"output": filled(rows[0], *tail, dtype=dtype), "input": data(rank, rows[1], *tail, dtype=dtype), **more}
        return made if even else made | {"output_split_sizes": RECVS[rank], "input_split_sizes": SENDS[rank]}

    return arguments


def a2a(**more: Any) -> Callable[[int], Any]:
    return lambda rank: {
        "output_tensor_list": [filled(n, 2) for n in RECVS[rank]],
        "input_tensor_list": [data(10 * rank + j, n, 2) for j, n in enumerate(SENDS[rank])],
        **more,
    }


def gather(*shape: int, **more: Any) -> Callable[[int], Any]:
    return lambda rank: {"output_tensor": filled(*shape), "input_tensor": data(rank, 2, 3), **more}


def reduce(dtype: str = "float32", **more: Any) -> Callable[[int], Any]:
    return lambda rank: {"input": data(rank % 2, 6, 2, dtype=dtype), **more}


def moe(rank: int) -> Arguments:
    local = [[1, 2, 0, 1, 1, 1], [0, 1, 1, 1, 2, 1], [2, 1, 0, 0, 3, 0]]
    told = [[local[j][e + 2 * rank] for e in range(2)] for j in range(SIZE)]
    return {"x": data(rank, 6, 2), "local_count": local[rank], "global_count": [n for two in told for n in two]}


def moe_back(rank: int) -> Arguments:
    made = moe(rank)
    return made | {"x": data(rank, sum(made["global_count"]), 2)}


MEMORY = data(0, 12, 2)
V, S, A, G = "all_to_all_v", "all_to_all_single", "all_to_all", "all_gather_into_tensor"
KINDS = "tuple", "array", "int32 array", "tensor"
RIGHT = [
    Case(V, "1-D", v(), exchanged),
    *[Case(V, f"of {dtype}", v(dtype=dtype), exchanged) for dtype in ("int64", "bool", "float16", "float64", "uint8")],
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
    Case("exchange_counts", "told", lambda rank: {"send_counts": SENDS[rank]},
         lambda all_: list(reference.exchange_counts([a["send_counts"] for a in all_]))),
    Case("all_gather", "stacked", lambda rank: {"input": data(rank, 2, 3), "out": filled(3, 2, 3)},
         lambda all_: [np.stack([a["input"] for a in all_])] * 3),
    Case("broadcast", "from rank 1", lambda rank: {"array": data(rank, 4, 2), "root": 1},
         lambda all_: [all_[1]["array"]] * 3),
    Case("broadcast", "async", lambda rank: {"array": data(rank, 4, 2), "root": 2, "async_op": True},
         lambda all_: [all_[2]["array"]] * 3),
    Case("barrier", "passed", lambda rank: {}, lambda all_: [None] * 3),
    *[Case("all_reduce", op, reduce(op=op), reduced) for op in ("sum", "avg", "min", "max", "prod")],
    Case("all_reduce", "of int64", reduce("int64"), reduced),
    Case("all_reduce", "async", reduce(async_op=True), reduced),
    Case("reduce_scatter", "even", lambda rank: reduce()(rank) | {"out": filled(2, 2)}, scattered),
    Case("reduce_scatter", "uneven", reduce(recv_counts=[3, 2, 1]), scattered, needs=("uneven parts", "out left out")),
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

# --- mistakes of one rank

PARAM, TENSOR = "InvalidParamError", "InvalidTensorError"
OVERLAP = PARAM, "output and input overlap in memory, expected separate memory"
GOOD: dict[str, Callable[[int], Arguments]] = {
    V: lambda rank: {"input": data(rank, 6), "send_counts": [2] * 3, "recv_counts": [2] * 3},
    S: s(2, even=True),
    A: lambda rank: {name: [data(j, 1, 2) for j in range(3)] for name in ("output_tensor_list", "input_tensor_list")},
    G: gather(6, 3),
    "exchange_counts": lambda rank: {"send_counts": SENDS[rank]},
    "all_reduce": reduce(),
    "broadcast": lambda rank: {"array": data(rank, 4, 2), "root": 1},
    "global_scatter": moe,
    "global_gather": moe_back,
}


def bad(
    function: str, what: str, error: str, text: str, needs: tuple[str, ...] = (), all_: bool = False, **mistake: Any
) -> Case:
    """A case of one wrong argument."""
    return Case(function, what, GOOD[function], None, "list", needs, lambda: mistake, (error, text), all_)


def wrong_counts(function: str, name: str, *, everything: bool = True) -> list[Case]:
    """What is wrong with any counts; torch.distributed takes lists of integers alone."""
    what = f"{name}: "
    needs = () if everything else ("counts as array",)
    return [
        bad(function, what + "too few", PARAM, f"{{{name}}} has 2 entries, expected 3, one per rank", **{name: [3, 3]}),
        bad(function, what + "fractions", PARAM, f"{{{name}}} is [2.0, 2.0, 2.0], expected 3 integers, one per rank",
            needs, **{name: [2.0] * 3}),
        bad(function, what + "a bool", PARAM, f"{{{name}}} is [True, 2, 3], expected 3 integers, one per rank",
            needs, **{name: [True, 2, 3]}),
        bad(function, what + "a number", PARAM, f"{{{name}}} is 2, expected 3 integers, one per rank",
            needs, **{name: 2}),
    ]  # fmt: skip


WRONG = [
    *wrong_counts(V, "send_counts"),
    *wrong_counts(V, "recv_counts"),
    *wrong_counts(V, "sdispls"),
    *wrong_counts(S, "input_split_sizes", everything=False),
    *wrong_counts(S, "output_split_sizes", everything=False),
    *wrong_counts("exchange_counts", "send_counts"),
    bad(V, "beyond the input", PARAM,
        "sdispls[2] + send_counts[2] is 4 + 3, expected at most 6, the elements of the input", send_counts=[2, 2, 3]),
    bad(V, "receive regions overlap", PARAM,
        "the receive regions of ranks 0 and 1 overlap: rank 0 writes [0, 2) of the output, rank 1 writes [1, 3)",
        rdispls=[0, 1, 4]),
    bad(V, "unit", PARAM, "unit is 'rows', expected 'element', 'row' or None", unit="rows"),
    bad(V, "rows of a scalar", TENSOR, "a 0-dimensional input has no rows, expected at least 1 dimension",
        unit="row", input=np.array(1, "float32")),
    bad(V, "out without recv_counts", PARAM, "out is given but recv_counts is None, expected recv_counts with out",
        out=filled(6), recv_counts=None),
    bad(V, "dtypes", TENSOR, "out has dtype int32, expected float32", out=filled(6, dtype="int32")),
    bad(V, "rows of out", TENSOR, "out has rows of shape (3,), expected (2,), those of the input",
        input=data(0, 6, 2), out=filled(6, 3)),
    bad(V, "overlap", *OVERLAP, input=Part(0, 6), out=Part(3, 9)),
    bad(V, "bad timeout", PARAM, "timeout is -1, expected seconds above 0, or None", ("timeout",), timeout=-1),
    bad(S, "bad timeout", PARAM, "timeout is 0, expected seconds above 0, or None", ("timeout",), timeout=0),
    bad(S, "dtypes", TENSOR, "{output} has dtype int32, expected float32", all_=True,
        output=filled(6, 2, dtype="int32")),
    bad(S, "overlap", *OVERLAP, input=Part(0, 6), output=Part(3, 9)),
    bad(S, "the same tensor", *OVERLAP, input=Part(0, 6), output=Part(0, 6)),
    bad(S, "sum of splits", PARAM,
        "{input_split_sizes} is [2, 2, 3], expected entries >= 0 whose sum is 6, dimension 0 of {input}",
        input_split_sizes=[2, 2, 3]),
    bad(S, "negative splits", PARAM,
        "{output_split_sizes} is [4, -1, 3], expected entries >= 0 whose sum is 6, dimension 0 of {output}",
        output_split_sizes=[4, -1, 3]),
    bad(S, "indivisible", PARAM, "{input} has 7 rows in dimension 0, which 3 ranks cannot share equally: "
        "give split sizes, or a multiple of the number of ranks", input=data(0, 7, 2)),
    bad(S, "rows", TENSOR, "{output} has rows of shape (3,), expected (2,) as the input", ("one shape of rows",),
        output=filled(6, 3)),
    bad(A, "overlap", *OVERLAP, input_tensor_list=[Part(0, 1), Part(1, 2), Part(2, 3)],
        output_tensor_list=[Part(2, 3), Part(4, 5), Part(5, 6)]),
    bad(A, "outputs overlap", PARAM, "{output_tensor_list}[0] and {output_tensor_list}[1] overlap in memory",
        output_tensor_list=[Part(3, 4), Part(3, 4), Part(5, 6)]),
    bad(A, "too few", PARAM, "{input_tensor_list} has 2 tensors, expected 3, one per rank",
        input_tensor_list=[data(0, 1, 2)] * 2),
    bad(A, "dtypes", TENSOR, "Invalid usage of tensors with different dtypes: float32, int32", all_=True,
        output_tensor_list=[filled(1, 2), filled(1, 2, dtype="int32"), filled(1, 2)]),
    bad(G, "size", TENSOR, "{output_tensor} has 15 elements, expected 3 times the 6 of an input of shape (2, 3)",
        output_tensor=filled(5, 3)),
    bad(G, "dtypes", TENSOR, "{output_tensor} has dtype int32, expected float32", all_=True,
        output_tensor=filled(6, 3, dtype="int32")),
    bad(G, "overlap", *OVERLAP, output_tensor=Part(0, 9), input_tensor=Part(8, 11)),
    bad("exchange_counts", "negative", PARAM, "send_counts is [1, -1, 2], expected entries >= 0",
        send_counts=[1, -1, 2]),
    bad("global_scatter", "cards", PARAM,
        "local_count has dtype int64 and shape (5,), expected integers, 3 cards times the number of experts",
        local_count=[1] * 5),
    bad("global_scatter", "rows of x", PARAM, "local_count sums to 6, expected 7, the rows of x", x=data(0, 7, 2)),
    bad("global_gather", "lengths", PARAM, "local_count has 9 entries and global_count 6, expected one length",
        local_count=[1] * 9),
]  # fmt: skip

CASES = [*RIGHT, *WRONG]
TWICE = [case.name for n, case in enumerate(CASES) if case.name in {other.name for other in CASES[:n]}]
assert not TWICE, TWICE
