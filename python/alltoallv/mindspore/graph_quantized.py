"""Quantized collectives in graphs on Ascend: their steps become operators of the graph when MindSpore compiles it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, jit_class, nn, ops
from mindspore.ops.primitive import constexpr

from alltoallv import _core
from alltoallv._calls.adapters import Adapter
from alltoallv._calls.counts import even_parts
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, ValueOverflowError
from alltoallv.mindspore import device_op, device_quantized
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.device_quantized import Moves, canonical_nan, check_added, filled, in_tree
from alltoallv.mindspore.graph import ARRAYS, DTYPES_BY_NUMBER, EMPTY, Caller, check_known
from alltoallv.mindspore.tensors import core_name, numpy_dtype
from alltoallv.quantization import requests
from alltoallv.quantization.functions import Quantized, ReductionCall, RowsCall
from alltoallv.quantization.spec import QuantizedReduction

_HALVES = 2.0**24  # makes every finite float16 an integer


@jit_class
class GraphMoves(Moves):
    """Moves tensors between the ranks by operators of a graph.

    ``agree`` gets the values of float16 scales and offset, if they are tensors of the graph.
    """

    def __init__(self, comm: Communicator, agree: Callable[[Any], Any], operator: str, digest: int = 0) -> None:
        super().__init__(comm, digest=digest)
        self.operator, self.nothing = device_op.operator(), Tensor([0], mindspore.int64)
        self.begins = device_op.number_of(lambda call: agree(np.array(call.send[: call.send_size]) / _HALVES))

        def number(dtype: Any, sends: Sequence[int], recvs: Sequence[int], operator: str) -> int:
            plan = device_quantized.plan_of(comm, operator, dtype, sends, recvs, digest)
            return device_op.number_of(lambda call: plan.run(call.input or 0, call.output or 0, -1.0, call.stream or 0))

        def refusing(text: str) -> int:
            def refuse(call: device_op.GraphLaunch) -> None:
                if any(call.send[: call.send_size]):
                    with guard(comm, operator):
                        raise ValueOverflowError(text, id=6003)

            return device_op.number_of(refuse)

        self.number, self.refusing = constexpr(number), constexpr(refusing)

    def begin(self, scale: Any, offset: Any) -> None:
        values = self.nothing
        if scale is not None:
            terms = ops.cat((scale.reshape(-1), offset.reshape(-1))).astype(mindspore.float32)
            values = (terms * _HALVES).astype(mindspore.int64)
        self.operator(values, values, self.nothing, self.nothing, self.nothing, self.begins, 0)

    def run(self, x: Tensor, sends: Sequence[int], recvs: Sequence[int], operator: str, count: int) -> Tensor:
        number = self.number(x.dtype, sends, recvs, operator)
        like = ops.zeros(count, mindspore.int8)
        return self.operator(x, self.nothing, self.nothing, like, self.nothing, number, 0)

    def refuse(self, flags: Tensor, text: str) -> None:
        values = flags.astype(mindspore.int64)
        self.operator(values, values, self.nothing, self.nothing, self.nothing, self.refusing(text), 0)


@jit_class
class ByKernel:
    """A reduction as one kernel in Ascend C, for scales of the request, or tensors of the graph: ``values`` returns the
    request with theirs. ``shape`` is the output's.
    """

    def __init__(self, comm: Communicator, request: QuantizedReduction, shape: Sequence[int], values: Any) -> None:
        self.operator, self.nothing = device_op.operator(), Tensor([0], mindspore.int64)
        self.shape, self.count, self.dtype = tuple(shape), request.count, getattr(mindspore, request.out_dtype)
        self.scales, second = self.nothing, 0
        if request.scale is not None:
            self.scales = Tensor(np.append(request.scale, np.float32(request.offset)).astype(np.float32))
            second = request.scale.size * 4
        own, out = (numpy_dtype(getattr(mindspore, name)).itemsize for name in (request.dtype, request.out_dtype))

        def launch(call: device_op.GraphLaunch) -> None:
            current = request if values is None else values(np.array(call.send[: call.send_size]) / _HALVES)
            regions = [(call.output or 0, request.count * out), (call.input or 0, request.count * own)]
            if second:
                first = call.second or 0
                regions += [(first, second), (first + second, 4)]
            device_quantized.launch_kernel(requests.plan(comm, current), regions, call.stream or 0)

        self.number = device_op.number_of(launch)

    def run(self, x: Tensor, error: Any = None, again: Any = None, scale: Any = None, offset: Any = None) -> Tensor:
        """Returns the flat result."""
        scales, values = self.scales, self.nothing
        if scale is not None:
            scales = ops.cat((scale.reshape(-1), offset.reshape(-1))).astype(mindspore.float32)
            values = (scales * _HALVES).astype(mindspore.int64)
        like = ops.zeros(self.count, self.dtype)
        return self.operator(x.reshape(-1), values, self.nothing, like, scales, self.number, 2)


class Steps(nn.Cell):
    """Runs what ``prepare`` returns for shapes and dtypes of the inputs, when MindSpore compiles a graph."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        super().__init__()
        self.prepare = constexpr(prepare)

    def construct(self, x: Tensor, scale: Any = None, offset: Any = None) -> Tensor:
        if scale is None:
            steps = self.prepare(x.shape, x.dtype)
            return steps.run(x).reshape(steps.shape)
        steps = self.prepare(x.shape, x.dtype, scale.shape, scale.dtype, offset.shape, offset.dtype)
        return steps.run(x, None, None, as_row(scale), as_row(offset)).reshape(steps.shape)


