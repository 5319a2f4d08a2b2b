"""The all-to-all exchange as a cell, for PyNative and for graphs."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.primitive import constexpr

from alltoallv import _core
from alltoallv._calls.counts import Counts, Unit, as_counts, packed
from alltoallv._calls.guard import guard
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import group as groups
from alltoallv.mindspore.exchange import all_to_all_v
from alltoallv.mindspore.front_end import LATE
from alltoallv.mindspore.graph_exchange import EMPTY, Array, Exchange, Host, Stateless, only_in_graphs
from alltoallv.mindspore.group import Group
from alltoallv.mindspore.tensors import check_tensor, core_name

__all__ = ["AllToAllV", "DynamicAllToAllV"]


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
