"""The column of `alltoallv.torch`."""

from __future__ import annotations

from typing import Any

from column import Array, Column

DIFFERENT = "Invalid usage of tensors with different dtypes"


class TorchColumn(Column):
    name, module, package = "torch", "alltoallv.torch", "torch"
    lacks = {
        "all_gather": "torch.distributed's on backend alltoallv",
        "broadcast": "torch.distributed's on backend alltoallv",
        "barrier": "torch.distributed's on backend alltoallv",
        "all_reduce": "torch.distributed's on backend alltoallv, and alltoallv.torch.functional",
        "reduce_scatter": "torch.distributed's on backend alltoallv",
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
