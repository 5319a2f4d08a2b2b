"""The column of `alltoallv.mindspore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from column import Array, Column, Row
from wrong import GOOD, LISTS

from alltoallv.testing.golden import DTYPES, dtype_of


def _gathered(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "out": _parts(arguments.get("out"))}


def _scattered(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "input": _parts(arguments.get("input"))}


def _parts(tensor: Any) -> Any:
    return None if tensor is None else [tensor[j] for j in range(len(tensor))]


class MindsporeColumn(Column):
    name, module, package = "mindspore", "alltoallv.mindspore", "mindspore"
    dtypes = tuple(name for name in DTYPES if not name.startswith("float8"))
    rows = {
        "all_reduce": Row("all_reduce", {"input": "tensor"}, "input"),
        "broadcast": Row("broadcast", {"array": "tensor", "root": "src"}, "array"),
        "all_gather": Row("all_gather", {"input": "tensor", "out": "tensor_list"}, "out", _gathered),
        "reduce": Row("reduce", {"input": "tensor", "root": "dst"}, "input"),
        "gather": Row("gather", {"input": "tensor", "out": "gather_list", "root": "dst"}, "out", _gathered),
        "scatter": Row("scatter", {"out": "tensor", "input": "scatter_list", "root": "src"}, "out", _scattered),
        "reduce_scatter": Row("reduce_scatter_tensor", {"out": "output"}, "out"),
    }
    lacks = {
        "uneven parts of one tensor": "MindSpore's reduce_scatter takes a list for them",
        "reduce_scatter without an output": "MindSpore's functions write into tensors",
    }

    own = {
        **dict.fromkeys(
            (f"all_to_all: no list of {name}" for name in LISTS),
            ("TypeError", "Expected list or tuple, but got <class 'int'>."),
        ),
        **dict.fromkeys(
            (f"{function}: no group" for function in GOOD),
            ("TypeError", "The argument 'group' must be type of string, but got 'group' type : <class 'int'>."),
        ),
    }

    def tensor(self, array: Array) -> Any:
        import mindspore as ms

        if array.dtype.name == "bfloat16":
            return ms.Tensor(array.astype("float32")).astype(ms.bfloat16)
        return ms.Tensor(array.copy())

    def array(self, tensor: Any) -> Array:
        import mindspore as ms

        if tensor.dtype == ms.bfloat16:
            return np.asarray(tensor.astype(ms.float32).asnumpy().astype(dtype_of("bfloat16")))
        array: Array = tensor.asnumpy().copy()
        return array

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        import mindspore as ms

        return ms.grad(lambda x: (function(x) ** 2).sum())(x)
