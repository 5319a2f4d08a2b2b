"""The operator itself, and its use for experts; see `alltoallv.mindspore` for what all functions have in common."""

from __future__ import annotations

from alltoallv.mindspore.front_end import front_end

all_to_all_v = front_end.all_to_all_v
exchange_counts = front_end.exchange_counts
all_to_all_single = front_end.all_to_all_single
all_gather_into_tensor = front_end.all_gather_into_tensor
global_scatter, global_gather = front_end.global_scatter, front_end.global_gather
