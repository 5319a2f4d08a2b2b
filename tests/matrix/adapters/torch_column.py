"""The column of `alltoallv.torch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from column import DISTRIBUTED, Array, Column
from right import A, V
from wrong import LISTS, PARAM, TENSOR, bad_of

from alltoallv.testing.golden import DTYPES, dtype_of

DIFFERENT = "Invalid usage of tensors with different dtypes"
SAME_DTYPES = ("all_to_all_single: output: dtypes", *(f"all_to_all: dtypes of {name}" for name in LISTS))


def _reduced(arguments: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    op = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN}
    op |= {"max": dist.ReduceOp.MAX, "prod": dist.ReduceOp.PRODUCT}
    op |= {"band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}
    return {**arguments, "op": op[arguments.get("op", "sum")]}


ROOTS = {f"broadcast: from rank {root}": (PARAM, f"...src is {root}, expected 0 <= src < 3") for root in (3, -1)}
NO_LISTS = tuple(f"all_to_all: no list of {name}" for name in LISTS)


only = partial(bad_of, "torch")


class TorchColumn(Column):
    name, module, package = "torch", "alltoallv.torch", "torch"
    dtypes = tuple(name for name in DTYPES if name not in ("float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz"))
    rows = DISTRIBUTED | {
        name: replace(DISTRIBUTED[name], prepare=_reduced) for name in ("all_reduce", "reduce", "reduce_scatter")
    }
    lacks = {
        "tensors changed in place must be contiguous": "torch's functions also take others",
        "uneven parts of one tensor": "torch.distributed's reduce_scatter_tensor has equal parts",
        "reduce_scatter without an output": "torch.distributed's functions write into tensors",
    }
    # The words of torch's own check, which is the first.
    own = {**dict.fromkeys(SAME_DTYPES, ("ValueError", f"{DIFFERENT}: torch.float32, torch.int32")), **ROOTS}

    unheard = frozenset(["all_to_all: no tensors in the list"])  # torch's wrappers find it on the rank alone

    no_group = "group is a int, expected a ProcessGroup, a Communicator or None"
    cases = [
        *[only(V, what, TENSOR, text, input=make) for what, make, text in (
            ("a sparse tensor", lambda torch: torch.ones(6).to_sparse(), "...layout torch.sparse_coo..."),
            ("zeros without memory", lambda torch: torch._efficientzerotensor(6), "...is a zero tensor..."),
            ("a dtype without a size", lambda torch: torch.quantize_per_tensor(torch.ones(6), 1, 0, torch.qint8),
                "...qint8..."),
        )],
        only(V, "out and gradients", PARAM, "out is given for input, which wants a gradient, expected one or the other",
            input=lambda torch: torch.ones(6).requires_grad_(), out=lambda torch: torch.ones(6)),
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
