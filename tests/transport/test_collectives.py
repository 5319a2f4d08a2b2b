"""The collectives that only move data, over every data path, against the reference.

Every rank makes the inputs of all ranks from one seed, calls the operator on its own, and compares with the reference.
It returns the bytes that moved here and those that must have moved in all, by path.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from exchange_cases import (
    PATHS,
    PLACES,
    SEED,
    Array,
    Counters,
    Counts,
    Launch,
    as_pushes,
    counters,
    difference,
    expected_bytes,
    put,
    total,
)
from on_ranks import on_both

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError
from alltoallv.testing import golden, reference

Moved = tuple[Counters, Counters]
Steps = Iterator[tuple[str, Counts, int]]  # of each call: the path, what ranks send to each other, bytes of an element
Body = Callable[[Communicator, str, np.random.Generator], Steps]
SIZES = (1, 2, 5)
INLINE_LIMIT, LIMIT_WITH_ROOM = 16384, 4096  # bytes; room: a processor for every rank
SHAPES = [(3,), (), (0,), (2, 0, 3), (4, 5), (1, 1, 7), (3000, 2)]  # the last one is too much to travel with the row
BIG = SHAPES[-1]


def carrier(communicator: Communicator, path: str, payload: int) -> str:
    """Which path carries ``payload`` bytes of a rank whose arrays lie where PLACES puts them."""
    has_room = communicator.size <= communicator.stats()["processors"]
    if path in ("inline", "auto") and payload <= (LIMIT_WITH_ROOM if path == "auto" and has_room else INLINE_LIMIT):
        return "inline"
    return {"inline": "staged", "auto": "push"}.get(path, path)


def private_carrier(path: str) -> str:
    """The same for a few bytes in private arrays."""
    return {"auto": "inline", "push": "staged", "pull": "staged"}.get(path, path)


def inputs_of(rng: np.random.Generator, size: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
    return [golden.fill(rng, shape, dtype) for _ in range(size)]


def dtypes(rng: np.random.Generator, count: int) -> Iterable[np.dtype[Any]]:
    return (golden.dtype_of(name) for name in rng.choice(golden.DTYPES, count))


def measure(communicator: Communicator, body: Body, path: str) -> Moved:
    before = counters(communicator)
    steps = list(body(communicator, path, np.random.default_rng([SEED, communicator.size])))
    wanted = total(expected_bytes(by, [counts], [itemsize]) for by, counts, itemsize in steps)
    return difference(counters(communicator), before), wanted


def check(launch: Launch, body: Body, path: str, sizes: Iterable[int]) -> None:
    print(f"seed {SEED}")
    for size in sizes:
        results = launch(size, measure, body, path, path=path)
        assert as_pushes(total(moved for moved, _ in results), path) == results[0][1], f"{size} ranks"


def every_rank(size: int, count: int) -> Counts:
    return np.full((size, size), count)


# --- gathers ---------------------------------------------------------------------------------------------------------


def gather_into_tensor(communicator: Communicator, path: str, rng: np.random.Generator) -> Steps:
    size, r = communicator.size, communicator.rank
    for shape, dtype in zip(SHAPES, dtypes(rng, len(SHAPES)), strict=True):
        inputs = inputs_of(rng, size, shape, dtype)
        stacked = np.stack(inputs)
        concatenated = stacked.reshape(-1) if shape == () else reference.all_gather_into_tensor(inputs)[r]
        x = put(inputs[r], PLACES[path][0])
        for expected in (stacked, concatenated):
            out = put(np.zeros_like(expected), PLACES[path][1])
            assert av.all_gather_into_tensor(out, x, communicator) is None
            golden.assert_bits_equal(out, expected, f"all_gather_into_tensor of shape {shape}")
            yield carrier(communicator, path, x.nbytes), every_rank(size, x.size), dtype.itemsize


# --- all-to-all ------------------------------------------------------------------------------------------------------


def uneven_single(communicator: Communicator, path: str, rng: np.random.Generator) -> Steps:
    size, r = communicator.size, communicator.rank
    for number, dtype in enumerate(dtypes(rng, 12)):
        tail = [(), (3,), (2, 2), (0,)][number % 4]
        counts = rng.integers(0, 5, (size, size)) * (rng.random((size, size)) < 0.7)
        inputs = [golden.fill(rng, (int(row.sum()), *tail), dtype) for row in counts]
        expected = reference.all_to_all_single(inputs, counts)[r]
        x = put(inputs[r], PLACES[path][0])
        out = put(np.zeros_like(expected), PLACES[path][1])
        av.all_to_all_single(out, x, counts[:, r], counts[r].tolist(), communicator)
        golden.assert_bits_equal(out, expected, f"all_to_all_single, splits {counts.tolist()}, rows of {tail}")
        yield carrier(communicator, path, 0), counts, math.prod(tail) * dtype.itemsize


def scattered(arrays: list[Array], in_arena: bool, rng: np.random.Generator) -> list[Array]:
    """Copies in one piece of memory, in random order and with gaps."""
    places = [0] * len(arrays)
    end = 0
    for i in rng.permutation(len(arrays)):
        places[i] = end
        end += arrays[i].nbytes + 16 * int(rng.integers(1, 5))
        end += -end % 16
    memory = put(np.zeros(end, np.uint8), in_arena)
    result = []
    for array, place in zip(arrays, places, strict=True):
        result.append(np.ndarray(array.shape, array.dtype, memory, place))
        result[-1][...] = array
    return result


def lists(communicator: Communicator, path: str, rng: np.random.Generator) -> Steps:
    size, r = communicator.size, communicator.rank
    for number, dtype in enumerate(dtypes(rng, 8)):
        shapes = [[SHAPES[k] for k in rng.integers(0, len(SHAPES) - 1, size)] for _ in range(size)]
        if number == 7 and size > 1:
            shapes[0][1] = BIG
        inputs = [[golden.fill(rng, shape, dtype) for shape in row] for row in shapes]
        expected = reference.all_to_all(inputs)[r]
        xs = scattered(inputs[r], PLACES[path][0], rng)
        outs = scattered([np.zeros_like(x) for x in expected], PLACES[path][1], rng)
        assert av.all_to_all(outs, xs, communicator) is None
        for j in range(size):
            golden.assert_bits_equal(outs[j], expected[j], f"all_to_all on rank {r}: from rank {j}, {shapes}")
        for sender in range(size):
            counts = np.zeros((size, size), int)
            counts[sender] = [math.prod(shape) for shape in shapes[sender]]
            sent = sum(math.prod(shapes[sender][j]) for j in range(size) if j != sender) * dtype.itemsize
            yield carrier(communicator, path, sent), counts, dtype.itemsize


# --- the rest --------------------------------------------------------------------------------------------------------


def from_every_root(communicator: Communicator, path: str, rng: np.random.Generator) -> Steps:
    size, r = communicator.size, communicator.rank
    for root in range(size):
        for shape, dtype in zip(SHAPES, dtypes(rng, len(SHAPES)), strict=True):
            inputs = inputs_of(rng, size, shape, dtype)
            array = put(inputs[r], path in ("push", "pull", "auto"))
            assert av.broadcast(array, root, group=communicator) is None
            golden.assert_bits_equal(array, reference.broadcast(inputs, root)[r], f"broadcast of {shape} from {root}")
            counts = np.zeros((size, size), int)
            counts[root] = array.size
            counts[root, root] = 0
            yield carrier(communicator, path, array.nbytes), counts, dtype.itemsize


def mixture_of_experts(communicator: Communicator, path: str, rng: np.random.Generator) -> Steps:
    size, r = communicator.size, communicator.rank
    for number, dtype in enumerate(dtypes(rng, 16)):
        experts = number // 4 + 1
        tail = [(), (1,), (4,), (2, 3)][number % 4]
        if size == 2 and number == 15:
            tail = (60, 50)  # too much to travel with the row
        local = rng.integers(0, 4, (size, size, experts)) * (rng.random((size, size, experts)) < 0.7)
        to_card = local.sum(axis=2)
        local_counts = [local[i].reshape(-1).tolist() for i in range(size)]
        global_counts = [local[:, i].reshape(-1).tolist() for i in range(size)]
        inputs = [golden.fill(rng, (int(local[i].sum()), *tail), dtype) for i in range(size)]
        arguments = (local_counts[r], np.array(global_counts[r], np.int32), communicator)

        x = put(inputs[r], PLACES[path][0])
        scattered_rows = av.global_scatter(x, *arguments)
        expected = reference.global_scatter(inputs, local_counts, global_counts)
        golden.assert_bits_equal(scattered_rows, expected[r], f"global_scatter, {experts} experts")
        back = av.global_gather(put(expected[r], PLACES[path][0]), *arguments)
        golden.assert_bits_equal(back, inputs[r], f"global_gather, {experts} experts")
        other = [golden.fill(rng, x.shape, dtype) for x in expected]  # not what a scatter has just left
        back = av.global_gather(other[r], *arguments)
        golden.assert_bits_equal(back, reference.global_gather(other, local_counts, global_counts)[r])

        yield from [(private_carrier(path), every_rank(size, experts), 8)] * 3
        row = math.prod(tail) * dtype.itemsize
        for counts, sorts in ((to_card, False), (to_card.T, experts > 1), (to_card.T, experts > 1)):
            for sender in range(size):
                mine = np.where(np.arange(size)[:, None] == sender, counts, 0)
                sent = int(mine.sum() - mine[sender, sender]) * row
                # Sorted rows lie in the arena, which nobody reads as another process's memory.
                by = "staged" if sorts and path == "cma" else path
                yield carrier(communicator, by, sent), mine, row


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body", [gather_into_tensor, uneven_single, lists, from_every_root], ids=lambda body: body.__name__
)
@pytest.mark.parametrize("sizes", [SIZES, pytest.param((3, 4), marks=pytest.mark.slow)], ids=str)
def test_equal_to_the_reference(launch: Launch, body: Body, path: str, sizes: tuple[int, ...]) -> None:
    check(launch, body, path, sizes)


@pytest.mark.parametrize("path", ["inline", "push", "cma", "staged", "auto"])
def test_mixture_of_experts(launch: Launch, path: str) -> None:
    check(launch, mixture_of_experts, path, (1, 2, 4))


def test_mixture_of_experts_from_the_arena(launch: Launch) -> None:
    """global_gather sorts the rows first, so what it sends need not lie where the caller's array does."""
    for size in (2, 3):
        results = launch(size, measure, mixture_of_experts, "pull", path="pull")
        moved = total(moved for moved, _ in results)
        assert set(moved) == {"bytes_self", "bytes_pull", "bytes_staged"}
        assert sum(moved.values()) == sum(results[0][1].values())


