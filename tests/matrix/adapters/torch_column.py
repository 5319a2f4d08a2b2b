"""The column of `alltoallv.torch`."""

from __future__ import annotations

from typing import Any

from column import Array, Column, Row

DIFFERENT = "Invalid usage of tensors with different dtypes"


def _reduced(arguments: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    op = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN}
    op |= {"max": dist.ReduceOp.MAX, "prod": dist.ReduceOp.PRODUCT}
    return {**arguments, "op": op[arguments.get("op", "sum")]}


def _gathered(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "out": list(arguments["out"])}


class TorchColumn(Column):
    name, module, package = "torch", "alltoallv.torch", "torch"
    rows = {
        "all_reduce": Row("all_reduce", {"input": "tensor"}, "input", _reduced),
        "broadcast": Row("broadcast", {"array": "tensor", "root": "src"}, "array"),
        "all_gather": Row("all_gather", {"input": "tensor", "out": "tensor_list"}, "out", _gathered),
        "reduce_scatter": Row("reduce_scatter_tensor", {"out": "output"}, "out", _reduced),
        "barrier": Row("barrier"),
    }
    lacks = {
        "uneven parts": "torch.distributed's reduce_scatter_tensor has equal parts",
        "out left out": "torch.distributed's functions write into tensors",
    }
    # The words of torch's own check, which is the first.
    own = dict.fromkeys(
        ["all_to_all_single: dtypes", "all_to_all: dtypes", "all_gather_into_tensor: dtypes"],
        ("ValueError", f"{DIFFERENT}torch.float32 and torch.int32"),
    )

    def tensor(self, array: Array) -> Any:
        import torch

        return torch.tensor(array)

    def array(self, tensor: Any) -> Array:
        array: Array = tensor.detach().clone().numpy()
        return array
