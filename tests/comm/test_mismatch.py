"""What the ranks disagree about, and what one of them does wrong: an error on all, nothing written, and on they go."""

from __future__ import annotations

import time

import numpy as np
import pytest
from trouble import LIMIT, Failure, attempt, check_works, last_seq

import alltoallv
from alltoallv import errors
from alltoallv.numpy import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    all_to_all_v,
    barrier,
    broadcast,
    global_scatter,
    reduce_scatter,
)

# Elements per pair of ranks: with the row, and beyond what travels inline.
SMALL, LARGE = 5, 40_000


class Disagreements:
    """One method a disagreement: the call that this rank makes, of which only the odd rank's deviates.

    Called with the number of elements per pair. Says which words the error must contain.
    """

    def __init__(self, comm, odd: int, n: int) -> None:
        self.comm, self.n = comm, n
        self.mine = comm.rank == odd  # this rank is the odd one
        self.size = comm.size
        # Which two ranks an error names: where all are compared with rank 0, that and the first that differs.
        self.odd, self.other = odd, (odd + 1) % comm.size
        self.low, self.high = (0, odd) if odd else (0, 1)
        self.outputs = []

    def output(self, elements, dtype=np.int32, *, shape=None):
        """A prefilled output: on even ranks where peers can write, on odd ones in private memory."""
        make = alltoallv.empty if self.comm.rank % 2 == 0 else np.empty
        out = make(elements if shape is None else shape, dtype)
        out.view(np.uint8)[...] = 0xA5
        self.outputs.append(out)
        return out

    def untouched(self) -> bool:
        return all((out.view(np.uint8) == 0xA5).all() for out in self.outputs)

    def sees(self, plain, deviating):
        """What the lower and the higher of the ranks that are named say."""
        return (deviating, plain) if self.odd == 0 else (plain, deviating)

    def _exchange(self, sends, recvs, dtype=np.int32, **options):
        x = np.ones(sum(sends), dtype)
        all_to_all_v(x, sends, recvs, out=self.output(sum(recvs), dtype), group=self.comm, **options)

    def send_count(self):
        sends, recvs = [self.n] * self.size, [self.n] * self.size
        if self.mine:
            sends[self.other] += 2
        return lambda: self._exchange(sends, recvs), (
            f"rank {self.odd} sends {self.n + 2} elements to rank {self.other}, which expects {self.n}"
        )

    def recv_count(self):
        sends, recvs = [self.n] * self.size, [self.n] * self.size
        if self.mine:
            recvs[self.other] = 0
        return lambda: self._exchange(sends, recvs), (
            f"rank {self.other} sends {self.n} elements to rank {self.odd}, which expects 0"
        )

    def count_in_rows(self):
        sends, recvs = [self.n] * self.size, [self.n] * self.size
        if self.mine:
            sends[self.other] += 1
        x = np.ones((sum(sends), 2), np.int32)
        out = self.output(0, shape=(sum(recvs), 2))
        return lambda: all_to_all_v(x, sends, recvs, unit="row", out=out, group=self.comm), (
            f"rank {self.odd} sends {self.n + 1} rows to rank {self.other}, which expects {self.n}"
        )

    def row_size(self):
        width = 4 if self.mine else 3
        counts = [self.n] * self.size
        x = np.ones((sum(counts), width), np.int32)
        out = self.output(0, shape=(sum(counts), width))
        low, high = self.sees(3, 4)
        return lambda: all_to_all_v(x, counts, counts, unit="row", out=out, group=self.comm), (
            f"rank {self.low} has elements per row: {low}, rank {self.high} has elements per row: {high}"
        )

    def learnt_against_given(self):
        sends = [self.n] * self.size
        x = np.ones(sum(sends), np.int32)
        if self.mine:
            recvs = list(sends)
            recvs[self.other] += 1
            out = self.output(sum(recvs))
            return lambda: all_to_all_v(x, sends, recvs, out=out, group=self.comm), ""
        return lambda: all_to_all_v(x, sends, group=self.comm), (
            f"rank {self.other} sends {self.n} elements to rank {self.odd}, which expects {self.n + 1}"
        )

    def dtype(self):
        counts = [self.n] * self.size
        low, high = self.sees("int32", "float32")
        return lambda: self._exchange(counts, counts, np.float32 if self.mine else np.int32), (
            f"rank {self.low} has dtype {low}, rank {self.high} has dtype {high}"
        )

    def operator(self):
        counts = [self.n] * self.size
        low, high = self.sees("all_to_all_v", "barrier")
        call = (lambda: barrier(group=self.comm)) if self.mine else (lambda: self._exchange(counts, counts))
        return call, f"rank {self.low} calls {low}, rank {self.high} calls {high}"

    def kindred_operator(self):
        x, out = np.ones(self.n, np.int32), self.output(self.n * self.size)
        low, high = self.sees("all_gather", "all_gather_into_tensor")
        if self.mine:
            call = lambda: all_gather_into_tensor(out, x, group=self.comm)  # noqa: E731
        else:
            call = lambda: all_gather(x, out=out, group=self.comm)  # noqa: E731
        return call, f"rank {self.low} calls {low}, rank {self.high} calls {high}"

    def split_sizes(self):
        sends, recvs = [self.n] * self.size, [self.n] * self.size
        if self.mine:  # the sum stays, as the operator demands
            sends[self.other] += 1
            sends[self.odd] -= 1
            recvs[self.odd] -= 1
            recvs[self.other] += 1
        x, out = np.ones(sum(sends), np.int32), self.output(sum(recvs))
        return lambda: all_to_all_single(out, x, recvs, sends, self.comm), "elements to rank"

    def list_sizes(self):
        xs = [np.ones(self.n + (self.mine and j == self.other), np.int32) for j in range(self.size)]
        outs = [self.output(self.n) for _ in range(self.size)]
        return lambda: all_to_all(outs, xs, self.comm), (
            f"rank {self.odd} sends {self.n + 1} elements to rank {self.other}, which expects {self.n}"
        )

    def gathered_size(self):
        x = np.ones(self.n + self.mine, np.int32)
        out = self.output(x.size * self.size)
        return lambda: all_gather(x, out=out, group=self.comm), "which expects"

    def root(self):
        out = self.output(self.n)
        low, high = self.sees(0, 1)
        return lambda: broadcast(out, 1 if self.mine else 0, group=self.comm), (
            f"rank {self.low} has root {low}, rank {self.high} has root {high}"
        )

    def broadcast_size(self):
        out = self.output(self.n + self.mine)
        return lambda: broadcast(out, 0, group=self.comm), "rank 0 sends"

    def reduce_op(self):
        x, out = np.ones(self.n, np.int32), self.output(self.n)
        low, high = self.sees("sum", "max")
        return lambda: all_reduce(x, "max" if self.mine else "sum", out=out, group=self.comm), (
            f"rank {self.low} reduces with {low}, rank {self.high} reduces with {high}"
        )

    def reduction_size(self):
        n = self.n + 1 if self.mine else self.n
        x, out = np.ones(n, np.int32), self.output(n)
        low, high = self.sees(self.n, self.n + 1)
        return lambda: all_reduce(x, out=out, group=self.comm), (
            f"rank {self.low} has elements: {low}, rank {self.high} has elements: {high}"
        )

    def reduction_one_shot_and_two(self):
        n = 100_000 if self.mine else 10  # the ranks would go different ways
        x, out = np.ones(n, np.int32), self.output(n)
        low, high = self.sees(10, 100_000)
        return lambda: all_reduce(x, out=out, group=self.comm), f"{low}, rank {self.high} has elements: {high}"

    def reduction_dtype(self):
        dtype = np.float64 if self.mine else np.int32
        x, out = np.ones(self.n, dtype), self.output(self.n, dtype)
        low, high = self.sees("int32", "float64")
        return lambda: all_reduce(x, out=out, group=self.comm), (
            f"rank {self.low} has dtype {low}, rank {self.high} has dtype {high}"
        )

    def scattered_counts(self):
        counts = [self.n] * self.size
        if self.mine:
            counts[self.odd] -= 1
            counts[self.other] += 1
        x, out = np.ones(sum(counts), np.int32), self.output(counts[self.comm.rank])
        return lambda: reduce_scatter(x, counts, out=out, group=self.comm), "elements to rank"


