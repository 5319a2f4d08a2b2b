"""The Ascend C kernels on their twin: the bits of the NumPy reference, for every type, size, group and core count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels_on_twin import TYPES, run, struct

from alltoallv.testing import quantized as reference

SHAPES = [(1, 1), (5, 3), (130, 1), (777, 7), (129, 128), (1000, 128), (4096, 32), (8192, 4096), (9000, 5000)]
CASES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Array = np.ndarray[Any, Any]


def values(rng: np.random.Generator, count: int, kind: int, dtype: Any) -> Array:
    """Normal, of all magnitudes, with NaN and infinity, with one infinity, subnormal, or too large for 16 bits."""
    x = rng.standard_normal(count).astype(np.float32)
    with np.errstate(all="ignore"):
        if kind == 1:
            x *= np.exp(20 * rng.standard_normal(count)).astype(np.float32)
        if kind == 2:
            x[rng.integers(count)], x[rng.integers(count)] = np.nan, np.inf
        if kind == 3:
            x[rng.integers(count)] = -np.inf
        if kind == 4:
            x *= np.float32(1e-40)
        if kind == 5:
            x *= np.float32(1e38)
        return x.astype(dtype)


def quantized(x: Array, acl_type: int, group: int, cores: int, seed: int, bits: int) -> tuple[Array, Array]:
    codes = np.full(reference.code_bytes(x.size, group, bits), 0x9D, np.uint8)
    scales = np.full(-(-x.size // group), 7, np.float32)
    tiling = struct(("u8", [x.size, group]), ("u4", [acl_type, bits]))
    run("alltoallv_quantize", cores, x, codes, scales, tiling, seed=seed)
    return codes, scales


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TYPES)
def test_quantize(name: str, bits: int) -> None:
    dtype, acl_type = TYPES[name]
    rng, cases = np.random.default_rng(1), 0
    for count, group in SHAPES:
        for kind in range(6):
            x = values(rng, count, kind, dtype)
            codes, scales = quantized(x, acl_type, group, 1 + cases % 4, cases, bits)
            expected = reference.quantize(x, group, bits)
            assert codes.tobytes() == expected.codes.tobytes(), (count, group, kind)
            assert scales.tobytes() == expected.scales.tobytes(), (count, group, kind)
            cases += 1
    print(f"quantize, {name}, int{bits}: {cases} of {cases} equal")


@CASES
@given(
    st.integers(1, 4000), st.integers(1, 600), st.integers(0, 5), st.integers(1, 6), st.integers(0, 2**32 - 1),
    st.sampled_from([8, 4]),
)  # fmt: skip
def test_quantize_any_size(count: int, group: int, kind: int, cores: int, seed: int, bits: int) -> None:
    x = values(np.random.default_rng(seed), count, kind, np.float32)
    codes, scales = quantized(x, 0, group, cores, seed, bits)
    expected = reference.quantize(x, group, bits)
    assert (codes.tobytes(), scales.tobytes()) == (expected.codes.tobytes(), expected.scales.tobytes())


@pytest.mark.parametrize("bits", [8, 4])
def test_largest_and_least_scales(bits: int) -> None:
    """At the bounds of a scale its product with the largest code must not overflow, nor a quotient be subnormal."""
    most = np.finfo(np.float32).max
    bounds = [most, np.nextafter(most, np.float32(0)), 2.0**-126, 2.0**-125, 2.0**-124, 7 * 2.0**-125, 127 * 2.0**-125]
    x = np.repeat(np.array(bounds, np.float32), 3) * np.tile(np.array([1, -0.5, 0.3], np.float32), len(bounds))
    codes, scales = quantized(x, 0, 3, 2, 0, bits)
    expected = reference.quantize(x, 3, bits)
    assert (codes.tobytes(), scales.tobytes()) == (expected.codes.tobytes(), expected.scales.tobytes())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TYPES)
def test_dequantize_sum(name: str, bits: int) -> None:
    dtype, acl_type = TYPES[name]
    rng, cases = np.random.default_rng(2), 0
    for count, group in SHAPES:
        for ranks in (1, 2, 5):
            for kind in (0, 2, 3, 5):
                average = cases % 2
                sources = [reference.quantize(values(rng, count, kind, np.float32), group, bits) for _ in range(ranks)]
                with np.errstate(all="ignore"):
                    expected = reference.cast(reference.dequantize_sum(sources, bool(average)), dtype)
                codes = np.concatenate([each.codes for each in sources])
                scales = np.concatenate([each.scales for each in sources])
                y = np.full(count, 3, dtype)
                tiling = struct(("u8", [count, group]), ("u4", [ranks, acl_type, 1, average, bits, 0]))
                run("alltoallv_dequantize_sum", 1 + cases % 3, codes, scales, y, tiling, seed=cases)
                assert y.tobytes() == expected.tobytes(), (count, group, ranks, kind, average)
                cases += 1
    print(f"dequantize and sum, {name}, int{bits}: {cases} of {cases} equal")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("scale_name", TYPES)
def test_shared_scale_sum(name: str, scale_name: str) -> None:
    (dtype, acl_type), (scale_dtype, scale_type) = TYPES[name], TYPES[scale_name]
    rng, cases = np.random.default_rng(3), 0
    for rows, channels in ((1, 1), (1000, 1), (3, 5), (40, 33), (2, 5000), (9, 128)):
        for kind in range(4):
            ranks = 1 + cases % 4
            xs = [rng.integers(-128, 128, (rows, channels)).astype(np.int8) for _ in range(ranks)]
            with np.errstate(all="ignore"):
                scale = (rng.standard_normal(channels) * [1, 1e4, 1e38, 1][kind]).astype(np.float32).astype(scale_dtype)
                offset = np.array([rng.standard_normal() * 10]).astype(scale_dtype)
            if kind == 3:
                scale[rng.integers(channels)] = [np.nan, np.inf, -np.inf][rng.integers(3)]
                offset[0] = [offset[0], np.inf][rng.integers(2)]
            expected = reference.shared_scale_all_reduce(xs, scale, offset[0], dtype=name)[0]
            y = np.full(rows * channels, 3, dtype)
            tiling = struct(("u8", [y.size, channels]), ("u4", [ranks, acl_type, scale_type, 1]))
            all_x = np.concatenate([x.reshape(-1) for x in xs])
            run("alltoallv_shared_scale_sum", 1 + cases % 3, all_x, scale, offset, y, tiling, seed=cases)
            assert y.tobytes() == expected.tobytes(), (rows, channels, ranks, kind)
            cases += 1
    print(f"shared scale, {name} with scales of {scale_name}: {cases} of {cases} equal")


@pytest.mark.parametrize("row_bytes", [1, 7, 32, 100, 40_000])
def test_rows(row_bytes: int) -> None:
    rng = np.random.default_rng(row_bytes)
    x = rng.integers(0, 255, (50, row_bytes)).astype(np.uint8)
    index = rng.permutation(60)[:40].astype(np.int32) - 5  # some are outside: those rows are left out

    expected, y = (np.full((40, row_bytes), 9, np.uint8) for _ in range(2))
    inside = (index >= 0) & (index < 50)
    expected[inside] = x[index[inside]]
    run("alltoallv_gather_rows", 3, x, index, y, struct(("u8", [40, row_bytes, 50, 40])))
    assert (y == expected).all()

    expected, y = (np.full((45, row_bytes), 9, np.uint8) for _ in range(2))
    inside = (index >= 0) & (index < 45)
    expected[index[inside]] = x[:40][inside]
    run("alltoallv_scatter_rows", 3, x[:40].copy(), index, y, struct(("u8", [40, row_bytes, 40, 45])))
    assert (y == expected).all()
