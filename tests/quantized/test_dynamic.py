"""The dynamic mode: every rank gets the bits of the NumPy reference, whatever the sizes; errors within their limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cases import DTYPES, F32, Array, Launch, check_all_reduce, digest, expected_all_reduce, normal

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import ValueOverflowError
from alltoallv.quantization.spec import Quantization
from alltoallv.testing import Ranks, run_ranks
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal

INLINE = 16384
KINDS = [(bits, gather, op) for bits in (8, 4) for gather in ("full", "quantized") for op in ("sum", "avg")]


def reductions(size: int, sizes: list[tuple[int, int]], dtype: str, out_dtype: str) -> list[dict[str, Any]]:
    """Arguments of `check_all_reduce` for every kind in every size, with what is expected: made once for all ranks.

    Feedback, and arrays in the arena, with every other.
    """
    made: list[dict[str, Any]] = []
    rng = np.random.default_rng(len(sizes))
    for i, (n, group_size) in enumerate(sizes):
        inputs = normal(rng, size, n, dtype)
        for k, (bits, gather, op) in enumerate(KINDS):
            how = {"bits": bits, "gather": gather, "op": op, "group_size": group_size, "out_dtype": out_dtype}
            how["feedback"] = (i + k + bits // 4) % 2 == 0
            expected = expected_all_reduce(inputs, **how)
            made.append({"inputs": inputs, "shared": k % 3 == 0, "expected": expected, **how})
    return made


def reduce_all(communicator: Communicator, made: list[dict[str, Any]]) -> list[str]:
    return [check_all_reduce(communicator, **arguments) for arguments in made]


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_small_sizes(launch: Launch, dtype: str, out_dtype: str) -> None:
    """In one shot from the mailboxes, and around their limit."""
    sizes = [(0, 128), (1, 128), (3, 1), (127, 128), (129, 128), (1000, 7), (INLINE - 200, 32), (INLINE + 1, 4000)]
    for size in (1, 3):
        made = reductions(size, sizes, dtype, out_dtype)
        for digests in (results := launch(size, reduce_all, made)):
            assert digests == results[0]


def long_vectors(size: int, dtype: str) -> list[tuple[list[Array], dict[str, Any], list[Array], Array, Array]]:
    """Inputs, arguments, error feedback before, that of the gather after, and the result."""
    cases = []
    rng = np.random.default_rng(size)
    # Up to eight times what the scratch holds; parts that are empty; groups as long as a piece and longer.
    sizes = [
        (1_600_001, 1000),
        (500_003, 5000),
        (400_000, 16384),
        (400_001, 16385),
        (900_001, 200_000),
        (9000, 1 << 62),
    ]
    for i, (n, group_size) in enumerate(sizes):
        inputs = normal(rng, size, n, dtype)
        errors = [x.astype(F32) * F32(0.01) for x in inputs]
        for bits, gather, op in KINDS[i % 2 :: 3]:
            how = {"bits": bits, "gather": gather, "op": op, "group_size": group_size}
            before, after = [e.copy() for e in errors], np.zeros(n, F32)
            gather_error = after if gather == "quantized" else None
            result = reference.quantized_all_reduce(inputs, errors=before, gather_error=gather_error, **how)[0]  # type: ignore[arg-type]
            cases.append((inputs, how, errors, after, result))
    return cases


def test_several_pieces() -> None:
    """On threads, to which the vectors need not be sent."""

    def reduce(communicator: Communicator, cases: Any) -> None:
        r, size = communicator.rank, communicator.size
        for inputs, how, errors, after, wanted in cases:
            state = av.ErrorFeedback()
            state.load_state_dict({"error": errors[r], "gather_error": None})
            result = av.quantized_all_reduce(inputs[r], error_feedback=state, group=communicator, **how)
            assert_bits_equal(result, wanted, f"rank {r} of {size}: {how}")
            if how["gather"] == "quantized":
                begin, count = Quantization(group_size=how["group_size"]).part(wanted.size, size, r)
                assert_bits_equal(state.state_dict()["gather_error"], after[begin : begin + count], "of the gather")

    for size in (2, 3):
        run_ranks(size, reduce, long_vectors(size, ("float32", "bfloat16")[size % 2]))


@settings(max_examples=60)
@given(
    size=st.integers(1, 5),
    n=st.one_of(st.integers(0, 600), st.integers(600, 40_000)),
    group_size=st.one_of(st.integers(1, 300), st.integers(300, 50_000)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(sorted(DTYPES)),
    out_dtype=st.sampled_from(sorted(DTYPES)),
    feedback=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    path=st.sampled_from(["auto", "staged"]),
)
def test_any_reduction_on_threads(
    size: int, n: int, group_size: int, kind: Any, dtype: str, out_dtype: str, feedback: bool, seed: int, path: str
) -> None:
    n = min(n, 200 * group_size)  # the reference goes group by group
    inputs = normal(np.random.default_rng(seed), size, n, dtype)
    bits, gather, op = kind
    arguments = {"bits": bits, "gather": gather, "op": op, "group_size": group_size, "out_dtype": out_dtype}
    expected = expected_all_reduce(inputs, feedback, **arguments)  # type: ignore[arg-type]

    def reduce(communicator: Communicator) -> str:
        return check_all_reduce(communicator, inputs, feedback, expected=expected, **arguments)

    assert len(set(run_ranks(size, reduce, threads=True, path=path))) == 1


def special_vector(dtype: str, n: int) -> Array:
    """Groups of 32: NaN, infinities, zeros, subnormals, one value, the largest values, ordinary ones."""
    x = np.random.default_rng(3).normal(size=n).astype(F32)
    largest = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4028234e38}[dtype]
    x[5], x[40], x[70:72] = np.nan, np.inf, (-np.inf, np.nan)
    x[96:128], x[128:160], x[160:192], x[192:224] = 0, 1e-41, 0.3, largest
    x[224], x[256:288] = -largest, -0.0
    return x.astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("n", [320, 40_000])
def test_special_values(launch: Launch, dtype: str, n: int) -> None:
    """NaN and inf stay in their group, finite values beyond the output's range do what is asked."""
    inputs = [special_vector(dtype, n), special_vector(dtype, n)[::-1].copy()]
    cases = []
    for bits, gather, op in KINDS:
        for overflow in ("saturate", "infinity"):
            how: dict[str, Any] = {"bits": bits, "gather": gather, "op": op, "overflow": overflow, "group_size": 32}
            cases.append((how, reference.quantized_all_reduce(inputs, dtype="float16", **how)[0]))

    def reduce(communicator: Communicator) -> None:
        for how, wanted in cases:
            x = inputs[communicator.rank]
            result = av.quantized_all_reduce(x, out_dtype="float16", group=communicator, **how)
            assert_bits_equal(result, wanted)
            assert np.isnan(result[:32]).all()
            assert not np.isnan(result[96:128]).any()

    launch(2, reduce)


