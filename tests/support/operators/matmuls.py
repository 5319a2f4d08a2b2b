"""Matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import HALVES, Case

from operators.activations import fast_gelu, gelu, sigmoid
from operators.packing import packed, quant_param

Array = np.ndarray[Any, Any]
CODES = {"float16": 5, "float32": 6, "bfloat16": 15, "int8": 1, "int32": 3}


def int8(r: np.random.Generator, *shape: int) -> Array:
    return r.integers(-128, 128, shape).astype(np.int8)


def single(r: np.random.Generator, *shape: int) -> Array:
    return np.float32(r.uniform(0.001, 0.01, shape))


def whole(x1: Array, x2: Array) -> Array:
    return x1.astype(np.int64) @ x2.astype(np.int64)


def nearest(values: Array) -> Array:
    return np.clip(np.rint(values), -128, 127).astype(np.int8)


def dequantized(total: Array, scale: Array, tokens: Array | None = None, bias: Array | None = None) -> Array:
    """In float32, as documented: times the column's scale, then the row's; a float bias last."""
    result = total.astype(np.float32) * scale.astype(np.float32)
    if tokens is not None:
        result = result * tokens.astype(np.float32)[:, None]
    return result if bias is None else result + bias.astype(np.float32)


def quantized(output: str, **more: Any) -> Any:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        made = {name: make(r) for name, make in more.items()}
        return {"x1": int8(r, 3, 16), "x2": int8(r, 16, 8), "output_dtype": CODES[output], **made}

    return inputs


def quant_matmul(
    x1: Array, x2: Array, output_dtype: int, scale: Array,
    pertoken_scale: Array | None = None, bias: Array | None = None, offset: Array | None = None,
) -> Array:  # fmt: skip
    total = whole(x1, x2)
    if bias is not None and bias.dtype == np.int32:
        total, bias = total + bias, None
    if output_dtype == CODES["int32"]:
        return total
    result = dequantized(total, scale, pertoken_scale, bias)
    return nearest(result + (0 if offset is None else offset.astype(np.float32))) if output_dtype == 1 else result


def parts(ends: Any) -> list[slice]:
    return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def grouped_rows(x: Any, weight: Any, group_list: Any, bias: Any = None, act: Any = None, **_: Any) -> list[Array]:
    if _["group_list_type"] == 2:
        sizes = {group: size for group, size in group_list if size}
        group_list = np.array([sizes.get(group, 0) for group in range(len(group_list))])
    ends = np.cumsum(group_list) if _["group_list_type"] else group_list
    weights = list(weight[0]) if len(weight) == 1 else weight
    biases = [0] * len(weights) if bias is None else (list(bias[0]) if len(bias) == 1 else bias)
    rows = [x[0][part] @ w + b for part, w, b in zip(parts(ends), weights, biases, strict=True)]
    made = np.concatenate(rows)
    made = np.concatenate([made, np.zeros((len(x[0]) - len(made), made.shape[1]))])
    return [act(made) if act else made]


def grouped(r: np.random.Generator, groups: Any, **more: Any) -> dict[str, Any]:
    return {
        "x": [r.normal(size=(7, 6))], "weight": [r.normal(size=(3, 6, 4))], "group_list": np.array(groups, np.int64),
        "split_item": 2, "group_type": 0, "group_list_type": 0, **more,
    }  # fmt: skip


def grouped_int8(r: np.random.Generator, output: str) -> dict[str, Any]:
    scales: dict[str, Any] = {"scale": [single(r, 3, 4)], "per_token_scale": [single(r, 7)]}
    return grouped(r, [2, 0, 5], group_list_type=1, output_dtype=CODES[output]) | {
        "x": [int8(r, 7, 6)], "weight": [int8(r, 3, 6, 4)], **scales,
    }  # fmt: skip


def grouped_int8_reference(x: Any, weight: Any, group_list: Any, scale: Any, per_token_scale: Any, **_: Any) -> Any:
    made = [
        dequantized(whole(x[0][part], w), s, per_token_scale[0][part])
        for part, w, s in zip(parts(np.cumsum(group_list)), weight[0], scale[0], strict=True)
    ]
    return [np.concatenate(made)]


def grouped_int4(r: np.random.Generator, parts: int) -> dict[str, Any]:
    """Scales of columns, or of two groups of the weights' rows; the bias is what makes up for rows less 8, and more."""
    scale = single(r, 3, parts, 8)
    return grouped(r, [2, 0, 5], group_list_type=1, output_dtype=CODES["bfloat16"]) | {
        "x": [int8(r, 7, 6)], "weight": [packed(r.integers(-8, 8, (3, 6, 8)))], "bias": [single(r, 3, 8)],
        "scale": [scale.view(np.uint32).astype(np.int64)], "per_token_scale": [single(r, 7)],
    }  # fmt: skip


