"""Paddle's global_scatter and global_gather, whose rows travel by a front end's own `all_to_all_v`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from alltoallv._calls import experts
from alltoallv._calls.counts import Counts
from alltoallv._calls.experts import Matrix
from alltoallv._calls.guard import guard
from alltoallv.communicator import Communicator

A = TypeVar("A")  # the framework's tensor


class ExpertRows(ABC, Generic[A]):
    """What a front end adds: its groups, its checks, its exchange."""

    @abstractmethod
    def member(self, group: Any) -> Communicator | None:
        """The group's communicator; None on a rank outside."""

    def host(self, comm: Communicator) -> Communicator:
        """The communicator of these ranks in host memory, where counts travel."""
        return comm

    @abstractmethod
    def check(self, x: Any, counts: dict[str, Counts]) -> A:
        """The rows, checked; refuses counts that the framework does not take."""

    @abstractmethod
    def exchange(self, x: A, sends: Counts, recvs: Counts, comm: Communicator) -> A:
        """`all_to_all_v` by rows."""

    @abstractmethod
    def permuted(self, x: A, order: npt.NDArray[np.int64]) -> A:
        """Row n of the result is row ``order[n]``."""

    def global_scatter(self, x: A, local_count: Counts, global_count: Counts, group: Any = None) -> Any:
        """Sends every row to the card of its expert. Differentiable where `all_to_all_v` is.

        Args:
            x: Rows sorted by card, then by expert: ``local_count[e + j * E]`` rows for expert e of card j.
                Shape ``[n, ...]``.
            local_count, global_count: ``W * E`` integers >= 0, entry ``e + j * E`` standing for expert e and card j:
                rows that go from here to expert e of card j, and rows that come from card j for expert e of this card.
            group: As for `all_to_all_v`.

        Returns:
            Shape ``[sum(global_count), ...]``, rows sorted by this card's expert, then by the card they come from.

        Raises:
            As `all_to_all_v`; PeerMismatchError also when two cards disagree about one expert's rows.
        """
        comm = self.member(group)
        if comm is None:
            return None
        x, local, global_ = self._checked("global_scatter", comm, x, local_count, global_count, "local_count")
        return self._transposed(self.exchange(x, local.sum(1), global_.sum(1), comm), global_)

    def global_gather(self, x: A, local_count: Counts, global_count: Counts, group: Any = None) -> Any:
        """The inverse of `global_scatter`: brings the rows back to the cards that sent them. Differentiable as that.

        Args:
            x: Rows sorted by this card's expert, then by card. Shape ``[sum(global_count), ...]``.
            local_count, global_count, group: Those of `global_scatter`.

        Returns:
            Shape ``[sum(local_count), ...]``, rows sorted by the card they come from, then by that card's expert.

        Raises:
            As `global_scatter`.
        """
        comm = self.member(group)
        if comm is None:
            return None
        x, local, global_ = self._checked("global_gather", comm, x, local_count, global_count, "global_count")
        return self.exchange(self._transposed(x, global_.T), global_.sum(1), local.sum(1), comm)

    def _checked(
        self, operator: str, comm: Communicator, x: A, local_count: Counts, global_count: Counts, rows_of_x: str
    ) -> tuple[A, Matrix, Matrix]:
        """The counts as [card, expert] matrices, on which all cards agree expert by expert."""
        with guard(comm, operator):
            x = self.check(x, {"local_count": local_count, "global_count": global_count})
            shape = tuple(x.shape)  # type: ignore[attr-defined]
            local, global_ = experts.read(comm.size, shape, local_count, global_count, rows_of_x)
        experts.agree(self.host(comm), operator, local, global_)
        return x, local, global_

    def _transposed(self, x: A, counts: Matrix) -> A:
        order = experts.transposition(counts)
        return x if order is None or 0 in x.shape else self.permuted(x, order)  # type: ignore[attr-defined]