class StraightSteps(nn.Cell):
    """`Steps` with the straight-through gradient ``back(dout, x)``."""

    def __init__(self, prepare: Callable[..., Any], back: Callable[..., Any]) -> None:
        super().__init__()
        self.steps, self.gradient = Steps(prepare), _Gradient(back)

    def construct(self, x: Tensor) -> Tensor:
        return self.gradient(x, ops.stop_gradient(self.steps(x)))


class _Gradient(nn.Cell):
    """Returns its second input; the gradient goes to the first."""

    def __init__(self, back: Callable[..., Any]) -> None:
        super().__init__()
        self.back = back

    def construct(self, x: Tensor, y: Tensor) -> Tensor:
        return y

    def bprop(self, x: Tensor, y: Tensor, out: Tensor, dout: Tensor) -> tuple[Any, ...]:
        if x.dtype == mindspore.int8:
            return x * 0, y * 0
        return ops.cast(self.back(ops.depend(ops.cast(dout, x.dtype), out), x), x.dtype), y * 0


def as_row(values: Tensor) -> Tensor:
    """Returns a tensor of scales or offsets as float32 ``[n]``."""
    return values.reshape(-1).astype(mindspore.float32)


class _Reduction(ReductionCall[Any]):
    def run(self) -> Any:
        return reduction(self.comm, self.reduction.request, self.reduction.output.shape)


class _Rows(RowsCall[Any]):
    def __init__(self, adapter: Adapter[Any], comm: Communicator, rows: requests.Rows[Any], timeout: Any) -> None:
        self.rows, self._comm = rows, comm

    def run(self) -> Any:
        rows = self.rows
        moves = GraphMoves(self._comm, lambda _: None, "quantized_all_to_all", rows.digest())
        recvs = rows.recvs or []
        with guard(self._comm, "quantized_all_to_all"):
            _check_size(rows.input.size and sum(recvs))
            return device_quantized.Rows(moves, rows, (sum(recvs), *rows.input.shape[1:]))


def reduction(comm: Communicator, request: QuantizedReduction, shape: Sequence[int], replace: Any = None) -> Any:
    """Returns the steps of a reduction, or the kernel in Ascend C where it serves; ``replace`` returns the request with
    the scales and the offset of a launch.
    """

    def agree(values: Any) -> None:
        requests.plan(comm, request if replace is None else replace(values)).compare(False, False)

    with guard(comm, request.operator):
        _check_size(request.count and request.counts[comm.rank % len(request.counts)])
        if device_quantized.kernel_serves(comm, requests.plan(comm, request)):
            return ByKernel(comm, request, shape, replace)
        moves = GraphMoves(comm, agree, request.operator)
        return device_quantized.Reduction(moves, request, comm.rank, shape)


