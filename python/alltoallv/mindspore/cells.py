"""Cells for ATB's operations and the quantized collectives, with gradients, in PyNative and in graphs.

In a graph, bfloat16 needs the package ml_dtypes, and bfloat16 results pass through float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common._grad_function import _Function
from mindspore.ops.primitive import constexpr

from alltoallv import _core
from alltoallv._calls.collectives import all_reduction, leaf_reduction
from alltoallv._calls.counts import Counts, as_counts, packed, shares
from alltoallv._calls.guard import guard
from alltoallv.atb.operations import AllToAllVOperation, QuantAllReduceOperation, connect
from alltoallv.atb.params import AllToAllVParam, QuantAllReduceParam, QuantType
from alltoallv.communicator import Communicator
from alltoallv.mindspore import graph_quantized, quantized
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.collectives import all_reduce_leaves
from alltoallv.mindspore.exchange import all_to_all_v
from alltoallv.mindspore.front_end import Tensors, summed
from alltoallv.mindspore.graph import (
    ARRAYS,
    AllToAllV,
    Array,
    Caller,
    Host,
    Stateless,
    make_operator,
    only_in_graphs,
    plain_operator,
)
from alltoallv.mindspore.graph_quantized import Steps, StraightSteps, shaped
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import core_name, in_queue, target, tracks
from alltoallv.quantization.functions import Quantized
from alltoallv.quantization.requests import exclude
from alltoallv.quantization.spec import Format, Gather, GroupSize, Overflow, QuantizedReduction, SumOp

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "AllReduceLeaves",
    "AllToAllVCell",
    "QuantAllReduceCell",
    "QuantizedAllReduce",
    "QuantizedAllToAll",
    "QuantizedReduceScatter",
]

_OUTPUTS = {1: mindspore.float16, 0: mindspore.float32, 27: mindspore.bfloat16}  # key: ACL's number of the dtype
_ON_ARRAYS: Quantized[Array] = Quantized(ARRAYS, groups.resolve)  # on what MindSpore passes in


class RowsOptions(TypedDict, total=False):
    """The options of `QuantizedAllToAll`.

    Attributes:
        bits, format, group_size, out_dtype, overflow: As of `quantized_all_to_all`.
    """

    bits: int
    format: Format | None
    group_size: GroupSize | None
    out_dtype: mindspore.Type | None
    overflow: Overflow


class ScatterOptions(RowsOptions, total=False):
    """The options of `QuantizedReduceScatter`.

    Attributes:
        op: As of `quantized_reduce_scatter`.
    """

    op: SumOp


class ReduceOptions(RowsOptions, total=False):
    """The options of `QuantizedAllReduce`.

    Attributes:
        op, scale, offset, comm_quant_scale_1, comm_quant_scale_2, gather, leaves: As of `quantized_all_reduce`.
    """

    op: SumOp
    scale: Tensor | float | None
    offset: float | None
    comm_quant_scale_1: Tensor | float | None
    comm_quant_scale_2: Tensor | float | None
    gather: Gather
    leaves: int | None


class AllToAllVCell(AllToAllV):
    """`AllToAllVOperation` as a cell with the same checks and values, and with gradients, in PyNative and in graphs.

    Args:
        param: As for the operation.
        communicator: Has ``param.rank_size`` ranks, and this is ``param.rank``. By default the one that ``param``
            describes, which is made or found here, together with its ranks.

    Inputs:
        input: As for the operation.

    Outputs:
        Shape ``[1, sum(recv_counts)]``.

    Raises:
        The errors of the operation. In a graph, MindSpore may wrap the error's text into a RuntimeError.
    """

    def __init__(self, param: AllToAllVParam, communicator: Communicator | None = None) -> None:
        operation = AllToAllVOperation(param, communicator)
        comm = _connected(param, communicator)
        places: Any = {"sdispls": param.sdispls, "rdispls": param.rdispls}
        super().__init__(param.send_counts, param.recv_counts, **places, unit="element", group=comm)
        self.rows = self.rows.reshape(1, -1)
        self._operation = operation

    def _check(self, input: Array | Tensor) -> None:
        self._operation.infer_shape(input)

    def run(self, input: Tensor) -> Tensor:
        self._check(input)
        return super().run(input).reshape(1, -1)


class QuantAllReduceCell(Stateless):
    """`QuantAllReduceOperation` as a cell, in PyNative and in graphs.

    With ``QuantType.DYNAMIC`` it has straight-through gradients: of the sum (or average), not quantized. With a
    shared scale, whose input is int8, it has none.

    Args:
        param, communicator: As for `AllToAllVCell`.

    Inputs:
        x, scale, offset: As for the operation.

    Outputs:
        A tensor of the param's output dtype in the shape of ``x``.

    Raises:
        The errors of the operation. In a graph, MindSpore may wrap the error's text into a RuntimeError.
    """

    def __init__(self, param: QuantAllReduceParam, communicator: Communicator | None = None) -> None:
        super().__init__()
        self._operation = QuantAllReduceOperation(param, communicator)
        self._comm, self._op = _connected(replace(param, backend="auto").group(), communicator), param.all_reduce_type
        caller = self._comm, "quantized_all_reduce"
        self.dynamic, self.refuse = param.quant_type == QuantType.DYNAMIC, constexpr(self._refuse)
        self.dtype = None if self.dynamic and param.out_data_type == -1 else _OUTPUTS[abs(param.out_data_type)]
        back = _summed(self._comm, self._op)
        if in_queue():
            self.graph, self.shared = StraightSteps(self._steps, back), Steps(self._steps)
        else:
            self.graph = _Straight(lambda x: self._operation(x), _same, caller, self.dtype, back)
            self.shared = make_operator(lambda x, s, offset: self._operation(x, s, offset), _same, caller, self.dtype)

    def run(self, x: Tensor, scale: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
        if self.dynamic and scale is None and offset is None and tracks(x):
            return _Reduction.apply(x, self._operation, self._comm, self._op, None)
        return self._operation(x, scale, offset)

    @only_in_graphs
    def construct(self, x: Tensor, scale: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
        if (scale is None) != self.dynamic or (offset is None) != self.dynamic:
            self.refuse(1 if scale is None and offset is None else 2 if scale is None or offset is None else 3)
        if self.dynamic:
            return self.graph(x)
        return ops.cast(self.shared(x, scale, offset), self.dtype)

    def _refuse(self, inputs: int) -> None:
        """Raises the operation's error for a wrong number of inputs: MindSpore itself dies of None."""
        self._operation.request(*[np.zeros(16, np.int8)] * inputs)

    def _steps(self, *like: Any) -> Any:
        """Returns the steps for inputs of these shapes and dtypes, one after the other."""
        caller = self._comm, "quantized_all_reduce"
        inputs = [shaped(*pair, caller) for pair in zip(like[::2], like[1::2], strict=True)]
        request = self._operation.request(*inputs)

        def with_values(values: Array) -> QuantizedReduction:
            scale, offset = values[:-1].astype(np.float32), float(values[-1])
            return replace(request, scale=scale, offset=offset)

        return graph_quantized.reduction(self._comm, request, like[0], None if self.dynamic else with_values)


