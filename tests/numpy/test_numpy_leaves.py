"""Sums of leaves have the bits of one tree, whatever the number of ranks that hold them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

import alltoallv
from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import Ranks, reference
from alltoallv.testing.golden import assert_bits_equal

Array = np.ndarray[Any, Any]
DTYPES: dict[str, Any] = {
    "float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8, "int64": np.int64, "uint16": np.uint16, "bool": np.bool_, "complex64": np.complex64,
}  # fmt: skip


def entries(leaves: int, shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Of many magnitudes, so that sums in another order are other sums; a few are infinite or no numbers."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(leaves, *shape)) * 2.0 ** rng.integers(-6, 7, (leaves, *shape))
    if dtype in ("float32", "float64", "float16", "bfloat16"):
        made[rng.random(made.shape) < 0.001] = np.inf
        made[rng.random(made.shape) < 0.001] = np.nan
    elif dtype != "complex64":
        made = made.clip(-100, 100) if dtype != "uint16" else abs(made)
    return made.astype(DTYPES[dtype])


def check(comm: Communicator, leaves: int, shape: tuple[int, ...], dtype: str, seed: int, op: str) -> None:
    everything = entries(leaves, shape, dtype, seed)
    shares = np.split(everything, comm.size)
    x = shares[comm.rank]
    if seed % 2:  # where peers read it in place
        x = alltoallv.empty(x.shape, x.dtype)
        x[...] = shares[comm.rank]
    found = av.all_reduce(x, op, leaves=leaves, group=comm)
    assert_bits_equal(found, reference.all_reduce_leaves([everything], op)[0])
    into = np.full_like(found, 1)
    assert av.all_reduce(x, op, leaves=leaves, out=into, group=comm, async_op=True)[1].result() is into
    assert_bits_equal(into, found)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([8, 16, 24, 40]), st.sampled_from([(), (0,), (3, 5), (700,), (41, 500)]),
    st.sampled_from(sorted(DTYPES)), st.integers(0, 999), st.sampled_from(["sum", "avg", "prod", "min", "max", "bxor"]),
)  # fmt: skip
def test_the_bits_do_not_depend_on_the_number_of_ranks(
    ranks: Ranks, leaves: int, shape: tuple[int, ...], dtype: str, seed: int, op: str
) -> None:
    defined = {"avg": "float" in dtype or "complex" in dtype, "bxor": "int" in dtype or dtype == "bool"}
    if ("complex" in dtype and op not in ("sum", "avg")) or not defined.get(op, True):
        op = "sum"
    for size in (1, 2, 4, 8):
        ranks(size, threads=True)(check, leaves, shape, dtype, seed, op)


@pytest.mark.parametrize(("size", "leaves"), [(1, 1), (1, 7), (2, 2), (2, 10), (3, 9), (4, 4)])
@pytest.mark.parametrize("length", [5, 60_000, 600_000])
@on_ranks()
def test_on_processes(comm: Communicator, leaves: int, length: int) -> None:
    """In mailboxes, through a ring, and in pieces; from private memory and from the arena."""
    for seed in (0, 1):
        check(comm, leaves, (length,), "float16" if seed else "float32", seed, "sum")


@on_ranks(2)
def test_ranks_agree_on_the_leaves(comm: Communicator) -> None:
    x = np.ones((4, 3), np.float32)
    with pytest.raises(PeerMismatchError, match=r"rank 0 has leaves 8, rank 1 has leaves 4.*A2A-3009"):
        av.all_reduce(x[: 4 if comm.rank == 0 else 2], leaves=8 if comm.rank == 0 else 4, group=comm)
    with pytest.raises(PeerMismatchError, match=r"rank 0 has leaves None, rank 1 has leaves 2.*A2A-3009"):
        av.all_reduce(x[:1], leaves=None if comm.rank == 0 else 2, group=comm)
    with pytest.raises(PeerMismatchError, match=r"rank 0 .*float32.*rank 1 .*float64.*A2A-3009"):
        av.all_reduce(x.astype(np.float32 if comm.rank == 0 else np.float64), leaves=8, group=comm)
    with pytest.raises(PeerMismatchError, match=r"rank 0 has shape \(4, 3\), rank 1 has shape \(4, 3, 1\).*A2A-3009"):
        av.all_reduce(x if comm.rank == 0 else x[..., None], leaves=8, group=comm)
    assert av.all_reduce(x, leaves=8, group=comm).tolist() == [8.0] * 3


@on_ranks(2)
def test_wrong_leaves(comm: Communicator) -> None:
    x = np.ones((4, 3), np.float32)
    for leaves in (0, 3, -8, True, 2.0, "8", 8192, 2**70):
        with pytest.raises(InvalidParamError, match=r"leaves is .*, expected a multiple of the 2 ranks of.*A2A-1045"):
            av.all_reduce(x, leaves=leaves, group=comm)  # type: ignore[arg-type]
    with pytest.raises(InvalidTensorError, match=r"input has shape \(4, 3\), expected \(2, \.\.\.\).*A2A-2023"):
        av.all_reduce(x, leaves=4, group=comm)
    with pytest.raises(InvalidTensorError, match=r"input has shape \(\), expected \(1, \.\.\.\).*A2A-2023"):
        av.all_reduce(np.float32(1), leaves=2, group=comm)
    with pytest.raises(InvalidTensorError, match=r"out has 12 elements, expected 3.*A2A-2024"):
        av.all_reduce(x, leaves=8, out=x.copy(), group=comm)
    with pytest.raises(InvalidParamError, match=r"overlap.*A2A-1085"):
        av.all_reduce(x, leaves=8, out=x[0], group=comm)
    with pytest.raises(InvalidParamError, match=r"order is 'rank' and leaves is 8, expected one of them.*A2A-1150"):
        av.all_reduce(x, leaves=8, order="rank", group=comm)
