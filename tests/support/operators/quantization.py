"""Quantization. The references compute in float32 in the documented order, so that rounding is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import HALVES, Case

from operators.activations import sigmoid
from operators.matmuls import int8, single, whole
from operators.packing import packed

Array = np.ndarray[Any, Any]
INT8, FOUR_BITS, UINT8, INT32 = 1, 16, 13, 14


def integers(values: Array, low: int, high: int, dtype: type[Any] = np.int8) -> Array:
    return np.clip(np.rint(values), low, high).astype(dtype)


def symmetric(x: Array, dim: int | None = -1) -> tuple[Array, Array]:
    """int8 and scales: the largest of a row becomes 127."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(dim, keepdims=True) / np.float32(127)
    return integers(x / scale, -128, 127), scale.reshape(-1) if dim is None else scale.squeeze(dim)


def smoothed(input: Array, smooth_scales: Array, group_index: Array) -> tuple[Array, Array]:
    x = input.astype(np.float32).copy()
    for start, end, scales in zip([0, *group_index[:-1]], group_index, smooth_scales, strict=True):
        x[start:end] *= scales.astype(np.float32)
    return symmetric(x)


def four_bits(input: Array, dst_type: int) -> tuple[Array, Array]:
    x = input.astype(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(7)
    return packed(integers(x / scale, -8, 7)), scale[:, 0]


def asymmetric(input: Array) -> tuple[Array, Array, Array]:
    x = input.astype(np.float32)
    high, low = x.max(-1, keepdims=True), x.min(-1, keepdims=True)
    scale = (high - low) / np.float32(255)
    offset = np.float32(127) - high / scale
    return integers(x / scale + offset, -128, 127), scale[..., 0], offset[..., 0]


def kronecker(x: Array, kronecker_p1: Array, kronecker_p2: Array, clip_ratio: float = 1.0) -> tuple[Array, Array]:
    """Of products that are exact in float32."""
    y = (kronecker_p1 @ (x @ kronecker_p2)).astype(np.float32)
    scale = np.abs(y).max((1, 2)) / np.float32(7 / clip_ratio)
    return packed(integers(y / scale[:, None, None], -8, 7)), scale


def to_transform(r: np.random.Generator, **more: Any) -> dict[str, Any]:
    shapes = {"x": (5, 3, 16), "kronecker_p1": (3, 3), "kronecker_p2": (16, 16)}
    return {name: r.integers(-3, 4, shape).astype(float) for name, shape in shapes.items()} | more


def quantized(input: Array, scales: Array, zero_points: Any, dtype: int, axis: int, div_mode: bool) -> Array:
    x, scales = input.astype(np.float32), scales.astype(np.float32)
    shape = [-1 if axis % 3 == i else 1 for i in range(3)]
    zeros = np.float32(0) if zero_points is None else zero_points.astype(np.float32).reshape(shape)
    made = (x / scales.reshape(shape) if div_mode else x * scales.reshape(shape)) + zeros
    limits = {INT8: (-128, 127, np.int8), UINT8: (0, 255, np.uint8), INT32: (-(2**31), 2**31 - 1, np.int32)}
    return integers(made.astype(np.float64), *limits[dtype])


def to_quantize(dtype: int, axis: int, div_mode: bool, zeros: type[Any] | None) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        size = (2, 3, 4)[axis]
        points = None if zeros is None else r.integers(0, 9, size).astype(zeros)
        return {
            "input": r.normal(size=(2, 3, 4)) * 9, "scales": np.float32(r.uniform(0.1, 2, size)),
            "zero_points": points, "dtype": dtype, "axis": axis, "div_mode": div_mode,
        }  # fmt: skip

    return inputs


def swiglu_quant(
    x: Array, weight_scale: Array, activation_scale: Array, activate_left: bool, quant_mode: int,
    group_index: Array | None = None, quant_scale: Array | None = None, swiglu_mode: int = 0, clamp_limit: float = 7.0,
    glu_alpha: float = 1.702, glu_bias: float = 1.0,
) -> tuple[Array, Array | None]:  # fmt: skip
    """In float64: an exponential of float32 differs by more than rounding, which is one step of int8 at most."""
    counts = [len(x)] if group_index is None else list(group_index)
    rows = np.repeat(weight_scale.astype(np.float64).reshape(len(counts), -1), counts, 0)
    a, b = np.split(x * rows * activation_scale[:, None].astype(np.float64), 2, -1)
    gate, other = (a, b) if activate_left else (b, a)
    values = gate * sigmoid(gate) * other
    if swiglu_mode:  # of the columns of even and odd numbers
        wide = np.stack([a, b], 1).reshape(len(x), -1)
        gate, other = np.minimum(wide[:, ::2], clamp_limit), np.clip(wide[:, 1::2], -clamp_limit, clamp_limit)
        values = gate * sigmoid(glu_alpha * gate) * (other + glu_bias)
    if quant_mode == 0:
        assert quant_scale is not None
        return integers(values / quant_scale.astype(np.float64), -128, 127), None
    scale = np.abs(values).max(-1, keepdims=True) / 127
    return integers(values / scale, -128, 127), scale[:, 0]


def to_swiglu(groups: bool, left: bool, mode: int, **more: Any) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        made: dict[str, Any] = {"group_index": np.array([1, 3], np.int64)} if groups else {}
        if mode == 0:
            made["quant_scale"] = np.float32(r.uniform(0.01, 0.02, 8))
        return {
            "x": r.integers(-9999, 9999, (4, 16)).astype(np.int32), "activate_left": left, "quant_mode": mode,
            "weight_scale": single(r, 2, 16) if groups else single(r, 16),
            "activation_scale": single(r, 4) * 10, **made, **more,
        }  # fmt: skip

    return inputs


def grouped_swiglu(
    x: Array, weight: Any, weight_scale: Any, x_scale: Array, group_list: Array, group_list_type: int
) -> tuple[Array, Array]:
    """In float64, as above; rows behind the last group are zeros."""
    ends = np.cumsum(group_list) if group_list_type else group_list
    results = [np.zeros((len(x), 4), np.int8), np.zeros(len(x))]
    matrices, scales = (np.concatenate([np.atleast_2d(one) for one in given]) for given in (weight, weight_scale))
    for start, end, matrix, scale in zip([0, *ends[:-1]], ends, matrices.reshape(-1, 6, 8), scales, strict=True):
        rows = whole(x[start:end], matrix)
        made = swiglu_quant(rows, scale, x_scale[start:end], True, 1)
        for result, one in zip(results, made, strict=True):
            result[start:end] = one
    return results[0], results[1]


def to_group(one: bool, sizes: bool) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        weight, scale = int8(r, 2, 6, 8), single(r, 2, 8)
        return {
            "x": int8(r, 7, 6), "weight": [weight] if one else list(weight), "x_scale": single(r, 7),
            "weight_scale": [scale] if one else list(scale), "group_list_type": int(sizes),
            "group_list": np.array([2, 3] if sizes else [3, 7], np.int64),
        }  # fmt: skip

    return inputs


CASES = [
    *(
        Case("npu_grouped_matmul_swiglu_quant_v2", to_group(*which), grouped_swiglu, dtypes=("int8",), note=note)
        for note, which in (("ends", (True, False)), ("sizes, rows left over", (False, True)))
    ),
    Case("npu_dynamic_quant", lambda r: {"input": r.normal(size=(2, 3, 8))}, lambda input: symmetric(input),
         exact=True),
    Case("npu_dynamic_quant", lambda r: {"input": np.zeros((2, 3, 8))},
         lambda input: (np.zeros((2, 3, 8), np.int8), np.zeros((2, 3))), exact=True, note="zeros"),
    *(
        Case("npu_dynamic_quant", lambda r, m=mode: {"input": r.normal(size=(3, 8)), "quant_mode": m},
             lambda input, quant_mode, d=dim: symmetric(input, d), exact=True, note=mode)
        for mode, dim in (("perchannel", -2), ("pertensor", None))
    ),
    Case("npu_dynamic_quant", lambda r: {
        "input": r.normal(size=(5, 8)), "smooth_scales": r.uniform(0.5, 2, (2, 8)),
        "group_index": np.array([2, 5], np.int32),
    }, smoothed, exact=True, note="groups"),
    Case("npu_dynamic_quant", lambda r: {"input": r.normal(size=(5, 16)), "dst_type": FOUR_BITS}, four_bits,
         exact=True),
    Case("npu_dynamic_quant_asymmetric", lambda r: {"input": r.normal(size=(2, 3, 8)) + 1}, asymmetric, exact=True),
    *(
        Case("npu_kronecker_quant", lambda r, m=more: to_transform(r, **m), kronecker, dtypes=HALVES, exact=True)
        for more in ({}, {"clip_ratio": 0.5})
    ),
    *(
        Case("npu_quantize", to_quantize(*arguments), quantized, exact=True)
        for arguments in (
            (INT8, 1, True, np.int8), (UINT8, 2, True, np.uint8), (INT32, 0, True, None), (INT8, -1, False, np.float32),
        )
    ),
    Case("npu_anti_quant", lambda r: {"x": int8(r, 3, 8), "scale": single(r, 8), "offset": single(r, 8)},
         lambda x, scale, offset: (x.astype(np.float32) + offset.astype(np.float32)) * scale.astype(np.float32),
         dtypes=("int8",), exact=True),
    *(
        Case("npu_sign_bits_unpack", lambda r, d=dtype: {
            "input": r.integers(256, size=6, dtype=np.uint8), "size": 3, "dtype": d,
        }, lambda input, size, dtype: (np.unpackbits(input, bitorder="little") * 2.0 - 1).reshape(size, -1),
            dtypes=("uint8",), exact=True, note=f"to {name}")
        for name, dtype in (("float16", 5), ("float32", 6))
    ),
    *(
        Case("npu_dequant_swiglu_quant", to_swiglu(*arguments, **more), swiglu_quant, dtypes=("int32",))
        for arguments, more in (
            ((True, False, 1), {}), ((False, True, 1), {}), ((False, False, 0), {}),
            ((True, True, 1), {"swiglu_mode": 1, "clamp_limit": 2.0, "glu_alpha": 1.5, "glu_bias": 0.5}),
        )
    ),
]  # fmt: skip
