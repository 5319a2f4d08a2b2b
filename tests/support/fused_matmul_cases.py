"""Matrix products with collectives of tensor parallelism. The references take all ranks' arguments, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from fused_case import Fused, Rank
from operator_case import FLOATS
from operators.matmuls import int8, single
from operators.quantization import symmetric

Array = np.ndarray[Any, Any]
INNER = 16
BFLOAT16 = 15


def ranks(**make: Any) -> Any:
    """Arguments for each rank: values, or functions of the generator and the number of ranks."""

    def inputs(r: np.random.Generator, size: int) -> list[Rank]:
        made = [{name: f(r, size) if callable(f) else f for name, f in make.items()} for _ in range(size)]
        return [{name: value for name, value in one.items() if value is not None} for one in made]

    return inputs


def normal(rows: int, columns: int, times_rows: bool = False, times_columns: bool = False) -> Any:
    """A matrix; its rows or columns are multiplied by the number of ranks."""
    return lambda r, n: r.normal(size=(rows * (n if times_rows else 1), columns * (n if times_columns else 1)))


def whole(rows: int, columns: int, times_rows: bool = False, times_columns: bool = False) -> Any:
    return lambda r, n: int8(r, rows * (n if times_rows else 1), columns * (n if times_columns else 1))


def scales(*shape: int) -> Any:
    return lambda r, n: single(r, *shape)


def vector(length: int) -> Any:
    return lambda r, n: r.normal(size=length)


def small(*shape: int) -> Any:
    """Whole numbers whose products and quotients here are exact in every dtype."""
    return lambda r, n: r.integers(-3, 4, shape).astype(np.int8)


def times(x1: Array, one: Rank, first: str = "x1_scale", second: str = "x2_scale", late: bool = False) -> Array:
    """(x1 @ x2 + bias) * scales; with ``late`` the bias comes last."""
    x1 = x1.astype(np.float64)
    y = x1 @ one["x2"].astype(np.float64) + (0 if late else one.get("bias", 0))
    if second in one:
        y = y * one[second].reshape(1, -1)
    if first in one:
        y = y * one[first].reshape(-1, 1)
    return y + (one.get("bias", 0) if late else 0)


def all_gather_mm(ranks: list[Rank]) -> list[Any]:
    rows = np.concatenate([one["input"] for one in ranks])
    every = {"x1_scale": np.concatenate([one["x1_scale"] for one in ranks])} if "x1_scale" in ranks[0] else {}
    return [(times(rows, one | every), rows) for one in ranks]


def mm_reduce_scatter(ranks: list[Rank]) -> list[Any]:
    total = sum(times(one["input"], one) for one in ranks)
    return list(np.split(np.asarray(total), len(ranks)))


def mm_all_reduce(ranks: list[Rank]) -> list[Any]:
    terms = []
    for one in ranks:
        x2 = one["x2"].astype(np.float64)
        if "antiquant_scale" in one:
            x2 = (x2 + one.get("antiquant_offset", 0)) * one["antiquant_scale"]
        rows = one["x1"].reshape(-1, INNER)
        y = times(rows, one | {"x2": x2}, "pertoken_scale", "dequant_scale")
        terms.append(y + one.get("x3", np.zeros(1)).reshape(-1, y.shape[1] if "x3" in one else 1))
    one = ranks[0]
    if "comm_quant_scale_1" in one:
        first, second = one["comm_quant_scale_1"], one["comm_quant_scale_2"]
        total = sum(np.clip(np.rint(term / first), -128, 127) for term in terms)
        result = np.clip(np.rint(total * (first / second)), -128, 127) * second
    else:
        result = np.asarray(sum(terms))
    return [result.reshape(*one["x1"].shape[:-1], -1)] * len(ranks)


def to_all_then_mm(ranks: list[Rank]) -> list[Any]:
    parts = [np.split(one["x1"], len(ranks)) for one in ranks]
    results = []
    for rank, one in enumerate(ranks):
        rows = np.concatenate([part[rank] for part in parts], axis=1)
        late = "x2_scale" in one
        if one.get("x1_quant_mode") == 7:
            numbers, row_scales = symmetric(rows)
            results.append((times(numbers, one | {"x1_scale": row_scales}, late=True), rows))
        else:
            results.append((times(rows, one, late=late), rows))
    return results


def mm_then_to_all(ranks: list[Rank]) -> list[Any]:
    parts = [np.split(times(one["x1"], one, late="x2_scale" in one), len(ranks), axis=1) for one in ranks]
    return [np.concatenate([part[rank] for part in parts]) for rank in range(len(ranks))]


QUANTIZED = {"x1_quant_mode": 3, "x2_quant_mode": 2, "y_dtype": BFLOAT16}
TO_MM = {"x2": normal(INNER, 5, times_rows=True), "bias": vector(5), "all2all_axes": [-2, -1]}
ROWS = {"input": whole(4, INNER, True), "x2": whole(INNER, 5), "x2_scale": scales(1, 5)}

PLAIN = {"x2": normal(INNER, 5), "bias": vector(5)}

CASES = [
    Fused("npu_all_gather_base_mm", ranks(input=normal(4, INNER), **PLAIN), all_gather_mm, FLOATS),
    Fused("npu_all_gather_base_mm", ranks(**ROWS | {"input": whole(4, INNER), "x1_scale": scales(4)}), all_gather_mm),
    Fused("npu_mm_reduce_scatter_base", ranks(input=normal(3, INNER, True), **PLAIN), mm_reduce_scatter, FLOATS),
    Fused("npu_mm_reduce_scatter_base", ranks(**ROWS), mm_reduce_scatter),
    Fused("npu_mm_all_reduce_base", ranks(x1=normal(4, INNER), **PLAIN), mm_all_reduce, FLOATS),
    Fused(
        "npu_mm_all_reduce_base",
        ranks(
            x1=lambda r, n: r.normal(size=(2, 3, INNER)),
            x2=whole(INNER, 5),
            antiquant_scale=vector(5),
            antiquant_offset=vector(5),
            x3=lambda r, n: r.normal(size=(2, 3, 5)),
        ),
        mm_all_reduce,
    ),
    Fused(
        "npu_mm_all_reduce_base",
        ranks(
            x1=whole(4, INNER),
            x2=whole(INNER, 5),
            bias=lambda r, n: r.integers(-9, 9, 5).astype(np.int32),
            dequant_scale=scales(5),
            pertoken_scale=scales(4),
        ),
        mm_all_reduce,
        ("float16",),
    ),
    Fused(
        "npu_mm_all_reduce_base",
        ranks(
            x1=small(4, INNER),
            x2=small(INNER, 5),
            dequant_scale=lambda r, n: np.full(5, 1 / 16),
            comm_quant_scale_1=lambda r, n: np.full(5, 0.5),
            comm_quant_scale_2=lambda r, n: np.full(5, 1.0),
        ),
        mm_all_reduce,
        ("bfloat16",),
        exact=True,
    ),
    Fused("npu_all_to_all_matmul", ranks(x1=normal(2, INNER, True), **TO_MM), to_all_then_mm, FLOATS),
    Fused("npu_matmul_all_to_all", ranks(x1=normal(3, INNER), x2=normal(INNER, 2, False, True)), mm_then_to_all),
    Fused(
        "npu_all_to_all_quant_matmul",
        ranks(
            x1=whole(2, INNER, True), x2=whole(INNER, 5, True), x1_scale=scales(2), x2_scale=scales(5), **QUANTIZED
        ),
        to_all_then_mm,
        ("int8",),
    ),
    Fused(
        "npu_all_to_all_quant_matmul",
        ranks(
            x1=normal(2, INNER, True), x2=whole(INNER, 5, True), x2_scale=scales(5), **QUANTIZED | {"x1_quant_mode": 7}
        ),
        to_all_then_mm,
    ),
    Fused(
        "npu_quant_matmul_all_to_all",
        ranks(
            x1=whole(3, INNER), x2=whole(INNER, 2, False, True), x1_scale=scales(3),
            x2_scale=lambda r, n: single(r, 2 * n), **QUANTIZED,
        ),
        mm_then_to_all,
        ("int8",),
    ),
]  # fmt: skip
