"""One case of an operator of torch_npu's that communicates: arguments of all ranks, a reference of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from operator_case import HALVES, called, compare_all, listed, to_numpy, to_torch

if TYPE_CHECKING:
    import torch

Rank = dict[str, Any]
LOCAL = 2  # experts of a rank


@dataclasses.dataclass(frozen=True)
class Fused:
    """As `operator_case.Case`, of several ranks: ``inputs`` and ``reference`` have the tensors of all, in order."""

    operator: str
    inputs: Callable[[np.random.Generator, int], list[Rank]]
    reference: Callable[[list[Rank]], list[Any]]
    dtypes: Sequence[str] = HALVES
    exact: bool = False

    def call(self, device: torch.device, group: str, rank: int, size: int) -> None:
        """Fails unless this rank's results are the reference's."""
        for dtype in self.dtypes:
            arguments = self.inputs(np.random.default_rng(5), size)
            given = [{name: to_torch(value, dtype, device) for name, value in one.items()} for one in arguments]
            expected = self.reference([{name: to_numpy(value) for name, value in one.items()} for one in given])
            results = listed(called(self.operator, device)(**given[rank], **place(self.operator, group, rank, size)))
            compare_all(f"{self.operator}, {dtype}, rank {rank} of {size}", results, expected[rank], self.exact)


def place(operator: str, group: str, rank: int, size: int) -> Rank:
    """The arguments that name who is who."""
    if "moe_distribute" in operator:
        return {"group_ep": group, "ep_world_size": size, "ep_rank_id": rank, "moe_expert_num": LOCAL * size}
    if "gmm" in operator:
        return {"hcom": group, "ep_world_size": size}
    return {"hcom": group} if operator == "npu_mm_all_reduce_base" else {"hcom": group, "world_size": size}
