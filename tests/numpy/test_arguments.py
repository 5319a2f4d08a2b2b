"""Every bad argument of every function: the right class, a sentence that says what was wrong, and peers that know.

One rank calls with a bad argument, the others call rightly. The one must get the error, its peers the same class and
code and the same sentence with the rank's number before it; the next operator must then work on all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import AllToAllVError, InvalidParamError, InvalidTensorError, PeerMismatchError

Launch = Callable[..., list[Any]]
SIZE = 3
PARAM, TENSOR = InvalidParamError, InvalidTensorError


def x(rows: int = 6, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(rows * 2).reshape(rows, 2).astype(dtype)


def strided() -> np.ndarray[Any, Any]:
    return np.zeros((12, 4), np.float32)[::2, ::2]


def read_only(rows: int = 6) -> np.ndarray[Any, Any]:
    array = x(rows)
    array.flags.writeable = False
    return array


class NoArray:
    def __array__(self, *args: Any, **keywords: Any) -> Any:
        raise TypeError("cannot be converted")


#: Arguments that are right, by function.
GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "all_to_all_v": lambda: {
        "input": x(), "send_counts": [4, 4, 4], "recv_counts": [4, 4, 4], "sdispls": [0, 4, 8], "rdispls": [0, 4, 8],
        "unit": "element",
    },
    "exchange_counts": lambda: {"send_counts": [1, 2, 3]},
    "all_to_all_single": lambda: {"output": x(), "input": x()},
    "all_to_all": lambda: {
        "output_tensor_list": [x(1), x(1), x(1)], "input_tensor_list": [x(1), x(1), x(1)],
    },
    "all_gather_into_tensor": lambda: {"output_tensor": x(), "input_tensor": x(2)},
    "all_gather": lambda: {"input": x()},
    "broadcast": lambda: {"array": x(), "root": 1},
    "barrier": lambda: {},
    "all_reduce": lambda: {"input": x()},
    "reduce_scatter": lambda: {"input": x(), "recv_counts": [3, 2, 1]},
    "global_scatter": lambda: {"x": x(), "local_count": [1] * 6, "global_count": [1] * 6},
    "global_gather": lambda: {"x": x(), "local_count": [1] * 6, "global_count": [1] * 6},
}  # fmt: skip


@dataclass(frozen=True)
class Bad:
    """``changes`` makes the arguments of ``function`` wrong; the error's text must match ``text``."""

    function: str
    changes: Callable[[], dict[str, Any]]
    error: type[AllToAllVError]
    text: str
    code: int | None = None

    def __str__(self) -> str:
        return f"{self.function}: {self.text}"


def overlapping(function: str, output: str, input: str) -> Bad:
    def changes() -> dict[str, Any]:
        memory = np.zeros(40, np.float32)
        rows = {"all_gather_into_tensor": 2, "all_gather": 2}.get(function, 6)
        return {output: memory[:12].reshape(6, 2), input: memory[7 : 7 + 2 * rows].reshape(rows, 2)}

    return Bad(function, changes, PARAM, r"^output and input overlap in memory, expected separate memory$")


def same_lists() -> dict[str, Any]:
    arrays = [x(1), x(1), x(1)]
    return {"output_tensor_list": arrays, "input_tensor_list": arrays}


