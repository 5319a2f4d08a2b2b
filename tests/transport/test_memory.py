"""Arrays in the shared arena: shapes, lifetime, reuse, the budget, copies, fork."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest
from exchange_cases import Counters, counters, difference
from on_ranks import on_ranks
from started import forked

import alltoallv
from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import BackendUnavailableError, InvalidParamError, InvalidTensorError, OutOfMemoryError
from alltoallv.memory import is_shared
from alltoallv.testing import Ranks, golden

MB = 1 << 20


def used(communicator: Communicator) -> int:
    gc.collect()
    return communicator.stats()["arena_used_bytes"]


@pytest.mark.parametrize("dtype", golden.DTYPES)
def test_shapes_and_dtypes(one_rank: Communicator, dtype: str) -> None:
    kind = golden.dtype_of(dtype)
    for shape in (3, np.int64(4), (), (0,), (2, 0), (2, 3, 4), [5, 1], (MB,)):
        array = alltoallv.empty(shape, kind)
        dims = (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)
        assert array.shape == dims
        assert array.dtype == kind
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert is_shared(array)
        assert array.ctypes.data % 64 == 0
        data = golden.fill(np.random.default_rng(0), dims, kind)
        array[...] = data
        golden.assert_bits_equal(array, data)


def test_defaults_and_bad_arguments(one_rank: Communicator) -> None:
    assert alltoallv.empty(3).dtype == np.float32
    assert alltoallv.empty((2, 2), "int16").dtype == np.int16
    assert alltoallv.empty(2, np.dtype(">i4")).dtype.str == ">i4"
    assert alltoallv.empty(2, "S5").nbytes == 10
    for shape in (-1, (2, -3), (2**40, 2**40)):
        with pytest.raises(InvalidParamError, match=r"shape is \(.*\), expected dimensions >= 0.*A2A-1314"):
            alltoallv.empty(shape)
    for shape in (2.5, None, "ab", (2, "3"), [[1]]):
        with pytest.raises(InvalidParamError, match=r"shape is .*, expected an integer or several.*A2A-1313"):
            alltoallv.empty(shape)
    with pytest.raises(InvalidTensorError, match=r"dtype is object, expected one of fixed size.*A2A-2077"):
        alltoallv.empty(3, object)
    with pytest.raises(InvalidTensorError, match=r"dtype is 'foo', which is not a dtype here.*A2A-2075"):
        alltoallv.empty(3, "foo")
    assert alltoallv.empty(3, "bfloat16").nbytes == 6
    with pytest.raises(OutOfMemoryError, match=r"no memory for an output of.*A2A-5024"):
        alltoallv.empty(2**60, np.int8)
    assert alltoallv.empty(3).shape == (3,)


def test_memory_returns_when_the_last_view_dies(one_rank: Communicator) -> None:
    before = used(one_rank)
    array = alltoallv.empty((10, MB // 4))
    assert used(one_rank) == before + 10 * MB
    view = array[3:5, :7]
    del array
    assert used(one_rank) == before + 10 * MB
    again = np.asarray(memoryview(view))
    del view
    assert used(one_rank) == before + 10 * MB
    del again
    assert used(one_rank) == before

    made = av.all_gather(np.zeros(100_000), group=one_rank)
    assert used(one_rank) > before
    del made
    assert used(one_rank) == before


def fill_the_budget(communicator: Communicator) -> tuple[Counters, dict[str, int]]:
    """With 200 MB per rank, 180 MB are taken; then 40 MB are received."""
    size, r = communicator.size, communicator.rank
    taken = [alltoallv.empty(60 * MB, np.int8) for _ in range(3)]
    assert all(is_shared(array) for array in taken)
    assert communicator.stats()["private_outputs"] == 0
    n = 10 * MB // 4
    x = np.arange(n * size, dtype=np.int32) + r
    before = counters(communicator)
    out = av.all_to_all_v(x, [n] * size, group=communicator)  # learning, and not
    outs = [out, av.all_to_all_v(x, [n] * size, [n] * size, group=communicator)]
    moved = difference(counters(communicator), before)
    stats = communicator.stats()
    for out in outs:
        assert not is_shared(out)
        expected = [np.arange(n * r, n * r + n, dtype=np.int32) + j for j in range(size)]
        assert np.array_equal(out, np.concatenate(expected))
    taken.pop()
    gc.collect()
    assert is_shared(av.all_to_all_v(x, [n] * size, [n] * size, group=communicator))
    assert is_shared(av.all_to_all_v(x, [n] * size, group=communicator))
    return moved, stats


def test_outputs_beyond_the_budget_are_private(ranks: Ranks) -> None:
    """They are counted; the results are the same, the way to them is longer."""
    for moved, stats in ranks(4, fresh=True, domain="small:200")(fill_the_budget):
        assert moved["bytes_push"] == 0
        assert moved["bytes_cma"] + moved["bytes_staged"] == 2 * 3 * 10 * MB
        assert stats["private_outputs"] == 2
        assert stats["private_output_bytes"] == 2 * 40 * MB
        assert stats["arena_bytes"] <= 200 * MB


@on_ranks(3, fresh=True, env={"ALLTOALLV_POOL": "0"})
def test_pool_switched_off(communicator: Communicator) -> None:
    size, r = communicator.size, communicator.rank
    array = alltoallv.empty(1000)
    assert not is_shared(array)
    for n in (3, 30_000):
        out = av.all_to_all_v(np.arange(size * n) + r, [n] * size, group=communicator)
        assert not is_shared(out)
        assert out.tolist() == [i + j for j in range(size) for i in range(r * n, r * n + n)]
    stats = communicator.stats()
    assert stats["arena_bytes"] == stats["bytes_push"] == stats["bytes_pull"] == 0
    assert stats["private_outputs"] == 3
    assert stats["bytes_cma"] + stats["bytes_staged"] == (size - 1) * 30_000 * 8


def mapped_segments() -> int:
    with open("/proc/self/maps") as maps:
        return sum("alltoallv-arena" in line for line in maps)


@on_ranks(2, fresh=True)
def test_what_its_owner_releases_is_unmapped_by_the_peers(communicator: Communicator) -> None:
    """Also while another communicator of the same processes lives, and has used the segments."""
    for turn in range(4):
        comm = Communicator.from_env(f"turn-{turn}:300")
        x = alltoallv.empty(100 * MB, np.int8)  # more than the domain that stays may keep idle
        x[:] = communicator.rank
        out = av.all_gather(x, group=communicator if turn % 2 else comm)
        assert (out == np.arange(communicator.size).reshape(-1, 1)).all()
        del x, out
        comm.destroy()
        av.barrier(group=communicator)  # all have released theirs, and told it
        av.barrier(group=communicator)
    gc.collect()
    assert mapped_segments() <= 2 * communicator.size  # what the domain that stays may keep


@on_ranks(2, fresh=True)
def test_nothing_is_left_without_communicators_and_arrays(communicator: Communicator) -> None:
    """The segments go when the last communicator and the last array have gone, in either order."""
    for arrays_first in (False, True):
        comm = Communicator.from_env(f"brief-{arrays_first}")
        out = av.all_gather(np.zeros(100_000), group=comm)
        assert mapped_segments() > 0
        av.barrier(group=comm)
        if arrays_first:
            del out
        comm.destroy()
        if not arrays_first:
            assert not out.any()
            del out
        gc.collect()
    communicator.destroy()
    assert mapped_segments() == 0
    array = alltoallv.empty(1000)
    assert mapped_segments() == 1
    del array
    assert mapped_segments() == 0


def test_copies_are_ordinary_arrays(one_rank: Communicator) -> None:
    import ml_dtypes

    before = used(one_rank)
    for dtype in (np.int16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        array = alltoallv.empty((3, 4), dtype)
        array[...] = np.arange(12).reshape(3, 4)
        for other in (
            copy.copy(array),
            copy.deepcopy(array),
            pickle.loads(pickle.dumps(array)),
            pickle.loads(pickle.dumps(array, protocol=5)),
            np.array(array),
        ):
            assert not is_shared(other)
            golden.assert_bits_equal(other, array)
            other[0, 0] = 7
            assert array[0, 0] == 0
        buffers: list[Any] = []
        data = pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
        other = pickle.loads(data, buffers=buffers)  # by reference: the same memory
        golden.assert_bits_equal(other, array)
        del array, other, buffers
    assert used(one_rank) == before


@on_ranks(2, fresh=True)
def test_fork(communicator: Communicator) -> None:
    """A child reads what it inherited and frees it without a word to the parent; it may allocate for itself."""
    size, r = communicator.size, communicator.rank
    n = 10_000
    x = np.arange(size * n) + r
    out = av.all_to_all_v(x, [n] * size, group=communicator)
    mine = alltoallv.empty(MB, np.int8)
    mine[...] = 3
    expected = out.copy()
    before = used(communicator)
    holder = [out, mine]
    del out, mine

    def child() -> None:
        out, mine = holder
        assert np.array_equal(out, expected)
        assert (mine == 3).all()
        assert not is_shared(mine)  # the child's arena is another
        holder.clear()
        del out, mine
        gc.collect()
        own = [alltoallv.empty(MB, np.int8) for _ in range(4)]
        for number, array in enumerate(own):
            array[...] = 100 + number
        assert is_shared(own[0])
        assert [int(array[-1]) for array in own] == [100, 101, 102, 103]
        assert not communicator.usable
        with pytest.raises(BackendUnavailableError, match=r"made before fork.*make a new one in the child.*A2A-5008"):
            av.barrier(group=communicator)
        [alone] = Communicator.threads(1)
        assert av.all_gather([5], group=alone).tolist() == [[5]]
        alone.destroy()

    assert forked(child) == "None"
    assert used(communicator) == before
    assert np.array_equal(holder[0], expected)
    assert (holder[1] == 3).all()
    fresh = [alltoallv.empty(MB, np.int8) for _ in range(3)]  # what the child freed is not handed out again
    for array in fresh:
        array[...] = 9
    assert (holder[1] == 3).all()
    again = av.all_to_all_v(x, [n] * size, group=communicator)
    assert np.array_equal(again, expected)
    del fresh, again
    holder.clear()
