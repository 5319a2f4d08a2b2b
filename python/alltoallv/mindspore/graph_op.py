"""Runs exchanges as an operator of MindSpore's graphs, to reach tensors on a device.

``device_op.cc`` has the operator. It gets addresses and the stream from MindSpore's runtime, as PyNative's does, and
the counts in host memory. Built with backend "CPU" it is the same without a stream; tests use that without an NPU. On
CPU graphs have another operator, which needs no compiler.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mindspore import ops

from alltoallv.mindspore import device_op
from alltoallv.mindspore.tensors import target

SHAPE, ROWS, SHAPE_AND_DTYPE = 0, 1, 2  # what an output has of `like`; else the input's row, and its dtype
_NUMBER, _ADDRESS, _LIST = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)


class Launch(ctypes.Structure):
    """An exchange whose turn has come: addresses, shapes, and counts with displacements."""

    _fields_ = (
        *((name, _NUMBER) for name in ("call", "dtype")),
        *((name, _ADDRESS) for name in ("input", "second", "output")),
        *((name, _LIST) for name in ("input_shape", "output_shape", "send", "recv")),
        *((name, _NUMBER) for name in ("input_rank", "output_rank", "send_size", "recv_size")),
        ("stream", _ADDRESS),
    )


_calls: dict[int, Callable[[Launch], None]] = {}  # by number, for ever: graphs are also kept
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch), ctypes.c_void_p, ctypes.c_uint64)
def run(launch: Any, message: int, capacity: int) -> int:
    """Runs or enqueues an exchange on MindSpore's thread; the operator's kernel calls it."""
    try:
        _calls[launch.contents.call](launch.contents)
    except Exception as error:
        return device_op.tell(error, message, capacity)
    return 0


def number_of(call: Callable[[Launch], None]) -> int:
    """Returns the number by which the operator finds ``call``."""
    number = next(_numbers)
    _calls[number] = call
    return number


@lru_cache
def operator() -> ops.Primitive:
    """Returns the operator, ``(x, send, recv, like, second, call, form)``; it is compiled at the first call.

    ``second`` is another tensor that is read. The output's form is `SHAPE`, `ROWS` or `SHAPE_AND_DTYPE` of ``like``.
    """
    device_op.build(target()).set_graph_entry(ctypes.cast(run, ctypes.c_void_p).value or 0)
    return in_order(ops.Primitive("Custom_alltoallv_exchange"))


def in_order(operator: Any) -> Any:
    """Marks an operator as a side effect, so that a graph runs it in the order of the program, and always."""
    for effect in ("side_effect_io", "side_effect_backprop"):  # the second is for what the gradient calls
        operator.add_prim_attr(effect, True)
    return operator
