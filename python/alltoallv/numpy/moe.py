"""Paddle's global_scatter and global_gather on NumPy arrays; `alltoallv._calls.experts` has the counts."""

from __future__ import annotations

from alltoallv._calls.expert_rows import ExpertRows
from alltoallv.numpy.exchange import front_end

_rows = ExpertRows(front_end)
global_scatter = _rows.global_scatter
global_gather = _rows.global_gather
