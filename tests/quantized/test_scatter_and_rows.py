"""quantized_reduce_scatter and quantized_all_to_all against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_both
from quantized_cases import DTYPES, F32, Launch, normal

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import PeerMismatchError, ValueOverflowError
from alltoallv.testing import quantized as reference
from alltoallv.testing import run_ranks
from alltoallv.testing.golden import assert_bits_equal


def scatter(communicator: Communicator, counts: list[int], tail: tuple[int, ...], dtype: str, **how: Any) -> None:
    r, size = communicator.rank, communicator.size
    n = sum(counts) * int(np.prod(tail))
    inputs = [x.reshape(-1, *tail) for x in normal(np.random.default_rng(n), size, n, dtype)] if n else [
        np.empty((sum(counts), *tail), DTYPES[dtype]) for _ in range(size)
    ]  # fmt: skip
    errors = [np.zeros(x.shape, F32) for x in inputs]
    state = av.ErrorFeedback()
    for _ in range(2):
        wanted = reference.quantized_reduce_scatter(inputs, counts, dtype="float32", errors=errors, **how)[r]
        out = np.full(wanted.shape, 5, F32)
        result = av.quantized_reduce_scatter(
            inputs[r], counts, out=out, out_dtype="float32", error_feedback=state, group=communicator, **how
        )
        assert result is out
        assert_bits_equal(out, wanted)


@pytest.mark.parametrize(("counts", "tail"), [([3, 0, 5], (33,)), ([0, 0, 0], (4,)), ([70_000, 1, 90_001], (3,))])
@pytest.mark.parametrize("bits", [8, 4])
def test_reduce_scatter(launch: Launch, counts: list[int], tail: tuple[int, ...], bits: int) -> None:
    for group_size, op in ((128, "sum"), (1 << 40, "avg")):

        def reduce(communicator: Communicator, group_size: int = group_size, op: str = op) -> None:
            scatter(communicator, counts, tail, "bfloat16", bits=bits, group_size=group_size, op=op)

        launch(3, reduce)


@on_both(3)
def test_reduce_scatter_in_equal_parts(communicator: Communicator) -> None:
    inputs = normal(np.random.default_rng(0), communicator.size, 600)
    result, work = av.quantized_reduce_scatter(inputs[communicator.rank], group=communicator, async_op=True)
    work.wait()
    assert_bits_equal(result, reference.quantized_reduce_scatter(inputs)[communicator.rank])


@settings(max_examples=50)
@given(
    counts=st.integers(1, 4).flatmap(
        lambda size: st.lists(st.lists(st.integers(0, 6), min_size=size, max_size=size), min_size=size, max_size=size)
    ),
    tail=st.sampled_from([(), (1,), (40,), (3, 5), (0,)]),
    bits=st.sampled_from([8, 4]),
    group_size=st.sampled_from([None, 1, 7, 16, 1000]),
    dtype=st.sampled_from(sorted(DTYPES)),
    out_dtype=st.sampled_from(sorted(DTYPES)),
    learns=st.booleans(),
    asynchronous=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_all_to_all_on_threads(
    counts: list[list[int]], tail: tuple[int, ...], bits: int, group_size: int | None, dtype: str, out_dtype: str,
    learns: bool, asynchronous: bool, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    inputs = [rng.normal(size=(sum(row), *tail)).astype(DTYPES[dtype]) for row in counts]
    how: dict[str, Any] = {"bits": bits, "group_size": group_size}
    wanted = reference.quantized_all_to_all(inputs, counts, dtype=out_dtype, **how)

    def exchange(communicator: Communicator) -> None:
        r = communicator.rank
        recvs = None if learns else [row[r] for row in counts]
        result: Any = av.quantized_all_to_all(
            inputs[r], counts[r], recvs, out_dtype=out_dtype, group=communicator, async_op=asynchronous, **how
        )
        if asynchronous:
            result = result[1].result()
        assert result.shape == (sum(row[r] for row in counts), *tail)
        assert_bits_equal(result.reshape(-1), wanted[r].reshape(-1))

    run_ranks(len(counts), exchange, threads=True)


@on_both(3)
def test_dispatch(communicator: Communicator) -> None:
    """Rows as a MoE layer sends them: one scale per row, one exchange of a row's bytes and its scale."""
    r, size = communicator.rank, communicator.size
    rng = np.random.default_rng(4)
    counts = rng.integers(0, 300, (size, size)).tolist()
    inputs = [rng.normal(size=(sum(row), 256)).astype(DTYPES["bfloat16"]) for row in counts]
    before = communicator.stats()
    result: Any = av.quantized_all_to_all(inputs[r], counts[r], group=communicator)
    after = communicator.stats()
    assert_bits_equal(result, reference.quantized_all_to_all(inputs, counts)[r].reshape(result.shape))
    assert after["operators"] - before["operators"] == 1
    moved = communicator.stats()
    sent = sum(moved[key] - before[key] for key in moved if key.startswith("bytes_"))
    assert sent <= sum(sum(row) for row in counts) * (256 + 4)


@on_both(2)
def test_differences_of_rows(communicator: Communicator) -> None:
    r = communicator.rank
    x = np.ones((2, 64), F32)
    both: dict[str, Any] = {"send_counts": [1, 1], "group": communicator}
    with pytest.raises(
        PeerMismatchError, match=r"rank 0 has int8 codes in groups of 64, rank 1 .* groups of 32.*A2A-3009"
    ):
        av.quantized_all_to_all(x, group_size=32 if r else None, **both)
    with pytest.raises(PeerMismatchError, match=r"rank 0 sends 2 rows to rank 1, which expects 1.*A2A-3010"):
        av.quantized_all_to_all(x, [0, 2] if r == 0 else [1, 1], [0, 1] if r == 0 else [1, 1], group=communicator)
    x[0, 0] = 1e6 if r else 1
    with pytest.raises(ValueOverflowError, match=r"a row of the input holds a value that float16 cannot.*A2A-6003"):
        av.quantized_all_to_all(x, overflow="raise", out_dtype="float16", **both)
    result: Any = av.quantized_all_to_all(x, out_dtype="float16", **both)
    assert result[1, 0] == (65504 if r == 0 else 1)


@on_both(3)
def test_ranks_without_rows(communicator: Communicator) -> None:
    """An expert that nobody chose sends nothing; in every grouping that is an ordinary part."""
    for rows in ([2, 1, 0], [0, 0, 3], [0, 0, 0]):
        mine = rows[communicator.rank]
        for group_size in ("tensor", "token", None, 16):
            x = np.full((mine, 2, 16), communicator.rank + 1, F32)
            y = av.quantized_all_to_all(x, [0, mine, 0], group_size=group_size, group=communicator)
            sources = [rank + 1 for rank in range(3) for _ in range(rows[rank])] if communicator.rank == 1 else []
            assert y.shape == (len(sources), 2, 16)
            assert y[:, 0, 0].round(3).tolist() == sources
