"""The column of torch.distributed on backend ``alltoallv``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from adapters.torch_column import DIFFERENT, NO_LISTS, ROOTS, SAME_DTYPES, TorchColumn
from right import NOT_OF_TORCH


class C10dColumn(TorchColumn):
    name, module, package = "c10d", "torch.distributed", "torch"
    prefix = "{function} on rank {rank}: "
    lacks = {
        **TorchColumn.lacks,
        **dict.fromkeys(NOT_OF_TORCH, "not of torch.distributed; alltoallv.torch's takes such a group"),
        "timeout": "torch.distributed's signatures have none; the group's counts",
        "counts as tensor": "torch.distributed takes lists",
        "counts as array": "torch.distributed takes lists",
        "rows of another shape are refused": "torch's engines count the rows of either tensor",
        "a Communicator as group": "torch.distributed takes its own",
        "outputs must be contiguous": "torch's engines also take others",
        "gradients": "torch.distributed has none",
    }
    own = {
        **dict.fromkeys(NO_LISTS, ("TypeError", "Invalid function argument. Expected parameter ...")),
        **dict.fromkeys(SAME_DTYPES, ("ValueError", f"{DIFFERENT}Found torch.float32 and  torch.int32")),
        **ROOTS,
        "all_to_all_single: output: dtypes": ("ValueError", f"{DIFFERENT}Found torch.int32 and  torch.float32"),
        "all_to_all_single: ranks disagree about splits": (
            "PeerMismatchError",
            "rank 2 sends 6 elements to rank 0, which expects 4",
        ),
    }
    unheard = frozenset((*NO_LISTS, *SAME_DTYPES))  # torch's wrappers find them
    cases = []

    @contextlib.contextmanager
    def group(self, communicator: Any) -> Iterator[Any]:
        import torch
        import torch.distributed as dist

        import alltoallv.torch as at  # noqa: F401 - brings the backend

        torch.set_num_threads(1)
        store = dist.FileStore(os.environ["MATRIX_STORE"], communicator.size)
        place = {"rank": communicator.rank, "world_size": communicator.size}
        dist.init_process_group("alltoallv", store=store, timeout=timedelta(seconds=20), **place)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()