class _Reduction(_Function):
    """A dynamic reduction in PyNative, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, operation: QuantAllReduceOperation, comm: Communicator, op: str, timeout: float | None
    ) -> Tensor:
        ctx.comm, ctx.op, ctx.dtype = comm, op, x.dtype
        return operation(x, timeout=timeout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return summed(grad.astype(ctx.dtype), ctx.comm, ctx.op), None, None, None, None


def differentiated(
    operation: Any, x: Tensor, out: Tensor | None, feedback: Any, timeout: float | None
) -> Tensor | None:
    """Runs an operation in PyNative with its gradient; None for a shared scale, which has none."""
    param, comm = operation.param, operation._communicator
    if isinstance(operation, AllToAllVOperation):
        operation.infer_shape(x)
        comm, places = _connected(param, comm), {"sdispls": param.sdispls, "rdispls": param.rdispls}
        options: Any = {**places, "unit": "element", "out": out, "group": comm, "timeout": timeout}
        result: Tensor = all_to_all_v(x, param.send_counts, param.recv_counts, **options)
        return result.reshape(1, -1) if out is None else result
    if param.quant_type != QuantType.DYNAMIC:
        return None
    comm = _connected(replace(param, backend="auto").group(), comm)
    with guard(comm, "quantized_all_reduce"):
        exclude("x wants a gradient", out=out, error_feedback=feedback)
    result = _Reduction.apply(x, operation, comm, param.all_reduce_type, timeout)
    return result


Tensors.with_gradient = staticmethod(differentiated)


class _Options(Stateless):
    """The base class of the cells of the quantized collectives.

    ``counts`` are the function's counts, in rows; ``options`` are its other arguments, those that ``accepts`` has.
    """

    function: str
    accepts: type[RowsOptions]

    def __init__(self, group: Group, options: RowsOptions, **counts: list[int]) -> None:
        super().__init__()
        accepted = self.accepts.__annotations__
        for name in options:
            if name not in accepted:
                raise TypeError(f"{type(self).__name__} has no option {name!r}, expected one of {', '.join(accepted)}")
        self._arguments = {**counts, **options, "group": group}

    def run(self, input: Tensor) -> Tensor:
        return getattr(quantized, self.function)(input, **self._arguments)

    @only_in_graphs
    def construct(self, input: Tensor) -> Tensor:
        return self.graph(input)

    def _make(self, shape: Callable[..., Any], back: Callable[..., Any]) -> None:
        """Makes the operator for graphs; ``shape`` computes the output's shape, ``back`` the gradient."""
        arguments, dtype = dict(self._arguments), self._arguments.get("out_dtype")
        if dtype is not None:
            arguments["out_dtype"] = core_name(dtype)
        for name in ("scale", "comm_quant_scale_1", "comm_quant_scale_2"):
            if isinstance(arguments.get(name), Tensor):
                arguments[name] = arguments[name].asnumpy()
        if dtype is None and arguments.get("scale") is not None:
            dtype = mindspore.float16
        name, caller = self.function, (arguments["group"], self.function)
        if in_queue():
            steps = graph_quantized.STEPS.called
            self.graph = StraightSteps(lambda shape, dtype: steps(name, shaped(shape, dtype, caller), arguments), back)
        else:
            self.graph = _Straight(lambda x: _ON_ARRAYS.called(name, x, arguments), shape, caller, dtype, back)


