"""Paddle's groups, tensors, gradients and tasks; `alltoallv.paddle` describes what all its functions share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed import ReduceOp

from alltoallv._calls.adapters import check_untracked
from alltoallv._calls.collectives import Map
from alltoallv._calls.counts import Counts, share_of
from alltoallv._calls.exchanges import ExpertRows
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.paddle.group import Group, rank_in, resolve
from alltoallv.paddle.tensors import ADAPTER, Done, Task

_OPS = {getattr(ReduceOp, name): name.lower() for name in ("SUM", "AVG", "MIN", "MAX", "PROD")}


def rows_of_ranks(name: str, x: Tensor, size: int) -> list[Tensor]:
    """Returns ``size`` equal parts of the argument ``name`` along dimension 0, in its memory."""
    ADAPTER.check(name, x)
    rows = share_of(name, x.shape, size)
    return [x[rows * j : rows * (j + 1)] for j in range(size)]


class _Applied(PyLayer):
    """Fills its context only after the call has succeeded: Paddle never frees a context whose forward has raised."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: Map[Tensor]) -> Tensor:
        output = call.run(input)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.call.back(grad, apply)


def apply(input: Tensor, call: Map[Tensor]) -> Tensor:
    """Runs the call and records its gradient."""
    return _Applied.apply(input, call)


def wants_gradient(x: Tensor | None) -> bool:
    """Returns whether autograd records what is computed from the tensor."""
    return x is not None and paddle.is_grad_enabled() and not x.stop_gradient


class _FrontEnd(ExpertRows[Tensor, Group, Task]):
    adapter = ADAPTER
    enter, rank_in, apply = staticmethod(resolve), staticmethod(rank_in), staticmethod(apply)
    numbers = staticmethod(paddle.to_tensor)

    def ended(self, result: Any) -> Task:
        return Done(result)

    def reduction(self, op: Any) -> str:
        if type(op) is not int or op not in _OPS:
            raise InvalidParamError(f"op is {op!r}, expected a paddle.distributed.ReduceOp", id=1411)
        return _OPS[op]

    def prepare(
        self, comm: Communicator, operator: str, outputs: Any, inputs: Any, terms: dict[str, Any], gradient: Any
    ) -> Any:
        """Divides one tensor to scatter; fills an empty list of outputs with tensors of the shapes of the inputs."""
        if operator == "scatter" and isinstance(inputs, Tensor) and comm.rank == terms["root"]:
            inputs = rows_of_ranks(terms["names"][1], inputs, comm.size)
        if operator == "all_to_all" and len(ADAPTER.listed(terms["names"][1], inputs)) == 0:
            raise RuntimeError("The input tensor_list should not be empty.")
        if not isinstance(outputs, list) or outputs or (operator == "gather" and comm.rank != terms["root"]):
            return super().prepare(comm, operator, outputs, inputs, terms, gradient)
        likes = inputs if operator == "all_to_all" else [inputs] * comm.size
        fresh = [paddle.empty_like(x) for x in likes]
        call = super().prepare(comm, operator, fresh, inputs, terms, gradient)
        outputs.extend(fresh)
        return call

    def tracks(self, *tensors: Tensor) -> bool:
        """True if an input alone needs a gradient; a call with an output has none, as in Paddle."""
        return len(tensors) == 1 and wants_gradient(tensors[0])

    def check_tracked_output(self) -> None:
        check_untracked(True, "out")

    def taken(self, x: Tensor, index: npt.NDArray[np.int64]) -> Tensor:
        return paddle.gather(x.reshape([-1]), paddle.to_tensor(index))

    def check_counts(self, counts: dict[str, Counts]) -> None:
        for name, values in counts.items():
            if isinstance(values, Tensor) and values.dtype != paddle.int64:
                raise InvalidTensorError(
                    f"Please use int64 type in {name}, which has dtype {values.dtype}.", 13, id=2098
                )


front_end = _FrontEnd()
