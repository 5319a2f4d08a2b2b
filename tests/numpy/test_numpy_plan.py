"""A plan is the exchange of the same counts, at every call, and what it refuses the peers learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from on_ranks import on_both

from alltoallv import Communicator, empty
from alltoallv import numpy as av
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.testing import reference

Launch = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("outside", [False, True])
def test_a_plan_repeats_the_exchange(launch: Launch, size: int, outside: bool) -> None:
    rng = np.random.default_rng(size)
    counts = rng.integers(0, 5, (size, size))
    sdispls = rng.integers(0, 4, (size, size))
    rdispls = np.stack([6 * rng.permutation(size) + 1 for _ in range(size)])
    inputs = [rng.integers(0, 100, (3, 10)).astype(np.int16) for _ in range(size)]
    before = [np.full(6 * size + 2, -1, np.int16) for _ in range(size)]

    def program(comm: Communicator) -> list[Any]:
        r = comm.rank
        plan = av.Plan(counts[r], counts[:, r], np.int16, sdispls=sdispls[r], rdispls=rdispls[r].tolist(), group=comm)
        given = empty(before[r].size, np.int16) if not outside else before[r].copy()
        given[...] = before[r]
        results = []
        for row in inputs[r]:
            x = np.ascontiguousarray(row)
            assert plan(x, given) is given
            results += [given.copy(), plan(x)]
        return results

    results = launch(size, program)
    for step in range(3):
        xs = [x[step] for x in inputs]
        into = reference.all_to_all_v(xs, counts, sdispls, counts.T, rdispls, before)
        for rank in range(size):
            np.testing.assert_array_equal(results[rank][2 * step], into[rank])
            allocated = results[rank][2 * step + 1]
            assert (allocated[into[rank][: allocated.size] == -1] == 0).all()  # gaps
            np.testing.assert_array_equal(
                np.where(into[rank][: allocated.size] == -1, 0, into[rank][: allocated.size]), allocated
            )


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "list": (lambda: [1.0, 2.0], InvalidTensorError, "input is a list"),
    "dtype": (lambda: np.zeros(4), InvalidTensorError, "input has dtype float64, expected float32"),
    "strided": (lambda: np.zeros(8, np.float32)[::2], InvalidTensorError, "input is not contiguous"),
    "long": (lambda: np.zeros(4, np.float32), InvalidParamError, "input has 4 elements, expected 2: give sdispls"),
    "short": (lambda: np.zeros(1, np.float32), InvalidParamError, "input has 1 elements, expected at least 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_refused_input_fails_on_every_rank(launch: Launch, name: str) -> None:
    make, kind, text = BAD[name]

    def program(comm: Communicator) -> str:
        plan = av.Plan([1, 1], [1, 1], group=comm)
        with pytest.raises(kind, match=text):
            plan(make() if comm.rank == 1 else np.zeros(2, np.float32))
        return str(plan(np.full(2, comm.rank, np.float32)).tolist())

    assert launch(2, program) == ["[0.0, 1.0]"] * 2


@on_both(1)
def test_refused_outputs_and_counts(comm: Communicator) -> None:
    plan = av.Plan([2], [2], group=comm)
    x = np.zeros(2, np.float32)
    with pytest.raises(InvalidParamError, match=r"out has 1 elements, expected at least 2.*A2A-1119"):
        plan(x, np.zeros(1, np.float32))
    with pytest.raises(InvalidParamError, match=r"overlap in memory.*A2A-1085"):
        plan(x, x)
    with pytest.raises(InvalidParamError, match=r"send_counts has 2 entries.*A2A-1054"):
        av.Plan([1, 1], [2], group=comm)
    with pytest.raises(InvalidParamError, match=r"timeout.*A2A-1055"):
        plan(x, timeout=-1)


@on_both(2)
def test_plans_that_disagree(comm: Communicator) -> None:
    plan = av.Plan([1, 1 + comm.rank], [1, 1], group=comm)
    with pytest.raises(PeerMismatchError):
        plan(np.zeros(2 + comm.rank, np.float32))


def test_a_plan_that_was_not_made_does_nothing() -> None:
    with pytest.raises(TypeError, match="has not been initialized"):
        av.Plan.__new__(av.Plan)(np.zeros(1, np.float32))