class QuantizedAllReduce(_Options):
    """`quantized_all_reduce` as a cell; its options are those arguments of the function.

    Values and gradients are equal in PyNative, in ``ms.jit`` functions and in GRAPH_MODE.
    """

    function = "quantized_all_reduce"
    accepts = ReduceOptions

    def __init__(self, *, group: Group = None, **options: Unpack[ReduceOptions]) -> None:
        super().__init__(group, options)
        op, leaves = options.get("op", "sum"), options.get("leaves")
        if leaves is None:
            self._make(_same, _summed(group, op))
        else:
            self._make(lambda x: x[1:], _to_leaves(group, leaves if op == "avg" else 1))


class QuantizedReduceScatter(_Options):
    """`quantized_reduce_scatter` as a cell, for inputs of ``rows`` rows; its options are those arguments of the
    function.

    Values and gradients are equal in PyNative, in ``ms.jit`` functions and in GRAPH_MODE.
    """

    function = "quantized_reduce_scatter"
    accepts = ScatterOptions

    def __init__(
        self, rows: int, recv_counts: Counts | None = None, *, group: Group = None, **options: Unpack[ScatterOptions]
    ) -> None:
        comm = groups.resolve(group)
        parts = shares("recv_counts", recv_counts, "input", rows, comm.size)
        super().__init__(group, options, recv_counts=parts)
        own = parts[comm.rank]
        gathers = ([own] * comm.size, [0] * comm.size), (parts, packed(parts))
        share = 1 / comm.size if options.get("op") == "avg" else 1.0
        self._make(lambda x: [own, *x[1:]], _returned(group, *gathers, share))


class QuantizedAllToAll(_Options):
    """`quantized_all_to_all` as a cell with known counts of rows; its options are those arguments of the
    function.

    Values and gradients are equal in PyNative, in ``ms.jit`` functions and in GRAPH_MODE.
    """

    function = "quantized_all_to_all"
    accepts = RowsOptions

    def __init__(
        self, send_counts: Counts, recv_counts: Counts, *, group: Group = None, **options: Unpack[RowsOptions]
    ) -> None:
        size = groups.resolve(group).size
        sends, recvs = as_counts("send_counts", send_counts, size), as_counts("recv_counts", recv_counts, size)
        super().__init__(group, options, send_counts=sends, recv_counts=recvs)
        back = _returned(group, (recvs, packed(recvs)), (sends, packed(sends)))
        self._make(lambda x: [sum(recvs), *x[1:]], back)