@pytest.mark.parametrize("gather", ["full", "quantized"])
@pytest.mark.parametrize("n", [1000, 200_000])
def test_overflow_raises_on_every_rank(launch: Launch, gather: str, n: int) -> None:
    """Only the last element overflows, in the part of one rank; afterwards everything works."""

    def reduce(communicator: Communicator) -> str:
        x = np.ones(n, F32)
        x[-1] = 40_000
        how: dict[str, Any] = {"gather": gather, "out_dtype": "float16", "group": communicator}
        with pytest.raises(
            ValueOverflowError, match=rf"quantized_all_reduce.*to {n - 1} of .*float16 cannot.*A2A-6001"
        ) as caught:
            av.quantized_all_reduce(x, overflow="raise", **how)
        assert isinstance(caught.value, OverflowError)
        assert av.quantized_all_reduce(x, overflow="saturate", **how)[-1] == 65504
        assert av.quantized_all_reduce(x, overflow="infinity", **how)[-1] == np.inf
        parts = [n // 2, n - n // 2, *[0] * (communicator.size - 2)]
        with pytest.raises(ValueOverflowError, match=r"quantized_reduce_scatter.*A2A-6001"):
            av.quantized_reduce_scatter(x, parts, overflow="raise", out_dtype="float16", group=communicator)
        x[-1] = 20_000
        assert av.quantized_all_reduce(x, overflow="raise", **how)[-1] == pytest.approx(
            20_000 * communicator.size, 0.01
        )
        return str(caught.value)

    assert len(set(launch(3, reduce))) == 1


LIMITS = {  # bits, gather, group size: relative L2 error
    (8, "full", 128): 6.6e-3,
    (8, "quantized", 128): 9.3e-3,
    (8, "full", 32): 5.4e-3,
    (8, "quantized", 32): 7.6e-3,
    (4, "quantized", 32): 0.14,
}


def documented_errors() -> dict[tuple[int, str, int], float]:
    """The table of docs/quantization.md."""
    text = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    rows = re.findall(r'^\| int(\d), "(\w+)" \| (\S+) \| (\S+) \| (\S+) \|$', text, re.MULTILINE)
    return {
        (int(bits), gather, group_size): float(value)
        for bits, gather, *values in rows
        for group_size, value in zip((32, 128, 512), values, strict=True)
    }


def test_errors() -> None:
    """N(0, 1) times a log-normal scale per rank, 8 ranks: mean relative L2 error of the sum over several draws."""
    draws = [normal(np.random.default_rng(draw), 8, 1 << 16) for draw in range(6)]
    sums = [np.sum([x.astype(np.float64) for x in inputs], axis=0) for inputs in draws]
    documented = documented_errors()
    assert len(documented) == 12

    found: dict[tuple[int, str, int], float] = {}

    def reduce(communicator: Communicator) -> list[str]:
        digests = []
        for bits, gather, group_size in documented:
            how: dict[str, Any] = {"bits": bits, "group_size": group_size, "gather": gather}
            errors = []
            for inputs, exact in zip(draws, sums, strict=True):
                result = av.quantized_all_reduce(inputs[communicator.rank], group=communicator, **how)
                digests.append(digest(result))
                if communicator.rank == 0:
                    errors.append(np.linalg.norm(result - exact) / np.linalg.norm(exact))
            if communicator.rank == 0:
                found[bits, gather, group_size] = float(np.mean(errors))
        return digests

    results = run_ranks(8, reduce, threads=True)
    print("relative L2 errors", found)
    assert all(result == results[0] for result in results)
    assert found.keys() == documented.keys()
    for case, error in found.items():
        assert error == pytest.approx(documented[case], rel=5e-3), case
        assert error <= LIMITS.get(case, np.inf), case


def test_results_beyond_the_cache(ranks: Ranks) -> None:
    """Of more than 32 MiB, which are written past it; into outputs at an odd place."""
    n = (32 << 20) // 4 + 128

    def reduce(communicator: Communicator) -> None:
        r, size = communicator.rank, communicator.size
        period = normal(np.random.default_rng(3), size, 128 * 999)  # whole groups, so the results repeat too
        out = np.full(n + 3, 7, F32)[3:]
        for gather in ("full", "quantized"):
            wanted = np.resize(reference.quantized_all_reduce(period, gather=gather)[0], n)
            av.quantized_all_reduce(np.resize(period[r], n), gather=gather, out=out, group=communicator)
            assert_bits_equal(out, wanted)
        codes = [np.resize(np.arange(-128, 128, dtype=np.int8) // (j + 1), n) for j in range(size)]
        total = np.sum(codes, axis=0, dtype=np.int32).astype(F32)
        av.quantized_all_reduce(codes[r], scale=0.5, out_dtype="float32", out=out, group=communicator)
        assert_bits_equal(out, total / 2)
        av.all_reduce(codes[r].astype(F32), out=out, group=communicator)
        assert_bits_equal(out, total)

    ranks(2)(reduce)