@jit_class
class LeafSteps:
    """The sum in a tree of ``leaves`` vectors, of which a tensor of this shape and dtype has a rank's share."""

    def __init__(self, comm: Communicator, shape: Sequence[int], dtype: Any, leaves: int) -> None:
        self.shape, self.count, self.dtype = tuple(shape[1:]), math.prod(shape[1:]), dtype
        self.half, self.floating = dtype in (mindspore.float16, mindspore.bfloat16), dtype.is_floating_point
        counts, size = even_parts(self.count, comm.size), comm.size
        self.each, self.size, self.leaves, self.share = leaves // size, size, leaves, counts[0]

        def agree(_: Any) -> None:
            terms: Any = {"root": 1, "shape": tuple(shape), "leaves": leaves, "moves": False}
            comm.core.reduce("all_reduce", core_name(dtype), "sum", 0, 0, counts, **terms)

        self.moves = GraphMoves(comm, agree, "all_reduce")

    def run(self, x: Tensor) -> Tensor:
        """Returns the flat sum."""
        self.moves.begin(None, None)
        table = filled(x.reshape(self.each, -1), self.size * self.share)
        table = table.reshape(self.each, self.size, self.share).swapaxes(0, 1)
        terms = self.moves.parts(table.reshape(self.size, -1)).reshape(self.leaves, self.share)
        total = in_tree(terms.astype(mindspore.float32) if self.half else terms)
        if self.floating and self.leaves > 1:
            total = canonical_nan(total)
        return self.moves.gather(total.astype(self.dtype)).reshape(-1)[: self.count]


def leaf_steps(group: Any, leaves: int, x: tuple[Sequence[int], Any]) -> LeafSteps:
    """Returns the steps of a sum of leaves of a tensor of this shape and dtype."""
    caller, comm = (group, "all_reduce"), groups.resolve(group)
    check_known(x[0], caller)
    with guard(comm, "all_reduce"):
        _check_size(math.prod(x[0]))
        check_added(core_name(x[1]))
        return LeafSteps(comm, x[0], x[1], _core.checked_leaves(leaves, x[0], comm.size))


def _check_size(size: int) -> None:
    if not size:
        raise InvalidParamError(f"input or output is empty, but {EMPTY}", id=1335)


class _Prepared(Quantized[Any]):
    at_once = False

    def reductions(self) -> type[ReductionCall[Any]]:
        return _Reduction

    def exchanges(self) -> type[RowsCall[Any]]:
        return _Rows


STEPS = _Prepared(ARRAYS, groups.resolve)  # the quantized collectives whose calls return their steps


def shaped(shape: Sequence[int], dtype: Any, caller: Caller) -> Any:
    """Returns an array of that shape and dtype, all zero, which takes no memory; refuses unknown dimensions."""
    check_known(shape, caller)
    return np.broadcast_to(np.zeros((), numpy_dtype(dtype)), tuple(shape))


def summing(group: Any, op: str) -> Callable[..., Any]:
    """Returns the function ``(dout, x)`` of a graph on Ascend that adds or averages ``dout`` over the ranks."""
    operator, nothing = device_op.operator(), Tensor([0], mindspore.int64)

    def launch(call: device_op.GraphLaunch) -> None:
        comm = groups.resolve(group)
        shape, name = call.input_shape[: call.input_rank], core_name(DTYPES_BY_NUMBER[call.dtype])
        places = call.input or 0, call.output or 0, even_parts(math.prod(shape), comm.size)
        comm.core.reduce("all_reduce", name, "sum", *places, -1.0, call.stream or 0, shape=shape)

    number, share = device_op.number_of(launch), groups.resolve(group).size if op == "avg" else 1

    def back(dout: Tensor, x: Tensor) -> Tensor:
        return operator(dout, nothing, nothing, dout, nothing, number, 0) / share

    return back
