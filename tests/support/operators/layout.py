"""Layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case


def one(**more: Any) -> Any:
    return lambda r: {"input": r.normal(size=(2, 3, 4)), **more}


def like(other: str, dtype: Any = np.float64) -> Any:
    more = {"non_blocking": False} if other == "other" else {}
    return lambda r: {"input": r.normal(size=(2, 3)), other: r.normal(size=(2, 3)).astype(dtype), **more}


def confusion(input: Any, perm: Any, shape: Any, transpose_first: bool) -> Any:
    if transpose_first:
        return np.ascontiguousarray(input.transpose(perm)).reshape(shape)
    return input.reshape(shape).transpose(perm)


CASES = [
    Case(
        "npu_format_cast",
        one(acl_format=29),
        lambda input, acl_format: input,
        exact=True,
        gradient=("input",),
        runs=("_npu_format_cast", "get_npu_format"),
    ),
    Case(
        "npu_dtype_cast",
        one(dtype=6),
        lambda input, dtype: input,
        exact=True,
        gradient=("input",),
        runs=("npu_dtype_cast_backward", "_npu_dtype_cast_backward"),
    ),
    Case("_npu_dtype_cast", one(dtype=6), lambda input, dtype: input, exact=True),
    Case("npu_transpose", one(perm=[2, 0, 1]), lambda input, perm: input.transpose(perm), exact=True),
    *(
        Case(
            "npu_confusion_transpose",
            one(perm=[1, 2, 0], shape=shape, transpose_first=first),
            confusion,
            exact=True,
            gradient=("input",),
            runs=("npu_confusion_transpose_backward",),
        )
        for first, shape in ((True, [6, 4]), (False, [4, 2, 3]))
    ),
    Case("npu_broadcast", one(size=[5, 2, 3, 4]), lambda input, size: np.broadcast_to(input, size).copy(), exact=True),
    Case(
        "npu_slice",
        one(offsets=[0, 1, 2], size=[2, -1, 1]),
        lambda input, offsets, size: input[:2, 1:, 2:3],
        exact=True,
    ),
    Case("npu_dtype_cast_", like("src", np.float32), lambda input, src: [src] * 2, writes=("input",)),
    Case("npu_view_copy", like("other"), lambda input, other, non_blocking: [other] * 2, exact=True, writes=("input",)),
    Case("npu_format_cast.Tensor", like("dst"), lambda input, dst: input, exact=True),
    Case("npu_format_cast_", like("src"), lambda input, src: [src] * 2, exact=True, writes=("input",)),
    Case("npu_format_cast_.acl_format", one(acl_format=29), lambda input, acl_format: input, exact=True),
    Case("one_", one(), lambda input: [np.ones_like(input)] * 2, writes=("input",), exact=True),
]
