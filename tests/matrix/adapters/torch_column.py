"""The column of `alltoallv.torch`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from case import Case, Own
from column import Array, Column, Row
from right import A, V
from wrong import LISTS, PARAM, TENSOR, bad

from alltoallv.testing.golden import DTYPES, dtype_of

DIFFERENT = "Invalid usage of tensors with different dtypes"
SAME_DTYPES = (
    "all_to_all_single: output: dtypes",
    *(f"all_to_all: dtypes of {name}" for name in LISTS),
)


def _reduced(arguments: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    op = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN}
    op |= {"max": dist.ReduceOp.MAX, "prod": dist.ReduceOp.PRODUCT}
    op |= {"band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}
    return {**arguments, "op": op[arguments.get("op", "sum")]}


def _gathered(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "out": list(arguments["out"])} if "out" in arguments else arguments


def _scattered(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "input": list(arguments["input"])} if "input" in arguments else arguments


NO_LISTS = tuple(f"all_to_all: no list of {name}" for name in LISTS)


def only(function: str, what: str, error: str, text: str, **mistake: Callable[[Any], Any]) -> Case:
    """A case whose wrong arguments are made by torch."""

    def made(make: Callable[[Any], Any]) -> Own:
        return Own(lambda: make(importlib.import_module("torch")))

    return bad(function, what, error, text, **{name: made(make) for name, make in mistake.items()})


class TorchColumn(Column):
    name, module, package = "torch", "alltoallv.torch", "torch"
    dtypes = tuple(name for name in DTYPES if name not in ("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz"))
    rows = {
        "all_reduce": Row("all_reduce", {"input": "tensor"}, "input", _reduced),
        "broadcast": Row("broadcast", {"array": "tensor", "root": "src"}, "array"),
        "all_gather": Row("all_gather", {"input": "tensor", "out": "tensor_list"}, "out", _gathered),
        "reduce_scatter": Row("reduce_scatter_tensor", {"out": "output"}, "out", _reduced),
        "barrier": Row("barrier"),
        "reduce": Row("reduce", {"input": "tensor", "root": "dst"}, "input", _reduced),
        "gather": Row("gather", {"input": "tensor", "out": "gather_list", "root": "dst"}, "out", _gathered),
        "scatter": Row("scatter", {"out": "tensor", "input": "scatter_list", "root": "src"}, "out", _scattered),
    }
    lacks = {
        "tensors changed in place must be contiguous": "torch's functions take others, too",
        "uneven parts of one tensor": "torch.distributed's reduce_scatter_tensor has equal parts",
        "reduce_scatter without an output": "torch.distributed's functions write into tensors",
    }
    # The words of torch's own check, which is the first.
    own = {
        **dict.fromkeys(SAME_DTYPES, ("ValueError", f"{DIFFERENT}torch.float32 and torch.int32")),
    }

    no_group = "group is a int, expected a ProcessGroup, a Communicator or None"
    cases = [
        *[only(V, what, TENSOR, text, input=make) for what, make, text in (
            ("a sparse tensor", lambda torch: torch.ones(6).to_sparse(), "...layout torch.sparse_coo..."),
            ("zeros without memory", lambda torch: torch._efficientzerotensor(6), "...is a zero tensor..."),
            ("another device", lambda torch: torch.ones(6, device="meta"), "...lie on meta, expected cpu..."),
            ("a dtype without a size", lambda torch: torch.quantize_per_tensor(torch.ones(6), 1, 0, torch.qint8),
                "...qint8..."),
        )],
        only(V, "out and gradients", PARAM, "...requires grad...", input=lambda torch: torch.ones(6).requires_grad_(),
            out=lambda torch: torch.ones(6)),
        only(V, "no tensor", "TypeError", "input is a list, expected a torch.Tensor", input=lambda torch: [1.0, 2.0]),
        only(A, "no tensors in the list", "TypeError", "output_tensor_list[0] is a float, expected a torch.Tensor",
            output_tensor_list=lambda torch: [1.0] * 3),
    ]  # fmt: skip

    def tensor(self, array: Array) -> Any:
        import torch

        dtype = getattr(torch, array.dtype.name)
        data = bytearray(array.tobytes())
        return torch.frombuffer(data, dtype=dtype).view(array.shape) if data else torch.empty(array.shape, dtype=dtype)

    def array(self, tensor: Any) -> Array:
        import torch

        data: Array = tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy()
        return data.view(dtype_of(str(tensor.dtype).removeprefix("torch."))).reshape(tensor.shape)

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        x.requires_grad_()
        y = function(x)
        (y * y).sum().backward()
        return x.grad
