"""ragged_all_to_all between process ranks: against the definition in NumPy, jitted, and its gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.jax import ragged_all_to_all
from alltoallv.testing import Ranks


def problem(size: int, seed: int, width: int) -> tuple[Any, ...]:
    """Of all ranks: operands, outputs, and the four tables, [rank, peer] each; some pairs send nothing."""
    rng = np.random.default_rng(seed)
    sent = rng.integers(0, 5, (size, size))
    starts = sent.cumsum(1) - sent + rng.integers(0, 2, (size, 1))  # gaps, and places in another order than ranks
    order = rng.permutation(size)
    places = np.empty_like(sent)
    places[order] = sent[order].cumsum(0) - sent[order] + 1
    operands = rng.normal(size=(size, 5 * size + 2, width)).astype(np.float32)
    outputs = rng.normal(size=(size, 5 * size + 2, width)).astype(np.float32)
    return operands, outputs, starts, sent, places, sent.T.copy()


def expected(rank: int, operands: Any, outputs: Any, starts: Any, sent: Any, places: Any, _: Any) -> Any:
    out = outputs[rank].copy()
    for peer, n in enumerate(sent[:, rank]):
        out[places[peer, rank] :][:n] = operands[peer][starts[peer, rank] :][:n]
    return out


def check(comm: Communicator, width: int, dtype: str) -> None:
    every = problem(comm.size, 3, width)
    operands, outputs = (x.astype(jnp.dtype(dtype)) for x in every[:2])
    mine = [x[comm.rank] for x in (operands, outputs, *every[2:])]
    want = expected(comm.rank, operands, outputs, *every[2:])

    def call(x: Any, y: Any, *tables: Any) -> Any:
        return ragged_all_to_all(x, y, *tables, group=comm)

    for run in (call, jax.jit(call), jax.jit(lambda *x: call(x[0] * 1, call(*x), *x[2:]))):
        assert np.array_equal(np.asarray(run(*mine)), want)
    if dtype != "float32":
        return

    weights = np.random.default_rng(9).normal(size=outputs.shape).astype(np.float32)
    loss = jax.jit(jax.grad(lambda x, y: (call(x, y, *mine[2:]) * weights[comm.rank]).sum(), (0, 1)))
    dx, dy = loss(*mine[:2])
    want_dx, want_dy = np.zeros_like(operands[0]), weights[comm.rank].copy()
    for peer in range(comm.size):
        starts, sent, places = (table[comm.rank, peer] for table in every[2:5])
        want_dx[starts : starts + sent] += weights[peer][places : places + sent]
        want_dy[every[4][peer, comm.rank] :][: every[3][peer, comm.rank]] = 0
    assert np.array_equal(np.asarray(dx), want_dx)
    assert np.array_equal(np.asarray(dy), want_dy)


@pytest.mark.parametrize(("width", "dtype"), [(3, "float32"), (2, "bfloat16"), (40_000, "float32")])
@pytest.mark.parametrize("size", [2, 4])
def test_ragged_all_to_all(ranks: Ranks, size: int, width: int, dtype: str) -> None:
    ranks(size)(check, width, dtype)


def wrong(comm: Communicator) -> None:
    x, table = jnp.zeros((4, 2)), jnp.ones(comm.size, int)
    with pytest.raises(InvalidTensorError, match="output is float32"):
        ragged_all_to_all(x, x[:, :1], table, table, table, table, group=comm)
    with pytest.raises(InvalidParamError, match=r"send_sizes is int32.*expected 2 integers"):
        ragged_all_to_all(x, x, table, table[:1], table, table, group=comm)
    with pytest.raises(InvalidParamError, match="group is a str, expected a Communicator or None"):
        ragged_all_to_all(x, x, table, table, table, table, group="world")
    y = jnp.zeros((4, 2), jnp.bfloat16 if comm.rank == 0 else jnp.float32)
    peers = jax.errors.JaxRuntimeError, "failed on rank 0: output is bfloat16"
    for run in (partial(ragged_all_to_all, group=comm), jax.jit(partial(ragged_all_to_all, group=comm))):
        earlier = [run(x + i, x, *[table * 0] * 4) for i in range(3)]  # they may still run when this rank refuses
        kind, text = (InvalidTensorError, "^output is bfloat16") if comm.rank == 0 else peers
        with pytest.raises(kind, match=text):
            jax.block_until_ready(run(x, y, *[table * 0] * 4))
        jax.block_until_ready(earlier)
        assert jax.block_until_ready(run(x, x, *[table * 0] * 4)).shape == (4, 2)
    sizes = table * 0 if comm.rank else table * 9
    text = r"input_offsets\[0\] \+ send_sizes\[0\] is 1 \+ 9, expected at most 4, the rows of the input"
    with pytest.raises(jax.errors.JaxRuntimeError, match=("failed on rank 0: " if comm.rank else "") + text):
        jax.block_until_ready(ragged_all_to_all(x, x, table, sizes, table, table * 0, group=comm))


def test_wrong_arguments(ranks: Ranks) -> None:
    ranks(2)(wrong)
