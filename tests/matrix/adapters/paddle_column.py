"""The column of `alltoallv.paddle`."""

from __future__ import annotations

from typing import Any

from column import Array, Column, Row


def _synchronous(arguments: dict[str, Any]) -> dict[str, Any]:
    changed = dict(arguments)
    if "async_op" in changed:
        changed["sync_op"] = not changed.pop("async_op")
    return changed


def _reduced(arguments: dict[str, Any]) -> dict[str, Any]:
    from paddle.distributed import ReduceOp

    return {**_synchronous(arguments), "op": getattr(ReduceOp, arguments.get("op", "sum").upper())}


class PaddleColumn(Column):
    name, module, package = "paddle", "alltoallv.paddle", "paddle"
    returns_handles = True
    rows = {
        "all_to_all_single": Row(
            "alltoall_single",
            {
                "output": "out_tensor",
                "input": "in_tensor",
                "output_split_sizes": "out_split_sizes",
                "input_split_sizes": "in_split_sizes",
            },
            "output",
            _synchronous,
        ),
        "all_to_all": Row(
            "alltoall",
            {"output_tensor_list": "out_tensor_list", "input_tensor_list": "in_tensor_list"},
            "output_tensor_list",
            _synchronous,
        ),
        "all_gather_into_tensor": Row(
            "all_gather",
            {"output_tensor": "tensor_list", "input_tensor": "tensor"},
            "output_tensor",
            _synchronous,
        ),
        "all_gather": Row("all_gather", {"input": "tensor", "out": "tensor_list"}, "out", _synchronous),
        "all_reduce": Row("all_reduce", {"input": "tensor"}, "input", _reduced),
        "reduce_scatter": Row("reduce_scatter", {"input": "tensor_list", "out": "tensor"}, "out", _reduced),
        "broadcast": Row("broadcast", {"array": "tensor", "root": "src"}, "array", _synchronous),
    }
    lacks = {
        "uneven parts": "Paddle's reduce_scatter takes a list for them",
        "out left out": "Paddle's functions write into tensors",
    }

    def tensor(self, array: Array) -> Any:
        import paddle

        return paddle.to_tensor(array)

    def array(self, tensor: Any) -> Array:
        array: Array = tensor.numpy().copy()
        return array
