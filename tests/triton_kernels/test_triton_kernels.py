"""The Triton kernels equal the reference bit for bit: on a GPU if there is one, else interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alltoallv import _core
from alltoallv.quantization.spec import Overflow, Quantization
from alltoallv.testing import quantized as q
from alltoallv.testing.golden import assert_bits_equal, dtype_of
from alltoallv_triton import launch
from alltoallv_triton.tiles import pieces_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32 = np.float32
NAMES = ("float32", "float16", "bfloat16")
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-39, 2.0**-126, 65504, 65520, 3.4028234e38, -3.4028234e38]
SLACK = 5  # elements and bytes around what a kernel may write

bits = st.sampled_from([8, 4])
group_sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 2048, 3000, 1 << 40]))
counts = st.one_of(st.integers(0, 300), st.integers(301, 7000))
names = st.sampled_from(NAMES)
overflows = st.sampled_from(["saturate", "raise", "infinity"])
seeds = st.integers(0, 2**32 - 1)
exponents = st.integers(-150, 130)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what is interpreted

Array = npt.NDArray[Any]


def some_values(rng: np.random.Generator, count: int, name: str, exponent: int, special: bool) -> Array:
    """Values around a power of two; with ``special``, some that rules name."""
    with np.errstate(all="ignore"):
        x = np.ldexp(rng.normal(size=count), exponent).astype(F32)
        if special and count:
            x[rng.integers(0, count, 1 + count // 400)] = rng.choice(SPECIAL)
        return x.astype(dtype_of(name))


def to_torch(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=DEVICE)
    data = torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).to(DEVICE)
    return data.view(getattr(torch, array.dtype.name)).view(array.shape)


def to_numpy(tensor: torch.Tensor) -> Array:
    flat = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat.view(dtype_of(str(tensor.dtype).removeprefix("torch."))).reshape(tensor.shape)


def quantize(x: Array, how: Quantization, error: Array | None = None) -> q.Quantized:
    codes = torch.full((1, how.code_bytes(x.size) + SLACK), 0x25, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((1, how.groups(x.size) + SLACK), -1.0, device=DEVICE)
    state = None if error is None else to_torch(error)
    launch.quantize(to_torch(x), how, codes, scales, state)
    if error is not None:
        assert state is not None
        error[...] = to_numpy(state)
    assert (codes[:, -SLACK:] == 0x25).all()
    assert (scales[:, -SLACK:] == -1).all()
    return q.Quantized(to_numpy(codes)[0, :-SLACK], to_numpy(scales)[0, :-SLACK], x.size, how.group_size, how.format)


def core_quantize(x: Array, how: Quantization) -> tuple[Array, Array]:
    """The C++ kernel's codes and scales."""
    codes, scales = np.zeros(how.code_bytes(x.size), np.uint8), np.zeros(how.groups(x.size), F32)
    addresses = (x.ctypes.data, x.size, codes.ctypes.data, scales.ctypes.data)
    _core.kernel_quantize(how.format, how.group_size, x.dtype.name, *addresses)
    return codes, scales


def expect_result(
    overflows: torch.Tensor | None, result: Array, overflow: Overflow, reference: Callable[[Any], Array]
) -> None:
    """``reference(overflow)`` raises where the kernel says that a value did not fit."""
    assert (overflows is not None) == (overflow == "raise")
    try:
        expected = reference(overflow)
    except OverflowError:
        assert overflows is not None
        assert overflows.item() == 1
        expected = reference("saturate")
    else:
        assert overflows is None or overflows.item() == 0
    assert_bits_equal(result, expected)


@settings(max_examples=120)
@given(bits, group_sizes, counts, names, st.booleans(), st.booleans(), exponents, seeds)
def test_quantize(bits, group_size, count, name, feedback, special, exponent, seed):
    rng = np.random.default_rng(seed)
    how = Quantization(f"int{bits}", group_size)
    if feedback:  # of two subnormal terms a processor that flushes makes nothing, another a normal sum
        exponent = max(exponent, -90)
    x = some_values(rng, count, name, exponent, special)
    error = some_values(rng, count, "float32", exponent - 8, False) if feedback else None
    expected_error = None if error is None else error.copy()
    actual = quantize(x, how, error)
    expected = q.quantize(x, group_size, bits, expected_error)
    assert_bits_equal(actual.scales, expected.scales)
    assert_bits_equal(actual.codes, expected.codes)
    if error is not None:
        assert_bits_equal(error, expected_error)
    elif count:
        codes, scales = core_quantize(x, how)
        assert_bits_equal(actual.codes, codes)
        assert_bits_equal(actual.scales, scales)


def stacked(sources: list[q.Quantized]) -> tuple[torch.Tensor, torch.Tensor]:
    """One row per source, rows apart."""
    codes = to_torch(np.stack([np.append(s.codes, np.zeros(3, np.uint8)) for s in sources]))
    return codes, to_torch(np.stack([np.append(s.scales, F32(-1)) for s in sources]))


