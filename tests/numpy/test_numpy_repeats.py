"""A call whose like has been made before looks at its arrays only; everything else stays as it was."""

from __future__ import annotations

import pickle
import sys
import time
from collections import UserList
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import alltoallv.numpy as an
from alltoallv import Communicator, _core
from alltoallv._calls.repeats import arrays_of
from alltoallv.errors import AllToAllVError, InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.memory import is_shared
from alltoallv.testing import Ranks


@pytest.mark.parametrize("unit", ["element", "row"])
def test_repeated_calls_move_the_data_of_each(ranks: Ranks, unit: Any) -> None:
    def program(comm: Communicator) -> None:
        tail = (3,) if unit == "row" else ()
        counts = [[(i + j) % 3 for j in range(comm.size)] for i in range(comm.size)]
        recvs = [counts[j][comm.rank] for j in range(comm.size)]
        for step in range(4):
            inputs = [np.arange(3 * sum(row)).reshape(-1, 3) + 100 * i + 1000 * step for i, row in enumerate(counts)]
            flat = [x if unit == "row" else x[:, 0].copy() for x in inputs]
            pieces = [np.split(x, np.cumsum(row))[comm.rank] for x, row in zip(flat, counts, strict=True)]
            expected = np.concatenate(pieces)
            out = np.full((sum(recvs), *tail), -1)
            made = an.all_to_all_v(flat[comm.rank], counts[comm.rank], recvs, unit=unit, group=comm)
            given = an.all_to_all_v(flat[comm.rank], counts[comm.rank], recvs, unit=unit, out=out, group=comm)
            assert given is out
            assert is_shared(made)
            for got in (made, given):
                assert got.shape == expected.shape
                assert np.array_equal(got, expected)

    ranks(3)(program)


def test_what_was_refused_is_refused_again() -> None:
    (comm,) = Communicator.threads(1)
    x, out, read_only = np.arange(4.0), np.zeros(4), np.zeros(4)
    read_only.flags.writeable = False
    for _ in range(3):
        assert an.all_to_all_v(x, [4], [4], out=out, group=comm) is out
        with pytest.raises(InvalidParamError, match="overlap"):
            an.all_to_all_v(x, [4], [4], out=x, group=comm)
        with pytest.raises(InvalidTensorError, match="dtype"):
            an.all_to_all_v(x, [4], [4], out=np.zeros(4, np.float32), group=comm)
        with pytest.raises(InvalidTensorError, match="not contiguous"):
            an.all_to_all_v(x, [4], [4], out=np.zeros(8)[::2], group=comm)
        with pytest.raises(InvalidTensorError, match="not contiguous and writable"):
            an.all_to_all_v(x, [4], [4], out=read_only, group=comm)
        with pytest.raises(InvalidParamError, match="unit"):
            an.all_to_all_v(x, [4], [4], unit="byte", group=comm)  # type: ignore[call-overload]
        with pytest.raises((InvalidParamError, TypeError)):
            an.all_to_all_v(x, [[4]], [4], group=comm)  # type: ignore[list-item]
        assert an.all_to_all_v(np.arange(8.0)[::2], [4], [4], group=comm).tolist() == [0, 2, 4, 6]  # copied first
        assert an.all_to_all_v([5, 6], [2], [2], group=comm).tolist() == [5, 6]
    comm.destroy()
    with pytest.raises(AllToAllVError):
        an.all_to_all_v(x, [4], [4], out=out, group=comm)


def arrays_of_six() -> list[np.ndarray[Any, Any]]:
    """Six elements each, of dtypes and layouts that a quick look might take for one another's."""
    plain = np.arange(6, dtype=np.float32)
    raw = plain.tobytes()
    return [
        plain,
        pickle.loads(pickle.dumps(plain)),  # of a dtype object of its own
        plain.astype(">f4"),
        plain.view(np.int32),
        plain.view(np.uint32),
        np.frombuffer(2 * raw, "M8[s]"),
        np.frombuffer(2 * raw, "M8[D]"),
        np.frombuffer(2 * raw, [("a", "i4"), ("b", "f4")]),
        np.frombuffer(2 * raw, [("a", "f4"), ("b", "i4")]),
        np.frombuffer(raw[:12], ml_dtypes.bfloat16),
        np.frombuffer(raw[:12], np.float16),
        np.frombuffer(raw, "S4"),
        np.frombuffer(raw, "V4"),
        plain.reshape(2, 3),
        plain.reshape(3, 2).T,
        plain.reshape(6, 1, 1),
        np.arange(12, dtype=np.float32)[::2],
        np.ma.masked_array(plain, plain > 3),
        plain.view(np.recarray),
        plain.astype(object),
        np.zeros((6, 0), np.float32),
    ]


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        got = call()
    except Exception as error:
        return type(error), str(error)
    return type(got), got.dtype, got.shape, got.tobytes()


