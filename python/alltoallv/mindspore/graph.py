"""The all-to-all exchange as a cell, for PyNative and for graphs.

A graph reaches the transport through an operator that calls back into Python while the graph runs. The operator is
marked as a side effect, so that MindSpore runs the exchanges of a graph in the order of the program, the same on every
rank, and neither merges nor drops any. Exchanges of gradients run in the reverse order, if the gradient is the
operator's own ``bprop`` and not a cell's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn, ops
from mindspore._c_expression.typing import TensorType

from alltoallv import _core, memory
from alltoallv._calls.counts import Counts, Unit, as_counts, overlap, packed
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.adapter import LATE
from alltoallv.mindspore.exchange import all_to_all_v
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import check_tensor, core_name

Array = npt.NDArray[Any]

_EMPTY = "MindSpore's graphs on CPU cannot hand over empty tensors: call all_to_all_v outside the graph"


class AllToAllV(nn.Cell):
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
        unit: Unit = "element",
        group: Group = None,
        derivatives: int = 1,
    ) -> None:
        super().__init__()
        by_row = _core.reads_rows(unit, 1)
        size = groups.resolve(group).size
        sends, recvs = as_counts("send_counts", send_counts, size), as_counts("recv_counts", recv_counts, size)
        places = [
            packed(counts) if displs is None else as_counts(name, displs, size)
            for name, displs, counts in (("sdispls", sdispls, sends), ("rdispls", rdispls, recvs))
        ]
        self._arguments: dict[str, Any] = {
            "send_counts": sends,
            "recv_counts": recvs,
            "sdispls": places[0],
            "rdispls": places[1],
            "unit": "row" if by_row else "element",
            "group": group,
        }
        rows = max((d + n for n, d in zip(recvs, places[1], strict=True) if n), default=0)
        self.sends, self.recvs = (Tensor(np.array(pair, np.int64)) for pair in ((sends, places[0]), (recvs, places[1])))
        self.rows = Tensor(np.zeros(max(rows, 1), np.int8))
        self.graph = Exchange(
            Host(by_row, group, "" if rows else f"recv_counts is {recvs}, but {_EMPTY}", self._check), derivatives
        )

    def _check(self, input: Array) -> None:
        """Checks what only this cell demands in a graph; by default nothing."""

    def __call__(self, input: Tensor) -> Tensor:
        """Runs in PyNative; in a graph MindSpore reads `construct` instead."""
        return all_to_all_v(input, **self._arguments)

    def construct(self, input: Tensor) -> Tensor:
        return self.graph(input, self.sends, self.recvs, self.rows)


class DynamicAllToAllV(nn.Cell):
    """`alltoallv.mindspore.all_to_all_v` with counts that are tensors; one graph serves all their values.

    Values and gradients are equal in PyNative, in ``ms.jit`` functions and in GRAPH_MODE; bfloat16 as in `AllToAllV`.

    Args:
        rows: The size of the output in units, at least 1; a graph must know shapes.
        unit: The unit of counts and displacements: ``"element"``, or ``"row"`` of dimension 0.
        group: As for `all_to_all_v`.
        derivatives: As for `AllToAllV`.

    Inputs:
        input: As for `all_to_all_v`; in a graph not empty.
        send_counts, recv_counts: Integer tensors ``[W]``. Those of rank i for j and of rank j for i agree.
        sdispls, rdispls: Integer tensors ``[W]``, where the regions begin; packed in rank order if left out.

    Outputs:
        Shape ``[rows]``, or in rows ``[rows, *input.shape[1:]]``; zero outside the regions.

    Raises:
        The errors of `all_to_all_v`. In a graph, MindSpore may wrap the error's text into a RuntimeError.
    """

    def __init__(self, rows: int, *, unit: Unit = "element", group: Group = None, derivatives: int = 1) -> None:
        super().__init__()
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise InvalidParamError(f"rows is {rows!r}, expected an integer above 0")
        self._by_row, self._group = _core.reads_rows(unit, 1), group
        self.rows = Tensor(np.zeros(rows, np.int8))
        self.graph = Exchange(Host(self._by_row, group), derivatives)

    def __call__(
        self,
        input: Tensor,
        send_counts: Tensor,
        recv_counts: Tensor,
        sdispls: Tensor | None = None,
        rdispls: Tensor | None = None,
    ) -> Tensor:
        """Runs in PyNative; in a graph MindSpore reads `construct` instead."""
        with guard(groups.resolve(self._group), "all_to_all_v"):
            check_tensor("input", input)
            core_name(input.dtype)
            tail = tuple(input.shape[1:]) if self._by_row else ()
            out = LATE.new((len(self.rows), *tail), input, zero=True)
        return all_to_all_v(
            input,
            send_counts,
            recv_counts,
            sdispls=sdispls,
            rdispls=rdispls,
            unit="row" if self._by_row else "element",
            out=out,
            group=self._group,
        )

    def construct(
        self,
        input: Tensor,
        send_counts: Tensor,
        recv_counts: Tensor,
        sdispls: Tensor | None = None,
        rdispls: Tensor | None = None,
    ) -> Tensor:
        sends, recvs = self._regions(send_counts, sdispls), self._regions(recv_counts, rdispls)
        return self.graph(input, sends, recvs, self.rows)

    def _regions(self, counts: Tensor, displs: Tensor | None) -> Tensor:
        counts = ops.cast(counts, mindspore.int64)
        displs = ops.cumsum(counts, 0) - counts if displs is None else ops.cast(displs, mindspore.int64)
        return ops.stack((counts, displs))


@dataclass(frozen=True)
class Host:
    """Runs the graph's operator: an exchange of the memory that MindSpore passes in.

    Attributes:
        by_row: True if layouts count rows of dimension 0, False if they count elements.
        refusal: Reason to raise instead of an exchange.
        check: Called with the input before anything else; peers are informed of its error.
        sums: True if receive regions may overlap, and what arrives is then added up: the transpose of an exchange whose
            send regions overlap.
    """

    by_row: bool
    group: Group
    refusal: str = ""
    check: Callable[[Array], None] = lambda input: None
    sums: bool = False

    def transposed(self) -> Host:
        return replace(self, refusal="", check=lambda input: None, sums=not self.sums)

    def shape(self, x: Any, send: Any, recv: Any, like: Any) -> Any:
        return [like[0], *x[1:]] if self.by_row else like

    def run(self, x: Array, send: Array, recv: Array, like: Array) -> Array:
        """Exchanges ``x``: ``send`` and ``recv`` are counts and displacements, ``[2, W]``; ``like`` has the output's
        shape, or rows.
        """
        self.check(x)
        comm = groups.resolve(self.group)
        with guard(comm, "all_to_all_v"):
            if self.refusal:
                raise InvalidParamError(self.refusal)
            for name, values in (("send_counts", send), ("recv_counts", recv)):
                if values.shape != (2, comm.size):
                    raise InvalidParamError(f"{name} has {values.shape[1]} entries, expected {comm.size}, one per rank")
            shape = (len(like), *x.shape[1:]) if self.by_row else like.shape
            row = math.prod(shape[1:]) if self.by_row else 1
            room = math.prod(shape)
            sends, sdispls, recvs, rdispls = ([n * row for n in values] for values in (*send.tolist(), *recv.tolist()))
            summed = self.sums and overlap(recvs, rdispls)
            places, numel = (packed(recvs), sum(recvs)) if summed else (rdispls, room)
            _core.check_exchange(x.size, numel, sends, sdispls, recvs, places, comm.size)
            out = memory.empty((numel,), x.dtype)
            if sum(recvs) < numel:
                out.view(np.uint8)[...] = 0
            plan = _core.Plan(comm.core, "all_to_all_v", x.dtype.name, sends, sdispls, recvs, places, 0, max(row, 1))
        x = np.ascontiguousarray(x)
        plan.run(x.ctypes.data, out.ctypes.data)
        if summed:
            parts = out.astype(np.float32) if x.dtype.name == "bfloat16" else out
            out = np.zeros(room, parts.dtype)
            for begin, place, n in zip(rdispls, places, recvs, strict=True):
                out[begin : begin + n] += parts[place : place + n]
        return out.reshape(shape)


class Exchange(nn.Cell):
    """The cell that a graph calls: it exchanges, or refuses an empty tensor.

    The output has the last tensor's shape, or its rows.
    """

    def __init__(self, host: Host, derivatives: int = 1) -> None:
        super().__init__()
        self.exchange = exchange_operator(host) if derivatives == 1 else _Differentiable(host, derivatives)
        self.empty = make_operator(replace(host, refusal=f"input is empty, but {_EMPTY}").run, host.shape)

    def construct(self, x: Tensor, send: Tensor, recv: Tensor, like: Tensor) -> Tensor:
        if x.size == 0:
            return ops.cast(self.empty(ops.zeros((1, *x.shape[1:]), x.dtype), send, recv, like), x.dtype)
        return ops.cast(self.exchange(x, send, recv, like), x.dtype)


def exchange_operator(host: Host) -> ops.Custom:
    """Returns the operator of the exchange, with the transposed one as gradient; bfloat16 comes as float32: cast it."""
    back = make_operator(host.transposed().run, host.transposed().shape)

    def bprop(x: Tensor, send: Tensor, recv: Tensor, like: Tensor, out: Tensor, dout: Tensor) -> tuple[Any, ...]:
        grad = back(ops.depend(dout, out), recv, send, x)
        return ops.cast(grad, x.dtype), send * 0, recv * 0, like * 0

    return make_operator(host.run, host.shape, bprop=bprop)


class _Differentiable(nn.Cell):
    """An exchange with derivatives of several orders, which MindSpore takes only from a cell's ``bprop``.

    MindSpore orders their exchanges only where one depends on the other.
    """

    def __init__(self, host: Host, derivatives: int) -> None:
        super().__init__()
        self.operator = make_operator(host.run, host.shape)
        self.back = _Differentiable(host.transposed(), derivatives - 1) if derivatives else None

    def construct(self, x: Tensor, send: Tensor, recv: Tensor, like: Tensor) -> Tensor:
        return ops.cast(self.operator(x, send, recv, like), x.dtype)

    def bprop(self, x: Tensor, send: Tensor, recv: Tensor, like: Tensor, out: Tensor, dout: Tensor) -> tuple[Any, ...]:
        if self.back is None:
            raise NotImplementedError("a graph takes no derivative of this order through alltoallv")
        return self.back(ops.depend(dout, out), recv, send, x), send * 0, recv * 0, like * 0


def make_operator(
    run: Callable[..., Array], shape: Callable[..., Any], dtype: Any = None, bprop: Callable[..., Any] | None = None
) -> ops.Custom:
    """Makes a function of NumPy arrays an operator of a graph.

    Args:
        run: The function; called in the order of the program, then in that of the gradients, which are the same on all
            ranks.
        shape: Computes the output's shape from those of the inputs.
        dtype: The output's dtype; None means the first input's. For bfloat16 it is float32: cast it.
        bprop: Computes the inputs' gradients from inputs, output and the output's gradient; by default there is none.
            What it calls must depend on the output, so that it comes after the program.
    """

    def infer(x: Any, *_others: Any) -> Any:
        core_name(x.element_type())
        made = x.element_type() if dtype is None else dtype
        return TensorType(mindspore.float32 if made == mindspore.bfloat16 else made)

    @functools.wraps(run)  # MindSpore counts the inputs by the signature
    def array(*inputs: Array) -> Array:
        out = run(*inputs)  # MindSpore reads the result through the buffer protocol, which has no bfloat16
        return out.astype(np.float32) if out.dtype.name == "bfloat16" else out

    operator = ops.Custom(array, out_shape=shape, out_dtype=infer, bprop=bprop, func_type="pyfunc")
    for effect in ("side_effect_io", "side_effect_backprop"):  # the second is for what the gradient calls
        operator.add_prim_attr(effect, True)
    return operator
