"""The exchange as an operator in MindSpore's own queue: the way to tensors on a device.

MindSpore runs it among its kernels and hands over device pointers and the stream; ``device_op.cc`` passes them on to a
C function, a callback into this process's core, which enqueues the exchange on that stream. With backend "CPU" the
stream is null and the exchange runs at once; that is how the path is tested without an NPU. It is not the way that
tensors on CPU go: those are exchanged at the call.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspore import Tensor, ops

from alltoallv import _core
from alltoallv.errors import BackendUnavailableError
from alltoallv.mindspore.tensors import settle, target

_tickets = itertools.count(1)
_waiting: dict[int, _core.Plan] = {}  # by ticket, until MindSpore has come to the call


@ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_void_p, ctypes.c_uint64),
)
def _run(ticket: int, input: int, output: int, stream: int, message: int, capacity: int) -> int:
    """On MindSpore's thread. Lives as long as the module: it may be called, and be running, at any time."""
    try:
        _waiting.pop(ticket).run(input or 0, output or 0, -1.0, stream or 0)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".encode()[: capacity - 1] + b"\0"
        ctypes.memmove(message, text, len(text))
        return 1
    return 0


#: Address of the C function that runs or enqueues the exchange of a ticket.
ENTRY = ctypes.cast(_run, ctypes.c_void_p).value or 0


def ticket_for(plan: _core.Plan) -> int:
    """For one run of the plan, as the context of `ENTRY`."""
    ticket = next(_tickets)
    _waiting[ticket] = plan
    return ticket


@lru_cache
def build(backend: str = "CPU", folder: str | None = None) -> Any:
    """Compiles the operator, or loads it if ``folder`` (default: below ``MS_COMPILER_CACHE_PATH``) holds it.

    Raises:
        BackendUnavailableError: it cannot be compiled; needs g++ and ninja, for "Ascend" CANN and ``ASCEND_OPP_PATH``.
    """
    source = str(Path(__file__).with_name("device_op.cc"))
    try:
        return ops.CustomOpBuilder("alltoallv_device_op", [source], backend=backend, build_dir=folder).load()
    except (RuntimeError, ValueError, OSError) as error:
        raise BackendUnavailableError(
            f"MindSpore's CustomOpBuilder failed for backend {backend!r} ({error}); "
            "it needs g++, ninja and, for Ascend, CANN with ASCEND_OPP_PATH set"
        ) from error


class DeviceExchange:
    """A plan that runs in MindSpore's queue, on the stream that MindSpore hands over.

    Calls of all ranks must come in the same order.

    Args:
        plan: Which regions go where; over HCCL where the tensors lie on NPUs.
        module: What `build` has given back.
    """

    def __init__(self, plan: _core.Plan, module: Any) -> None:
        self._plan, self._module = plan, module

    def __call__(self, input: Tensor, output: Tensor | Sequence[int]) -> Tensor:
        """The exchange's output: on CPU complete, on an NPU in the order of MindSpore's stream.

        Args:
            output: Contiguous; what no region covers keeps its value. Or the shape of a new one, all of which the plan
                must write.

        Raises:
            RuntimeError: with the class and text of the exchange's error; MindSpore keeps no more of it.
        """
        ticket = ticket_for(self._plan)
        if isinstance(output, Tensor):
            made = self._module.exchange_into(input, output, ENTRY, ticket)
        else:
            made = self._module.exchange(input, list(output), ENTRY, ticket)
        if target() == "CPU":
            settle()  # a built-in consumer may otherwise read the output before it is written
        return made


def run(plan: _core.Plan, input: Tensor, output: Tensor | Sequence[int]) -> Tensor:
    """A call of the operator for this process's device."""
    return DeviceExchange(plan, build(target()))(input, output)