DISAGREEMENTS = [name for name in vars(Disagreements) if name[0] != "_" and name not in ("output", "untouched", "sees")]


def disagree(comm, odd: int, n: int) -> list[tuple[str, str, Failure, int, bool]]:
    found = []
    for name in DISAGREEMENTS:
        case = Disagreements(comm, odd, n)
        call, words = getattr(case, name)()
        failure = attempt(call)
        found.append((name, words, failure, last_seq(comm), case.untouched()))
    check_works(comm)
    stats = comm.stats()
    assert stats["failed_operators"] == len(DISAGREEMENTS), stats
    assert comm.usable
    return found


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("size", "odd"),
    [(2, 1), (3, 2), (5, 0), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, 0), (3, 1), (5, 3)))],
)
def test_every_rank_gets_the_same_error(ranks, size, odd, n, threads):
    for cases in zip(*ranks(size, threads=threads)(disagree, odd, n), strict=True):
        name = cases[0][0]
        words = max((words for _, words, *_ in cases), key=len)
        for _, _, failure, seq, untouched in cases:
            assert failure.name == "PeerMismatchError", (name, failure)
            assert failure.code == errors.PeerMismatchError.code
            assert failure.text == cases[0][2].text, name  # word for word on every rank
            assert words in failure.text, name
            assert f"#{seq} " in failure.text, name
            assert failure.text.count("rank ") >= 2, name
            assert untouched, f"{name}: an output was written to before the disagreement was found"


