"""The column of `alltoallv.mindspore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from column import DISTRIBUTED, WRONG_SOURCE, Array, Column
from wrong import GOOD, LISTS

from alltoallv.testing.golden import DTYPES, dtype_of


class MindsporeColumn(Column):
    name, module, package = "mindspore", "alltoallv.mindspore", "mindspore"
    dtypes = tuple(name for name in DTYPES if not name.startswith("float8"))
    rows = DISTRIBUTED
    waited = None
    lacks = {
        "uneven parts of one tensor": "MindSpore's reduce_scatter takes a list for them",
        "reduce_scatter without an output": "MindSpore's functions write into tensors",
    }

    own = {
        **WRONG_SOURCE,
        **dict.fromkeys(
            (f"all_to_all: no list of {name}" for name in LISTS),
            ("TypeError", "Expected list or tuple, but got <class 'int'>."),
        ),
        **dict.fromkeys(
            (f"{function}: no group" for function in GOOD),
            ("TypeError", "The argument 'group' must be type of string, but got 'group' type : <class 'int'>."),
        ),
    }

    unheard = frozenset(name for name, (kind, _) in own.items() if kind == "TypeError")

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
