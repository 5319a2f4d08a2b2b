"""Paddle's global_scatter and global_gather, whose rows travel by a front end's own `all_to_all_v`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from alltoallv._calls import experts
from alltoallv._calls.adapters import A, Adapter
from alltoallv._calls.counts import Counts
from alltoallv._calls.exchanges import Exchanges
from alltoallv._calls.experts import Matrix
from alltoallv._calls.front_end import G, H
from alltoallv._calls.guard import guard
from alltoallv._calls.linear import Map
from alltoallv._calls.regions import as_bytes
from alltoallv.communicator import Communicator

Order = npt.NDArray[np.int64]


class Permutation(Map[A]):
    """Permutes rows of tensors in host memory: row n of the output is row ``order[n]`` of the input."""

    def __init__(self, adapter: Adapter[A], order: Order) -> None:
        self._adapter, self._order = adapter, order

    def run(self, input: A) -> A:
        adapter, x = self._adapter, self._adapter.contiguous(input)
        out = adapter.new(x.shape, x)
        source, target = (as_bytes(adapter.region(rows)).reshape(len(self._order), -1) for rows in (x, out))
        np.take(source, self._order, axis=0, out=target)
        return out

    def transposed(self) -> Permutation[A]:
        return Permutation(self._adapter, np.argsort(self._order))


class ExpertRows(Exchanges[A, G, H]):
    """A front end's exchanges, also of experts' rows."""

    def global_scatter(
        self,
        x: A,
        local_count: Counts,
        global_count: Counts,
        group: G = None,  # type: ignore[assignment]
    ) -> A:
        """Sends every row to the rank of its expert."""
        comm = self.enter(group)
        if comm is None:
            return None  # type: ignore[return-value]
        x, local, global_ = self._checked("global_scatter", comm, x, local_count, global_count, "local_count")
        arrived = self.all_to_all_v(x, local.sum(1), global_.sum(1), unit="row", group=group)
        return self._transposed(arrived, global_)

    def global_gather(
        self,
        x: A,
        local_count: Counts,
        global_count: Counts,
        group: G = None,  # type: ignore[assignment]
    ) -> A:
        """Reverses `global_scatter`."""
        comm = self.enter(group)
        if comm is None:
            return None  # type: ignore[return-value]
        x, local, global_ = self._checked("global_gather", comm, x, local_count, global_count, "global_count")
        with guard(comm, "all_to_all_v"):
            x = self._transposed(x, global_.T)
        rows: A = self.all_to_all_v(x, global_.sum(1), local.sum(1), unit="row", group=group)
        return rows

    def check_counts(self, counts: dict[str, Counts]) -> None:
        """Raises for counts that the framework does not take."""

    def permuted(self, x: A, order: Order) -> A:
        """Returns the rows in another order: row n of the result is row ``order[n]``."""
        call: Permutation[A] = Permutation(self.adapter, order)
        return self.apply(x, call) if self.tracks(x) else call.run(x)

    def _checked(
        self, operator: str, comm: Communicator, x: A, local_count: Counts, global_count: Counts, rows_of_x: str
    ) -> tuple[A, Matrix, Matrix]:
        """Returns the rows and the counts as [card, expert] matrices, on which all cards agree expert by expert."""
        with guard(comm, operator, self.local):
            self.check_counts({"local_count": local_count, "global_count": global_count})
            x = self.check("x", x)
            shape = tuple(x.shape)
            local, global_ = experts.read(comm.size, shape, local_count, global_count, rows_of_x)
        experts.agree(self.host(comm), operator, local, global_)
        return x, local, global_

    def _transposed(self, x: A, counts: Matrix) -> A:
        order = experts.transposition(counts)
        return x if order is None or 0 in x.shape else self.permuted(x, order)