def test_counts_of_single_experts(ranks):
    """The ranks that see the difference tell the others, who could not."""

    def work(comm):
        local = np.full(2 * comm.size, 5)
        global_ = local.copy()
        if comm.rank == 1:  # the sum per card stays
            local[:2] += (1, -1)
        failure = attempt(global_scatter, np.ones((local.sum(), 1)), local, global_, group=comm)
        check_works(comm)
        return failure

    for threads in (False, True):
        found = ranks(3, threads=threads)(work)
        assert {f.name for f in found} == {"PeerMismatchError"}
        assert found[0].text == "rank 1 sends 6 rows to expert 0 of rank 0, which expects 5"
        assert found[1].text == found[2].text
        assert found[1].text.endswith(
            f"global_scatter of domain '{found[1].text.split(chr(39))[1]}' failed on rank 0: {found[0].text}"
        )


@pytest.mark.parametrize("path", ["inline", "push", "pull", "cma", "staged"])
def test_nothing_is_written_over_any_path(ranks, path):
    for cases in zip(*ranks(3, path=path)(disagree, 1, LARGE), strict=True):
        assert {failure.name for _, _, failure, _, _ in cases} == {"PeerMismatchError"}
        assert all(untouched for *_, untouched in cases), cases[0][0]


def test_ranks_of_which_each_says_something_else(ranks):
    def work(comm):
        counts = [10 * (comm.rank + 1)] * comm.size
        out = alltoallv.empty(sum(counts), np.uint8)
        out[:] = 7
        failure = attempt(all_to_all_v, np.zeros(sum(counts), np.uint8), counts, counts, out=out, group=comm)
        assert (out == 7).all()
        check_works(comm)
        return failure

    for threads in (False, True):
        found = ranks(5, threads=threads)(work)
        assert {f.text for f in found} == {found[0].text}
        assert found[0].name == "PeerMismatchError"


def test_asynchronous_calls_disagree_too(ranks):
    def work(comm):
        wrong = comm.rank == 1
        outs, works = [], []
        for k in range(4):  # the second and the fourth are wrong
            n = 6 if wrong and k % 2 else 5
            out = np.full(n * comm.size, -1)
            outs.append(out)
            x, counts = np.full(n * comm.size, k), [n] * comm.size
            works.append(all_to_all_v(x, counts, counts, out=out, group=comm, async_op=True)[1])
        good = [works[0].result(), works[2].result()]
        found = [attempt(works[k].wait) for k in (1, 3)]
        assert all((y == k).all() for y, k in zip(good, (0, 2), strict=True))
        assert all((outs[k] == -1).all() for k in (1, 3))
        assert type(works[1].exception()).__name__ == "PeerMismatchError"
        check_works(comm)
        return found

    for threads in (False, True):
        for k in range(2):
            texts = {found[k].text for found in ranks(3, threads=threads)(work)}
            assert len(texts) == 1
            assert f"#{2 * k + 2} all_to_all_v" in texts.pop()


def faulty_calls(comm):
    """Calls that this rank's own checks refuse, by name; tests/matrix has those of every operator."""
    size, n = comm.size, 4
    x, counts = np.ones(n * size, np.int32), [n] * size
    v = {"group": comm}
    return {
        "counts of a bad type": lambda: all_to_all_v(x, counts, "four", **v),
        "regions that overlap": lambda: all_to_all_v(x, counts, counts, rdispls=[0] * size, **v),
        "output that is the input": lambda: all_to_all_v(x, counts, counts, out=x, **v),
        "output of a bad type": lambda: all_to_all_v(x, counts, counts, out=[0] * 8, **v),
        "input of a bad type": lambda: all_to_all_v(object(), counts, counts, **v),
        "input of objects": lambda: all_to_all_v(np.array([{}] * n * size), counts, counts, **v),
    }


