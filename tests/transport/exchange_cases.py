"""Exchanges for the transport tests: random cases, where their arrays lie, what the byte counters must say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import alltoallv.numpy
from alltoallv import Communicator
from alltoallv.memory import is_shared
from alltoallv.testing import golden, reference

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]
Counters = dict[str, int]

#: ``launch(size, function, *arguments, **options)``: ``function(communicator, *arguments)`` on every rank.
Launch = Callable[..., list[Any]]

SEED = 20240229

PATHS = ("inline", "push", "pull", "cma", "staged", "auto")
COUNTERS = ("bytes_self", "bytes_inline", "bytes_push", "bytes_pull", "bytes_cma", "bytes_staged")

#: Where arrays must lie for a forced path to serve: (input in the arena, output in the arena).
PLACES = {
    "inline": (False, True),
    "push": (False, True),
    "pull": (True, False),
    "cma": (False, False),
    "staged": (True, True),
    "auto": (True, True),
}


def put(array: Array, in_arena: bool) -> Array:
    """A copy of ``array`` in the arena or in private memory."""
    copy = (alltoallv.empty if in_arena else np.empty)(array.shape, array.dtype)
    copy[...] = array
    return copy


def make_cases(size: int, count: int, seed: int) -> list[golden.Case]:
    """Random exchanges of ``size`` ranks, every dtype in turn; a rank sends at most 8 KB: inline."""
    rng = np.random.default_rng([seed, size])
    cases = []
    for i in range(count):
        cases.append(
            golden.random_case(
                rng,
                size,
                golden.DTYPES[(i + size) % len(golden.DTYPES)],
                zeros=float(rng.choice([0.0, 0.3, 0.7, 1.0], p=[0.3, 0.4, 0.25, 0.05])),
                gaps=bool(rng.integers(2)),
                permuted=bool(rng.integers(2)),
                overlapping_sends=bool(rng.integers(2)),
                max_count=int(rng.choice([1, 7, 60])),
            )
        )
    return cases


def counters(communicator: Communicator) -> Counters:
    """The byte counters of this rank."""
    stats = communicator.stats()
    return {name: stats[name] for name in COUNTERS}


def difference(after: Counters, before: Counters) -> Counters:
    return {name: after[name] - before[name] for name in COUNTERS}


def total(per_rank: Iterable[Counters]) -> Counters:
    """Summed over ranks, without the zeros."""
    sums = dict.fromkeys(COUNTERS, 0)
    for one in per_rank:
        for name, value in one.items():
            sums[name] += value
    return {name: value for name, value in sums.items() if value}


def expected_bytes(path: str, send_counts: Sequence[npt.NDArray[np.int64]], itemsizes: Sequence[int]) -> Counters:
    """What `total` must be when ``path`` carries all that goes between different ranks."""
    within = sum(int(np.trace(counts)) * size for counts, size in zip(send_counts, itemsizes, strict=True))
    moved = sum(int(counts.sum()) * size for counts, size in zip(send_counts, itemsizes, strict=True))
    sums = {"bytes_self": within, f"bytes_{path}": moved - within}
    return {name: value for name, value in sums.items() if value}


def run_case(communicator: Communicator, case: golden.Case, path: str, number: int) -> None:
    """One exchange; ``number`` decides how it is asked for, alike on all ranks or not."""
    r = communicator.rank
    in_arena, out_arena = PLACES[path]
    x = put(case.inputs[r], in_arena)
    if number % 3 == 1:
        x.flags.writeable = False
    if number % 5 == 1 and not in_arena:  # the operator copies it; a copy does not lie in the arena
        x = np.repeat(x, 2)[::2]
        assert x.size < 2 or not x.flags.c_contiguous
    arguments: dict[str, Any] = {"sdispls": case.sdispls[r], "group": communicator}
    what = f"exchange {number} on rank {r}, {path}: {case!r}"

    if number % 4 == 2:  # the operator allocates: gaps are zero
        arguments |= {"recv_counts": case.recv_counts[r].tolist(), "rdispls": case.rdispls[r]}
        expected = reference.all_to_all_v(case.inputs, case.send_counts, case.sdispls, case.recv_counts, case.rdispls)[
            r
        ]
        covered = [case.rdispls[r][j] + n for j, n in enumerate(case.recv_counts[r]) if n]
        expected = expected[: max(covered, default=0)]
    elif number % 4 == 3 and r in ((), (0,), (1, 2), range(8))[number // 4 % 4]:  # none, one, some, all learn
        expected = reference.all_to_all_v(case.inputs, case.send_counts, case.sdispls)[r]
    else:
        arguments |= {"recv_counts": case.recv_counts[r], "rdispls": case.rdispls[r].tolist()}
        arguments["out"] = put(case.outputs[r], out_arena)
        expected = case.expected[r]

    actual = alltoallv.numpy.all_to_all_v(x, case.send_counts[r], **arguments)
    if "out" in arguments:
        assert actual is arguments["out"]
    elif actual.size:
        assert is_shared(actual)
    golden.assert_bits_equal(actual, expected, what)
    golden.assert_bits_equal(x, case.inputs[r], f"input of {what}")


def run_cases(communicator: Communicator, cases: list[golden.Case], path: str) -> Counters:
    before = counters(communicator)
    for number, case in enumerate(cases):
        run_case(communicator, case, path, number)
    return difference(counters(communicator), before)


def as_pushes(moved: Counters, path: str) -> Counters:
    """Counts what lies in the rings as pushed: there two ranks put it on path auto while pushes are slow."""
    if path == "auto" and (staged := moved.pop("bytes_staged", 0)):
        moved["bytes_push"] = moved.get("bytes_push", 0) + staged
    return moved


def bytes_of(path: str, cases: Sequence[golden.Case]) -> Counters:
    """`expected_bytes` of these cases."""
    return expected_bytes(path, [case.send_counts for case in cases], [case.dtype.itemsize for case in cases])