def grouped_int4_reference(
    x: Any, weight: Any, group_list: Any, scale: Any, per_token_scale: Any, bias: Any, **_: Any
) -> Any:
    factors = scale[0].astype(np.uint32).view(np.float32).astype(np.float64)
    matrices = unpacked(weight[0]) * np.repeat(factors, 6 // factors.shape[1], 1)
    made = [
        ((x[0][part] - 8.0) @ matrix + added) * per_token_scale[0][part][:, None]
        for part, matrix, added in zip(parts(np.cumsum(group_list)), matrices, bias[0], strict=True)
    ]
    return [np.concatenate(made)]


def transposed_products(x: Array, weight: Array, group_list: Array) -> Array:
    return np.stack([x[part].T @ weight[part] for part in parts(group_list)])


def accumulating(r: np.random.Generator) -> dict[str, Any]:
    return {
        "input": r.normal(size=(2, 5, 4)).astype(np.float32), "x": r.normal(size=(6, 5)),
        "weight": r.normal(size=(6, 4)), "group_list": np.array([2, 6], np.int64),
    }  # fmt: skip


def added(input: Array, x: Array, weight: Array, group_list: Array) -> Array:
    return input + transposed_products(x, weight, group_list)


def weight_quantized(r: np.random.Generator, groups: int = 0, pack: bool = False) -> dict[str, Any]:
    shape = (groups, 8) if groups else (8,)
    weight = r.integers(-8, 8, (16, 8)).astype(np.int8)
    return {
        "x": r.normal(size=(3, 16)), "weight": packed(weight) if pack else weight,
        "antiquant_scale": r.uniform(0.1, 1, shape), "antiquant_offset": r.integers(-4, 4, shape).astype(np.float64),
        "antiquant_group_size": 16 // groups if groups else 0,
    }  # fmt: skip


def unpacked(words: Array) -> Array:
    nibbles = np.stack([(words.astype(np.int64) >> 4 * place) & 15 for place in range(8)], -1)
    return np.where(nibbles > 7, nibbles - 16, nibbles).reshape(*words.shape[:-1], -1)


def weight_quantized_reference(
    x: Array, weight: Array, antiquant_scale: Array, antiquant_offset: Array, antiquant_group_size: int
) -> Array:
    weight = unpacked(weight) if weight.dtype == np.int32 else weight
    if antiquant_group_size:
        antiquant_scale = np.repeat(antiquant_scale, antiquant_group_size, 0)
        antiquant_offset = np.repeat(antiquant_offset, antiquant_group_size, 0)
    return x @ ((weight + antiquant_offset) * antiquant_scale)


ACTS = {1: lambda y: np.maximum(y, 0), 2: lambda y: gelu(y, "tanh"), 4: fast_gelu, 5: lambda y: y * sigmoid(y)}


def batches(input: Array, weight: Array, perm_x1: Any = None, batch_split_factor: int = 1, **_: Any) -> Array:
    y = np.einsum("mbk,bkn->mbn" if perm_x1 == [1, 0, 2] else "bmk,bkn->mbn", input, weight)
    if batch_split_factor == 1:
        return y
    return np.stack([part.reshape(len(y), -1) for part in np.split(y, batch_split_factor, 1)])


CASES = [
    *(
        Case("npu_transpose_batchmatmul", lambda r, s=shape, m=more: {
            "input": r.normal(size=s), "weight": r.normal(size=(4, 6, 5)), **m,
        }, batches, note=note)
        for note, shape, more in (
            ("", (4, 3, 6), {}),
            ("permuted", (3, 4, 6), {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}),
            ("split", (3, 4, 6), {"perm_x1": [1, 0, 2], "batch_split_factor": 2}),
        )
    ),
    *(
        Case("npu_linear", lambda r, b=bias: {
            "input": r.normal(size=(3, 8)), "weight": r.normal(size=(5, 8)),
            **({"bias": r.normal(size=5)} if b else {}),
        }, lambda input, weight, bias=0: input @ weight.T + bias, gradient=("input", "weight", *(["bias"] * bias)),
        runs=("npu_linear_backward",))
        for bias in (False, True)
    ),
    Case("npu_bmmV2",
         lambda r: {"input": r.normal(size=(2, 3, 4)), "mat2": r.normal(size=(2, 4, 5)), "output_sizes": []},
         lambda input, mat2, output_sizes: input @ mat2, gradient=("input", "mat2"),
         runs=("npu_bmm_v2_mat1_backward", "npu_bmm_v2_mat2_backward")),
    *(
        Case("npu_grouped_matmul", lambda r, m=more: grouped(r, **m), grouped_rows, note=note)
        for note, more in {
            "ends": {"groups": [2, 2, 7]},
            "pairs": {"groups": [[0, 2], [2, 4], [0, 0]], "group_list_type": 2},
            "sizes, rows left over": {"groups": [1, 2, 3], "group_list_type": 1},
        }.items()
    ),
    Case("npu_grouped_matmul", lambda r: grouped(r, [3, 4, 7], bias=[r.normal(size=(3, 4))]), grouped_rows,
         note="bias"),
    *(
        Case("npu_grouped_matmul", lambda r, a=number: grouped(r, [3, 4, 7], act_type=a),
             lambda act_type, **known: grouped_rows(**known, act=ACTS[act_type]), note=f"act_type {number}")
        for number in ACTS
    ),
    Case("npu_grouped_matmul", lambda r: {
        "x": [r.normal(size=(2, 3)), r.normal(size=(4, 5))], "weight": [r.normal(size=(3, 6)), r.normal(size=(5, 2))],
        "split_item": 0, "group_type": -1,
    }, lambda x, weight, split_item, group_type: [a @ b for a, b in zip(x, weight, strict=True)], note="matrices"),
    Case("npu_grouped_matmul", lambda r: {
        "x": [r.normal(size=(4, 6))], "weight": [r.normal(size=(6, 5))], "group_list": np.array([2, 6], np.int64),
        "split_item": 3, "group_type": 2,
    }, lambda x, weight, group_list, **_: [transposed_products(x[0].T, weight[0], group_list)], note="columns"),
    *(
        Case("npu_grouped_matmul", lambda r, o=output: grouped_int8(r, o), grouped_int8_reference, dtypes=("int8",),
             exact=True, note=f"int8 to {output}")
        for output in ("float16", "bfloat16")
    ),
    *(
        Case("npu_grouped_matmul", lambda r, n=number: grouped_int4(r, n), grouped_int4_reference, dtypes=("int4",),
             note=f"{number} scales of a column")
        for number in (1, 2)
    ),
    Case("npu_grouped_matmul.List", lambda r: {
        "x": [r.normal(size=(7, 6))], "weight": [r.normal(size=(6, 4)), r.normal(size=(6, 4))], "group_list": [3, 7],
        "split_item": 3, "group_list_type": 0,
    }, lambda **known: grouped_rows(**known)),
    Case("npu_grouped_matmul_add", accumulating, added, dtypes=HALVES),
    Case("npu_grouped_matmul_add_", accumulating, lambda **known: [added(**known)] * 2, dtypes=HALVES,
         writes=("input",)),
    *(
        Case("npu_quant_matmul", quantized(output, scale=scale, **more), quant_matmul, dtypes=("int8",), exact=True,
             note=f"to {output}")
        for output, scale, more in (
            ("float16", lambda r: single(r, 8), {"pertoken_scale": lambda r: single(r, 3)}),
            ("bfloat16", lambda r: single(r, 1), {"bias": lambda r: r.integers(-99, 99, 8).astype(np.int32)}),
            ("bfloat16", lambda r: single(r, 8),
             {"bias": lambda r: single(r, 8), "pertoken_scale": lambda r: single(r, 3)}),
            ("int8", lambda r: single(r, 8), {"offset": lambda r: np.float32(r.normal(size=8) * 9)}),
            ("int32", lambda r: single(r, 8), {"bias": lambda r: r.integers(-99, 99, 8).astype(np.int32)}),
        )
    ),
    Case("npu_quant_matmul", lambda r: {
        "x1": int8(r, 3, 16), "x2": int8(r, 16, 8), "scale": quant_param(single(r, 8), np.arange(8.0) - 4),
    }, lambda x1, x2, scale: nearest(dequantized(
        whole(x1, x2), (scale & 0xFFFFFFFF).astype(np.uint32).view(np.float32)) + np.arange(8, dtype=np.float32) - 4
    ), dtypes=("int8",), exact=True, note="scale and offset of npu_trans_quant_param"),
    Case("npu_quant_matmul", lambda r: {
        "x1": packed(r.integers(-8, 8, (3, 16))), "x2": packed(r.integers(-8, 8, (16, 8))), "scale": single(r, 8),
        "pertoken_scale": single(r, 3), "output_dtype": CODES["float16"],
    }, lambda x1, x2, scale, pertoken_scale, output_dtype: dequantized(
        whole(unpacked(x1), unpacked(x2)), scale, pertoken_scale
    ), dtypes=("four bits",), exact=True),
    *(
        Case("npu_weight_quant_batchmatmul", lambda r, g=groups, p=pack: weight_quantized(r, g, p),
             weight_quantized_reference, dtypes=HALVES, note="four bits" if pack else "int8")
        for groups, pack in ((0, False), (2, False), (2, True))
    ),
    Case("npu_dequant_bias", lambda r: {
        "x": r.integers(-9999, 9999, (3, 8)).astype(np.int32), "weight_scale": single(r, 8),
        "activation_scale": single(r, 3), "bias": None,
    }, lambda x, weight_scale, activation_scale, bias: dequantized(x, weight_scale, activation_scale),
        dtypes=("int32",), exact=True),
]  # fmt: skip