def test_lists_from_everywhere(launch: Launch) -> None:
    """Arrays in the arena, in private memory, inputs given twice, strided ones and lists, all in one call."""

    def exchange(communicator: Communicator, n: int) -> None:
        size, r = communicator.size, communicator.rank

        def value(i: int, j: int) -> Array:
            return np.arange(n, dtype=np.float32) * (i + 1) + 1000 * j

        xs: list[Any] = []
        for j in range(size):
            x = value(r, j)
            xs.append([put(x, True), put(x, False), np.repeat(x, 3)[::3], x.tolist()][(r + j) % 3])
        outs = [put(np.zeros(n, np.float32), (r + j) % 2 == 0) for j in range(size)]
        av.all_to_all(outs, xs, communicator)
        for j in range(size):
            golden.assert_bits_equal(outs[j], value(j, r))
        shared = value(r, 0)
        av.all_to_all(outs, [shared] * size, communicator)
        for j in range(size):
            golden.assert_bits_equal(outs[j], value(j, 0))

    for size in (1, 2, 4):
        for n in (5, 50_000):
            launch(size, exchange, n)


@on_both(2)
def test_a_tensor_in_the_place_of_another_rank(comm: Communicator) -> None:
    """Rank 1 would read or write it while the root does."""
    parts = np.arange(6).reshape(2, 3)
    for call, result in (
        (lambda j: av.gather(parts[j], out=parts, group=comm), parts),
        (lambda j: av.scatter(parts[j], parts, group=comm), parts[comm.rank]),
    ):
        with pytest.raises(InvalidParamError, match=r"overlap in memory.*A2A-1085"):
            call(1)
        call(comm.rank)
        assert comm.rank or (result == np.arange(result.size).reshape(result.shape)).all()


def test_barrier(launch: Launch) -> None:
    """Nobody leaves before everybody has come."""

    def meet(communicator: Communicator) -> list[tuple[float, float]]:
        times = []
        for late in range(communicator.size):
            if communicator.rank == late:
                time.sleep(0.05)
            entered = time.monotonic()
            assert av.barrier(group=communicator) is None
            times.append((entered, time.monotonic()))
        return times

    for size in (1, 2, 5):
        for times in zip(*launch(size, meet), strict=True):
            assert min(left for _, left in times) >= max(entered for entered, _ in times)