@settings(max_examples=80)
@given(bits, group_sizes, counts, st.integers(1, 5), st.booleans(), names, overflows, st.booleans(), exponents, seeds)
def test_dequantize_sum(bits, group_size, count, ranks, average, name, overflow, special, exponent, seed):
    rng = np.random.default_rng(seed)
    values = [some_values(rng, count, "float32", exponent, special and r == 0) for r in range(ranks)]
    sources = [q.quantize(x, group_size, bits) for x in values]
    out = torch.full((count + SLACK,), 3.0, dtype=getattr(torch, name), device=DEVICE)
    how = Quantization(f"int{bits}", group_size, overflow=overflow)
    overflows = launch.dequantize_sum(*stacked(sources), how, out[:count], average=average)
    assert (out[count:] == 3).all()
    total = q.dequantize_sum(sources, average)
    expect_result(overflows, to_numpy(out[:count]), overflow, lambda overflow: q.cast(total, name, overflow))


@settings(max_examples=50)
@given(bits, group_sizes, counts, st.integers(1, 4), st.booleans(), st.booleans(), exponents, seeds)
@example(8, 1, 1, 1, False, False, 127, 3)  # an infinite scale beside columns without elements
def test_requantize(bits, group_size, count, ranks, average, feedback, exponent, seed):
    rng = np.random.default_rng(seed)
    sources = [q.quantize(some_values(rng, count, "float32", exponent, False), group_size, bits) for _ in range(ranks)]
    how = Quantization(f"int{bits}", group_size)
    error = some_values(rng, count, "float32", exponent - 8, False) if feedback else None
    state = None if error is None else to_torch(error)
    codes = torch.zeros(how.code_bytes(count), dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(how.groups(count), device=DEVICE)
    launch.requantize(*stacked(sources), how, count, codes[None], scales[None], average=average, error=state)
    expected = q.quantize(q.dequantize_sum(sources, average), group_size, bits, error)
    assert_bits_equal(to_numpy(codes), expected.codes)
    assert_bits_equal(to_numpy(scales), expected.scales)
    if error is not None:
        assert state is not None
        assert_bits_equal(to_numpy(state), error)


@settings(max_examples=50)
@given(bits, group_sizes, st.integers(1, 300), st.integers(1, 7), names, seeds)
def test_parts(bits, group_size, part, parts, name, seed):
    """Every part is quantized as a vector of its own, in records that lie apart; and comes back."""
    rng = np.random.default_rng(seed)
    how = Quantization(f"int{bits}", group_size)
    count = max(part * parts - int(rng.integers(0, part)), 1)
    x = some_values(rng, count, name, 0, False)
    codes = torch.zeros((parts, how.code_bytes(part) + 7), dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros((parts, how.groups(part) + 2), device=DEVICE)
    launch.quantize(to_torch(x), how, codes, scales, part=part)
    out = torch.empty(count, dtype=getattr(torch, name), device=DEVICE)
    launch.dequantize(codes, scales, how, out, part=part)
    for p in range(parts):
        expected = q.quantize(x[p * part : (p + 1) * part], group_size, bits)
        assert_bits_equal(to_numpy(codes)[p, : len(expected.codes)], expected.codes)
        assert_bits_equal(to_numpy(scales)[p, : len(expected.scales)], expected.scales)
        assert_bits_equal(to_numpy(out)[p * part : (p + 1) * part], q.dequantize(expected, name))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [129, 250])
def test_groups_longer_than_a_tile(monkeypatch, bits, group_size):
    monkeypatch.setitem(launch.TILINGS, DEVICE, launch.Tiling(128, 128, 1 << 30))
    rng = np.random.default_rng(3)
    how = Quantization(f"int{bits}", group_size)
    xs = [some_values(rng, 2 * group_size + 77, "float32", 0, False) for _ in range(3)]
    xs[0][group_size] = np.inf
    errors = [some_values(rng, x.size, "float32", -8, False) for x in xs]
    actual_errors = [error.copy() for error in errors]
    expected = [q.quantize(x, group_size, bits, e) for x, e in zip(xs, errors, strict=True)]
    actual = [quantize(x, how, e) for x, e in zip(xs, actual_errors, strict=True)]
    for a, e in zip(actual, expected, strict=True):
        assert_bits_equal(a.codes, e.codes)
        assert_bits_equal(a.scales, e.scales)
    for a, e in zip(actual_errors, errors, strict=True):
        assert_bits_equal(a, e)
    out = torch.empty(xs[0].size, dtype=torch.float16, device=DEVICE)
    launch.dequantize_sum(*stacked(expected), how, out)
    total = q.dequantize_sum(expected)
    assert_bits_equal(to_numpy(out), q.cast(total, "float16"))
    codes = torch.zeros(how.code_bytes(out.numel()), dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(how.groups(out.numel()), device=DEVICE)
    launch.requantize(*stacked(expected), how, out.numel(), codes[None], scales[None])
    again = q.quantize(total, group_size, bits)
    assert_bits_equal(to_numpy(codes), again.codes)
    assert_bits_equal(to_numpy(scales), again.scales)


@pytest.mark.parametrize("bits", [8, 4])
def test_grids_are_bounded_by_the_vector(monkeypatch, bits):
    """Groups that are longer than the vector are no more work."""
    grids: list[int] = []
    launched = launch._launch

    def noted(kernel: Any, tiles: int, *arguments: Any, **constants: Any) -> None:
        grids.append(tiles)
        launched(kernel, tiles, *arguments, **constants)

    monkeypatch.setattr(launch, "_launch", noted)
    how = Quantization(f"int{bits}", 1 << 40)
    x = some_values(np.random.default_rng(5), 500, "float32", 0, False)
    source = quantize(x, how)
    out = torch.empty(500, device=DEVICE)
    launch.dequantize_sum(*stacked([source, source]), how, out)
    codes, scales = torch.zeros((1, 500), dtype=torch.uint8, device=DEVICE), torch.zeros((1, 1), device=DEVICE)
    launch.requantize(*stacked([source, source]), how, 500, codes, scales)
    assert grids == [1] * 4
    assert_bits_equal(to_numpy(out), q.dequantize_sum([source, source]))


@triton.jit
def _number_of_pieces(out, count, size):
    tl.store(out, pieces_of(count, size))


@pytest.mark.parametrize(("count", "size"), [(3 << 29, 3 << 29), ((1 << 31) - 1, 4096), (5 << 40, 3 << 30), (1, 128)])
def test_number_of_pieces(count, size):
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _number_of_pieces[(1,)](out, count, size)
    assert out.item() == triton.cdiv(count, size)


@pytest.mark.skipif(
    DEVICE == "cpu" or torch.cuda.get_device_properties(0).total_memory < 16 << 30, reason="needs a GPU with 16 GiB"
)
@pytest.mark.parametrize("group_size", [128, 1 << 40])
@pytest.mark.parametrize("count", [3 << 29, (1 << 31) + 77], ids=["twice the count", "the count"])
def test_more_than_an_int32_counts(count, group_size):
    x = torch.zeros(count, dtype=torch.float16, device=DEVICE)
    x[0], x[-1] = -0.5, 1.0
    how = Quantization("int8", group_size)
    codes = torch.full((1, count), 3, dtype=torch.uint8, device=DEVICE)
    scales = torch.empty((1, how.groups(count)), device=DEVICE)
    launch.quantize(x, how, codes, scales)
    x.fill_(7)
    launch.dequantize(codes, scales, how, x)
    assert x[-1] == 1
    assert abs(x[0] + 0.5) < 0.005
    assert not x[1:-1].any()


@settings(max_examples=60)
@given(
    st.integers(1, 6), st.integers(1, 300), st.integers(0, 40), st.booleans(), names, overflows,
    st.sampled_from([0.0, 3.0, -0.625, 1e3, 3e38]), st.integers(-20, 120), st.booleans(), seeds,
)  # fmt: skip
def test_shared_scale(ranks, channels, rows, per_channel, name, overflow, offset, exponent, special, seed):
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(-128, 128, (rows, channels)).astype(np.int8) for _ in range(ranks)]
    scale = some_values(rng, channels if per_channel else 1, "float32", exponent, special)
    out = torch.empty(rows * channels, dtype=getattr(torch, name), device=DEVICE)
    stack = to_torch(np.stack(inputs).reshape(ranks, -1))
    overflows = launch.sum_shared_scale(stack, to_torch(scale), torch.tensor([offset], device=DEVICE), out, overflow)

    def reference(overflow: Overflow) -> Array:
        return q.shared_scale_all_reduce(inputs, scale, offset, dtype=name, overflow=overflow)[0].reshape(-1)

    expect_result(overflows, to_numpy(out), overflow, reference)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 70), st.booleans(), names, seeds)
