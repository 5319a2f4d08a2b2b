"""Paddle's groups, tensors and tasks; `alltoallv.paddle` describes what all its functions share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor
from paddle.distributed import ReduceOp

from alltoallv._calls.exchanges import Exchanges
from alltoallv._calls.linear import Map
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.paddle.adapter import ADAPTER
from alltoallv.paddle.autograd import apply
from alltoallv.paddle.group import Group, rank_in, resolve
from alltoallv.paddle.tensors import check_tensor, core_name
from alltoallv.paddle.work import Done, Task

_OPS = {getattr(ReduceOp, name): name.lower() for name in ("SUM", "AVG", "MIN", "MAX", "PROD")}


class _FrontEnd(Exchanges[Tensor, Group, Task]):
    adapter = ADAPTER

    def enter(self, group: Group) -> Communicator | None:
        return resolve(group)

    def rank_in(self, group: Group, rank: Any, name: str) -> Any:
        return rank_in(group, rank, name)

    def ended(self, result: Any) -> Task:
        return Done(result)

    def check(self, name: str, x: Any) -> Tensor:
        check_tensor(name, x)
        core_name(x.dtype)
        return x

    def reduction(self, op: Any) -> str:
        if type(op) is not int or op not in _OPS:
            raise InvalidParamError(f"op is {op!r}, expected a paddle.distributed.ReduceOp")
        return _OPS[op]

    def tracks(self, *tensors: Tensor) -> bool:
        """True if an input alone needs a gradient; a call with an output has none, as in Paddle."""
        return len(tensors) == 1 and paddle.is_grad_enabled() and not tensors[0].stop_gradient

    def check_tracked_output(self) -> None:
        raise InvalidParamError("out is given for an input that wants a gradient, expected one or the other")

    def apply(self, input: Tensor, call: Map[Tensor]) -> Tensor:
        return apply(input, call)

    def taken(self, x: Tensor, index: npt.NDArray[np.int64]) -> Tensor:
        return paddle.gather(x.reshape([-1]), paddle.to_tensor(index))

    def numbers(self, values: npt.NDArray[np.int64]) -> Tensor:
        return paddle.to_tensor(values)


front_end = _FrontEnd()
