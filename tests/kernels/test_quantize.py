"""The CPU kernels of quantization equal their reference bit for bit, on every instruction set of this machine."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alltoallv import _core
from alltoallv.testing import quantized as q
from alltoallv.testing.golden import assert_bits_equal

F32 = np.float32
ISAS = _core.kernel_isas()
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float16", "bfloat16")}
OVERFLOWS = ("saturate", "raise", "infinity")
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-39, 2.0**-126, 65504, 65520, 3.4028234e38, -3.4028234e38]

bits = st.sampled_from([8, 4])
group_sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 2048, 2049, 3000]))
counts = st.one_of(st.integers(0, 300), st.integers(301, 7000))
isas = st.sampled_from(ISAS)
seeds = st.integers(0, 2**32 - 1)
exponents = st.integers(-150, 130)


def some_values(rng, count, dtype, exponent, special):
    """Values around a power of two; with ``special``, some that rules name."""
    with np.errstate(all="ignore"):
        x = np.ldexp(rng.normal(size=count), exponent).astype(F32)
        if special and count:
            x[rng.integers(0, count, 1 + count // 400)] = rng.choice(SPECIAL)
        return x.astype(dtype)


def address(array):
    return array.ctypes.data


def quantize(x, group_size, bits, error, isa):
    codes = np.full(_core.kernel_code_bytes(x.size, bits, group_size), 0xA5, np.uint8)
    scales = np.full(-(-x.size // group_size), -1, F32)
    _core.kernel_quantize(
        bits, group_size, x.dtype.name, address(x), x.size, address(codes), address(scales),
        0 if error is None else address(error), isa,
    )  # fmt: skip
    return q.Quantized(codes, scales, x.size, group_size, bits)


def dequantize_sum(sources, average, isa):
    first = sources[0]
    total = np.full(first.count, -1, F32)
    _core.kernel_dequantize_sum(
        first.bits, first.group_size, [address(s.codes) for s in sources], [address(s.scales) for s in sources],
        first.count, average, address(total), isa,
    )  # fmt: skip
    return total


def expect_result(fits, result, overflow, reference):
    """``reference(overflow)`` raises where the kernel says that a value did not fit."""
    try:
        expected = reference(overflow)
    except OverflowError:
        assert not fits
        expected = reference("saturate")
    else:
        assert fits
    assert_bits_equal(result, expected)


@settings(max_examples=300, deadline=None)
@given(bits, group_sizes, counts, st.sampled_from(sorted(DTYPES)), st.booleans(), st.booleans(), exponents, seeds, isas)
def test_quantize(bits, group_size, count, dtype, feedback, special, exponent, seed, isa):
    rng = np.random.default_rng(seed)
    x = some_values(rng, count, DTYPES[dtype], exponent, special)
    error = some_values(rng, count, F32, exponent - 8, False) if feedback else None
    expected_error = None if error is None else error.copy()
    actual = quantize(x, group_size, bits, error, isa)
    expected = q.quantize(x, group_size, bits, expected_error)
    assert_bits_equal(actual.scales, expected.scales)
    assert_bits_equal(actual.codes, expected.codes)
    assert len(actual.codes) == q.code_bytes(count, group_size, bits)
    if error is not None:
        assert_bits_equal(error, expected_error)


@settings(max_examples=100, deadline=None)
@given(bits, group_sizes, counts, st.integers(1, 9), st.booleans(), st.booleans(), exponents, seeds, isas)
def test_dequantize_sum(bits, group_size, count, ranks, average, special, exponent, seed, isa):
    rng = np.random.default_rng(seed)
    sources = [
        q.quantize(some_values(rng, count, F32, exponent, special and r == 0), group_size, bits) for r in range(ranks)
    ]
    assert_bits_equal(dequantize_sum(sources, average, isa), q.dequantize_sum(sources, average))


@settings(max_examples=200, deadline=None)
@given(
    bits, group_sizes, counts, st.sampled_from(sorted(DTYPES)), st.sampled_from(OVERFLOWS), st.booleans(),
    st.integers(10, 18), seeds, isas,
)  # fmt: skip
def test_dequantize_and_cast(bits, group_size, count, dtype, overflow, special, exponent, seed, isa):
    """Magnitudes around the largest float16."""
    values = some_values(np.random.default_rng(seed), count, F32, exponent, special)
    source = q.quantize(values, group_size, bits)
    out = np.empty(count, DTYPES[dtype])
    fits = _core.kernel_dequantize(
        bits, group_size, dtype, address(source.codes), address(source.scales), count, overflow, address(out), isa
    )
    expect_result(fits, out, overflow, lambda overflow: q.dequantize(source, dtype, overflow))
    if not np.isnan(values).any():  # a cast keeps the payload of a NaN
        fits = _core.kernel_cast(dtype, overflow, address(values), count, address(out), isa)
        expect_result(fits, out, overflow, lambda overflow: q.cast(values, dtype, overflow))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 9), st.one_of(st.integers(1, 70), st.sampled_from([2047, 2048, 3001])), st.integers(0, 70),
    st.booleans(), st.sampled_from(sorted(DTYPES)), st.sampled_from(OVERFLOWS),
    st.sampled_from([0.0, 3.0, -0.625, 1e3]), st.integers(-20, 120), st.booleans(), seeds, isas,
)  # fmt: skip
def test_shared_scale(ranks, channels, rows, per_channel, dtype, overflow, offset, exponent, special, seed, isa):
    rng = np.random.default_rng(seed)
    rows = min(rows, 9000 // channels)
    inputs = [rng.integers(-128, 128, (rows, channels)).astype(np.int8) for _ in range(ranks)]
    scale = some_values(rng, channels if per_channel else 1, F32, exponent, special)
    out = np.empty((rows, channels), DTYPES[dtype])
    fits = _core.kernel_sum_shared_scale(
        dtype,
        [address(x) for x in inputs],
        out.size,
        address(scale),
        scale.size,
        0,
        offset,
        overflow,
        address(out),
        isa,
    )

    def reference(overflow):
        return q.shared_scale_all_reduce(inputs, scale, offset, dtype=dtype, overflow=overflow)[0]

    expect_result(fits, out, overflow, reference)
    if rows > 1:  # a part that begins within a row
        begin = int(rng.integers(1, out.size))
        part = np.empty(out.size - begin, out.dtype)
        _core.kernel_sum_shared_scale(
            dtype, [address(x) + begin for x in inputs], part.size, address(scale), scale.size, begin, offset, overflow,
            address(part), isa,
        )  # fmt: skip
        assert_bits_equal(part, out.reshape(-1)[begin:])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 70), st.booleans(), st.sampled_from(sorted(DTYPES)), seeds, isas)
def test_two_scales(ranks, channels, per_channel, dtype, seed, isa):
    """The three kernels in sequence, as npu_mm_all_reduce_base has them."""
    rng = np.random.default_rng(seed)
    inputs = [some_values(rng, 31 * channels, DTYPES[dtype], 3, True).reshape(31, channels) for _ in range(ranks)]
    n = channels if per_channel else 1
    scale_1, scale_2 = rng.uniform(0.01, 1, (2, n)).astype(DTYPES[dtype])
    wide_1, wide_2 = scale_1.astype(F32), scale_2.astype(F32)
    ratio = wide_1 / wide_2
    codes = [np.empty(x.shape, np.int8) for x in inputs]
    for x, code in zip(inputs, codes, strict=True):
        _core.kernel_quantize_scaled(dtype, address(x), x.size, address(wide_1), n, 0, address(code), isa)
    reduced = np.empty(inputs[0].shape, np.int8)
    _core.kernel_requantize_sum([address(c) for c in codes], reduced.size, address(ratio), n, 0, address(reduced), isa)
    out = np.empty(inputs[0].shape, DTYPES[dtype])
    assert _core.kernel_sum_shared_scale(
        dtype, [address(reduced)], out.size, address(wide_2), n, 0, 0.0, "raise", address(out), isa
    )
    assert_bits_equal(out, q.two_scale_all_reduce(inputs, scale_1, scale_2)[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gather", ["full", "quantized"])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_all_reduce_of_kernels_in_parts(isa, gather, dtype):
    """Parts of any size at group boundaries give the bits of the whole."""
    rng = np.random.default_rng(7)
    inputs = [some_values(rng, 5000, DTYPES[dtype], r, False) for r in range(4)]
    expected = q.quantized_all_reduce(inputs, group_size=32, gather=gather, op="avg")[3]
    parts = []
    for part in (slice(0, 32), slice(32, 4096), slice(4096, 5000)):
        sources = [quantize(np.ascontiguousarray(x[part]), 32, 8, None, isa) for x in inputs]
        total = dequantize_sum(sources, True, isa)
        if gather == "quantized":
            total = dequantize_sum([quantize(total, 32, 8, None, isa)], False, isa)
        out = np.empty(total.size, DTYPES[dtype])
        assert _core.kernel_cast(dtype, "saturate", address(total), total.size, address(out), isa)
        parts.append(out)
    assert_bits_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 128, "float32"), "bits is 5, expected 4 or 8"),
        ((8, 0, "float32"), "group_size is 0, expected at least 1"),
        ((8, 128, "float64"), "dtype is float64, expected float32, float16 or bfloat16"),
        ((8, 128, "float12"), "dtype is 'float12'"),
    ],
)
def test_errors(arguments, message):
    x = np.zeros(8)
    with pytest.raises(Exception, match=message):
        _core.kernel_quantize(*arguments, address(x), 1, address(x), address(x))


def test_an_instruction_set_that_does_not_exist():
    x = np.zeros(8)
    with pytest.raises(Exception, match="isa is 'v9', expected one of"):
        _core.kernel_cast("float16", "saturate", address(x), 1, address(x), "v9")
