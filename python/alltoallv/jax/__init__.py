"""Runs jax.lax.ragged_all_to_all between processes on CPU, where XLA has none, as a callback to `alltoallv.numpy`.

``group`` is a `Communicator`; None means the default one of this job. Programs run under ``python -m alltoallv run`` or
any launcher that `Communicator.from_env` knows; `jax.distributed` is not needed.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from alltoallv import numpy as av
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.extras import extra
from alltoallv.numpy.arrays import resolve

jax = extra("jax", "jax")
io_callback = extra("jax.experimental", "jax").io_callback

__all__ = ["ragged_all_to_all"]

Array = npt.NDArray[Any]

_NAMES = {  # of all_to_all_v -> here; a rank learns from its peers where their rows go
    "sdispls": "input_offsets",
    "send_counts": "send_sizes",
    "rdispls": "the peers' output_offsets",
    "recv_counts": "recv_sizes",
}


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    group: Communicator | None = None,
) -> Any:
    """Sends rows to every rank, to a place in its output that this rank gives, as ``jax.lax.ragged_all_to_all`` does.

    Rank r sends ``operand[input_offsets[j] : input_offsets[j] + send_sizes[j]]`` to rank j, which finds it in its
    result from row ``output_offsets[j]`` on (of rank r's array). It also works in ``jax.jit``, where calls keep their
    order, and with gradients of ``operand`` and ``output``.

    Args:
        operand, output: Shapes ``[n, ...]`` and ``[m, ...]``, equal but in dimension 0, of one dtype.
        input_offsets, send_sizes, output_offsets, recv_sizes: One integer >= 0 for every rank; ``recv_sizes[j]`` of
            rank i is ``send_sizes[i]`` of rank j.

    Returns:
        ``output`` with the received rows; all other rows keep their values.

    Raises:
        InvalidTensorError, InvalidParamError: an argument's shape or dtype does not fit, when the call is traced.
        jax.errors.JaxRuntimeError: what `alltoallv.numpy.all_to_all_v` raises when it runs, with its text; also if a
            peer refuses its arguments.
    """
    comm = resolve(group)
    with guard(comm, "all_to_all_single"):
        try:
            arguments = _checked(comm.size, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
        except Exception:
            jax.effects_barrier()  # earlier calls may still run, and the peers wait in them first
            raise
    return _exchange(comm, *arguments)


def _checked(size: int, *arguments: Any) -> list[Any]:
    operand, output, *tables = map(jax.numpy.asarray, arguments)
    if operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:] or not operand.ndim or not output.ndim:
        shown = f"{output.dtype}{list(output.shape)}"
        raise InvalidTensorError(
            f"output is {shown}, expected rows shaped as operand's, {operand.dtype}{list(operand.shape)}", id=2076
        )
    for name, table in zip(("input_offsets", "send_sizes", "output_offsets", "recv_sizes"), tables, strict=True):
        if table.shape != (size,) or not jax.numpy.issubdtype(table.dtype, jax.numpy.integer):
            shown = f"{table.dtype}{list(table.shape)}"
            raise InvalidParamError(f"{name} is {shown}, expected {size} integers, one per rank", id=1053)
    return [operand, output, *tables]


def _learnt(comm: Communicator, tables: Any) -> list[Array]:
    """Returns the tables as int64, with the ``output_offsets`` that the peers announced, and 0 where no rows go."""
    offsets, sent, to, received = (np.asarray(table).astype(np.int64) for table in tables)
    places = np.empty_like(to)
    av.all_to_all_single(places, to, group=comm)
    return [np.where(sent, offsets, 0), sent, np.where(received, places, 0), received]


def _forward(comm: Communicator, operand: Any, output: Any, *tables: Any) -> Array:
    offsets, sent, places, received = _learnt(comm, tables)
    out = np.array(output)
    x = np.asarray(operand)
    try:
        av.all_to_all_v(x, sent, received, sdispls=offsets, rdispls=places, unit="row", out=out, group=comm)
    except InvalidParamError as error:
        text = re.sub("|".join(_NAMES), lambda match: _NAMES[match[0]], str(error))
        raise InvalidParamError(text, error.code) from None
    return out


def _backward(comm: Communicator, rows: int, cotangent: Any, *tables: Any) -> tuple[Array, Array]:
    """Returns two gradients: the operand's from the peers' rows, the output's from rows that were not overwritten."""
    offsets, sent, places, received = _learnt(comm, tables)
    kept = np.array(cotangent)
    came = av.all_to_all_v(kept, received, sent, sdispls=places, unit="row", group=comm)
    operand = np.zeros((rows, *kept.shape[1:]), kept.dtype)
    for first, count, end in zip(offsets, sent, np.cumsum(sent), strict=True):
        operand[first : first + count] += came[end - count : end]  # the sent regions may overlap
    for first, count in zip(places, received, strict=True):
        kept[first : first + count] = 0
    return operand, kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(comm: Communicator, operand: Any, output: Any, *tables: Any) -> Any:
    call = functools.partial(_forward, comm)
    return io_callback(call, jax.ShapeDtypeStruct(output.shape, output.dtype), operand, output, *tables, ordered=True)


def _exchange_forward(comm: Communicator, operand: Any, output: Any, *tables: Any) -> tuple[Any, Any]:
    return _exchange(comm, operand, output, *tables), (operand.shape, tables)


def _exchange_backward(comm: Communicator, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    shape, tables = kept
    shapes = [jax.ShapeDtypeStruct(each, cotangent.dtype) for each in (shape, cotangent.shape)]
    call = functools.partial(_backward, comm, shape[0])
    return (*io_callback(call, tuple(shapes), cotangent, *tables, ordered=True), None, None, None, None)


_exchange.defvjp(_exchange_forward, _exchange_backward)
