"""The column of `alltoallv.numpy`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from case import Case, Own, Part, Turned, data, filled, reduce
from column import Column
from right import A, G, S, V
from wrong import LISTS, OVERLAP, PARAM, TENSOR, bad, wrong_counts

from alltoallv import _core
from alltoallv.testing import reference


class NoArray:
    def __array__(self, *args: Any, **keywords: Any) -> Any:
        raise TypeError("cannot be converted")


def read_only() -> Any:
    array = filled(6, 2)
    array.flags.writeable = False
    return array


#: What no array of a known dtype can be made of: by name, the value, and the error's text.
ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "objects": (lambda: np.zeros((6, 2), object),
        "dtype is object, expected one whose elements have 1 to 65535 bytes and hold no references"),
    "large elements": (lambda: np.zeros((6, 2), "V65536"),
        "dtype is |V65536, expected one whose elements have 1 to 65535 bytes and hold no references"),
    "lists of several lengths": (lambda: [[1], [2, 3]],
        "{name} is a list, expected values that NumPy converts to an array (...inhomogeneous...)"),
    "no array": (NoArray, "{name} is a NoArray, expected values that NumPy converts to an array (cannot be converted)"),
}  # fmt: skip


RECORDS = np.dtype([("a", "i4"), ("b", ">f4")])  # they only move


def only(
    function: str, what: str, error: str, text: str, code: int | None = None, **mistake: Callable[[], Any]
) -> Case:
    """A case whose wrong arguments are arrays that other frameworks do not have."""
    return bad(function, what, error, text, code=code, **{name: Own(make) for name, make in mistake.items()})


def odd(function: str, name: str, kinds: Iterable[str] = ODD) -> list[Case]:
    return [
        only(function, f"{name} of {kind}", TENSOR, ODD[kind][1].format(name=name), **{name: ODD[kind][0]})
        for kind in kinds
    ]


def outputs(function: str, name: str) -> list[Case]:
    return [
        only(function, f"{name} is a list", TENSOR, f"{name} is a list, expected a NumPy array", 5,
            **{name: lambda: [0.0] * 12}),
        only(function, f"{name} is read-only", TENSOR, f"{name} is not contiguous and writable, expected both",
            **{name: read_only}),
    ]  # fmt: skip


def reductions(function: str) -> list[Case]:
    floats = "expected bool, an integer, float16, bfloat16, float32 or float64"
    ops = f"expected {', '.join(_core.reduce_ops[:-1])} or {_core.reduce_ops[-1]}"
    return [
        *odd(function, "input"),
        *outputs(function, "out"),
        only(function, "records", PARAM, f"op 'sum' is not defined for dtype {RECORDS}, expected bool, an integer, ...",
            input=lambda: np.zeros((6, 2), RECORDS)),
        bad(function, "op", PARAM, f"op is 'mean', {ops}", op="mean"),
        bad(function, "bits of fractions", PARAM, "op 'band' is not defined for dtype float32, expected ...",
            op="band"),
        bad(function, "float8", PARAM, "op 'sum' is not defined for dtype float8_e4m3fn, expected ...",
            input=data(0, 6, 2, dtype="float8_e4m3fn")),
        bad(function, "no op", PARAM, f"op is None, {ops}", op=None),
        bad(function, "complex", PARAM, f"op 'max' is not defined for dtype complex128, {floats}", op="max",
            input=np.ones((6, 2), complex)),
        bad(function, "out: not contiguous", TENSOR, "out {is not contiguous}", out=Turned(filled(6, 2))),
        bad(function, "out: dtypes", TENSOR, "out has dtype int32, expected float32", code=13, out=filled(6, 2,
            dtype="int32")),
    ]  # fmt: skip


def turned(cases: list[Case], function: str, arguments: Callable[[int], dict[str, Any]] | None = None) -> list[Case]:
    """The same mistakes in another function."""
    return [replace(case, function=function, arguments=arguments or case.arguments) for case in cases]


def scanned(all_: list[Any]) -> list[Any]:
    return reference.scan([a["input"] for a in all_], all_[0]["op"], all_[0].get("exclusive", False))


def stacked(all_: list[Any]) -> list[Any]:
    return [np.concatenate([a["input"] for a in all_])] * 3


class NumpyColumn(Column):
    name, module, package = "numpy", "alltoallv.numpy", "numpy"
    lacks = {"gradients": "NumPy has none"}
    not_contiguous = "is not contiguous and writable, expected both"
    cases = [
        *odd(V, "input"),
        *outputs(V, "out"),
        *odd(S, "input", ("lists of several lengths", "no array")),
        *outputs(S, "output"),
        *[only(S, f"both of {kind}", TENSOR, ODD[kind][1], 13, input=ODD[kind][0], output=ODD[kind][0])
          for kind in ("objects", "large elements")],
        only(A, "an input of lists of several lengths", TENSOR, ODD["lists of several lengths"][1].format(
            name="input_tensor_list[1]"), input_tensor_list=lambda: [data(0, 1, 2), [[1], [2, 3]], data(0, 1, 2)]),
        only(A, "an output is a list", TENSOR, "output_tensor_list[2] is a list, expected a NumPy array", 5,
            output_tensor_list=lambda: [filled(1, 2), filled(1, 2), [0.0]]),
        only(A, "an output is read-only", TENSOR, "output_tensor_list[1] is not contiguous and writable, expected both",
            output_tensor_list=lambda: [filled(1, 2), read_only(), filled(1, 2)]),
        only(A, "objects", TENSOR, ODD["objects"][1], 13,
            **{name: lambda: [np.zeros((1, 2), object) for _ in range(3)] for name in LISTS}),
        *odd(G, "input_tensor", ("lists of several lengths", "no array")),
        *outputs(G, "output_tensor"),
        only(G, "no output", TENSOR, "output_tensor is a NoneType, expected a NumPy array", 5,
            output_tensor=lambda: None),
        *odd("all_gather", "input"),
        *outputs("all_gather", "out"),
        bad("all_gather", "out: not contiguous", TENSOR, "out {is not contiguous}", out=Turned(filled(6, 2))),
        bad("all_gather", "out: dtypes", TENSOR, "out has dtype int32, expected float32", code=13, out=filled(6, 2,
            dtype="int32")),
        bad("all_gather", "size", TENSOR, "out has 34 elements, expected 3 times the 6 ...", code=9, out=filled(17, 2)),
        bad("all_gather", "overlap", *OVERLAP, out=Part(0, 9), input=Part(8, 11)),
        *[bad("broadcast", f"from rank {root!r}", PARAM, f"root is {root!r}, expected 0 <= root < 3", root=root)
          for root in (0.5, "0", None)],
        *outputs("broadcast", "array"),
        only("broadcast", "objects", TENSOR, ODD["objects"][1], 13, array=ODD["objects"][0]),
        *[bad(function, f"timeout of {value!r}", PARAM, f"timeout is {value!r}, expected seconds above 0, or None",
            timeout=value)
          for function in ("barrier", "all_reduce", "reduce_scatter") for value in (0, -1.5, float("nan"), "1")],
        *reductions("all_reduce"),
        *reductions("reduce_scatter"),
        *turned(reductions("all_reduce"), "scan"),
        *[Case("scan", f"{op}{', exclusive' * exclusive}", reduce(op=op, exclusive=exclusive), scanned)
            for op in ("sum", "prod", "max", "avg") for exclusive in (False, True)],
        *[Case("scan", f"{op} of {dtype}", reduce(dtype, op=op), scanned)
            for op, dtype in (("bxor", "int64"), ("sum", "float16"), ("sum", "bool"), ("sum", "complex64"))],
        *turned([bad("all_reduce", "ranks disagree about the operation", "PeerMismatchError",
            "rank 0 reduces with sum, rank 2 reduces with max", breach=True, op="max")], "scan"),
        Case("all_gather_v", "learnt", lambda rank: {"input": data(rank, rank, 2)}, stacked),
        Case("all_gather_v", "counts", lambda rank: {"input": data(rank, rank + 1), "recv_counts": [1, 2, 3]}, stacked),
        Case("all_gather_v", "into an array", lambda rank: {
            "input": data(rank, rank + 1, 2), "recv_counts": [1, 2, 3], "out": filled(6, 2)}, stacked),
        Case("all_gather_v", "async", lambda rank: {"input": data(rank, rank, 2), "async_op": True}, stacked),
        *turned([*odd("all_gather", "input"), *wrong_counts("all_gather", "recv_counts"),
            bad("all_gather", "a scalar", TENSOR, "input has shape (), expected at least 1 dimension",
                input=np.array(1, "float32"))],
            "all_gather_v", lambda rank: {"input": data(rank, 2, 3), "recv_counts": [2] * 3}),
        bad("all_reduce", "size of out", TENSOR, "out has 10 elements, expected 12", code=9, out=filled(5, 2)),
        bad("all_reduce", "overlap", PARAM,
            "out and input overlap in memory without being the same, expected one or the other", input=Part(0, 6),
                out=Part(1, 7)),
        *wrong_counts("reduce_scatter", "recv_counts"),
        bad("reduce_scatter", "sum of counts", PARAM,
            "recv_counts is [2, 2, 3], expected entries >= 0 whose sum is 6, dimension 0 of input", recv_counts=[2, 2,
                3]),
        bad("reduce_scatter", "indivisible", PARAM,
            "input has 7 rows in dimension 0, which 3 ranks cannot share equally: "
            "give split sizes, or a multiple of the number of ranks", input=data(0, 7, 2)),
        bad("reduce_scatter", "rows of a scalar", TENSOR,
            "input has shape (), expected at least 1 dimension", input=np.array(1, "float32")),
        bad("reduce_scatter", "shape of out", TENSOR, "out has shape (4, 2), expected (2, 2)", out=filled(4, 2)),
        bad("reduce_scatter", "overlap", PARAM, "output and input overlap in memory, expected separate memory",
            input=Part(0, 6), out=Part(0, 2)),
        *odd("global_scatter", "x"),
        *odd("global_gather", "x"),
        bad("all_reduce", "ranks disagree about reduced dtypes", "PeerMismatchError",
            "rank 0 has dtype float32, rank 2 has dtype int8", breach=True, input=data(0, 6, 2, dtype="int8")),
    ]  # fmt: skip
