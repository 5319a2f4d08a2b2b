"""MindSpore's groups, tensors and handles; `alltoallv.mindspore` says what all its functions have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops
from mindspore.graph import jit_trace

from alltoallv import _core
from alltoallv._calls.declared import Made
from alltoallv._calls.exchanges import Exchanges
from alltoallv._calls.guard import guard
from alltoallv._calls.linear import Map
from alltoallv.communicator import Communicator
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.adapter import LATE
from alltoallv.mindspore.autograd import apply, assign, tracks
from alltoallv.mindspore.calls import Call
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import check_tensor, core_name
from alltoallv.mindspore.work import CommHandle, Done

# Of a call with its own arguments: what makes the values of its outputs.
Gradient = Callable[[Communicator, Made, dict[str, Any]], Callable[[], Sequence[Tensor]]]


def enter(group: Group) -> Communicator:
    """The communicator of a call; refuses where MindSpore would record the call's values instead of the call."""
    if getattr(jit_trace, "_using_trace", False):
        raise RuntimeError(
            "alltoallv.mindspore cannot be traced: use capture_mode='bytecode', "
            "or 'ast' with alltoallv.mindspore.AllToAllV"
        )
    return groups.resolve(group)


def check_async(async_op: Any) -> None:
    """Refuses what is no bool, with MindSpore's words."""
    if not isinstance(async_op, bool):
        raise TypeError(f"The argument 'async_op' must be a bool, but got {type(async_op)}.")


class _FrontEnd(Exchanges[Tensor, Group, CommHandle]):
    adapter = LATE

    def enter(self, group: Group) -> Communicator:
        return enter(group)

    def host(self, comm: Communicator) -> Communicator:
        return on_host(comm)

    def rank_in(self, group: Group, rank: Any, name: str) -> Any:
        return groups.rank_in(group, rank)

    def check_async(self, async_op: Any) -> None:
        check_async(async_op)

    def check(self, name: str, x: Any) -> Tensor:
        check_tensor(name, x)
        core_name(x.dtype)
        return x

    def at_once(self, input: Any, async_op: bool) -> bool:
        return async_op is False and isinstance(input, Tensor)

    def tracks(self, *tensors: Tensor) -> bool:
        return tracks(*tensors)

    def apply(self, input: Tensor, call: Map[Tensor]) -> Tensor:
        return apply(input, call)

    def assign(self, name: str, output: Tensor, values: Tensor, kept: npt.NDArray[np.bool_] | None) -> None:
        assign(name, output, values, kept)

    def taken(self, x: Tensor, index: npt.NDArray[np.int64]) -> Tensor:
        return ops.gather(x.reshape(-1), Tensor(index), 0)

    def numbers(self, values: npt.NDArray[np.int64]) -> Tensor:
        return Tensor.from_numpy(values)

    def call(
        self,
        declared: Callable[..., Made],
        group: Group,
        async_op: bool,
        *arguments: Any,
        root: tuple[str, Any] | None = None,
        timeout: float | None = None,
        result: Any = None,
        gradient: Gradient | None = None,
        **more: Any,
    ) -> CommHandle | None:
        """As every front end's. ``gradient`` gives what makes the outputs' values where a gradient may be asked for.

        MindSpore then follows the values into the outputs, and a handle is already done.
        """
        comm = enter(group)
        with guard(comm, declared.__name__.removeprefix("_")):
            check_async(async_op)
            limit = _core.read_timeout(timeout)
            if root is not None:
                more["root"] = groups.rank_in(group, root[1])
            call = Call(declared, comm, arguments, more, limit)
            made, values = call.made, None
            if gradient is not None and tracks(*made.outputs, *made.inputs, *arguments):
                values = gradient(comm, made, more)
        if values is None:
            return call.start(async_op, result)
        for j, (output, value) in enumerate(zip(made.outputs, values(), strict=True)):
            assign(made.name if len(made.outputs) == 1 else f"{made.name}[{j}]", output, value.reshape(output.shape))
        return Done(made.outputs[0] if len(made.outputs) == 1 else made.outputs) if async_op else None


front_end = _FrontEnd()