def counts_table(function: str, name: str, also: dict[str, Any] | None = None) -> list[Bad]:
    """What is wrong with any list of counts, whatever they count."""
    also = also or {}
    return [
        Bad(function, lambda: {name: [2, 2], **also}, PARAM, rf"^{name} has 2 entries, expected 3, one per rank$"),
        Bad(function, lambda: {name: [2, 2, 1, 1], **also}, PARAM, rf"^{name} has 4 entries, expected 3"),
        Bad(function, lambda: {name: 2, **also}, PARAM, rf"^{name} is 2, expected 3 integers, one per rank$"),
        Bad(function, lambda: {name: "222", **also}, PARAM, rf"^{name} is '222', expected 3 integers"),
        Bad(function, lambda: {name: [2.0, 2.0, 2.0], **also}, PARAM, rf"^{name} is \[2.0, 2.0, 2.0\], expected 3 int"),
        Bad(function, lambda: {name: np.ones(3), **also}, PARAM, rf"^{name} is \[1.0, 1.0, 1.0\], expected 3 integers"),
        Bad(function, lambda: {name: np.ones((3, 1), int), **also}, PARAM, rf"^{name} is \[\[1\], .*expected 3 integ"),
        Bad(function, lambda: {name: [True, 2, 2], **also}, PARAM, rf"^{name} is \[True, 2, 2\], expected 3 integers"),
        Bad(function, lambda: {name: [2, None, 2], **also}, PARAM, rf"^{name} is \[2, None, 2\], expected 3 integers"),
        Bad(function, lambda: {name: [2**63, 0, 0], **also}, PARAM, rf"^{name} is \[9223.*\], expected 64-bit intege"),
        Bad(function, lambda: {name: [2, -1, 2], **also}, PARAM, rf"^{name}.* is (-1|\[2, -1, 2\]), expected .*0"),
    ]  # fmt: skip


def timeouts(function: str) -> list[Bad]:
    return [
        Bad(function, lambda value=value: {"timeout": value}, PARAM, rf"^timeout is {re.escape(repr(value))}, expecte")
        for value in (0, -1.5, float("nan"), "1")
    ]  # fmt: skip


def dtypes(function: str, name: str) -> list[Bad]:
    def bad(dtype: Any, text: str) -> Bad:
        return Bad(function, lambda: {name: np.zeros((6, 2), dtype)}, TENSOR, text, 13)

    return [
        bad(object, r"^dtype is object, expected one of bool, int8, "),
        bad("S3", r"^dtype is bytes24, expected one of"),
        bad("M8[s]", r"^dtype is datetime64\[s\], expected one of"),
        bad([("a", "i4"), ("b", "f4")], r"^dtype is void64, expected one of"),
        bad(np.longdouble, r"^dtype is (float128|longdouble), expected one of"),
        bad(ml_dtypes.int4, r"^dtype is int4, expected one of"),
        bad(">f4", r"^dtype is >f4, expected this machine's byte order$"),
        Bad(function, lambda: {name: [[1, 2], [3]]}, TENSOR, rf"^{name} is a list that is no array \(.*inhomogeneous"),
        Bad(function, lambda: {name: NoArray()}, TENSOR, rf"^{name} is a NoArray that is no array \(cannot be conv"),
    ]


def outputs(function: str, name: str, code: int | None = None) -> list[Bad]:
    """What is wrong with any output; right is float32 and, where the shape counts, 6 rows of 2."""
    return [
        Bad(function, lambda: {name: [1.0] * 12}, TENSOR, rf"^{name} is a list, expected a NumPy array$", 5),
        Bad(function, lambda: {name: strided()}, TENSOR, rf"^{name} is not contiguous and writable, expected both$"),
        Bad(function, lambda: {name: read_only()}, TENSOR, rf"^{name} is not contiguous and writable, expected both$"),
        Bad(function, lambda: {name: x(dtype=np.int32)}, TENSOR, rf"^{name} has dtype int32, expected float32$", 13),
    ]  # fmt: skip


