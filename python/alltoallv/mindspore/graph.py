"""The all-to-all exchange as a cell, for PyNative and for graphs, and as the operator of a graph: on CPU a call into
Python, on Ascend `alltoallv.mindspore.device_op`'s.

The operator is marked as a side effect, so that MindSpore runs the exchanges of a graph in the order of the program,
the same on every rank, and neither merges nor drops any. Exchanges of gradients run in the reverse order, if the
gradient is the operator's own ``bprop`` and not a cell's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn, ops
from mindspore._c_expression import MixedPrecisionType
from mindspore._c_expression.typing import TensorType, type_to_type_id
from mindspore.ops.primitive import constexpr

from alltoallv import _core
from alltoallv._calls import adapters
from alltoallv._calls.collectives import Transfer
from alltoallv._calls.counts import Counts, Unit, as_counts, overlap, packed
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.mindspore import device_op
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.device_op import report_loss
from alltoallv.mindspore.exchange import all_to_all_v
from alltoallv.mindspore.front_end import LATE
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import DTYPES, check_tensor, core_name, in_queue, numpy_dtype, records

__all__ = ["AllToAllV", "DynamicAllToAllV"]

Array = npt.NDArray[Any]
Caller = tuple[Group, str]
ARRAYS: adapters.Adapter[Array] = adapters.find("x", np.empty(0))  # of what MindSpore passes in
DTYPES_BY_NUMBER: dict[int, Any] = {type_to_type_id(dtype): dtype for dtype in DTYPES}  # by MindSpore's number
_FLOATS = (mindspore.float16, mindspore.bfloat16, mindspore.float32, mindspore.float64)  # which `to_float` casts
_CASTS: dict[Any, Any] = {  # by what `to_float` has set
    MixedPrecisionType.FP16: mindspore.float16,
    MixedPrecisionType.BF16: mindspore.bfloat16,
    MixedPrecisionType.FP32: mindspore.float32,
}
EMPTY = "MindSpore's graphs cannot hand over empty tensors: call the function outside the graph"


@dataclass(frozen=True)
class Host:
    """Runs the graph's operator: an exchange of the memory that MindSpore passes in.

    Attributes:
        unit: What layouts count: ``"element"``, or ``"row"`` of dimension 0; None: rows of 2 dimensions or more.
        refusal: Reason to raise instead of an exchange.
        check: Called with the input before anything else; peers are informed of its error.
        sums: True if receive regions may overlap, and what arrives is then added up: the transpose of an exchange whose
            send regions overlap.
        packs: True if send regions are packed: they cover the input.
    """

    unit: Unit | None
    group: Group
    refusal: str = ""
    check: Callable[[Array], None] = lambda input: None
    sums: bool = False
    packs: bool = False

    @property
    def caller(self) -> Caller:
        """The group and the operator that hear of errors."""
        return self.group, "all_to_all_v"

    def transposed(self) -> Host:
        return replace(self, refusal="", check=lambda input: None, sums=not self.sums, packs=False)

    def by_row(self, dimensions: int) -> bool:
        """Returns whether layouts of a tensor with so many dimensions count rows."""
        return _core.reads_rows(self.unit, dimensions)

    def shape(self, x: Any, send: Any, recv: Any, like: Any) -> Any:
        return [like[0], *x[1:]] if self.by_row(len(x)) else like

    def run(self, x: Array, send: Array, recv: Array, like: Array) -> Array:
        """Exchanges ``x``: ``send`` and ``recv`` are counts and displacements, ``[2, W]``; ``like`` has the output's
        shape, or rows.
        """
        self.check(x)
        comm = groups.resolve(self.group)
        with guard(comm, "all_to_all_v"):
            shape = (len(like), *x.shape[1:]) if self.by_row(x.ndim) else like.shape
            request, row, summed = self._request(comm, x.shape, shape, send, recv)
            numel = math.prod(request.shape if summed else shape)
        layout = request.layout
        out = Transfer(ARRAYS, comm, "all_to_all_v", x.shape, (numel,), layout, row).run(x)
        if summed:
            parts = out.astype(np.float32) if x.dtype.name == "bfloat16" else out
            out = np.zeros(math.prod(shape), parts.dtype)
            for begin, n, displ in zip(recv[1] * row, layout[2], layout[3], strict=True):
                out[begin : begin + n] += parts[displ : displ + n]
        return out.reshape(shape)

    def launch(self, call: device_op.GraphLaunch) -> None:
        """Exchanges the tensors of a launch on a device; elements of the output outside the regions stay undefined."""
        shape, dtype = call.input_shape[: call.input_rank], DTYPES_BY_NUMBER[call.dtype]
        self.check(np.broadcast_to(np.zeros((), numpy_dtype(dtype)), shape))
        comm = groups.resolve(self.group)
        with guard(comm, "all_to_all_v"):
            out = tuple(call.output_shape[: call.output_rank])
            send, recv = np.array(call.send[: call.send_size]), np.array(call.recv[: call.recv_size])
            request, row, summed = self._request(comm, shape, out, send.reshape(2, -1), recv.reshape(2, -1))
            if summed:
                raise InvalidParamError(
                    "the regions that are sent overlap, expected none for a gradient in a graph on Ascend", id=1332
                )
            plan = _core.Plan(comm.core, "all_to_all_v", core_name(dtype), *request.layout, 0, row)
        plan.run(call.input or 0, call.output or 0, -1.0, call.stream or 0)

    def _request(
        self, comm: Communicator, shape: Sequence[int], into: Sequence[int], send: Array, recv: Array
    ) -> tuple[_core.Request, int, bool]:
        """Returns the request, the elements of a unit, and whether receive regions overlap and are packed to be added.

        ``shape`` and ``into`` are the shapes of input and output.
        """
        if self.refusal:
            raise InvalidParamError(self.refusal, id=1482)
        for name, values in (("send_counts", send), ("recv_counts", recv)):
            _core.read_counts(name, values[0], comm.size)
        (sends, sdispls), (recvs, rdispls) = send.tolist(), recv.tolist()
        summed = self.sums and overlap(recvs, rdispls)
        layout = sends, recvs, None if self.packs else sdispls, None if summed else rdispls
        request = _core.Request.all_to_all_v(comm.size, shape, *layout, self.unit, None if summed else into)
        return request, request.row or 1, summed


class Stateless(nn.Cell):
    """A cell that is its own copy, in a copy of a network: MindSpore cannot copy its operators, nor a communicator."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Stateless:
        return self

    def _recompute(self, *_arguments: Any) -> None:
        """Leaves a graph's exchange as it is: its gradient needs none of its values."""

    def run(self, *inputs: Any, **named: Any) -> Tensor:
        """Does in PyNative what `construct` does in a graph."""
        raise NotImplementedError


