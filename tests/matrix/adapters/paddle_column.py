"""The column of `alltoallv.paddle`."""

from __future__ import annotations

from typing import Any

from column import Array, Column, Row


def _synchronous(arguments: dict[str, Any]) -> dict[str, Any]:
    changed = dict(arguments)
    if "async_op" in changed:
        changed["sync_op"] = not changed.pop("async_op")
    return changed


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
    }
    lacks = {
        **dict.fromkeys(
            ["all_gather", "all_gather_into_tensor", "broadcast", "barrier", "all_reduce", "reduce_scatter"],
            "Paddle's own",
        ),
        "quantized_all_reduce": "NumPy's, torch's and MindSpore's so far",
    }

    def tensor(self, array: Array) -> Any:
        import paddle

        return paddle.to_tensor(array)

    def array(self, tensor: Any) -> Array:
        array: Array = tensor.numpy().copy()
        return array