V = "all_to_all_v"
BAD = [
    # --- all_to_all_v
    *counts_table(V, "send_counts"),
    *counts_table(V, "recv_counts"),
    *counts_table(V, "sdispls"),
    *counts_table(V, "rdispls"),
    *dtypes(V, "input"),
    *timeouts(V),
    *outputs(V, "out"),
    Bad(V, lambda: {"unit": "rows"}, PARAM, r"^unit is 'rows', expected 'element', 'row' or None$"),
    Bad(V, lambda: {"input": np.float32(1), "unit": "row"}, TENSOR, r"^a 0-dimensional input has no rows, expected"),
    Bad(V, lambda: {"send_counts": [4, 4, 5]}, PARAM, r"^sdispls\[2\] \+ send_counts\[2\] is 8 \+ 5, expected at mos"),
    Bad(V, lambda: {"sdispls": [0, 4, 9]}, PARAM, r"^sdispls\[2\] \+ send_counts\[2\] is 9 \+ 4, expected at most 12"),
    Bad(V, lambda: {"sdispls": [0, 4, 2**63 - 1]}, PARAM, r"^sdispls\[2\] \+ send_counts\[2\] is 9223.* expected at "),
    Bad(V, lambda: {"rdispls": [0, 3, 8]}, PARAM, r"^the receive regions of ranks 0 and 1 overlap: rank 0 writes \[0"),
    Bad(V, lambda: {"rdispls": [8, 0, 7]}, PARAM, r"^the receive regions of ranks 0 and 2 overlap"),
    Bad(V, lambda: {"out": x(5)}, PARAM, r"^rdispls\[2\] \+ recv_counts\[2\] is 8 \+ 4, expected at most 10, the ele"),
    Bad(V, lambda: {"rdispls": [0, 4, 2**63 - 1]}, PARAM, r"^rdispls\[2\] \+ recv_counts\[2\] is 9223.* expected at "),
    Bad(V, lambda: {"recv_counts": None}, PARAM, r"^rdispls is given but recv_counts is None, expected recv_counts w"),
    Bad(V, lambda: {"recv_counts": None, "rdispls": None, "out": x()}, PARAM, r"^out is given but recv_counts is None"),
    Bad(V, lambda: {"recv_counts": None, "rdispls": None, "send_counts": [99, 0, 0]}, PARAM, r"^sdispls\[0\] \+ send"),
    Bad(V, lambda: {"send_counts": [2**62] * 3, "sdispls": None}, PARAM, r"^the counts \[46.*\] sum to 2\*\*63 or mo"),
    Bad(V, lambda: {"send_counts": [2**62] * 3, "unit": "row"}, PARAM, r"^counts or displacements are \[46.*\] rows "),
    Bad(V, lambda: {"unit": "row", "out": np.zeros((12, 3), np.float32), "send_counts": [0] * 3, "sdispls": None},
        TENSOR, r"^out has rows of shape \(3,\), expected \(2,\), those of the input$"),
    overlapping(V, "out", "input"),
    # --- exchange_counts
    *counts_table("exchange_counts", "send_counts"),
    # --- all_to_all_single
    *counts_table("all_to_all_single", "input_split_sizes"),
    *counts_table("all_to_all_single", "output_split_sizes"),
    *dtypes("all_to_all_single", "input")[-2:],
    *outputs("all_to_all_single", "output"),
    *[Bad("all_to_all_single", lambda d=d: {"input": x(dtype=d), "output": x(dtype=d)}, TENSOR, text, 13)
      for d, text in ((object, r"^dtype is object"), (">f4", r"^dtype is >f4"))],
    Bad("all_to_all_single", lambda: {"input_split_sizes": [2, 2, 3]}, PARAM,
        r"^input_split_sizes is \[2, 2, 3\], expected entries >= 0 whose sum is 6, dimension 0 of input$"),
    Bad("all_to_all_single", lambda: {"output_split_sizes": [2, 2, 1]}, PARAM,
        r"^output_split_sizes is \[2, 2, 1\], expected entries >= 0 whose sum is 6, dimension 0 of output$"),
    Bad("all_to_all_single", lambda: {"input": x(7)}, PARAM, r"^input has 7 rows in dimension 0, which 3 ranks canno"),
    Bad("all_to_all_single", lambda: {"output": x(5)}, PARAM, r"^output has 5 rows in dimension 0, which 3 ranks can"),
    Bad("all_to_all_single", lambda: {"output": np.zeros((6, 3), np.float32)}, TENSOR,
        r"^output has rows of shape \(3,\), expected \(2,\) as the input$"),
    Bad("all_to_all_single", lambda: {"output": np.zeros((), np.float32)}, TENSOR, r"^output has rows of shape \(\),"),
    Bad("all_to_all_single", lambda: {"input": np.float32(1)}, TENSOR, r"^a 0-dimensional input has no rows"),
    overlapping("all_to_all_single", "output", "input"),
    # --- all_to_all
    *[bad for name in ("input_tensor_list", "output_tensor_list") for bad in (
        Bad("all_to_all", lambda name=name: {name: [x(1)] * 2}, PARAM, rf"^{name} has 2 tensors, expected 3, one per "),
        Bad("all_to_all", lambda name=name: {name: None}, PARAM, rf"^{name} is None, expected 3 tensors, one per"),
        Bad("all_to_all", lambda name=name: {name: 5}, PARAM, rf"^{name} is 5, expected 3 tensors"),
    )],
    Bad("all_to_all", lambda: {"input_tensor_list": [x(1), [[1], [2, 3]], x(1)]}, TENSOR,
        r"^input_tensor_list\[1\] is a list that is no array \("),
    Bad("all_to_all", lambda: {"output_tensor_list": [x(1), x(1), [0.0]]}, TENSOR,
        r"^output_tensor_list\[2\] is a list, expected a NumPy array$", 5),
    Bad("all_to_all", lambda: {"output_tensor_list": [strided(), x(1), x(1)]}, TENSOR,
        r"^output_tensor_list\[0\] is not contiguous and writable, expected both$"),
    Bad("all_to_all", lambda: {"output_tensor_list": [x(1), read_only(1), x(1)]}, TENSOR,
        r"^output_tensor_list\[1\] is not contiguous and writable, expected both$"),
    Bad("all_to_all", lambda: {"output_tensor_list": [x(1), x(1), x(1, np.int8)]}, TENSOR,
        r"^Invalid usage of tensors with different dtypes: float32, int8$", 13),
    Bad("all_to_all", lambda: {"input_tensor_list": [x(1), x(1, np.int8), x(1)]}, TENSOR,
        r"^Invalid usage of tensors with different dtypes: float32, int8$", 13),
    Bad("all_to_all", lambda: {"input_tensor_list": [x(1, object)] * 3,
                               "output_tensor_list": [x(1, object) for _ in range(3)]}, TENSOR, r"^dtype is obje", 13),
    Bad("all_to_all", lambda: {"output_tensor_list": [x(1)] * 3}, PARAM, r"^output_tensor_list\[\d\] and .* overlap "),
    Bad("all_to_all", same_lists, PARAM, r"^output and input overlap in memory, expected separate memory$"),
    # --- gathers
    *outputs("all_gather_into_tensor", "output_tensor"),
    *dtypes("all_gather_into_tensor", "input_tensor")[-2:],
    Bad("all_gather_into_tensor", lambda: {"output_tensor": x(5)}, TENSOR,
        r"^output_tensor has 10 elements, expected 3 times the 4 of an input of shape \(2, 2\)$", 9),
    overlapping("all_gather_into_tensor", "output_tensor", "input_tensor"),
    *dtypes("all_gather", "input"),
    *outputs("all_gather", "out"),
    Bad("all_gather", lambda: {"out": x(17)}, TENSOR, r"^out has 34 elements, expected 36$", 9),
    overlapping("all_gather", "out", "input"),
    # --- broadcast, barrier
    *[Bad("broadcast", lambda root=root: {"root": root}, PARAM, rf"^root is {re.escape(repr(root))}, expected 0 <= ro")
      for root in (3, -1, 0.5, "0", None)],
    *outputs("broadcast", "array")[:3],
    Bad("broadcast", lambda: {"array": x(dtype=object)}, TENSOR, r"^dtype is object, expected one of", 13),
    *timeouts("barrier"),
    # --- reductions
    *[bad for function in ("all_reduce", "reduce_scatter") for bad in (
        *dtypes(function, "input"),
        *timeouts(function),
        *outputs(function, "out"),
        Bad(function, lambda: {"op": "mean"}, PARAM, r"^op is 'mean', expected sum, avg, min, max or prod$"),
        Bad(function, lambda: {"op": None}, PARAM, r"^op is None, expected sum, avg, min, max or prod$"),
        Bad(function, lambda: {"input": x(dtype=int), "op": "avg"}, PARAM, r"^op 'avg' is not defined for dtype int6"),
        Bad(function, lambda: {"input": x(dtype=complex)}, PARAM, r"^op 'sum' is not defined for dtype complex128, e"),
    )],
    Bad("all_reduce", lambda: {"out": x(5)}, TENSOR, r"^out has 10 elements, expected 12$", 9),
    Bad("all_reduce", lambda: (lambda a: {"input": a[:6], "out": a[1:]})(x(7)), PARAM,
        r"^out and input overlap in memory without being the same, expected one or the other$"),
    *counts_table("reduce_scatter", "recv_counts"),
    Bad("reduce_scatter", lambda: {"recv_counts": [2, 2, 3]}, PARAM,
        r"^recv_counts is \[2, 2, 3\], expected entries >= 0 whose sum is 6, dimension 0 of input$"),
    Bad("reduce_scatter", lambda: {"recv_counts": None, "input": x(7)}, PARAM, r"^input has 7 rows in dimension 0, w"),
    Bad("reduce_scatter", lambda: {"input": np.float32(1)}, TENSOR, r"^a 0-dimensional input has no rows, expected"),
    Bad("reduce_scatter", lambda: {"out": x(4)}, TENSOR, r"^out has shape \(4, 2\), expected \([123], 2\)$"),
    Bad("reduce_scatter", lambda: (lambda a: {"input": a, "out": a[:2], "recv_counts": [2, 2, 2]})(x()), PARAM,
        r"^out and input overlap in memory, expected separate memory$"),
    # --- mixture of experts
    *[bad for function in ("global_scatter", "global_gather") for bad in (
        *dtypes(function, "x"),
        *[b for name in ("local_count", "global_count") for b in (
            Bad(function, lambda name=name: {name: [1] * 5}, PARAM,
                rf"^{name} has dtype int64 and shape \(5,\), expected integers, 3 cards times the number of experts$"),
            Bad(function, lambda name=name: {name: [1.0] * 6}, PARAM, rf"^{name} has dtype float64 and shape \(6,\),"),
            Bad(function, lambda name=name: {name: []}, PARAM, rf"^{name} has dtype float64 and shape \(0,\), expect"),
            Bad(function, lambda name=name: {name: [[1] * 6]}, PARAM, rf"^{name} has dtype int64 and shape \(1, 6\),"),
            Bad(function, lambda name=name: {name: None}, PARAM, rf"^{name} has dtype object and shape \(\), expecte"),
            Bad(function, lambda name=name: {name: [[1], [2, 3]]}, TENSOR, rf"^{name} is a list that is no array"),
            Bad(function, lambda name=name: {name: [1, 1, 1, 1, 1, -1]}, PARAM, rf"^{name} is \[1, .*, -1\], expecte"),
            Bad(function, lambda name=name: {name: [1] * 9}, PARAM, r"^local_count has \d entries and global_count "),
        )],
        Bad(function, lambda: {"x": np.float32(1)}, TENSOR, r"^a 0-dimensional input has no rows"),
        Bad(function, lambda: {"x": x(7)}, PARAM, r"^(local|global)_count sums to 6, expected 7, the rows of x$"),
    )],
]  # fmt: skip


