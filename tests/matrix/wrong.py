"""Mistakes: what one rank, another, or all do wrongly, and what ranks disagree about."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from case import SENDS, Arguments, Case, Own, Part, Turned, data, filled, gather, moe, moe_back, reduce, s, v
from right import A, G, S, V

PARAM, TENSOR = "InvalidParamError", "InvalidTensorError"
OVERLAP = PARAM, "output and input overlap in memory, expected separate memory"
LISTS = "output_tensor_list", "input_tensor_list"
BIG = 2**62
GOOD: dict[str, Callable[[int], Arguments]] = {
    V: lambda rank: {"input": data(rank, 6), "send_counts": [2] * 3, "recv_counts": [2] * 3},
    S: s(2, even=True),
    A: lambda rank: {name: [data(j, 1, 2) for j in range(3)] for name in LISTS},
    G: gather(6, 3),
    "exchange_counts": lambda rank: {"send_counts": SENDS[rank]},
    "all_gather": lambda rank: {"input": data(rank, 2, 3), "out": filled(3, 2, 3)},
    "all_reduce": reduce(),
    "reduce_scatter": lambda rank: reduce()(rank) | {"out": filled(2, 2)},
    "reduce": reduce(root=0),
    "broadcast": lambda rank: {"array": data(rank, 4, 2), "root": 1},
    "barrier": lambda rank: {},
    "global_scatter": moe,
    "global_gather": moe_back,
}


def bad(
    function: str,
    what: str,
    error: str,
    text: str,
    needs: tuple[str, ...] = (),
    *,
    code: int | None = None,
    together: bool = False,
    breach: bool = False,
    **mistake: Any,
) -> Case:
    """A case of one wrong argument."""
    about = {"needs": needs, "error": (error, text, code), "together": together, "breach": breach}
    return Case(function, what, GOOD[function], mistake=lambda: mistake, **about)  # type: ignore[arg-type]


def bad_of(package: str, function: str, what: str, error: str, text: str, **mistake: Callable[[Any], Any]) -> Case:
    """A case whose wrong arguments are made by a framework."""

    def made(make: Callable[[Any], Any]) -> Own:
        return Own(lambda: make(importlib.import_module(package)))

    return bad(function, what, error, text, **{name: made(make) for name, make in mistake.items()})


def wrong_counts(function: str, name: str, *, everything: bool = True) -> list[Case]:
    """What is wrong with any counts; torch.distributed takes lists of integers alone."""
    needs = () if everything else ("counts as array",)

    def wrong(what: str, value: Any, shown: str = "", needs: tuple[str, ...] = needs) -> Case:
        text = f"{{{name}}} is {shown or repr(value)}, expected 3 integers, one per rank"
        return bad(function, f"{name}: {what}", PARAM, text, needs, **{name: value})

    return [
        *[bad(function, f"{name}: {what}", PARAM, f"{{{name}}} has {n} entries, expected 3, one per rank",
            **{name: [3] * n})
          for what, n in (("too few", 2), ("too many", 4))],
        wrong("fractions", [2.0] * 3),
        wrong("a bool", [True, 2, 3]),
        wrong("None among them", [2, None, 2]),
        wrong("a number", 2),
        wrong("a text", "222"),
        wrong("a dict, whose keys would be the counts", {2: 1, 1: 2, 3: 0}),
        wrong("an array of fractions", np.ones(3, "float32"), "[1.0, 1.0, 1.0]", ("counts as tensor",)),
        wrong("an array of bools", np.ones(3, bool), "[True, True, True]", ("counts as tensor",)),
        wrong("an array of two dimensions", np.ones((3, 1), int), "[[1], [1], [1]]", ("counts as tensor",)),
        bad(function, f"{name}: beyond 64 bits", PARAM, f"{{{name}}} is {[2**63, 0, 0]}, expected 64-bit integers",
            needs, **{name: [2**63, 0, 0]}),
    ]  # fmt: skip


def wrong_experts(function: str, sorted_by: str) -> list[Case]:
    def wrong(name: str, what: str, value: Any, dtype: str, shape: tuple[int, ...]) -> Case:
        text = f"{name} has dtype {dtype} and shape {shape}, expected integers, 3 cards times the number of experts"
        return bad(function, f"{name}: {what}", PARAM, text, **{name: value})

    return [
        *[case for name in ("local_count", "global_count") for case in (
            wrong(name, "cards", [1] * 5, "int64", (5,)),
            wrong(name, "fractions", [1.0] * 6, "float64", (6,)),
            wrong(name, "none at all", [], "float64", (0,)),
            wrong(name, "two dimensions", [[1] * 6], "int64", (1, 6)),
            wrong(name, "None", None, "object", ()),
            bad(function, f"{name}: lists of several lengths", TENSOR,
                f"{name} is a list, expected values that NumPy converts to an array (...inhomogeneous...)",
                **{name: [[1], [2, 3]]}),
            bad(function, f"{name}: negative", PARAM, f"{name}[5] is -1, expected at least 0",
                **{name: [1] * 5 + [-1]}),
        )],
        bad(function, "lengths", PARAM, "local_count has 9 entries and global_count 6, expected one length",
            local_count=[1] * 9),
        bad(function, "rows of a scalar", TENSOR, "x has shape (), expected at least 1 dimension",
            x=np.array(1, "float32")),
        bad(function, "rows of x", PARAM, f"{sorted_by} sums to 6, expected 7, the rows of x",
            x=data(0, 7, 2), local_count=[1] * 6, global_count=[1] * 6),
    ]  # fmt: skip


def wrong_outputs(function: str, name: str) -> list[Case]:
    right = GOOD[function](0).get(name)
    shape = (6,) if right is None else right.shape
    return [
        bad(function, f"{name}: not contiguous", TENSOR, f"{{{name}}} {{is not contiguous}}",
            ("outputs must be contiguous",),
            **{name: Turned(filled(6, 2))}, **({"input": data(0, 6, 2)} if function == V else {})),
        bad(function, f"{name}: dtypes", TENSOR, f"{{{name}}} has dtype int32, expected float32", code=13,
            **{name: filled(*shape, dtype="int32")}),
    ]  # fmt: skip


def out_of_bounds(name: str, displ: str, sums: str, side: str = "input", **mistake: Any) -> Case:
    return bad(V, f"{name}: {sums}", PARAM,
        f"{displ}[2] + {name}[2] is {sums}, expected at most 6, the elements of the {side}",
               **mistake)  # fmt: skip


MISTAKES = [
    *[case for name in ("send_counts", "recv_counts", "sdispls", "rdispls") for case in wrong_counts(V, name)],
    *wrong_counts(S, "input_split_sizes", everything=False),
    *wrong_counts(S, "output_split_sizes", everything=False),
    *wrong_counts("exchange_counts", "send_counts"),
    out_of_bounds("send_counts", "sdispls", "4 + 3", send_counts=[2, 2, 3]),
    out_of_bounds("send_counts", "sdispls", "5 + 2", sdispls=[0, 2, 5]),
    out_of_bounds("recv_counts", "rdispls", "5 + 2", "output", rdispls=[0, 2, 5], out=filled(6)),
    bad(V, "rows beyond the input", PARAM,
        "sdispls[2] + send_counts[2] is 4 + 3, expected at most 6, the rows of the input",
        input=data(0, 6, 2), send_counts=[2, 2, 3]),
    bad(V, "rows that overlap", PARAM,
        "the receive regions of ranks 0 and 1 overlap: rank 0 writes [0, 2) of the output, rank 1 writes [1, 3)",
        input=data(0, 6, 2), rdispls=[0, 1, 4]),
    bad(V, "rows left behind", PARAM, "send_counts sum to 3, expected 6, the rows of the input: give sdispls to leave "
        "rows out", input=data(0, 6, 2), send_counts=[1] * 3),
    bad(V, "elements left behind", PARAM,
        "send_counts sum to 5, expected 6, the elements of the input: give sdispls to leave elements out",
        send_counts=[2, 1, 2]),
    bad(V, "rows left behind, learnt", PARAM,
        "send_counts sum to 3, expected 4, the rows of the input: give sdispls to leave rows out",
        input=data(0, 4, 2), send_counts=[1] * 3, recv_counts=None),
    bad(V, "negative rows", PARAM, "send_counts[1] is -1, expected at least 0", input=data(0, 6, 2),
        send_counts=[2, -1, 2]),
    bad(V, "negative send_counts", PARAM, "send_counts[1] is -1, expected at least 0", send_counts=[2, -1, 2]),
    bad(V, "negative recv_counts", PARAM, "recv_counts[1] is -1, expected at least 0", recv_counts=[2, -1, 2]),
    bad(V, "negative sdispls", PARAM, "sdispls[1] is -1, expected at least 0", sdispls=[2, -1, 2]),
    bad(V, "negative rdispls", PARAM, "rdispls[1] is -1, expected at least 0", rdispls=[2, -1, 2]),
    bad(V, "beyond the input, learnt", PARAM,
        "sdispls[0] + send_counts[0] is 0 + 99, expected at most 6, the elements of the input",
        send_counts=[99, 0, 0], recv_counts=None),
    bad(V, "sdispls near 2**63", PARAM,
        f"sdispls[2] + send_counts[2] is {2**63 - 1} + 2, expected at most 6, the elements of the input", sdispls=[0,
            2, 2**63 - 1]),
    bad(V, "rdispls near 2**63", PARAM,
        f"rdispls[2] + recv_counts[2] is {2**63 - 1} + 2, expected at most {2**63 - 1}, the largest 64-bit count",
            rdispls=[0, 2, 2**63 - 1]),
    bad(V, "counts that sum to 2**63", PARAM,
        f"the counts {[BIG] * 3} sum to 2**63 or more, expected at most 2**63 - 1",
        send_counts=[BIG] * 3),
    bad(V, "rows beyond 64 bits", PARAM,
        f"counts or displacements are {[BIG] * 3} rows of 2 elements, expected at most 2**63 - 1",
        input=data(0, 6, 2), send_counts=[BIG] * 3),
    bad(V, "receive regions overlap", PARAM,
        "the receive regions of ranks 0 and 1 overlap: rank 0 writes [0, 2) of the output, rank 1 writes [1, 3)",
        rdispls=[0, 1, 4]),
    bad(V, "receive regions overlap out of order", PARAM,
        "the receive regions of ranks 0 and 2 overlap: rank 0 writes [4, 6) of the output, rank 2 writes [3, 5)",
        rdispls=[4, 0, 3]),
    bad(V, "unit", PARAM, "unit is 'rows', expected 'element', 'row' or None", unit="rows"),
    bad(V, "rows of a scalar", TENSOR, "input has shape (), expected at least 1 dimension",
        unit="row", input=np.array(1, "float32")),
    bad(V, "out without recv_counts", PARAM, "out is given but recv_counts is None, expected recv_counts with out",
        out=filled(6), recv_counts=None),
    bad(V, "rdispls without recv_counts", PARAM,
        "rdispls is given but recv_counts is None, expected recv_counts with rdispls", rdispls=[0, 2, 4],
            recv_counts=None),
    *wrong_outputs(V, "out"),
    bad(V, "rows of out", TENSOR, "out has rows of shape (3,), expected (2,), as the input has",
        input=data(0, 6, 2), out=filled(6, 3)),
    bad(V, "overlap", *OVERLAP, input=Part(0, 6), out=Part(3, 9)),
    *wrong_outputs(S, "output"),
    bad(S, "overlap", *OVERLAP, input=Part(0, 6), output=Part(3, 9)),
    bad(S, "the same tensor", *OVERLAP, input=Part(0, 6), output=Part(0, 6)),
    bad(S, "sum of splits", PARAM,
        "{input_split_sizes} is [2, 2, 3], expected entries >= 0 whose sum is 6, dimension 0 of {input}",
        input_split_sizes=[2, 2, 3]),
    bad(S, "negative splits", PARAM,
        "{output_split_sizes} is [4, -1, 3], expected entries >= 0 whose sum is 6, dimension 0 of {output}",
        output_split_sizes=[4, -1, 3]),
    *[bad(S, f"indivisible {name}", PARAM, f"{{{name}}} has 7 rows in dimension 0, which 3 ranks cannot share equally: "
          "give split sizes, or a multiple of the number of ranks", **{name: data(0, 7, 2)}) for name in ("input",
              "output")],
    bad(S, "rows", TENSOR, "{output} has rows of shape (3,), expected (2,), as the input has",
        ("rows of another shape are refused",),
        output=filled(6, 3)),
    bad(S, "an output without rows", TENSOR, "{output} has rows of shape (), expected (2,), as the input has",
        ("rows of another shape are refused",), output=np.array(1, "float32")),
    bad(S, "rows of a scalar", TENSOR, "{input} has shape (), expected at least 1 dimension",
        ("rows of another shape are refused",), input=np.array(1, "float32")),
    bad(A, "overlap", *OVERLAP, input_tensor_list=[Part(0, 1), Part(1, 2), Part(2, 3)],
        output_tensor_list=[Part(2, 3), Part(4, 5), Part(5, 6)]),
    bad(A, "the same tensors", *OVERLAP, **{name: [Part(j, j + 1) for j in range(3)] for name in LISTS}),
    bad(A, "outputs overlap", PARAM, "{output_tensor_list}[0] and {output_tensor_list}[1] overlap in memory",
        output_tensor_list=[Part(3, 4), Part(3, 4), Part(5, 6)]),
    bad(A, "an output not contiguous", TENSOR, "{output_tensor_list}[1] {is not contiguous}",
        ("outputs must be contiguous",),
        output_tensor_list=[filled(1, 2), Turned(filled(6, 2)), filled(1, 2)]),
    *[bad(A, f"too few of {name}", PARAM, f"{{{name}}} has 2 tensors, expected 3, one per rank", **{name: [data(0, 1,
        2)] * 2})
      for name in LISTS],
    *[bad(A, f"no list of {name}", PARAM, f"{{{name}}} is 5, expected 3 tensors, one per rank",
        **{name: 5}) for name in LISTS],
    *[bad(A, f"dtypes of {name}", TENSOR, "Invalid usage of tensors with different dtypes: float32, int32", code=13,
          **{name: [filled(1, 2), filled(1, 2, dtype="int32"), filled(1, 2)]}) for name in LISTS],
    bad(G, "size", TENSOR, "{output_tensor} has 15 elements, expected 3 times the 6 of an input of shape (2, 3)",
        code=9,
        output_tensor=filled(5, 3)),
    *wrong_outputs(G, "output_tensor"),
    bad(G, "overlap", *OVERLAP, output_tensor=Part(0, 9), input_tensor=Part(8, 11)),
    *[bad(function, f"timeout of {value!r}", PARAM, f"timeout is {value!r}, expected seconds above 0, or None",
          ("timeout",), timeout=value) for function in (V, S, A, G) for value in (0, -1.5, float("nan"), "1")],
    bad("exchange_counts", "negative", PARAM, "send_counts[1] is -1, expected at least 0",
        send_counts=[1, -1, 2]),
    *[bad("broadcast", f"from rank {root}", PARAM, f"root is {root}, expected 0 <= root < 3",
        root=root) for root in (3, -1)],
    bad("broadcast", "not contiguous", TENSOR, "{array} {is not contiguous}",
        ("tensors changed in place must be contiguous",),
        array=Turned(filled(4, 2))),
    bad("all_reduce", "avg of integers", PARAM, "op 'avg' is not defined for dtype int64, expected float16, bfloat16, "
        "float32, float64, complex64 or complex128", ("averages of integers are refused",), op="avg",
        input=data(0, 6, 2, dtype="int64")),
    *wrong_experts("global_scatter", "local_count"),
    *wrong_experts("global_gather", "global_count"),
    *[bad(function, "no group", PARAM, "{no group}", ("a Communicator as group",), together=True,
        group=0) for function in GOOD],
    *[Case(function, "a destroyed group", good, needs=("a Communicator as group",), mistake=dict, together=True,
        gone=True,
           error=(PARAM, "the communicator of domain 'gone' has been destroyed; make a new one", None))
      for function, good in GOOD.items()],
]  # fmt: skip


def disagree(function: str, what: str, text: str, needs: tuple[str, ...] = (), **mistake: Any) -> Case:
    """What the last rank alone does otherwise, though it could be right; and what every rank gets."""
    return bad(function, f"ranks disagree about {what}", "PeerMismatchError", text, needs, breach=True, **mistake)


DISAGREEMENTS = [
    disagree(V, "what a peer sends", "rank 1 sends 2 elements to rank 2, which expects 1", recv_counts=[2, 1, 2]),
    disagree(V, "what a peer expects", "rank 2 sends 0 elements to rank 1, which expects 2", send_counts=[2, 0, 4]),
    disagree(V, "dtypes", "rank 0 has dtype float32, rank 2 has dtype int32", input=data(0, 6, dtype="int32")),
    disagree(V, "rows", "rank 0 has elements per row: 1, rank 2 has elements per row: 2", input=data(0, 6, 2)),
    disagree(V, "counts, async", "rank 1 sends 2 elements to rank 2, which expects 1", recv_counts=[2, 1, 2],
        async_op=True),
    disagree(S, "splits", "rank 2 sends 3 rows to rank 0, which expects 2", input_split_sizes=[3, 2, 1]),
    disagree(S, "dtypes", "rank 0 has dtype float32, rank 2 has dtype int32",
             **{name: data(0, 6, 2, dtype="int32") for name in ("input", "output")}),
    *[Case(function, f"ranks disagree about rows without elements: {name}", rows, breach=True,
           mistake=lambda name=name, counts=counts: {name: counts}, error=("PeerMismatchError", text, None))
      for function, rows, name, counts, text in (
          (V, v(0), "send_counts", [1, 1, 4], "rank 2 sends 1 rows to rank 0, which expects 2"),
          (V, v(0), "recv_counts", [0, 1, 4], "rank 1 sends 2 rows to rank 2, which expects 1"),
          (S, s(0), "input_split_sizes", [1, 1, 4], "rank 2 sends 1 rows to rank 0, which expects 2"),
      )],
    disagree(A, "sizes", "rank 2 sends 4 elements to rank 0, which expects 2",
             input_tensor_list=[data(0, 2, 2), data(0, 1, 2), data(0, 1, 2)]),
    disagree(G, "sizes", "rank 2 sends 3 elements to rank 0, which expects 6", input_tensor=data(0, 1, 3),
        output_tensor=filled(3, 3)),
    disagree("all_gather", "dtypes", "rank 0 has dtype float32, rank 2 has dtype float64",
             input=data(0, 2, 3, dtype="float64"), out=filled(3, 2, 3, dtype="float64")),
    disagree("broadcast", "roots", "rank 0 has root 1, rank 2 has root 0", root=0),
    disagree("broadcast", "sizes", "rank 1 sends 8 elements to rank 2, which expects 10", array=data(0, 5, 2)),
    disagree("all_reduce", "operations", "rank 0 reduces with sum, rank 2 reduces with max", op="max"),
    disagree("all_reduce", "sizes", "rank 0 has elements: 12, rank 2 has elements: 10", input=data(0, 5, 2)),
    disagree("all_reduce", "sizes, async", "rank 0 has elements: 12, rank 2 has elements: 10", input=data(0, 5, 2),
        async_op=True),
    disagree("all_reduce", "dtypes", "rank 0 has dtype float32, rank 2 has dtype int32", input=data(0, 6, 2,
        dtype="int32")),
    *[disagree(function, "shapes", "rank 0 has shape (6, 2), rank 2 has shape (3, 4)", input=data(0, 3, 4), **more)
      for function, more in (("all_reduce", {}), ("reduce", {}), ("reduce_scatter", {"out": filled(1, 4)}))],
    disagree("all_reduce", "shapes, async", "rank 0 has shape (6, 2), rank 2 has shape (12,)", input=data(0, 12),
        async_op=True),
    disagree("reduce_scatter", "sizes", "rank 0 has elements: 12, rank 2 has elements: 6", input=data(0, 3, 2),
        out=filled(1, 2)),
    disagree("global_scatter", "one expert", "rank 2 sends 3 rows to expert 0 of rank 0, which expects 2",
             local_count=[3, 0, 0, 0, 3, 0]),
    disagree("global_gather", "one expert", "rank 0 sends 1 rows to expert 0 of rank 2, which expects 2",
             global_count=[2, 0, 2, 1, 3, 0]),
]  # fmt: skip
