"""ragged_all_to_all takes each argument of jax.lax's, or refuses it by name: ranks are processes, not an axis."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from documented_arguments import Library, Row
from on_ranks import on_ranks

import alltoallv.jax
from alltoallv import Communicator


@on_ranks(2)
def test_every_argument(comm: Communicator) -> None:
    rank = comm.rank
    given: dict[str, Any] = {
        "operand": np.arange(4, dtype=np.float32) + 10 * rank,
        "output": np.full(5, -1, np.float32),
        "input_offsets": [1, 2] if rank == 0 else [0, 3],
        "send_sizes": [1, 2] if rank == 0 else [3, 1],
        "output_offsets": [4, 0] if rank == 0 else [0, 2],
        "recv_sizes": [1, 3] if rank == 0 else [2, 1],
    }
    want = [10.0, 11.0, 12.0, -1.0, 1.0] if rank == 0 else [2.0, 3.0, 13.0, -1.0, -1.0]
    rows = [Row("ragged_all_to_all", {**given, "group": comm}, want, lambda made: np.asarray(made).tolist())]
    for name, value in (("axis_name", "x"), ("axis_index_groups", [[0, 1]])):
        rows.append(Row("ragged_all_to_all", {**given, name: value}, TypeError, refuses=name))
    Library("jax.lax", jax.lax, alltoallv.jax, rows).check()
