"""Triton's kernels in the formats of floating point against the NumPy reference, bit for bit; interpreted on CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_triton_kernels import DEVICE, F32, to_numpy, to_torch

from alltoallv.errors import InvalidParamError
from alltoallv.quantization.spec import Quantization
from alltoallv.testing import quantized as q
from alltoallv.testing.golden import assert_bits_equal
from alltoallv.testing.quantized_formats import FORMATS, limited_tensor_scale
from alltoallv.torch.engines.kernels import check_format, offers_format, record_bytes, record_views
from alltoallv_triton import launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what is interpreted
FLOATS = {name: how for name, how in FORMATS.items() if not how.is_integer}  # test_triton_kernels has the others
FLOATING = {
    name: how for name, how in FLOATS.items() if offers_format(Quantization(name, how.group_size or 128), launch)
}
WAYS = [
    (name, group)
    for name, how in FLOATING.items()
    for group in ([how.group_size] if how.group_size else [128, 7, 40000])
]


def values(n: int, seed: int) -> Any:
    """Of all magnitudes, with ties and zeros; one group each with inf and NaN where there are enough."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=n) * np.exp(4 * rng.normal(size=n))).astype(F32)
    x[::5] = rng.integers(-64, 64, x[::5].size) / F32(32)
    x[3::17] = np.copysign(F32(0), x[3::17])
    x[40:80] *= F32(1e-36)
    if n > 1000:
        x[300], x[500] = -np.inf, np.nan
    return x


def record_of(how: Quantization, n: int, rows: int = 1) -> Any:
    """Bytes of records, their codes, their scales."""
    records = torch.full((rows, record_bytes(how, n)), 0x55, dtype=torch.uint8, device=DEVICE)
    return record_views(records, how, n)


@pytest.mark.parametrize("name", sorted(FLOATS.keys() - FLOATING.keys()))
def test_formats_of_6_bits_are_refused(name: str) -> None:
    assert FLOATS[name].bits == 6
    with pytest.raises(InvalidParamError, match=f"format is {name}, which this engine does not offer"):
        check_format(Quantization(name, 32), launch)


@pytest.mark.parametrize(("name", "group"), WAYS)
def test_one_vector(name: str, group: int) -> None:
    for n in (1, 16, 33, 3001):
        x, how = values(n, n), Quantization(name, group, overflow="infinity")
        lost = np.linspace(-1, 1, n, dtype=F32)
        for error in (None, lost):
            state = None if error is None else to_torch(error.copy())
            kept = None if error is None else error.copy()
            want = q.quantize(x, group, error=kept, format=name)
            codes, scales = record_of(how, n)
            launch.quantize(to_torch(x), how, codes, scales, state)
            at = f"{name}, groups of {group}, {n} elements"
            assert_bits_equal(to_numpy(scales.contiguous().view(torch.uint8))[0], want.record(), f"scales, {at}")
            assert_bits_equal(to_numpy(codes.contiguous())[0], want.codes, f"codes, {at}")
            if kept is not None:
                assert_bits_equal(to_numpy(state), kept, f"error feedback, {at}")
            out = torch.empty(n, device=DEVICE)
            launch.dequantize(codes, scales, how, out)
            assert_bits_equal(to_numpy(out), q.dequantize(want, overflow="infinity"), f"values, {at}")


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(("name", "group"), WAYS)
def test_sums(name: str, group: int, average: bool) -> None:
    """Of three sources; and quantized again."""
    n, how = 3001, Quantization(name, group, overflow="infinity")
    xs = [values(n, seed) for seed in range(3)]
    wants = [q.quantize(x, group, format=name) for x in xs]
    codes, scales = record_of(how, n, 3)
    for row, x in enumerate(xs):
        launch.quantize(to_torch(x), how, codes[row : row + 1], scales[row : row + 1])
    total = q.dequantize_sum(wants, average)
    out = torch.empty(n, device=DEVICE)
    launch.dequantize_sum(codes, scales, how, out, average=average)
    assert_bits_equal(to_numpy(out), total, f"the sum, {name}")
    tensor = F32(0)
    for want in wants:
        tensor = tensor + want.tensor
    tensor = limited_tensor_scale(tensor / F32(3) if average else tensor)
    again = q.quantize(total, group, format=name, tensor=tensor)
    new_codes, new_scales = record_of(how, n)
    launch.requantize(codes, scales, how, n, new_codes, new_scales, average=average)
    assert_bits_equal(to_numpy(new_scales.contiguous().view(torch.uint8))[0], again.record(), f"scales, {name}")
    assert_bits_equal(to_numpy(new_codes.contiguous())[0], again.codes, f"codes, {name}")


@pytest.mark.parametrize("name", FLOATING)
def test_rows(name: str) -> None:
    """Records of rows, each a vector of its own."""
    rows, length, group = 5, 70, FORMATS[name].group_size or 70
    how, x = Quantization(name, group, overflow="infinity"), values(350, 9)
    codes, scales = record_of(how, length, rows)
    launch.quantize(to_torch(x), how, codes, scales, part=length)
    out = torch.empty(350, device=DEVICE)
    launch.dequantize(codes, scales, how, out, part=length)
    wants = [q.dequantize(q.quantize(row, group, format=name), overflow="infinity") for row in x.reshape(rows, length)]
    assert_bits_equal(to_numpy(out), np.concatenate(wants), name)
