"""What a case of the matrix is: a call that every front end answers alike, in the arguments of `alltoallv.numpy`.

Arrays become tensors of the framework, counts what a case says; what must come is written from the definition, by
`alltoallv.testing.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from alltoallv.testing import reference
from alltoallv.testing.golden import dtype_of

SIZE = 3
SENDS = [[1, 2, 0], [3, 1, 2], [2, 0, 4]]  # what rank r sends to rank j
RECVS = [list(column) for column in zip(*SENDS, strict=True)]
TOTAL = [sum(row) for row in SENDS], [sum(row) for row in RECVS]

UNSEEN: Any = object()  # an output that is not looked at: what `reduce` leaves on ranks other than the root

Array = np.ndarray[Any, Any]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Rows of one tensor of the framework, so that arguments may overlap in memory."""

    begin: int
    end: int


@dataclass(frozen=True)
class Turned:
    """An array of 2 dimensions as a tensor of that shape that is not contiguous."""

    array: Array


@dataclass(frozen=True)
class Own:
    """What one framework alone has: an argument that is made by ``make``, on the rank."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One call on every rank.

    Attributes:
        function, what: The collective and what is particular, which make the case's name.
        arguments: Of a rank.
        want: The outputs of all ranks, given all ranks' arguments.
        size: How many ranks.
        counts: What counts are given as: list, tuple, array, int32 array, tensor.
        needs: Features that a front end may lack.
        dtype: For cases of one dtype: its name in `golden.DTYPES`, which a front end may not have.
        gradient: The argument x whose gradient is wanted, of the sum of the squares of the output; else empty.
        mistake: What some ranks have otherwise: one, another, and all of them, each once; then ``error`` has the class,
            the text that they get, and the code if it is not the class's. In the text {name} stands for an argument's
            name, three dots for any text.
        together: All ranks make the mistake, which no peer could hear of.
        breach: The mistake is one of the last rank against its peers only, and all ranks get the same error.
        gone: The group has been destroyed.
        printed: For examples of a documentation: the outputs it prints, as lists.
    """

    function: str
    what: str
    arguments: Callable[[int], Arguments]
    want: Callable[[list[Arguments]], list[Any]] | None = None
    size: int = SIZE
    counts: str = "list"
    needs: tuple[str, ...] = ()
    dtype: str = "float32"
    gradient: str = ""
    mistake: Callable[[], Arguments] | None = None
    error: tuple[str, str, int | None] = ("", "", None)
    together: bool = False
    breach: bool = False
    gone: bool = False
    printed: Any = None

    @property
    def name(self) -> str:
        """Of the test, and in the lists of what is otherwise."""
        return f"{self.function}: {self.what}"

    def culprits(self) -> list[tuple[int, ...]]:
        """The ranks that make the mistake, in each of the calls."""
        everybody = tuple(range(self.size))
        if self.mistake is None:
            return [()]
        if self.together:
            return [everybody]
        return [(self.size - 1,)] if self.breach else [(self.size - 1,), (0,), everybody]


def data(rank: int, *shape: int, dtype: str = "float32") -> Array:
    """Values that tell ranks and places apart."""
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 100 * rank
    with np.errstate(over="ignore"):  # of float8
        return values % 3 == 0 if dtype == "bool" else values.astype(dtype_of(dtype))


def filled(*shape: int, dtype: str = "float32") -> Array:
    """An output before the call."""
    return np.full(shape, 1 if dtype == "bool" else 77).astype(dtype_of(dtype))


# --- what must come


def exchanged(all_: list[Arguments]) -> list[Any]:
    def flat(x: Array) -> Array:
        rows = all_[0].get("unit") or ("row" if all_[0]["input"].ndim > 1 else "element")
        return x if rows == "row" else x.reshape(-1)

    def of(name: str) -> Any:
        return None if all_[0].get(name) is None else [a[name] for a in all_]

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


def at_root(wanted: Callable[[list[Arguments]], list[Any]], elsewhere: Any) -> Callable[[list[Arguments]], list[Any]]:
    return lambda all_: [value if rank == all_[0]["root"] else elsewhere for rank, value in enumerate(wanted(all_))]


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


def a2a(dtype: str = "float32", **more: Any) -> Callable[[int], Any]:
    return lambda rank: {
        "output_tensor_list": [filled(n, 2, dtype=dtype) for n in RECVS[rank]],
        "input_tensor_list": [data(10 * rank + j, n, 2, dtype=dtype) for j, n in enumerate(SENDS[rank])],
        **more,
    }


def gather(*shape: int, dtype: str = "float32", **more: Any) -> Callable[[int], Any]:
    tensors = {"output_tensor": filled(*shape, dtype=dtype)}
    return lambda rank: {**tensors, "input_tensor": data(rank, 2, 3, dtype=dtype), **more}


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