def call(communicator: Communicator, function: str, changes: dict[str, Any]) -> None:
    getattr(av, function)(**{**GOOD[function](), **changes}, group=communicator)


Found = tuple[str, int, str]  # class, code and text of an error


def outcome(communicator: Communicator, bad: Bad, culprits: list[int]) -> Found:
    """What the call raises here. Afterwards everything must work."""
    changes = bad.changes() if communicator.rank in culprits else {}
    found = ("nothing", 0, "")
    try:
        call(communicator, bad.function, changes)
    except Exception as error:
        found = (type(error).__name__, getattr(error, "code", -1), str(error))
    ranks = av.all_gather(np.array(communicator.rank), group=communicator)
    assert ranks.tolist() == list(range(communicator.size)), f"after {bad}"
    return found


def outcomes(communicator: Communicator, function: str, culprits: list[int]) -> list[Found]:
    return [outcome(communicator, bad, culprits) for bad in BAD if bad.function == function]


def problem_at_culprit(bad: Bad, found: Found) -> str:
    name, code, text = found
    if name != bad.error.__name__ or not re.search(bad.text, text):
        return f"raised {name}: {text}"
    wanted = bad.error.code if bad.code is None else bad.code
    return f"code {code}, expected {wanted}: {text}" if code != wanted else ""


