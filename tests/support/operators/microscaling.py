"""Numbers of mx and of float8. The references know a format by its numbers, and go through blocks one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import FLOATS, HALVES, Bits, Case

from operators.activations import sigmoid
from operators.matmuls import CODES, parts, single

Array = np.ndarray[Any, Any]
E5M2, E4M3, E8M0, E2M1, E1M2 = 291, 292, 293, 296, 297  # the device's numbers of dtypes
NAMES = {E5M2: "float8_e5m2", E4M3: "float8_e4m3fn"}


def numbers(exponent: int, mantissa: int, bias: int) -> Array:
    """A format's numbers without a sign, by code."""
    steps = 2**mantissa
    return np.array(
        [
            (code % steps / steps + (code >= steps)) * 2.0 ** (max(code // steps, 1) - bias)
            for code in range(2**exponent * steps)
        ]
    )


POSITIVE = {
    E5M2: numbers(5, 2, 15)[:-4], E4M3: numbers(4, 3, 7)[:-1], E2M1: numbers(2, 1, 1), E1M2: numbers(1, 2, 1),
}  # fmt: skip
LARGEST = {E5M2: 57344.0, E4M3: 448.0, E2M1: 6.0, E1M2: 1.75}


def nearest_codes(x: Array, kind: int) -> Array:
    """The codes without their signs; of two that are as near the even one."""
    distance = np.abs(np.append(POSITIVE[kind], np.inf) - np.abs(x)[..., None])
    code = distance.argmin(-1)  # of two the lower
    here, above = (np.take_along_axis(distance, one[..., None], -1)[..., 0] for one in (code, code + 1))
    return code + ((code % 2 == 1) & (here == above))


def rounded(x: Array, kind: int) -> Array:
    return np.where(np.signbit(x), -1.0, 1.0) * POSITIVE[kind][nearest_codes(x, kind)]


def pairs(x: Array, kind: int) -> Array:
    """Numbers of four bits as bytes, of two neighbours the first in the lower half."""
    code = nearest_codes(x, kind) + 8 * np.signbit(x)
    return (code[..., ::2] + 16 * code[..., 1::2]).astype(np.uint8)


def mx(x: Array, kind: int, block: int = 32, up: bool = False) -> tuple[Array, Array]:
    """The numbers of rows, each block divided by its scale and rounded, and the scales' bytes, an even number."""
    count = -(-x.shape[-1] // block)
    values, scales = np.zeros(x.shape), np.zeros((*x.shape[:-1], count + count % 2), np.uint8)
    emax = int(np.floor(np.log2(LARGEST[kind])))
    for place in np.ndindex(*x.shape[:-1], count):
        own = (*place[:-1], slice(place[-1] * block, (place[-1] + 1) * block))
        top = np.abs(x[own]).max()
        exponent = np.ceil(np.log2(top / LARGEST[kind])) if up else np.floor(np.log2(top)) - emax if top else -127.0
        scales[place] = max(exponent, -127) + 127
        values[own] = rounded(x[own] / 2.0 ** max(exponent, -127), kind)
    return values, scales.reshape(*x.shape[:-1], -1, 2)


def dynamic(input: Array, dst_type: int, axis: int, block_size: int = 32, scale_alg: int = 0) -> tuple[Array, Array]:
    values, scales = mx(np.moveaxis(input, axis, -1), dst_type, block_size, scale_alg == 1)
    values = np.moveaxis(values, -1, axis)
    return values if dst_type in NAMES else pairs(values, dst_type), np.moveaxis(scales, -2, axis % input.ndim)


def to_scale(dst_type: int, axis: int = -1, shape: tuple[int, ...] = (2, 70), **more: Any) -> Case:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        x = r.normal(size=shape) * 2.0 ** r.integers(-20, 10, (*shape[:-1], 1))
        x[0] = 0 if more.get("scale_alg") != 1 else x[0]
        return {"input": x, "dst_type": dst_type, "axis": axis, **more}

    return Case("npu_dynamic_mx_quant", inputs, dynamic, exact=True)


def coded(r: np.random.Generator, kind: int, *shape: int) -> Any:
    """Random numbers of a format: of four bits their bytes, half as many along the last dimension."""
    if kind not in NAMES:
        return r.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    code = r.integers(0, len(POSITIVE[kind]) // 2, shape) + 128 * r.integers(0, 2, shape)
    return Bits(code.astype(np.uint8), NAMES[kind])


def values_of(x: Array, kind: int) -> Array:
    """The numbers of a tensor, which is float64 if it has eight bits."""
    if kind in NAMES:
        return x
    table = np.concatenate([POSITIVE[kind], -POSITIVE[kind]])
    return np.stack([table[x & 15], table[x >> 4]], -1).reshape(*x.shape[:-1], -1)


def scales(r: np.random.Generator, *shape: int) -> Array:
    return r.integers(120, 130, shape).astype(np.uint8)


def multiplied(x: Array, kind: int, scale: Array) -> Array:
    """Rows of numbers times their scales [rows, n / 64, 2]."""
    made = values_of(x, kind).copy()
    for row, column in np.ndindex(made.shape):
        made[row, column] *= 2.0 ** (int(scale[row].reshape(-1)[column // 32]) - 127)
    return made


def names_of(kinds: tuple[int, int], first: str, second: str) -> dict[str, int]:
    return {f"{name}_dtype": kind for name, kind in zip((first, second), kinds, strict=True) if kind not in NAMES}


def to_multiply(first: int, second: int, output: str, biased: bool = False) -> Case:
    """Of 3 rows and 6 columns of 96 numbers."""

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        return {
            "x1": coded(r, first, 3, 96), "x2": coded(r, second, 6, 96).T, "scale": scales(r, 6, 2, 2).swapaxes(0, 1),
            "pertoken_scale": scales(r, 3, 2, 2), "scale_dtype": E8M0, "pertoken_scale_dtype": E8M0,
            "bias": np.float32(r.normal(size=6)) if biased else None, "output_dtype": CODES[output],
            "group_sizes": [1, 1, 32], **names_of((first, second), "x1", "x2"),
        }  # fmt: skip

    def reference(x1: Array, x2: Array, scale: Array, pertoken_scale: Array, bias: Any, **_: Any) -> Array:
        columns = multiplied(x2.T, second, scale.swapaxes(0, 1))
        return multiplied(x1, first, pertoken_scale) @ columns.T + (0 if bias is None else bias)

    return Case("npu_quant_matmul", inputs, reference, dtypes=("mx",), note=f"{first} and {second}")


def by_blocks(kind: int, sizes: list[int]) -> Case:
    """Of blocks of 128 inner numbers, and of columns and perhaps rows, with a scale each."""
    m, k, n = 130, 200, 3
    rows = -(-m // sizes[0])

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        made = {"x1": coded(r, kind, m, k), "x2": coded(r, kind, n, k).T} if kind in NAMES else {
            "x1": r.integers(-9, 9, (m, k)).astype(np.int8), "x2": r.integers(-9, 9, (k, n)).astype(np.int8),
        }  # fmt: skip
        return made | {
            "scale": single(r, 2, 1), "pertoken_scale": single(r, rows, 2), "output_dtype": CODES["float32"],
            "group_sizes": sizes,
        }  # fmt: skip

    def reference(x1: Array, x2: Array, scale: Array, pertoken_scale: Array, **_: Any) -> Array:
        y = np.zeros((m, n))
        for row in range(m):
            for block in range(2):
                own = slice(128 * block, 128 * block + 128)
                total = x1[row, own].astype(float) @ x2[own].astype(float)
                y[row] += total * scale[block, 0] * pertoken_scale[row // sizes[0], block]
        return y

    return Case("npu_quant_matmul", inputs, reference, dtypes=("float8" if kind in NAMES else "int8",))


def to_multiply_groups(first: int, second: int, anti: bool = False, flat: bool = False) -> Case:
    """With ``flat`` the weights' numbers of four bits are packed along the columns."""

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        weight = coded(r, second, 2, 64, 6).swapaxes(1, 2) if flat else coded(r, second, 2, 6, 64)
        made = {"antiquant_scale" if anti else "scale": [scales(r, 2, 6, 1, 2).swapaxes(1, 2)]}
        return made | ({} if anti else {"scale_dtype": E8M0}) | {
            "x": [coded(r, first, 5, 64)], "weight": [weight.swapaxes(1, 2)],
            "per_token_scale": [scales(r, 5, 1, 2)], "per_token_scale_dtype": E8M0,
            "group_list": np.array([2, 4], np.int64), "group_list_type": 0, "split_item": 2, "group_type": 0,
            "output_dtype": CODES["bfloat16"], **names_of((first, second), "x", "weight"),
        }  # fmt: skip

    def reference(x: Any, weight: Any, per_token_scale: Any, group_list: Array, **known: Any) -> Any:
        (scale,) = known["antiquant_scale" if anti else "scale"]
        rows, y = multiplied(x[0], first, per_token_scale[0]), np.zeros((5, 6))
        for own, matrix, of in zip(parts(group_list), weight[0], scale, strict=True):
            columns = (values_of(matrix, second).T, E4M3) if flat else (matrix.T, second)
            y[own] = rows[own] @ multiplied(*columns, of.swapaxes(0, 1)).T
        return [y]

    return Case("npu_grouped_matmul", inputs, reference, dtypes=("mx",), note=f"{first} and {second}")


def of_rows(operator: str) -> Case:
    """float8 with a scale for each row and for each column, of one product or of two groups."""
    grouped = operator == "npu_grouped_matmul"

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        x, weight = coded(r, E4M3, 3, 16), coded(r, E4M3, 2, 6, 16)
        more: dict[str, Any] = {"output_dtype": CODES["float16"]}
        if not grouped:
            return more | {"x1": x, "x2": weight[0].T, "scale": single(r, 6), "pertoken_scale": single(r, 3)}
        return more | {
            "x": [x], "weight": [weight.swapaxes(1, 2)], "scale": [single(r, 2, 6)], "per_token_scale": [single(r, 3)],
            "group_list": np.array([1, 3], np.int64), "group_list_type": 0, "split_item": 2, "group_type": 0,
        }  # fmt: skip

    def reference(scale: Any, **known: Any) -> Any:
        if not grouped:
            return known["x1"] @ known["x2"] * scale * known["pertoken_scale"][:, None]
        (x,), (weight,), (tokens,) = known["x"], known["weight"], known["per_token_scale"]
        made = [x[own] @ w * s for own, w, s in zip(parts(known["group_list"]), weight, scale[0], strict=True)]
        return [np.concatenate(made) * tokens[:, None]]

    return Case(operator, inputs, reference, dtypes=("float8",))


def to_swiglu(blocks: bool) -> Case:
    def inputs(r: np.random.Generator) -> dict[str, Any]:
        weight = coded(r, E4M3, 2, 128, 64)
        made = {
            "x": coded(r, E4M3, 4, 64), "weight": [weight.swapaxes(1, 2)], "group_list": np.array([1, 4], np.int64),
            "quant_dtype": 24,  # as torch calls it
        }  # fmt: skip
        if not blocks:
            return made | {"weight_scale": [single(r, 2, 128)], "x_scale": single(r, 4)}
        return made | {
            "weight_scale": [scales(r, 2, 128, 1, 2).swapaxes(1, 2) - 8], "x_scale": scales(r, 4, 1, 2) - 8,
            "dequant_mode": 2, "quant_mode": 2, "weight_scale_dtype": E8M0, "x_scale_dtype": E8M0,
        }  # fmt: skip

    def reference(x: Array, weight: Any, weight_scale: Any, x_scale: Array, group_list: Array, **_: Any) -> Any:
        values = np.zeros((4, 64))
        for own, matrix, scale in zip(parts(group_list), weight[0], weight_scale[0], strict=True):
            if blocks:
                rows, columns = multiplied(x[own], E4M3, x_scale[own]), multiplied(matrix.T, E4M3, scale.swapaxes(0, 1))
                y = rows @ columns.T
            else:
                y = x[own] @ matrix * scale * x_scale[own][:, None]
            gate, other = np.split(y, 2, -1)
            values[own] = gate * sigmoid(gate) * other
        if blocks:
            return mx(values, E4M3)
        scale = np.abs(values).max(-1) / 448
        return rounded(values / scale[:, None], E4M3), scale

    return Case("npu_grouped_matmul_swiglu_quant_v2", inputs, reference, dtypes=("mx" if blocks else "float8",))


def routed(mode: int) -> Case:
    """Rows of experts 1 and 2, sorted by expert, of which two places are left."""
    experts = np.array([[1, 0], [2, 1], [0, 1]], np.int32)

    def reference(x: Array, **_: Any) -> Any:
        kind = {2: E5M2, 3: E4M3, 9: E2M1}[mode]
        values, of = mx(x, kind)
        values = values if kind in NAMES else pairs(values, kind)
        rows = [0, 1, 2, 1]
        made = [np.concatenate([one.reshape(3, -1)[rows], np.zeros((2, one[0].size))]) for one in (values, of)]
        numbers = 2.0 ** (made[1] - 127)
        numbers = numbers.reshape(6, -1, 2) if mode == 9 else numbers
        return made[0], np.array([0, -1, 3, 1, -1, 2], np.int32), np.array([3, 1]), numbers

    return Case("npu_moe_init_routing_v2", lambda r: {
        "x": r.normal(size=(3, 70)), "expert_idx": experts, "expert_num": 3, "active_expert_range": [1, 3],
        "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "quant_mode": mode,
    }, reference, exact=True)  # fmt: skip


def eights(input: Array, dst_type: int) -> tuple[Array, Array]:
    x = input.astype(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(LARGEST[dst_type])
    return rounded((x / scale).astype(np.float64), dst_type), scale[..., 0]


def to_transform(right: bool) -> Case:
    """Of products that are exact in float32, in blocks of flat matrices of 48 numbers."""

    def inputs(r: np.random.Generator) -> dict[str, Any]:
        shapes = {"x": (5, 3, 16), "kronecker_p1": (3, 3), "kronecker_p2": (16, 16) if right else (0, 0)}
        return {name: r.integers(-3, 4, shape).astype(float) for name, shape in shapes.items()} | {"dst_dtype": E2M1}

    def reference(x: Array, kronecker_p1: Array, kronecker_p2: Array, dst_dtype: int) -> tuple[Array, Array]:
        y = kronecker_p1 @ (x @ kronecker_p2 if right else x)
        values, of = mx(y.reshape(5, -1), E2M1)
        return pairs(values, E2M1), of

    return Case("npu_kronecker_quant", inputs, reference, dtypes=HALVES, exact=True)


CASES = [
    *(to_transform(right) for right in (True, False)),
    *(to_scale(kind) for kind in POSITIVE),
    *(to_scale(kind, axis=0, shape=(34, 4)) for kind in (E4M3, E2M1)),
    to_scale(E5M2, scale_alg=1, block_size=64),
    *(
        Case("npu_dynamic_quant", lambda r, k=kind: {"input": r.normal(size=(3, 8)), "dst_type": k}, eights,
             exact=True, dtypes=FLOATS)
        for kind in NAMES
    ),
    to_multiply(E4M3, E4M3, "bfloat16", biased=True),
    to_multiply(E5M2, E4M3, "float32"),
    to_multiply(E2M1, E2M1, "float16"),
    to_multiply(E4M3, E2M1, "float32"),
    *(by_blocks(kind, sizes) for kind, sizes in ((E4M3, [1, 128, 128]), (E5M2, [128] * 3), (0, [1, 128, 128]))),
    of_rows("npu_quant_matmul"),
    of_rows("npu_grouped_matmul"),
    to_multiply_groups(E4M3, E5M2),
    to_multiply_groups(E2M1, E2M1),
    to_multiply_groups(E4M3, E2M1, anti=True),
    to_multiply_groups(E1M2, E1M2, flat=True),
    *(to_swiglu(blocks) for blocks in (False, True)),
    *(routed(mode) for mode in (2, 3, 9)),
]  # fmt: skip