def only_in_graphs(construct: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a cell's ``construct`` what MindSpore compiles, which looks below decorators; PyNative calls `run`.

    So hooks, recompute and casts are as in ``nn.Cell``, whose casts in PyNative are left to the operators.
    """

    @functools.wraps(construct)
    def called(cell: Stateless, *inputs: Any, **named: Any) -> Tensor:
        if dtype := _CASTS.get(cell.mixed_precision_type):
            inputs = tuple(_cast(x, dtype) for x in inputs)
            named = {name: _cast(x, dtype) for name, x in named.items()}
        return cell.run(*inputs, **named)

    return called


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if isinstance(x, Tensor) and x.dtype in _FLOATS else x


class Exchange(nn.Cell):
    """The cell that a graph calls: it exchanges, or refuses an empty tensor.

    The output has the last tensor's shape, or its rows.
    """

    def __init__(self, host: Host, derivatives: int = 1) -> None:
        super().__init__()
        plain = derivatives == 1 and not in_queue()
        self.exchange = exchange_operator(host) if plain else _Differentiable(host, derivatives)
        self.queues = in_queue()
        self.empty = plain_operator(replace(host, refusal=f"input is empty, but {EMPTY}"))

    def construct(self, x: Tensor, send: Tensor, recv: Tensor, like: Tensor) -> Tensor:
        if self.queues and x.size == 0:
            return ops.cast(self.empty(ops.zeros((1, *x.shape[1:]), x.dtype), send, recv, like), x.dtype)
        return ops.cast(self.exchange(x, send, recv, like), x.dtype)


def exchange_operator(host: Host) -> ops.Custom:
    """Returns the operator of the exchange, with the transposed one as gradient; bfloat16 comes as float32: cast it."""
    back = plain_operator(host.transposed())

    def bprop(x: Tensor, send: Tensor, recv: Tensor, like: Tensor, out: Tensor, dout: Tensor) -> tuple[Any, ...]:
        grad = back(ops.depend(dout, out), recv, send, x)
        return ops.cast(grad, x.dtype), send * 0, recv * 0, like * 0

    return make_operator(host.run, host.shape, host.caller, bprop=bprop)


def plain_operator(host: Host) -> Any:
    """Returns the operator of the exchange, without a gradient."""
    return _DeviceExchange(host) if in_queue() else make_operator(host.run, host.shape, host.caller)


class _DeviceExchange(nn.Cell):
    """An exchange of tensors on a device, whose output is zero outside the regions."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.operator, self.call, self.unit = device_op.operator(), device_op.number_of(host.launch), host.unit
        # Primitives: MindSpore loses functions like ops.where that a cell with a gradient of its own calls.
        self.sums, self.ones, self.both, self.any = ops.CumSum(), ops.Ones(), ops.LogicalAnd(), ops.ReduceAny()
        self.select, self.reshape, self.zeros_like = ops.Select(), ops.Reshape(), ops.ZerosLike()
        for dtype in DTYPES:
            numpy_dtype(dtype)  # asks MindSpore, which the thread of a launch cannot wait for

    def construct(self, x: Tensor, send: Tensor, recv: Tensor, like: Tensor) -> Tensor:
        by_row = x.ndim > 1 if self.unit is None else self.unit == "row"
        out = self.operator(x, send, recv, like, like, self.call, 1 if by_row else 0)
        shape = (out.shape[0],) + (1,) * (out.ndim - 1) if by_row else out.shape
        units = out.shape[0] if by_row else out.size
        at = self.sums(self.ones((units, 1), mindspore.int64), 0) - 1
        inside = self.both(at >= recv[1], at < recv[0] + recv[1])
        return self.select(self.reshape(self.any(inside, 1), shape), out, self.zeros_like(out))


class _Differentiable(nn.Cell):
    """An exchange with derivatives of several orders, which MindSpore takes only from a cell's ``bprop``.

    MindSpore orders their exchanges only where one depends on the other.
    """

    def __init__(self, host: Host, derivatives: int) -> None:
        super().__init__()
        self.operator = plain_operator(host)
        self.back = _Differentiable(host.transposed(), derivatives - 1) if derivatives else None

    def construct(self, x: Tensor, send: Tensor, recv: Tensor, like: Tensor) -> Tensor:
        return ops.cast(self.operator(x, send, recv, like), x.dtype)

    def bprop(self, x: Tensor, send: Tensor, recv: Tensor, like: Tensor, out: Tensor, dout: Tensor) -> tuple[Any, ...]:
        if self.back is None:
            raise NotImplementedError("a graph takes no derivative of this order through alltoallv")
        return self.back(ops.depend(dout, out), recv, send, x), send * 0, recv * 0, like * 0


def check_known(shape: Sequence[int | None], caller: Caller) -> None:
    """Raises InvalidParamError for an input whose shape MindSpore does not know when it compiles a graph."""
    if any(n is None or n < 0 for n in shape):
        dims = ", ".join("?" if n is None or n < 0 else str(n) for n in shape)
        with guard(groups.resolve(caller[0]), caller[1]):
            raise InvalidParamError(
                f"the input's shape is [{dims}] when MindSpore compiles the graph, expected known dimensions: "
                "compile for each shape (no enable_dynamic or set_inputs), or call the function outside the graph",
                id=1333,
            )


def make_operator(
    run: Callable[..., Array],
    shape: Callable[..., Any],
    caller: Caller,
    dtype: Any = None,
    bprop: Callable[..., Any] | None = None,
) -> ops.Custom:
    """Makes a function of NumPy arrays an operator of a graph.

    Args:
        run: The function; called in the order of the program, then of the gradients, which are the same on all
            ranks.
        shape: Computes the output's shape from the inputs' shapes.
        about: The group whose ranks hear of errors when MindSpore compiles the graph, and the operator's name.
        dtype: The output's dtype; None means the first input's. For bfloat16 it is float32: cast it.
        bprop: Computes the inputs' gradients from inputs, output and the output's gradient; by default there is none.
            What it calls must depend on the output, so that it comes after the program.
    """

    def infer(x: Any, *_others: Any) -> Any:
        with guard(groups.resolve(caller[0]), caller[1]):
            core_name(x.element_type())
        result = x.element_type() if dtype is None else dtype
        return TensorType(mindspore.float32 if result == mindspore.bfloat16 else result)

    @functools.wraps(run)  # MindSpore counts the inputs by the signature
    def array(*inputs: Array) -> Array:
        try:
            out = run(*inputs)
        except Exception as error:
            report_loss(error)
            raise
        # MindSpore reads the result through the buffer protocol, which has no bfloat16
        return out.astype(np.float32) if out.dtype.name == "bfloat16" else out

    def checked_shape(x: Any, *others: Any) -> Any:
        check_known(x, caller)  # MindSpore itself fails without a reason
        with guard(groups.resolve(caller[0]), caller[1]):
            if not x:
                raise InvalidTensorError("input has shape [], expected at least 1 dimension in a graph on CPU", id=2083)
            result = shape(x, *others)
            if 0 in (*x, *result):
                raise InvalidParamError(f"{'input' if 0 in x else 'the output'} is empty, but {EMPTY}", id=1334)
        return result

    records()  # a new graph comes after gradients that have failed
    return device_op.in_order(
        ops.Custom(array, out_shape=checked_shape, out_dtype=infer, bprop=bprop, func_type="pyfunc")
    )


class AllToAllV(Stateless):
    """`alltoallv.mindspore.all_to_all_v` with counts that are known when the cell is made.

    Values and gradients are equal in PyNative, in ``ms.jit`` functions and in GRAPH_MODE. In a graph, bfloat16 values
    pass through float32: bits of NaNs may change.

    Args:
        send_counts, recv_counts, sdispls, rdispls, unit, group: As for `all_to_all_v`; ``recv_counts`` is needed, as a
            graph must know shapes.
        derivatives: Highest order of derivatives that a graph takes. Above 1, MindSpore orders their exchanges only
            where one depends on the other: use it for one exchange, or several that follow from each other.

    Inputs:
        input: As for `all_to_all_v`.

    Outputs:
        As for `all_to_all_v`.

    Raises:
        The errors of `all_to_all_v`. In a graph, MindSpore may wrap the error's text into a RuntimeError.
    """

    def __init__(
        self,
        send_counts: Counts,
        recv_counts: Counts,
        *,
        sdispls: Counts | None = None,
        rdispls: Counts | None = None,
        unit: Unit | None = None,
        group: Group = None,
        derivatives: int = 1,
    ) -> None:
        super().__init__()
        _core.reads_rows(unit, 1)  # refuses others
        size = groups.resolve(group).size
        sends, recvs = as_counts("send_counts", send_counts, size), as_counts("recv_counts", recv_counts, size)
        places = {
            name: packed(counts) if displs is None else as_counts(name, displs, size)
            for name, displs, counts in (("sdispls", sdispls, sends), ("rdispls", rdispls, recvs))
        }
        self._counts, self._options = (sends, recvs), {**places, "sdispls": sdispls, "unit": unit, "group": group}
        regions = (sends, places["sdispls"]), (recvs, places["rdispls"])
        rows = max((d + n for n, d in zip(*regions[1], strict=True) if n), default=0)
        self.sends, self.recvs = (Tensor(np.array(pair, np.int64)) for pair in regions)
        self.rows = Tensor(np.zeros(max(rows, 1), np.int8))
        refusal = "" if rows else f"recv_counts is {recvs}, but {EMPTY}"
        self.graph = Exchange(Host(unit, group, refusal, self._check, packs=sdispls is None), derivatives)

    def _check(self, input: Array) -> None:
        """Checks what only this cell demands in a graph; by default nothing."""

    def run(self, input: Tensor) -> Tensor:
        return all_to_all_v(input, *self._counts, **self._options)

    @only_in_graphs
    def construct(self, input: Tensor) -> Tensor:
        return self.graph(input, self.sends, self.recvs, self.rows)


class DynamicAllToAllV(Stateless):
    """`alltoallv.mindspore.all_to_all_v` with counts that are tensors; one graph serves all their values.

    Values and gradients are equal in PyNative, in ``ms.jit`` functions and in GRAPH_MODE; bfloat16 as in `AllToAllV`.

    Args:
        rows: The size of the output in units, at least 1; a graph must know shapes.
        unit, group: As for `all_to_all_v`.
        derivatives: As for `AllToAllV`.

    Inputs:
        input: As for `all_to_all_v`; in a graph not empty.
        send_counts, recv_counts: Integer tensors ``[W]``. Counts of rank i for j and of rank j for i agree.
        sdispls, rdispls: Integer tensors ``[W]``, where the regions begin; packed in rank order if left out.

    Outputs:
        Shape ``[rows]``, or in rows ``[rows, *input.shape[1:]]``; zero outside the regions.

    Raises:
        The errors of `all_to_all_v`. In a graph, MindSpore may wrap the error's text into a RuntimeError.
    """

    def __init__(self, rows: int, *, unit: Unit | None = None, group: Group = None, derivatives: int = 1) -> None:
        super().__init__()
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise InvalidParamError(f"rows is {rows!r}, expected an integer above 0", id=1330)
        _core.reads_rows(unit, 1)  # refuses others
        self._unit, self._group, self.check = unit, group, constexpr(self._check_counts)
        self.rows = Tensor(np.zeros(rows, np.int8))
        self.graph, self.packed = (Exchange(Host(unit, group, packs=packs), derivatives) for packs in (False, True))

    def run(
        self,
        input: Tensor,
        send_counts: Tensor,
        recv_counts: Tensor,
        sdispls: Tensor | None = None,
        rdispls: Tensor | None = None,
    ) -> Tensor:
        with guard(groups.resolve(self._group), "all_to_all_v"):
            check_tensor("input", input)
            core_name(input.dtype)
            tail = tuple(input.shape[1:]) if _core.reads_rows(self._unit, input.ndim) else ()
            out = LATE.new((len(self.rows), *tail), input, zero=True)
        options: Any = {"sdispls": sdispls, "rdispls": rdispls, "unit": self._unit, "out": out, "group": self._group}
        return all_to_all_v(input, send_counts, recv_counts, **options)

    @only_in_graphs
    def construct(
        self,
        input: Tensor,
        send_counts: Tensor,
        recv_counts: Tensor,
        sdispls: Tensor | None = None,
        rdispls: Tensor | None = None,
    ) -> Tensor:
        self.check(send_counts.dtype, recv_counts.dtype)
        sends, recvs = self._regions(send_counts, sdispls), self._regions(recv_counts, rdispls)
        if sdispls is None:
            return self.packed(input, sends, recvs, self.rows)
        return self.graph(input, sends, recvs, self.rows)

    def _check_counts(self, *dtypes: Any) -> None:
        """Refuses counts that are not integers, when MindSpore compiles a graph."""
        with guard(groups.resolve(self._group), "all_to_all_v"):
            for name, dtype in zip(("send_counts", "recv_counts"), dtypes, strict=True):
                if "int" not in core_name(dtype):
                    raise InvalidParamError(f"{name} has dtype {dtype}, expected integers, one per rank", id=1331)

    def _regions(self, counts: Tensor, displs: Tensor | None) -> Tensor:
        counts = ops.cast(counts, mindspore.int64)
        displs = ops.cumsum(counts, 0) - counts if displs is None else ops.cast(displs, mindspore.int64)
        return ops.stack((counts, displs))
