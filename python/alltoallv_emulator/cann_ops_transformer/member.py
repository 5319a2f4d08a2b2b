"""This rank in a group, as CANN's buffers know it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Member"]


class Member:
    """This rank in a group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank_id, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        backend: Any = group._get_backend(torch.device("npu"))
        self.group_name: str = backend.get_hccl_comm_name(self.rank_id)
