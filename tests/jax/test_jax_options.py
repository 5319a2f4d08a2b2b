"""What differs between ranks is an error of both, also in a compiled function."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from on_ranks import on_ranks

import alltoallv.jax
from alltoallv import Communicator

# What ranks 0 and 1 give, and what the error says.
TABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"dtype": np.float32}, {"dtype": np.int32}, "rank 0 has dtype float32, rank 1 has dtype int32"),
    ({"row": (3,)}, {"row": (4,)}, "rank 0 has elements per row: 3, rank 1 has elements per row: 4"),
    ({"sends": [1, 2]}, {}, "rank 0 sends 2 elements to rank 1, which expects 1"),
]


def exchange(comm: Communicator, compiled: bool, dtype: Any = np.float32, row: Any = (), sends: Any = (1, 1)) -> None:
    operand, output = (np.zeros((rows, *row), dtype) for rows in (3, 2))
    ones, starts = np.ones(2, np.int32), np.arange(2, dtype=np.int32)

    def call(x: Any, y: Any) -> Any:
        return alltoallv.jax.ragged_all_to_all(x, y, starts, np.array(sends), ones * comm.rank, ones, group=comm)

    jax.block_until_ready((jax.jit(call) if compiled else call)(operand, output))


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_what_differs(comm: Communicator, compiled: bool) -> None:
    for first, second, text in TABLE:
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            exchange(comm, compiled, **(second if comm.rank else first))
        assert text in str(caught.value), str(caught.value)[-300:]
    exchange(comm, compiled)
