"""Where arrays lie, how they are laid out, rows, and nothing at all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from exchange_cases import (
    PATHS,
    PLACES,
    SEED,
    Array,
    Counters,
    Launch,
    bytes_of,
    counters,
    difference,
    expected_bytes,
    make_cases,
    put,
    total,
)

import alltoallv.numpy
from alltoallv import Communicator
from alltoallv.testing import golden, reference


@pytest.mark.parametrize(("path", "in_arena", "out_arena"), [
    ("push", False, False), ("push", True, False), ("pull", False, True), ("pull", False, False), ("cma", True, True),
])  # fmt: skip
def test_forced_path_that_cannot_serve(launch: Launch, path: str, in_arena: bool, out_arena: bool) -> None:
    """The data go through the rings instead."""
    cases = make_cases(3, 20, SEED)
    moved = total(launch(3, run_misplaced, cases, in_arena, out_arena, path=path))
    assert moved == bytes_of("staged", cases)


def run_misplaced(communicator: Communicator, cases: list[golden.Case], in_arena: bool, out_arena: bool) -> Counters:
    r = communicator.rank
    before = counters(communicator)
    for case in cases:
        out = put(case.outputs[r], out_arena)
        alltoallv.numpy.all_to_all_v(
            put(case.inputs[r], in_arena), case.send_counts[r], case.recv_counts[r], sdispls=case.sdispls[r],
            rdispls=case.rdispls[r], out=out, group=communicator,
        )  # fmt: skip
        golden.assert_bits_equal(out, case.expected[r])
    return difference(counters(communicator), before)


def test_auto_takes_the_quickest_path_for_each_receiver(launch: Launch) -> None:
    """Rank 0 receives in the arena, rank 1 in private memory; inputs of ranks 0 and 1 differ likewise."""

    def exchange(communicator: Communicator, n: int) -> Counters:
        r, size = communicator.rank, communicator.size
        x = put(np.arange(n * size, dtype=np.int32) + 1000 * r, r == 1)
        out = put(np.zeros(n * size, np.int32), r == 0)
        before = counters(communicator)
        alltoallv.numpy.all_to_all_v(x, [n] * size, [n] * size, out=out, group=communicator)
        assert np.array_equal(
            out, np.concatenate([np.arange(n * r, n * (r + 1), dtype=np.int32) + 1000 * j for j in range(size)])
        )
        return difference(counters(communicator), before)

    n = 40_000  # two of them are more than a mailbox takes
    moved = launch(3, exchange, n)
    wanted = [
        {"bytes_pull": 0, "bytes_cma": 0, "bytes_push": 0, "bytes_staged": 0},  # others write into its output
        {"bytes_push": 4 * n},  # to rank 0; it reads from ranks 0 and 2, whose inputs are private
        {"bytes_push": 4 * n, "bytes_pull": 4 * n},  # to rank 0; from rank 1
    ]
    for rank, names in enumerate(wanted):
        for name, value in names.items():
            assert moved[rank][name] == value, f"{name} on rank {rank}"
    for rank, peers in ((1, 2), (2, 1)):
        assert moved[rank]["bytes_cma"] + moved[rank]["bytes_staged"] == peers * 4 * n


@pytest.mark.parametrize("n", [20_000, 200_000])  # what a mailbox takes, and what goes through a ring
def test_private_memory_goes_by_the_quicker_of_two_ways(launch: Launch, cma_permitted: bool, n: int) -> None:
    """Both are tried, whichever wins, where every rank has a processor."""

    def exchange(communicator: Communicator, n: int) -> tuple[bool, Counters]:
        before = counters(communicator)
        for call in range(70):  # several trials
            expected = [np.arange(n * 2, dtype=np.int32) + call - 1000 * j for j in range(2)]
            out = np.full(n * 2 + 2, -7, np.int32)
            x = expected[communicator.rank]
            alltoallv.numpy.all_to_all_v(x, [n, n], [n, n], out=out[1:-1], group=communicator)
            r = slice(n * communicator.rank, n * (communicator.rank + 1))
            assert np.array_equal(out[1:-1], np.concatenate([each[r] for each in expected])), f"call {call}"
            assert out[0] == out[-1] == -7
        return communicator.stats()["processors"] >= 2, difference(counters(communicator), before)

    for has_room, moved in launch(2, exchange, n):
        read, copied = moved["bytes_cma"], moved["bytes_inline"] + moved["bytes_staged"]
        assert read + copied == 70 * 4 * n, moved
        if has_room and moved["bytes_cma"]:  # processes may not read each other's memory everywhere
            assert min(read, copied) >= 3 * 4 * n, moved


def run_rows(communicator: Communicator, path: str, seed: int) -> tuple[Counters, Counters]:
    """Exchanges of rows, some ranks learning their counts; the bytes that moved here, and that must have in all."""
    size, r = communicator.size, communicator.rank
    rng = np.random.default_rng(seed)
    before = counters(communicator)
    send_counts, row_bytes = [], []
    for number in range(24):
        tail = [(), (1,), (3,), (2, 5), (0,), (4, 0, 2)][number % 6]
        dtype = golden.dtype_of(golden.DTYPES[number % len(golden.DTYPES)])
        shape = golden.random_case(rng, size, "int8", max_count=6, overlapping_sends=bool(number % 2))
        inputs = [golden.fill(rng, (x.size, *tail), dtype) for x in shape.inputs]
        outputs = [golden.fill(rng, (x.size, *tail), dtype) for x in shape.outputs]
        x = put(inputs[r], PLACES[path][0])
        keywords: dict[str, Any] = {"sdispls": shape.sdispls[r], "unit": "row", "group": communicator}
        if (r + number) % 3 == 0:
            expected = reference.all_to_all_v(inputs, shape.send_counts, shape.sdispls)[r]
        else:
            keywords |= {"recv_counts": shape.recv_counts[r], "rdispls": shape.rdispls[r]}
            keywords["out"] = put(outputs[r], PLACES[path][1])
            expected = reference.all_to_all_v(
                inputs, shape.send_counts, shape.sdispls, shape.recv_counts, shape.rdispls, outputs
            )[r]
        actual = alltoallv.numpy.all_to_all_v(x, shape.send_counts[r], **keywords)
        golden.assert_bits_equal(actual, expected, f"exchange {number} on rank {r}, rows of shape {tail}")
        send_counts.append(shape.send_counts)
        row_bytes.append(math.prod(tail) * dtype.itemsize)
    carrier = "inline" if path == "auto" else path
    wanted = expected_bytes(carrier, send_counts, row_bytes)
    # Rows without elements are compared with the counts themselves: nothing moves for them.
    return difference(counters(communicator), before), wanted


@pytest.mark.parametrize("path", PATHS)
def test_rows(launch: Launch, path: str) -> None:
    print(f"seed {SEED}")
    for size in (1, 2, 3, 4):
        results = launch(size, run_rows, path, SEED + size, path=path)
        assert total(moved for moved, _ in results) == results[0][1]


def test_inputs_of_every_layout(launch: Launch) -> None:
    def exchange(communicator: Communicator) -> None:
        size, r = communicator.size, communicator.rank

        def values(j: int) -> Array:
            return np.arange(size * 6).reshape(size * 2, 3) + 100 * j

        base = values(r)
        wide = np.zeros((size * 4, 6), base.dtype)
        wide[::2, ::2] = base
        backwards = np.ascontiguousarray(base[::-1])
        readonly = base.copy()
        readonly.flags.writeable = False
        expected = np.concatenate([values(j)[2 * r : 2 * r + 2] for j in range(size)])
        layouts = [base, wide[::2, ::2], np.asfortranarray(base), backwards[::-1], readonly, base.tolist()]
        for x in layouts:
            got = alltoallv.numpy.all_to_all_v(x, [2] * size, [2] * size, unit="row", group=communicator)
            golden.assert_bits_equal(got, expected)
            got = alltoallv.numpy.all_to_all_v(x, [6] * size, unit="element", group=communicator)
            golden.assert_bits_equal(got, expected.reshape(-1))
        # One element without dimensions is an input of length 1.
        to_next = [int(j == (r + 1) % size) for j in range(size)]
        scalar = alltoallv.numpy.all_to_all_v(np.float32(r), to_next, group=communicator)
        golden.assert_bits_equal(scalar, np.array([(r - 1) % size], np.float32))

    for size in (1, 2, 3):
        launch(size, exchange)
