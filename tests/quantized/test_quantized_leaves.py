"""Quantized sums of leaves: every leaf has codes of its own, so that the bits do not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

from alltoallv import Communicator
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError, ValueOverflowError
from alltoallv.testing import Ranks, quantized
from alltoallv.testing.golden import assert_bits_equal
from alltoallv.testing.quantized_formats import FORMATS

LEAVES = 8
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def entries(length: int, dtype: str, seed: int, leaves: int = LEAVES) -> Any:
    """Of many magnitudes, so that sums in another order are other sums; a few are infinite or no numbers."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(leaves, length)) * 2.0 ** rng.integers(-6, 7, (leaves, length))
    if seed % 2:
        made[rng.random(made.shape) < 0.001] = np.inf
        made[rng.random(made.shape) < 0.001] = np.nan
    return made.astype(DTYPES[dtype])


def check(comm: Communicator, made: Any, options: dict[str, Any]) -> None:
    bounds: list[Any] = []
    wanted = quantized.quantized_all_reduce(list(made), tree=True, bounds=bounds, **options)[0]
    own = np.split(made, comm.size)[comm.rank]
    found = av.quantized_all_reduce(own, leaves=len(made), group=comm, **options)
    assert_bits_equal(found, wanted, f"{comm.size} ranks, {options}")
    into = np.empty_like(found)
    output, work = av.quantized_all_reduce(own, leaves=len(made), group=comm, out=into, async_op=True, **options)
    assert work.result() is output is into
    assert_bits_equal(into, wanted)
    told = av.quantized_all_reduce(own, leaves=len(made), group=comm, bound=True, **options)
    assert_bits_equal(told.output, wanted)
    assert_bits_equal(told.bound, bounds[0])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(FORMATS)), st.sampled_from([0, 5, 700, 5000]), st.sampled_from(sorted(DTYPES)),
    st.sampled_from(["full", "quantized"]), st.sampled_from(["sum", "avg"]), st.integers(0, 999),
)  # fmt: skip
def test_the_bits_do_not_depend_on_the_number_of_ranks(
    ranks: Ranks, format: str, length: int, dtype: str, gather: str, op: str, seed: int
) -> None:
    made, options = entries(length, dtype, seed), {"format": format, "gather": gather, "op": op}
    for size in (1, 2, 4, 8):
        ranks(size, threads=True)(check, made, options)


@pytest.mark.parametrize(("size", "leaves"), [(1, 1), (1, 7), (2, 10), (3, 9), (4, 8)])
@on_ranks()
def test_on_processes(comm: Communicator, leaves: int) -> None:
    """In mailboxes and in pieces; with groups that are cut."""
    for length, group_size, gather in ((60, 32, "full"), (90_000, 128, "quantized"), (300_000, 40_000, "quantized")):
        options = {"format": "int8", "group_size": group_size, "gather": gather}
        check(comm, entries(length, "float32", 2, leaves), options)


@on_ranks(2)
def test_ranks_agree_on_the_leaves(comm: Communicator) -> None:
    x, first = np.ones((4, 3), np.float32), comm.rank == 0
    with pytest.raises(PeerMismatchError, match=r"rank 0 has leaves 8, rank 1 has leaves 4.*A2A-3009"):
        av.quantized_all_reduce(x[: 4 if first else 2], leaves=8 if first else 4, group=comm)
    with pytest.raises(PeerMismatchError, match=r"rank 0 has leaves None, rank 1 has leaves 8.*A2A-3009"):
        av.quantized_all_reduce(x[0] if first else x, leaves=None if first else 8, group=comm)
    assert av.quantized_all_reduce(x, leaves=8, group=comm).tolist() == [8.0] * 3


@on_ranks(2)
def test_wrong_arguments(comm: Communicator) -> None:
    x = np.ones((4, 3), np.float32)
    for leaves in (0, 3, True, 2.0, "8"):
        with pytest.raises(InvalidParamError, match=r"leaves is .*, expected a multiple of the 2 ranks of.*A2A-1045"):
            av.quantized_all_reduce(x, leaves=leaves, group=comm)  # type: ignore[arg-type]
    with pytest.raises(InvalidTensorError, match=r"input has shape \(4, 3\), expected \(2, \.\.\.\).*A2A-2023"):
        av.quantized_all_reduce(x, leaves=4, group=comm)
    with pytest.raises(InvalidParamError, match=r"leaves is 8, expected an all-reduce of the dynamic mode.*A2A-1074"):
        av.quantized_all_reduce(x.astype(np.int8), scale=1.0, leaves=8, group=comm)
    with pytest.raises(
        InvalidParamError,
        match=r"leaves is 8, expected an all-reduce of the dynamic mode, without error feedback.*A2A-1074",
    ):
        av.quantized_all_reduce(x, leaves=8, error_feedback=av.ErrorFeedback(), group=comm)
    with pytest.raises(
        InvalidParamError, match=r"max_error is given with leaves, expected a call without it.*A2A-1175"
    ):
        av.quantized_all_reduce(x, leaves=8, max_error=0.1, group=comm)
    with pytest.raises(InvalidTensorError, match=r"out has shape \(4, 3\), expected \(3,\).*A2A-2028"):
        av.quantized_all_reduce(x, leaves=8, out=x.copy(), group=comm)
    with pytest.raises(InvalidParamError, match=r"overlap.*A2A-1085"):
        av.quantized_all_reduce(x, leaves=8, out=x[0], group=comm)
    with pytest.raises(ValueOverflowError):
        av.quantized_all_reduce((x * 6e4).astype(np.float16), leaves=8, overflow="raise", group=comm)


def layer(comm: Communicator, x: Any, w: Any, options: dict[str, Any]) -> bytes:
    own = [np.ascontiguousarray(np.split(each, comm.size, -1)[comm.rank]) for each in (x, w)]
    made: bytes = av.quantized_linear_all_reduce(*own, leaves=LEAVES, group=comm, **options).tobytes()
    return made


def test_a_layer_has_the_bits_of_one_rank(ranks: Ranks) -> None:
    """Also in chunks, and with groups of a token or of all."""
    x, w = (np.random.default_rng(i).normal(size=(n, 64)).astype(np.float32) for i, n in enumerate((96, 40)))
    for options in ({}, {"chunks": 3, "bits": 4}, {"group_size": "token"}, {"group_size": "tensor", "op": "avg"}):
        one = ranks(1, threads=True)(layer, x, w, options)[0]
        exact = x @ w.T / (LEAVES if "op" in options else 1)
        assert np.abs(np.frombuffer(one, np.float32).reshape(96, 40) - exact).max() < 0.2 * np.abs(exact).max()
        for size in (2, 4, 8):
            assert ranks(size, threads=True)(layer, x, w, options) == [one] * size