def fail_alone(comm, odd: int) -> list[tuple[str, Failure]]:
    size = comm.size
    x, counts = np.ones(4 * size, np.int32), [4] * size
    found = []
    for name, faulty in faulty_calls(comm).items():
        out = np.full(4 * size, -1, np.int32)
        good = lambda out=out: all_to_all_v(x, counts, counts, out=out, group=comm)  # noqa: E731
        found.append((name, attempt(faulty if comm.rank == odd else good)))
        assert (out == -1).all()
        check_works(comm)
    return found


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
@pytest.mark.parametrize(("size", "odd"), [(2, 0), (3, 2), (5, 1)])
def test_own_checks_fail_the_peers_too(ranks, size, odd, threads):
    for cases in zip(*ranks(size, threads=threads)(fail_alone, odd), strict=True):
        (name, own), peers = cases[odd], [f for rank, (_, f) in enumerate(cases) if rank != odd]
        assert {f.text for f in peers} == {peers[0].text}, name
        for failure in peers:
            assert own.text in failure.text, name
            assert "all_to_all_v of domain" in failure.text, name
            assert f"failed on rank {odd}" in failure.text, name
            # What is not of our family (a TypeError, say) is the peers' InvalidParamError.
            assert failure.name == (own.name if hasattr(errors, own.name) else "InvalidParamError"), name
            assert own.code is None or failure.code == own.code, name


def test_failures_in_a_row_by_changing_ranks(ranks):
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

    for threads in (False, True):
        for k, failures in enumerate(zip(*ranks(3, threads=threads)(work), strict=True)):
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


@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_a_failing_rank_does_not_wait_for_late_peers(ranks, threads, prompt):
    def work(comm):
        x, counts = np.ones(2 * comm.size), [2] * comm.size
        if comm.rank == 1:
            failure = attempt(all_to_all_v, x, [-1] * comm.size, counts, group=comm)
        else:
            time.sleep(1.5)
            failure = attempt(all_to_all_v, x, counts, counts, group=comm)
        check_works(comm)
        return failure

    found = ranks(3, threads=threads)(work)
    assert found[1].at - found[1].began < 1.0
    for peer in (found[0], found[2]):
        assert peer.at > found[1].at
        prompt("a peer failed its checks before", peer.began, peer.at)


def test_failure_behind_pending_calls_keeps_its_place(ranks):
    def work(comm):
        x, counts = np.ones(2 * comm.size), [2] * comm.size
        if comm.rank != 1:
            time.sleep(0.3)
        before = all_to_all_v(x, counts, counts, group=comm, async_op=True)[1]
        sends = [-1] * comm.size if comm.rank == 1 else counts
        began = time.monotonic()
        if comm.rank == 1:
            failure = attempt(all_to_all_v, x, sends, counts, group=comm)
            assert time.monotonic() - began < 0.25, "waited for the call before it"
        else:
            failure = attempt(all_to_all_v, x, sends, counts, group=comm)
        after = all_to_all_v(x, counts, counts, group=comm, async_op=True)[1]
        before.wait()
        after.wait()
        check_works(comm)
        return failure

    for threads in (False, True):
        found = ranks(3, threads=threads)(work)
        assert all("#2 all_to_all_v" in found[rank].text for rank in (0, 2))
        assert found[1].text in found[0].text


@pytest.mark.parametrize(
    "text", ["x" * 2000, "naïve " * 200, "日本語" * 300, "\U0001f980" * 400], ids=["1", "2", "3", "4"]
)
def test_long_texts_are_cut_between_characters(ranks, text):
    def work(comm):
        if comm.rank == 0:
            comm.fail("barrier", ValueError(text))
            return None
        return attempt(barrier, group=comm)

    for threads in (False, True):
        failure = ranks(2, threads=threads)(work)[1]
        assert failure.name == "InvalidParamError"
        _, arrived = failure.text.split("failed on rank 0: ValueError: ")
        assert len(arrived) > 80
        assert text.startswith(arrived)


def test_checking_off_still_announces_failures(ranks):
    def work(comm):
        x, counts = np.ones(2 * comm.size), [2] * comm.size
        failure = attempt(all_to_all_v, x, [-1] * comm.size if comm.rank else counts, counts, group=comm)
        check_works(comm)
        return failure

    found = ranks(2, check="off")(work)
    assert "failed on rank 1" in found[0].text
    assert found[0].at - found[0].began < LIMIT
