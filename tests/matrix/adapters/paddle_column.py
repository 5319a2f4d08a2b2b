"""The column of `alltoallv.paddle`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from column import WRONG_SOURCE, Array, Column, Row, in_parts
from right import A, S, V
from wrong import PARAM, TENSOR, bad_of

from alltoallv._calls.adapters import as_bytes
from alltoallv.testing.golden import dtype_of


def _synchronous(arguments: dict[str, Any]) -> dict[str, Any]:
    changed = dict(arguments)
    if "async_op" in changed:
        changed["sync_op"] = not changed.pop("async_op")
    return changed


def _reduced(arguments: dict[str, Any]) -> dict[str, Any]:
    from paddle.distributed import ReduceOp

    return {**_synchronous(arguments), "op": getattr(ReduceOp, arguments.get("op", "sum").upper())}


def _listed(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda arguments: _synchronous(in_parts(name)(arguments))


only = partial(bad_of, "paddle")


def with_gradient(paddle: Any) -> Any:
    x = paddle.ones([6])
    x.stop_gradient = False
    return x


class PaddleColumn(Column):
    name, module, package = "paddle", "alltoallv.paddle", "paddle"
    dtypes = (
        *("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
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
            "all_gather", {"output_tensor": "tensor_list", "input_tensor": "tensor"}, "output_tensor", _synchronous
        ),
        "all_gather": Row("all_gather", {"input": "tensor", "out": "tensor_list"}, "out", _synchronous),
        "all_reduce": Row("all_reduce", {"input": "tensor"}, "input", _reduced),
        "reduce_scatter": Row("reduce_scatter", {"input": "tensor_list", "out": "tensor"}, "out", _reduced),
        "reduce": Row("reduce", {"input": "tensor", "root": "dst"}, "input", _reduced),
        "gather": Row("gather", {"input": "tensor", "out": "gather_list", "root": "dst"}, "out", _listed("out")),
        "scatter": Row("scatter", {"out": "tensor", "input": "tensor_list", "root": "src"}, "out", _listed("input")),
        "broadcast": Row("broadcast", {"array": "tensor", "root": "src"}, "array", _synchronous),
    }
    lacks = {
        "reductions of bits": "Paddle's ReduceOp has none",
        "uneven parts of one tensor": "Paddle's reduce_scatter takes a list for them",
        "reduce_scatter without an output": "Paddle's functions write into tensors",
    }

    no_group = "group is a int, expected a Paddle group, a Communicator or None"
    own = WRONG_SOURCE | {
        f"all_to_all: no list of {ours}": ("TypeError", f"{theirs} is a int, expected a list of tensors")
        for ours, theirs in (("input_tensor_list", "in_tensor_list"), ("output_tensor_list", "out_tensor_list"))
    }
    cases = [
        only(V, "no tensor", "TypeError", "input is a ndarray, expected a paddle.Tensor",
            input=lambda paddle: np.ones(6)),
        only(S, "no output", "TypeError", "out_tensor is a NoneType, expected a paddle.Tensor",
            output=lambda paddle: None),
        only(S, "a sparse tensor", TENSOR, "in_tensor is a sparse tensor, expected a dense one",
             input=lambda paddle: paddle.sparse.sparse_coo_tensor([[0, 1]], [1.0, 2.0], [6])),
        only(V, "out and gradients", PARAM,
            "out is given for input, which wants a gradient, expected one or the other",
             input=with_gradient, out=lambda paddle: paddle.ones([6])),
        only(V, "learnt and async, with gradients", PARAM, "async_op is True for an input that wants a gradient...",
             input=with_gradient, recv_counts=lambda paddle: None, async_op=lambda paddle: True),
        only(A, "no inputs", "RuntimeError", "The input tensor_list should not be empty.",
            input_tensor_list=lambda paddle: []),
        *[only(function, f"{name} of int32", TENSOR, f"Please use int64 type in {name}, which has dtype paddle.int32.",
               **{name: lambda paddle: paddle.ones([6], "int32")})
          for function in ("global_scatter", "global_gather") for name in ("local_count", "global_count")],
    ]  # fmt: skip

    def tensor(self, array: Array) -> Any:
        import paddle

        from alltoallv.paddle.front_end import region

        if not array.dtype.name.startswith(("bfloat", "float8")):
            return paddle.to_tensor(array)
        tensor = self.functions.empty(array.shape, getattr(paddle, array.dtype.name))
        as_bytes(region(tensor))[...] = np.frombuffer(array.tobytes(), np.uint8)
        return tensor

    def array(self, tensor: Any) -> Array:
        from alltoallv.paddle.front_end import core_name, region

        tensor = tensor.detach().contiguous()
        data: Array = as_bytes(region(tensor)).copy().view(dtype_of(core_name(tensor.dtype)))
        return data.reshape(tensor.shape)

    def gradient(self, function: Callable[[Any], Any], x: Any) -> Any:
        x.stop_gradient = False
        y = function(x)
        (y * y).sum().backward()
        return x.grad