@pytest.mark.parametrize("unit", ["element", "row"])
def test_arrays_of_every_kind_repeat_what_the_first_call_did(unit: Any) -> None:
    (comm,) = Communicator.threads(1)
    kinds = arrays_of_six()
    for x in kinds + kinds:
        for counts in ([len(x)], [x.size]):
            first = outcome(partial(an.all_to_all_v, x, counts, counts, unit=unit, timeout=60, group=comm))
            for _ in range(2):
                assert outcome(partial(an.all_to_all_v, x, counts, counts, unit=unit, group=comm)) == first


def test_plans_take_arrays_of_their_dtype_only() -> None:
    (comm,) = Communicator.threads(1)
    kinds = arrays_of_six()
    for dtype in (np.float32, np.int32, np.uint32, np.float16, ml_dtypes.bfloat16):
        plan = an.Plan([6], [6], dtype, group=comm)
        for x in kinds:
            got, expected = outcome(partial(plan, x)), outcome(partial(plan, x, timeout=60))  # which takes no short way
            assert got == expected
            if x.dtype == dtype and x.flags.c_contiguous and x.size == 6:
                assert got[1:] == (dtype, (6,), np.asarray(x).tobytes())
            else:
                assert issubclass(got[0], AllToAllVError)


def reductions() -> list[Callable[..., Any]]:
    return [
        an.all_reduce,
        an.quantized_all_reduce,
        partial(an.quantized_all_reduce, gather="quantized", bits=4),
    ]


