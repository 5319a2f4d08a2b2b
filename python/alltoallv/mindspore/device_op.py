"""Runs collectives as an operator in MindSpore's own queue, to reach tensors on a device.

MindSpore runs it among its kernels and passes device pointers and the stream. ``device_op.cc`` passes them on to a C
function, a callback into this process's core, which enqueues the collective on that stream. With backend "CPU" the
stream is null and the collective runs at once; tests use that without an NPU. Tensors on CPU do not use this path: they
are exchanged at the call.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function

from alltoallv import _core
from alltoallv._calls.adapters import check_on_npu, check_untracked
from alltoallv._calls.guard import COUNT_NAMES, STATUS_SHAPE, guard
from alltoallv.communicator import Communicator
from alltoallv.errors import BackendUnavailableError, InvalidParamError, PeerLostError
from alltoallv.mindspore.tensors import Place, Received, as_input, core_name, executor, target, wants_gradient
from alltoallv.quantization.requests import exclude as check_excluded

Launch = Callable[[Any, int], None]  # called with the addresses of the tensors, and the stream
_tickets = itertools.count(1)
_waiting: dict[int, Launch] = {}  # by ticket, until MindSpore reaches the call
_ADDRESSES = ctypes.POINTER(ctypes.c_void_p)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, _ADDRESSES, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
def _run(ticket: int, addresses: Any, stream: int, message: int, capacity: int) -> int:
    """Runs a ticket's collective on MindSpore's thread, at any time, so it must live as long as the module."""
    try:
        _waiting.pop(ticket)(addresses, stream or 0)
    except Exception as error:
        return tell(error, message, capacity)
    return 0


def tell(error: Exception, message: int, capacity: int) -> int:
    """Writes an error's class and text where the operator reads them, and returns that it failed."""
    report_loss(error)
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")[: capacity - 1] + b"\0"
    ctypes.memmove(message, text, len(text))
    return 1


def report_loss(error: Exception) -> None:
    """Writes to stderr at once why a peer no longer calls: launchers end this process before MindSpore passes the
    error on. Who has died is there already, in every front end.
    """
    if isinstance(error, PeerLostError) and "was lost" not in str(error):
        os.write(2, f"alltoallv: {error}\n".encode(errors="backslashreplace"))


#: Address of the C function that runs or enqueues the collective of a ticket.
ENTRY = ctypes.cast(_run, ctypes.c_void_p).value or 0


def ticket_for(launch: Launch) -> int:
    """Returns a ticket for one run of ``launch``, which `ENTRY` gets as its context."""
    ticket = next(_tickets)
    _waiting[ticket] = launch
    return ticket


@lru_cache
def build(backend: str = "CPU", folder: str | None = None) -> Any:
    """Compiles the operator, or loads it if ``folder`` (default: below ``MS_COMPILER_CACHE_PATH``) holds it.

    Raises:
        BackendUnavailableError: it cannot be compiled; needs g++ and ninja, for "Ascend" CANN and ``ASCEND_OPP_PATH``.
    """
    source = str(Path(__file__).with_name("device_op.cc"))
    try:
        # MindSpore itself links the first of these so that nothing comes of it, and the others not at all.
        libraries = "-lmindspore_core -lmindspore_hardware_abstract -lmindspore_ops_host"
        options: Any = {"backend": backend, "build_dir": folder, "ldflags": libraries, "cflags": "-O1"}
        return ops.CustomOpBuilder("alltoallv_device_op", [source], **options).load().so_module
    except (RuntimeError, ValueError, OSError) as error:
        raise BackendUnavailableError(
            f"MindSpore's CustomOpBuilder failed for backend {backend!r} ({error}); "
            "it needs g++, ninja and, for Ascend, CANN with ASCEND_OPP_PATH set",
            id=5041,
        ) from error


def enqueue(run: Callable[[Place, int], Any], outputs: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> None:
    """Queues a collective: ``run`` is called with the places of these contiguous tensors, and with the stream.

    Elements of the outputs that it does not write keep their values. On CPU it is complete, on an NPU it is in order on
    MindSpore's stream. All ranks make their calls in the same order.

    Raises:
        RuntimeError: has the class and text of the collective's error; MindSpore keeps no more of it.
    """
    tensors = [*outputs, *inputs]
    sizes = [x.nbytes if x.size else 0 for x in tensors]

    def launch(addresses: Any, stream: int) -> None:
        places = {id(x): (addresses[k], sizes[k]) if sizes[k] else (0, 0) for k, x in enumerate(tensors)}
        run(lambda x: places[id(x)], stream)

    build(target()).write(tensors, list(outputs), ENTRY, ticket_for(launch))
    if target() == "CPU":
        executor.sync()  # a built-in operator may otherwise read an output before it is written


# Exchanges as an operator of MindSpore's graphs. ``device_op.cc`` has it, too: it gets addresses and the stream from
# MindSpore's runtime, and the counts in host memory. Built with backend "CPU" it is the same without a stream; tests
# use that without an NPU. On CPU graphs have another operator, which needs no compiler.


SHAPE, ROWS, SHAPE_AND_DTYPE = 0, 1, 2  # what an output has of `like`; else the input's row, and its dtype
_NUMBER, _ADDRESS, _LIST = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)


class GraphLaunch(ctypes.Structure):
    """An exchange whose turn has come: addresses, shapes, and counts with displacements."""

    _fields_ = (
        *((name, _NUMBER) for name in ("call", "dtype")),
        *((name, _ADDRESS) for name in ("input", "second", "output")),
        *((name, _LIST) for name in ("input_shape", "output_shape", "send", "recv")),
        *((name, _NUMBER) for name in ("input_rank", "output_rank", "send_size", "recv_size")),
        ("stream", _ADDRESS),
    )


