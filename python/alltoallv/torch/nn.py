"""The modules `AllToAllV`, and `MoEDispatcher` and `StaticMoEDispatcher` for experts that live on different ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from alltoallv._calls.counts import Counts, Unit
from alltoallv.errors import InvalidParamError
from alltoallv.torch.api.dispatcher import DispatchState, MoEDispatcher, StaticMoEDispatcher, StaticState
from alltoallv.torch.api.exchange import all_to_all_v
from alltoallv.torch.eager.group import Group

__all__ = ["AllToAllV", "DispatchState", "MoEDispatcher", "StaticMoEDispatcher", "StaticState"]


class AllToAllV(torch.nn.Module):
    """Calls `alltoallv.torch.all_to_all_v` as a module, with its group and unit fixed.

    Args:
        group: A ProcessGroup, a `Communicator`, or None for the default group.
        unit: What counts and displacements count: ``"row"`` of dimension 0, or ``"element"``.
    """

    def __init__(self, group: Group = None, *, unit: Unit = "row") -> None:
        super().__init__()
        if unit not in ("element", "row"):
            raise InvalidParamError(f"unit is {unit!r}, expected 'element' or 'row'", id=1443)
        self.group = group
        self.unit: Unit = unit

    def forward(
        self,
        input: Tensor,
        send_counts: Counts,
        recv_counts: Counts | None = None,
        *,
        sdispls: Counts | None = None,
        rdispls: Counts | None = None,
    ) -> Tensor:
        """Returns the output of the exchange; differentiable. For arguments, shapes and errors see `all_to_all_v`."""
        return all_to_all_v(
            input, send_counts, recv_counts, sdispls=sdispls, rdispls=rdispls, unit=self.unit, group=self.group
        )

    def extra_repr(self) -> str:
        return f"unit={self.unit!r}"
