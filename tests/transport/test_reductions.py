"""all_reduce and reduce_scatter: every operation and dtype, sizes around every change of method, bit for bit.

Every rank makes the inputs of all ranks from one seed and compares with the reference, so all ranks are known to get
identical bits. Inputs are random bit patterns: NaNs with payload, infinities, denormals.
"""

from __future__ import annotations

import hashlib
from typing import Any, get_args

import numpy as np
import pytest
from exchange_cases import SEED, Array, Counters, Launch, counters, difference, put, total
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_both

from alltoallv import Communicator, _core
from alltoallv import numpy as av
from alltoallv.errors import PeerMismatchError
from alltoallv.numpy.collectives import Op
from alltoallv.testing import golden, reference, run_ranks

REDUCED = [name for name, dtype in _core.dtypes.items() if dtype.arithmetic not in ("none", "complex")]
KINDS = [(name, op) for name in REDUCED for op in _core.reduce_ops if _core.reduces(name, op)]
INLINE_LIMIT = 16384
RING_FROM, RING_TO = 4096, 512 << 10  # bytes that two ranks hand over in one shot
SCRATCH = 7 << 18  # bytes per rank, for two buffers of one piece per rank and three of a result
SIZES = (1, 2, 3, 5)


def inputs_of(rng: np.random.Generator, size: int, shape: int | tuple[int, ...], name: str) -> list[Array]:
    """Random bits; but small numbers too, so that products do not all end as 0, infinity or NaN."""
    dtype = golden.dtype_of(name)
    inputs = []
    for _ in range(size):
        x = golden.fill(rng, shape, dtype)
        small = rng.integers(-3, 4, x.shape) if dtype.kind not in "bu" else rng.integers(0, 4, x.shape)
        inputs.append(np.where(rng.random(x.shape) < 0.5, x, small.astype(dtype)))
    return inputs


def carrier(path: str, nbytes: int, in_arena: bool, size: int) -> str:
    if size == 2 and path == "auto" and RING_FROM < nbytes <= RING_TO:
        return "bytes_staged"
    if nbytes <= INLINE_LIMIT and path in ("auto", "inline"):
        return "bytes_inline"
    return "bytes_pull" if in_arena and path == "auto" else "bytes_staged"