class AllReduceLeaves(Stateless):
    """`all_reduce_leaves` as a cell; values and gradients are equal in PyNative and in graphs.

    Args:
        leaves, group: As for `all_reduce_leaves`.

    Inputs:
        input: As for `all_reduce_leaves`; in a graph of at least 2 dimensions.

    Outputs:
        The sum, of the input's shape without dimension 0.
    """

    def __init__(self, leaves: int, *, group: Group = None) -> None:
        super().__init__()
        self._arguments = leaves, group
        self.graph = _leaf_sum(group, leaves, _to_leaves(group))

    def run(self, input: Tensor) -> Tensor:
        return all_reduce_leaves(input, *self._arguments)

    @only_in_graphs
    def construct(self, input: Tensor) -> Tensor:
        return self.graph(input)


class _Straight(nn.Cell):
    """A graph's operator with the straight-through gradient ``back(dout, x)``."""

    def __init__(
        self,
        run: Callable[[Array], Array],
        shape: Callable[..., Any],
        caller: Caller,
        dtype: Any,
        back: Callable[..., Any],
    ) -> None:
        super().__init__()

        def bprop(x: Tensor, out: Tensor, dout: Tensor) -> tuple[Any, ...]:
            if x.dtype == mindspore.int8:
                return (x * 0,)
            return (ops.cast(back(ops.depend(ops.cast(dout, x.dtype), out), x), x.dtype),)

        self.operator, self.dtype = make_operator(run, shape, caller, dtype, bprop), dtype

    def construct(self, x: Tensor) -> Tensor:
        return ops.cast(self.operator(x), x.dtype if self.dtype is None else self.dtype)


def _returned(group: Group, send: Any, recv: Any, share: float = 1.0) -> Callable[..., Any]:
    """Returns the gradient of an exchange or gather of rows: it sends the rows' gradients back, or gathers them."""
    sends, recvs = (Tensor(np.array(pair, np.int64)) for pair in (send, recv))
    host = Host("row", group)
    exchange = plain_operator(host)

    def back(dout: Tensor, x: Tensor) -> Tensor:
        return exchange(dout, sends, recvs, x) * share

    return back


def _summed(group: Group, op: str) -> Callable[..., Any]:
    """Returns the gradient of a sum or average over the ranks, which is the sum or average of the gradients."""
    if in_queue():
        return graph_quantized.summing(group, op)

    def run(dout: Array) -> Array:
        return all_reduction(ARRAYS, groups.resolve(group), dout.shape, op).run(dout)

    operator = make_operator(run, _same, (group, "all_reduce"))

    def back(dout: Tensor, x: Tensor) -> Tensor:
        return operator(dout)

    return back


def _leaf_sum(group: Group, leaves: int | None, back: Any = None) -> Any:
    """Returns a graph's sum of leaves, by default of one of every rank; ``back``: its gradient, if it has one."""
    caller = group, "all_reduce"

    def count() -> int:
        return groups.resolve(group).size if leaves is None else leaves

    if in_queue():

        def prepare(*x: Any) -> Any:
            return graph_quantized.leaf_steps(group, count(), x)

        return Steps(prepare) if back is None else StraightSteps(prepare, back)

    def run(x: Array) -> Array:
        comm = groups.resolve(group)
        with guard(comm, "all_reduce"):
            reduction = leaf_reduction(ARRAYS, comm, x.shape, count())
        return reduction.run(x)

    if back is None:
        return make_operator(run, lambda x: x[1:], caller)
    return _Straight(run, lambda x: x[1:], caller, None, back)


def _to_leaves(group: Group, divisor: int = 1) -> Callable[..., Any]:
    """Returns the gradient of a sum of leaves: the sum of the ranks' gradients in a tree, divided, for every leaf."""
    total = _leaf_sum(group, None)

    def back(dout: Tensor, x: Tensor) -> Tensor:
        of_leaf = total(ops.expand_dims(dout, 0))
        if divisor > 1:
            of_leaf = of_leaf / divisor
        return ops.broadcast_to(ops.expand_dims(of_leaf, 0), x.shape)

    return back


def _same(x: Any, *_others: Any) -> Any:
    return x


def _connected(param: AllToAllVParam, communicator: Communicator | None) -> Communicator:
    comm = communicator or Communicator(connect(param, target() == "Ascend"))
    _core.check_ranks(param.rank, param.rank_size, comm.rank, comm.size, comm.domain)
    return comm