def problem_at_peer(bad: Bad, found: Found, cause: Found, culprit: int) -> str:
    name, code, text = found
    head = rf"operator #\d+ {bad.function} of domain '.*' failed on rank {culprit}: "
    known = (name, code) == cause[:2] and re.match(head, text) and text.endswith(cause[2])
    return "" if known else f"a peer raised {name} ({code}): {text}"


@pytest.mark.parametrize("culprits", [[2], [0], [0, 1, 2]], ids=["last", "first", "all"])
@pytest.mark.parametrize("function", GOOD)
def test_bad_arguments(launch: Launch, function: str, culprits: list[int]) -> None:
    table = [bad for bad in BAD if bad.function == function]
    assert table
    problems = []
    for bad, found in zip(table, zip(*launch(SIZE, outcomes, function, culprits), strict=True), strict=True):
        for rank in range(SIZE):
            if rank in culprits:
                problem = problem_at_culprit(bad, found[rank])
            else:
                problem = problem_at_peer(bad, found[rank], found[culprits[0]], culprits[0])
            if problem:
                problems.append(f"{bad} on rank {rank}: {problem}")
    assert not problems, "\n".join(problems)


#: What rank 2 alone does otherwise, though it could be right; and what every rank is told.
DISAGREEMENTS: list[tuple[str, Callable[[], dict[str, Any]], str]] = [
    (V, lambda: {"recv_counts": [4, 3, 4]}, "rank 1 sends 4 elements to rank 2, which expects 3$"),
    (V, lambda: {"send_counts": [4, 4, 0]}, "rank 2 sends 0 elements to rank 2, which expects 4$"),
    (V, lambda: {"input": x(dtype=np.int32)}, "rank 0 has dtype float32, rank 2 has dtype int32$"),
    (V, lambda: {"unit": "row", "input": x(12)}, "rank 0 has elements per row: 1, rank 2 has elements per row: 2$"),
    (V, lambda: {"unit": "row", "input": np.zeros((12, 0), "f")}, "0 calls all_to_all_v, rank 2 calls exchange_co"),
    ("all_to_all_single", lambda: {"input": x(9)}, "rank 2 sends 3 rows to rank 0, which expects 2$"),
    ("all_to_all_single", lambda: {"input_split_sizes": [2, 1, 3]}, "rank 2 sends 1 rows to rank 1, which expects 2$"),
    ("all_to_all", lambda: {"output_tensor_list": [x(1), x(2), x(1)]}, "1 sends 2 elements to rank 2, .* expects 4$"),
    ("all_gather", lambda: {"input": x(5)}, "rank 2 sends 10 elements to rank 0, which expects 12$"),
    ("all_gather", lambda: {"input": x(dtype="f8")}, "rank 0 has dtype float32, rank 2 has dtype float64$"),
    ("all_gather_into_tensor", lambda: {"input_tensor": x(1), "output_tensor": x(3)}, "2 sends 2 .*rank 0, which.* 4$"),
    ("broadcast", lambda: {"root": 0}, "rank 0 has root 1, rank 2 has root 0$"),
    ("broadcast", lambda: {"array": x(5)}, "rank 1 sends 12 elements to rank 2, which expects 10$"),
    ("all_reduce", lambda: {"op": "max"}, "rank 0 reduces with sum, rank 2 reduces with max$"),
    ("all_reduce", lambda: {"input": x(5)}, "rank 0 has elements: 12, rank 2 has elements: 10$"),
    ("all_reduce", lambda: {"input": x(dtype=np.int8)}, "rank 0 has dtype float32, rank 2 has dtype int8$"),
    ("reduce_scatter", lambda: {"recv_counts": [3, 1, 2]}, "rank 2 sends 2 elements to rank 1, which expects 4$"),
    ("reduce_scatter", lambda: {"input": x(3), "recv_counts": [1] * 3}, "0 has elements: 12, rank 2 has elements: 6$"),
    ("global_scatter", lambda: {"local_count": [2, 0, 1, 1, 1, 1]}, "2 sends 2 rows to expert 0 of rank 0, .* 1$"),
    ("global_gather", lambda: {"global_count": [1, 1, 1, 1, 2, 0]}, "2 sends 1 rows to expert 0 of rank 2, .* 2$"),
    ("global_gather", lambda: {"local_count": [2] * 3, "global_count": [2] * 3}, "2 sends 1 el.* rank 0, .* 2$"),
]  # fmt: skip


