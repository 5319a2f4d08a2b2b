"""The column of `alltoallv.mindspore`."""

from __future__ import annotations

from typing import Any

from column import Array, Column, Row


def _gathered(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "out": [arguments["out"][j] for j in range(len(arguments["out"]))]}


class MindsporeColumn(Column):
    name, module, package = "mindspore", "alltoallv.mindspore", "mindspore"
    rows = {
        "all_reduce": Row("all_reduce", {"input": "tensor"}, "input"),
        "broadcast": Row("broadcast", {"array": "tensor", "root": "src"}, "array"),
        "all_gather": Row("all_gather", {"input": "tensor", "out": "tensor_list"}, "out", _gathered),
        "reduce_scatter": Row("reduce_scatter_tensor", {"out": "output"}, "out"),
    }
    lacks = {
        "uneven parts": "MindSpore's reduce_scatter_tensor has equal parts; its reduce_scatter takes a list",
        "out left out": "MindSpore's functions write into tensors",
    }

    def tensor(self, array: Array) -> Any:
        import mindspore as ms

        return ms.Tensor(array.copy())

    def array(self, tensor: Any) -> Array:
        array: Array = tensor.asnumpy().copy()
        return array