def reduce_both(communicator: Communicator, inputs: list[Array], op: Any, path: str, in_arena: bool) -> str:
    """Both reductions in every form; returns a digest of all results, which must be the same on all ranks."""
    r, size = communicator.rank, communicator.size
    digest = hashlib.sha256()
    expected = reference.all_reduce(inputs, op)[r]
    what = f"{op} of {inputs[0].dtype.name}{list(inputs[0].shape)} on rank {r} of {size}, {path}"
    carried = carrier(path, inputs[0].nbytes, in_arena, size)

    def check(actual: Array, wanted: Array, name: str, before: Counters) -> None:
        golden.assert_bits_equal(actual, wanted, f"{name} {what}")
        moved = total([difference(counters(communicator), before)])
        assert moved == ({carried: wanted.nbytes} if wanted.nbytes else {}), f"{name} {what}"

    x = put(inputs[r], in_arena)
    before = counters(communicator)
    result = av.all_reduce(x, op, group=communicator)
    check(result, expected, "all_reduce", before)
    digest.update(result.tobytes())
    out = put(np.zeros_like(x), not in_arena)
    before = counters(communicator)
    assert av.all_reduce(x, op, out=out, group=communicator) is out
    check(out, expected, "all_reduce into out", before)
    golden.assert_bits_equal(x, inputs[r], "the input")
    before = counters(communicator)
    assert av.all_reduce(x, op, out=x, group=communicator) is x
    check(x, expected, "all_reduce in place", before)

    x = put(inputs[r], in_arena)
    n = len(x)
    for counts in ([n // size] * (size - 1) + [n - n // size * (size - 1)], uneven(n, size)):
        part = expected[sum(counts[:r]) : sum(counts[: r + 1])]
        before = counters(communicator)
        result = av.reduce_scatter(x, counts, op, group=communicator)
        check(result, part, f"reduce_scatter {counts}", before)
        out = put(np.zeros_like(part), in_arena)
        before = counters(communicator)
        assert av.reduce_scatter(x, np.array(counts), op, out=out, group=communicator) is out
        check(out, part, f"reduce_scatter {counts} into out", before)
        golden.assert_bits_equal(x, inputs[r], "the input")
    return digest.hexdigest()


def uneven(n: int, size: int) -> list[int]:
    """Everything to few ranks, nothing to the others."""
    counts = [0] * size
    counts[-1] = n // 3
    counts[size // 2] += n - n // 3
    return counts


def reduce_kinds(
    communicator: Communicator, kinds: list[tuple[str, Any]], lengths: list[int], path: str, in_arena: bool
) -> list[str]:
    rng = np.random.default_rng(SEED)
    return [
        reduce_both(communicator, inputs_of(rng, communicator.size, n, name), op, path, in_arena)
        for name, op in kinds
        for n in lengths
    ]


def test_operators_are_those_of_the_table() -> None:
    assert get_args(Op) == _core.reduce_ops


def check_ranks_agree(results: list[list[str]]) -> None:
    for digests in results:
        assert digests == results[0]


@pytest.mark.parametrize("in_arena", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize("path", ["auto", "staged", "inline"])
def test_every_operation_and_dtype(launch: Launch, path: str, in_arena: bool) -> None:
    print(f"seed {SEED}, {len(KINDS)} kinds")
    for i, size in enumerate(SIZES if path == "auto" else (2, 3)):
        kinds = KINDS[(i + in_arena) % 2 :: 2]  # of each with every path and memory, and half of the sizes
        check_ranks_agree(launch(size, reduce_kinds, kinds, [0, 1, 7, 1000], path, in_arena, path=path))


@pytest.mark.parametrize("in_arena", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize("path", ["auto", "staged", "inline"])
def test_around_the_inline_limit(launch: Launch, path: str, in_arena: bool) -> None:
    for size in (1, 2, 4):
        for name in ("int8", "bfloat16", "float32", "float64"):
            n = INLINE_LIMIT // golden.dtype_of(name).itemsize
            kinds = [(name, "sum"), (name, "max")]
            check_ranks_agree(launch(size, reduce_kinds, kinds, [n - 1, n, n + 1], path, in_arena, path=path))


@pytest.mark.parametrize("in_arena", [False, True], ids=["private", "arena"])
@pytest.mark.parametrize("path", ["auto", "staged"])
def test_several_pieces(launch: Launch, path: str, in_arena: bool) -> None:
    """More than fits into the scratch memory at once; one operator leaves it to the next with any number of steps."""
    several = {2: (("float32", "sum"), ("int16", "min")), 3: (("bfloat16", "avg"), ("float64", "prod"))}
    for size in (2, 3):
        piece = SCRATCH // (2 * size + 3) // 64 * 64
        for name, op in several[size]:
            itemsize = golden.dtype_of(name).itemsize
            one = piece * size // itemsize  # exactly one piece per rank in an all_reduce
            lengths = [one, one + 1, 4 * one + 17, one // 2]
            kinds = [(name, op)]
            check_ranks_agree(launch(size, reduce_kinds, kinds, lengths, path, in_arena, path=path))


def test_inputs_of_which_some_lie_in_the_arena(launch: Launch) -> None:
    """Peers read inputs in place only if all of them lie in arenas."""

    def reduce(communicator: Communicator, in_arena: list[bool]) -> Counters:
        r, size = communicator.rank, communicator.size
        inputs = inputs_of(np.random.default_rng(SEED), size, 30_000, "float32")
        x = put(inputs[r], in_arena[r])
        before = counters(communicator)
        golden.assert_bits_equal(av.all_reduce(x, group=communicator), reference.all_reduce(inputs)[r])
        return difference(counters(communicator), before)

    for in_arena in ([True] * 3, [True, False, True], [False] * 3):
        moved = total(launch(3, reduce, in_arena))
        assert moved == {"bytes_pull" if all(in_arena) else "bytes_staged": 3 * 120_000}


def test_shapes(launch: Launch) -> None:
    """Any number of dimensions; rows stay whole in reduce_scatter; inputs of any layout; equal parts by default."""

    def reduce(communicator: Communicator) -> None:
        r, size = communicator.rank, communicator.size
        rng = np.random.default_rng(SEED)
        for shape in ((), (0,), (3, 0), (2, 3, 5), (1, 1), (40, 30, 20)):
            inputs = inputs_of(rng, size, shape, "float32")
            expected = reference.all_reduce(inputs)[r]
            golden.assert_bits_equal(av.all_reduce(inputs[r], group=communicator), expected)
            if shape:  # NumPy makes one dimension of none
                golden.assert_bits_equal(av.all_reduce(np.asfortranarray(inputs[r]), group=communicator), expected)
        for tail in ((), (3,), (2, 2), (0,), (500, 3)):
            inputs = inputs_of(rng, size, (2 * size, *tail), "int32")
            expected = reference.reduce_scatter(inputs, "max")[r]
            golden.assert_bits_equal(av.reduce_scatter(inputs[r], op="max", group=communicator), expected)
            flipped = np.ascontiguousarray(inputs[r][::-1])[::-1]
            golden.assert_bits_equal(av.reduce_scatter(flipped, op="max", group=communicator), expected)
            counts = uneven(2 * size, size)
            expected = reference.reduce_scatter(inputs, "sum", counts)[r]
            golden.assert_bits_equal(av.reduce_scatter(inputs[r], counts, group=communicator), expected)
        assert av.all_reduce([1, 2], group=communicator).tolist() == [size, 2 * size]

    for size in (1, 2, 3):
        launch(size, reduce)


@on_both(2)
def test_two_ranks_use_their_rings_in_turn(communicator: Communicator) -> None:
    """Pieces of any length go round the rings, after others that lie there unread, and after refused operators."""
    r = communicator.rank
    rng = np.random.default_rng(SEED)
    for i in range(120):
        counts = rng.integers(1, 60_000 if i % 3 else 400_000, 2)
        inputs = [golden.fill(rng, int(counts.sum()), np.dtype("int32")) for _ in range(2)]
        parts = [inputs[j][np.cumsum(counts)[r] - counts[r] :][: counts[r]] for j in range(2)]
        what = i % 4
        if what == 0:
            golden.assert_bits_equal(av.all_reduce(inputs[r], group=communicator), reference.all_reduce(inputs)[r])
        elif what == 1:
            part = av.reduce_scatter(inputs[r], counts, group=communicator)
            golden.assert_bits_equal(part, reference.reduce_scatter(inputs, "sum", counts.tolist())[r])
        elif what == 2:
            out = np.empty(2 * counts[r], np.int32)
            av.all_to_all_v(inputs[r], counts, [counts[r]] * 2, out=out, group=communicator)
            golden.assert_bits_equal(out, np.concatenate(parts))
        else:
            with pytest.raises(PeerMismatchError, match=r"has elements.*A2A-3009"):
                av.all_reduce(inputs[r][r:], group=communicator)


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(1, 4), kind=st.sampled_from(KINDS), path=st.sampled_from(["auto", "staged"]))
def test_any_reduction_on_threads(data: st.DataObject, size: int, kind: tuple[str, Any], path: str) -> None:
    name, op = kind
    counts = data.draw(st.lists(st.integers(0, 12), min_size=size, max_size=size), label="counts")
    tail = data.draw(st.sampled_from([(), (1,), (3,), (0,), (2, 2)]), label="tail")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    inputs = inputs_of(rng, size, (sum(counts), *tail), name)

    def reduce(communicator: Communicator) -> None:
        r = communicator.rank
        whole = av.all_reduce(inputs[r], op, group=communicator)
        golden.assert_bits_equal(whole, reference.all_reduce(inputs, op)[r])
        part = av.reduce_scatter(inputs[r], counts, op, group=communicator)
        golden.assert_bits_equal(part, reference.reduce_scatter(inputs, op, counts)[r])

    run_ranks(size, reduce, threads=True, path=path)