@pytest.mark.parametrize("shape", [(), (5,), (3, 200)])
def test_repeated_reductions_give_what_first_ones_do(ranks: Ranks, shape: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> None:
        for reduce in reductions():
            for step in range(4):
                x = np.random.default_rng([comm.rank, step]).standard_normal(shape).astype(np.float32)
                first = reduce(x, timeout=60, group=comm)  # a timeout is not repeated
                made = reduce(x, group=comm)
                out = np.full_like(x, 9)
                assert reduce(x, out=out, group=comm) is out
                half = reduce(x.astype(np.float16), group=comm)
                assert reduce(x, out=x, group=comm) is x
                assert made.shape == shape
                assert is_shared(made)
                assert half.dtype == np.float16
                for got in (made, out, x):
                    assert got.tobytes() == first.tobytes()

    ranks(3)(program)


def test_reductions_refuse_again_what_they_refused() -> None:
    (comm,) = Communicator.threads(1)
    for reduce in reductions():
        both = np.arange(8, dtype=np.float32)
        x, over = both[:6], both[2:]
        for _ in range(3):
            assert reduce(x, group=comm).shape == (6,)
            with pytest.raises(InvalidParamError, match="overlap"):
                reduce(x, out=over, group=comm)
            with pytest.raises(InvalidTensorError, match="dtype"):
                reduce(x, out=np.zeros(6), group=comm)
            with pytest.raises(InvalidTensorError, match="expected"):
                reduce(x, out=np.zeros(5, np.float32), group=comm)
            with pytest.raises(InvalidParamError, match="op"):
                reduce(x, op=["sum"], group=comm)
            assert reduce(both[::2], group=comm).shape == (4,)  # copied first
            assert reduce(np.float32(2.5), group=comm).shape == ()
    comm.destroy()
    with pytest.raises(AllToAllVError):
        reduce(x, group=comm)


def test_a_disagreement_of_reductions_after_repeats_is_found(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        x = np.ones(6, np.float32)
        for reduce in reductions()[:3]:
            for _ in range(2):
                reduce(x, group=comm)
            with pytest.raises(PeerMismatchError, match="rank"):
                reduce(x[: 6 - comm.rank], group=comm)
            reduce(x, group=comm)

    ranks(2)(program)


def test_a_disagreement_after_repeats_is_found(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        for sends in ([1, 2], [1, 2], [2, 1]):
            recvs = [1, 1] if comm.rank == 0 else [2, 2]
            x = np.arange(3)
            if sends == [1, 2]:
                an.all_to_all_v(x, sends, recvs, group=comm)
            else:
                with pytest.raises(PeerMismatchError, match="rank"):
                    an.all_to_all_v(x, sends if comm.rank else [1, 2], recvs, group=comm)
        assert an.all_to_all_v(np.arange(3), [1, 2], recvs, group=comm).size == sum(recvs)

    ranks(2)(program)


def test_a_call_holds_what_it_found_until_its_end() -> None:
    """Else what another thread drops would be gone under its hands."""
    waiting, late = Communicator.threads(2)
    x = np.arange(6)
    dtype = np.dtype(int, metadata={"used by": "what is kept"})  # an object of its own
    core = _core.Plan(waiting.core, "all_to_all_v", "int64", [3, 3], [0, 3], [3, 3], [0, 3])
    waiting.repeats.keep("kept", x, None, core.on_arrays(arrays_of(x, 6, np.empty(0, dtype), (6,))))
    kept = sys.getrefcount(dtype)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(waiting.repeats.run, "kept", x, None)
        time.sleep(0.2)  # until it waits
        waiting.repeats.clear()
        during = sys.getrefcount(dtype)
        an.all_to_all_v(x, [3, 3], [3, 3], group=late)
        made = call.result()
    assert made is not None
    assert made.tolist() == [0, 1, 2, 0, 1, 2]
    assert during == kept + 1  # of the array that it receives in
    assert sys.getrefcount(dtype) == kept


def test_what_is_kept_is_bounded() -> None:
    (comm,) = Communicator.threads(1)
    for length in range(3 * comm.repeats.limit):
        x = np.arange(length)
        for _ in range(2):
            assert np.array_equal(an.all_to_all_v(x, [length], [length], group=comm), x)
        assert 1 <= len(comm.repeats) <= comm.repeats.limit


class Shrinking:
    """An element that empties its list when it is read."""

    def __init__(self, within: list[Any]) -> None:
        self.within = within

    def __index__(self) -> int:
        self.within.clear()
        return 2


def keeping(what: Any) -> Callable[[Any], bool]:
    """Whether a call that was kept under ``what`` is found under something else."""
    (comm,) = Communicator.threads(1)
    x, out = np.arange(4), np.zeros(4, int)
    repeats = _core.Repeats()
    plan = _core.Plan(comm.core, "all_to_all_v", "int64", [4], [0], [4], [0])
    repeats.keep(what, x, out, plan.on_arrays(arrays_of(x, 4, out, (4,))))
    return lambda other: repeats.run(other, x, out) is out


def test_calls_are_told_apart_by_the_values_of_their_arguments() -> None:
    keys: list[Any] = [
        "op", "operator", "opéra", "op\0", "", b"op", b"operator", b"op\0", b"", True, False, 0, 1, -1, 1.0, 0.0, -0.0,
        [], [0], [1], [1, 2], [-1], [2**62], ([1], [2]), ([1, 2],), ([], [1, 2]), ([1], 2), (1, [2]), (1, (1, 2)),
        (None,), ("op", None), ("op", 0), ("op", [0]), int, np.float32, np.dtype(np.float32),
    ]  # fmt: skip
    for what in keys:
        finds = keeping(what)
        assert [finds(other) for other in keys] == [other is what for other in keys], what


def test_calls_with_equal_integers_are_equal() -> None:
    numpys = [np.int64(1), np.uint8(2)]
    assert keeping(("op", numpys))(("op", [np.int32(1), np.int64(2)]))
    assert keeping(np.int64(5))(5)
    assert keeping("opop")("".join(["op", "op"]))


def test_arguments_that_may_change_under_a_key_are_not_kept() -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    shrinking: list[Any] = [1, 2, 3]
    shrinking[1] = Shrinking(shrinking)
    big, arrays = 2**63, [np.arange(3)]
    for what in (
        {},
        {1},
        [big],
        -big - 1,
        *arrays,
        arrays,
        itself,
        ([1, {}],),
        [[1]],
        UserList([1]),
        "\ud800",
        shrinking,
    ):
        assert not keeping(what)(what)


def test_counts_that_change_in_their_list_are_another_call(ranks: Ranks) -> None:
    def program(comm: Communicator) -> None:
        x = np.arange(6) + 10 * comm.rank
        for step in (0, 1, 2, 1, 0):
            sends = [2 + step, 4 - step]
            for _ in range(2):
                got = an.all_to_all_v(x, sends, [sends[comm.rank]] * 2, group=comm)
                begin = 0 if comm.rank == 0 else sends[0]
                expected = [np.arange(6)[begin : begin + sends[comm.rank]] + 10 * j for j in range(2)]
                assert np.array_equal(got, np.concatenate(expected))

    ranks(2)(program)