def disagree(communicator: Communicator) -> list[Found]:
    return [
        outcome(communicator, Bad(function, changes, PeerMismatchError, text), [2])
        for function, changes, text in DISAGREEMENTS
    ]


def test_what_the_ranks_disagree_about(launch: Launch) -> None:
    for (function, _, text), found in zip(DISAGREEMENTS, zip(*launch(SIZE, disagree), strict=True), strict=True):
        for rank, (name, _, said) in enumerate(found):
            assert name == "PeerMismatchError", f"{function} on rank {rank}: {name}: {said}, expected {text}"
            assert re.search(text, said), f"{function} on rank {rank}: {said}, expected {text}"


@pytest.mark.parametrize("function", GOOD)
def test_the_arguments_to_begin_with_are_good(launch: Launch, function: str) -> None:
    launch(SIZE, call, function, {})


@pytest.mark.parametrize("function", GOOD)
def test_a_group_that_is_none(function: str) -> None:
    """Nobody can be told: there is no communicator yet."""
    for group in ("default", 0, object()):
        what = f"group is a {type(group).__name__}, expected a Communicator or None"
        with pytest.raises(InvalidParamError, match=what):
            getattr(av, function)(**GOOD[function](), group=group)


@pytest.mark.parametrize("function", GOOD)
def test_a_communicator_that_has_been_destroyed(function: str) -> None:
    [communicator] = Communicator.threads(1)
    communicator.destroy()
    alone: dict[str, dict[str, Any]] = {
        "all_to_all_v": {"input": [1], "send_counts": [1]},
        "exchange_counts": {"send_counts": [1]},
        "all_to_all": {"output_tensor_list": [x()], "input_tensor_list": [x()]},
        "all_gather_into_tensor": {"output_tensor": x(), "input_tensor": x()},
        "broadcast": {"array": x()},
        "reduce_scatter": {"input": x()},
    }
    arguments = alone.get(function) or GOOD[function]()
    with pytest.raises(InvalidParamError, match=r"the communicator of domain '.*' has been destroyed; make a new one"):
        getattr(av, function)(**arguments, group=communicator)
