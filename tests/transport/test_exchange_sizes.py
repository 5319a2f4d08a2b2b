"""Sizes at which the transport changes what it does, and sizes beyond 32 bits."""

from __future__ import annotations

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
    bytes_of,
    counters,
    difference,
    put,
    run_cases,
    total,
)
from on_ranks import mostly_slow

import alltoallv.numpy
from alltoallv import Communicator
from alltoallv.testing import Ranks, golden, reference
from alltoallv.testing.data_path import data_path


def big_cases(size: int, *kinds: tuple[str, int]) -> list[golden.Case]:
    """One case per (dtype, most bytes of a pair)."""
    rng = np.random.default_rng(SEED)
    return [
        golden.random_case(rng, size, dtype, zeros=0.2, max_count=most // golden.dtype_of(dtype).itemsize)
        for dtype, most in kinds
    ]


def run_big_cases(communicator: Communicator, path: str, *kinds: tuple[str, int]) -> Counters:
    return run_cases(communicator, big_cases(communicator.size, *kinds), path)  # too big to be sent to the ranks


@pytest.mark.parametrize("path", PATHS)
def test_large_pieces(launch: Launch, path: str) -> None:
    """Pairs above the ring (256 KiB) and above the chunks that are copied without a look at the peers (1 MiB)."""
    print(f"seed {SEED}")
    for size, kinds in (
        (2, [("int8", 5 << 20), ("complex64", 700 << 10), ("bfloat16", 3 << 20)]),
        (5, [("float64", 700 << 10), ("uint16", 500 << 10), ("bool", 700 << 10)]),
    ):
        cases = big_cases(size, *kinds)
        largest = max(int(case.send_counts.max()) * case.dtype.itemsize for case in cases)
        assert largest > (2 << 20 if size == 2 else 600 << 10)
        moved = total(launch(size, run_big_cases, path, *kinds, path=path))
        check_large(moved, path, cases)


def check_large(moved: Counters, path: str, cases: list[golden.Case]) -> None:
    """A forced path that cannot serve leaves the data to the rings; auto pushes, as the outputs are in the arena."""
    carrier = {"inline": "staged", "auto": "push"}.get(path, path)
    wanted, moved = bytes_of(carrier, cases), as_pushes(moved, path)
    small = moved.pop("bytes_inline", 0) if path in ("inline", "auto") else 0  # a rank that happens to send little
    assert small < wanted[f"bytes_{carrier}"] / 10
    moved[f"bytes_{carrier}"] += small
    assert moved == wanted


def send_uneven(communicator: Communicator, length: int) -> Counters:
    """Every rank sends ``length`` bytes to the others, and 1,000 to itself."""
    size, rank = communicator.size, communicator.rank

    def sends_of(r: int) -> list[int]:
        sends = [length // (size - 1)] * size
        sends[r - 1] += length % (size - 1)
        sends[r] = 1000
        return sends

    x = np.random.default_rng(rank).integers(0, 256, length + 1000, np.uint8)
    before = counters(communicator)
    out = alltoallv.numpy.all_to_all_v(x, sends_of(rank), group=communicator)
    inputs = [np.random.default_rng(r).integers(0, 256, length + 1000, np.uint8) for r in range(size)]
    golden.assert_bits_equal(out, reference.all_to_all_v(inputs, [sends_of(r) for r in range(size)])[rank])
    return difference(counters(communicator), before)


@pytest.mark.parametrize("size", [2, 3])
def test_inline_limit(launch: Launch, size: int) -> None:
    """What a rank sends to others travels with its row up to 16 KiB; one byte more, and it takes another path."""
    for length in (16383, 16384, 16385):
        moved = total(launch(size, send_uneven, length))
        carrier = "bytes_inline" if length <= 16384 else "bytes_push"
        assert moved == {"bytes_self": size * 1000, carrier: size * length}


@pytest.mark.parametrize("path", mostly_slow(["push", "pull", "cma", "staged", "auto"], ["pull", "auto"]))
def test_beyond_the_caches(launch: Launch, path: str) -> None:
    """Ranks that send 32 MiB or more write with streaming stores, here to odd addresses and lengths."""
    n = 20 << 20
    counts = np.array([[n + 13, n + 1], [n + 3, n + 7]])
    assert counts.sum(axis=1).min() >= 32 << 20
    launch(2, exchange_much, counts, path, path=path, timeout=120)


def exchange_much(communicator: Communicator, send_counts: Counts, path: str) -> None:
    rank = communicator.rank
    in_arena, out_arena = PLACES[path]
    recv_counts = send_counts.T
    x = make_bytes(rank, int(send_counts[rank].sum()) + 16, in_arena)
    out = put(np.zeros(int(recv_counts[rank].sum()) + 64, np.uint8), out_arena)
    sdispls, rdispls = [3, 7 + send_counts[rank][0]], [11 + recv_counts[rank][1] + 5, 11]
    before = counters(communicator)
    alltoallv.numpy.all_to_all_v(
        x, send_counts[rank], recv_counts[rank], sdispls=sdispls, rdispls=rdispls, out=out, group=communicator
    )
    moved = difference(counters(communicator), before)
    carrier = "push" if path == "auto" else path
    carried = (send_counts if carrier == "push" else recv_counts)[rank][1 - rank]
    assert moved[f"bytes_{carrier}"] == carried
    covered = np.zeros(out.size, bool)
    for j in range(2):
        theirs = make_bytes(j, int(send_counts[j].sum()) + 16, False)
        begin = [3, 7 + send_counts[j][0]][rank]
        region = slice(rdispls[j], rdispls[j] + recv_counts[rank][j])
        assert np.array_equal(out[region], theirs[begin : begin + recv_counts[rank][j]])
        covered[region] = True
    assert not out[~covered].any()
    assert (~covered).sum() == 64


def make_bytes(seed: int, length: int, in_arena: bool) -> Array:
    words = np.random.default_rng(seed).integers(0, 2**63, length // 8 + 1, np.uint64)
    return put(words.view(np.uint8)[:length], in_arena)


@pytest.mark.parametrize("path", ["cma", "staged", "auto"])
def test_displacements_beyond_32_bits(launch: Launch, path: str) -> None:
    """Arrays of 5 GB of which a few pages are ever touched."""
    launch(2, exchange_far, path, path=path)


def exchange_far(communicator: Communicator, path: str) -> None:
    r = communicator.rank
    length, far = 5_000_000_000, 2**32 + 4321
    n = 20_000  # too much to travel with the row
    x, out = np.empty(length, np.int8), np.empty(length, np.int8)
    x[far : far + n], x[5 : 5 + n] = 10 + r, 20 + r
    out[77 : 77 + n + 1] = out[far - 1 : far + n + 1] = -1
    result = alltoallv.numpy.all_to_all_v(
        x, [n, n], [n, n], sdispls=[far, 5] if r == 0 else [5, far], rdispls=[77, far], out=out, group=communicator
    )
    assert result is out
    assert (out[77 : 77 + n] == (10 if r == 0 else 20)).all()
    assert (out[far : far + n] == (21 if r == 0 else 11)).all()
    assert (out[77 + n], out[far - 1], out[far + n]) == (-1, -1, -1)
    if path != "auto":
        assert counters(communicator)[f"bytes_{path}"] == n


@pytest.mark.slow
def test_count_beyond_31_bits(ranks: Ranks) -> None:
    """One rank sends 2 GiB and a bit to the other, most of it zeros that take no memory at the sender."""
    ranks(2, path="staged", timeout=200, comm_timeout=100)(exchange_much_in_one_piece, "staged")


def exchange_much_in_one_piece(communicator: Communicator, path: str) -> None:
    n = 2**31 + 4097
    if communicator.rank == 0:
        x = np.zeros(n, np.uint8)
        x[:10], x[2**31 - 3 : 2**31 + 3], x[-10:] = 1, 2, 3
        alltoallv.numpy.all_to_all_v(x, [0, n], [0, 0], group=communicator)
    else:
        out = np.empty(n, np.uint8)
        alltoallv.numpy.all_to_all_v(np.empty(0, np.uint8), [0, 0], [n, 0], out=out, group=communicator)
        assert (out[:10] == 1).all()
        assert (out[2**31 - 3 : 2**31 + 3] == 2).all()
        assert (out[-10:] == 3).all()
        assert np.count_nonzero(out) == 26
        assert counters(communicator)[f"bytes_{path}"] == n


def exchange_and_leave(communicator: Communicator, rounds: int) -> None:
    for number in range(rounds):
        with data_path("staged"), Communicator.from_env(f"leave-{number}", timeout=20.0) as brief:
            x = np.full(8 * brief.size, brief.rank)
            out = alltoallv.numpy.all_to_all_v(x, [8] * brief.size, group=brief)
            assert out.tolist() == [j for j in range(brief.size) for _ in range(8)]


def test_leaving_right_after_the_last_byte(ranks: Ranks) -> None:
    """A rank that has put its last bytes into the ring may leave before its peers have taken them."""
    ranks(4)(exchange_and_leave, 100)


def change_ways(communicator: Communicator) -> None:
    """Operators enough for several trials of each way, their data anywhere and of any size; new data each time."""
    size, rank = communicator.size, communicator.rank
    common, own = np.random.default_rng(SEED), np.random.default_rng([SEED, rank])
    noise = common.integers(0, 256, 4 << 20, np.uint8)
    for number in range(80):
        most = int(common.choice([20, 300, 900, 1500])) << 10
        counts = common.integers(0, most // size, (size, size))
        begins = common.integers(0, 1 << 20, size)
        data = [noise[begin : begin + n] for begin, n in zip(begins, counts.sum(axis=1), strict=True)]
        x, out = data[rank], np.full(int(counts[:, rank].sum()), 0xA5, np.uint8)
        if own.random() < 0.3:
            x = alltoallv.empty(x.shape, x.dtype)
            x[:] = data[rank]
        if own.random() < 0.5:
            out = alltoallv.empty(out.shape, out.dtype)
        result = alltoallv.numpy.all_to_all_v(x, counts[rank], counts[:, rank], out=out, group=communicator)
        begins = counts.cumsum(axis=1) - counts
        wanted = [data[r][begins[r, rank] : begins[r, rank] + counts[r, rank]] for r in range(size)]
        assert np.array_equal(result, np.concatenate(wanted)), f"seed {SEED}, operator {number}"


@pytest.mark.parametrize("size", [2, 3])
def test_ways_that_are_timed_against_each_other(launch: Launch, size: int) -> None:
    print(f"seed {SEED}")
    launch(size, change_ways)
