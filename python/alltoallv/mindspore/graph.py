"""The exchange as a cell, for PyNative and for graphs.

A graph reaches the transport through an operator that calls back into Python while the graph runs. It is marked as a
side effect: MindSpore then runs the exchanges of a graph in the order of the program, the same on every rank, and
neither merges nor drops any. Without the mark it does all three.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn, ops
from mindspore._c_expression.typing import TensorType

from alltoallv import _core, memory
from alltoallv._calls.counts import Counts, Unit, as_counts, packed
from alltoallv._calls.guard import guard
from alltoallv._calls.transfer import packing
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.exchange import all_to_all_v
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import core_name

_EMPTY = "MindSpore's graphs on CPU cannot hand over empty tensors: call all_to_all_v outside the graph"
_DERIVATIVES = 3  # orders of derivatives that a graph can take through an exchange


class AllToAllV(nn.Cell):
    """`alltoallv.mindspore.all_to_all_v` with counts that are known when the cell is made.

    The same values and gradients in PyNative, in ``ms.jit`` functions and in GRAPH_MODE. In a graph, bfloat16 values
    come back by way of float32: bits of NaNs may change.

    Args:
        send_counts, recv_counts, sdispls, rdispls, unit, group: As for `all_to_all_v`; ``recv_counts`` is needed, as a
            graph must know shapes.

    Inputs:
        input: As for `all_to_all_v`.

    Outputs:
        As for `all_to_all_v`.

    Raises:
        As `all_to_all_v`. In a graph, MindSpore may wrap the error's text into a RuntimeError.
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
    ) -> None:
        super().__init__()
        self.by_row = _core.reads_rows(unit, 1)
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
            "unit": "row" if self.by_row else "element",
            "group": group,
        }
        index = packing(sends, places[0])  # MindSpore's gather adds up the gradients of what is sent twice
        self.index = None if index is None else Tensor(index)
        sdispl = places[0] if index is None else packed(sends)
        host = _Host(sends, sdispl, recvs, places[1], self.by_row, group)
        if not sum(recvs):
            host.refusal = f"recv_counts is {recvs}, but {_EMPTY}"
        self.graph = _Exchange(host, _DERIVATIVES)
        self.rows = Tensor(np.zeros(max(host.rows, 1), np.int8))
        nothing = _Host(sends, sdispl, recvs, places[1], self.by_row, group)
        nothing.refusal = f"input is empty, but {_EMPTY}"
        self.nothing = _Exchange(nothing, 0)

    def __call__(self, input: Tensor) -> Tensor:
        """The PyNative way; in a graph MindSpore reads `construct` instead."""
        return all_to_all_v(input, **self._arguments)

    def construct(self, input: Tensor) -> Tensor:
        if not self.by_row:
            input = input.reshape(-1)
        if self.index is not None:
            input = ops.gather(input, self.index, 0)
        if input.shape[0] == 0:
            return self.nothing(ops.zeros((1, *input.shape[1:]), input.dtype), self.rows)
        return self.graph(input, self.rows)


class _Host:
    """What the graph's operator does when it runs: an exchange of the memory that MindSpore hands over."""

    def __init__(
        self,
        sends: list[int],
        sdispls: list[int],
        recvs: list[int],
        rdispls: list[int],
        by_row: bool,
        group: Group,
    ) -> None:
        self.layout = (sends, sdispls, recvs, rdispls)
        self.by_row = by_row
        self.group = group
        self.rows = max((d + n for n, d in zip(recvs, rdispls, strict=True) if n), default=0)  # of the output
        self.refusal: str | None = None

    def transposed(self) -> _Host:
        sends, sdispls, recvs, rdispls = self.layout
        return _Host(recvs, rdispls, sends, sdispls, self.by_row, self.group)

    def run(self, x: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
        comm = groups.resolve(self.group)
        with guard(comm, "all_to_all_v"):
            if self.refusal:
                raise InvalidParamError(self.refusal)
            row = int(np.prod(x.shape[1:], dtype=np.int64)) if self.by_row else 1
            sends, sdispls, recvs, rdispls = ([value * row for value in values] for values in self.layout)
            _core.check_exchange(x.size, rows * row, sends, sdispls, recvs, rdispls, comm.size)
            out = memory.empty((rows, *x.shape[1:]), x.dtype)
            if sum(recvs) < rows * row:
                out.reshape(-1).view(np.uint8)[...] = 0
            arrays = (sends, sdispls, recvs, rdispls)
            plan = _core.Plan(comm.core, "all_to_all_v", x.dtype.name, *arrays, 0, max(row, 1))
        x = np.ascontiguousarray(x)
        plan.run(x.ctypes.data, out.ctypes.data)
        # MindSpore reads results through the buffer protocol, which has no bfloat16.
        return out.astype(np.float32) if x.dtype.name == "bfloat16" else out


class _Exchange(nn.Cell):
    """The operator and, as its gradient, the transposed one. The output has as many rows as a second tensor."""

    def __init__(self, host: _Host, derivatives: int) -> None:
        super().__init__()
        self.back = _Exchange(host.transposed(), derivatives - 1) if derivatives else None

        def run(x: npt.NDArray[Any], like: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return host.run(x, len(like))

        def shape(x: Any, like: Any) -> Any:
            return [like[0], *x[1:]]

        def dtype(x: Any, like: Any) -> Any:
            core_name(x.element_type())
            return TensorType(mindspore.float32) if x.element_type() == mindspore.bfloat16 else x

        self.operator = ops.Custom(run, out_shape=shape, out_dtype=dtype, func_type="pyfunc")
        self.operator.add_prim_attr("side_effect_io", True)

    def construct(self, x: Tensor, like: Tensor) -> Tensor:
        return ops.cast(self.operator(x, like), x.dtype)

    def bprop(self, x: Tensor, like: Tensor, out: Tensor, dout: Tensor) -> tuple[Any, ...]:
        if self.back is None:
            raise NotImplementedError("a graph takes no derivative of this order through alltoallv")
        return self.back(dout, x), like * 0
