"""int8 with a shared scale, and two shared scales: exact, on every rank, on every path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_both
from quantized_cases import DTYPES, F32, Launch, digest, put

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.testing import quantized as reference
from alltoallv.testing import run_ranks
from alltoallv.testing.golden import assert_bits_equal


@on_both(2)
def test_documented_example(communicator: Communicator) -> None:
    """ATB's: 1 to 16 on two ranks, scale 1, offset 0."""
    x = np.arange(1, 17, dtype=np.int8)
    for scale in (1.0, np.ones(1, np.float16), np.ones(16, np.float16)):
        result = av.quantized_all_reduce(x, scale=scale, offset=0, group=communicator)
        assert isinstance(result, np.ndarray)
        assert result.tolist() == list(range(2, 33, 2))


@pytest.mark.parametrize("out_dtype", sorted(DTYPES))
def test_integers_are_exact(launch: Launch, out_dtype: str) -> None:
    """Scale 1 or a power of two: the integer sum itself, of vectors of several pieces; -128 included."""

    def reduce(communicator: Communicator) -> str:
        rng = np.random.default_rng(1)
        inputs = [rng.integers(-128, 128, 900_001).astype(np.int8) for _ in range(communicator.size)]
        # bfloat16 holds integers up to 256
        wanted = np.sum([x.astype(np.int64) for x in inputs], axis=0)
        x = inputs[communicator.rank]
        result = av.quantized_all_reduce(x, scale=0.5, out_dtype=out_dtype, group=communicator)
        assert isinstance(result, np.ndarray)
        assert_bits_equal(result, (wanted * 0.5).astype(F32).astype(DTYPES[out_dtype]))
        return digest(result)

    for size in (2, 4, 8):
        assert len(set(launch(size, reduce))) == 1


@settings(max_examples=60)
@given(
    size=st.integers(1, 6),
    shape=st.one_of(
        st.tuples(st.integers(0, 40), st.integers(0, 70)), st.tuples(st.integers(0, 3), st.integers(1, 40_000))
    ),
    per_channel=st.booleans(),
    out_dtype=st.sampled_from(sorted(DTYPES)),
    scale_dtype=st.sampled_from(sorted(DTYPES)),
    offset=st.sampled_from([None, 0.5, -3.0, 1e3]),
    exponent=st.integers(-20, 15),
    overflow=st.sampled_from(["saturate", "infinity"]),
    shared=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    path=st.sampled_from(["auto", "staged"]),
)
def test_any_shared_scale_on_threads(
    size: int, shape: tuple[int, int], per_channel: bool, out_dtype: str, scale_dtype: str, offset: float | None,
    exponent: int, overflow: Any, shared: bool, seed: int, path: str,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(-128, 128, shape).astype(np.int8) for _ in range(size)]
    with np.errstate(over="ignore"):
        scale = np.ldexp(rng.normal(size=shape[-1] if per_channel else 1), exponent).astype(DTYPES[scale_dtype])
    how: dict[str, Any] = {"overflow": overflow}
    wanted = reference.shared_scale_all_reduce(inputs, scale, offset or 0.0, dtype=out_dtype, **how)

    def reduce(communicator: Communicator) -> None:
        x = put(inputs[communicator.rank], shared)
        result = av.quantized_all_reduce(x, scale=scale, offset=offset, out_dtype=out_dtype, group=communicator, **how)
        assert isinstance(result, np.ndarray)
        assert_bits_equal(result, wanted[communicator.rank])

    run_ranks(size, reduce, threads=True, path=path)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(33, 70), (300, 1000), (0, 5)])
def test_two_scales(launch: Launch, dtype: str, shape: tuple[int, int]) -> None:
    """The form of npu_mm_all_reduce_base, whose scales have the input's dtype."""

    def reduce(communicator: Communicator) -> list[str]:
        rng = np.random.default_rng(2)
        digests = []
        for channels in ((1, 1), (shape[1], shape[1]), (1, shape[1])):
            inputs = [rng.normal(size=shape).astype(DTYPES[dtype]) * 8 for _ in range(communicator.size)]
            one, two = (rng.uniform(0.02, 0.3, n).astype(DTYPES[dtype]) for n in channels)
            [wanted, *_] = reference.two_scale_all_reduce(inputs, one, two)
            result = av.quantized_all_reduce(
                inputs[communicator.rank], comm_quant_scale_1=one, comm_quant_scale_2=two, group=communicator
            )
            assert isinstance(result, np.ndarray)
            assert_bits_equal(result, wanted)
            digests.append(digest(result))
        return digests

    for size in (1, 2, 4):
        for digests in (results := launch(size, reduce)):
            assert digests == results[0]
