"""MindSpore's groups, tensors and handles; `alltoallv.mindspore` describes what all its functions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops
from mindspore.graph import jit_trace

from alltoallv import _core
from alltoallv._calls.exchanges import ExpertRows, Order
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.adapter import ADAPTER, LATE
from alltoallv.mindspore.autograd import apply, assign, refuse_gradient
from alltoallv.mindspore.calls import Call
from alltoallv.mindspore.group import Group, on_host
from alltoallv.mindspore.tensors import in_queue, tracks
from alltoallv.mindspore.work import CommHandle, Done

# Makes a function for the outputs' values.
Gradient = Callable[[Communicator, _core.CheckedCall], Callable[[], Sequence[Tensor]]]


def enter(group: Group) -> Communicator:
    """Returns a call's communicator; refuses where MindSpore would record the call's values instead of the call."""
    if getattr(jit_trace, "_using_trace", False):
        raise BackendUnavailableError(
            "alltoallv.mindspore cannot be traced: use capture_mode='bytecode', "
            "or 'ast' with alltoallv.mindspore.AllToAllV",
            id=5069,
        )
    return groups.resolve(group)


def check_async(async_op: Any) -> None:
    """Refuses values that are not bool, with MindSpore's error text."""
    if not isinstance(async_op, bool):
        raise TypeError(f"The argument 'async_op' must be a bool, but got {type(async_op)}.")


class _FrontEnd(ExpertRows[Tensor, Group, CommHandle]):
    adapter, messenger, quick = LATE, ADAPTER, Tensor
    local = TypeError  # as MindSpore's checks of argument types
    enter, host, rank_in = staticmethod(enter), staticmethod(on_host), staticmethod(groups.rank_in)
    check_async, tracks, numbers = staticmethod(check_async), staticmethod(tracks), staticmethod(Tensor.from_numpy)
    apply, assign = staticmethod(apply), staticmethod(assign)

    def taken(self, x: Tensor, index: npt.NDArray[np.int64]) -> Tensor:
        return ops.gather(x.reshape(-1), Tensor(index), 0)

    def permuted(self, x: Tensor, order: Order) -> Tensor:
        # MindSpore's own works on a device, but on CPU not for all dtypes.
        return ops.gather(x, Tensor(order), 0) if in_queue() else super().permuted(x, order)

    def prepare(
        self,
        comm: Communicator,
        operator: str,
        outputs: Any,
        inputs: Any,
        terms: dict[str, Any],
        gradient: Gradient | None,
    ) -> tuple[Call, Callable[[], Sequence[Tensor]] | None]:
        call = Call(comm, operator, outputs, inputs, **terms)
        tensors = *call.checked_call.outputs, *call.checked_call.inputs
        if gradient is None:
            refuse_gradient(operator, *tensors)
            return call, None
        if not tracks(*tensors):
            return call, None
        return call, gradient(comm, call.checked_call)

    def start(self, comm: Communicator, call: Any, async_op: bool, timeout: float) -> CommHandle | None:
        checked, values = call
        if values is None:
            return checked.start(async_op, timeout)  # type: ignore[no-any-return]
        # Gradients must reach the outputs, so the values are needed now; the handle is done.
        checked_call = checked.checked_call
        for j, (output, value) in enumerate(zip(checked_call.outputs, values(), strict=True)):
            name = f"{checked_call.name}[{j}]" if isinstance(checked_call.result, list) else checked_call.name
            assign(name, output, value.reshape(output.shape))
        return Done(checked_call.result) if async_op else None


front_end = _FrontEnd()