def test_two_scales(ranks, channels, per_channel, name, seed):
    """The three kernels in sequence, as npu_mm_all_reduce_base has them."""
    rng = np.random.default_rng(seed)
    inputs = [some_values(rng, 31 * channels, name, 3, True).reshape(31, channels) for _ in range(ranks)]
    n = channels if per_channel else 1
    scale_1, scale_2 = rng.uniform(0.01, 1, (2, n)).astype(dtype_of(name))
    wide_1, wide_2 = scale_1.astype(F32), scale_2.astype(F32)
    codes = torch.zeros((ranks, 31 * channels), dtype=torch.int8, device=DEVICE)
    for x, code in zip(inputs, codes, strict=True):
        launch.quantize_scaled(to_torch(x).view(-1), to_torch(wide_1), code)
    reduced = torch.zeros((1, 31 * channels), dtype=torch.int8, device=DEVICE)
    launch.requantize_sum(codes, to_torch(wide_1 / wide_2), reduced[0])
    out = torch.empty(31 * channels, dtype=getattr(torch, name), device=DEVICE)
    launch.sum_shared_scale(reduced, to_torch(wide_2), torch.zeros(1, device=DEVICE), out)
    assert_bits_equal(to_numpy(out).reshape(31, channels), q.two_scale_all_reduce(inputs, scale_1, scale_2)[0])


def test_import_brings_no_triton() -> None:
    import subprocess
    import sys

    code = "import sys, alltoallv; assert 'triton' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
