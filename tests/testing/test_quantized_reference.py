"""The reference of the quantized operators against its definition in exact arithmetic, and the errors it makes."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from alltoallv.testing import quantized as q
from alltoallv.testing.golden import assert_bits_equal

F32 = np.float32
DTYPES = ("float32", "float16", "bfloat16")
MAX = float(np.finfo(F32).max)


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def rank_data(ranks=8, count=1 << 16, seed=0):
    """N(0, 1) times a log-normal scale per rank."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=ranks))
    return [(rng.normal(size=count) * s).astype(F32) for s in scales]


def relative_error(results, inputs):
    exact = np.sum([x.astype(np.float64) for x in inputs], axis=0)
    return np.linalg.norm(results[0].astype(np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("bits", [8, 4])
def test_every_code_is_the_nearest(bits):
    x = rank_data(1, 5000)[0]
    codes = q.quantize(x, 64, bits)
    most = {8: 127, 4: 7}[bits]
    values = q.codes_of(codes).astype(np.int64)
    assert np.abs(values).max() == most
    assert len(set(values)) > 1.6 * most
    for k in range(0, 5000, 7):
        scale = Fraction(float(codes.scales[k // 64]))
        distance = abs(Fraction(float(x[k])) - values[k].item() * scale)
        assert distance <= scale / 2 * (1 + Fraction(1, 2**14))  # the quotient is rounded before


def test_halves_round_to_even():
    x = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5], F32)
    codes = q.quantize(x)
    assert codes.scales.tolist() == [1.0]
    assert q.codes_of(codes).tolist() == [127, 0, 2, 2, 0, -2, 126]


def test_nibbles_lie_even_element_first_and_groups_begin_at_a_byte():
    codes = q.quantize(np.array([7, -7, 1, 7, 2, -1, -7], F32), group_size=3, bits=4)
    assert [hex(byte) for byte in codes.codes] == ["0x97", "0x1", "0x27", "0xf", "0x9"]
    assert len(codes.codes) == q.code_bytes(7, 3, 4) == 5
    assert q.codes_of(codes).tolist() == [7, -7, 1, 7, 2, -1, -7]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("largest", [MAX, np.nextafter(F32(MAX), F32(0)), 1.0, 3e-38, 2.0**-126])
def test_the_largest_magnitude_keeps_its_sign_and_size(bits, largest):
    codes = q.quantize(np.array([largest, -largest, 0], F32), bits=bits)
    values = q.dequantize(codes)
    # The scale is one rounding away, and at least 2^-125.
    assert values[:2] == pytest.approx([largest, -largest], rel=2e-7, abs=2.0**-126)
    assert np.isfinite(values).all()
    assert values[2] == 0


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -1e-45, float.fromhex("0x1.fffffcp-127")])
def test_zero_and_subnormal_groups_are_zero(value):
    codes = q.quantize(np.full(5, value, F32), group_size=4)
    assert codes.scales.tolist() == [0, 0]
    assert_bits_equal(q.dequantize(codes), np.zeros(5, F32))


@pytest.mark.parametrize("bits", [8, 4])
def test_nan_and_inf_stay_in_their_group(bits):
    x = np.ones(12, F32)
    x[1], x[5], x[6] = np.nan, np.inf, -np.inf
    codes = q.quantize(x, 4, bits)
    assert np.isnan(codes.scales[0])
    assert codes.scales[1] == np.inf
    values = q.dequantize(codes)
    assert np.isnan(values[:4]).all()
    assert values[5:7].tolist() == [np.inf, -np.inf]
    assert np.isnan(values[[4, 7]]).all()
    assert_bits_equal(values[8:], q.dequantize(q.quantize(np.ones(4, F32), 4, bits)))
    for dtype in DTYPES:
        result = q.quantized_all_reduce([x, np.ones(12, F32)], group_size=4, bits=bits, dtype=dtype)[0]
        assert np.isnan(result[:4].astype(F32)).all()
        assert result[5:7].astype(F32).tolist() == [np.inf, -np.inf]
        assert result[8:].astype(F32) == pytest.approx(2, rel=1e-2)


def test_error_feedback_brings_the_mean_to_the_truth():
    inputs = rank_data(4, 512)
    errors = [np.zeros(512, F32) for _ in inputs]
    gather_error = np.zeros(512, F32)
    exact = np.sum([x.astype(np.float64) for x in inputs], axis=0)
    total = np.zeros(512)
    options = {"bits": 4, "group_size": 32, "gather": "quantized"}
    plain = relative_error(q.quantized_all_reduce(inputs, **options), inputs)
    for _ in range(64):
        total += q.quantized_all_reduce(inputs, **options, errors=errors, gather_error=gather_error)[0]
    mean = np.linalg.norm(total / 64 - exact) / np.linalg.norm(exact)
    assert mean < plain / 20  # without feedback it would be `plain` for ever


def test_error_feedback_is_not_poisoned_by_inf():
    error = np.full(4, 0.25, F32)
    q.quantize(np.array([1, np.inf, 1, np.nan], F32), 2, error=error)
    assert error.tolist() == [0, 0, 0, 0]


# Shared scale


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("offset", [0.0, 3.0, -0.625])
def test_shared_scale_against_exact_arithmetic(ranks, per_channel, offset):
    rng = np.random.default_rng(ranks)
    inputs = [rng.integers(-128, 128, (37, 16)).astype(np.int8) for _ in range(ranks)]
    inputs[0][0] = inputs[1][0] = -128
    scale = rng.uniform(-1, 1, 16 if per_channel else 1).astype(np.float16)
    for dtype in DTYPES:
        results = q.shared_scale_all_reduce(inputs, scale, offset, dtype=dtype)
        total = np.sum([x.astype(np.int64) for x in inputs], axis=0) + ranks * offset  # exact in float64
        exact = (total * scale.astype(np.float64)).astype(F32)  # float64 holds the product: one rounding
        assert_bits_equal(results[-1], exact.astype(dtype_of(dtype)))
        error = np.abs(results[0].astype(np.float64) - total * scale.astype(np.float64))
        assert (error <= 2.0**-8 * np.maximum(1, np.abs(exact))).all()


def test_overflow_of_the_output_type():
    x = np.array([100, -100, 1], np.int8)
    scale = np.array([1000], F32)
    assert q.shared_scale_all_reduce([x], scale)[0].tolist() == [65504, -65504, 1000]
    assert q.shared_scale_all_reduce([x], scale, overflow="infinity")[0].tolist() == [np.inf, -np.inf, 1000]
    with pytest.raises(OverflowError, match=r"100000.0 at \(0,\) does not fit into float16"):
        q.shared_scale_all_reduce([x], scale, overflow="raise")
    assert q.shared_scale_all_reduce([x], F32([1e38]), dtype="float32")[0][0] == F32(MAX)
    assert q.shared_scale_all_reduce([x], F32([np.inf]))[0].tolist() == [np.inf, -np.inf, np.inf]
    assert np.isnan(q.shared_scale_all_reduce([x], F32([np.nan]))[0]).all()
    big = np.full(3, 60000, np.float16)
    assert q.quantized_all_reduce([big, big])[0].tolist() == [65504] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_scales(dtype, ranks):
    rng = np.random.default_rng(ranks)
    inputs = [rng.normal(size=(24, 32)).astype(dtype_of(dtype)) for _ in range(ranks)]
    exact = np.sum([x.astype(np.float64) for x in inputs], axis=0)
    scale_1 = (np.max(np.abs(inputs), axis=(0, 1)).astype(F32) / 127).astype(dtype_of(dtype))
    scale_2 = (np.abs(exact).max(axis=0) / 126).astype(dtype_of(dtype))
    results = q.two_scale_all_reduce(inputs, scale_1, scale_2)
    assert results[0].dtype == dtype_of(dtype)
    # Half a step of the first scale per rank, half of the second, rounding of the output, saturation of the largest.
    step = ranks * 0.51 * scale_1.astype(np.float64) + 0.51 * scale_2.astype(np.float64)
    slack = np.abs(exact) * (2.0**-7 if dtype == "bfloat16" else 2.0**-10) * 2
    assert (np.abs(results[0].astype(np.float64) - exact) <= step + slack).all()
    for result in results[1:]:
        assert_bits_equal(result, results[0])
