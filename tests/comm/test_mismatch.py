"""What the ranks disagree about, and what one of them does wrong: an error on all, nothing written, and on they go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from on_ranks import on_both
from started import wait_for
from trouble import LIMIT, Failure, attempt, check_works, last_seq

import alltoallv
from alltoallv import Communicator, errors
from alltoallv.numpy import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    all_to_all_v,
    barrier,
    gather,
    quantized_all_reduce,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)

# Elements per pair of ranks: with the row, and beyond what travels inline.
SMALL, LARGE = 5, 40_000
FILL = 0xA5  # of outputs, before the call


def disagreements(comm: Communicator, odd: int, n: int) -> Iterator[tuple[str, np.ndarray, Callable[[], object], str]]:
    """What the odd rank alone does otherwise, with ``n`` elements per pair; tests/matrix has more kinds.

    Yields the name, this rank's prefilled output, its call, and words that the error must contain.
    """
    size, mine, other = comm.size, comm.rank == odd, (odd + 1) % comm.size
    low, high = (0, odd) if odd else (0, 1)  # where all are compared with rank 0, that and the first that differs

    def output(elements: int, dtype: Any = np.int32) -> np.ndarray:
        """On even ranks where peers can write, on odd ones in private memory."""
        out = (alltoallv.empty if comm.rank % 2 == 0 else np.empty)(elements, dtype)
        out.view(np.uint8)[...] = FILL
        return out

    def exchange(sends: list[int], recvs: list[int], dtype: Any = np.int32) -> tuple[np.ndarray, Callable[[], object]]:
        x, out = np.ones(sum(sends), dtype), output(sum(recvs), dtype)
        return out, lambda: all_to_all_v(x, sends, recvs, out=out, group=comm)

    def changed(difference: int) -> list[int]:
        return [n + difference * (mine and j == other) for j in range(size)]

    def differs(what: str, plain: object, deviating: object) -> str:
        first, second = (deviating, plain) if odd == 0 else (plain, deviating)
        return f"rank {low} {what} {first}, rank {high} {what} {second}"

    counts = [n] * size
    words = f"rank {odd} sends {n + 2} elements to rank {other}, which expects {n}"
    yield "what it sends", *exchange(changed(2), counts), words
    words = f"rank {other} sends {n} elements to rank {odd}, which expects 0"
    yield "what it expects", *exchange(counts, changed(-n)), words
    out, call = exchange(counts, changed(1))
    learns = lambda: all_to_all_v(np.ones(n * size, np.int32), counts, group=comm)  # noqa: E731
    words = f"rank {other} sends {n} elements to rank {odd}, which expects {n + 1}"
    yield "what others learn", out, call if mine else learns, words
    words = differs("has dtype", "int32", "float32")
    yield "dtype", *exchange(counts, counts, np.float32 if mine else np.int32), words
    out, call = exchange(counts, counts)
    meets = lambda: barrier(group=comm)  # noqa: E731
    yield "operator", out, meets if mine else call, differs("calls", "all_to_all_v", "barrier")
    x, gathered = np.ones(n, np.int32), output(n * size)
    one = lambda: all_gather(x, out=gathered, group=comm)  # noqa: E731
    kin = lambda: all_gather_into_tensor(gathered, x, group=comm)  # noqa: E731
    yield "kindred operator", gathered, kin if mine else one, differs("calls", "all_gather", "all_gather_into_tensor")
    for plain, deviating in ((n, n + 1), (10, 100_000)):  # the latter would go different ways
        elements = deviating if mine else plain
        reduced = output(elements)
        reduce = functools.partial(all_reduce, np.ones(elements, np.int32), out=reduced, group=comm)
        yield f"{plain} elements", reduced, reduce, differs("has elements:", plain, deviating)


def disagree(comm: Communicator, odd: int, n: int) -> list[tuple[str, str, Failure, int, bool]]:
    found = []
    for name, out, call, words in disagreements(comm, odd, n):
        failure = attempt(call)
        found.append((name, words, failure, last_seq(comm), bool((out.view(np.uint8) == FILL).all())))
    check_works(comm)
    assert comm.stats()["failed_operators"] == len(found)
    assert comm.usable
    return found


@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("size", "odd"),
    [(2, 1), (3, 2), (5, 0), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, 0), (3, 1), (5, 3)))],
)
def test_every_rank_gets_the_same_error(launch, size, odd, n):
    for cases in zip(*launch(size, disagree, odd, n), strict=True):
        name = cases[0][0]
        for _, words, failure, seq, untouched in cases:
            assert failure.name == "PeerMismatchError", (name, failure)
            assert failure.code == errors.PeerMismatchError.code
            assert failure.text == cases[0][2].text, name  # word for word on every rank
            assert words in failure.text, name
            assert f"#{seq} " in failure.text, name
            assert failure.text.count("rank ") >= 2, name
            assert untouched, f"{name}: an output was written to before the disagreement was found"


@pytest.mark.parametrize("path", ["inline", "push", "pull", "cma", "staged"])
def test_nothing_is_written_over_any_path(ranks, path):
    for cases in zip(*ranks(3, path=path)(disagree, 1, LARGE), strict=True):
        assert {failure.name for _, _, failure, _, _ in cases} == {"PeerMismatchError"}
        assert all(untouched for *_, untouched in cases), cases[0][0]


SHAPES = [
    ((2, 3), (3, 2), "(2, 3)", "(3, 2)"),
    ((6,), (1, 6), "(6,)", "(1, 6)"),
    ((), (1,), "()", "(1,)"),
    ((0, 7), (7, 0), "(0, 7)", "(7, 0)"),
    ((2, 3, 130), (2, 3, 130, 1), "(2, 3, 130)", "(2, 3, 130, 1)"),
    ((1, 2**17), (2**17, 1), "(1, 131072)", "(131072, 1)"),
    ((1,) * 14 + (2, 3), (1,) * 14 + (3, 2), f"({'1, ' * 14}2, ...)", f"({'1, ' * 14}3, ...)"),
]


def reductions_of(x, comm):
    """Every way to reduce ``x``, with and without the fast path."""
    yield lambda: all_reduce(x, group=comm)
    yield lambda: all_reduce(x, group=comm, async_op=True)[1].wait()
    yield lambda: reduce(x, comm.size - 1, group=comm)
    yield lambda: scan(x, group=comm)


@on_both(3)
def test_shapes_of_reductions(comm):
    for plain, deviating, *texts in SHAPES:
        x = np.ones(deviating if comm.rank == 1 else plain, np.float32)
        for call in reductions_of(x, comm):
            failure = attempt(call)
            assert failure.name == "PeerMismatchError", (plain, failure)
            assert "rank 0 has shape {}, rank 1 has shape {} [".format(*texts) in failure.text, failure.text
    check_works(comm)


@on_both(2)
def test_rows_without_elements(comm: Communicator) -> None:
    x = np.ones((2, 3 * (1 - comm.rank)))
    for counts in ([1, 1], None):
        with pytest.raises(errors.PeerMismatchError, match=r"rank 0 has elements per row: 3, rank 1 .*: 0 .A2A-3009"):
            all_to_all_v(x, [1, 1], counts, group=comm)


def test_failures_in_a_row_by_changing_ranks(launch):
    def work(comm):
        found = []
        x, counts = np.ones(4 * comm.size), [4] * comm.size
        for k in range(30):
            wrong = k % comm.size == comm.rank
            found.append(attempt(all_to_all_v, x, [-1 - k] * comm.size if wrong else counts, counts, group=comm))
        for k in range(10):  # and the same rank again and again
            sends = [-100 - k] * comm.size if comm.rank == 1 else counts
            found.append(attempt(all_to_all_v, x, sends, counts, group=comm))
        check_works(comm)
        return found

    for k, failures in enumerate(zip(*launch(3, work), strict=True)):
        value = -1 - k if k < 30 else -70 - k
        assert all(f.name == "InvalidParamError" and f"{value}" in f.text for f in failures), k
        assert sum("failed on rank" in f.text for f in failures) == 2  # all but the one that failed


def test_two_ranks_fail_at_once(ranks):
    def work(comm):
        x, counts = np.ones(4 * comm.size), [4] * comm.size
        sends = [-1 - comm.rank] * comm.size if comm.rank in (1, 2) else counts
        failure = attempt(all_to_all_v, x, sends, counts, group=comm)
        check_works(comm)
        return failure.text

    found = ranks(4)(work)
    assert "failed on" not in found[1]
    assert "failed on" not in found[2]  # each of the two says its own
    assert found[0] == found[3]
    assert found[0].endswith(f"failed on rank 1: {found[1]}")


def test_a_failing_rank_does_not_wait_for_late_peers(launch, prompt, tmp_path):
    def work(comm):
        x, counts = np.ones(2 * comm.size), [2] * comm.size
        failed = tmp_path / comm.domain.replace("/", "-")
        if comm.rank == 1:
            failure = attempt(all_to_all_v, x, [-1] * comm.size, counts, group=comm)
            failed.touch()
        else:
            wait_for(failed.exists, "the error of rank 1")
            failure = attempt(all_to_all_v, x, counts, counts, group=comm)
        check_works(comm)
        return failure

    found = launch(3, work)
    for peer in (found[0], found[2]):
        assert peer.at > found[1].at
        prompt("a peer failed its checks before", peer.began, peer.at)


def test_failure_behind_pending_calls_keeps_its_place(launch, tmp_path):
    def work(comm):
        x, counts = np.ones(2 * comm.size), [2] * comm.size
        failed = tmp_path / comm.domain.replace("/", "-")
        if comm.rank != 1:
            wait_for(failed.exists, "the error of rank 1")  # which does not wait for the call before it
        before = all_to_all_v(x, counts, counts, group=comm, async_op=True)[1]
        sends = [-1] * comm.size if comm.rank == 1 else counts
        failure = attempt(all_to_all_v, x, sends, counts, group=comm)
        failed.touch()
        after = all_to_all_v(x, counts, counts, group=comm, async_op=True)[1]
        before.wait()
        after.wait()
        check_works(comm)
        return failure

    found = launch(3, work)
    assert all("#2 all_to_all_v" in found[rank].text for rank in (0, 2))
    assert found[1].text in found[0].text


@pytest.mark.parametrize(
    "text", ["x" * 2000, "naïve " * 200, "日本語" * 300, "\U0001f980" * 400], ids=["1", "2", "3", "4"]
)
def test_long_texts_are_cut_between_characters(launch, text):
    def work(comm):
        if comm.rank == 0:
            comm.fail("barrier", ValueError(text))
            return None
        return attempt(barrier, group=comm)

    failure = launch(2, work)[1]
    assert failure.name == "InvalidParamError"
    _, arrived = failure.text.split("failed on rank 0: ValueError: ")
    arrived, number = arrived.rsplit(" ", 1)
    assert len(arrived) > 80
    assert (number, text[: len(arrived)]) == ("[A2A-1030]", arrived)


def test_checking_off_still_announces_failures(ranks):
    def work(comm):
        x, counts = np.ones(2 * comm.size), [2] * comm.size
        failure = attempt(all_to_all_v, x, [-1] * comm.size if comm.rank else counts, counts, group=comm)
        check_works(comm)
        return failure

    found = ranks(2, check="off")(work)
    assert "failed on rank 1" in found[0].text
    assert found[0].at - found[0].began < LIMIT


@pytest.mark.parametrize("size", [2, 3])  # two have a ring between them
def test_a_mistake_that_one_rank_alone_makes(launch: Callable[..., Any], size: int) -> None:
    launch(size, mistakes_of_one_rank)


def mistakes_of_one_rank(comm: Communicator) -> None:
    """It catches the error of a call that the others never make, and goes on: every call meets that of the others."""
    odd, n = comm.rank == 1, comm.size
    mistakes: list[Callable[[], object]] = [
        lambda: gather(np.ones(2), root=9, group=comm),
        lambda: scatter(np.ones(2), root=9, group=comm),
        lambda: reduce_scatter(np.ones(n + 1), group=comm),
    ]
    total = sum(range(1, n + 1))
    calls: list[tuple[Callable[[], Any], object]] = [
        (lambda: all_reduce(np.full(2, comm.rank + 1.0), group=comm), [total, total]),
        (lambda: all_to_all_v(np.full(n, comm.rank), [1] * n, group=comm), [*range(n)]),
        (lambda: all_to_all_v(np.full(n * 5000, comm.rank), [5000] * n, [5000] * n, group=comm)[::5000], [*range(n)]),
        (lambda: quantized_all_reduce(np.full(2, 127, np.float32), group=comm), [127 * n, 127 * n]),
        (lambda: all_gather(np.array(comm.rank), group=comm), [*range(n)]),
        (lambda: all_reduce(np.full(100_000, comm.rank + 1.0), group=comm)[-2:], [total, total]),
        (lambda: all_reduce(np.ones(2), async_op=True, group=comm)[1].result(), [n, n]),
    ]
    for step in range(3):
        for call, want in calls:
            for mistake in mistakes[: step + 1] if odd else ():
                with pytest.raises(errors.InvalidParamError):
                    mistake()
            assert call().tolist() == want
    with pytest.raises(errors.InvalidParamError, match="root" if odd else "gather .* failed on rank 1: "):
        gather(np.ones(2), root=9 if odd else 0, group=comm)
    check_works(comm)


def lengths_that_differ(comm: Communicator) -> Iterator[Callable[[int, float], float]]:
    """Functions ``f(n, value)``: an operator with n elements of that value; each returns what it made of them."""

    def output(n: int, shared: bool) -> np.ndarray:
        out = alltoallv.empty(n, np.float64) if shared else np.empty(n)
        out.fill(-1.0)
        return out

    def of_all(out: np.ndarray) -> float:
        return float(out[0]) if (out == out[0]).all() else -1.0

    for shared in (False, True):

        def to_last(n: int, value: float, shared: bool = shared) -> float:
            """Rank 0 sends to the last one, which expects that or, with n odd, nothing."""
            size, first, last = comm.size, comm.rank == 0, comm.rank == comm.size - 1
            sends = [0] * (size - 1) + [n if first else 0]
            recvs = [n if last and n % 2 == 0 else 0] + [0] * (size - 1)
            out = output(recvs[0], shared)
            all_to_all_v(np.full(sum(sends), value), sends, recvs, out=out, group=comm)
            return of_all(out) if recvs[0] else value

        def summed(n: int, value: float, shared: bool = shared) -> float:
            n += comm.rank * (n % 2)  # with n odd, ranks differ
            out = output(n, shared)
            all_reduce(np.full(n, value), out=out, group=comm)
            return of_all(out) / comm.size

        def quantized(n: int, value: float) -> float:
            n += comm.rank * (n % 2)
            return of_all(quantized_all_reduce(np.full(n, value, np.float32), group=comm)) / comm.size

        yield from (to_last, summed, quantized)


@pytest.mark.parametrize("size", [2, 3])
def test_checking_off_leaves_later_calls_right(ranks, size):
    """One operator whose ranks differ in lengths, on every path; those after it get their own data, or raise."""

    def work(comm: Communicator) -> None:
        for n in (300, 3_000, 40_000, 300_000):
            for call in lengths_that_differ(comm):
                failure = attempt(call, n + 1, 1.0)
                assert failure.name == "PeerMismatchError", failure
                for value in (2.0, 3.0, 4.0):
                    assert abs(call(n, value) - value) < 0.02 * value, (n, call, value)
        assert comm.usable

    ranks(size, check="off")(work)


def test_checking_off_leaves_names_to_the_caller(ranks):
    """Only what decides how data move is compared."""

    def work(comm: Communicator) -> list[float]:
        counts, x = [300] * comm.size, np.full(300 * comm.size, comm.rank + 1, np.float32 if comm.rank else np.int32)
        if comm.rank == 0:
            return [float(n) for n in all_to_all_v(x, counts, counts, group=comm)[::300]]
        out = np.empty_like(x)
        all_to_all_single(out, x, group=comm)
        return [float(n) for n in out[::300].view(np.int32)]

    first, second = ranks(2, check="off")(work)
    assert first == [1.0, float(np.float32(2).view(np.int32))]
    assert second == [1.0, float(np.float32(2).view(np.int32))]
