"""The column of `alltoallv.mindspore`."""

from __future__ import annotations

from typing import Any

from column import Array, Column, Row


class MindsporeColumn(Column):
    name, module, package = "mindspore", "alltoallv.mindspore", "mindspore"
    waited = None  # as MindSpore's own handle
    rows = {"all_reduce": Row("all_reduce", {"input": "tensor"}, "input")}
    lacks = dict.fromkeys(["all_gather", "broadcast", "barrier", "reduce_scatter"], "MindSpore's own")

    def tensor(self, array: Array) -> Any:
        import mindspore as ms

        return ms.Tensor(array.copy())

    def array(self, tensor: Any) -> Array:
        array: Array = tensor.asnumpy().copy()
        return array