_calls: dict[int, Callable[[GraphLaunch], None]] = {}  # by number, for ever: graphs are also kept
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(GraphLaunch), ctypes.c_void_p, ctypes.c_uint64)
def run(launch: Any, message: int, capacity: int) -> int:
    """Runs or enqueues an exchange on MindSpore's thread; the operator's kernel calls it."""
    try:
        _calls[launch.contents.call](launch.contents)
    except Exception as error:
        return tell(error, message, capacity)
    return 0


def number_of(call: Callable[[GraphLaunch], None]) -> int:
    """Returns the number by which the operator finds ``call``."""
    number = next(_numbers)
    _calls[number] = call
    return number


@lru_cache
def operator() -> ops.Primitive:
    """Returns the operator, ``(x, send, recv, like, second, call, form)``; it is compiled at the first call.

    ``second`` is another tensor that is read. The output's form is `SHAPE`, `ROWS` or `SHAPE_AND_DTYPE` of ``like``.
    """
    build(target()).set_graph_entry(ctypes.cast(run, ctypes.c_void_p).value or 0)
    return in_order(ops.Primitive("Custom_alltoallv_exchange"))


def in_order(operator: Any) -> Any:
    """Marks an operator as a side effect, so that a graph runs it in the order of the program, and always."""
    for effect in ("side_effect_io", "side_effect_backprop"):  # the second is for what the gradient calls
        operator.add_prim_attr(effect, True)
    return operator


# All-to-all-v by counts that lie on an NPU: one kernel in Ascend C, in MindSpore's queue.


def device() -> str:
    """Returns the kind of device where tensors lie."""
    return "npu" if target() == "Ascend" else "cpu"


def as_counts(counts: Sequence[Any], size: int) -> list[Tensor | None]:
    """Returns counts of `COUNT_NAMES` as int64; the host does not read a tensor's values."""
    tensors: list[Tensor | None] = []
    for name, values in zip(COUNT_NAMES, counts, strict=True):
        if values is None:
            tensors.append(None)
            continue
        each = values if isinstance(values, Tensor) else Tensor(np.asarray(values, np.int64))
        if each.dtype not in (mindspore.int64, mindspore.int32) or each.shape != (size,):
            raise InvalidParamError(
                f"{name} is {each.dtype} {each.shape}, expected int64 ({size},), one entry per rank", id=1324
            )
        tensors.append(each.astype(mindspore.int64).contiguous())
    return tensors


def exchange_counted(
    comm: Communicator, x: Tensor, counts: Sequence[Tensor | None], capacity: int, row: int
) -> list[Tensor]:
    """Queues the exchange of rows of ``row`` elements; returns what arrives, flat, its counts and the status."""
    sends, sdispls, recvs = counts
    out, status = ops.zeros((capacity * row,), x.dtype), ops.zeros(STATUS_SHAPE, mindspore.int32)
    received = ops.zeros((comm.size,), mindspore.int64) if recvs is None else recvs
    dtype, rows = core_name(x.dtype), x.size // max(row, 1)
    present = [each for each in counts if each is not None]

    def launch(locate: Place, stream: int) -> None:
        places = [0 if each is None else locate(each)[0] for each in (x, sends, sdispls, out, received, status)]
        read, written = (places[0], rows, places[1], places[2]), (places[3], capacity, recvs is not None)
        _core.exchange_counted_on_device(comm.core, dtype, row, *read, *written, places[4], places[5], stream)

    outputs = [out, status] if recvs is not None else [out, received, status]
    enqueue(launch, outputs, [x, *present])
    return [out, received, status]


class _Exchange(_Function):
    """`exchange_counted`; rows go back by the counts that have come."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, comm: Communicator, counts: Sequence[Tensor | None], capacity: int, row: int
    ) -> tuple[Tensor, ...]:
        results = tuple(exchange_counted(comm, as_input(input), counts, capacity, row))
        ctx.comm, ctx.received, ctx.shape, ctx.row = comm, results[1], input.shape, row
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_others: Any) -> tuple[Any, ...]:
        rows = math.prod(ctx.shape) // max(ctx.row, 1)
        back = _Exchange.apply(grad, ctx.comm, (ctx.received, None, None), rows, ctx.row)[0]
        return back.reshape(ctx.shape), None, None, None, None


def all_to_all_counted(
    input: Tensor, counts: Sequence[Any], unit: Any, capacity: Any, comm: Communicator, others: dict[str, Any]
) -> Received:
    """Receives up to ``capacity`` units, by counts on the device; ``others`` are arguments that exclude it."""
    with guard(comm, "all_to_all_v"):
        x = as_input(input)
        check_excluded("capacity is given", **others)
        check_on_npu("input", device())
        _core.checked_least("capacity", capacity, 0)
        check_untracked(wants_gradient(input), counts[1], argument="sdispls")
        by_row, placed = _core.reads_rows(unit, input.ndim), as_counts(counts, comm.size)
    row = math.prod(input.shape[1:]) if by_row else 1
    tracked = wants_gradient(input)
    results = (
        _Exchange.apply(input, comm, placed, capacity, row)
        if tracked
        else exchange_counted(comm, x, placed, capacity, row)
    )
    return Received(results[0].reshape((capacity, *input.shape[1:]) if by_row else (capacity,)), *results[1:])
